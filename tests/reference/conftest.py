"""Runs each test through every implementation that this machine has, called directly."""

import pytest

import linnet.kernels as kernels

_SLOTS = {
    "decode": "decode_attention",
    "prefill": "prefill_attention",
    "fake_quant": "fake_quant_fp8",
    "sampler": "sample",
    "deform": "ms_deform_attn",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, slot in _SLOTS.items():
        if fixture in metafunc.fixturenames:
            here = [each for each in kernels.implementations(slot) if each.available("cpu") is None]
            metafunc.parametrize(fixture, [pytest.param(_Direct(i), id=i.name) for i in here])


class _Direct:
    """An implementation; inputs that it refuses skip the test."""

    def __init__(self, implementation: kernels.Implementation) -> None:
        self.implementation = implementation

    def __call__(self, *args, **kwargs):
        refusal = self.implementation.refusal(*args, **kwargs)
        if refusal is not None:
            pytest.skip(f"{self.implementation.name} refuses: {refusal.reason}")
        return self.implementation(*args, **kwargs)
