"""Loading models for PyTorch: `load` is `linnet.models.load`."""

from linnet.models.load import load

__all__ = ["load"]
