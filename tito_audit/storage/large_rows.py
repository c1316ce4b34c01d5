"""Memory of large rows goes back to the system as soon as it is free."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

LARGE = 8 << 20
"""From this many bytes on, a log may hold large rows."""
_OWN_PAGES = 4 << 20
"""Blocks of memory of this size have pages of their own, which are given back when the block is freed."""
_KEPT = 32 << 20
"""How much free memory is kept for smaller blocks."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What `mallopt` calls the two."""


@cache
def give_memory_back() -> None:
    """Have the C library give large blocks back, where it can be told to.

    Left alone, glibc keeps blocks of up to 32 MB for later ones, which rarely fit into their places: the arrays of
    one row then take several times their size.
    """
    with suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _OWN_PAGES)
        library.mallopt(_TRIM_THRESHOLD, _KEPT)
