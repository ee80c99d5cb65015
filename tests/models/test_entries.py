"""The entries that keep a cache: rows and pages, packed and padded, prompts beside steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from linnet.models import Decoder, load

CLOSE = {"rtol": 0.0, "atol": 1e-4}
LENGTHS = (9, 1, 14)
PAGE = 4


@pytest.fixture
def reference(make_reference: Callable[..., Any]) -> Any:
    return make_reference("mistral", sliding_window=6)


@pytest.fixture
def folder(reference: Any, save: Callable[..., Path]) -> Path:
    return save(reference)


@pytest.fixture
def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 320, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture
def after(reference: Any) -> Callable[[Tensor], Tensor]:
    """Logits after the last token of a sequence."""

    def after(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return reference(ids[None], use_cache=False).logits[0, -1]

    return after


def dirty(model: Decoder) -> Decoder:
    """What was in memory before must not matter."""
    for pair in model.cache.rows:
        for tensor in pair:
            tensor.fill_(torch.nan)
    return model


def rows_model(folder: Path) -> Decoder:
    return dirty(load(folder, generics={"Batch": 4, "MaxSeq": 24}))


def paged_model(folder: Path) -> Decoder:
    return dirty(load(folder, generics={"Batch": 1, "MaxSeq": 64, "PageSize": PAGE}))


def packed(prompts: list[Tensor], rows: list[int], padding: int = 0) -> dict[str, Tensor]:
    """Arguments of prefill_packed for prompts from their first token on."""
    tokens = torch.cat([*prompts, torch.zeros(padding, dtype=torch.int64)])
    sizes = torch.tensor([len(prompt) for prompt in prompts])
    pad = torch.zeros(padding, dtype=torch.int64)
    last = torch.zeros(4, dtype=torch.int64)
    last[: len(prompts)] = sizes.cumsum(0) - 1
    return {
        "tokens": tokens,
        "rows": torch.cat((torch.tensor(rows).repeat_interleave(sizes), pad)),
        "positions": torch.cat([*(torch.arange(n) for n in sizes.tolist()), pad - 1]),
        "segments": torch.cat((torch.arange(len(prompts)).repeat_interleave(sizes), pad + 4)),
        "last": last,
    }


@pytest.mark.parametrize("padding", [0, 5])
def test_packed_prompts_and_their_next_step(
    folder: Path, prompts: list[Tensor], after: Callable[[Tensor], Tensor], padding: int
):
    model = rows_model(folder)
    rows = [2, 0, 3]
    logits = model.prefill_packed(**packed(prompts, rows, padding))
    assert logits.shape == (4, 320)
    for number, prompt in enumerate(prompts):
        torch.testing.assert_close(logits[number], after(prompt), **CLOSE)
    tokens, positions = torch.full((4, 1), 7), torch.full((4,), -1)
    for row, prompt in zip(rows, prompts, strict=True):
        positions[row] = len(prompt)
    logits = model.decode_rows(tokens, positions)
    for row, prompt in zip(rows, prompts, strict=True):
        expected = after(torch.cat((prompt, torch.tensor([7]))))
        torch.testing.assert_close(logits[row], expected, **CLOSE)


def test_padded_prompts_and_their_next_step(
    folder: Path, prompts: list[Tensor], after: Callable[[Tensor], Tensor]
):
    model = rows_model(folder)
    tokens = torch.zeros(3, 16, dtype=torch.int64)
    for number, prompt in enumerate(prompts):
        tokens[number, : len(prompt)] = prompt
    slots = torch.tensor([1, 3, 0])
    logits = model.prefill_slots(tokens, slots, torch.tensor(LENGTHS))
    for number, prompt in enumerate(prompts):
        torch.testing.assert_close(logits[number], after(prompt), **CLOSE)
    positions = torch.tensor([LENGTHS[2], LENGTHS[0], -1, LENGTHS[1]])
    logits = model.decode(torch.full((4, 1), 7), positions)
    for number, prompt in enumerate(prompts):
        expected = after(torch.cat((prompt, torch.tensor([7]))))
        torch.testing.assert_close(logits[slots[number]], expected, **CLOSE)


def test_prompts_beside_a_step_of_other_rows(
    folder: Path, prompts: list[Tensor], after: Callable[[Tensor], Tensor]
):
    model = rows_model(folder)
    model.prefill_packed(**packed(prompts[:1], [1]))
    steps = torch.full((4, 1), 7)
    positions = torch.tensor([-1, LENGTHS[0], -1, -1])
    # Rows 0 and 3 take prompts in the very pass in which they are parked as steps.
    logits = model.step_packed(
        **packed(prompts[1:], [0, 3]), step_tokens=steps, step_positions=positions
    )
    assert logits.shape == (8, 320)
    torch.testing.assert_close(logits[0], after(prompts[1]), **CLOSE)
    torch.testing.assert_close(logits[1], after(prompts[2]), **CLOSE)
    expected = after(torch.cat((prompts[0], torch.tensor([7]))))
    torch.testing.assert_close(logits[4 + 1], expected, **CLOSE)
    logits = model.decode(steps, torch.tensor([1, LENGTHS[0] + 1, -1, 14]))
    torch.testing.assert_close(
        logits[0], after(torch.cat((prompts[1], torch.tensor([7])))), **CLOSE
    )
    torch.testing.assert_close(
        logits[3], after(torch.cat((prompts[2], torch.tensor([7])))), **CLOSE
    )


def test_a_step_of_fewer_rows_than_the_cache_has(
    folder: Path, prompts: list[Tensor], after: Callable[[Tensor], Tensor]
):
    model = rows_model(folder)
    model.prefill_packed(**packed(prompts[:2], [0, 1]))
    logits = model.decode(torch.full((2, 1), 7), torch.tensor(LENGTHS[:2]))
    for number in range(2):
        expected = after(torch.cat((prompts[number], torch.tensor([7]))))
        torch.testing.assert_close(logits[number], expected, **CLOSE)


# Pages out of order, page 0 for nobody.
TABLE = torch.tensor([[5, 2, 9, 0], [7, 0, 0, 0], [3, 8, 1, 4]], dtype=torch.int32)


def paged(prompts: list[Tensor], starts: list[int], padding: int = 0) -> dict[str, Tensor]:
    """Arguments of prefill_paged for prompts that go on at `starts`."""
    pad = torch.zeros(padding, dtype=torch.int64)
    sizes = torch.tensor([len(prompt) for prompt in prompts])
    positions = [
        torch.arange(start, start + len(prompt))
        for start, prompt in zip(starts, prompts, strict=True)
    ]
    places = [TABLE[row, at // PAGE] * PAGE + at % PAGE for row, at in enumerate(positions)]
    return {
        "tokens": torch.cat([*prompts, pad]),
        "positions": torch.cat([*positions, pad]),
        "rows": torch.cat((torch.arange(len(prompts)).repeat_interleave(sizes), pad + 3)),
        "slots": torch.cat([*places, pad]).to(torch.int64),
        "last": (sizes.cumsum(0) - 1).clamp(min=0),
        "table": TABLE,
    }


@pytest.mark.parametrize("padding", [0, 6])
def test_paged_prompts_in_two_parts_and_their_next_step(
    folder: Path, prompts: list[Tensor], after: Callable[[Tensor], Tensor], padding: int
):
    model = paged_model(folder)
    cut = [5, 0, 8]
    first = [prompt[:at] for prompt, at in zip(prompts, cut, strict=True)]
    rest = [prompt[at:] for prompt, at in zip(prompts, cut, strict=True)]
    logits = model.prefill_paged(**paged(first, [0, 0, 0], padding))
    for number in (0, 2):
        torch.testing.assert_close(logits[number], after(first[number]), **CLOSE)
    logits = model.prefill_paged(**paged(rest, cut, padding))
    for number, prompt in enumerate(prompts):
        torch.testing.assert_close(logits[number], after(prompt), **CLOSE)
    logits = model.decode_paged(torch.full((3, 1), 7), torch.tensor(LENGTHS), TABLE)
    for number, prompt in enumerate(prompts):
        expected = after(torch.cat((prompt, torch.tensor([7]))))
        torch.testing.assert_close(logits[number], expected, **CLOSE)


def test_paged_prompts_beside_a_step(
    folder: Path, prompts: list[Tensor], after: Callable[[Tensor], Tensor]
):
    model = paged_model(folder)
    none = torch.zeros(0, dtype=torch.int64)
    model.prefill_paged(**paged([prompts[0], none, none], [0, 0, 0]))
    logits = model.step_paged(
        **paged([none, prompts[1], prompts[2]], [0, 0, 0], padding=2),
        step_tokens=torch.full((3, 1), 7),
        step_positions=torch.tensor([LENGTHS[0], -1, -1]),
    )
    assert logits.shape == (6, 320)
    torch.testing.assert_close(logits[1], after(prompts[1]), **CLOSE)
    torch.testing.assert_close(logits[2], after(prompts[2]), **CLOSE)
    expected = after(torch.cat((prompts[0], torch.tensor([7]))))
    torch.testing.assert_close(logits[3], expected, **CLOSE)


def test_pages_need_one_row(folder: Path):
    model = rows_model(folder)
    with pytest.raises(ValueError, match="pool of pages needs Batch 1"):
        model.decode_paged(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([0]), TABLE[:1])


@pytest.mark.parametrize(
    ("tokens", "positions"), [((2,), (2,)), ((2, 2), (2,)), ((2, 1), (3,)), ((2, 1), (2, 1))]
)
def test_a_step_of_the_wrong_shape_is_refused(
    folder: Path, tokens: tuple[int, ...], positions: tuple[int, ...]
):
    model = rows_model(folder)
    with pytest.raises(ValueError, match=r"takes tokens \(rows, 1\) and positions \(rows,\)"):
        model.decode(
            torch.zeros(tokens, dtype=torch.int64), torch.zeros(positions, dtype=torch.int64)
        )


def test_more_rows_than_the_cache_has_are_refused(folder: Path):
    with pytest.raises(ValueError, match="5 rows, but the model has Batch 4"):
        rows_model(folder).decode(
            torch.zeros(5, 1, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
        )


@pytest.mark.parametrize("position", [24, 25, 1000, -2])
def test_a_position_outside_the_cache_is_refused(folder: Path, position: int):
    with pytest.raises(ValueError, match="position"):
        rows_model(folder).decode(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([position]))


@pytest.mark.parametrize(
    ("shape", "slots", "lengths", "message"),
    [
        ((2, 4), [0, 1], [5, 4], "lengths run from 4 to 5; expected 1 to 4"),
        ((2, 4), [0, 1], [0, 4], "lengths run from 0 to 4; expected 1 to 4"),
        ((2, 4), [1, 1], [4, 4], r"slots are \[1, 1\]; expected no row twice"),
        ((1, 4), [4], [4], "slots run from 4 to 4; expected 0 to 3"),
        ((1, 25), [0], [25], "padded to 25 tokens, but the model has MaxSeq 24"),
        ((2, 4), [0, 1], [4], r"found \(2, 4\), \(2,\), \(1,\)"),
        ((0, 4), [], [], "at least one prompt"),
        ((1, 0), [0], [0], "at least one prompt and one token"),
    ],
)
def test_padded_prompts_that_do_not_fit_are_refused(
    folder: Path, shape: tuple[int, int], slots: list[int], lengths: list[int], message: str
):
    arguments = [torch.tensor(value, dtype=torch.int64) for value in (slots, lengths)]
    with pytest.raises(ValueError, match=message):
        rows_model(folder).prefill_slots(torch.zeros(shape, dtype=torch.int64), *arguments)


@pytest.mark.parametrize(
    ("rows", "positions", "message"),
    [
        ([0, 0], [23, 24], "positions run from 23 to 24; expected -1 to 23"),
        ([4, 4], [0, 1], "rows run from 4 to 4; expected 0 to 3"),
        ([0], [0, 1], r"found \(2,\), \(1,\), \(2,\), \(2,\)"),
    ],
)
def test_packed_prompts_that_do_not_fit_are_refused(
    folder: Path, rows: list[int], positions: list[int], message: str
):
    zeros = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        rows_model(folder).prefill_packed(
            zeros, torch.tensor(rows), torch.tensor(positions), zeros, torch.zeros(4).long()
        )


def test_no_tokens_are_refused_where_a_cache_is_kept(folder: Path):
    none, model = torch.zeros(0, dtype=torch.int64), rows_model(folder)
    with pytest.raises(ValueError, match="packed prompts are at least one token"):
        model.prefill_packed(none, none, none, none, torch.zeros(4).long())
    with pytest.raises(ValueError, match="of at least one row"):
        model.decode(none.unsqueeze(1), none)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0)])
def test_logits_of_nothing_are_empty(folder: Path, shape: tuple[int, int]):
    logits = load(folder, dtype=torch.bfloat16)(torch.zeros(shape, dtype=torch.int64))
    assert (logits.shape, logits.dtype) == ((*shape, 320), torch.bfloat16)


def test_reset_gives_the_memory_back(folder: Path):
    model = rows_model(folder)
    model.reset()
    assert model._cache is None
