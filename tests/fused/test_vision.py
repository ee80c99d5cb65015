"""`linnet.models.attention` and `Attention` against a loop in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linnet.models import Attention, attention

BOTH = pytest.mark.parametrize("fused", [True, False])


def loop(q: Tensor, k: Tensor, v: Tensor, seen: Any = None, bias: Tensor | None = None) -> Tensor:
    batch, heads, queries, width = q.shape
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    q, k, v = q.double(), k.double(), v.double()
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // k.shape[1])
            for i in range(queries):
                places = [j for j in range(k.shape[2]) if seen is None or seen[i][j]]
                if not places:
                    continue
                scores = torch.stack([q[b, h, i] @ k[b, g, j] for j in places]) / width**0.5
                if bias is not None:
                    scores = scores + bias[i, places].double()
                out[b, h, i] = scores.softmax(0) @ v[b, g, places]
    return out.float()


def drawn(heads: int = 2, served: int = 2, queries: int = 6, keys: int = 10) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((1, heads, queries, 8), (1, served, keys, 8), (1, served, keys, 8))
    return [torch.randn(shape, generator=g) for shape in shapes]


@BOTH
@pytest.mark.parametrize("form", ["boolean", "-inf", "least"])
def test_a_blind_row_gets_zeros_in_every_form(fused: bool, form: str) -> None:
    q, k, v = drawn()
    seen = torch.ones(6, 10, dtype=torch.bool).tril()
    seen[5] = False
    fill = float("-inf") if form == "-inf" else torch.finfo(torch.float32).min
    mask = seen if form == "boolean" else torch.zeros(6, 10).masked_fill(~seen, fill)
    got = attention(q, k, v, mask=mask, fused=fused)
    torch.testing.assert_close(got, loop(q, k, v, seen), rtol=0, atol=1e-5)
    assert not got[:, :, 5].any()
    again = attention(got, k, v, mask=mask, fused=fused)
    assert again.isfinite().all()


@BOTH
def test_an_additive_mask_is_added(fused: bool) -> None:
    q, k, v = drawn()
    bias = torch.randn(6, 10)
    got = attention(q, k, v, mask=bias, fused=fused)
    torch.testing.assert_close(got, loop(q, k, v, bias=bias), rtol=0, atol=1e-5)


@BOTH
@pytest.mark.parametrize("last", [1, 3, 8])
def test_causal_is_anchored_at_the_last_key(fused: bool, last: int) -> None:
    q, k, v = drawn(queries=8, keys=8)
    whole = loop(q, k, v, torch.ones(8, 8, dtype=torch.bool).tril())
    got = attention(q[:, :, 8 - last :], k, v, causal=True, fused=fused)
    torch.testing.assert_close(got, whole[:, :, 8 - last :], rtol=0, atol=1e-5)


@BOTH
def test_each_key_head_serves_query_heads_in_a_row(fused: bool) -> None:
    q, k, v = drawn(heads=4, served=2, queries=1, keys=5)
    v[:, 0], v[:, 1] = 0.0, 1.0
    got = attention(q, k, v, fused=fused)
    torch.testing.assert_close(got[0, :, 0, 0], torch.tensor([0.0, 0.0, 1.0, 1.0]))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda q, k, v: (q.repeat(1, 3, 1, 1), k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), {}),
         ValueError, "6 query heads and 4 key heads"),
        (lambda q, k, v: (q, k[:, :, :3], v[:, :, :3], {"causal": True}), ValueError, "at most as"),
        (lambda q, k, v: (q, k, v, {"mask": torch.ones(6, 10, dtype=torch.int64)}),
         TypeError, "mask is torch.int64"),
        (lambda q, k, v: (q, k, v, {"dropout": 1.5}), ValueError, "dropout is 1.5"),
        (lambda q, k, v: (q, k.double(), v, {}), TypeError, "expected one dtype"),
        (lambda q, k, v: (q[0], k, v, {}), ValueError, "expected \\(B, heads"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: Any, kind: type[Exception], words: str) -> None:
    *tensors, more = change(*drawn())
    with pytest.raises(kind, match=words):
        attention(*tensors, **more)


def test_the_module_agrees_both_ways_and_with_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 16)
    found = []
    module = Attention(16, 4, qk_norm=True)
    for fused in (False, True):
        module.fused = fused
        module.zero_grad()
        out = module(x, torch.ones(7, 7, dtype=torch.bool).tril())
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad.clone() for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="dim 10 does not split into 4 heads"):
        Attention(10, 4)
