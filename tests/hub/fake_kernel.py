"""A kernel of plain Python with the functions of kernels-community/deformable-detr."""

import torch

calls = {"forward": 0, "backward": 0}


def _sampled(value, shapes, starts, locations, weights):
    batch, _, heads, channels = value.shape
    queries = locations.shape[1]
    out = value.new_zeros(batch, queries, heads, channels)
    b = torch.arange(batch).reshape(-1, 1, 1, 1)
    h = torch.arange(heads).reshape(1, 1, -1, 1)
    for level, (height, width) in enumerate(shapes.tolist()):
        start = int(starts[level])
        x = locations[:, :, :, level, :, 0] * width - 0.5
        y = locations[:, :, :, level, :, 1] * height - 0.5
        for right in (0, 1):
            for below in (0, 1):
                column, row = x.detach().floor() + right, y.detach().floor() + below
                share = (1 - (x - column).abs()) * (1 - (y - row).abs())
                inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
                place = torch.where(inside, row * width + column, torch.zeros_like(row)).long()
                cell = value[b, start + place, h]
                cell = torch.where(inside.unsqueeze(-1), cell, torch.zeros_like(cell))
                share = torch.where(inside, share * weights[:, :, :, level], torch.zeros_like(x))
                out = out + (cell * share.unsqueeze(-1)).sum(3)
    return out.flatten(2)


def _checked(value, shapes, starts, locations, weights, step):
    tensors = (value, shapes, starts, locations, weights)
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert shapes.dtype == starts.dtype == torch.int64
    assert value.dtype == locations.dtype == weights.dtype == torch.float32
    assert value.shape[0] % min(value.shape[0], step) == 0
    assert not torch.is_grad_enabled()


def ms_deform_attn_forward(value, shapes, starts, locations, weights, im2col_step):
    _checked(value, shapes, starts, locations, weights, im2col_step)
    calls["forward"] += 1
    return _sampled(value, shapes, starts, locations, weights)


def ms_deform_attn_backward(value, shapes, starts, locations, weights, gradient, im2col_step):
    _checked(value, shapes, starts, locations, weights, im2col_step)
    assert gradient.is_contiguous()
    calls["backward"] += 1
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in (value, locations, weights)]
        out = _sampled(leaves[0], shapes, starts, leaves[1], leaves[2])
        return list(torch.autograd.grad(out, leaves, gradient))
