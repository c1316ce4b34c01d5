"""An n-gram index over the tokens of rows, which a search in the browser loads in small parts.

Rows are indexed in blocks. For every hash, one bit per block says whether the block holds four or eight bytes of
text, a token id or a pair of ids with that hash. A search loads the parts with the hashes of its query, then the
rows of blocks that have them all. `search.js` computes the same hashes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

SLOTS = 1 << 20
"""Number of hash values."""
BUCKETS = 256
"""Parts of the index, each loaded as a whole."""
_FIRST, _SECOND, _LAST = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35), np.uint32(0x9E3779B1)


class GramIndex:
    """Builds the index block by block: finished blocks wait on disk, so it has to be closed."""

    def __init__(self) -> None:
        self._present = np.zeros(SLOTS, np.bool_)
        self._file = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        self._blocks = 0

    def close(self) -> None:
        """Delete the blocks on disk."""
        self._file.close()

    @property
    def width(self) -> int:
        """Bytes of one hash: a bit per block."""
        return (self._blocks + 7) // 8

    def add(self, ids: Sequence[int], data: Sequence[str]) -> None:
        """Add consecutive tokens to the open block: their ids, and their bytes in hexadecimal if known."""
        whole = b"".join(bytes.fromhex(token.rstrip("…")) for token in data)
        for slots in (*slots_of_text(whole.decode("utf-8", "replace")), slots_of_ids(ids)):
            self._present[slots] = True

    def end_block(self) -> None:
        """Write the open block to disk and begin another."""
        self._file.write(np.packbits(self._present).tobytes())
        self._present[:] = False
        self._blocks += 1

    def buckets(self) -> Iterator[bytes]:
        """The parts in order: `width` bytes per hash, with the first block in the highest bit."""
        if not self._blocks:
            return
        self._file.flush()
        size = SLOTS // 8 // BUCKETS
        whole = np.memmap(self._file, np.uint8, "r", shape=(self._blocks, SLOTS // 8))
        for number in range(BUCKETS):
            bits = np.unpackbits(whole[:, number * size : (number + 1) * size], axis=1)
            yield np.packbits(bits.T, axis=1).tobytes()


def slots_of_text(text: str) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The hashes of all 4-byte and of all 8-byte substrings of the lowercased text, two uint32 arrays."""
    data = np.frombuffer(text.lower().encode("utf-8", "replace"), np.uint8).astype(np.uint32)
    four = data[:-3] | data[1:-2] << np.uint32(8) | data[2:-1] << np.uint32(16) | data[3:] << np.uint32(24)
    return _slots(four), _slots((four[:-4] * _FIRST ^ four[4:]) * _SECOND)


def slots_of_ids(ids: Sequence[int]) -> NDArray[np.uint32]:
    """The hashes of all ids, then of all pairs of consecutive ids, uint32."""
    numbers = np.array(ids, np.int64).astype(np.uint32)
    single = (numbers + np.uint32(1)) * _FIRST
    return _slots(np.concatenate((single, (single[:-1] ^ numbers[1:]) * _SECOND)))


def _slots(keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Each key hashed to 20 bits."""
    mixed: NDArray[np.uint32] = (keys ^ keys >> np.uint32(15)) * _LAST
    return mixed >> np.uint32(12)
