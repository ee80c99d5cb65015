"""Rows that may see no key (pytorch/pytorch#103749: softmax divided zero by zero there)."""

import math

import pytest
import torch


def attend(query, key, value):
    """One query (Hq, D) on keys (L, Hkv, D), by loops in float64."""
    heads, size = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(heads, size, dtype=torch.float64)
    for head in range(heads):
        scores = [
            float(query[head].double() @ key[j, head // group].double()) / math.sqrt(size)
            for j in range(key.shape[0])
        ]
        total = sum(math.exp(s - max(scores)) for s in scores)
        for j, score in enumerate(scores):
            weight = math.exp(score - max(scores)) / total
            out[head] += weight * value[j, head // group].double()
    return out


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(6, 2, 8, generator=generator)
    key, value = (torch.randn(6, 10, 2, 8, generator=generator) for _ in range(2))
    lengths = torch.tensor([1, 2, 3, 4, 5, 0], dtype=torch.int32)
    for row, length in enumerate(lengths.tolist()):
        key[row, length:] = value[row, length:] = float("nan")
    return query, key, value, lengths


def test_rows_with_keys_equal_a_float64_loop_beside_a_row_without(decode, batch):
    query, key, value, lengths = batch
    out = decode(query, key, value, lengths)
    for row, length in enumerate(lengths[:5].tolist()):
        expected = attend(query[row], key[row, :length], value[row, :length])
        torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=1e-5)


def test_a_row_of_length_zero_is_zeros(decode, batch):
    out = decode(*batch)
    assert torch.equal(out[5], torch.zeros(2, 8))


def test_a_paged_row_of_length_zero_is_zeros(decode, batch):
    query, key, value, lengths = batch
    table = torch.arange(30, dtype=torch.int32).reshape(6, 5)
    table[5] = -1
    pool_key, pool_value = key.reshape(30, 2, 2, 8), value.reshape(30, 2, 2, 8)
    out = decode(query, pool_key, pool_value, lengths, table=table)
    assert torch.equal(out[5], torch.zeros(2, 8))
    torch.testing.assert_close(out[:5], decode(query, key, value, lengths)[:5])


def test_nothing_is_nan_after_two_layers(decode, batch):
    query, key, value, lengths = batch
    first = decode(query, key, value, lengths)
    second = decode(first, key, value, lengths)
    assert bool(second.isfinite().all())
    assert torch.equal(second[5], torch.zeros(2, 8))


def test_one_more_key_changes_its_own_row_only(decode, batch):
    query, key, value, lengths = batch
    key, value = key.nan_to_num(0.5), value.nan_to_num(0.5)
    before = decode(query, key, value, lengths)
    lengths = lengths.clone()
    lengths[3] += 1
    after = decode(query, key, value, lengths)
    assert [row for row in range(6) if not torch.equal(before[row], after[row])] == [3]


def test_gradients_stay_finite_beside_unused_nan(decode, batch):
    query, key, value, lengths = batch
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    decode(*leaves, lengths).sum().backward()
    for leaf in leaves:
        assert bool(leaf.grad.isfinite().all())
        assert torch.equal(leaf.grad[5], torch.zeros_like(leaf.grad[5]))


def test_prompts_without_new_tokens_add_nothing(prefill, batch):
    query, key, value, _ = batch
    key, value = key.nan_to_num(0.5), value.nan_to_num(0.5)
    starts = torch.tensor([0, 0, 4, 4, 6, 6, 6], dtype=torch.int32)
    lengths = torch.tensor([3, 4, 0, 8, 0, 10], dtype=torch.int32)
    out = prefill(query, key, value, starts, lengths)
    for token, (row, position) in enumerate([(1, 0), (1, 1), (1, 2), (1, 3), (3, 6), (3, 7)]):
        expected = attend(query[token], key[row, : position + 1], value[row, : position + 1])
        torch.testing.assert_close(out[token].double(), expected, rtol=0, atol=1e-5)
