"""Lets pytest find the trials of the parity suite."""

from linnet.testing.collection import pytest_collection_modifyitems, pytest_generate_tests

__all__ = ["pytest_collection_modifyitems", "pytest_generate_tests"]
