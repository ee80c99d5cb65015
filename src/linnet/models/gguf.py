"""GGUF checkpoints: tensors dequantised one at a time under transformers' names, and the config.

llama.cpp stores the query and key rows of the `llama` architecture in another order (each head's
two halves interleaved, for its own rotary kernel); reading undoes that, with the number of key
heads for keys. Qwen's are stored as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from linnet.models.checkpoint import CHUNK_BYTES, Stored, check_destination, fill
from linnet.models.families import DecoderConfig, parse_config
from linnet.models.gguf_header import GgufHeader, GgufTensor, import_gguf, read_header
from linnet.models.rotary import ConfigError
from linnet.models.safetensors_header import CheckpointError

_PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
ARCHITECTURES = ("llama", "qwen2", "qwen3")


class GgufCheckpoint:
    """A GGUF file's tensors, by the names that transformers gives them.

    Args:
        path: The file.

    Raises:
        CheckpointError: The header lies or the file is cut off; names file and field.
        ConfigError: An architecture linnet doesn't run, or metadata it needs is missing.
    """

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        self.header = read_header(path)
        self.config = _decoder_config(self.header)
        self._own = {
            _transformers_name(name): tensor
            for name, tensor in self.header.tensors.items()
            if name != _ROPE_FACTORS
        }
        self.stored: Mapping[str, Stored] = MappingProxyType(
            {
                name: Stored(t.shape, _PLAIN.get(t.kind, torch.float32), t.kind, t.stop - t.start)
                for name, t in self._own.items()
            }
        )
        self._file = FileIO(path)

    @property
    def quantised(self) -> bool:
        """Whether any matrix is stored in fewer bits than it reads as."""
        return any(tensor.kind not in _PLAIN for tensor in self.header.tensors.values())

    def read(self, name: str, destination: Tensor) -> None:
        """Dequantises one tensor into place, a few rows at a time.

        Args:
            name: A key of `stored`.
            destination: Contiguous, floating, of the stored shape; any device.

        Raises:
            CheckpointError: The shapes differ, the type can't be dequantised, or the file ended.
        """
        tensor = self._own[name]
        what = f"{self.source}: tensor {name!r}"
        check_destination(what, tensor.shape, self.stored[name].dtype or torch.float32, destination)
        heads = self._interleaved_heads(name)
        self._file.seek(tensor.start)
        if tensor.kind in _PLAIN and heads is None:
            fill(self._file, what, _PLAIN[tensor.kind], destination)
            return
        self._read_rows(what, tensor, heads, destination.detach())

    def same(self, first: str, second: str) -> bool:
        """Whether two tensors are one and the same; a GGUF file stores a tied head once."""
        return first == second

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _read_rows(
        self, what: str, tensor: GgufTensor, heads: int | None, destination: Tensor
    ) -> None:
        # A bias whose elements change places is a matrix of one column.
        flat = len(tensor.shape) < 2 and heads is not None
        width = 1 if flat or not tensor.shape else tensor.shape[-1]
        rows = destination.view(-1, width)
        row_bytes = (tensor.stop - tensor.start) // max(rows.shape[0], 1)
        # Whole heads at a time where their rows change places.
        unit = rows.shape[0] // heads if heads else 1
        step = max(CHUNK_BYTES // (4 * width * unit), 1) * unit
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step]
            raw = torch.empty(part.shape[0], row_bytes, dtype=torch.uint8)
            fill(self._file, what, torch.uint8, raw)
            numbers = _dequantise(what, raw, tensor.kind).view(-1, width)
            if heads is None:
                part.copy_(numbers)
            else:
                halves = part.view(-1, 2, unit // 2, width)
                halves.copy_(numbers.view(-1, unit // 2, 2, width).transpose(1, 2))

    def _interleaved_heads(self, name: str) -> int | None:
        if self.header.metadata["general.architecture"] != "llama":
            return None
        if ".self_attn.q_proj." in name:
            return self.config.heads
        return self.config.kv_heads if ".self_attn.k_proj." in name else None


def _decoder_config(header: GgufHeader) -> DecoderConfig:
    where = str(header.path)
    if (header.metadata.get("split.count") or 1) != 1:
        raise CheckpointError(
            f"{where} is one part of a split checkpoint; merge it (llama-gguf-split --merge) first"
        )
    config = parse_config(_config_json(header), where)
    field = _Fields(header)
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if field(name) not in (None, config.head_dim):
            raise ConfigError(
                f"{where}: {name} is {field(name)} where heads have {config.head_dim} features; "
                "linnet runs heads of one size, turned whole"
            )
    tensors = header.tensors
    return replace(
        config,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        rotary=replace(config.rotary, factors=_rope_factors(header, config.head_dim // 2)),
    )


def _rope_factors(header: GgufHeader, count: int) -> tuple[float, ...] | None:
    """What llama3 scaling divides each frequency by, which GGUF stores as a tensor."""
    tensor = header.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return None
    what = f"{header.path}: tensor {_ROPE_FACTORS!r}"
    if tensor.shape != (count,) or tensor.kind != "F32":
        raise CheckpointError(
            f"{what} is {tensor.kind} of shape {tensor.shape}, expected F32 of ({count},): one "
            "factor per pair of a head's features"
        )
    factors = torch.empty(count)
    with FileIO(header.path) as file:
        file.seek(tensor.start)
        fill(file, what, torch.float32, factors)
    if not bool((factors > 0).all()):
        raise CheckpointError(f"{what} holds a factor that is not above 0")
    return tuple(float(factor) for factor in factors)


def _transformers_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _INNER:
        return name
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"


def _dequantise(what: str, raw: Tensor, kind: str) -> Tensor:
    if kind in _PLAIN:
        return raw.view(_PLAIN[kind])
    gguf = import_gguf()
    try:
        numbers = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        raise CheckpointError(
            f"{what} is stored as {kind}, which the package gguf can't dequantise"
        ) from None
    return torch.as_tensor(numbers)


class _Fields:
    """Metadata of the file's architecture by name; arrays that say one thing per layer as one."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.architecture = header.metadata.get("general.architecture")

    def __call__(self, name: str) -> Any:
        value = self._header.metadata.get(f"{self.architecture}.{name}")
        if not isinstance(value, list):
            return value
        distinct = set(cast("list[Any]", value))
        if len(distinct) != 1:
            raise ConfigError(
                f"{self._header.path}: {self.architecture}.{name} differs between layers, which "
                "linnet doesn't run"
            )
        return distinct.pop()


def _config_json(header: GgufHeader) -> dict[str, Any]:
    """The metadata as the config.json that transformers would have written."""
    field, where = _Fields(header), str(header.path)
    architecture = field.architecture
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: general.architecture is {architecture!r}; linnet runs "
            f"{', '.join(ARCHITECTURES)}"
        )
    for name in ("expert_count", "attention.sliding_window_pattern"):
        if field(name):
            raise ConfigError(f"{where}: {architecture}.{name} is set, which linnet doesn't run")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{where}: the tensor 'token_embd.weight' is missing or no matrix")
    config = {
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": field("attention.head_count"),
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": field("attention.key_length"),
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"),
        "rope_scaling": _rope_scaling(field, header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    for key, name in (
        ("max_position_embeddings", "context_length"),
        ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ):
        if config[key] is None:
            raise ConfigError(f"{where}: the metadata needs {architecture}.{name}")
    if architecture == "qwen3" and config["head_dim"] is None:
        raise ConfigError(f"{where}: the metadata needs {architecture}.attention.key_length")
    if window := field("attention.sliding_window"):
        # llama.cpp knows Mistral as llama; the window is what sets them apart.
        config["model_type"] = "mistral" if architecture == "llama" else architecture
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    return config


def _rope_scaling(field: _Fields, header: GgufHeader) -> dict[str, Any] | None:
    kind = field("rope.scaling.type")
    factor = field("rope.scaling.factor") or field("rope.scale_linear")
    if any(name.startswith("rope_factors_") for name in header.tensors):
        kind = "longrope"
    if kind == "none" or (kind is None and factor in (None, 1.0)):
        return None
    # A factor without a kind is linear to llama.cpp.
    scaling: dict[str, Any] = {"rope_type": kind or "linear", "factor": factor}
    if kind == "yarn":
        for name in ("yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
            if field(f"rope.scaling.{name}") not in (None, 1.0):
                raise ConfigError(f"{header.path}: rope.scaling.{name}, which linnet doesn't run")
        scaling["original_max_position_embeddings"] = field("rope.scaling.original_context_length")
        scaling["beta_fast"] = field("rope.scaling.yarn_beta_fast")
        scaling["beta_slow"] = field("rope.scaling.yarn_beta_slow")
    return scaling
