"""The table of contents: each slot, its reference, and linnet's own implementations, oldest first.

Among accelerated implementations the one that measured faster is the newer; the comment beside it
names the record.
"""

from linnet import reference
from linnet.kernels.registry import define
from linnet.kernels.slot import Builtin

_ATTENTION = "linnet.kernels.attention"
# Every "triton" but window_attention's: docs/benchmarks/gpu-kernels.md.
_ELEMENTWISE = (
    Builtin("torch", "linnet.kernels.elementwise.torch_ops"),
    Builtin("triton", "linnet.kernels.elementwise.triton_ops", needs=("triton",), device="cuda"),
)

# Each "torch", "sdpa" and so on beat the reference in benchmarks/bench_cpu_kernels.py.
linear = define(
    "linear",
    reference.linear,
    autocast=("x", "weight", "bias"),
    builtins=(
        Builtin("torch", "linnet.kernels.gemm.torch_linear"),
        Builtin("onednn", "linnet.kernels.gemm.onednn"),
    ),
)

decode_attention = define(
    "decode_attention",
    reference.decode_attention,
    autocast=("query", "key", "value"),
    builtins=(Builtin("sdpa", f"{_ATTENTION}.sdpa"),),
)

prefill_attention = define(
    "prefill_attention",
    reference.prefill_attention,
    autocast=("query", "key", "value"),
    builtins=(Builtin("sdpa", f"{_ATTENTION}.sdpa"),),
)

window_attention = define(
    "window_attention",
    reference.window_attention,
    autocast=("query", "key", "value"),
    builtins=(
        Builtin("sdpa", f"{_ATTENTION}.window_sdpa"),
        Builtin("triton", f"{_ATTENTION}.window_triton", needs=("triton",), device="cuda"),
    ),
)

cache_write = define(
    "cache_write",
    reference.cache_write,
    mutates=("key_cache", "value_cache"),
    builtins=(Builtin("index_copy", f"{_ATTENTION}.index_copy"),),
)

ms_deform_attn = define(
    "ms_deform_attn",
    reference.ms_deform_attn,
    builtins=(
        Builtin("embedding_bag", f"{_ATTENTION}.embedding_bag"),
        Builtin(
            "hub", f"{_ATTENTION}.deform_hub", needs=("kernels", "huggingface_hub"), device="cuda"
        ),
        Builtin("triton", f"{_ATTENTION}.deform_triton", needs=("triton",), device="cuda"),
    ),
)

fake_quant_fp8 = define(
    "fake_quant_fp8",
    reference.fake_quant_fp8,
    builtins=(
        Builtin("exponent", "linnet.kernels.quant.exponent"),
        Builtin(
            "triton", "linnet.kernels.quant.fake_quant_triton", needs=("triton",), device="cuda"
        ),
    ),
)

fake_quant_fp8_dynamic = define(
    "fake_quant_fp8_dynamic",
    reference.fake_quant_fp8_dynamic,
    builtins=(
        Builtin(
            "triton", "linnet.kernels.quant.fake_quant_triton", needs=("triton",), device="cuda"
        ),
    ),
)

rms_norm = define("rms_norm", reference.rms_norm, builtins=_ELEMENTWISE)

add_rms_norm = define("add_rms_norm", reference.add_rms_norm, builtins=_ELEMENTWISE)

layer_norm = define("layer_norm", reference.layer_norm, builtins=_ELEMENTWISE)

add_layer_norm = define("add_layer_norm", reference.add_layer_norm, builtins=_ELEMENTWISE)

rotary = define("rotary", reference.rotary, builtins=_ELEMENTWISE)

silu_mul = define("silu_mul", reference.silu_mul, builtins=_ELEMENTWISE)

sample = define(
    "sample",
    reference.sample,
    builtins=(Builtin("numpy", "linnet.kernels.elementwise.numpy_sampling"),),
)

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "cache_write",
    "decode_attention",
    "fake_quant_fp8",
    "fake_quant_fp8_dynamic",
    "layer_norm",
    "linear",
    "ms_deform_attn",
    "prefill_attention",
    "rms_norm",
    "rotary",
    "sample",
    "silu_mul",
    "window_attention",
]
