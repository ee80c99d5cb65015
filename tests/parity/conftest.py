"""Lets pytest find the trials of the parity suite, and its options where linnet isn't installed."""

from linnet.testing.collection import (
    one_thread,
    pytest_collection_modifyitems,
    pytest_generate_tests,
)
from linnet.testing.options import add_options as pytest_addoption

__all__ = [
    "one_thread",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_generate_tests",
]
