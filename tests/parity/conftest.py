"""Lets pytest find the trials of the parity suite, and its options where linnet isn't installed."""

from linnet.testing.collection import pytest_collection_modifyitems, pytest_generate_tests
from linnet.testing.options import add_options as pytest_addoption

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_generate_tests"]
