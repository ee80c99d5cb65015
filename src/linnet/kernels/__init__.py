"""The registry of slots (temporary stand-in)."""

from linnet.kernels.registry import Refusal, define, implementations, register
from linnet.kernels.slots import *  # noqa: F403
