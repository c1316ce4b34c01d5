"""A tokenizer that is not known to be quick, in a process of its own.

The library cannot be interrupted while it encodes. So what a definition might do for ever, or with all memory, is
done by a child (`_apart.py`), which has limits and is killed when its time is up. Its failure is a TokenizerError.
Times are those of the child's processor, so a busy machine gives the same ids as an idle one.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

if TYPE_CHECKING:
    import tokenizers

LOADING_SECONDS = 4.0
"""Time to load a definition, and more for large ones."""
ENCODING_SECONDS = 3.0
"""Time to encode texts, and more for long ones."""
_CHARACTERS_A_SECOND = 50_000
_BYTES_A_SECOND = 2_500_000
CONVERTING_SECONDS = 60.0
"""Time for transformers to convert a vocabulary, of which it takes several to start."""
_PATIENCE = 4.0
"""Seconds wasted on texts that are not encoded in the end, or far too slowly; after that no more are tried."""
_FREE = 0.02
"""Seconds that a text of any length may take."""
_BUSY = 10
"""On a busy machine a child may take this many times its limit, if it does not get the processor."""
_SCRIPT = Path(__file__).parent / "_apart.py"


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
        self._of = 0

    def ask(self, request: dict[str, Any], seconds: float) -> bytes:
        """The answer to a request; OutOfLimits if there is none in time, or if it fails."""
        process = self._process
        assert process is not None, "started by the caller"
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        content = json.dumps({**request, "seconds": seconds}).encode()
        watch = _Watch(process, seconds)
        watch.start()
        answer = b""
        try:
            process.stdin.write(struct.pack("=Q", len(content)) + content)
            process.stdin.flush()
            head = process.stdout.read(8)
            answer = process.stdout.read(struct.unpack("=Q", head)[0]) if len(head) == 8 else b""
        except OSError:
            answer = b""
        finally:
            self.used = watch.end()
            if not answer:
                self.stop()
        if watch.late:
            self.stop()
            raise OutOfLimits(f"it was not finished after {seconds:,.0f} seconds")
        if not answer:
            raise OutOfLimits("it needed more memory than its share, or crashed")
        if answer[:1] != b"+":
            raise OutOfLimits(answer[1:].decode("utf-8", "replace"))
        return answer[1:]

    @property
    def is_running(self) -> bool:
        """Whether this process has a child."""
        return self._process is not None and self._of == os.getpid()

    def start(self) -> None:
        """Start a child of this process."""
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
        environment |= {"HF_HUB_OFFLINE": "1", "TIKTOKEN_CACHE_DIR": ""}  # all that counts is in the folder
        environment["MALLOC_ARENA_MAX"] = "1"  # each more reserves 64 MB
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(_SCRIPT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            raise OutOfLimits(f"no process could be started ({error})") from None
        self._process, self._of = process, os.getpid()
        weakref.finalize(self, _end, process, self._of)

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            _end(self._process, self._of)
        self._process = None


class _Watch(Thread):
    """Kills a child once it has had the processor for longer than its limit."""

    def __init__(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        super().__init__(name="watching a tokenizer", daemon=True)
        self.late = False
        self._process = process
        self._seconds = seconds
        self._ended = Event()
        self._began, self._before = time.monotonic(), _processor(process.pid)

    def run(self) -> None:
        """Wait for the end of the work, or end it."""
        left = self._seconds
        while not self._ended.wait(left):
            left = self._seconds - self._used()
            if left <= 0:
                self.late = True
                self._process.kill()
                return
            left = max(left, 0.05)

    def end(self) -> float:
        """The seconds that the work has taken, which has ended."""
        used = self._used()
        self._ended.set()
        self.join()
        return self._seconds if self.late else used

    def _used(self) -> float:
        passed, now = time.monotonic() - self._began, _processor(self._process.pid)
        if self._before is None or now is None or passed > _BUSY * self._seconds:
            return passed
        return now - self._before


def _processor(number: int) -> float | None:
    """Seconds for which a process has had the processor; None where the system does not say."""
    try:
        fields = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


class LimitedBackend:
    """A tokenizer of the library that encodes in a child; all else is that of the library's own object."""

    def __init__(self, backend: tokenizers.Tokenizer, because: str) -> None:
        self.because = because
        """Which part of it is not known to be quick."""
        self._backend = backend
        self._child = Child()
        self._definition: str | None = None
        self._failed: str | None = None
        self._wasted = 0.0
        self._one_at_a_time, self._of = Lock(), os.getpid()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("add_", "enable_", "train")):
            self._definition = None
            self._child.stop()
        return getattr(self._backend, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoding:
        """The ids of one text; OutOfLimits if it takes too much."""
        return self._encoded([text], add_special_tokens)[0]

    def encode_batch_fast(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Encoding]:
        """The ids of several texts; OutOfLimits if they take too much."""
        return self._encoded(texts, add_special_tokens)

    def _encoded(self, texts: Sequence[str], special: bool) -> list[Encoding]:
        if self._of != os.getpid():  # another thread may have had the lock when this process was forked
            self._one_at_a_time, self._of = Lock(), os.getpid()
        with self._one_at_a_time:
            return self._asked(texts, special)

    def _asked(self, texts: Sequence[str], special: bool) -> list[Encoding]:
        if self._failed is not None:  # otherwise each text of a log would wait for the same limit
            raise OutOfLimits(f"it is not asked again after an earlier text: {self._failed}")
        try:
            if not self._child.is_running:
                self._definition = self._definition or self._backend.to_str()
                load_in(self._child, self._definition)
            characters = sum(map(len, texts))
            seconds = ENCODING_SECONDS + characters / _CHARACTERS_A_SECOND
            answer = self._child.ask({"texts": list(texts), "special": special}, seconds)
        except OutOfLimits as error:
            self._waste(self._child.used, str(error))
            raise
        self._waste(self._child.used - _FREE - characters / _CHARACTERS_A_SECOND, "short texts take too long")
        return _encodings(answer)

    def _waste(self, seconds: float, because: str) -> None:
        """Count time that no text should take; once there is too much of it, no other text is tried."""
        self._wasted += max(seconds, 0.0)
        if self._wasted > _PATIENCE:
            self._failed = because


def _encodings(answer: bytes) -> list[Encoding]:
    """The ids of each text in an answer."""
    (count,) = struct.unpack_from("=Q", answer)
    counts = np.frombuffer(answer, np.uint32, count, 8)
    ids = np.frombuffer(answer, np.uint32, -1, 8 + 4 * count)
    ends = np.cumsum(counts, dtype=np.int64)[:-1] if count else ()
    return [Encoding(part.tolist()) for part in np.split(ids, ends)] if count else []


def load_in(child: Child, definition: str) -> None:
    """Load a definition in a child; OutOfLimits if that fails or takes too much."""
    child.start()
    seconds = LOADING_SECONDS + len(definition) / _BYTES_A_SECOND
    child.ask({"definition": definition, "path": sys.path}, seconds)


def probe(definition: str) -> None:
    """Load a definition in a child of its own, which then ends; OutOfLimits if that fails."""
    child = Child()
    try:
        load_in(child, definition)
    finally:
        child.stop()


def converted(folder: Path, *, code: bool) -> dict[str, Any]:
    """What transformers makes of a folder, in a child; OutOfLimits if that fails."""
    child = Child()
    try:
        child.start()
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        request = {"folder": str(folder), "code": code, "bytes": size, "path": sys.path}
        said: dict[str, Any] = json.loads(child.ask(request, CONVERTING_SECONDS))
        return said
    finally:
        child.stop()


def _end(process: subprocess.Popen[bytes], of: int) -> None:
    """Close the pipes of a child, and end it if it is this process's own."""
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()
    if of == os.getpid():
        process.kill()
        process.wait()


def limited(backend: tokenizers.Tokenizer, because: str) -> tokenizers.Tokenizer:
    """The same tokenizer, encoding in a process of its own."""
    return cast("tokenizers.Tokenizer", LimitedBackend(backend, because))


def is_limited(backend: object) -> bool:
    """Whether a tokenizer encodes in a process of its own."""
    return isinstance(backend, LimitedBackend)


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic of a library written in Rust, which is no Exception."""
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def has_transformers() -> bool:
    """Whether transformers is installed; it is not imported."""
    try:
        return find_spec("transformers") is not None
    except ValueError:  # it is None among the modules
        return False
