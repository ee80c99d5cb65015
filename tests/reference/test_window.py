"""A window of w keys counts the query's own (huggingface/transformers#39408: one too wide)."""

import pytest
import torch

WINDOW = 4


def cache_of(length):
    """Keys at random and values that name their position; NaN beyond."""
    generator = torch.Generator().manual_seed(3)
    key = torch.full((1, 16, 2, 16), float("nan"))
    value = torch.full((1, 16, 2, 16), float("nan"))
    key[0, :length] = torch.randn(length, 2, 16, generator=generator)
    value[0, :length] = torch.eye(16)[:length].unsqueeze(1)
    return key, value


def seen(row):
    """The positions with weight in each head of an output (Hq, 16)."""
    positions = {tuple(head.nonzero().flatten().tolist()) for head in row}
    assert len(positions) == 1
    return list(positions.pop())


@pytest.mark.parametrize("length", [3, 4, 5, 6, 12])
@pytest.mark.parametrize("page_size", [None, 4])
def test_decoding_sees_four_keys(decode, length, page_size):
    key, value = cache_of(length)
    query = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(4))
    lengths, paged = torch.tensor([length], dtype=torch.int32), {}
    if page_size is not None:
        order = [2, 0, 3, 1]
        key, value = (cache.reshape(4, 4, 2, 16)[order] for cache in (key, value))
        table = torch.tensor([[order.index(page) for page in range(4)]], dtype=torch.int32)
        table[0, -(-length // 4) :] = -1
        paged = {"table": table}
    out = decode(query, key, value, lengths, window=WINDOW, **paged)
    assert seen(out[0]) == list(range(max(0, length - WINDOW), length))


@pytest.mark.parametrize("chunks", [(12,), (5, 7), (1,) * 12])
def test_prefilling_sees_four_keys_however_it_is_chunked(prefill, chunks):
    query = torch.randn(12, 8, 16, generator=torch.Generator().manual_seed(5))
    rows, first = [], 0
    for count in chunks:
        key, value = cache_of(first + count)
        starts = torch.tensor([0, count], dtype=torch.int32)
        lengths = torch.tensor([first + count], dtype=torch.int32)
        own = query[first : first + count]
        rows += list(prefill(own, key, value, starts, lengths, window=WINDOW))
        first += count
    assert [seen(row) for row in rows] == [
        list(range(max(0, position - 3), position + 1)) for position in range(12)
    ]
