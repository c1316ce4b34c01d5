"""The child process of `limited.py`: loads a tokenizer and encodes with it, within limits.

Runs as a script and imports nothing of the package. Each line of stdin is a request, each line of stdout its
answer, both JSON. An answer holds what was asked for, or why it failed, and the CPU seconds it took.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any


def main() -> None:
    """Answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)  # the library's panics
    tokenizer: Any = None
    for line in sys.stdin.buffer:
        began, ended = time.process_time(), False
        try:
            request = json.loads(line)
            _set_limits(request["memory"], began + request["seconds"], virtual="folder" not in request)
            answer: dict[str, Any] = {"answer": None}
            if "texts" in request:
                encode, special = tokenizer.encode, request["special"]
                answer["answer"] = [encode(text, add_special_tokens=special).ids for text in request["texts"]]
            else:
                sys.path[:] = request["path"]
                if "folder" in request:
                    answer["answer"] = _convert(request["folder"], request["code"])
                else:
                    from tokenizers import Tokenizer

                    tokenizer = Tokenizer.from_str(request["definition"])
                    tokenizer.no_truncation()
                    tokenizer.no_padding()
        except BaseException as error:  # a panic of the library is no Exception
            ended = isinstance(error, KeyboardInterrupt | SystemExit)
            lines = str(error).strip().splitlines() or [type(error).__name__]
            memory = "not enough memory: " if isinstance(error, MemoryError) else ""
            answer = {"failed": (memory + lines[0])[:500]}
        print(json.dumps({**answer, "seconds": time.process_time() - began}), file=answers, flush=True)
        if ended:
            return


def _convert(folder: str, code: bool) -> dict[str, Any]:
    """The tokenizer that transformers loads from a folder without tokenizer.json, as JSON values."""
    if not code:
        sys.modules["torch"] = None  # type: ignore[assignment]  # it takes seconds to import, and is not needed
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=code)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return {
        "kind": type(loaded).__name__,
        "definition": None if backend is None else backend.to_str(),
        "special": {key: value for key, value in loaded.special_tokens_map.items() if isinstance(value, str)},
        "chat_template": loaded.chat_template,
    }


def _set_limits(memory: int, seconds: float, *, virtual: bool) -> None:
    """Limit memory and CPU time since the process started; the parent limits the wall time."""
    try:
        import resource
    except ImportError:
        return
    kind = resource.RLIMIT_AS if virtual else resource.RLIMIT_DATA
    limits = {kind: memory, resource.RLIMIT_CPU: math.ceil(seconds), resource.RLIMIT_CORE: 0}
    for limit, most in limits.items():
        try:
            resource.setrlimit(limit, (most, resource.getrlimit(limit)[1]))
        except (ValueError, OSError):  # a lower limit is set for the whole session
            continue


if __name__ == "__main__":
    main()
