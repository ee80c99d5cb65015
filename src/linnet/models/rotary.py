"""Rotary position embedding: the kinds of scaling, and the frequencies each means.

Su et al., "RoFormer", 2021; linear interpolation, Chen et al., 2023; YaRN, Peng et al., 2023;
"llama3", Meta's Llama 3.1. Kinds whose frequencies change with the sequence's length ("dynamic",
"longrope") are refused: keys that are already cached would have been turned by other angles.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from linnet.models.json_object import as_object

KINDS = ("default", "linear", "llama3", "yarn")
_CHANGING = ("dynamic", "longrope")


class ConfigError(ValueError):
    """A model configuration that is wrong, or that linnet doesn't run."""


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """How positions become angles: theta, the kind of scaling and its numbers.

    `head_dim` features are turned. `trained` is the length before scaling (llama3, yarn). `factors`
    divide the frequencies one by one: how GGUF files store llama3 scaling.
    """

    head_dim: int
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    trained: int = 0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] | None = None


def inverse_frequencies(rotary: RotaryConfig) -> Tensor:
    """The angle, in radians per position, of each pair of features.

    Args:
        rotary: The configuration.

    Returns:
        (head_dim / 2,) float32 on the CPU, rounded as transformers rounds.
    """
    with torch.device("cpu"):  # whatever device the model is being built on
        return _frequencies(rotary)


def _frequencies(rotary: RotaryConfig) -> Tensor:
    exponents = torch.arange(0, rotary.head_dim, 2, dtype=torch.float32) / rotary.head_dim
    plain = 1.0 / (rotary.theta**exponents)
    if rotary.factors is not None:
        plain = plain / torch.tensor(rotary.factors, dtype=torch.float32)
    if rotary.kind == "linear":
        return plain / rotary.factor
    if rotary.kind == "llama3":
        return _llama3(plain, rotary)
    if rotary.kind == "yarn":
        return _yarn(rotary.theta**exponents, rotary)
    return plain


def _llama3(plain: Tensor, rotary: RotaryConfig) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    low, high = rotary.low_frequency, rotary.high_frequency
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > rotary.trained / low, plain / rotary.factor, plain)
    blend = (rotary.trained / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / rotary.factor + blend * stretched
    between = (wavelength >= rotary.trained / high) & (wavelength <= rotary.trained / low)
    return torch.where(between, blended, stretched)


def _yarn(powers: Tensor, rotary: RotaryConfig) -> Tensor:
    """Features that turn often within the trained length are kept, seldom ones interpolated."""

    def feature_of(turns: float) -> float:
        ratio = math.log(rotary.trained / (turns * 2 * math.pi))
        return rotary.head_dim * ratio / (2 * math.log(rotary.theta))

    low, high = feature_of(rotary.beta_fast), feature_of(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.head_dim - 1)
    # The paper's ramp divides by high - low; equal ends mean a step.
    width = high - low if high != low else 0.001
    ramp = (torch.arange(rotary.head_dim // 2, dtype=torch.float32) - low) / width
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rotary.factor * powers) * (1 - kept) + 1.0 / powers * kept


def parse_rotary(config: Mapping[str, Any], head_dim: int, where: str) -> RotaryConfig:
    """Reads every spelling of rope settings that config.json files have.

    `rope_scaling` (older) or `rope_parameters` (newer, theta inside); the kind as `rope_type` or
    `type`, the first winning; null or no settings for plain rotary embedding.

    Args:
        config: The content of config.json.
        head_dim: Features of a head.
        where: The file, for messages.

    Raises:
        ConfigError: An unknown or unsupported kind, or a number that is missing or senseless.
    """
    # Which of the two wins, and where theta is looked for first, are transformers' rules.
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given: object = config.get(field) or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: {field} must be an object or null, found {given!r}")
    settings = as_object(cast("object", given))
    if any(isinstance(value, dict) for value in settings.values()):
        raise ConfigError(
            f"{where}: {field} sets rotary embedding per layer type ({', '.join(settings)}), which "
            "linnet doesn't run; expected one set of numbers for all layers"
        )
    if head_dim % 2:
        raise ConfigError(
            f"{where}: rotary embedding pairs features, so head_dim {head_dim} is odd"
        )
    reader = _Reader(settings, f"{where}: {field}")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind in _CHANGING:
        raise ConfigError(
            f"{where}: rotary embedding of type {kind!r} changes its frequencies with the "
            "sequence's length, so keys already in the cache would be wrong; linnet runs "
            f"{', '.join(KINDS)}"
        )
    if kind not in KINDS:
        raise ConfigError(
            f"{where}: unknown rotary embedding type {kind!r}; linnet runs {', '.join(KINDS)}"
        )
    outer = _Reader(config, where)
    theta = reader.number("rope_theta", outer.number("rope_theta", 10000.0))
    _check_partial(config, settings, kind, where)
    if kind == "default":
        return RotaryConfig(head_dim, theta)
    if kind == "linear":
        return RotaryConfig(head_dim, theta, kind, reader.number("factor"))
    longest = outer.number("max_position_embeddings", 2048)
    trained = reader.number("original_max_position_embeddings", longest)
    trained = outer.number("original_max_position_embeddings", trained)
    if kind == "llama3":
        low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
        if low >= high:
            raise ConfigError(
                f"{where}: {field} has low_freq_factor {low} and high_freq_factor {high}; expected "
                "the first to be smaller"
            )
        return RotaryConfig(
            head_dim,
            theta,
            kind,
            reader.number("factor"),
            trained=int(trained),
            low_frequency=low,
            high_frequency=high,
        )
    if theta <= 1 or trained < 1:
        # YaRN asks how often a feature turns within the trained length: a logarithm to theta.
        name, value = ("rope_theta", theta) if theta <= 1 else ("the trained length", trained)
        raise ConfigError(
            f"{where}: rotary embedding of type 'yarn' with {name} {value}; expected "
            + ("more than 1" if theta <= 1 else "original_max_position_embeddings of at least 1")
        )
    factor = reader.number("factor", longest / trained)
    return RotaryConfig(
        head_dim,
        theta,
        kind,
        factor,
        trained=int(trained),
        beta_fast=reader.number("beta_fast", 32.0),
        beta_slow=reader.number("beta_slow", 1.0),
        truncate=bool(settings.get("truncate", True)),
        attention_factor=_attention_factor(reader, factor),
    )


def _attention_factor(reader: _Reader, factor: float) -> float:
    """What YaRN multiplies cos and sin by, to keep the scores' spread at a longer length."""

    def spread(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale, scale_all = reader.number("mscale", 0.0), reader.number("mscale_all_dim", 0.0)
    default = spread(scale) / spread(scale_all) if scale and scale_all else spread(1.0)
    return reader.number("attention_factor", default)


def _check_partial(
    config: Mapping[str, Any], settings: Mapping[str, Any], kind: str, where: str
) -> None:
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial in (None, 1):
        return
    if kind != "default":
        raise ConfigError(
            f"{where}: partial_rotary_factor {partial!r} with rotary embedding of type {kind!r} "
            "has no meaning in this family, which turns whole heads"
        )
    warnings.warn(
        f"{where}: partial_rotary_factor {partial!r} has no effect: this family turns whole heads, "
        "in transformers too",
        stacklevel=2,
    )


class _Reader:
    """Positive finite numbers out of a JSON object, with errors that name the field."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self._where = fields, where

    def number(self, name: str, default: float | None = None) -> float:
        value = self._fields.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self._where} needs the number {name!r}")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{self._where}: {name} must be a number, found {value!r}")
        if not 0 < value < 1e18:
            raise ConfigError(f"{self._where}: {name} must be above 0 and finite, found {value!r}")
        return float(value)
