"""Seeded tensors for cases: drawn on the CPU, so that every device sees the same numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Draw:
    """Tensors of one device and dtype, drawn one after the other from a seed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed numbers."""
        drawn = torch.randn(shape, generator=self.generator) * scale
        return drawn.to(self.device, dtype or self.dtype)

    def uniform(
        self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Evenly distributed numbers."""
        drawn = torch.rand(shape, generator=self.generator) * (high - low) + low
        return drawn.to(self.device, dtype or self.dtype)

    def permutation(self, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """The numbers 0 to count - 1 in random order."""
        return torch.randperm(count, generator=self.generator).to(self.device, dtype)

    def given(self, values: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
        """These numbers."""
        return torch.tensor(values, dtype=torch.float64).to(self.device, dtype or self.dtype)

    def integers(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """These integers."""
        return torch.tensor(values, dtype=dtype, device=self.device)
