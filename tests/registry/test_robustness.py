"""What has to hold when a selection meets threads, modes, odd signatures and repeated use."""

import gc
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import linnet.kernels as kernels
from linnet.kernels.slot import Builtin, slots

x = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def define():
    """Defines slots that go away with the test."""
    made = []

    def add(name, reference, **declared):
        made.append(name)
        return kernels.define(name, reference, **declared)

    yield add
    for name in made:
        slots.pop(name, None)


def test_a_fall_inside_plainly_compiled_code_ends_and_answers(slot, falls_of):
    torch.compiler.reset()

    def broken(x, y=None, *, power=None):
        raise RuntimeError("a")

    kernels.register(slot.name, broken, name="one")
    compiled = torch.compile(lambda x: slot.call(x), backend="eager")
    result, warned = falls_of(lambda: compiled(x))
    assert result.equal(x * 2)
    assert len(warned) == 1


def test_a_use_nested_in_itself_inside_compiled_code_leaves_nothing_behind(slot):
    torch.compiler.reset()
    slot.add("one", 1)

    def forward(x):
        reference = kernels.use("reference")
        with reference:
            with reference:
                a = slot.call(x)
            b = slot.call(x)
        return a, b, slot.call(x)

    a, b, c = torch.compile(forward, backend="eager", fullgraph=True)(x)
    assert a.equal(x * 2)
    assert b.equal(x * 2)
    assert c.equal(x * 2 + 1)
    assert slot.call(x).equal(x * 2 + 1)
    assert kernels.explain(slot.name, x).chosen == "one"


def test_threads_do_not_share_a_workspace(slot):
    def impl(x, y=None, *, power=None, workspace):
        scratch = workspace[: x.numel() * 4].view(torch.float32)
        scratch.copy_(x.flatten())
        time.sleep(0.01)
        return scratch.reshape(x.shape) * 2

    kernels.register(slot.name, impl, name="scratching", workspace=lambda x, y=None: x.numel() * 4)
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda n: slot.call(torch.full((8,), float(n)))[0].item(), range(8))
    assert list(results) == [2.0 * n for n in range(8)]


def test_a_workspace_first_taken_in_inference_mode_serves_afterwards(slot):
    def impl(x, y=None, *, power=None, workspace):
        return workspace[: x.numel() * 4].view(torch.float32).copy_(x.flatten()) * 2

    kernels.register(slot.name, impl, name="scratching", workspace=64)
    with torch.inference_mode():
        slot.call(x)
    assert slot.call(x).equal((x * 2).flatten())


def test_a_fake_tensors_workspace_is_not_kept(slot):
    from torch._subclasses import FakeTensorMode

    def impl(x, y=None, *, power=None, workspace):
        return workspace[: x.numel() * 4].view(torch.float32).copy_(x.flatten()) * 2

    kernels.register(slot.name, impl, name="scratching", workspace=64)
    with FakeTensorMode() as mode:
        slot.call(mode.from_tensor(x))
    assert slot.call(x).equal((x * 2).flatten())


def test_a_workspace_compiles_without_a_break(slot):
    torch.compiler.reset()

    def impl(x, y=None, *, power=None, workspace):
        return x * 2 + workspace.numel()

    kernels.register(slot.name, impl, name="scratching", workspace=3)
    compiled = torch.compile(lambda x: slot.call(x), fullgraph=True, backend="eager")
    assert compiled(x).equal(x * 2 + 3)


def test_resolve_gives_what_can_be_called_with_the_slots_arguments(slot):
    kernels.register(
        slot.name, lambda x, y=None, *, workspace: x * 2 + 1, name="scratching", workspace=8
    )
    assert kernels.resolve(slot.name, x)(x=x).equal(x * 2 + 1)


@pytest.mark.parametrize("annotated", [True, False])
def test_gradients_are_seen_in_every_argument(define, annotated):
    def partly(x: Tensor, y=None, *, more=()) -> Tensor:
        return x * 2

    def loosely(x: Tensor, y: Tensor | float = 0.0, *, more: object = None) -> Tensor:
        return x * 2

    if annotated:
        call = define("gradients_seen", loosely)
    else:
        partly.__kwdefaults__ = {"more": None}
        call = define("gradients_seen", partly)
    kernels.register(
        "gradients_seen", lambda x, y=None, *, more=None: x * 3, name="b", backward=False
    )
    wanted = torch.ones(3, requires_grad=True)
    assert call(x).equal(x * 3)
    assert call(x, 1.0).equal(x * 3)
    assert call(x, wanted).equal(x * 2)
    assert call(x, more=[torch.ones(2), wanted]).equal(x * 2)
    with torch.no_grad():
        assert call(x, wanted).equal(x * 3)


def test_forward_mode_gradients_are_seen(slot):
    slot.add("one", 0, backward=False)
    kernels.register(slot.name, lambda x, y=None: x.detach() * 2, name="two", backward=False)
    _, tangent = torch.func.jvp(lambda t: slot.call(t), (x,), (torch.ones_like(x),))
    assert tangent.equal(torch.full_like(x, 2))


def test_parameters_may_be_named_like_anything(define):
    def reference(
        x: Tensor,
        *,
        top_k_p: float | None = None,
        slot: int = 0,
        self: int = 0,
        implementation: int = 0,
    ) -> Tensor:
        return x + slot + self + implementation

    call = define("oddly_named", reference)
    kernels.register("oddly_named", lambda x, *, slot=0, self=0: x - slot, name="less")
    assert call(x, slot=2).equal(x - 2)
    assert call(x, top_k_p=0.5).equal(x)
    assert call(x, implementation=3).equal(x + 3)
    explained = kernels.explain("oddly_named", x, slot=1, self=1, implementation=1)
    assert explained.chosen == "reference"
    assert kernels.implementations("oddly_named")[0].refusal(x, self=1) is None


def test_names_of_linnets_own_are_refused_as_parameters():
    with pytest.raises(ValueError, match="linnet's own"):
        kernels.define("clashing", lambda x, _k_gate=None: x)


def test_a_failed_definition_leaves_nothing(define):
    def reference(x: Tensor, y: Tensor = x) -> Tensor:
        return x

    for _ in range(2):
        with pytest.raises(TypeError, match="a slot's defaults are"):
            define("not_made", reference)
    with pytest.raises(ValueError, match="can't name a slot"):
        define("class", lambda x: x)
    assert "not_made" not in kernels.active()


@pytest.mark.parametrize("returned", ["nothing said", list[Tensor], tuple[Tensor, ...], int])
def test_a_reference_must_say_what_it_returns(returned):
    def reference(x: Tensor):
        return x

    if returned != "nothing said":
        reference.__annotations__["return"] = returned
    with pytest.raises(TypeError, match="must say what it returns"):
        kernels.define("unsaid", reference)


def test_tuples_keep_their_length_in_the_planners_capture(define):
    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2

    def single(x: Tensor) -> tuple[Tensor]:
        return (x + 1,)

    two, one = define("gives_two", pair), define("gives_one", single)
    with kernels.capturing():
        assert [each[0, 0].item() for each in two(x)] == [1.0, 2.0]
        assert isinstance(one(x), tuple)


def test_explanations_see_what_autocast_makes_of_the_inputs(define):
    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    call = define("autocast_seen", reference, autocast=("x", "weight"))
    only = lambda x, weight: x.dtype is torch.float32 or kernels.Refusal("needs float32")  # noqa: E731
    kernels.register("autocast_seen", lambda x, weight: x @ weight, name="wide", accepts=only)
    square = torch.ones(3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.explain("autocast_seen", x, square).chosen == "reference"
        call(x, square)
    assert kernels.history().calls["autocast_seen"] == {"reference": 1}
    assert kernels.explain("autocast_seen", x, square).chosen == "wide"


def test_devices_without_autocast_can_be_recorded():
    torch.compiler.reset()
    meta = torch.ones(2, 3, device="meta")

    class Module(torch.nn.Module):
        def forward(self, t):
            return kernels.silu_mul(t, t)

    assert torch.export.export(Module(), (meta,)).module()(meta).device.type == "meta"
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels.linear(meta, torch.ones(4, 3, device="meta")).shape == (2, 4)


@pytest.mark.parametrize("surrounding", ["autocast", "recording", "plain"])
def test_what_is_no_tensor_gets_the_references_words_everywhere(surrounding):
    import contextlib

    around = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "recording": kernels.recording(),
        "plain": contextlib.nullcontext(),
    }[surrounding]
    with around, pytest.raises(TypeError, match="gate is a list; expected a tensor"):
        kernels.silu_mul([1.0], x)
    with pytest.raises(TypeError, match="gate of silu_mul must be a tensor"):
        kernels.explain("silu_mul", [1.0], x)


def test_functorch_transforms_disable_nothing(slot):
    def reads_data(x, y=None, *, power=None):
        return x * (1 + (x.sum().item() == x.sum().item()))

    kernels.register(slot.name, reads_data, name="one")
    assert torch.func.vmap(lambda row: slot.call(row))(x).equal(x * 2)
    assert slot.name not in kernels.history().disabled
    scale = torch.tensor(1.0)
    torch.func.grad(lambda t: kernels.fake_quant_fp8(t, scale).sum())(x)
    assert "fake_quant_fp8" not in kernels.history().disabled


def test_a_counting_mode_hides_no_fall(slot, falls_of):
    from torch.utils.flop_counter import FlopCounterMode

    def broken(x, y=None, *, power=None):
        raise RuntimeError("a")

    slot.add("one", 1)
    kernels.register(slot.name, broken, name="two")

    def call():
        with FlopCounterMode(display=False):
            return slot.call(x)

    result, warned = falls_of(call)
    assert result.equal(x * 2 + 1)
    assert len(warned) == 1


def test_among_several_names_the_next_runs_after_a_fall(slot, falls_of):
    def broken(x, y=None, *, power=None):
        raise RuntimeError("a")

    slot.add("two", 2)
    kernels.register(slot.name, broken, name="one")
    with kernels.use(**{slot.name: ("one", "two")}):
        result, warned = falls_of(lambda: slot.call(x))
    assert result.equal(x * 2 + 2)
    assert len(warned) == 1


def test_what_was_disabled_goes_with_the_implementation(slot, falls_of):
    def broken(x, y=None, *, power=None):
        raise RuntimeError("a")

    slot.call(x)
    before = kernels.generation()
    kernels.register(slot.name, broken, name="one")
    falls_of(lambda: slot.call(x))
    kernels.unregister(slot.name, "one")
    assert kernels.generation() == before
    assert slot.name not in kernels.history().disabled
    slot.add("one", 1)
    assert slot.call(x).equal(x * 2 + 1)


def test_history_keeps_the_calls_of_what_was_removed(slot):
    slot.add("one", 1)
    slot.call(x)
    kernels.unregister(slot.name, "one")
    slot.call(x)
    assert kernels.history().calls[slot.name] == {"one": 1, "reference": 1}


def test_recordings_overlap_and_leave_the_selection_alone(slot):
    before = kernels.generation()
    with kernels.recording() as outer:
        slot.call(x)
        with kernels.recording() as inner:
            slot.call(x)
        slot.call(x)
        assert kernels.generation() == before
    assert (len(outer), len(inner)) == (3, 1)


def test_a_recording_shows_what_ran_after_a_fall(slot, falls_of):
    def broken(x, y=None, *, power=None):
        raise RuntimeError("a")

    kernels.register(slot.name, broken, name="one")
    with kernels.recording() as calls:
        falls_of(lambda: slot.call(x))
    assert calls[0].explanation.chosen == "reference"
    assert "its call raised RuntimeError: a" in calls[0].explanation.candidates[0].reason


def test_recording_leaves_the_planners_capture_as_it_is(slot):
    class Module(torch.nn.Module):
        def forward(self, x):
            return slot.call(x)

    for outer, inner in (
        (kernels.capturing, kernels.recording),
        (kernels.recording, kernels.capturing),
    ):
        with outer(), inner():
            program = torch.export.export(Module(), (x,), strict=False)
        assert any("linnet.slot" in str(node.target) for node in program.graph.nodes)


def test_a_predicate_that_raises_is_told_under_compile_too(slot, falls_of, monkeypatch):
    torch.compiler.reset()

    def broken():
        raise RuntimeError("driver too old")

    slot.add("one", 1, predicate=broken)
    compiled = torch.compile(lambda x: slot.call(x), fullgraph=True, backend="eager")
    result, warned = falls_of(lambda: compiled(x))
    assert result.equal(x * 2)
    assert len(warned) == 1


def test_running_out_of_memory_in_a_predicate_is_no_verdict(slot):
    asked = []

    def hungry():
        asked.append(1)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return True

    slot.add("one", 1, predicate=hungry)
    with pytest.raises(torch.OutOfMemoryError):
        slot.call(x)
    assert slot.call(x).equal(x * 2 + 1)


def test_a_subclass_that_answers_as_no_device_gets_the_reference():
    class Odd:
        device = torch.device("cpu")
        is_cpu = False
        is_cuda = False

    with pytest.raises(TypeError, match="gate is a Odd; expected a tensor"):
        kernels.silu_mul(Odd(), x)
    with pytest.raises(TypeError, match="gate is a Odd; expected a tensor"):
        kernels.silu_mul(Odd(), x)


def test_what_is_removed_is_freed(slot):
    def add():
        held = torch.ones(1000)

        def impl(x, y=None, *, power=None):
            return x + held[0]

        kernels.register(slot.name, impl, name="one", replace=True)
        slot.call(x)
        return weakref.ref(held)

    add()
    kept = len(slots[slot.name].states)
    references = [add() for _ in range(20)]
    assert len(slots[slot.name].states) == kept
    kernels.unregister(slot.name, "one")
    gc.collect()
    assert [reference() for reference in references] == [None] * 20


def test_equal_choices_are_one_selection(slot):
    slot.add("only_here", 1)
    with kernels.use("only_here"):
        everywhere = kernels.generation()
    with kernels.use(**{slot.name: "only_here"}):
        assert kernels.generation() == everywhere


@pytest.mark.parametrize("names", [(), None, 3, ("one", 2)])
def test_use_says_what_it_takes(slot, names):
    with pytest.raises(TypeError, match="takes a name or a tuple of names"):
        kernels.use(**{slot.name: names})


@pytest.mark.parametrize("name", ["a,b", "a=b", " a ", "a\nb", ""])
def test_names_that_the_environment_could_not_give_are_refused(slot, name):
    with pytest.raises(ValueError, match="can't name an implementation"):
        slot.add(name, 1)


def test_what_is_no_function_is_refused(slot):
    with pytest.raises(TypeError, match="must be a function, not 5"):
        kernels.register(slot.name, 5, name="one")
    with pytest.raises(TypeError, match="predicate of one must be a function"):
        slot.add("one", 1, predicate=True)


def test_a_builtins_name_is_taken_before_it_is_loaded(define, tmp_path, monkeypatch):
    (tmp_path / "late_module.py").write_text(
        "import linnet.kernels as kernels\n"
        "@kernels.register('with_a_builtin', name='late')\n"
        "def late(x): return x + 10\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def reference(x: Tensor) -> Tensor:
        return x

    call = define("with_a_builtin", reference, builtins=(Builtin("late", "late_module"),))
    with pytest.raises(ValueError, match="late_module"):
        kernels.register("with_a_builtin", lambda x: x + 1, name="late")
    kernels.register("with_a_builtin", lambda x: x + 2, name="late", replace=True)
    assert call(x).equal(x + 2)
    assert [each.name for each in kernels.implementations("with_a_builtin")] == [
        "late",
        "reference",
    ]
    sys.modules.pop("late_module", None)


def test_a_load_that_reaches_another_slot_is_seen_by_its_compiled_code(
    define, tmp_path, monkeypatch, slot
):
    torch.compiler.reset()
    (tmp_path / "reaching_module.py").write_text(
        "import linnet.kernels as kernels\n"
        "@kernels.register('reaching', name='far')\n"
        "def far(x): return x\n"
        f"@kernels.register({slot.name!r}, name='far')\n"
        "def other(x, y=None, *, power=None): return x + 10\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def reference(x: Tensor) -> Tensor:
        return x

    call = define("reaching", reference, builtins=(Builtin("far", "reaching_module"),))
    compiled = torch.compile(lambda x: slot.call(x), fullgraph=True, backend="eager")
    assert compiled(x).equal(x * 2)
    before = kernels.generation()
    call(x)
    assert slot.call(x).equal(x + 10)
    assert compiled(x).equal(x + 10)
    assert kernels.generation() != before
    sys.modules.pop("reaching_module", None)


def test_a_fork_while_another_thread_builds_does_not_hang(slot):
    slot.add("one", 1, predicate=lambda: time.sleep(0.3) or True)
    builder = threading.Thread(target=lambda: slot.call(x))
    builder.start()
    time.sleep(0.05)
    child = os.fork()
    if child == 0:
        os._exit(0 if slot.call(torch.ones(1)).item() == 3.0 else 1)
    builder.join()
    deadline = time.time() + 20
    status = None
    while time.time() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
