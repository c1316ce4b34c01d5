"""A tokenizer that is not known to be quick, in a process of its own.

The library cannot be interrupted while it encodes. So what a definition might do for ever, or with all memory, is
done by a child (`_apart.py`) with limits on its memory and its processor's time, so a busy machine gives the same
ids as an idle one. Its failure is one line.
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
"""Time to load a definition, and more for large ones."""
ENCODING_SECONDS = 3.0
"""Time to encode texts, and more for long ones."""
CONVERTING_SECONDS = 60.0
"""Time for transformers to convert a vocabulary, of which it takes several to start."""
_CHARACTERS_A_SECOND = 50_000
_BYTES_A_SECOND = 2_500_000
_BUSY = 10 if find_spec("resource") else 1
"""On a busy machine a child may take this many times its limit, if it does not get the processor."""
_OUT_OF_TIME = -getattr(signal, "SIGXCPU", 0) or None
"""How a child ends that the system stopped."""
_PATIENCE = 4.0
"""Seconds wasted on texts that are not encoded in the end, or far too slowly; after that no more are tried."""
_FREE = 0.02
"""Seconds that a text of any length may take."""
_ROOM = 700 << 20
"""Bytes of memory for Python and the library."""
_TRANSFORMERS = 300 << 20
"""And for transformers."""
_FOR_EACH_BYTE = 24
"""And for each byte of the definition, loaded."""
_FOR_EACH_CHARACTER = 256
"""And for each character of the texts."""


class OutOfLimits(Exception):
    """What the child could not do, and why, on one line."""


class Encoding(NamedTuple):
    """What an encoding consists of here."""

    ids: list[int]


class Child:
    """One child process. It is started when it is needed, and again in a forked process."""

    def __init__(self) -> None:
        self.used = 0.0
        """Seconds of the processor that the last answer took."""
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = 0

    def ask(self, request: dict[str, Any], seconds: float, memory: int) -> Any:
        """The answer to a request; OutOfLimits if there is none within these limits, or if it fails."""
        process = self._process if self.is_running and self._process is not None else self._started()
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        self.used, line, late = seconds, b"", Event()

        def end_late() -> None:
            late.set()
            process.kill()

        watch = Timer(_BUSY * seconds, end_late)
        watch.daemon = True
        watch.start()
        content = json.dumps({**request, "seconds": seconds, "memory": _ROOM + memory}).encode()
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
        """Load a definition; OutOfLimits if that fails or takes too much."""
        size = len(definition)
        request = {"definition": definition, "path": sys.path}
        self.ask(request, LOADING_SECONDS + size / _BYTES_A_SECOND, size * _FOR_EACH_BYTE)

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            _end(self._process, self._parent)
        self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
        environment |= {"HF_HUB_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": ""}  # all that counts is in the folder
        environment["MALLOC_ARENA_MAX"] = "1"  # each more reserves 64 MB
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).parent / "_apart.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            raise OutOfLimits(f"no process could be started ({error})") from None
        self._process, self._parent = process, os.getpid()
        weakref.finalize(self, _end, process, self._parent)
        return process


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    """Close the pipes of a child, and end it if it is this process's own."""
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()
    if parent == os.getpid():
        process.kill()
        process.wait()


class LimitedBackend:
    """A tokenizer of the library that encodes in a child; all else is that of the library's own object."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._child = Child()
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
        if self._process != os.getpid():  # another thread may have had the lock when this process was forked
            self._one_at_a_time, self._process = Lock(), os.getpid()
        with self._one_at_a_time:
            if self._failed is not None:  # otherwise each text of a log would wait for the same limit
                raise OutOfLimits(f"it is not asked again after an earlier text: {self._failed}")
            characters = sum(map(len, texts))
            fair = characters / _CHARACTERS_A_SECOND
            try:
                self._definition = self._definition or self._backend.to_str()
                if not self._child.is_running:
                    self._child.load(self._definition)
                memory = len(self._definition) * _FOR_EACH_BYTE + characters * _FOR_EACH_CHARACTER
                request = {"texts": list(texts), "special": add_special_tokens}
                ids: list[list[int]] = self._child.ask(request, ENCODING_SECONDS + fair, memory)
            except OutOfLimits as error:
                self._waste(self._child.used, str(error))
                raise
            self._waste(self._child.used - _FREE - fair, "short texts take too long")
            return list(map(Encoding, ids))

    def _waste(self, seconds: float, because: str) -> None:
        """Count time that no text should take; once there is too much of it, no other text is tried."""
        self._wasted += max(seconds, 0.0)
        if self._wasted > _PATIENCE:
            self._failed = because


def probe(definition: str) -> None:
    """Load a definition in a child of its own, which then ends; OutOfLimits if that fails."""
    child = Child()
    try:
        child.load(definition)
    finally:
        child.stop()


def converted(folder: Path, *, code: bool) -> dict[str, Any]:
    """What transformers makes of a folder, in a child; OutOfLimits if that fails."""
    child = Child()
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    request = {"folder": str(folder), "code": code, "path": sys.path}
    try:
        return cast(
            "dict[str, Any]", child.ask(request, CONVERTING_SECONDS, size * _FOR_EACH_BYTE + _TRANSFORMERS)
        )
    finally:
        child.stop()


def limited(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, encoding in a process of its own."""
    return cast("tokenizers.Tokenizer", LimitedBackend(backend))


def is_limited(backend: object) -> bool:
    """Whether a tokenizer encodes in a process of its own."""
    return isinstance(backend, LimitedBackend)


def reason_of(error: BaseException) -> str:
    """The first line of what a library written in Rust raised, an Exception or its panic; raises anything else."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def has_transformers() -> bool:
    """Whether transformers is installed; it is not imported."""
    try:
        return find_spec("transformers") is not None
    except ValueError:  # it is None among the modules
        return False
