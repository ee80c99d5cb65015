"""`ms_deform_attn` as weighted sums of rows, which torch's embedding_bag does well on a CPU.

The value of one head at one place is a row of C numbers, and an output is the weighted sum of the
L * P * 4 rows around its points. Nothing is transposed and no sample is stored before it is summed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from linnet.kernels import Refusal, register
from linnet.kernels.attention.deform_shapes import host_pairs, require_fit


def _accepts(
    value: Tensor,
    spatial_shapes: Sequence[tuple[int, int]] | Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> object:
    if type(value) is not Tensor and type(value) is not torch.nn.Parameter:
        return Refusal(f"reads values, which a {type(value).__name__} may not let it do")
    if value.device.type != "cpu":
        return Refusal(f"needs CPU tensors, not {value.device.type}")
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return Refusal(f"computes in float32, which is too narrow for {value.dtype}")
    if value.dim() != 4 or sampling_locations.dim() != 6 or attention_weights.dim() != 5:
        return Refusal("needs value, locations and weights of four, six and five dimensions")
    return True


@register(
    "ms_deform_attn",
    name="embedding_bag",
    accepts=_accepts,
    backward=False,
    traceable=False,
    version=torch.__version__,
    source="torch",
)
def ms_deform_attn(
    value: Tensor,
    spatial_shapes: Sequence[tuple[int, int]] | Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Sample each level at points; see `linnet.reference.ms_deform_attn`."""
    shapes = host_pairs(
        spatial_shapes.cpu() if isinstance(spatial_shapes, Tensor) else spatial_shapes
    )
    assert shapes is not None
    require_fit(value, spatial_shapes, shapes, sampling_locations, attention_weights)
    batch, places, heads, channels = value.shape
    queries = sampling_locations.shape[1]
    table = value.to(torch.float32).reshape(batch * places * heads, channels)
    points, shares = sampling_locations.to(torch.float32), attention_weights.to(torch.float32)
    row, weight = _corners(shapes, points, shares, places)
    if not bool(table.sum().isfinite()):
        # A weight of zero does not silence a NaN, so corners that do not exist read a row of zeros.
        row.masked_fill_(_absent(shapes, points), table.shape[0])
        table = torch.cat((table, table.new_zeros(1, channels)))
    summands = row.shape[3:].numel()
    first = torch.arange(0, row.numel(), summands, dtype=torch.int32) if summands else None
    if first is None or not first.numel():
        return value.new_zeros(batch, queries, heads * channels)
    out = torch.nn.functional.embedding_bag(
        row.view(-1), table, first, per_sample_weights=weight.view(-1), mode="sum"
    )
    return out.view(batch, queries, heads * channels).to(value.dtype)


def _corners(
    shapes: Sequence[tuple[int, int]], points: Tensor, shares: Tensor, places: int
) -> tuple[Tensor, Tensor]:
    """Rows and weights (B, Q, H, L, P, 4) of the cells around each point; 0 where none is."""
    batch, _, heads = shares.shape[:3]
    row = torch.empty(*shares.shape, 4, dtype=torch.int32)
    weight = torch.empty(*shares.shape, 4)
    sequence = torch.arange(batch, dtype=torch.int32).view(batch, 1, 1, 1) * (places * heads)
    head = sequence + torch.arange(heads, dtype=torch.int32).view(heads, 1)
    begin = 0
    for level, (height, width) in enumerate(shapes):
        columns = _sides(points[:, :, :, level, :, 0], width)
        lines = _sides(points[:, :, :, level, :, 1], height)
        for line, down in lines:
            line.mul_(width).add_(begin)
            down.mul_(shares[:, :, :, level])
        for corner in range(4):
            (line, down), (column, across) = lines[corner // 2], columns[corner % 2]
            torch.add(head, line + column, alpha=heads, out=row[:, :, :, level, :, corner])
            torch.mul(down, across, out=weight[:, :, :, level, :, corner])
        begin += height * width
    return row, weight


def _sides(location: Tensor, size: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The two cells beside each location along one axis, and their parts: 0 where none is."""
    at = location * size - 0.5
    lower = at.floor()
    beyond = at - lower
    first = lower.to(torch.int32)
    second = first + 1
    near = (1 - beyond).mul_((first >= 0) & (first < size))
    far = beyond.mul_((second >= 0) & (second < size))
    return (first.clamp_(0, size - 1), near), (second.clamp_(0, size - 1), far)


def _absent(shapes: Sequence[tuple[int, int]], points: Tensor) -> Tensor:
    """Which of the cells around each point (B, Q, H, L, P, 4) lie outside of their level."""
    sizes = torch.tensor([(width, height) for height, width in shapes]).unsqueeze(1)
    lower = (points * sizes - 0.5).floor().unsqueeze(-2)
    corner = lower + torch.tensor([(0, 0), (1, 0), (0, 1), (1, 1)])
    return ((corner < 0) | (corner >= sizes.unsqueeze(-2))).any(-1)
