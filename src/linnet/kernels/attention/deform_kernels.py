"""The Triton kernels of `ms_deform_attn`.

A program serves some queries of one head. Its tile has the points of one level, their queries and
the head's channels: neighbouring threads read neighbouring channels of one cell in accesses of 16
bytes, and threads share no work but the places of points. Sums are in float32.
"""

# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUntypedFunctionDecorator=false
# ruff: noqa: D103

import triton
import triton.language as tl


@triton.jit
def _level(level: tl.constexpr, shapes, h0, w0, h1, w1, h2, w2, h3, w3, h4, w4):
    """The height and width of a level: from memory where they were not read on the host."""
    if shapes is not None:
        height = tl.load(shapes + 2 * level).to(tl.int32)
        width = tl.load(shapes + 2 * level + 1).to(tl.int32)
    elif level == 0:
        height, width = h0, w0
    elif level == 1:
        height, width = h1, w1
    elif level == 2:
        height, width = h2, w2
    elif level == 3:
        height, width = h3, w3
    else:
        height, width = h4, w4
    return height, width


@triton.jit
def _pair(locations, at, given):
    """Both coordinates of points in one access: two halves of one integer."""
    if locations.dtype.element_ty == tl.float32:
        both = tl.load(locations.to(tl.pointer_type(tl.int64)) + at, mask=given, other=0)
        x = both.to(tl.int32).to(tl.float32, bitcast=True)
        y = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        both = tl.load(locations.to(tl.pointer_type(tl.int32)) + at, mask=given, other=0)
        x = both.to(tl.int16).to(locations.dtype.element_ty, bitcast=True).to(tl.float32)
        y = (both >> 16).to(tl.int16).to(locations.dtype.element_ty, bitcast=True).to(tl.float32)
    return x, y


@triton.jit
def _points(locations, weights, at, given, height, width):
    """Points: the cell up and to the left, how far beyond its centre they lie, and their weights.

    What is not finite lies nowhere, and how far is NaN.
    """
    x, y = _pair(locations, at, given)
    x, y = x * width - 0.5, y * height - 0.5
    left, top = tl.floor(x), tl.floor(y)
    weight = tl.load(weights + at, mask=given, other=0.0).to(tl.float32)
    return left.to(tl.int32), top.to(tl.int32), x - left, y - top, weight


@triton.jit
def _cell(left, top, height, width, corner: tl.constexpr):
    """One of the four cells around a point: its place in the level, and whether it is there."""
    column, row = left + corner % 2, top + corner // 2
    # A negative number is a large one without its sign.
    across = column.to(tl.uint32, bitcast=True) < width.to(tl.uint32)
    down = row.to(tl.uint32, bitcast=True) < height.to(tl.uint32)
    return row * width + column, across & down


@triton.jit
def _part(beyond, side: tl.constexpr):
    """The share of one of two neighbours in a point that lies so far beyond the first one."""
    return beyond if side == 1 else 1 - beyond


@triton.jit
def _rows(queries, heads, blocks, rows: tl.constexpr):
    """A program's image and head, its first row of (image, query, head), and which rows there are.

    What one image has is counted in 32 bits, what all have is not.
    """
    head = tl.program_id(0) % heads
    block = tl.program_id(0) // heads % blocks
    image = (tl.program_id(0) // heads // blocks).to(tl.int64)
    first = (image * queries + block * rows) * heads + head
    return image, head, first, queries - block * rows


@triton.jit
def forward_kernel(
    value, shapes, locations, weights, out, h0, w0, h1, w1, h2, w2, h3, w3, h4, w4,
    queries, heads, blocks, value_image, value_place, value_head,
    levels: tl.constexpr, points: tl.constexpr, channels: tl.constexpr, rows: tl.constexpr,
    block_points: tl.constexpr, block_channels: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    image, head, first, left_over = _rows(queries, heads, blocks, rows)
    point = tl.arange(0, block_points)[:, None]
    row = tl.arange(0, rows)[None, :]
    channel = tl.arange(0, block_channels)
    locations += first * (levels * points * 2)
    weights += first * (levels * points)
    value += image * value_image + head * value_head
    total = tl.zeros((block_points, rows, block_channels), tl.float32)
    for level in tl.static_range(levels):
        height, width = _level(level, shapes, h0, w0, h1, w1, h2, w2, h3, w3, h4, w4)
        for start in range(0, points, block_points):
            given = (row < left_over) & (point < points - start)
            at = row * (heads * levels * points) + level * points + start + point
            left, top, across, down, weight = _points(locations, weights, at, given, height, width)
            for corner in tl.static_range(4):
                cell, there = _cell(left, top, height, width, corner)
                if wide:
                    cell = cell.to(tl.int64)
                found = tl.load(
                    value + (cell * value_place)[:, :, None] + channel[None, None, :],
                    mask=(there & given)[:, :, None] & (channel < channels)[None, None, :],
                    other=0.0,
                )  # fmt: skip
                share = _part(across, corner % 2) * _part(down, corner // 2) * weight
                total += share[:, :, None] * found.to(tl.float32)
        value += height.to(tl.int64) * width * value_place
    row = tl.arange(0, rows)
    to = out + first * channels + (row * (heads * channels))[:, None] + channel[None, :]
    kept = (row < left_over)[:, None] & (channel < channels)[None, :]
    tl.store(to, tl.sum(total, 0).to(out.dtype.element_ty), mask=kept)


@triton.jit
def backward_kernel(
    grad, value, shapes, locations, weights, value_grad, location_grad, weight_grad,
    h0, w0, h1, w1, h2, w2, h3, w3, h4, w4,
    queries, heads, blocks, places, value_image, value_place, value_head,
    levels: tl.constexpr, points: tl.constexpr, channels: tl.constexpr, rows: tl.constexpr,
    block_points: tl.constexpr, block_channels: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    image, head, first, left_over = _rows(queries, heads, blocks, rows)
    point = tl.arange(0, block_points)[:, None]
    row = tl.arange(0, rows)[None, :]
    # Halves too are read four at a time, as the sums in float32 are written: wider accesses would
    # put each thread's sums further apart.
    channel = tl.max_contiguous(tl.arange(0, block_channels), 4)[None, None, :]
    inside = channel < channels
    locations += first * (levels * points * 2)
    weights += first * (levels * points)
    value += image * value_image + head * value_head
    arriving = tl.load(
        grad + first * channels + (row * (heads * channels))[:, :, None] + channel,
        mask=(row < left_over)[:, :, None] & inside, other=0.0,
    ).to(tl.float32)  # fmt: skip
    if value_grad is not None:
        value_grad += (image * places * heads + head) * channels
    for level in tl.static_range(levels):
        height, width = _level(level, shapes, h0, w0, h1, w1, h2, w2, h3, w3, h4, w4)
        for start in range(0, points, block_points):
            given = (row < left_over) & (point < points - start)
            at = row * (heads * levels * points) + level * points + start + point
            left, top, across, down, weight = _points(locations, weights, at, given, height, width)
            by_x = tl.zeros_like(across)
            by_y = tl.zeros_like(across)
            by_weight = tl.zeros_like(across)
            for corner in tl.static_range(4):
                cell, there = _cell(left, top, height, width, corner)
                there = (there & given)[:, :, None] & inside
                if wide:
                    cell = cell.to(tl.int64)
                by_column = _part(across, corner % 2)
                by_row = _part(down, corner // 2)
                if location_grad is not None or weight_grad is not None:
                    found = tl.load(
                        value + (cell * value_place)[:, :, None] + channel, mask=there, other=0.0
                    )
                    product = tl.sum(found.to(tl.float32) * arriving, 2)
                    by_weight += by_column * by_row * product
                    by_x += product * (by_row if corner % 2 == 1 else -by_row)
                    by_y += product * (by_column if corner // 2 == 1 else -by_column)
                if value_grad is not None:
                    to = value_grad + (cell * (heads * channels))[:, :, None] + channel
                    share = (by_column * by_row * weight)[:, :, None]
                    tl.atomic_add(to, share * arriving, mask=there, sem="relaxed")
            to = first * (levels * points) + at
            if weight_grad is not None:
                kind = weight_grad.dtype.element_ty
                tl.store(weight_grad + to, by_weight.to(kind), mask=given)
            if location_grad is not None:
                kind = location_grad.dtype.element_ty
                by_x, by_y = by_x * weight * width, by_y * weight * height
                tl.store(location_grad + 2 * to, by_x.to(kind), mask=given)
                tl.store(location_grad + 2 * to + 1, by_y.to(kind), mask=given)
        value += height.to(tl.int64) * width * value_place
        if value_grad is not None:
            value_grad += height.to(tl.int64) * width * (heads * channels)


@triton.jit
def corners_kernel(
    shapes, locations, weights, cells, shares, h0, w0, h1, w1, h2, w2, h3, w3, h4, w4,
    queries, heads, blocks, places,
    levels: tl.constexpr, points: tl.constexpr, rows: tl.constexpr, block_points: tl.constexpr,
):  # fmt: skip
    """Lists, for each corner of each point of an image, the cell (head, place) and its share."""
    _, head, first, left_over = _rows(queries, heads, blocks, rows)
    point = tl.arange(0, block_points)[:, None]
    row = tl.arange(0, rows)[None, :]
    nowhere = heads * places
    before = head * places
    for level in tl.static_range(levels):
        height, width = _level(level, shapes, h0, w0, h1, w1, h2, w2, h3, w3, h4, w4)
        for start in range(0, points, block_points):
            given = (row < left_over) & (point < points - start)
            at = first * (levels * points) + row * (heads * levels * points) + level * points
            at += start + point
            left, top, across, down, weight = _points(locations, weights, at, given, height, width)
            for corner in tl.static_range(4):
                cell, there = _cell(left, top, height, width, corner)
                share = _part(across, corner % 2) * _part(down, corner // 2) * weight
                tl.store(cells + 4 * at + corner, tl.where(there, before + cell, nowhere), given)
                tl.store(shares + 4 * at + corner, share, given)
        before += height * width


@triton.jit
def collect_kernel(
    grad, shares, order, starts, value_grad, places, heads,
    each: tl.constexpr, channels: tl.constexpr, block: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Adds up what arrives at one cell of an image, in the order of the queries."""
    cell = tl.program_id(0)
    head, place = cell // places, cell % places
    channel = tl.arange(0, block_channels)
    inside = channel < channels
    total = tl.zeros((block_channels,), tl.float32)
    last = tl.load(starts + cell + 1)
    for start in range(tl.load(starts + cell), last, block):
        entry = start + tl.arange(0, block)
        corner = tl.load(order + entry, mask=entry < last, other=0)
        share = tl.load(shares + corner, mask=entry < last, other=0.0)
        query_head = corner // each
        found = tl.load(
            grad + (query_head * channels)[:, None] + channel[None, :],
            mask=(entry < last)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        total += tl.sum(share[:, None] * found.to(tl.float32), 0)
    to = value_grad + (place.to(tl.int64) * heads + head) * channels + channel
    tl.store(to, total.to(value_grad.dtype.element_ty), mask=inside)
