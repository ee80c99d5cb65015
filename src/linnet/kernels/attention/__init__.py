"""Attention: the slots' implementations, and the policy of fused attention."""

from linnet.kernels.attention.fused.policy import set_fused_attention

__all__ = ["set_fused_attention"]
