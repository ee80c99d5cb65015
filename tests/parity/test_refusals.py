"""What linnet's own CPU implementations refuse, and in which words."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import linnet.kernels as kernels
from linnet.kernels.gemm import onednn


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def decode(dtype=torch.float32, cache=None, device="cpu", **settings):
    query, key = zeros(2, 4, 16, dtype=dtype), zeros(2, 8, 2, 16, dtype=cache or dtype)
    lengths = torch.ones(2, dtype=torch.int32)
    return (query.to(device), key.to(device), key.to(device), lengths.to(device)), settings


def prefill(**settings):
    (query, key, value, lengths), _ = decode()
    return (query, key, value, torch.tensor([0, 1, 2]).int(), lengths), settings


def write(tokens=torch.float32, cache=torch.float32, places=torch.int64):
    new, old = zeros(2, 2, 16, dtype=tokens), zeros(2, 8, 2, 16, dtype=cache)
    return (new, new, old, old, torch.tensor([0, 1], dtype=places)), {}


def deform(dtype=torch.float32, device="cpu", grad=False):
    value = zeros(1, 4, 2, 8, dtype=dtype, device=device).requires_grad_(grad)
    points = zeros(1, 3, 2, 1, 2, 2, dtype=dtype, device=device)
    return (value, torch.tensor([[2, 2]]), points, points[..., 0]), {}


def draw(**settings):
    index = torch.zeros(2, dtype=torch.int64)
    return (zeros(2, 9, device=settings.pop("device", "cpu")), index, index), settings


def windows(dtype=torch.float32, bias=None, device="cpu"):
    query = zeros(4, 2, 9, 8, dtype=dtype, device=device)
    return (query, query, query, bias and zeros(1, 2, 9, 9, dtype=bias, device=device)), {}


def plain(*tensors, **settings):
    return tensors, settings


half, double = torch.bfloat16, torch.float64
REFUSALS = [
    ("linear", "onednn", plain(zeros(2, 512, dtype=half), zeros(512, 512, dtype=half), None),
     "needs float32, not torch.bfloat16 with torch.bfloat16 weights"),
    ("linear", "onednn", plain(zeros(2, 64), zeros(64, 64), None),
     "needs at least 131072 weights: fewer are faster without setup"),
    ("linear", "onednn", plain(zeros(512), zeros(512, 512), None),
     "needs x of two dimensions or more and weight of two, not 1 and 2"),
    ("linear", "onednn", plain(zeros(2, 512), zeros(512, 512, device="meta"), None),
     "needs CPU tensors, not cpu with meta weights"),
    ("linear", "onednn", plain(zeros(2, 512), zeros(512, 512), zeros(512, dtype=half)),
     "needs a bias in float32 on the CPU, not torch.bfloat16 on cpu"),
    ("linear", "onednn", plain(zeros(2, 512), zeros(512, 512).requires_grad_(), None),
     "it has no backward, and an input requires a gradient"),
    ("linear", "torch", plain(zeros(2, 8), zeros(4, 8, dtype=half), None),
     "needs x and weight of one floating dtype, not torch.float32 and torch.bfloat16"),
    ("linear", "torch", plain(zeros(2, 8), zeros(4, 8, device="meta"), None),
     "needs x and weight on one device, not cpu and meta"),
    ("linear", "torch", plain(zeros(2, 8), zeros(8), None),
     "needs x of one dimension or more and weight of two, not 2 and 1"),
    ("linear", "torch", plain(zeros(2, 8), zeros(4, 8), zeros(4, dtype=half)),
     "needs a bias of one dimension in torch.float32 on cpu"),
    ("window_attention", "sdpa", plain(*[zeros(2, 1, 4, 8, device="meta")] * 3),
     "needs tensors on a CPU or CUDA device, not meta"),
    ("window_attention", "sdpa", plain(*[zeros(2, 1, 4, 8, dtype=torch.float8_e4m3fn)] * 3),
     "needs a float dtype of 16, 32 or 64 bits, not torch.float8_e4m3fn"),
    ("window_attention", "sdpa", plain(*[zeros(2, 1, 4, 8, dtype=half)] * 3, zeros(1, 1, 4, 4)),
     "needs a bias in query's dtype, not torch.float32 with torch.bfloat16"),
    ("window_attention", "sdpa", windows(device="meta"),
     "needs tensors on a CPU or CUDA device, not meta"),
    ("window_attention", "sdpa", windows(dtype=torch.int32),
     "needs a float dtype of 16, 32 or 64 bits, not torch.int32"),
    ("window_attention", "sdpa", windows(bias=half),
     "needs a bias in query's dtype, not torch.bfloat16 with torch.float32"),
    ("decode_attention", "sdpa", decode(softcap=3.0),
     "it has no parameter softcap, which the call gives"),
    ("decode_attention", "sdpa", decode(key_scale=0.5),
     "it has no parameter key_scale, which the call gives"),
    ("decode_attention", "sdpa", decode(cache=torch.float8_e4m3fn),
     "needs a cache of query's dtype, not torch.float32 with torch.float8_e4m3fn"),
    ("decode_attention", "sdpa", decode(device="meta"),
     "reads lengths on the host, which stalls meta; needs a CPU"),
    ("prefill_attention", "sdpa", prefill(value_scale=0.5),
     "it has no parameter value_scale, which the call gives"),
    ("prefill_attention", "sdpa", prefill(softcap=0.5),
     "it has no parameter softcap, which the call gives"),
    ("cache_write", "index_copy", write(cache=half),
     "needs tokens of the cache's dtype, not torch.float32 into torch.bfloat16"),
    ("cache_write", "index_copy", write(cache=torch.float8_e5m2),
     "needs tokens of the cache's dtype, not torch.float32 into torch.float8_e5m2"),
    ("cache_write", "index_copy", write(places=torch.int32),
     "needs places in int64 and caches of four dimensions"),
    ("ms_deform_attn", "embedding_bag", deform(dtype=double),
     "computes in float32, which is too narrow for torch.float64"),
    ("ms_deform_attn", "embedding_bag", deform(device="meta"),
     "needs CPU tensors, not meta"),
    ("fake_quant_fp8", "exponent", plain(zeros(4, dtype=double), torch.tensor(1.0)),
     "needs float32, bfloat16 or float16, not torch.float64"),
    ("fake_quant_fp8", "exponent", plain(zeros(4), torch.tensor(1.0, dtype=double)),
     "needs a scale of at most float32 and 1 dimensions"),
    ("fake_quant_fp8", "exponent", plain(zeros(4), 1.0, format="e3m4"),
     'knows no format "e3m4"'),
    ("rms_norm", "torch", plain(zeros(2, 8, dtype=half), zeros(8)),
     "needs x and weight of one dtype, not torch.bfloat16 and torch.float32"),
    ("rms_norm", "torch", plain(zeros(2, 8), zeros(2, 8)),
     "needs weight of one dimension, not 2"),
    ("add_rms_norm", "torch", plain(zeros(2, 8), zeros(2, 8, dtype=half), zeros(8)),
     "needs x and residual of one dtype, not torch.float32 and torch.bfloat16"),
    ("layer_norm", "torch", plain(zeros(2, 8), zeros(8), zeros(8, dtype=half)),
     "needs weight and bias of one dimension in torch.float32, as x is"),
    ("layer_norm", "torch", plain(zeros(2, 8, dtype=torch.int32)),
     "needs x in a float dtype of one dimension or more, not torch.int32"),
    ("add_layer_norm", "torch", plain(zeros(2, 8), zeros(2, 8, dtype=half)),
     "needs x and residual of one dtype, not torch.float32 and torch.bfloat16"),
    ("rotary", "torch", plain(zeros(2, 4, 8), zeros(2, 2, 8), zeros(2, 3), zeros(2, 3)),
     "needs heads that turn whole, not 6 of 8 features"),
    ("rotary", "torch",
     plain(zeros(2, 4, 8), zeros(2, 2, 8), zeros(2, 4), zeros(2, 4), interleaved=True),
     "it has no parameter interleaved, which the call gives"),
    ("rotary", "torch",
     plain(zeros(2, 4, 8), zeros(2, 2, 8), zeros(2, 4, dtype=double), zeros(2, 4)),
     "needs angles of at most float32 for torch.float32, not float64"),
    ("silu_mul", "torch", plain(zeros(2, 8), zeros(2, 8, dtype=half)),
     "needs gate and up of one dtype, not torch.float32 and torch.bfloat16"),
    ("silu_mul", "torch", plain(zeros(2, 8), zeros(2, 8).requires_grad_()),
     "it has no backward, and an input requires a gradient"),
    ("sample", "numpy", draw(),
     "needs a temperature: without one the reference takes the largest at once"),
    ("sample", "numpy", draw(device="meta", temperature=zeros(2)),
     "needs CPU tensors, not meta"),
]  # fmt: skip


def test_values_of_fake_tensors_are_not_read():
    with FakeTensorMode():
        args, kwargs = decode()
        refusal = named("decode_attention", "sdpa").refusal(*args, **kwargs)
        assert refusal == kernels.Refusal("reads lengths, which a FakeTensor may not let it do")
        assert kernels.decode_attention(*args, **kwargs).shape == (2, 4, 16)


def named(slot, name):
    found = [each for each in kernels.implementations(slot) if each.name == name]
    if not found:
        pytest.skip(f"{slot} has no implementation {name} in slots.py")
    return found[0]


@pytest.mark.parametrize(
    ("operation", "name", "call", "reason"),
    REFUSALS,
    ids=[f"{slot}-{name}-{number}" for number, (slot, name, *_) in enumerate(REFUSALS)],
)
def test_the_refusal_says_why(operation, name, call, reason):
    args, kwargs = call
    assert named(operation, name).refusal(*args, **kwargs) == kernels.Refusal(reason)


@pytest.mark.parametrize(
    ("maker", "held"),
    [("AuthenticAMD", True), ("GenuineIntel", False), ("aarch64", False)],
)
def test_onednn_is_for_the_processors_where_it_measured_faster(monkeypatch, maker, held):
    monkeypatch.setattr(onednn, "_vendor", lambda: maker)
    answer = named("linear", "onednn").predicate()
    if held and torch.backends.mkldnn.is_available():
        assert answer is True
    else:
        assert answer == kernels.Refusal(
            f"it measured faster on AMD processors only, not on {maker}"
        )
