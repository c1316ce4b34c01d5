"""Encoders: texts to ids, each text as a whole, without a cache.

`tokenizers` is the reference: reports rely on its ids only. `fastokens` is many times faster and must give the
same ids; it is imported when one is built. It is built from the reference's own definition rather than from the
tokenizer's file, so it includes tokens added after loading.

A fast encoder is checked before it is trusted with a log. The probes are what encoders have been seen to
disagree on: scripts, characters that combine or are normalised, multi-part emoji, digits, white space,
contractions, control tokens spelled in full and in part, long words, and words from the tokenizer's own
vocabulary.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tito_audit.errors import EncodeError, TokenizerError
from tito_audit.record.arrays import Ids, empty_ids
from tito_audit.tokens.limited import is_limited, reason_of
from tito_audit.tokens.vocab import Vocabulary

if TYPE_CHECKING:
    import tokenizers

_SHOWN = 40
"""Characters of a text in a message."""


class Encoder(Protocol):
    """Turns texts into ids. It adds no special tokens; those that a text spells become control tokens."""

    @property
    def name(self) -> str:
        """The library, as a report names it."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order, `[N]` int32, read-only."""


class ReferenceEncoder:
    """`tokenizers`, the reference."""

    name = "tokenizers"

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order; the library may use threads for several."""
        with _refused(texts):
            formed = [well_formed(text) for text in texts]
            encoded = self._backend.encode_batch_fast(formed, add_special_tokens=False)
            return [_frozen(encoding.ids) for encoding in encoded]

    def encode_alone(self, texts: Sequence[str]) -> list[Ids]:
        """The same ids without the library's threads, which must not run in a process before it forks."""
        return [_frozen(self.encode_one(text)) for text in texts]

    def encode_one(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of one text, with `special` those that the post-processor puts around it too."""
        with _refused([text]):
            ids: list[int] = self._backend.encode(well_formed(text), add_special_tokens=special).ids
        return ids


class FastEncoder:
    """`fastokens`, built from a tokenizer of the reference; TokenizerError, with the reason, if that fails.

    From its first encoding on it keeps a pool of threads, one for each processor that it may use at that moment. A
    forked child of a process with such a pool still encodes correctly, but at half the speed; so it encodes a
    letter `on_one_processor` while it is built.
    """

    name = "fastokens"
    build = ""
    """What identifies this build of the library: its files, their sizes and times."""

    def __init__(self, backend: tokenizers.Tokenizer, definition: bytes | None = None) -> None:
        """Build it from the backend's definition; pass it as `definition` if it is at hand."""
        if is_limited(backend):
            raise TokenizerError("the tokenizer has parts that are not known to be quick, and runs with limits")
        dropout = getattr(backend.model, "dropout", None) if definition is None else None
        if dropout:
            raise TokenizerError(f"it skips merges at random (dropout {dropout})")
        if sys.byteorder != "little":
            raise TokenizerError("fastokens writes little-endian ids, and this machine is big-endian")
        try:
            import fastokens
        except ImportError as error:
            raise TokenizerError(f"fastokens is not installed ({error})") from None
        self.build = _build(Path(fastokens.__file__).parent)
        try:
            self._tokenizer = fastokens.Tokenizer.from_json_str(
                backend.to_str() if definition is None else definition.decode()
            )
            with on_one_processor():
                self._tokenizer.encode_batch_flat(["a"])
        except BaseException as error:  # ValueError if it rejects it; custom parts may raise anything
            raise TokenizerError(f"fastokens rejects it ({reason_of(error)})") from None

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order."""
        try:
            data, ends = self._tokenizer.encode_batch_flat(list(texts))
        except UnicodeEncodeError:
            data, ends = self._tokenizer.encode_batch_flat([well_formed(text) for text in texts])
        offsets = (np.frombuffer(ends, np.uint64).astype(np.int64) * 4).tolist()
        # Each text gets its own bytes: a slice would keep the whole batch in memory.
        return [np.frombuffer(data[start:end], np.int32) for start, end in pairwise(offsets)]


class Building:
    """An encoder built in a thread while this one does other work, which `fastokens` allows."""

    def __init__(self, build: Callable[[], FastEncoder]) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(1, "building an encoder")
        self._built = self._pool.submit(build)

    def encoder(self) -> FastEncoder:
        """The encoder, once it is built and the thread has ended; raises what building it raised."""
        self._pool.shutdown()
        # Return free memory to the system, where there is a call for it: a finished thread leaves memory behind
        # that no other thread would use.
        with suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
        return self._built.result()


@contextmanager
def on_one_processor() -> Iterator[None]:
    """Keep this thread on one processor inside the block, where the system supports it."""
    before: set[int] | None = None
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        if before:
            with suppress(OSError):
                os.sched_setaffinity(0, before)


def well_formed(text: str) -> str:
    """The text as UTF-8 can express it: a surrogate pair as its character, half a pair as U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


@cache
def _build(folder: Path) -> str:
    """The files of a library, each with its size and the time of its last change, as a hash."""
    with os.scandir(folder) as entries:
        files = sorted((entry.name, entry.stat()) for entry in entries if entry.is_file())
    listed = [f"{name} {there.st_size} {there.st_mtime_ns}\n" for name, there in files]
    return sha256("".join(listed).encode()).hexdigest()


def _frozen(values: list[int]) -> Ids:
    ids: Ids = np.array(values, np.int32) if values else empty_ids()
    ids.flags.writeable = False
    return ids


@contextmanager
def _refused(texts: Sequence[str]) -> Iterator[None]:
    """Raise EncodeError, with the beginning of the texts, for whatever the library raises."""
    try:
        yield
    except BaseException as error:
        text = max(texts, key=len, default="")
        begin = f"{text[:_SHOWN]!r}{'…' if len(text) > _SHOWN else ''}"
        raise EncodeError(
            f"the tokenizer cannot encode a text of {len(text):,} characters, {begin} ({reason_of(error)}).\n"
            "Its tokens cannot be compared with recorded ones.\n"
            "Check the normalizer, the pre-tokenizer and the ids in its tokenizer.json, or download it again."
        ) from error


_TEXTS = (
    "",
    "The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX!",
    "Grüße aus Köln, façade, smørbrød, żółć, ğıİ, ǅungla, ﬁn ﬄ, ſß",
    "Привет, мир. Ελληνικά κείμενο, ΣΊΣΥΦΟΣ. Հայերեն. ქართული.",
    "こんにちは世界。中文没有空格，也能分词。한국어 문장입니다. ㍿①Ⅷ½²",
    "مرحبا بالعالم ١٢٣ שלום עולם नमस्ते दुनिया १२३ தமிழ் ไทย ភាសាខ្មែរ አማርኛ བོད",
    "e\u0301a\u030ao\u0308 \u0928\u093c \u0958 q\u0307\u0323 \u1100\u1161\u11a8 \u212b \u2126 \u0344 \u0301start",
    "🎉 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👍🏽 ❤️ 1️⃣ 🫠\u200d\ufe0f\U000e0067",
    "1 12 123 1234 12345 1234567890123 3.14159 1,000,000 0xdeadBEEF 2025-11-21T08:30:00Z v1.2.3",
    " a  b   c    d\te\t\tf\n g\n\n h \n \n\n\ni\r\nj\r\r\n \t \n    ",
    "\u00a0a\u00a0\u00a0b\u2003c\u3000d\u2028e\u0085f\ufeffg\u200bh\n\n\u00a0\u00a0*",
    "I'm you'RE he'S they'LL we'd I'Ve 'tis o'clock rock'n'roll ’s x’ll 's'S 'd''m",
    'def f(x: int) -> dict[str, Any]:\n    return {"a": [x ** 2, None], \'b\': f"{x!r:>10}"}  # ok?\n',
    '{"name":"get_weather","arguments":{"city":"Paris","days":[1,2,3]},"x":null}\\n\\"\\u00e9\\"',
    "<html><body class='x'>&amp;</body></html> <<>> <|> <||> |> <｜｜> </s> <s> [INST] <0x0A> ▁▁a▁",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case a.b.c/d/e?f=g&h=i#j @user #tag $x %d",
    "a\ud83db \ud83d\ude00 \udc00\ud800 \udfff",
    "\x00\x01\x07\x1b[31m\x7f\x80\x9f\u0600\ufffd\uffff\U0010ffff\U000e0100",
    "!!!???... ---=== *** ~~~ ((([[[{{{ }}} ]]] ))) <<< >>> ;:,. \"'`",
    "a" * 700,
    "antidisestablishmentarianism" * 40,
    "ab1" * 200,
    "中" * 200 + "文" * 3,
    " " * 260 + "x",
    "\n" * 130 + " " * 17 + "\t" * 33 + "y",
    "=" * 129 + "-" * 65 + "#" * 33,
    "0" * 301,
    "e\u0301\u0323" * 90,
    "👍🏽" * 60,
)
_CONTROL_TOKENS = 48
"""How many control tokens are spelled out, at equal distances."""
_ENTRIES = 1024
"""How many entries of the vocabulary are joined to words."""


def probes(vocabulary: Vocabulary) -> list[str]:
    """Texts on which encoders differ if they differ at all, some made from the tokenizer's own words and control
    tokens."""
    # Control tokens whole, cut off, in upper case, and next to text and to each other.
    ids = sorted(vocabulary.added_ids)
    contents = [vocabulary.token_bytes(i).decode() for i in ids[:: max(1, len(ids) // _CONTROL_TOKENS)]]
    whole = [f"a {content}b\n{content} {content}{content}'s" for content in contents]
    partly = [f"{content[:-1]} {content[1:]} {content.upper()} {content[:3]}" for content in contents[:8]]
    # Entries from the whole vocabulary, joined as bytes into words that it never saw.
    step = max(1, vocabulary.size // _ENTRIES)
    entries = iter([vocabulary.token_bytes(i) for i in range(step - 1, vocabulary.size, step)])
    texts = []
    while batch := list(islice(entries, 32)):
        texts.append(b"".join(batch).decode("utf-8", "replace"))
    return [*_TEXTS, *[*whole, *partly, "".join(contents), " ".join(contents)], *texts]


def disagreement(reference: ReferenceEncoder, fast: Encoder, texts: Sequence[str]) -> str | None:
    """Where the two differ on these texts, in words; None if they do not.

    It leaves no thread of either library behind, so a process may fork afterwards.
    """
    try:
        with on_one_processor():
            fast_batch = fast.encode_batch(texts)
    except Exception as error:  # it may raise anything
        return f"{fast.name} could not encode the texts of the self-check ({type(error).__name__}: {error})"
    for text, fast_ids, ids in zip(texts, fast_batch, reference.encode_alone(texts), strict=True):
        if not np.array_equal(fast_ids, ids):
            return f"{fast.name} disagreed with {reference.name} at {shown(text)}"
    return None


def shown(text: str) -> str:
    """A text as a message quotes it: on one line, shortened."""
    quoted = ascii(well_formed(text))
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."
