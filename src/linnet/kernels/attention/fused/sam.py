"""SAM's vision attention, whose bias is made from the query and two tables."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportMissingImports=false

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.sam.modeling_sam import SamVisionAttention, SamVisionSdpaAttention

from linnet.kernels.attention.fused.recording import recording
from linnet.kernels.attention.fused.switch import is_on


def _forward(module: Any, hidden_states: Tensor, output_attentions: Any) -> tuple[Tensor, Any]:
    if not is_on(module) or recording() or output_attentions:
        return SamVisionAttention.forward(module, hidden_states, output_attentions)
    batch, height, width, _ = hidden_states.shape
    heads, places = module.num_attention_heads, height * width
    parts = module.qkv(hidden_states).view(batch, places, 3, heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = parts.unbind(0)
    bias = None
    if module.use_rel_pos:
        size = (height, width)
        bias = module.get_decomposed_rel_pos(
            query.flatten(0, 1), module.rel_pos_h, module.rel_pos_w, size, size
        )
        bias = bias.reshape(batch, heads, places, places).to(query.dtype)
    dropout = module.dropout if module.training else 0.0
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, scale=module.scale
    )
    return module.proj(out.transpose(1, 2).reshape(batch, height, width, -1)), None


class SwitchedSamVisionAttention(SamVisionAttention):
    """SAM's vision attention, by its primitive math or fused."""

    def forward(self, hidden_states: Tensor, output_attentions: Any = None) -> tuple[Tensor, Any]:
        """Attend among the places of hidden_states (B, height, width, C)."""
        return _forward(self, hidden_states, output_attentions)


class SwitchedSamVisionSdpaAttention(SamVisionSdpaAttention):
    """The same, for a model that was loaded with fused attention."""

    def forward(self, hidden_states: Tensor, output_attentions: Any = None) -> tuple[Tensor, Any]:
        """Attend among the places of hidden_states (B, height, width, C)."""
        return _forward(self, hidden_states, output_attentions)
