"""Reference math of the slot `sample`."""

import torch
from torch import Tensor

from linnet.reference.checks import (
    data_known,
    require_floating,
    require_integers,
    require_rank,
    require_same_device,
    require_shape,
    sizes_known,
)

# Probabilities this close below a border have reached it: rounded logits miss an exact border by
# less, and no model means the difference.
REACHED = 1e-6

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def sample(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Draw one token per row, the same one whatever else is in the batch.

    The draw is the argmax of logits / temperature plus Gumbel noise that depends only on (seed,
    position, token id): Philox4x32-10 with the seed as key and (token id // 4, the position's low
    word, its high word, 0) as counter; word token id % 4 of the block, w, gives
    u = (w + 0.5) / 2**32 and the noise -log(-log(u)), in float64.

    Filters look at the probabilities after temperature. top_k comes first, top_p looks at what it
    left, renormalised, and min_p at what both left. Ties are kept: a token as probable as the least
    probable one that stays, stays too, so no filter depends on the order of tokens. The most
    probable token always stays.

    Args:
        logits: (B, V), floating; -inf bans a token.
        seeds: (B,) int64.
        positions: (B,) int64, at least 0: the place of the drawn token in its sequence.
        temperature: (B,) floating, at least 0; 0, or None, takes the first of the largest logits.
        top_k: (B,) integers: keep that many; 0 or less, or V or more, keeps all.
        top_p: (B,) floating: keep the most probable tokens until their sum reaches top_p (to 1e-6);
            1 keeps all, 0 one.
        min_p: (B,) floating: keep tokens at least min_p times as probable as the most probable one
            (to one part in 1e6).

    Returns:
        (B,) int64 token ids.

    Raises:
        TypeError: a dtype that does not fit.
        ValueError: a wrong rank or size, an empty vocabulary, different devices, or (on the CPU) a
            value out of range.
    """
    _check(logits, seeds, positions, temperature, top_k, top_p, min_p)
    greedy = logits.argmax(-1)
    if temperature is None:
        return greedy
    numbers = logits.to(torch.float64)
    best = numbers.amax(-1, keepdim=True)
    heat = temperature.to(torch.float64).unsqueeze(1)
    distance = (numbers - best) / heat.masked_fill(heat == 0, 1.0)
    # Equal infinities have no difference; as the largest logits they are all at distance 0.
    distance = distance.masked_fill(numbers == best, 0.0)
    allowed = _allowed(distance, top_k, top_p, min_p)
    drawn = distance + _gumbel(seeds, positions, logits.shape[1])
    drawn = drawn.masked_fill(~allowed, float("-inf")).argmax(-1)
    return torch.where(temperature == 0, greedy, drawn)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four random 32-bit words for each counter and key.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; the words equal Random123's.

    Args:
        counter: four int64 tensors that broadcast, each holding a word from 0 to 2**32 - 1.
        key: two such tensors.

    Returns:
        Four int64 tensors of words from 0 to 2**32 - 1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c2 = _xor(_xor(high1, c1), k0), _xor(_xor(high0, c3), k1)
        c1, c3 = low1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product of two 32-bit words, in halves that cannot overflow int64."""
    low = (word & 0xFFFF) * factor
    middle = (word >> 16) * factor + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) + (low & 0xFFFF)


def _xor(one: Tensor, other: Tensor) -> Tensor:
    # The older ONNX exporter knows "and" on integers but no "exclusive or".
    return one ^ other if sizes_known() else one + other - 2 * (one & other)


def _gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Noise (B, V) of each row's seed and position."""
    seed, position = seeds.unsqueeze(1), positions.unsqueeze(1)
    block = torch.arange((vocabulary + 3) // 4, device=seeds.device).unsqueeze(0)
    low, high = position & _MASK, (position >> 32) & _MASK
    key = (seed & _MASK, (seed >> 32) & _MASK)
    words = philox((block, low, high, torch.zeros_like(block)), key)
    # Chosen by index: a slice would make exporters ask whether four divides the vocabulary.
    token = torch.arange(vocabulary, device=seeds.device)
    chosen = torch.stack(words, -1).flatten(1).index_select(1, token)
    uniform = (chosen.to(torch.float64) + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform))


def _allowed(
    distance: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Which tokens (B, V) the filters leave, given their log probabilities less the largest."""
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if top_k is not None or top_p is not None:
        ordered = distance.sort(-1, descending=True).values
        border = _border(ordered, top_k, top_p)
        allowed = distance >= border
    if min_p is not None:
        least = min_p.to(distance.dtype).unsqueeze(1) * (1 - REACHED)
        allowed = allowed & (distance.exp() >= least)
    # min_p above 1 is refused where it can be seen; elsewhere the most probable token still stays.
    return allowed | (distance == 0)


def _border(ordered: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """The smallest log probability (B, 1) that stays, from those in descending order."""
    last = torch.full_like(ordered[:, :1], ordered.shape[1] - 1).to(torch.int64)
    if top_k is not None:
        count = top_k.to(torch.int64).unsqueeze(1)
        last = torch.where(count > 0, torch.minimum(count - 1, last), last)
    border = ordered.gather(1, last)
    if top_p is None:
        return border
    mass = ordered.exp().masked_fill(ordered < border, 0.0)
    mass = mass / mass.sum(-1, keepdim=True)
    target = top_p.to(mass.dtype).unsqueeze(1)
    # A token stays while the sum before it falls short; from 1 on every token that is left does.
    short = (mass.cumsum(-1) - mass < target - REACHED) | (target >= 1)
    kept = ordered.masked_fill(~(short & (ordered >= border)), float("inf"))
    nucleus = torch.minimum(kept.amin(-1, keepdim=True), ordered[:, :1])
    return nucleus


def _check(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> None:
    slot = "sample"
    require_rank(slot, "logits", logits, 2, "(B, V)")
    require_floating(slot, logits=logits)
    rows = {
        "seeds": seeds,
        "positions": positions,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    given = {name: tensor for name, tensor in rows.items() if tensor is not None}
    for name, tensor in given.items():
        require_rank(slot, name, tensor, 1, "one value per row (B,)")
        require_shape(slot, name, tensor, logits.shape[:1], "one value per row (B,)")
        if name in ("seeds", "positions", "top_k"):
            require_integers(slot, **{name: tensor})
        else:
            require_floating(slot, **{name: tensor})
    require_same_device(slot, logits=logits, **given)
    if sizes_known() and logits.shape[1] == 0:
        raise ValueError(
            "sample: logits has an empty vocabulary; expected (B, V) with V at least 1"
        )
    for name, most in (("positions", None), ("temperature", None), ("top_p", 1), ("min_p", 1)):
        if name in given and data_known(given[name]):
            _check_range(name, given[name], most)


def _check_range(name: str, tensor: Tensor, most: int | None) -> None:
    wrong = ~(tensor >= 0) if most is None else ~((tensor >= 0) & (tensor <= most))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        upper = "at least 0" if most is None else f"0 to {most}"
        raise ValueError(f"sample: {name}[{row}] is {tensor[row].item()}; expected {upper}")
