"""Providers from outside: `linnet_kernels`, entry points, and the order that never varies."""

import subprocess
import sys
import textwrap

import pytest

PROVIDER = """
import torch, linnet.kernels as kernels
loaded = globals().get("loaded", 0) + 1
@kernels.register("silu_mul", name="{name}")
def impl(gate, up):
    return gate * 0 + {value}
"""

FIRST = """
import torch, linnet.kernels as kernels
x = torch.ones(2)
"""


class Site:
    """A folder of packages that a new interpreter sees."""

    def __init__(self, path, environment_with):
        self.path = path
        self.environment_with = environment_with

    def module(self, module, name, value, more=""):
        (self.path / f"{module}.py").write_text(PROVIDER.format(name=name, value=value) + more)

    def entry_point(self, name, module):
        folder = self.path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[linnet.kernels]\n{name} = {module}\n")

    def run(self, program, **variables):
        done = subprocess.run(
            [sys.executable, "-W", "always", "-c", FIRST + textwrap.dedent(program)],
            capture_output=True,
            text=True,
            env=self.environment_with(self.path, **variables),
        )
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture
def site(tmp_path, environment_with):
    return Site(tmp_path, environment_with)


def test_providers_and_the_program_rank_by_origin_and_never_by_import(site):
    site.module("linnet_kernels", "private", 1)
    site.module("zebra_module", "a_point", 2)
    site.module("apple_module", "b_point", 3)
    site.entry_point("a_point", "zebra_module")
    site.entry_point("b_point", "apple_module")
    names = """
    names = [i.name for i in kernels.implementations("silu_mul")]
    assert [name for name in names if name not in ("torch", "triton")] == [
        "own", "b_point", "a_point", "private", "reference"]
    assert kernels.silu_mul(x, x)[0] == 9
    """
    own = 'kernels.register("silu_mul", lambda gate, up: gate * 0 + 9, name="own")\n'
    for imports in (
        own,
        "import apple_module, zebra_module\n" + own + "import linnet_kernels\n",
        own + "import linnet_kernels, zebra_module\n",
        "kernels.silu_mul(x, x)\n" + own,
    ):
        site.run(imports + textwrap.dedent(names))


def test_one_interpreter_sees_all_the_rest(site):
    """Failures and repeats, together in one process, since starting torch is slow."""
    site.module("linnet_kernels", "private", 1, more="raise RuntimeError('half way')\n")
    site.module("good_module", "good", 3)
    site.entry_point("good", "good_module")
    site.entry_point("missing", "no_such_module")
    site.run(
        """
        import importlib, warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                assert kernels.silu_mul(x, x)[0] == 3
        fell = [str(w.message) for w in caught if w.category is kernels.FallWarning]
        assert len(fell) == 2, fell
        assert "linnet_kernels is left out" in fell[0] and "RuntimeError: half way" in fell[0]
        assert "no_such_module" in fell[1] and "ModuleNotFoundError" in fell[1]

        # What half loaded has gone, and history tells.
        names = [i.name for i in kernels.implementations("silu_mul")]
        assert "private" not in names, names
        assert [fall.implementation for fall in kernels.history().falls] == [
            "linnet_kernels", "missing = no_such_module"]

        # Running a provider's module again changes nothing.
        import good_module
        before = kernels.generation()
        importlib.reload(good_module)
        assert good_module.loaded == 2
        assert kernels.generation() == before
        assert [i.name for i in kernels.implementations("silu_mul")] == names

        # The program's own repeat is a mistake that must not pass in silence.
        kernels.register("silu_mul", lambda gate, up: gate, name="own")
        try:
            kernels.register("silu_mul", lambda gate, up: up, name="own")
        except ValueError as error:
            assert "replace=True" in str(error)
        else:
            raise AssertionError("no error")
        """
    )


def test_strict_makes_a_provider_that_does_not_load_an_error(site):
    site.module("linnet_kernels", "private", 1, more="raise RuntimeError('half way')\n")
    site.run(
        """
        for _ in range(2):
            try:
                kernels.silu_mul(x, x)
            except kernels.FallError as error:
                assert "linnet_kernels failed to load" in str(error)
            else:
                raise AssertionError("no error")
        """,
        LINNET_STRICT="1",
    )


def test_providers_define_slots_import_each_other_and_fail_by_themselves(site):
    (site.path / "linnet_kernels.py").write_text(
        "import torch, linnet.kernels as kernels\n"
        "def reference(x: torch.Tensor) -> torch.Tensor: return x\n"
        "mine = kernels.define('mine', reference)\n"
        "@kernels.register('mine', name='fast')\n"
        "def fast(x): return x + 100\n"
        "assert mine(torch.ones(1))[0] == 101\n"
    )
    (site.path / "failing.py").write_text(
        "import linnet.kernels as kernels, imported\n"
        "@kernels.register('silu_mul', name='own')\n"
        "def own(gate, up): return gate\n"
        "@kernels.register('silu_mul', name='imported', replace=True)\n"
        "def other(gate, up): return gate\n"
        "raise SystemExit(3)\n"
    )
    site.module("imported", "imported", 5)
    site.entry_point("a_failing", "failing")
    site.entry_point("b_imported", "imported")
    site.entry_point("c_unwritten", "not a module!")
    site.run(
        """
        import warnings
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert kernels.silu_mul(x, x)[0] == 5
        names = [i.name for i in kernels.implementations("silu_mul")]
        assert "own" not in names and names.count("imported") == 1, names
        assert len(caught) == 2, [str(w.message) for w in caught]
        assert [w.filename for w in caught] == ["<string>"] * len(caught)
        import linnet_kernels
        assert linnet_kernels.mine(x)[0] == 101
        assert kernels.explain("mine", x).chosen == "fast"
        """
    )


def test_a_failing_provider_is_told_of_once_even_where_warnings_are_errors(site):
    site.module("linnet_kernels", "private", 1, more="raise RuntimeError('half way')\n")
    site.run(
        """
        import warnings
        warnings.simplefilter("error", kernels.FallWarning)
        try:
            kernels.silu_mul(x, x)
        except kernels.FallWarning:
            pass
        else:
            raise AssertionError("no warning")
        kernels.silu_mul(x, x)
        assert len(kernels.history().falls) == 1
        """
    )


def test_a_provider_run_again_before_the_first_call_changes_nothing(site):
    site.module("good_module", "good", 3)
    site.entry_point("good", "good_module")
    site.run(
        """
        import importlib, good_module
        importlib.reload(good_module)
        assert kernels.silu_mul(x, x)[0] == 3
        """
    )


def test_a_provider_that_calls_slots_at_import_deadlocks_with_nobody(site):
    """One thread imports it, while another one's first call loads it."""
    site.module(
        "warming_module",
        "warm",
        3,
        more="import time\ntime.sleep(0.5)\nkernels.silu_mul(*[torch.ones(2)] * 2)\n",
    )
    site.entry_point("warming", "warming_module")
    site.run(
        """
        import threading, time, faulthandler
        faulthandler.dump_traceback_later(30, exit=True)
        importer = threading.Thread(target=lambda: __import__("warming_module"))
        importer.start()
        time.sleep(0.2)
        assert kernels.silu_mul(x, x)[0] == 3
        importer.join()
        assert kernels.silu_mul(x, x)[0] == 3
        """
    )
