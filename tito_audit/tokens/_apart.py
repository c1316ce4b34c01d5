"""What a process of its own does for a tokenizer that is not known to be quick: loads it, encodes with it.

It runs as a script, with limits on its memory and processor time, and imports nothing of the package. It reads
requests from stdin and writes answers to stdout, each after its length in eight bytes. A request is JSON, an
answer `+` and its content, or `-` and the reason for a failure.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from array import array
from typing import Any, BinaryIO

_ROOM = 700 << 20
"""Bytes of memory for Python and the library."""
_TRANSFORMERS = 300 << 20
"""And for transformers."""
_FOR_EACH_BYTE = 24
"""And for each byte of the definition, loaded."""
_FOR_EACH_CHARACTER = 256
"""And for each character of the texts."""


def main() -> None:
    """Answer requests until there are no more."""
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)  # the library's panics
    tokenizer = None
    size = 0
    while (request := _read(source)) is not None:
        try:
            if "definition" in request:
                sys.path[:] = request["path"]
                size = len(request["definition"])
                _limit(size * _FOR_EACH_BYTE, request["seconds"])
                tokenizer = _loaded(request["definition"])
                _answer(answers, b"+")
            elif "folder" in request:
                sys.path[:] = request["path"]
                _limit(request["bytes"] * _FOR_EACH_BYTE + _TRANSFORMERS, request["seconds"], virtual=False)
                _answer(answers, b"+" + _converted(request["folder"], request["code"]))
            else:
                characters = sum(map(len, request["texts"]))
                _limit(size * _FOR_EACH_BYTE + characters * _FOR_EACH_CHARACTER, request["seconds"])
                _answer(answers, b"+" + _encoded(tokenizer, request["texts"], request["special"]))
        except BaseException as error:  # a panic of the library is no Exception
            _answer(answers, b"-" + _reason(error))
            if isinstance(error, KeyboardInterrupt | SystemExit):
                return


def _loaded(definition: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encoded(tokenizer: Any, texts: list[str], special: bool) -> bytes:
    """The number of ids of each text, then all ids, as 32-bit integers."""
    ids, counts = array("I"), array("I")
    for text in texts:
        found = tokenizer.encode(text, add_special_tokens=special).ids
        counts.append(len(found))
        ids.extend(found)
    return struct.pack("=Q", len(counts)) + counts.tobytes() + ids.tobytes()


def _converted(folder: str, code: bool) -> bytes:
    """What transformers makes of a folder without tokenizer.json, as JSON."""
    if not code:
        sys.modules["torch"] = None  # type: ignore[assignment]  # it takes seconds to import, and is not needed
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=code)
    backend = getattr(loaded, "backend_tokenizer", None)
    special = {key: str(value) for key, value in loaded.special_tokens_map.items() if isinstance(value, str)}
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    said = {
        "kind": type(loaded).__name__,
        "definition": None if backend is None else backend.to_str(),
        "special": special,
        "chat_template": loaded.chat_template,
    }
    return json.dumps(said).encode()


def _limit(more: int, seconds: float, *, virtual: bool = True) -> None:
    """Limit the memory and the processor time from now on; the caller watches the clock."""
    try:
        import resource
    except ImportError:
        return
    kind = resource.RLIMIT_AS if virtual else resource.RLIMIT_DATA
    used = resource.getrusage(resource.RUSAGE_SELF)
    for limit, value in ((kind, _ROOM + more), (resource.RLIMIT_CPU, used.ru_utime + used.ru_stime + seconds + 2)):
        try:
            resource.setrlimit(limit, (int(value), resource.getrlimit(limit)[1]))
        except (ValueError, OSError):  # a lower limit is set for the whole session
            continue


def _reason(error: BaseException) -> bytes:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    prefix = "not enough memory: " if isinstance(error, MemoryError) else ""
    return (prefix + lines[0])[:500].encode("utf-8", "replace")


def _read(source: BinaryIO) -> Any:
    head = source.read(8)
    if len(head) < 8:
        return None
    content = source.read(struct.unpack("=Q", head)[0])
    return json.loads(content)


def _answer(answers: BinaryIO, content: bytes) -> None:
    answers.write(struct.pack("=Q", len(content)) + content)
    answers.flush()


if __name__ == "__main__":
    main()
