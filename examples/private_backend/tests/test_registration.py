"""The backend's own tests. Its numbers are checked by linnet's suite:

pytest --pyargs linnet.testing --provider private
"""

import torch

from linnet import kernels


def test_the_backend_is_found_by_its_entry_point() -> None:
    assert kernels.active("cpu")["silu_mul"] == "private"


def test_half_precision_goes_to_another_implementation() -> None:
    half = torch.ones(2, 8, dtype=torch.float16)
    assert kernels.explain("silu_mul", half, half).chosen != "private"
