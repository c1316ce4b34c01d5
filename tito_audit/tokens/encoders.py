"""Encoders: texts to ids, each text as a whole, without a cache.

`tokenizers` is the reference: reports rely on its ids only. `fastokens` is many times faster and must give the
same ids. It is built from the reference's definition, not from the tokenizer's file, so it knows tokens that were
added after loading.

A fast encoder is checked before it is trusted with a log, on texts that encoders have been seen to disagree on:
scripts, characters that combine or are normalized, multi-part emoji, digits, white space, contractions, control
tokens in full and in part, long words, and words made from the tokenizer's own vocabulary.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tito_audit.errors import EncodeError, TokenizerError
from tito_audit.record.arrays import Ids, empty_ids
from tito_audit.tokens.limited import library_error, runs_in_child
from tito_audit.tokens.vocab import Vocabulary

if TYPE_CHECKING:
    import tokenizers

_MAX_QUOTED = 40
"""Characters of a text in a message."""


class Encoder(Protocol):
    """Turns texts into ids. Adds no special tokens; those that a text spells become control tokens."""

    @property
    def name(self) -> str:
        """The library's name, as in reports."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order, `[N]` int32, read-only."""


class ReferenceEncoder:
    """`tokenizers`, the reference."""

    name = "tokenizers"

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order; the library may use threads."""
        with _encode_errors(texts):
            formed = [well_formed(text) for text in texts]
            encoded = self._backend.encode_batch_fast(formed, add_special_tokens=False)
            return [_read_only_ids(encoding.ids) for encoding in encoded]

    def encode_single_threaded(self, texts: Sequence[str]) -> list[Ids]:
        """The same ids without threads, which a process must not have when it forks."""
        return [_read_only_ids(self.encode_one(text)) for text in texts]

    def encode_one(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of one text; with `special`, including those that the post-processor adds."""
        with _encode_errors([text]):
            ids: list[int] = self._backend.encode(well_formed(text), add_special_tokens=special).ids
        return ids


class FastEncoder:
    """`fastokens`, built from a reference tokenizer; TokenizerError, with the reason, if that fails.

    Its first encoding starts a thread for each processor that it may use at that moment, and a forked child
    without these threads encodes at half the speed. So it encodes a letter `on_one_processor` while it is built.
    """

    name = "fastokens"
    build = ""
    """A hash of the library's files, their sizes and times."""

    def __init__(self, backend: tokenizers.Tokenizer, definition: bytes | None = None) -> None:
        """`definition`: the backend's definition, if it is at hand."""
        if runs_in_child(backend):
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
        self.build = _hash_files(Path(fastokens.__file__).parent)
        try:
            self._tokenizer = fastokens.Tokenizer.from_json_str(
                backend.to_str() if definition is None else definition.decode()
            )
            with on_one_processor():
                self._tokenizer.encode_batch_flat(["a"])
        except BaseException as error:  # ValueError if it rejects it; custom parts may raise anything
            raise TokenizerError(f"fastokens rejects it ({library_error(error)})") from None

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order."""
        try:
            data, ends = self._tokenizer.encode_batch_flat(list(texts))
        except UnicodeEncodeError:
            data, ends = self._tokenizer.encode_batch_flat([well_formed(text) for text in texts])
        offsets = (np.frombuffer(ends, np.uint64).astype(np.int64) * 4).tolist()
        # Each text gets its own bytes: a slice would keep the whole batch in memory.
        own = map(data.__getitem__, map(slice, offsets, offsets[1:]))
        return list(map(np.frombuffer, own, repeat(np.int32)))


class EncoderBuild:
    """A fast encoder that is being built in a thread."""

    def __init__(self, build: Callable[[], FastEncoder]) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(1, "building an encoder")
        self._built = self._pool.submit(build)

    def encoder(self) -> FastEncoder:
        """Wait for the encoder and for the end of the thread; raises what building it raised."""
        self._pool.shutdown()
        # A finished thread leaves memory behind that no other thread uses: return it to the system.
        with suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
        return self._built.result()


@contextmanager
def on_one_processor() -> Iterator[None]:
    """Pin this thread to one processor, where the system supports it."""
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
    """The text as valid Unicode: a surrogate pair as its character, a lone surrogate as U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


@cache
def _hash_files(folder: Path) -> str:
    """A hash of the names, sizes and modification times of the files in a folder."""
    with os.scandir(folder) as entries:
        files = sorted((entry.name, entry.stat()) for entry in entries if entry.is_file())
    listed = [f"{name} {there.st_size} {there.st_mtime_ns}\n" for name, there in files]
    return sha256("".join(listed).encode()).hexdigest()


def _read_only_ids(values: list[int]) -> Ids:
    ids: Ids = np.array(values, np.int32) if values else empty_ids()
    ids.flags.writeable = False
    return ids


@contextmanager
def _encode_errors(texts: Sequence[str]) -> Iterator[None]:
    """Turn whatever the library raises into EncodeError, with the beginning of the longest text."""
    try:
        yield
    except BaseException as error:
        text = max(texts, key=len, default="")
        begin = f"{text[:_MAX_QUOTED]!r}{'…' if len(text) > _MAX_QUOTED else ''}"
        raise EncodeError(
            f"the tokenizer cannot encode a text of {len(text):,} character{'s' * (len(text) != 1)}, {begin} "
            f"({library_error(error)}).\n"
            "Its tokens cannot be compared with recorded ones.\n"
            "Check the normalizer, the pre-tokenizer and the ids in its tokenizer.json, or download it again."
        ) from error


_PROBE_TEXTS = (
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
_PROBED_CONTROL_TOKENS = 48
"""How many control tokens are probed, at equal distances."""
_PROBED_ENTRIES = 1024
"""How many entries of the vocabulary are joined into words."""


def probe_texts(vocabulary: Vocabulary) -> list[str]:
    """Texts on which encoders are likely to differ, some made from the tokenizer's words and control tokens."""
    # Control tokens in full, cut off, in upper case, next to text and to each other
    ids = sorted(vocabulary.added_ids)
    contents = [vocabulary.token_bytes(i).decode() for i in ids[:: max(1, len(ids) // _PROBED_CONTROL_TOKENS)]]
    whole = [f"a {content}b\n{content} {content}{content}'s" for content in contents]
    partly = [f"{content[:-1]} {content[1:]} {content.upper()} {content[:3]}" for content in contents[:8]]
    # Entries from all of the vocabulary, joined into words that it does not have
    step = max(1, vocabulary.size // _PROBED_ENTRIES)
    entries = iter([vocabulary.token_bytes(i) for i in range(step - 1, vocabulary.size, step)])
    texts = []
    while batch := list(islice(entries, 32)):
        texts.append(b"".join(batch).decode("utf-8", "replace"))
    return [*_PROBE_TEXTS, *[*whole, *partly, "".join(contents), " ".join(contents)], *texts]


def find_disagreement(reference: ReferenceEncoder, fast: Encoder, texts: Sequence[str]) -> str | None:
    """The first difference on these texts, in words; None if there is none.

    Leaves no thread of either library behind, so the process may fork afterwards.
    """
    try:
        with on_one_processor():
            fast_batch = fast.encode_batch(texts)
    except Exception as error:  # it may raise anything
        return f"{fast.name} could not encode the texts of the self-check ({type(error).__name__}: {error})"
    for text, fast_ids, ids in zip(texts, fast_batch, reference.encode_single_threaded(texts), strict=True):
        if not np.array_equal(fast_ids, ids):
            return f"{fast.name} disagreed with {reference.name} at {quote_text(text)}"
    return None


def quote_text(text: str) -> str:
    """A text for a message: quoted, on one line, shortened."""
    quoted = ascii(well_formed(text))
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."
