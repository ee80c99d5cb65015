"""When the reference reads sizes and values, and when it must not."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from linnet import reference
from linnet.reference.checks import data_known, recording, sizes_known


def call(device=None):
    with torch.device(device or "cpu"):
        cache = torch.zeros(2, 6, 2, 16)
        return torch.zeros(2, 8, 16), cache, cache, torch.tensor([3, 6], dtype=torch.int32)


def test_values_are_read_of_plain_cpu_tensors():
    assert data_known(torch.zeros(2), None, torch.nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize("kind", ["meta", "fake", "subclass"])
def test_values_are_not_read_of(kind):
    if kind == "meta":
        tensor = torch.zeros(2, device="meta")
    elif kind == "fake":
        tensor = FakeTensorMode().from_tensor(torch.zeros(2))
    else:
        tensor = torch.zeros(2).as_subclass(type("Mine", (torch.Tensor,), {}))
    assert not data_known(tensor)
    assert not data_known(torch.zeros(2), tensor)


def test_the_reference_runs_on_fake_and_meta_tensors():
    with FakeTensorMode():
        assert reference.decode_attention(*call()).shape == (2, 8, 16)
    query, key, value, lengths = call("meta")
    assert reference.decode_attention(query, key, value, lengths).shape == (2, 8, 16)
    starts = torch.zeros(3, dtype=torch.int32, device="meta")
    assert reference.prefill_attention(query, key, value, starts, lengths).shape == (2, 8, 16)


def test_neither_sizes_nor_values_are_read_while_tracing():
    seen = []

    def record(x):
        seen.append((sizes_known(), recording(), data_known(x)))
        return x + 1

    torch.jit.trace(record, torch.zeros(2), check_trace=False)
    assert seen[0] == (False, True, False)


def test_values_are_not_read_while_compiling():
    def record(x):
        return x + (1 if data_known(x) else 2)

    torch._dynamo.reset()
    compiled = torch.compile(record, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(2)).tolist() == [2.0, 2.0]


def test_a_length_out_of_range_is_read_past_by_a_compiled_graph_without_a_crash():
    query, key, value, _ = call()
    torch._dynamo.reset()
    compiled = torch.compile(reference.decode_attention, fullgraph=True, backend="aot_eager")
    out = compiled(query, key, value, torch.tensor([3, 60], dtype=torch.int32))
    assert bool(out.isfinite().all())


def test_autocast_lets_linear_mix_dtypes_as_torch_does():
    x, weight = torch.randn(2, 8), torch.randn(3, 8).bfloat16()
    with pytest.raises(TypeError, match="the dtypes differ"):
        reference.linear(x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert reference.linear(x, weight).dtype == torch.bfloat16


def test_nothing_of_the_reference_imports_the_kernels():
    import pathlib
    import subprocess
    import sys

    program = (
        "import sys, linnet.reference; "
        "sys.exit(any(name.startswith('linnet.kernels') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=pathlib.Path.home()).returncode == 0
