"""`prepare`: what an implementation loads and checks before its first call on a device."""

import threading
import warnings

import pytest
import torch

import linnet.kernels as kernels
from linnet.kernels import rules
from linnet.kernels.slot import slots

x = torch.arange(6.0).reshape(2, 3)


class Preparation:
    """Counts its runs and answers, or raises, what it was given."""

    def __init__(self, answer=True):
        self.answer = answer
        self.runs = 0

    def __call__(self):
        self.runs += 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def fresh_environment(slot, monkeypatch, text):
    monkeypatch.setenv("LINNET_KERNELS", text)
    slots[slot.name].loaded = False


def candidate(slot, name, *args):
    return {each.name: each for each in kernels.explain(slot.name, *args).candidates}[name]


def test_it_runs_once_at_the_first_call_and_no_question_runs_it(slot):
    prepare = Preparation()
    slot.add("one", 1, prepare=prepare)
    assert kernels.active("cpu")[slot.name] == "one"
    assert kernels.explain(slot.name, x).chosen == "one"
    assert kernels.resolve(slot.name, x) is not None
    assert prepare.runs == 0
    for _ in range(3):
        assert slot.call(x).equal(x * 2 + 1)
    assert prepare.runs == 1
    assert kernels.history().calls[slot.name] == {"one": 3}


def test_explain_says_what_the_first_call_will_do(slot):
    slot.add("one", 1, prepare=Preparation())
    told = kernels.explain(slot.name, x)
    assert told.candidates[0].note == "loads at its first call"
    assert "chosen; loads at its first call" in str(told)
    slot.call(x)
    assert kernels.explain(slot.name, x).candidates[0].note == ""


def test_calls_that_another_rule_refuses_do_not_run_it(slot):
    prepare = Preparation()
    slot.add("one", 1, prepare=prepare, accepts=lambda x, y=None: x.dtype == torch.float64)
    slot.add("two", 2, prepare=prepare, predicate=lambda: kernels.Refusal("not here"))
    slot.add("three", 3, prepare=prepare, backward=False)
    assert slot.call(x.clone().requires_grad_()).equal(x * 2)
    assert prepare.runs == 0
    assert slot.call(x.double()).equal(x.double() * 2 + 3)


def test_once_prepared_the_chain_no_longer_looks(slot):
    import inspect

    slot.add("one", 1, prepare=Preparation())
    slot.call(x)
    assert "_k_prepare" not in inspect.getsource(slots[slot.name].gate.chain)


def test_a_refusal_excludes_it_in_silence_with_its_reason(slot, falls_of):
    prepare = Preparation(kernels.Refusal("no build for this chip"))
    slot.add("one", 1)
    slot.add("two", 2, prepare=prepare)
    result, warned = falls_of(lambda: [slot.call(x) for _ in range(3)][-1])
    assert result.equal(x * 2 + 1)
    assert warned == []
    assert prepare.runs == 1
    assert candidate(slot, "two", x).reason == "no build for this chip"
    assert kernels.active("cpu")[slot.name] == "one"
    assert slot.name not in {fall.slot for fall in kernels.history().falls}


def test_a_falsy_answer_is_a_refusal(slot):
    slot.add("one", 1, prepare=lambda: None)
    assert slot.call(x).equal(x * 2)
    assert candidate(slot, "one", x).reason == "its preparation returned None"


def test_an_exception_is_a_fall_with_one_warning(slot, falls_of):
    prepare = Preparation(OSError("no route to host"))
    slot.add("one", 1)
    slot.add("two", 2, prepare=prepare)
    result, warned = falls_of(lambda: [slot.call(x) for _ in range(3)][-1])
    assert result.equal(x * 2 + 1)
    assert len(warned) == 1
    assert "two is disabled on cpu" in warned[0]
    assert "its preparation raised OSError: no route to host" in warned[0]
    assert prepare.runs == 1
    assert list(kernels.history().disabled[slot.name]) == [("two", "cpu")]


def test_strict_makes_an_exception_an_error_at_each_call(slot, monkeypatch):
    monkeypatch.setenv("LINNET_STRICT", "1")
    prepare = Preparation(OSError("no route"))
    slot.add("one", 1, prepare=prepare)
    for _ in range(2):
        with pytest.raises(kernels.FallError, match=r"one: its preparation raised OSError: no rou"):
            slot.call(x)
    assert prepare.runs == 1
    assert slot.name not in kernels.history().disabled
    assert "no route" in str(kernels.explain(slot.name, x))


def test_strict_lets_a_refusal_pass(slot, monkeypatch):
    monkeypatch.setenv("LINNET_STRICT", "1")
    slot.add("one", 1, prepare=Preparation(kernels.Refusal("not here")))
    assert slot.call(x).equal(x * 2)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_what_is_no_fault_of_it_propagates_and_it_is_tried_again(slot, error):
    prepare = Preparation(error)
    slot.add("one", 1, prepare=prepare)
    with pytest.raises(type(error)):
        slot.call(x)
    prepare.answer = True
    assert slot.call(x).equal(x * 2 + 1)
    assert prepare.runs == 2


def test_a_fall_before_it_prepares_the_next(slot, falls_of):
    def broken(x, y=None, *, power=None):
        raise RuntimeError("broken")

    prepare, refused = Preparation(), Preparation(kernels.Refusal("no"))
    slot.add("one", 1, prepare=prepare)
    slot.add("two", 2, prepare=refused)
    kernels.register(slot.name, broken, name="three")
    result, warned = falls_of(lambda: [slot.call(x) for _ in range(2)][-1])
    assert result.equal(x * 2 + 1)
    assert len(warned) == 1
    assert (prepare.runs, refused.runs) == (1, 1)


def test_two_threads_prepare_once_and_both_get_its_answer(slot):
    begun, go_on = threading.Event(), threading.Event()
    runs = []

    def prepare():
        runs.append(threading.get_ident())
        begun.set()
        assert go_on.wait(10)
        return True

    slot.add("one", 1, prepare=prepare)
    results = []
    threads = [threading.Thread(target=lambda: results.append(slot.call(x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(runs) == 1
    assert len(results) == 4
    assert all(result.equal(x * 2 + 1) for result in results)


def test_a_preparation_that_calls_its_slot_gets_the_reference(slot):
    seen = []

    def prepare():
        seen.append(slot.call(x))
        return True

    slot.add("one", 1, prepare=prepare)
    assert slot.call(x).equal(x * 2 + 1)
    assert len(seen) == 1
    assert seen[0].equal(x * 2)


def test_the_generation_is_the_same_before_and_after(slot):
    slot.add("one", 1, prepare=Preparation())
    slot.add("two", 2, prepare=Preparation(kernels.Refusal("no")))
    before = kernels.generation()
    slot.call(x)
    assert kernels.generation() == before


def test_fake_tensors_prepare_nothing_and_real_ones_under_a_mode_see_real_memory(slot):
    from torch._subclasses import FakeTensorMode

    made = []

    def prepare():
        made.append(torch.ones(2))
        return True

    slot.add("one", 1, prepare=prepare)
    with FakeTensorMode() as mode:
        assert slot.call(mode.from_tensor(x)).shape == x.shape
    assert made == []
    with FakeTensorMode(allow_non_fake_inputs=True):
        slot.call(x)
    assert type(made[0]) is torch.Tensor


def test_nothing_is_prepared_while_a_graph_is_captured(slot, monkeypatch):
    """As on a CUDA device, where the rule stands in the chain; here `refuse` evaluates it."""
    prepare = Preparation()
    slot.add("one", 1, prepare=prepare, capture_safe=True)
    one = slots[slot.name].named("one")
    monkeypatch.setattr(rules, "capturing_graph", lambda: True)
    refusal = one.refusal(x)
    assert refusal.reason == (
        "it loads at its first call, and nothing loads while a CUDA graph is captured"
    )
    assert prepare.runs == 0
    assert one.ready("cpu") is None
    assert prepare.runs == 1
    assert one.refusal(x) is None


def test_a_chain_for_a_capturing_device_holds_that_rule_until_it_is_prepared(slot):
    slot.add("one", 1, prepare=Preparation(), capture_safe=True)
    one = slots[slot.name].named("one")
    assert len(rules.rules_of(one, capture=True)) == 1
    assert rules.rules_of(one, capture=True, ready=True) == []
    assert rules.rules_of(one, capture=False) == []


def test_torch_compile_prepares_while_it_traces(slot):
    made = []

    def prepare():
        made.append(torch.ones(2) + 1)
        return True

    slot.add("one", 1, prepare=prepare)
    call = torch.compile(lambda x: slot.call(x), fullgraph=True, backend="eager")
    assert call(x).equal(x * 2 + 1)
    assert [type(each) for each in made] == [torch.Tensor]
    assert made[0].equal(torch.full((2,), 2.0))


def test_torch_compile_leaves_out_what_refuses_and_what_it_can_not_trace(slot):
    untraced = Preparation()
    slot.add("one", 1)
    slot.add("two", 2, prepare=Preparation(kernels.Refusal("no")))
    slot.add("three", 3, prepare=untraced, traceable=False)
    call = torch.compile(lambda x: slot.call(x), fullgraph=True, backend="eager")
    assert call(x).equal(x * 2 + 1)
    assert untraced.runs == 0


@pytest.mark.parametrize("answer", [kernels.Refusal("no build"), OSError("no build")])
def test_use_of_one_that_can_not_be_prepared_is_an_error_with_the_reason(slot, answer, falls_of):
    slot.add("one", 1, prepare=Preparation(answer))

    def call():
        with kernels.use(**{slot.name: "one"}):
            for _ in range(2):
                with pytest.raises(kernels.UnavailableError, match=r"one can't run: .*no build"):
                    slot.call(x)
        return slot.call(x)

    result, warned = falls_of(call)
    assert result.equal(x * 2)
    assert warned == []


@pytest.mark.parametrize("answer", [kernels.Refusal("no build"), OSError("no build")])
def test_use_with_a_second_name_falls(slot, answer, falls_of):
    slot.add("one", 1, prepare=Preparation(answer))
    with kernels.use(**{slot.name: ("one", "reference")}):
        result, warned = falls_of(lambda: slot.call(x))
        assert result.equal(x * 2)
    assert len(warned) == (0 if isinstance(answer, kernels.Refusal) else 1)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("answer", [kernels.Refusal("no build"), OSError("no build")])
def test_the_variable_naming_one_that_can_not_be_prepared_is_an_error(
    slot, monkeypatch, answer, pair, falls_of
):
    slot.add("one", 1, prepare=Preparation(answer), accepts=lambda x, y=None: x.dim() == 2)
    fresh_environment(slot, monkeypatch, f"{slot.name}=one" if pair else "one")

    def call():
        for _ in range(2):
            with pytest.raises(kernels.UnavailableError, match=r"LINNET_KERNELS=.*no build"):
                slot.call(x)

    _, warned = falls_of(call)
    assert warned == []
    assert slot.call(x[0]).equal(x[0] * 2)  # what it refuses goes on, as it would anyway
    assert kernels.explain(slot.name, x).chosen is None
    assert kernels.explain(slot.name, x[0]).chosen == "reference"
    assert kernels.active("cpu")[slot.name] == "unavailable"
    assert kernels.resolve(slot.name, x) is None


def test_a_pair_that_no_device_of_this_machine_can_run_is_an_error_at_the_call(slot, monkeypatch):
    slot.add("one", 1, predicate=lambda: kernels.Refusal("no such chip"))
    fresh_environment(slot, monkeypatch, f"{slot.name}=one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(kernels.UnavailableError, match=r"one can't run: no such chip$"):
                slot.call(x)
    told = kernels.explain(slot.name, x)
    assert told.chosen is None
    assert told.candidates[-1].reason == (
        f"LINNET_KERNELS={slot.name}=one asks for one, which can't run here"
    )
    assert kernels.active("cpu")[slot.name] == "unavailable"
    with pytest.raises(Exception, match=r"no such chip|can't be met"):
        torch.compile(lambda x: slot.call(x), fullgraph=True, backend="eager")(x)


def test_prefetch_prepares_everything_that_could_run(slot):
    ready, refused = Preparation(), Preparation(kernels.Refusal("no build"))
    slot.add("one", 1, prepare=ready)
    slot.add("two", 2, prepare=refused)
    slot.add("three", 3, prepare=ready, predicate=lambda: False)
    found = kernels.prefetch("cpu")
    assert found[slot.name] == "one"
    assert found == kernels.active("cpu")
    assert (ready.runs, refused.runs) == (1, 1)
    slot.call(x)
    assert (ready.runs, refused.runs) == (1, 1)


def test_a_preparation_must_be_a_function(slot):
    with pytest.raises(TypeError, match="prepare of one must be a function, not 3"):
        slot.add("one", 1, prepare=3)
