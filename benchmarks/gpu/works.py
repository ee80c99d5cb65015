"""What `bench_gpu.py` measures: inputs, floors, peers and checks of each work."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu.timing import Call
from torch import Tensor

import linnet.kernels as kernels
from linnet import reference

LEVELS = [(100, 134), (50, 67), (25, 34), (13, 17)]
"""Of Deformable DETR on an image of 800 x 1066 pixels."""
PLACES = sum(height * width for height, width in LEVELS)
HEADS, CHANNELS, POINTS = 8, 32, 4
COLD = 2 * 10**8
"""Bytes that inputs of launches in a row have together: several times the second-level cache."""
LARGE = 3 * 10**8
"""Bytes from which on Python never keeps the device waiting."""


@dataclass
class Work:
    """One row of the benchmark.

    Attributes:
        slot: the slot.
        name: what is computed, unique within the slot.
        sides: name -> call, linnet's own first; a call takes the number of its set of inputs.
        count: calls in a graph.
        moved: bytes that must be read or written.
        flops: operations that must be done.
        errors: name -> error against float64, or the number of differing bits where exact.
        eager: name -> call, what is also timed without a graph; "slot" is the public function.
    """

    slot: str
    name: str
    sides: dict[str, Call]
    count: int
    moved: int
    flops: int
    errors: dict[str, float] = field(default_factory=dict)
    eager: dict[str, Call] = field(default_factory=dict)


def own(slot: str, name: str = "triton") -> Callable[..., Any]:
    """An implementation itself, never what dispatch would choose.

    Raises:
        LookupError: it can't run here.
    """
    for each in kernels.implementations(slot):
        if each.name == name:
            refusal = each.ready(torch.device("cuda", torch.cuda.current_device()))
            if refusal is not None:
                raise LookupError(f"{slot} {name}: {refusal.reason}")
            return each.call
    raise LookupError(f"{slot} has no implementation {name}")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reference as torch.compile makes it, for these sizes alone."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def tensors_of(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def largest_error(found: Any, expected: Any) -> float:
    pairs = zip(tensors_of(found), tensors_of(expected), strict=True)
    return max((one.double() - other.double()).abs().max().item() for one, other in pairs)


def elementwise(
    slot: str, name: str, sets: list[tuple[Any, ...]], moved: int, flops: int
) -> Iterator[Work]:
    """One of the slots whose calls read and write each number once."""
    plain = getattr(reference, slot)
    functions: dict[str, Callable[..., Any]] = {"triton": own(slot)}
    if any(each.name == "torch" for each in kernels.implementations(slot)):
        functions["torch"] = own(slot, "torch")
    functions |= {"torch.compile": compiled(plain), "eager": plain}

    def side(function: Callable[..., Any]) -> Call:
        return lambda number: function(*sets[number % len(sets)])

    wide = plain(*(e.double() if isinstance(e, Tensor) else e for e in sets[0]))
    exact = slot.startswith("fake_quant")
    expected = plain(*sets[0]) if exact else wide
    errors = {
        each: largest_error(function(*sets[0]), expected)
        for each, function in functions.items()
        if not (exact and each == "torch.compile")
    }
    sides = {each: side(function) for each, function in functions.items()}
    eager = {**sides, "slot": side(getattr(kernels, slot))} if moved < LARGE else {}
    yield Work(slot, name, sides, max(4, len(sets)), moved, flops, errors, eager)


def fake_quantisation() -> Iterator[Work]:
    """Activations or weights of 16384 x 8192 in bfloat16."""
    x = drawn(16384, 8192)
    moved, flops = 2 * x.nbytes, 5 * x.numel()
    for name, scale in (
        ("16384 x 8192 bf16, one scale", torch.tensor(0.0173, device="cuda")),
        ("16384 x 8192 bf16, a scale a row", torch.rand(16384, 1, device="cuda") + 0.01),
        ("16384 x 8192 bf16, a scale a column", torch.rand(8192, device="cuda") + 0.01),
    ):
        yield from elementwise("fake_quant_fp8", name, [(x, scale)], moved, flops)
    yield from elementwise(
        "fake_quant_fp8_dynamic", "16384 x 8192 bf16", [(x,)], moved, flops + 2 * x.numel()
    )


def norms_and_activation() -> Iterator[Work]:
    """4096 features in bfloat16, at many rows and at few."""
    for rows in (4096, 64):
        size = 2 * rows * 4096
        count = max(6, COLD // (4 * size))
        sets = [(drawn(rows, 4096), drawn(rows, 4096)) for _ in range(count)]
        weight = drawn(4096)
        name, numbers = f"{rows} x 4096 bf16", rows * 4096
        normed = [(*pair, weight) for pair in sets]
        alone = [(x, weight) for x, _ in sets]
        yield from elementwise("rms_norm", name, alone, 2 * size, 4 * numbers)
        yield from elementwise("layer_norm", name, alone, 2 * size, 7 * numbers)
        yield from elementwise("add_rms_norm", name, normed, 4 * size, 5 * numbers)
        yield from elementwise("silu_mul", name, sets, 3 * size, 5 * numbers)
        angles = [torch.randn(rows, 64, device="cuda") for _ in range(2)]
        turned = [
            (one.view(rows, 32, 128), two.view(rows, 32, 128)[:, :8], *angles) for one, two in sets
        ]
        moved = size * 5 // 2 + 2 * angles[0].nbytes
        name = f"{rows} tokens, 32 and 8 heads of 128, bf16"
        yield from elementwise("rotary", name, turned, moved, numbers * 5 // 4 * 3)
    rows = 2 * PLACES
    sets = [tuple(drawn(rows, 256, dtype=torch.float32) for _ in range(2)) for _ in range(4)]
    vectors = [drawn(256, dtype=torch.float32) for _ in range(2)]
    yield from elementwise(
        "add_layer_norm",
        f"{rows} x 256 fp32, an encoder layer of Deformable DETR",
        [(*pair, *vectors) for pair in sets],
        4 * sets[0][0].nbytes,
        8 * rows * 256,
    )


def _centres() -> Tensor:
    """Where the cells of all levels have their centres (S, 2), as (x, y)."""
    points: list[Tensor] = []
    for height, width in LEVELS:
        rows = (torch.arange(height, device="cuda") + 0.5) / height
        columns = (torch.arange(width, device="cuda") + 0.5) / width
        grid = torch.meshgrid(rows, columns, indexing="ij")
        points.append(torch.stack(grid[::-1], -1).flatten(0, 1))
    return torch.cat(points)


def _deformable(batch: int, encoder: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Value, locations within about two pixels of reference points, and weights."""
    if encoder:
        around = _centres().expand(batch, -1, -1)
    else:
        around = torch.rand(batch, 300, 2, device="cuda")
    sizes = torch.tensor([(w, h) for h, w in LEVELS], device="cuda").unsqueeze(1)
    shape = (batch, around.shape[1], HEADS, len(LEVELS), POINTS)
    noise = 2 * torch.randn(*shape, 2, device="cuda") / sizes
    locations = around[:, :, None, None, None] + noise
    weights = torch.rand(shape, device="cuda").flatten(3).softmax(-1).reshape(shape)
    value = drawn(batch, PLACES, HEADS, CHANNELS, dtype=dtype)
    return value, locations.to(dtype), weights.to(dtype)


def deformable_attention() -> Iterator[Work]:
    """Deformable DETR's encoder and decoders, forward and with backward."""
    for dtype, kind in (
        (torch.float32, "fp32"),
        (torch.float16, "fp16"),
        (torch.bfloat16, "bf16"),
    ):
        for name, batch, encoder in (
            ("encoder N=2", 2, True),
            ("decoder N=2", 2, False),
            ("decoder N=8", 8, False),
        ):
            sets = [_deformable(batch, encoder, dtype) for _ in range(2 if encoder else 4)]
            yield from _both_directions(f"{name}, {kind}", sets)


def _both_directions(name: str, sets: list[tuple[Tensor, ...]]) -> Iterator[Work]:
    def forward(call: Callable[..., Tensor]) -> Call:
        def run(number: int) -> Tensor:
            value, *points = sets[number % len(sets)]
            return call(value, LEVELS, *points)

        return run

    def backward(call: Callable[..., Tensor]) -> Call:
        leaves = [[each.detach().requires_grad_() for each in given] for given in sets]

        def run(number: int) -> tuple[Tensor, ...]:
            value, *points = leaves[number % len(sets)]
            with torch.enable_grad():
                out = call(value, LEVELS, *points)
            return torch.autograd.grad(out, [value, *points], cotangents[number % len(sets)])

        return run

    value, locations, weights = sets[0]
    slot = "ms_deform_attn"
    calls: dict[str, Callable[..., Tensor]] = {"triton": own(slot)}
    if value.dtype == torch.float32:
        try:
            calls["hub"] = own(slot, "hub")
        except LookupError as error:
            print(f"not measured: {error}")
    calls["eager"] = reference.ms_deform_attn
    sides = {each: forward(call) for each, call in calls.items()}
    out = sides["triton"](0)
    expected = reference.ms_deform_attn(
        value.double(), LEVELS, locations.double(), weights.double()
    )
    errors = {each: largest_error(side(0), expected) for each, side in sides.items()}
    if value.dtype == torch.float32:
        fused = compiled(reference.ms_deform_attn)
        sides["torch.compile"] = forward(fused)
    read = sum(each.nbytes for each in sets[0])
    points = weights.numel()
    # Four cells of each point: a product and a sum a channel.
    flops = points * (8 * CHANNELS + 30)
    count = 4 if locations.shape[1] > 300 else 16
    eager = {**sides, "slot": forward(kernels.ms_deform_attn)} if count == 16 else {}
    yield Work(slot, name, sides, count, read + out.nbytes, flops, errors, eager)
    cotangents = [torch.randn_like(out) for _ in sets]
    sides = {each: backward(call) for each, call in calls.items()}
    yield Work(
        slot, f"{name}, with backward", sides, count, 2 * (read + out.nbytes) + read, 4 * flops
    )
    only = {"triton": _backward_alone(sets, cotangents)}
    yield Work(slot, f"{name}, backward", only, count, 2 * read + out.nbytes, 3 * flops)


def _backward_alone(sets: list[tuple[Tensor, ...]], cotangents: list[Tensor]) -> Call:
    operator = torch.ops.linnet.ms_deform_attn_backward.default
    sizes = [number for pair in LEVELS for number in pair]

    def run(number: int) -> Any:
        value, *points = sets[number % len(sets)]
        cotangent = cotangents[number % len(sets)]
        return operator(cotangent, value, None, sizes, *points, [True] * 3, False)

    return run


def every() -> Iterator[Work]:
    """All works, their inputs made one after the other."""
    yield from fake_quantisation()
    yield from norms_and_activation()
    yield from deformable_attention()
