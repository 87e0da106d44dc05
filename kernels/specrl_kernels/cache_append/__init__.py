"""Writes a round's new entries to the rows of arrays that are too large to copy."""

from specrl_kernels.cache_append.api import cache_append, row_append

__all__ = ["cache_append", "row_append"]
