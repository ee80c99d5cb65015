"""Many threads at once get the answers that one would get."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

import linnet.kernels as kernels
from linnet.kernels.slot import Builtin

x = torch.ones(3)


def test_threads_that_resolve_first_all_get_the_newest(slot):
    barrier = threading.Barrier(8)

    def slow():
        time.sleep(0.05)
        return True

    slot.add("one", 1, predicate=slow)

    def call(_):
        barrier.wait()
        return slot.call(x)[0].item()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(call, range(8))) == [3.0] * 8
    assert kernels.history().calls[slot.name] == {"one": 8}


def test_a_slow_provider_is_loaded_once_and_waited_for(tmp_path, monkeypatch):
    (tmp_path / "slow_provider.py").write_text(
        "import time, linnet.kernels as kernels\n"
        "time.sleep(0.1)\n"
        "@kernels.register('loaded_slowly', name='slow')\n"
        "def slow(x): return x + 10\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return x

    call = kernels.define("loaded_slowly", reference, builtins=(Builtin("slow", "slow_provider"),))
    kernels.generation()
    barrier = threading.Barrier(6)

    def first(_):
        barrier.wait()
        return call(x)[0].item()

    try:
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(first, range(6))) == [11.0] * 6
    finally:
        from linnet.kernels.slot import slots

        del slots["loaded_slowly"]
        sys.modules.pop("slow_provider", None)


def test_registering_while_others_call_loses_nothing(slot):
    stop = threading.Event()
    seen = set()

    def call():
        while not stop.is_set():
            seen.add(slot.call(x)[0].item())

    callers = [threading.Thread(target=call) for _ in range(3)]
    for thread in callers:
        thread.start()
    for number in range(1, 20):
        slot.add(f"impl_{number}", number)
        assert slot.call(x)[0].item() == 2 + number
    stop.set()
    for thread in callers:
        thread.join()
    assert seen <= {2.0 + number for number in range(20)}


def test_a_provider_imported_by_another_thread_meanwhile_does_not_deadlock(tmp_path, monkeypatch):
    """One thread loads providers while another imports one of them, which registers at its end."""
    (tmp_path / "both_provider.py").write_text(
        "import time, linnet.kernels as kernels\n"
        "time.sleep(0.2)\n"
        "@kernels.register('loaded_by_two', name='both')\n"
        "def both(x): return x + 10\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def reference(x: torch.Tensor) -> torch.Tensor:
        return x

    call = kernels.define("loaded_by_two", reference, builtins=(Builtin("both", "both_provider"),))
    try:
        importer = threading.Thread(target=lambda: __import__("both_provider"), daemon=True)
        caller = threading.Thread(target=lambda: call(x), daemon=True)
        importer.start()
        time.sleep(0.05)
        caller.start()
        importer.join(5)
        caller.join(5)
        assert not importer.is_alive()
        assert not caller.is_alive()
        assert call(x)[0].item() == 11.0
    finally:
        from linnet.kernels.slot import slots

        del slots["loaded_by_two"]
        sys.modules.pop("both_provider", None)


def test_falling_in_two_threads_warns_once(slot, falls_of):
    barrier = threading.Barrier(4)

    def broken(x, y=None, *, power=None):
        barrier.wait()
        raise RuntimeError("a")

    kernels.register(slot.name, broken, name="one")

    def call():
        with ThreadPoolExecutor(4) as pool:
            return [value[0].item() for value in pool.map(lambda _: slot.call(x), range(4))]

    result, warned = falls_of(call)
    assert result == [2.0] * 4
    assert len(warned) == 1
