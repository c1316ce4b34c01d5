"""Runs a tokenizer that is not known to be fast in a child process with limits.

The library cannot be interrupted while it encodes, and a definition may make it run forever or take all memory.
The child (`_child.py`) has limits on memory and on CPU time: unlike wall time, a busy machine does not change the
result. A failure is one line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock, Timer
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    import tokenizers

LOADING_SECONDS = 4.0
"""CPU time to load a definition; large ones get more."""
ENCODING_SECONDS = 3.0
"""CPU time to encode texts; long ones get more."""
CONVERTING_SECONDS = 60.0
"""CPU time for transformers to convert a vocabulary; it takes several seconds to start."""
_CHARACTERS_A_SECOND = 50_000
_BYTES_A_SECOND = 2_500_000
_BUSY_FACTOR = 10 if find_spec("resource") else 1
"""A child that does not get the processor may take this many times its limit in wall time."""
_OUT_OF_TIME = -getattr(signal, "SIGXCPU", 0) or None
"""The return code of a child that ran out of CPU time."""
_MAX_WASTED_SECONDS = 4.0
"""After so many seconds spent on texts that failed or were far too slow, no more texts are tried."""
_FREE_SECONDS = 0.02
"""Seconds that a text of any length may take without counting as slow."""
_BASE_MEMORY = 700 << 20
"""Bytes for Python and the library."""
_TRANSFORMERS_MEMORY = 300 << 20
"""Bytes for transformers."""
_MEMORY_PER_BYTE = 24
"""Bytes for each byte of a loaded definition."""
_MEMORY_PER_CHARACTER = 256
"""Bytes for each character of the texts."""


class OutOfLimits(Exception):
    """The child failed or exceeded a limit; the message is one line."""


class Encoding(NamedTuple):
    """The part of the library's `Encoding` that is used here."""

    ids: list[int]


class ChildProcess:
    """A child process, started on demand, and again in a forked process."""

    def __init__(self) -> None:
        self.used = 0.0
        """CPU seconds of the last answer."""
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = 0

    def ask(self, request: dict[str, Any], seconds: float, memory: int) -> Any:
        """The answer to a request; OutOfLimits if it fails or exceeds these limits."""
        process = self._process if self.is_running and self._process is not None else self._start()
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        self.used, line, late = seconds, b"", Event()

        def end_late() -> None:
            late.set()
            process.kill()

        watch = Timer(_BUSY_FACTOR * seconds, end_late)
        watch.daemon = True
        watch.start()
        content = json.dumps({**request, "seconds": seconds, "memory": _BASE_MEMORY + memory}).encode()
        try:
            process.stdin.write(content + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        finally:
            watch.cancel()
            if not line.endswith(b"\n"):
                self.stop()
        if not line.endswith(b"\n"):
            if late.is_set() or process.returncode == _OUT_OF_TIME:
                raise OutOfLimits(f"it was not finished after {seconds:,.0f} seconds")
            raise OutOfLimits("it needed more memory than its share, or crashed")
        answer = json.loads(line)
        self.used = answer["seconds"]
        if "failed" in answer:
            raise OutOfLimits(answer["failed"])
        return answer["answer"]

    @property
    def is_running(self) -> bool:
        """Whether this process has a child."""
        return self._process is not None and self._parent == os.getpid()

    def load(self, definition: str) -> None:
        """Load a definition; OutOfLimits if that fails."""
        size = len(definition)
        request = {"definition": definition, "path": sys.path}
        self.ask(request, LOADING_SECONDS + size / _BYTES_A_SECOND, size * _MEMORY_PER_BYTE)

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            _end_child(self._process, self._parent)
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
        environment |= {"HF_HUB_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": ""}  # only the folder counts
        environment["MALLOC_ARENA_MAX"] = "1"  # each further one reserves 64 MB
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).parent / "_child.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            raise OutOfLimits(f"no process could be started ({error})") from None
        self._process, self._parent = process, os.getpid()
        weakref.finalize(self, _end_child, process, self._parent)
        return process


def _end_child(process: subprocess.Popen[bytes], parent: int) -> None:
    """Close the pipes of a child, and kill it if this process started it."""
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()
    if parent == os.getpid():
        process.kill()
        process.wait()


class LimitedBackend:
    """A tokenizer of the library that encodes in a child; everything else is the library's own object."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._child = ChildProcess()
        self._definition = ""
        self._failed: str | None = None
        self._wasted = 0.0
        self._one_at_a_time, self._process = Lock(), os.getpid()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("add_", "enable_", "train")):
            self._definition = ""
            self._child.stop()
        return getattr(self._backend, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoding:
        """The ids of one text; OutOfLimits if it takes too much."""
        return self.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoding]:
        """The ids of several texts; OutOfLimits if they take too much."""
        if self._process != os.getpid():  # when the process forked, another thread may have held the lock
            self._one_at_a_time, self._process = Lock(), os.getpid()
        with self._one_at_a_time:
            if self._failed is not None:  # or every text of a log would run into the same limit
                raise OutOfLimits(f"it is not asked again after an earlier text: {self._failed}")
            characters = sum(map(len, texts))
            fair = characters / _CHARACTERS_A_SECOND
            try:
                self._definition = self._definition or self._backend.to_str()
                if not self._child.is_running:
                    self._child.load(self._definition)
                memory = len(self._definition) * _MEMORY_PER_BYTE + characters * _MEMORY_PER_CHARACTER
                request = {"texts": list(texts), "special": add_special_tokens}
                ids: list[list[int]] = self._child.ask(request, ENCODING_SECONDS + fair, memory)
            except OutOfLimits as error:
                self._add_wasted(self._child.used, str(error))
                raise
            self._add_wasted(self._child.used - _FREE_SECONDS - fair, "short texts take too long")
            return list(map(Encoding, ids))

    def _add_wasted(self, seconds: float, because: str) -> None:
        """Count time that no text should take; after too much of it, no more texts are tried."""
        self._wasted += max(seconds, 0.0)
        if self._wasted > _MAX_WASTED_SECONDS:
            self._failed = because


def check_loads(definition: str) -> None:
    """Load a definition in a child that then ends; OutOfLimits if that fails."""
    child = ChildProcess()
    try:
        child.load(definition)
    finally:
        child.stop()


def convert_with_transformers(folder: Path, *, code: bool) -> dict[str, Any]:
    """Let transformers load a folder in a child, see `_child.py`; OutOfLimits if that fails."""
    child = ChildProcess()
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    request = {"folder": str(folder), "code": code, "path": sys.path}
    try:
        return cast(
            "dict[str, Any]",
            child.ask(request, CONVERTING_SECONDS, size * _MEMORY_PER_BYTE + _TRANSFORMERS_MEMORY),
        )
    finally:
        child.stop()


def run_in_child(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, encoding in a child process."""
    return cast("tokenizers.Tokenizer", LimitedBackend(backend))


def runs_in_child(backend: object) -> bool:
    """Whether a tokenizer encodes in a child process."""
    return isinstance(backend, LimitedBackend)


def library_error(error: BaseException) -> str:
    """The first line of what a Rust library raised, an Exception or a panic; re-raises anything else."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def has_transformers() -> bool:
    """Whether transformers is installed, without importing it."""
    try:
        return find_spec("transformers") is not None
    except ValueError:  # `sys.modules["transformers"]` is None
        return False
