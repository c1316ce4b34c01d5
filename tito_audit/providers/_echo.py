"""Compares the prompt that an answer repeats as bytes, which saves parsing its ids."""

from __future__ import annotations

from uuid import uuid4

SAME = f"the ids that were sent: {uuid4().hex}"
"""Replaces `prompt_token_ids` in an answer if they equal the ids that were sent; no server can guess it."""
_KEY = b'"prompt_token_ids":'
_MARK = b'"' + SAME.encode() + b'"'


def without_echo(data: bytes, ids: bytes) -> bytes:
    """A JSON answer in which each `prompt_token_ids` equal to this list, written without spaces, is `SAME`.

    Everything else is unchanged: lists of other ids, and other keys. A key after a backslash is part of a string;
    any other quote here begins a key, or the answer is not JSON, and remains invalid.
    """
    pieces: list[bytes] = []
    at = 0
    spaced: bytes | None = None
    while (key_at := data.find(_KEY, at)) >= 0:
        start = key_at + len(_KEY)
        written = ids
        if data.startswith(b" ", start):
            start += 1
            written = spaced = spaced or ids.replace(b",", b", ")
        pieces.append(data[at:start])
        at = start
        if data[key_at - 1 : key_at] != b"\\" and data.startswith(written, start):
            pieces.append(_MARK)
            at += len(written)
    return b"".join([*pieces, data[at:]]) if pieces else data
