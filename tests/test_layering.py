"""The package's shape: imports point one way, and importing linnet stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "linnet"

# A name may import itself and the rows above its own, never a neighbour or a row below.
LAYERS = (
    ("atomic", "env"),
    ("reference",),
    ("kernels",),
    ("models", "quant"),
    ("testing", "nest", "backends"),
    ("torch",),
    ("serve",),
    ("exports",),
    ("hf", "gguf", "onnx", "triton", "cli"),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

OPTIONAL = {
    "cuda",
    "cutlass",
    "flash_attn",
    "flashinfer",
    "gguf",
    "huggingface_hub",
    "jinja2",
    "kernels",
    "nvmath",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "timm",
    "tokenizers",
    "transformers",
    "triton",
    "xformers",
}


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """The parts of linnet (the name after `linnet.`) that a file imports, wherever in it."""
    package = dotted(path) if path.name == "__init__.py" else dotted(path).rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.rsplit(".", node.level - 1)[0]
                base = f"{above}.{base}".rstrip(".")
            names |= {f"{base}.{alias.name}" for alias in node.names}
    parts = {name.split(".")[1] for name in names if name.startswith("linnet.")}
    return parts - {"__version__"}


def in_new_process(code: str, *arguments: str) -> list[str]:
    """What `code` prints, a line each, in a Python of its own."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return result.stdout.split()


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_point_one_way(path: Path) -> None:
    own = dotted(path).split(".")[1]
    assert own in RANK, f"{own} has no place in LAYERS"
    wrong = {part for part in imported(path) if part != own and RANK[part] >= RANK[own]}
    assert not wrong, f"{dotted(path)} imports {sorted(wrong)}, which stand beside or above it"


def test_import_linnet_imports_no_torch() -> None:
    loaded = in_new_process("import sys, linnet; print(*sys.modules)")
    assert not ({"torch", "numpy"} | OPTIONAL) & set(loaded)


def test_linnet_binds_no_name_of_a_library() -> None:
    bound = in_new_process("import linnet; print(*vars(linnet))")
    assert not {"torch", "triton", "gguf", "onnx"} & set(bound)


def test_import_of_the_registry_loads_no_optional_package() -> None:
    by_torch = in_new_process("import sys, torch; print(*sys.modules)")
    by_linnet = in_new_process("import sys, linnet.kernels; print(*sys.modules)")
    assert not OPTIONAL & (set(by_linnet) - set(by_torch))


def test_no_folder_of_tests_shadows_a_package() -> None:
    folders = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert not folders & ({"torch", "linnet"} | OPTIONAL)


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("name", ["utils", "helpers", "common"])
def test_no_module_is_a_drawer_for_anything(name: str) -> None:
    assert not [path for folder in ("src", "tests") for path in (ROOT / folder).rglob(f"{name}*")]
