"""Which tokens the filters leave, at their borders and in ties (huggingface/transformers#18976)."""

import math

import pytest
import torch

DRAWS = 3000


def draw(sampler, probabilities, draws=DRAWS, dtype=torch.float32, **filters):
    """How often each token comes up over the seeds 0, 1, 2, ..."""
    logits = torch.tensor([math.log(p) for p in probabilities], dtype=torch.float64).to(dtype)
    given = {"temperature": 1.0, **filters}
    columns = {
        name: torch.full((draws,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in given.items()
    }
    rows = logits.expand(draws, -1)
    seeds, positions = torch.arange(draws), torch.zeros(draws, dtype=torch.int64)
    tokens = sampler(rows, seeds, positions, **columns)
    return torch.bincount(tokens, minlength=len(probabilities)).tolist()


def require_frequencies(counts, probabilities, allowed):
    """Counts within three sigma of the renormalised probabilities of the allowed tokens."""
    total = sum(probabilities[token] for token in allowed)
    for token, count in enumerate(counts):
        share = probabilities[token] / total if token in allowed else 0.0
        sigma = math.sqrt(DRAWS * share * (1 - share))
        assert abs(count - DRAWS * share) <= 3 * sigma, (token, count, DRAWS * share)


HALVES = (1 / 2, 1 / 4, 1 / 8, 1 / 8)


@pytest.mark.parametrize(
    ("top_p", "allowed"),
    [(0.75, {0, 1}), (0.5, {0}), (0.76, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3}), (1e-9, {0})],
)
def test_the_nucleus_is_what_reaches_the_border_and_no_more(sampler, top_p, allowed):
    # 0.76 reaches into two tokens of 1/8: ties are kept, so both stay.
    require_frequencies(draw(sampler, HALVES, top_p=top_p), HALVES, allowed)


def test_ties_at_the_border_all_stay(sampler):
    probabilities = (1 / 2, 1 / 8, 1 / 8, 1 / 8, 1 / 8)
    counts = draw(sampler, probabilities, top_p=0.625)
    require_frequencies(counts, probabilities, {0, 1, 2, 3, 4})


def test_ties_at_the_k_th_place_all_stay(sampler):
    probabilities = (1 / 2, 1 / 8, 1 / 8, 1 / 8, 1 / 8)
    require_frequencies(draw(sampler, probabilities, top_k=2), probabilities, {0, 1, 2, 3, 4})
    require_frequencies(draw(sampler, probabilities, top_k=1), probabilities, {0})


def test_top_k_comes_before_top_p(sampler):
    # Of the three best (4/10, 3/10, 2/10 of 9/10), 0.75 needs two; of all four it would need three.
    probabilities = (0.4, 0.3, 0.2, 0.1)
    counts = draw(sampler, probabilities, top_k=3, top_p=0.75)
    require_frequencies(counts, probabilities, {0, 1})


def test_the_set_is_never_empty(sampler):
    counts = draw(sampler, HALVES, top_k=1, top_p=0.8, temperature=0.01)
    assert counts == [DRAWS, 0, 0, 0]
    assert draw(sampler, HALVES, top_p=0.0) == [DRAWS, 0, 0, 0]
    assert draw(sampler, HALVES, min_p=1.0) == [DRAWS, 0, 0, 0]


def test_top_k_beyond_the_vocabulary_keeps_all(sampler):
    require_frequencies(draw(sampler, HALVES, top_k=10**9), HALVES, {0, 1, 2, 3})
    require_frequencies(draw(sampler, HALVES, top_k=0), HALVES, {0, 1, 2, 3})


def test_min_p_keeps_tokens_by_their_share_of_the_best(sampler):
    require_frequencies(draw(sampler, HALVES, min_p=0.5), HALVES, {0, 1})
    require_frequencies(draw(sampler, HALVES, min_p=0.51), HALVES, {0})


@pytest.mark.parametrize("top_p", [0.9, 0.5])
def test_the_draw_is_the_same_in_every_batch_shape(sampler, top_p):
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(6, 50, generator=generator).mul(2).round() / 2
    seeds, positions = torch.arange(6) + 40, torch.arange(6) * 3
    settings = {"temperature": torch.full((6,), 0.9), "top_p": torch.full((6,), top_p)}
    whole = sampler(logits, seeds, positions, **settings)
    order = [4, 1, 5, 0]
    part = sampler(
        logits[order], seeds[order], positions[order], **{n: s[order] for n, s in settings.items()}
    )
    assert part.tolist() == whole[order].tolist()
    for row in range(6):
        alone = {name: setting[row : row + 1] for name, setting in settings.items()}
        one = slice(row, row + 1)
        assert sampler(logits[one], seeds[one], positions[one], **alone) == whole[row]


def test_another_position_or_seed_draws_anew(sampler):
    logits = torch.zeros(64, 1000)
    heat = torch.ones(64)
    counting, still = torch.arange(64), torch.full((64,), 7)
    by_seed = sampler(logits, counting, still, temperature=heat)
    by_position = sampler(logits, still, counting, temperature=heat)
    assert len(set(by_seed.tolist())) > 50
    assert len(set(by_position.tolist())) > 50
    assert by_seed.tolist() != by_position.tolist()


def test_seeds_that_differ_in_the_high_word_draw_differently(sampler):
    logits, heat = torch.zeros(2, 10_000), torch.ones(2)
    positions = torch.zeros(2, dtype=torch.int64)
    drawn = sampler(logits, torch.tensor([5, 5 + 2**40]), positions, temperature=heat)
    assert drawn[0] != drawn[1]


def test_frequencies_follow_the_temperature(sampler):
    cooled = [p**2 for p in HALVES]
    share = [p / sum(cooled) for p in cooled]
    require_frequencies(draw(sampler, HALVES, temperature=0.5), share, {0, 1, 2, 3})
