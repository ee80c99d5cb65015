"""The table of contents: each slot, its reference, and linnet's own implementations, oldest first.

Among accelerated implementations the one that measured faster is the newer; the comment beside it
names the record.
"""

from linnet import reference
from linnet.kernels.registry import define
from linnet.kernels.slot import Builtin

linear = define("linear", reference.linear, autocast=("x", "weight", "bias"))

decode_attention = define(
    "decode_attention", reference.decode_attention, autocast=("query", "key", "value")
)

prefill_attention = define(
    "prefill_attention", reference.prefill_attention, autocast=("query", "key", "value")
)

cache_write = define("cache_write", reference.cache_write, mutates=("key_cache", "value_cache"))

ms_deform_attn = define("ms_deform_attn", reference.ms_deform_attn)

fake_quant_fp8 = define("fake_quant_fp8", reference.fake_quant_fp8)

rms_norm = define("rms_norm", reference.rms_norm)

add_rms_norm = define("add_rms_norm", reference.add_rms_norm)

rotary = define("rotary", reference.rotary)

silu_mul = define("silu_mul", reference.silu_mul)

sample = define("sample", reference.sample)

__all__ = [
    "Builtin",
    "add_rms_norm",
    "cache_write",
    "decode_attention",
    "fake_quant_fp8",
    "linear",
    "ms_deform_attn",
    "prefill_attention",
    "rms_norm",
    "rotary",
    "sample",
    "silu_mul",
]
