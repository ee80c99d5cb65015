"""The suite's command line options; pytest loads this as a plugin wherever linnet is installed.

It must stay light, and out of the way of other projects: the options exist only in runs that name
`linnet.testing`, or one of the options that no other project has.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_MINE = ("linnet.testing", "--provider", "--slot")


def pytest_load_initial_conftests(
    early_config: "pytest.Config", parser: "pytest.Parser", args: list[str]
) -> None:
    """Add the options before pytest reads the whole command line."""
    if not any(arg.startswith(_MINE) for arg in args):
        return
    add_options(parser)
    early_config.addinivalue_line("markers", "slow: full model sizes")


def add_options(parser: "pytest.Parser") -> None:
    """Add the options, unless they are there."""
    group = parser.getgroup("linnet", "linnet's parity suite")
    if group.options:
        return
    group.addoption("--provider", metavar="NAME", help="run only the implementations of that name")
    group.addoption("--slot", metavar="SLOT", help="run only that slot")
    group.addoption("--device", metavar="DEVICE", default="cpu", help="cpu (default) or cuda")
