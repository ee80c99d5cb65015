"""The decoder of the Llama family, every product, norm and attention of it a slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from linnet import kernels
from linnet.models.cache import Cache, Generics
from linnet.models.entries import Entries
from linnet.models.families import DecoderConfig
from linnet.models.passes import KeyValue, OwnKeys, Pass
from linnet.models.rotary import inverse_frequencies
from linnet.models.siblings import Linear, Siblings


class RMSNorm(nn.Module):
    """Root mean square norm, by the slots `rms_norm` and `add_rms_norm`."""

    def __init__(self, size: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, **factory))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises over the last dimension."""
        return kernels.rms_norm(x, self.weight, eps=self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum, which the next residual starts from."""
        if residual is None:
            return kernels.rms_norm(x, self.weight, eps=self.eps), x
        if x.dtype != residual.dtype:
            # Under autocast products are narrower than the sum that they are added to.
            x = x.to(residual.dtype)
        return kernels.add_rms_norm(x, residual, self.weight, eps=self.eps)


class Attention(Siblings):
    """Grouped-query attention with rotary positions."""

    siblings: ClassVar = (("q_proj", "k_proj", "v_proj"), ("o_proj",))

    def __init__(self, config: DecoderConfig, window: int | None, **factory: Any) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.window = window
        self.head_dim = size
        bias = config.qkv_bias
        self.q_proj = Linear(hidden, config.heads * size, bias=bias, **factory)
        self.k_proj = Linear(hidden, config.kv_heads * size, bias=bias, **factory)
        self.v_proj = Linear(hidden, config.kv_heads * size, bias=bias, **factory)
        self.o_proj = Linear(config.heads * size, hidden, bias=config.output_bias, **factory)
        self.q_norm = self.k_norm = None
        if config.query_key_norm:
            self.q_norm = RMSNorm(size, config.norm_eps, **factory)
            self.k_norm = RMSNorm(size, config.norm_eps, **factory)

    def forward(self, x: Tensor, this: Pass, cache: KeyValue) -> Tensor:
        """X (T, hidden) -> (T, hidden)."""
        query, key, value = self.project(self.siblings[0], x, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = kernels.rotary(query, key, this.cos, this.sin)
        attended = this.attend(query, key, value, cache, self.window)
        (out,) = self.project(self.siblings[1], attended.flatten(1))
        return out


class MLP(Siblings):
    """The gated feed-forward layer (SwiGLU)."""

    siblings: ClassVar = (("gate_proj", "up_proj"), ("down_proj",))

    def __init__(self, config: DecoderConfig, **factory: Any) -> None:
        super().__init__()
        hidden, wide, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, wide, bias=bias, **factory)
        self.up_proj = Linear(hidden, wide, bias=bias, **factory)
        self.down_proj = Linear(wide, hidden, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """X (T, hidden) -> (T, hidden)."""
        gate, up = self.project(self.siblings[0], x)
        (out,) = self.project(self.siblings[1], kernels.silu_mul(gate, up))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: DecoderConfig, window: int | None, **factory: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config, window, **factory)
        self.mlp = MLP(config, **factory)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, **factory)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, **factory)

    def forward(
        self, x: Tensor, residual: Tensor | None, this: Pass, cache: KeyValue
    ) -> tuple[Tensor, Tensor]:
        """X and the sum it is still to be added to, both (T, hidden), before and after."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, this, cache)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Trunk(nn.Module):
    """Embedding, layers and the last norm: what checkpoints name `model`."""

    def __init__(self, config: DecoderConfig, **factory: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList(Layer(config, window, **factory) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, **factory)

    def forward(self, tokens: Tensor, this: Pass, caches: list[KeyValue]) -> Tensor:
        """Tokens (T,) -> last hidden states (T, hidden), with each layer's cache."""
        x, residual = self.embed_tokens(tokens), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, this, cache)
        return self.norm.add(x, residual)[0]


class Decoder(Entries, nn.Module):
    """A decoder-only language model, named and shaped as transformers names its checkpoints.

    Called on tokens (B, S) it gives logits (B, S, vocabulary) and keeps nothing. The other entries
    (see `Entries`) keep keys and values in the model's cache, which is made when first needed.

    Args:
        config: Sizes and family.
        generics: `Batch`, `MaxSeq` and `PageSize` of the cache, see `Generics`.
        dtype: Of the parameters.
        device: Of the parameters; "meta" builds the model without memory.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        generics: Mapping[str, int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.generics = Generics(config, generics)
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.model = Trunk(config, **factory)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, **factory)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        # Not a buffer: casting the model must leave the angles in float32.
        self._frequencies = inverse_frequencies(config.rotary)
        self._cache: Cache | None = None
        self._backend: str | None = None
        self._was_tied = config.tied
        self.register_load_state_dict_post_hook(_tie_again)  # pyright: ignore[reportUnknownMemberType]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of whole sequences, without the cache.

        Args:
            tokens: (B, S) integers below the vocabulary's size.

        Returns:
            (B, S, vocabulary) in the model's dtype; empty where B or S is 0.
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, length), not {tuple(tokens.shape)}")
        batch, length = tokens.shape
        if not torch.jit.is_tracing() and (batch == 0 or length == 0):  # pyright: ignore[reportPrivateImportUsage]
            return self.lm_head.weight.new_empty((batch, length, self.config.vocab_size))
        cos, sin = self.angles(torch.arange(length, device=tokens.device))
        this = OwnKeys(cos.repeat(batch, 1), sin.repeat(batch, 1), batch, length)
        none = tokens.new_empty(0)
        hidden = self.model(tokens.flatten(), this, [(none, none)] * self.config.layers)
        return self.lm_head(hidden).view(batch, length, -1)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, R/2) in float32 of the rotary angles at positions (T,)."""
        # Computed rather than looked up: any length is right, and a table would be cast, moved
        # and exported with the model.
        angles = positions.to(torch.float32).unsqueeze(1) * self._frequencies
        factor = self.config.rotary.attention_factor
        if factor == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * factor, angles.sin() * factor

    @property
    def cache(self) -> Cache:
        """Keys and values, on the model's device and in its dtype; made when first needed."""
        if self._cache is None:
            weight = self.model.embed_tokens.weight
            with torch.inference_mode(False):
                self._cache = Cache(self.config, self.generics, weight.dtype, weight.device)
        return self._cache

    def reset(self) -> None:
        """Gives the cache's memory back; the next entry that needs one starts afresh."""
        self._cache = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        head, embedding = self.lm_head, self.model.embed_tokens
        tied = head.weight is embedding.weight
        super()._apply(fn, recurse)  # pyright: ignore[reportUnknownMemberType]
        if tied:
            head.weight = embedding.weight
        self._settle()
        self._cache = None
        return self

    def _settle(self) -> None:
        """Brings the angles to where the parameters are."""
        frequencies = self._frequencies
        if frequencies.is_meta:
            frequencies = inverse_frequencies(self.config.rotary)
        self._frequencies = frequencies.to(self.model.norm.weight.device)

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        self._was_tied = self.lm_head.weight is self.model.embed_tokens.weight
        if self._was_tied:
            # Either name will do and the embedding counts, as in `load`; this dictionary is a copy.
            names = prefix + "model.embed_tokens.weight", prefix + "lm_head.weight"
            given = [state_dict[name] for name in names if name in state_dict]
            state_dict.update((name, given[0]) for name in names if given)
        super()._load_from_state_dict(state_dict, prefix, *arguments)  # pyright: ignore[reportUnknownMemberType]

    def _after_state_dict(self) -> None:
        weight = self.model.embed_tokens.weight
        if self._was_tied:
            self.lm_head.weight = weight
        self._settle()
        if self._cache is not None:
            key = self._cache.rows[0][0]
            if (key.dtype, key.device) != (weight.dtype, weight.device):
                self._cache = None

    def compile_entries(self, backend: str) -> None:
        """Puts `forward` and `decode` behind torch.compile; copies of the model do so anew."""
        self._backend = backend
        # Made now: a cache that appeared in the first call would be a change that compiles anew.
        _ = self.cache
        compiled = cast("Any", torch.compile)  # pyright: ignore[reportUnknownMemberType]
        self.forward = compiled(self.forward, backend=backend)
        self.decode = compiled(self.decode, backend=backend)

    def __getstate__(self) -> dict[str, Any]:
        # What is compiled is bound to this model: a copy that kept it would run these weights.
        kept = {name: v for name, v in self.__dict__.items() if name not in ("forward", "decode")}
        return {**kept, "_cache": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # pyright: ignore[reportUnknownMemberType]
        if self._backend is not None:
            self.compile_entries(self._backend)


def _tie_again(model: Decoder, _keys: object) -> None:
    """After `load_state_dict`, whose assign=True brings parameters from elsewhere."""
    model._after_state_dict()  # pyright: ignore[reportPrivateUsage]
