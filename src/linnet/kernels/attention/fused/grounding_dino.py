"""Grounding DINO's own multi-head attention.

Its `GroundingDinoBiMultiHeadAttention` stays as it is: its weights go to the caller each time.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.grounding_dino.modeling_grounding_dino import (
    GroundingDinoMultiheadAttention,
)

from linnet.kernels.attention.fused import masks
from linnet.kernels.attention.fused.recording import recording
from linnet.kernels.attention.fused.switch import is_on


class SwitchedGroundingDinoMultiheadAttention(GroundingDinoMultiheadAttention):
    """Grounding DINO's attention, by its primitive math or fused."""

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> tuple[Any, ...]:
        """Attend; queries (B, Q, C), keys and values (B, K, C); any mask is added."""
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = masks.additive(attention_mask, queries.dtype)
        if not is_on(self) or recording() or output_attentions:
            return super().forward(queries, keys, values, attention_mask, output_attentions)
        query, key, value = (
            part(each).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for part, each in ((self.query, queries), (self.key, keys), (self.value, values))
        )
        if attention_mask is not None and not attention_mask.is_floating_point():
            attention_mask = attention_mask.to(query.dtype)
        dropout = self.dropout.p if self.training else 0.0
        out = masks.fused(query, key, value, attention_mask, dropout=dropout)
        return (self.out_proj(out.transpose(1, 2).flatten(2)),)
