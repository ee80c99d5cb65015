"""Runs compute-sanitizer over the parity cases of the Triton kernels, on a CUDA device.

    python tests/parity/sanitize.py FILE

FILE gets a line for each tool, which `linnet parity-report --sanitizer FILE` puts on its page:
memcheck looks for accesses outside of what was allocated, racecheck for hazards between threads in
shared memory. Each case runs forward, and backward where there is one; what comes out is the parity
suite's business. Ends with status 1 if a tool found something, or a run did not end well.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from linnet.kernels.slot import slots
from linnet.testing.collection import registered, suite_of
from linnet.testing.trial import Trial, as_tuple

TOOLS = ("memcheck", "racecheck")
SLOTS = [name for name, slot in slots.items() if any(row.name == "triton" for row in slot.builtins)]
AT_ONCE = 12
"""Processes side by side: each waits for its compiler and its host most of the time."""


def run(name: str) -> int:
    """Runs the slot's Triton implementation on its cases; how many it took."""
    slot, device, count = slots[name], torch.device("cuda", 0), 0
    suite = suite_of(slot)
    (implementation,) = (each for each in registered(slot) if each.name == "triton")
    for case in suite.cases:
        for dtype in () if case.slow else case.dtypes:
            trial = Trial(slot, suite, implementation, case, dtype, device)
            built = case.build(device, dtype, 0)
            if implementation.refusal(*built.args, **built.kwargs) is not None:
                continue
            count += 1
            if implementation.backward and case.gradients and suite.differentiable:
                leaves = trial.leaves(built)
                results = [each for each in as_tuple(trial.run(leaves)) if each.requires_grad]
                given = [trial.named(leaves)[each] for each in trial.differentiated(leaves)]
                torch.autograd.grad(results, given, results, allow_unused=True)
            else:
                trial.run(built)
    torch.cuda.synchronize()
    return count


def checked(tool: str, slot: str) -> tuple[int, str]:
    """How many cases ran under a tool, and what it found; "" where it found nothing."""
    found = subprocess.run(
        ["compute-sanitizer", "--tool", tool, sys.executable, __file__, "--slot", slot],
        capture_output=True,
        text=True,
        check=False,
        # Each tensor its own allocation, or an access beyond it would fall into a neighbour's.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    count = re.search(r"^(\d+) cases$", found.stdout, re.MULTILINE)
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: .*", found.stdout)
    clean = summary is not None and re.search(r": 0 (errors|hazards)", summary[0]) is not None
    if count is None or found.returncode or not clean:
        return 0, f"{slot}: {summary[0] if summary else (found.stdout + found.stderr)[-500:]}"
    return int(count[1]), ""


def main(file: Path) -> int:
    """Runs the tools and writes what they found; the exit status."""
    report: dict[str, str] = {}
    problems: list[str] = []
    for tool in TOOLS:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = list(pool.map(lambda slot, tool=tool: checked(tool, slot), SLOTS))
        found = [problem for _, problem in results if problem]
        count = sum(cases for cases, _ in results)
        report[tool] = "; ".join(found) or f"nothing found in {count} cases of {len(SLOTS)} slots"
        problems += found
        print(f"{tool}: {report[tool]}", flush=True)
        file.write_text(json.dumps(report, indent=2) + "\n")
    return int(bool(problems))


if __name__ == "__main__":
    if sys.argv[1] == "--slot":
        print(f"{run(sys.argv[2])} cases")
        sys.exit(0)
    sys.exit(main(Path(sys.argv[1])))
