"""Fewer queries than keys: the queries are the last positions (pytorch/pytorch#144858)."""

import pytest
import torch

import linnet.kernels as kernels


def causal(query, key, value):
    """All of L queries on L keys, (L, H, D), row i on keys 0 to i, in float64."""
    length, _, size = query.shape
    q, k, v = (tensor.double().transpose(0, 1) for tensor in (query, key, value))
    scores = q @ k.transpose(1, 2) / size**0.5
    later = torch.arange(length)[None, :] > torch.arange(length)[:, None]
    return (scores.masked_fill(later, float("-inf")).softmax(-1) @ v).transpose(0, 1)


@pytest.fixture
def sequence():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 2, 16, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_last_queries_equal_the_last_rows_of_the_whole(prefill, sequence, count):
    query, key, value = sequence
    starts = torch.tensor([0, count], dtype=torch.int32)
    lengths = torch.tensor([8], dtype=torch.int32)
    out = prefill(query[-count:], key[None], value[None], starts, lengths)
    expected = causal(query, key, value)[-count:]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_decoding_equals_the_last_row_of_the_whole(decode, sequence):
    query, key, value = sequence
    lengths = torch.tensor([8], dtype=torch.int32)
    out = decode(query[-1:], key[None], value[None], lengths)
    torch.testing.assert_close(out.double(), causal(query, key, value)[-1:], rtol=0, atol=1e-5)


def test_chunks_equal_the_whole(prefill, sequence):
    query, key, value = sequence
    parts = []
    for first, last in ((0, 3), (3, 4), (4, 8)):
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        lengths = torch.tensor([last], dtype=torch.int32)
        unwritten = [tensor.clone() for tensor in (key, value)]
        for tensor in unwritten:
            tensor[last:] = float("nan")
        cache = [tensor[None] for tensor in unwritten]
        parts.append(prefill(query[first:last], *cache, starts, lengths))
    expected = causal(query, key, value)
    torch.testing.assert_close(torch.cat(parts).double(), expected, rtol=0, atol=1e-5)


def test_more_queries_than_keys_are_refused(sequence):
    query, key, value = sequence
    starts = torch.tensor([0, 8], dtype=torch.int32)
    lengths = torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ValueError, match="prompt 0 has 8 queries and a length of 5"):
        kernels.prefill_attention(query, key[None], value[None], starts, lengths)
