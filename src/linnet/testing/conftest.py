"""Lets pytest find the trials when it runs this package."""

from linnet.testing.collection import (
    one_thread,
    pytest_collection_modifyitems,
    pytest_generate_tests,
)

__all__ = ["one_thread", "pytest_collection_modifyitems", "pytest_generate_tests"]
