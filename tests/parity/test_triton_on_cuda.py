"""What the parity suite's cases do not reach of the Triton kernels, on a CUDA device."""

import json
import os
import subprocess
import sys

import pytest
import torch

import linnet.kernels as kernels
from linnet import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LEVELS = [(20, 30), (10, 15), (1, 1)]
PLACES = sum(h * w for h, w in LEVELS)


@pytest.fixture(autouse=True)
def freed():
    yield
    torch.cuda.empty_cache()


def triton(operation):
    found = [each for each in kernels.implementations(operation) if each.name == "triton"]
    if not found:
        pytest.skip("needs triton")
    return found[0]


def deformable(batch=2, queries=200, dtype=torch.float32, heads=8, channels=32, points=4):
    generator = torch.Generator("cuda").manual_seed(3)

    def draw(*shape):
        return torch.rand(shape, generator=generator, device="cuda")

    value = draw(batch, PLACES, heads, channels) - 0.5
    locations = draw(batch, queries, heads, len(LEVELS), points, 2) * 1.2 - 0.1
    weights = draw(batch, queries, heads, len(LEVELS), points)
    return [each.to(dtype) for each in (value, locations, weights)]


def gradients(call, tensors, wanted=(True, True, True), shapes=LEVELS):
    leaves = [each.clone().requires_grad_(want) for each, want in zip(tensors, wanted, strict=True)]
    out = call(leaves[0], shapes, *leaves[1:])
    cotangent = torch.randn(
        out.shape, generator=torch.Generator("cuda").manual_seed(4), device="cuda"
    )
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    return torch.autograd.grad(out, asked, cotangent.to(out.dtype))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_deterministic_gradients_have_the_same_bits_each_time(deterministic, dtype):
    tensors = deformable(queries=3000, dtype=dtype)
    call = triton("ms_deform_attn")
    first, second = gradients(call, tensors), gradients(call, tensors)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("shapes", ["pairs", "on the device", "on the host"])
def test_deterministic_gradients_are_the_oracles(deterministic, shapes):
    tensors = deformable(queries=700)
    given = LEVELS if shapes == "pairs" else torch.tensor(LEVELS)
    given = given.cuda() if shapes == "on the device" else given
    found = gradients(triton("ms_deform_attn"), tensors, shapes=given)
    torch.use_deterministic_algorithms(False)
    expected = gradients(reference.ms_deform_attn, [each.double() for each in tensors])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_only_the_gradients_that_are_needed_are_computed(wanted):
    tensors = deformable()
    operator = torch.ops.linnet.ms_deform_attn_backward.default
    triton("ms_deform_attn").available(torch.device("cuda", 0))
    (found,) = gradients(triton("ms_deform_attn"), tensors, wanted)
    every = gradients(triton("ms_deform_attn"), tensors)
    torch.testing.assert_close(found, every[wanted.index(True)], rtol=1e-4, atol=1e-5)
    grad = torch.randn(2, 200, 256, device="cuda")
    sizes = [number for pair in LEVELS for number in pair]
    value, locations, weights = tensors
    made = operator(grad, value, None, sizes, locations, weights, list(wanted), False)
    assert [each.numel() > 0 for each in made] == list(wanted)


@pytest.mark.parametrize("shapes", ["pairs", "on the device"])
def test_the_host_never_waits_for_the_device(shapes):
    tensors = deformable()
    given = LEVELS if shapes == "pairs" else torch.tensor(LEVELS, device="cuda")
    call = triton("ms_deform_attn")
    gradients(call, tensors, shapes=given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(call, tensors, shapes=given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_second_derivative_is_refused_with_the_way_out():
    leaves = [each.requires_grad_() for each in deformable(batch=1, queries=3)]
    out = triton("ms_deform_attn")(leaves[0], LEVELS, *leaves[1:])
    (first,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*reference"):
        first.sum().backward()


def test_half_precision_is_summed_in_float32():
    tensors = deformable(queries=2000, dtype=torch.float16)
    expected = reference.ms_deform_attn(
        tensors[0].double(), LEVELS, *(each.double() for each in tensors[1:])
    )
    found = triton("ms_deform_attn")(tensors[0], LEVELS, *tensors[1:])
    assert (found - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    "operation",
    ["fake_quant_fp8", "ms_deform_attn", "rms_norm", "layer_norm", "rotary", "silu_mul"],
)
def test_compiled_by_inductor_it_keeps_its_numbers_and_gradients(operation):
    call = getattr(kernels, operation)
    inputs = arguments(operation)
    leaves = [each for each in inputs if isinstance(each, torch.Tensor)]
    trained = operation in ("fake_quant_fp8", "ms_deform_attn")
    if trained:
        leaves[0].requires_grad_()
    compiled = torch.compile(call, fullgraph=True)
    for one, other in zip(results(compiled(*inputs)), results(call(*inputs)), strict=True):
        torch.testing.assert_close(one, other)
    if trained:
        sums = [
            torch.autograd.grad(results(f(*inputs))[0].square().sum(), leaves[0])[0]
            for f in (compiled, call)
        ]
        torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-4)


def results(found):
    return (found,) if isinstance(found, torch.Tensor) else found


def arguments(operation):
    x = torch.randn(7, 96, device="cuda")
    vector = torch.randn(96, device="cuda")
    if operation == "fake_quant_fp8":
        return (x, torch.rand(7, 1, device="cuda"))
    if operation == "ms_deform_attn":
        value, locations, weights = deformable(queries=9)
        return (value, LEVELS, locations, weights)
    if operation == "rotary":
        query, key = (torch.randn(7, heads, 16, device="cuda") for heads in (6, 2))
        return (query, key, *torch.randn(2, 7, 8, device="cuda"))
    return {
        "rms_norm": (x, vector),
        "layer_norm": (x, vector, vector),
        "silu_mul": (x, x.flip(0)),
    }[operation]


LARGE = 2**31 + 4096


def test_more_numbers_than_32_bits_count_are_rounded():
    x = torch.randn(2**20, 96, device="cuda", dtype=torch.bfloat16).repeat(22, 1)
    assert x.numel() > LARGE
    scale = torch.rand(x.shape[0], 1, device="cuda") + 0.5
    found = triton("fake_quant_fp8")(x, scale)
    for part in (slice(0, 999), slice(x.shape[0] // 2, x.shape[0] // 2 + 999), slice(-999, None)):
        assert torch.equal(found[part], reference.fake_quant_fp8(x[part], scale[part]))
    found, scales = triton("fake_quant_fp8_dynamic")(x)
    expected = reference.fake_quant_fp8_dynamic(x[-999:])
    assert torch.equal(found[-999:], expected[0])
    assert torch.equal(scales[-999:], expected[1])


@pytest.mark.parametrize("operation", ["rms_norm", "add_layer_norm", "silu_mul", "rotary"])
def test_rows_beyond_what_32_bits_count_are_right(operation):
    rows = 2**20 + 8
    x = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16).repeat(257, 1)[:rows]
    assert x.numel() > LARGE
    vector = torch.randn(2048, device="cuda", dtype=torch.bfloat16)
    if operation == "rotary":
        angles = torch.randn(2, rows, 64, device="cuda")
        inputs = (x.view(rows, 16, 128), x.view(rows, 16, 128)[:, :2], *angles)
    else:
        inputs = {
            "rms_norm": (x, vector),
            "add_layer_norm": (x, x, vector, vector),
            "silu_mul": (x, x),
        }[operation]
    found = results(triton(operation)(*inputs))
    tail = [each[-9:] if each.shape[0] == rows else each for each in inputs]
    expected = results(getattr(reference, operation)(*tail))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[-9:], other, rtol=1e-2, atol=1e-2)


def test_images_beyond_what_32_bits_count_are_right():
    value, locations, weights = deformable(batch=2, queries=40, dtype=torch.float16)
    batch = LARGE // value[0].numel() + 2
    many = [
        each[:1].repeat(batch, *(1,) * (each.dim() - 1)) for each in (value, locations, weights)
    ]
    many[0][-1], many[1][-1], many[2][-1] = value[1], locations[1], weights[1]
    assert many[0].numel() > LARGE
    found = triton("ms_deform_attn")(many[0], LEVELS, *many[1:])
    expected = triton("ms_deform_attn")(value, LEVELS, locations, weights)
    assert torch.equal(found[-1], expected[1])
    assert torch.equal(found[-2], expected[0])


def test_an_image_of_more_numbers_than_32_bits_count_is_right():
    side, heads, channels = 2900, 8, 32
    value = torch.zeros(1, side * side, heads, channels, device="cuda", dtype=torch.float16)
    assert value.numel() > LARGE
    value[0, -side:] = torch.randn(side, heads, channels, device="cuda", dtype=torch.float16)
    locations = torch.rand(1, 50, heads, 1, 4, 2, device="cuda")
    locations[..., 1] = 1 - 0.25 / side
    weights = torch.rand(1, 50, heads, 1, 4, device="cuda")
    leaf = value.requires_grad_()
    found = triton("ms_deform_attn")(leaf, [(side, side)], locations, weights)
    # The last row alone: a map of one row, with the same distance to its centre and border.
    line = locations.clone()
    line[..., 1] = 0.75
    last = value.detach()[:, -side:].clone().requires_grad_()
    expected = reference.ms_deform_attn(last, [(1, side)], line, weights)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    (wanted,) = torch.autograd.grad(expected.sum(), last)
    torch.testing.assert_close(grad[:, -side:], wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("operation", ["fake_quant_fp8", "ms_deform_attn", "rms_norm", "silu_mul"])
def test_a_device_that_is_not_the_current_one_is_used(operation):
    inputs = arguments(operation)
    moved = [each.to("cuda:1") if isinstance(each, torch.Tensor) else each for each in inputs]
    found = results(triton(operation)(*moved))
    for one, other in zip(found, results(triton(operation)(*inputs)), strict=True):
        assert one.device == torch.device("cuda", 1)
        torch.testing.assert_close(one.cpu(), other.cpu())


@pytest.mark.parametrize("operation", ["fake_quant_fp8", "rms_norm", "silu_mul"])
def test_forward_mode_derivatives_go_to_the_reference(operation):
    inputs = list(arguments(operation))
    with torch.autograd.forward_ad.dual_level():
        inputs[0] = torch.autograd.forward_ad.make_dual(inputs[0], torch.randn_like(inputs[0]))
        refusal = triton(operation).refusal(*inputs)
        getattr(kernels, operation)(*inputs)
    assert refusal is not None
    assert operation not in kernels.history().disabled


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


REPEATED = {
    "rms_norm": lambda: (drawn(5, 96), drawn(96)),
    "add_rms_norm": lambda: (drawn(5, 96), drawn(5, 96), drawn(96)),
    "layer_norm": lambda: (drawn(5, 96), drawn(96), drawn(96)),
    "add_layer_norm": lambda: (drawn(5, 96), drawn(5, 96), drawn(96), drawn(96)),
    "rotary": lambda: (drawn(5, 4, 16), drawn(5, 2, 16), drawn(5, 8), drawn(5, 8)),
    "silu_mul": lambda: (drawn(5, 96), drawn(5, 96)),
    "fake_quant_fp8": lambda: (drawn(5, 96), drawn(5, 1).abs().float()),
    "fake_quant_fp8_dynamic": lambda: (drawn(5, 96),),
    "ms_deform_attn": lambda: (
        deformable()[0] * torch.rand((), device="cuda"),
        LEVELS,
        *deformable()[1:],
    ),
}


@pytest.mark.parametrize("operation", REPEATED)
def test_a_repeated_call_reads_its_own_inputs_and_writes_its_own_results(operation):
    call, plain = triton(operation), getattr(reference, operation)
    sets = [REPEATED[operation]() for _ in range(3)]
    stream = torch.cuda.Stream()
    found = [call(*sets[0])]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        found += [call(*given) for given in sets[1:]]
    stream.synchronize()
    for given, results in zip(sets, found, strict=True):
        torch.testing.assert_close(results, plain(*given), rtol=2e-2, atol=2e-2)


TUNED = """
import sys, torch, linnet.kernels as kernels
from linnet import reference
x, weight = torch.randn(300, 512, device="cuda"), torch.randn(512, device="cuda")
with kernels.use(rms_norm="triton", ms_deform_attn="triton"):
    out = kernels.rms_norm(x, weight)
    torch.testing.assert_close(out, reference.rms_norm(x, weight), rtol=1e-5, atol=1e-5)
    value = torch.rand(1, 12, 2, 16, device="cuda").requires_grad_()
    where = torch.rand(1, 40, 2, 1, 4, 2, device="cuda")
    share = torch.rand(1, 40, 2, 1, 4, device="cuda")
    found, expected = (
        torch.autograd.grad(call(value, [(3, 4)], where, share).sum(), value)[0]
        for call in (kernels.ms_deform_attn, reference.ms_deform_attn)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
"""


def test_tuning_measures_once_keeps_what_it_found_and_changes_no_number(tmp_path):
    kept = {}
    for turn in range(2):
        environment = {**os.environ, "LINNET_TUNE": "1", "LINNET_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", TUNED],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        files = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "tuning").iterdir()}
        assert turn == 0 or files == kept, "the second process measured again"
        kept = files
    found = [json.loads(file.read_text()) for file in (tmp_path / "tuning").iterdir()]
    assert {each["key"]["kernel"] for each in found} == {
        "_norm_kernel",
        "forward_kernel",
        "backward_kernel",
    }
    assert all(0 < each["seconds"] < 1e-2 for each in found)
