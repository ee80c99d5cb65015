"""transformers' windows: Swin's with a bias table, Swin2SR's with the cosine of query and key."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportMissingImports=false, reportUnknownParameterType=false

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers.models.swin.modeling_swin import SwinAttention
from transformers.models.swin2sr.modeling_swin2sr import Swin2SRSelfAttention

from linnet import kernels
from linnet.kernels.attention.fused import interface
from linnet.kernels.attention.fused.recording import recording
from linnet.kernels.attention.fused.switch import is_on


def known(module: SwinAttention) -> bool:
    """Whether the module has the parts that the fused forward reads."""
    names = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "relative_position_bias",
        "head_dim",
        "scaling",
    )
    return all(hasattr(module, name) for name in names)


def _joined(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


class SwitchedSwinAttention(SwinAttention):
    """Swin's attention by the slot `window_attention`, one bias for the images of a batch."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; hidden_states (B * windows, N, C), attention_mask (windows, N, N) is added."""
        dropping = self.training and self.attention_dropout > 0
        if not is_on(self) or dropping or recording() or interface.weights_wanted(kwargs):
            return super().forward(hidden_states, attention_mask, **kwargs)
        query, key, value = (
            part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        bias = self.relative_position_bias()
        if attention_mask is not None:
            bias = bias + attention_mask.unsqueeze(1)
        out = kernels.window_attention(query, key, value, bias.to(query.dtype), scale=self.scaling)
        return self.o_proj(_joined(out)), None


class SwitchedSwin2SRSelfAttention(Swin2SRSelfAttention):
    """Swin2SR's attention by the slot `window_attention`."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> tuple[Tensor, ...]:
        """Attend; hidden_states (B * windows, N, C), attention_mask (windows, N, N) is added."""
        dropping = self.training and self.dropout.p > 0
        if not is_on(self) or dropping or recording() or output_attentions:
            return super().forward(hidden_states, attention_mask, output_attentions)
        query, key, value = (
            part(hidden_states).unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        query, key = normalize(query, dim=-1), normalize(key, dim=-1)
        factor = torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()
        query = (query * factor).to(value.dtype)
        bias = self._bias()
        if attention_mask is not None:
            # Twice, as the published model's own code adds it.
            bias = bias + 2 * attention_mask.unsqueeze(1)
        out = kernels.window_attention(
            query, key.to(value.dtype), value, bias.to(value.dtype), scale=1.0
        )
        return (_joined(out),)

    def _bias(self) -> Tensor:
        table = self.continuous_position_bias_mlp(self.relative_coords_table)
        window: Any = self.window_size
        places = window[0] * window[1]
        rows = table.view(-1, self.num_attention_heads)[self.relative_position_index.view(-1)]
        return 16 * torch.sigmoid(rows.view(places, places, -1).permute(2, 0, 1)).unsqueeze(0)
