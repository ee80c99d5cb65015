"""Recorded graphs of the reference hold for other sizes: nothing of the example is frozen in."""

import io
import warnings

import pytest
import torch

from linnet import reference

AUTO = torch.export.Dim.AUTO
LEVELS = [(3, 5), (2, 2)]


def decode(batch, length):
    query, key, value = (
        torch.randn(batch, 6, 8),
        *(torch.randn(batch, length, 2, 8) for _ in range(2)),
    )
    lengths = torch.randint(0, length + 1, (batch,), dtype=torch.int32)
    for row, used in enumerate(lengths.tolist()):
        key[row, used:] = value[row, used:] = float("nan")
    return query, key, value, lengths


def paged(batch, pages):
    query, pools = torch.randn(batch, 6, 8), [torch.randn(7, 4, 2, 8) for _ in range(2)]
    lengths = torch.randint(0, pages * 4 + 1, (batch,), dtype=torch.int32)
    return query, *pools, lengths, torch.randint(0, 7, (batch, pages), dtype=torch.int32)


def prefill(prompts, length):
    counts = torch.randint(1, length + 1, (prompts,))
    before = torch.stack([torch.randint(0, length - int(c) + 1, ()) for c in counts])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    caches = [torch.randn(prompts, length, 2, 8) for _ in range(2)]
    return torch.randn(int(counts.sum()), 6, 8), *caches, starts, (counts + before).int()


def write(tokens, length):
    new = [torch.randn(tokens, 2, 8) for _ in range(2)]
    caches = [torch.randn(5, length, 2, 8) for _ in range(2)]
    return *new, *caches, torch.randperm(5 * length)[:tokens]


def written(key, value, key_cache, value_cache, places):
    reference.cache_write(key, value, key_cache, value_cache, places)
    return key_cache + 0, value_cache + 0


def deform(batch, queries):
    points = (batch, queries, 2, 2, 3)
    return torch.randn(batch, 19, 2, 8), torch.rand(*points, 2), torch.rand(points)


def deform_tensor(batch, queries):
    value, points, weights = deform(batch, queries)
    return value, torch.tensor(LEVELS), points, weights


def turned(angles):
    def build(tokens, _):
        heads = [torch.randn(tokens, count, 8) for count in (6, 2)]
        return *heads, torch.randn(tokens, angles), torch.randn(tokens, angles)

    return build


def logits(rows, vocabulary):
    return torch.randn(rows, 9 + vocabulary), torch.arange(rows) + 3, torch.arange(rows) + 9


def drawn(numbers, seeds, positions):
    def column(value):
        return torch.full_like(seeds, value, dtype=torch.float32)

    return reference.sample(
        numbers,
        seeds,
        positions,
        temperature=column(1.0),
        top_k=torch.full_like(seeds, 5),
        top_p=column(0.8),
        min_p=column(0.01),
    )


ALL = {0: AUTO}
BOTH = {0: AUTO, 1: AUTO}
# name: (the call, its inputs for two sizes, which dimensions of each input change)
GRAPHS = {
    "linear": (
        reference.linear,
        lambda rows, more: (torch.randn(rows, more, 8), torch.randn(5, 8), torch.randn(5)),
        (BOTH, {}, {}),
    ),
    "decode": (reference.decode_attention, decode, (ALL, BOTH, BOTH, ALL)),
    "decode-settings": (
        lambda *call: reference.decode_attention(
            *call, window=3, softcap=5.0, key_scale=2.0, value_scale=0.5, scale=0.3
        ),
        decode,
        (ALL, BOTH, BOTH, ALL),
    ),
    "decode-pages": (
        lambda *call: reference.decode_attention(*call[:4], table=call[4]),
        paged,
        (ALL, {}, {}, ALL, BOTH),
    ),
    "prefill": (
        lambda *call: reference.prefill_attention(*call, window=3),
        prefill,
        (ALL, BOTH, BOTH, ALL, ALL),
    ),
    "cache-write": (written, write, (ALL, ALL, {1: AUTO}, {1: AUTO}, ALL)),
    "deform": (
        lambda value, points, weights: reference.ms_deform_attn(value, LEVELS, points, weights),
        deform,
        (ALL, BOTH, BOTH),
    ),
    "deform-shapes-in-a-tensor": (reference.ms_deform_attn, deform_tensor, (ALL, {}, BOTH, BOTH)),
    "fake-quant": (
        reference.fake_quant_fp8,
        lambda rows, more: (torch.randn(rows, more, 8) * 100, torch.rand(8)),
        (BOTH, {}),
    ),
    "rms-norm": (
        reference.rms_norm,
        lambda rows, more: (torch.randn(rows, more, 8), torch.randn(8)),
        (BOTH, {}),
    ),
    "add-rms-norm": (
        reference.add_rms_norm,
        lambda rows, more: (*torch.randn(2, rows, more, 8), torch.randn(8)),
        (BOTH, BOTH, {}),
    ),
    "layer-norm": (
        reference.layer_norm,
        lambda rows, more: (torch.randn(rows, more, 8), torch.randn(8), torch.randn(8)),
        (BOTH, {}, {}),
    ),
    "add-layer-norm": (
        reference.add_layer_norm,
        lambda rows, more: (*torch.randn(2, rows, more, 8), torch.randn(8), torch.randn(8)),
        (BOTH, BOTH, {}, {}),
    ),
    "rotary": (reference.rotary, turned(4), (ALL,) * 4),
    "rotary-part": (reference.rotary, turned(3), (ALL,) * 4),
    "rotary-neighbours": (
        lambda *call: reference.rotary(*call, interleaved=True),
        turned(3),
        (ALL,) * 4,
    ),
    "silu-mul": (
        reference.silu_mul,
        lambda rows, more: tuple(torch.randn(2, rows, more, 8)),
        (BOTH, BOTH),
    ),
    "sample-greedy": (reference.sample, logits, (BOTH, ALL, ALL)),
    "sample": (drawn, logits, (BOTH, ALL, ALL)),
}
EXAMPLE = (3, 7)
# Batches of one are a size of their own to torch.export where an input is one longer (starts).
OTHERS = [(2, 5), (5, 3), (4, 33), (2, 1)]


class Graph(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *inputs):
        return self.call(*inputs)


def clones(inputs):
    return tuple(each.clone() for each in inputs)


def require_the_same(run, name, others=OTHERS):
    call, build, _ = GRAPHS[name]
    for sizes in (EXAMPLE, *others):
        torch.manual_seed(1)
        inputs = build(*sizes)
        found, expected = run(*clones(inputs)), call(*clones(inputs))
        if isinstance(expected, torch.Tensor):
            expected, found = (expected,), found if isinstance(found, list) else (found,)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.as_tensor(one), other, rtol=1e-4, atol=2e-5)


@pytest.fixture(autouse=True)
def traced_values_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        yield


@pytest.fixture
def example(request):
    torch.manual_seed(0)
    return GRAPHS[request.getfixturevalue("name")][1](*EXAMPLE)


@pytest.mark.parametrize("name", GRAPHS)
def test_traced(name, example):
    graph = torch.jit.trace(Graph(GRAPHS[name][0]), clones(example), check_trace=False)
    require_the_same(graph, name, [*OTHERS, (1, 9)])


@pytest.mark.parametrize("name", GRAPHS)
def test_exported(name, example):
    call, _, dynamic = GRAPHS[name]
    program = torch.export.export(Graph(call), clones(example), dynamic_shapes=(dynamic,))
    require_the_same(program.module(), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_exported_strictly(name, example):
    call, _, dynamic = GRAPHS[name]
    program = torch.export.export(
        Graph(call), clones(example), dynamic_shapes=(dynamic,), strict=True
    )
    require_the_same(program.module(), name)


def run_onnx(data):
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(*inputs):
        # Greedy sampling leaves seeds and positions unread; an exporter may drop what is unread.
        return session.run(None, dict(zip(names, (t.numpy() for t in inputs), strict=False)))

    return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", GRAPHS)
def test_onnx_from_export(name, example, tmp_path):
    pytest.importorskip("onnxscript")
    call, _, dynamic = GRAPHS[name]
    program = torch.onnx.export(
        Graph(call).eval(), clones(example), dynamo=True, dynamic_shapes=(dynamic,), verbose=False
    )
    program.save(str(tmp_path / "graph.onnx"))
    require_the_same(run_onnx((tmp_path / "graph.onnx").read_bytes()), name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", GRAPHS)
def test_onnx_from_trace(name, example):
    call, _, dynamic = GRAPHS[name]
    names = [f"input{i}" for i in range(len(example))]
    axes = {n: dict.fromkeys(d, "") for n, d in zip(names, dynamic, strict=True) if d}
    axes = {n: {axis: f"{n}_{axis}" for axis in d} for n, d in axes.items()}
    buffer = io.BytesIO()
    torch.onnx.export(
        Graph(call).eval(),
        clones(example),
        buffer,
        dynamo=False,
        input_names=names,
        dynamic_axes=axes,
        opset_version=18,
    )
    require_the_same(run_onnx(buffer.getvalue()), name, [*OTHERS, (1, 9)])
