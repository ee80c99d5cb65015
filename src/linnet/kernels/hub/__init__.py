"""Compiled kernels from the Hugging Face Hub, each at one pinned revision.

Nothing here is imported, and nothing is fetched, before a slot's first call; see docs/hub.md.
"""
