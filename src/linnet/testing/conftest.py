"""Lets pytest find the trials when it runs this package."""

from linnet.testing.collection import pytest_collection_modifyitems, pytest_generate_tests

__all__ = ["pytest_collection_modifyitems", "pytest_generate_tests"]
