"""What each slot means: plain PyTorch, importing nothing from `linnet.kernels`."""

from linnet.reference.attention import decode_attention, prefill_attention
from linnet.reference.cache import cache_write
from linnet.reference.deform import ms_deform_attn
from linnet.reference.elementwise import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
    rotary,
    silu_mul,
)
from linnet.reference.linear import linear
from linnet.reference.quant import fake_quant_fp8, fake_quant_fp8_dynamic
from linnet.reference.sample import sample
from linnet.reference.windows import window_attention

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
