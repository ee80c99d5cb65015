"""Decoders whose call sites are slots, and the loader that fills them from checkpoints."""

from linnet.models.checkpoint import CheckpointError
from linnet.models.decoder import Decoder
from linnet.models.detokenizer import Detokenizer
from linnet.models.families import FAMILIES, ConfigError, DecoderConfig, parse_config
from linnet.models.generate import Generation, generate
from linnet.models.load import load
from linnet.models.template import BrokenTemplateError, ChatTemplate, TemplateError
from linnet.models.tokenizer import Tokenizer, load_tokenizer
from linnet.models.vision import Attention, attention

__all__ = [
    "FAMILIES",
    "Attention",
    "BrokenTemplateError",
    "ChatTemplate",
    "CheckpointError",
    "ConfigError",
    "Decoder",
    "DecoderConfig",
    "Detokenizer",
    "Generation",
    "TemplateError",
    "Tokenizer",
    "attention",
    "generate",
    "load",
    "load_tokenizer",
    "parse_config",
]
