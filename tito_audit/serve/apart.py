"""Encodes long texts in threads, so that other requests do not wait."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

from tito_audit.tokens.tokenizer import Tokenizer

_LONG = 20_000
"""Texts of this many characters take several milliseconds to encode, too long for the event loop."""
_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


class Apart:
    """Encodes long texts off the event loop; the tokenizer library releases the GIL."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads: ThreadPoolExecutor | None = None

    async def encode(self, text: str) -> None:
        """Encode the segments of a long text in advance, so that encoding it later is fast."""
        if len(text) < _LONG:
            return
        segments = self._tokenizer.segments
        unknown = segments.unknown(text)
        if sum(map(len, unknown)) < _LONG:
            return
        self._threads = self._threads or ThreadPoolExecutor(_THREADS, thread_name_prefix="encode")
        loop = asyncio.get_running_loop()
        segments.remember(await loop.run_in_executor(self._threads, segments.encode_apart, unknown))
