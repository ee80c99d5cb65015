"""Named operation slots and the registry of their implementations.

A slot is a function: `kernels.linear(x, weight, bias)` runs the newest implementation whose
predicate holds on this machine and which accepts these inputs, and otherwise reference math that
gives the same numbers. `explain` says why, `history` what ran; see docs/kernels.md.
"""

from linnet.kernels.capture import capturing
from linnet.kernels.explain import (
    Call,
    Candidate,
    Explanation,
    History,
    active,
    explain,
    explanations,
    history,
    recording,
    resolve,
)
from linnet.kernels.falls import Fall
from linnet.kernels.implementation import (
    FallError,
    FallWarning,
    Implementation,
    Refusal,
    SelectionWarning,
    UnavailableError,
    UnknownNameError,
)
from linnet.kernels.preparing import prefetch
from linnet.kernels.registry import define, implementations, register, unregister
from linnet.kernels.selection import use
from linnet.kernels.slot import Builtin
from linnet.kernels.slots import (
    add_layer_norm,
    add_rms_norm,
    cache_write,
    decode_attention,
    fake_quant_fp8,
    fake_quant_fp8_dynamic,
    layer_norm,
    linear,
    ms_deform_attn,
    prefill_attention,
    rms_norm,
    rotary,
    sample,
    silu_mul,
    window_attention,
)
from linnet.kernels.states import generation

__all__ = [
    "Builtin",
    "Call",
    "Candidate",
    "Explanation",
    "Fall",
    "FallError",
    "FallWarning",
    "History",
    "Implementation",
    "Refusal",
    "SelectionWarning",
    "UnavailableError",
    "UnknownNameError",
    "active",
    "add_layer_norm",
    "add_rms_norm",
    "cache_write",
    "capturing",
    "decode_attention",
    "define",
    "explain",
    "explanations",
    "fake_quant_fp8",
    "fake_quant_fp8_dynamic",
    "generation",
    "history",
    "implementations",
    "layer_norm",
    "linear",
    "ms_deform_attn",
    "prefetch",
    "prefill_attention",
    "recording",
    "register",
    "resolve",
    "rms_norm",
    "rotary",
    "sample",
    "silu_mul",
    "unregister",
    "use",
    "window_attention",
]
