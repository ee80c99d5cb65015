"""What a config.json says, as one `DecoderConfig` for every family that linnet runs.

Defaults of absent fields, and what a field means, are each family's own in transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from linnet.models.json_object import as_list, as_object
from linnet.models.rotary import ConfigError, RotaryConfig, parse_rotary

# Far above any model, low enough that nothing can overflow or run out of memory before the
# checkpoint's own shapes are compared with them.
_LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of the Llama family: sizes, and where the families differ.

    `windows` holds each layer's attention window in tokens, the query included, or None for all.
    `dtype` is the config's word for how the weights are meant to be run, if it has one.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rotary: RotaryConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    tied: bool = False
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 2048
    sliding: str = "never"


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM"),
    "mistral": _Family(
        "MistralForCausalLM", kv_heads=8, max_positions=4096 * 32, sliding="every layer"
    ),
    "qwen2": _Family("Qwen2ForCausalLM", kv_heads=32, max_positions=32768, sliding="by layer"),
    "qwen3": _Family(
        "Qwen3ForCausalLM", kv_heads=32, head_dim=128, max_positions=32768, sliding="by layer"
    ),
}
FAMILIES = tuple(_FAMILIES)


def parse_config(config: Mapping[str, Any], where: str) -> DecoderConfig:
    """Reads and checks the content of a config.json.

    Args:
        config: The JSON object.
        where: The file it came from, for messages.

    Returns:
        The decoder's configuration.

    Raises:
        ConfigError: An unknown family, a field that is missing, ill-typed or senseless, or one that
            asks for something linnet doesn't run.
    """
    name, family = _family_of(config, where)
    _check_unsupported(config, where)
    fields = _Sizes(config, where)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", _kv_heads(config, family, heads))
    head_dim = fields.size("head_dim", _head_dim(config, family, hidden, heads, where))
    if heads % kv_heads:
        raise ConfigError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}: every key head must serve as many query heads"
        )
    layers = fields.size("num_hidden_layers")
    bias = family.architecture.startswith(("Llama", "Qwen3")) and fields.flag("attention_bias")
    return DecoderConfig(
        family=name,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=fields.size("max_position_embeddings", family.max_positions),
        norm_eps=_norm_eps(config, where),
        rotary=parse_rotary(config, head_dim, where),
        windows=_windows(config, family, fields, layers),
        qkv_bias=bias or name == "qwen2",
        output_bias=bias,
        mlp_bias=name == "llama" and fields.flag("mlp_bias"),
        query_key_norm=name == "qwen3",
        tied=fields.flag("tie_word_embeddings"),
        dtype=_dtype(config, where),
    )


def _family_of(config: Mapping[str, Any], where: str) -> tuple[str, _Family]:
    known = ", ".join(f"{name} ({family.architecture})" for name, family in _FAMILIES.items())
    name = config.get("model_type")
    architectures = config.get("architectures")
    if architectures is not None and (
        not isinstance(architectures, list)
        or not all(isinstance(entry, str) for entry in cast("list[Any]", architectures))
    ):
        raise ConfigError(
            f"{where}: architectures must be a list of names, found {architectures!r}"
        )
    architectures = cast("list[str] | None", architectures)
    if name is None and architectures:
        by_class = {family.architecture: key for key, family in _FAMILIES.items()}
        name = next((by_class[entry] for entry in architectures if entry in by_class), None)
        if name is None:
            raise ConfigError(f"{where}: unknown family {architectures[0]!r}; linnet runs {known}")
    if name is None:
        raise ConfigError(
            f'{where} has neither "model_type" nor "architectures"; linnet runs {known}'
        )
    if not isinstance(name, str) or name not in _FAMILIES:
        raise ConfigError(f"{where}: unknown family {name!r}; linnet runs {known}")
    family = _FAMILIES[name]
    if architectures and family.architecture not in architectures:
        raise ConfigError(
            f"{where}: a {name} model of the class {architectures[0]!r} has other outputs than "
            f"next tokens; linnet runs {family.architecture}"
        )
    return name, family


def _check_unsupported(config: Mapping[str, Any], where: str) -> None:
    if config.get("quantization_config"):
        method = as_object(config["quantization_config"]).get("quant_method")
        raise ConfigError(
            f"{where}: the weights are quantised ({method!r}), which linnet doesn't read from "
            "safetensors yet; load the unquantised checkpoint or a GGUF file"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{where}: hidden_act is {activation!r}; linnet runs 'silu'")
    if config.get("attention_dropout"):
        warnings.warn(
            f"{where}: attention_dropout {config['attention_dropout']!r} only matters in training, "
            "where linnet doesn't apply it",
            stacklevel=3,
        )


def _kv_heads(config: Mapping[str, Any], family: _Family, heads: int) -> int:
    # An explicit null means as many as query heads; absence means the family's default.
    if "num_key_value_heads" in config or family.kv_heads is None:
        return heads
    return family.kv_heads


def _head_dim(
    config: Mapping[str, Any], family: _Family, hidden: int, heads: int, where: str
) -> int:
    if config.get("head_dim") is not None or family.head_dim is not None:
        return family.head_dim or 1
    if hidden % heads:
        raise ConfigError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and "
            "there is no head_dim"
        )
    return hidden // heads


def _norm_eps(config: Mapping[str, Any], where: str) -> float:
    eps = config.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ConfigError(f"{where}: rms_norm_eps must be a number from 0 to 1, found {eps!r}")
    return float(eps)


def _windows(
    config: Mapping[str, Any], family: _Family, fields: _Sizes, layers: int
) -> tuple[int | None, ...]:
    if family.sliding == "never":
        if config.get("sliding_window") is not None:
            raise ConfigError(
                f"{fields.where}: this family has no sliding_window, found "
                f"{config['sliding_window']!r}; expected null"
            )
        return (None,) * layers
    window = None
    if config.get("sliding_window", 0) is not None:
        window = fields.size("sliding_window", 4096)
    if family.sliding == "every layer":
        kind = "full_attention" if window is None else "sliding_attention"
        if any(other != kind for other in config.get("layer_types") or ()):
            raise ConfigError(
                f"{fields.where}: layer_types differ between layers, which this family has no "
                f"meaning for; expected {kind!r} everywhere"
            )
        return (window,) * layers
    if not fields.flag("use_sliding_window"):
        window = None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ConfigError(
                f"{fields.where}: max_window_layers must be an integer, not {first!r}"
            )
        return tuple(window if layer >= first else None for layer in range(layers))
    return _windows_by_type(kinds, window, layers, fields.where)


def _windows_by_type(
    kinds: Any, window: int | None, layers: int, where: str
) -> tuple[int | None, ...]:
    known = ("full_attention", "sliding_attention")
    named = as_list(kinds)
    if len(named) != layers:
        raise ConfigError(f"{where}: layer_types must be a list of {layers} names, one per layer")
    for kind in named:
        if kind not in known:
            raise ConfigError(
                f"{where}: unknown layer type {kind!r}; linnet runs {', '.join(known)}"
            )
        if kind == "sliding_attention" and window is None:
            raise ConfigError(
                f"{where}: layer_types asks for sliding_attention, but use_sliding_window is off "
                "or sliding_window is null"
            )
    return tuple(window if kind == "sliding_attention" else None for kind in named)


def _dtype(config: Mapping[str, Any], where: str) -> str | None:
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is not None and not isinstance(dtype, str):
        raise ConfigError(f"{where}: dtype must be a name such as 'bfloat16', found {dtype!r}")
    return dtype.removeprefix("torch.") if dtype and dtype != "auto" else None


class _Sizes:
    """Sizes and flags out of a config, with errors that name the field."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self.where = fields, where

    def size(self, name: str, default: int | None = None) -> int:
        value = self._fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.where} needs the integer {name!r}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: {name} must be an integer, found {value!r}")
        if not 1 <= value <= _LARGEST[name]:
            raise ConfigError(
                f"{self.where}: {name} must be from 1 to {_LARGEST[name]}, found {value}"
            )
        return value

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} must be true or false, found {value!r}")
        return bool(value)
