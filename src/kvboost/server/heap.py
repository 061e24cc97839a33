"""Free memory that the C library keeps to itself."""

from __future__ import annotations

import ctypes
import sys
import time

_EVERY = 30.0


class Heap:
    """Big blocks of passes come and go between small ones that stay, and glibc gives back only what
    is free at the heap's end: with the embedded model .1 GB more for every 1,000 prompts of ever
    new lengths. Giving back all that is free takes 3 to 8 ms there."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._trim = getattr(libc, "malloc_trim", None)  # glibc's alone
        self._next = time.monotonic() + _EVERY

    def tidy(self) -> None:
        """Give back what is free, every half minute."""
        if self._trim is not None and time.monotonic() >= self._next:
            self._trim(0)
            self._next = time.monotonic() + _EVERY
