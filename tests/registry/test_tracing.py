"""Recorded graphs: portable operations where they are exported, traceable ones under compile."""

import io

import onnx
import onnxruntime
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import linnet.kernels as kernels

weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def off_by_one(x, weight, bias=None):
    return torch.nn.functional.linear(x, weight, bias) + 1


@pytest.fixture(autouse=True)
def _wrong_on_purpose():
    """An implementation whose use would show in the numbers."""
    torch.compiler.reset()
    kernels.register("linear", off_by_one, name="off_by_one")


class Module(torch.nn.Module):
    def forward(self, x):
        y = kernels.linear(x, weight)
        return kernels.silu_mul(y, y)


def expected(x):
    y = (x.double() @ weight.double().T).float()
    return torch.nn.functional.silu(y) * y


@pytest.mark.parametrize("strict", [True, False])
def test_export_holds_portable_operations_and_the_references_numbers(strict):
    program = torch.export.export(
        Module(), (x,), strict=strict, dynamic_shapes={"x": {0: torch.export.Dim("rows")}}
    )
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert targets
    assert all(target.startswith(("aten.", "<built-in", "_operator")) for target in targets)
    for rows in (1, 3, 7):
        given = torch.randn(rows, 8)
        torch.testing.assert_close(program.module()(given), expected(given))


def test_jit_trace_holds_the_references_numbers():
    traced = torch.jit.trace(Module(), (x,), check_trace=False)
    kinds = {node.kind().split("::")[0] for node in traced.inlined_graph.nodes()}
    assert kinds <= {"aten", "prim"}
    given = torch.randn(5, 8)
    torch.testing.assert_close(traced(given), expected(given))


@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_export_holds_the_references_numbers(dynamo, tmp_path):
    path = tmp_path / "model.onnx"
    if dynamo:
        torch.onnx.export(
            Module(), (x,), path, dynamo=True, dynamic_shapes={"x": {0: torch.export.Dim("rows")}}
        )
    else:
        buffer = io.BytesIO()
        torch.onnx.export(
            Module(), (x,), buffer, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "rows"}}
        )
        path.write_bytes(buffer.getvalue())
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    domains = {node.domain for node in onnx.load(path).graph.node}
    assert domains <= {"", "ai.onnx", "pkg.onnxscript.torch_lib"}
    for rows in (1, 3, 7):
        given = torch.randn(rows, 8)
        (result,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
        torch.testing.assert_close(torch.from_numpy(result), expected(given))


def test_compile_runs_the_chosen_one_without_a_break_or_a_compilation_per_call():
    counter = CompileCounter()
    compiled = torch.compile(lambda x: kernels.linear(x, weight), fullgraph=True, backend=counter)
    for rows in (3, 3, 4, 5, 6, 7):
        given = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(given), given @ weight.T + 1)
    assert counter.frame_count <= 2


def test_an_eager_call_after_compiling_does_not_compile_anew(slot):
    counter = CompileCounter()
    compiled = torch.compile(lambda x: slot.call(x), fullgraph=True, backend=counter)
    compiled(x)
    slot.call(x)
    kernels.explain(slot.name, x)
    compiled(x)
    assert counter.frame_count == 1


def test_switching_outside_is_seen_and_switching_back_finds_the_old_code():
    counter = CompileCounter()
    compiled = torch.compile(lambda x: kernels.linear(x, weight), fullgraph=True, backend=counter)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), x @ weight.T + 1)
        with kernels.use("reference"):
            torch.testing.assert_close(compiled(x), x @ weight.T)
    assert counter.frame_count == 2


def test_switching_inside_is_seen():
    def forward(x):
        a = kernels.linear(x, weight)
        with kernels.use("reference"):
            b = kernels.linear(x, weight)
            with kernels.use(linear="off_by_one"):
                c = kernels.linear(x, weight)
            d = kernels.linear(x, weight)
        return a - b, c - b, d - b, kernels.linear(x, weight) - b

    counter = CompileCounter()
    compiled = torch.compile(forward, fullgraph=True, backend=counter)
    for _ in range(2):
        means = [round(each.mean().item(), 4) for each in compiled(x)]
        assert means == [1.0, 1.0, 0.0, 1.0]
    assert counter.frame_count == 1
    torch.testing.assert_close(kernels.linear(x, weight), x @ weight.T + 1)


def test_registering_after_compiling_is_seen():
    compiled = torch.compile(lambda x: kernels.linear(x, weight), fullgraph=True, backend="eager")
    compiled(x)
    kernels.register("linear", lambda x, weight, bias=None: x @ weight.T + 2, name="later")
    torch.testing.assert_close(compiled(x), x @ weight.T + 2)


def test_what_is_not_traceable_stays_out_of_compiled_code(slot):
    slot.add("opaque", 1, traceable=False)
    compiled = torch.compile(lambda x: slot.call(x), fullgraph=True, backend="eager")
    assert compiled(x).equal(x * 2)
    assert slot.call(x).equal(x * 2 + 1)


def test_gradients_flow_through_compiled_slots():
    compiled = torch.compile(
        lambda x: kernels.linear(x, weight).sum(), fullgraph=True, backend="aot_eager"
    )
    given = x.clone().requires_grad_()
    compiled(given).backward()
    torch.testing.assert_close(given.grad, weight.sum(0).expand(3, 8))


def test_traced_calls_are_recorded_once(slot):
    before = kernels.history().traced.get(slot.name, {})
    compiled = torch.compile(lambda x: slot.call(x), fullgraph=True, backend="eager")
    for _ in range(5):
        compiled(x)
    assert before == {}
    assert kernels.history().traced[slot.name] == {"reference": 1}
    assert slot.name not in kernels.history().calls


def test_the_planners_capture_records_one_opaque_step():
    for strict in (True, False):
        with kernels.capturing():
            program = torch.export.export(Module(), (x,), strict=strict)
        steps = [node for node in program.graph.nodes if "linnet.slot" in str(node.target)]
        assert [node.args[0] for node in steps] == ["linear", "silu_mul"]
        torch.testing.assert_close(
            program.module()(x), torch.nn.functional.silu(x @ weight.T + 1) * (x @ weight.T + 1)
        )


def test_the_planners_step_writes_to_caches():
    class Write(torch.nn.Module):
        def forward(self, key, key_cache, value_cache, places):
            kernels.cache_write(key, key, key_cache, value_cache, places)
            return key_cache + 0

    def given():
        return (
            torch.arange(8.0).reshape(2, 1, 4),
            torch.zeros(1, 5, 1, 4),
            torch.zeros(1, 5, 1, 4),
            torch.tensor([1, 3]),
        )

    with kernels.capturing():
        program = torch.export.export(Write(), given(), strict=False)
    assert [n for n in program.graph.nodes if "linnet.slot.writing" in str(n.target)]
    args = given()
    result = program.module()(*args)
    assert result[0, :, 0, 0].tolist() == [0.0, 0.0, 0.0, 4.0, 0.0]
    assert args[2][0, 1, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_capturing_ends_with_its_block(slot):
    slot.add("one", 1)
    with kernels.capturing():
        assert slot.call(x).equal(x * 2 + 1)
    assert slot.call(x).equal(x * 2 + 1)


def test_compile_works_before_and_after_an_operator_of_linnets_was_defined():
    """On torch 2.11 a collected Library object breaks every later compilation."""
    import gc

    with kernels.capturing():
        kernels.linear(x, weight)
    gc.collect()
    compiled = torch.compile(lambda x: kernels.linear(x, weight) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(x), (x @ weight.T + 1) * 2)


def test_explain_inside_a_trace_names_the_rule(slot):
    slot.add("one", 1)
    told = []

    def run(x):
        told.append(kernels.explain(slot.name, x))
        return slot.call(x)

    run(torch.ones(3))
    torch.jit.trace(run, (torch.ones(3),), check_trace=False)
    assert [each.chosen for each in told] == ["one", "reference"]
    assert told[1].candidates[0].reason == (
        "torch.jit.trace and the ONNX exporter record the reference's operations"
    )
