"""Logs from a seed, of any length, for benchmarks to scan.

Prompts and answers are what the template writes. In 12 % of the rows some sampled tokens (one in 2,000, at
least one) are replaced with two that read the same, as models sample them; in half of those rows the mask is
also shifted by one token. A note next to the log says what was done, to check engines against it.

A log has training rows or all calls of the same conversations, with their complete prompts. Half of the changed
rows then hold the re-encoded text in later prompts.

A row depends only on the seed and its number, not on the number of processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.calls import calls_of, calls_type, recorded_ids
from benchmarks.conversations import TOOLS, Writer

__all__ = ["Builder", "Corpus", "Factory", "Shape", "built", "main"]

NON_CANONICAL = 0.0005
CHUNK_TOKENS = 300_000
"""Approximate number of tokens built at a time; also the size of a row group."""
_TOKENS_A_WORD = 1.5


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a corpus's rollouts."""

    turns: tuple[int, ...] = (2, 10, 40, 128)
    """Lengths of conversations; each gets the same share of the tokens."""
    words: int = 330
    """Approximate words per message."""
    faulty: float = 0.12
    seed: int = 0
    calls: bool = False
    """A log of calls, not of training rows."""

    def turns_of(self, number: int) -> int:
        """The number of answers in row `number`."""
        period = [turns for turns in self.turns for _ in range(round(max(self.turns) / turns))]
        order = np.random.default_rng([self.seed, 1]).permutation(len(period))
        return period[int(order[number % len(period)])]

    def rows_of(self, tokens: int) -> int:
        """The approximate number of rows with this many tokens."""
        mean = np.mean([self.turns_of(number) for number in range(len(self.turns) * max(self.turns))])
        return max(1, round(tokens / (mean * 2 * self.words * _TOKENS_A_WORD)))


@dataclass(slots=True)
class Corpus:
    """A generated log, as JSONL and Parquet, and what is in it."""

    jsonl: str
    parquet: str
    tokens: int = 0
    """Tokens of the conversations, each counted once."""
    rows: int = 0
    recorded: int = 0
    """Ids in the log: more than the tokens if every call repeats its prompt."""
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    """By the length of conversations: tokens of the prompts of all turns, which rendering every turn
    has to encode."""
    faulty: list[int] = field(default_factory=list)
    """Numbers of the rows whose tokens were changed."""


@dataclass(slots=True)
class _Chunk:
    """Rows built by one task, ready to write."""

    lines: list[bytes]
    table: bytes
    tokens: list[int]
    recorded: list[int]
    turns: list[int]
    prompt_tokens: list[int]
    faulty: list[bool]


def built(wanted: Sequence[tuple[Shape, int]], tokenizer: Path, folder: Path, jobs: int) -> list[Corpus]:
    """Corpora of these shapes and tokens, built by a separate process.

    Its memory would otherwise count for every process that is started later.
    """
    command = [sys.executable, "-m", "benchmarks.corpus", str(tokenizer), str(folder), "--jobs", str(jobs)]
    asked = json.dumps([[asdict(shape), tokens] for shape, tokens in wanted])
    done = subprocess.run(
        [*command, asked], cwd=Path(__file__).resolve().parents[1], stdout=subprocess.PIPE, check=True
    )
    return [Corpus(**made) for made in json.loads(done.stdout)]


class Factory:
    """Builds corpora of one tokenizer in a folder and keeps them for the next run."""

    def __init__(self, tokenizer: Path, folder: Path, jobs: int = 1) -> None:
        self.tokenizer = tokenizer
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # New interpreters: the libraries have threads, and a fork with threads can hang.
        self._pool = (
            ProcessPoolExecutor(jobs, get_context("spawn"), _start, (str(tokenizer),)) if jobs > 1 else None
        )
        self._jobs = jobs

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown()

    def corpus(self, shape: Shape, tokens: int) -> Corpus:
        """A corpus of about this many tokens, from the folder if it was built before."""
        name = f"{'-'.join(map(str, shape.turns))}-{tokens}-{self._key(shape)}"
        note = self.folder / f"{name}.json"
        if note.is_file():
            return Corpus(**orjson.loads(note.read_bytes()))
        corpus = Corpus(str(self.folder / f"{name}.jsonl"), str(self.folder / f"{name}.parquet"))
        self._write(corpus, shape, tokens)
        note.write_bytes(orjson.dumps(asdict(corpus)))
        return corpus

    def _key(self, shape: Shape) -> str:
        sources = [Path(__file__), Path(__file__).with_name("conversations.py"), self.tokenizer / "tokenizer.json"]
        parts = [repr(shape).encode(), *(hashlib.sha256(path.read_bytes()).digest() for path in sources)]
        return hashlib.sha256(b"".join(parts)).hexdigest()[:10]

    def _write(self, corpus: Corpus, shape: Shape, tokens: int) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        with (
            Path(corpus.jsonl).open("wb") as out,
            parquet.ParquetWriter(corpus.parquet, _schema(shape.calls), compression="zstd") as writer,
        ):
            for chunk in self._chunks(shape, shape.rows_of(min(tokens, CHUNK_TOKENS))):
                cumulated = corpus.tokens + np.cumsum(chunk.tokens)
                kept = min(int(cumulated.searchsorted(tokens)) + 1, len(chunk.tokens))
                out.writelines(chunk.lines[:kept])
                with pa.ipc.open_stream(chunk.table) as stream:
                    writer.write_table(stream.read_all().slice(0, kept), row_group_size=1 << 20)
                _note(corpus, chunk, kept)
                if corpus.tokens >= tokens:
                    return

    def _chunks(self, shape: Shape, rows: int) -> Iterator[_Chunk]:
        """Endless chunks of this many rows, in order, a few built ahead."""
        if self._pool is None:
            build = _builder(str(self.tokenizer))
            yield from (build(shape, number * rows, rows) for number in count())
        assert self._pool is not None
        ahead: deque[Future[_Chunk]] = deque()
        try:
            for number in count():
                ahead.append(self._pool.submit(_build, shape, number * rows, rows))
                if len(ahead) > 2 * self._jobs:
                    yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def _note(corpus: Corpus, chunk: _Chunk, kept: int) -> None:
    """Count the first `kept` rows of a chunk."""
    corpus.faulty += [corpus.rows + at for at in range(kept) if chunk.faulty[at]]
    corpus.rows += kept
    corpus.tokens += sum(chunk.tokens[:kept])
    corpus.recorded += sum(chunk.recorded[:kept])
    for turns, tokens in zip(chunk.turns[:kept], chunk.prompt_tokens, strict=False):
        corpus.prompt_tokens[str(turns)] = corpus.prompt_tokens.get(str(turns), 0) + tokens


def _schema(calls: bool) -> Any:
    import pyarrow as pa

    row = [
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float32())),
    ]
    return pa.schema(
        [
            ("id", pa.string()),
            ("messages", pa.string()),  # JSON, as most exports have them
            ("tools", pa.string()),
            *([("calls", calls_type())] if calls else row),
        ]
    )


_Build = Callable[[Shape, int, int], _Chunk]
_built: dict[str, _Build] = {}
_here: list[str] = []


def _start(tokenizer: str) -> None:
    """Initialize a process of the pool."""
    _here[:] = [tokenizer]
    _builder(tokenizer)


def _build(shape: Shape, first: int, rows: int) -> _Chunk:
    return _builder(_here[0])(shape, first, rows)


def _builder(tokenizer: str) -> _Build:
    """The builder of a tokenizer, loaded once per process."""
    if tokenizer not in _built:
        _built[tokenizer] = Builder(tokenizer).chunk
    return _built[tokenizer]


class Builder:
    """Builds rows with a tokenizer."""

    def __init__(self, tokenizer: str) -> None:
        from tito_audit.render.renderer import make_renderer
        from tito_audit.tokens.load import load_tokenizer

        self.tokenizer = load_tokenizer(tokenizer)
        self.renderer = make_renderer(self.tokenizer)
        self.encode = _encoder(self.tokenizer, tokenizer)
        self._words = np.array(_words(self.tokenizer.vocabulary), dtype=object)

    def chunk(self, shape: Shape, first: int, rows: int) -> _Chunk:
        """The rows `[first, first + rows)`."""
        out = _Chunk([], b"", [], [], [], [], [])
        made = [self._row(shape, number, out) for number in range(first, first + rows)]
        out.lines = [orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for row in made]
        out.table = _table(made, shape.calls)
        return out

    def _row(self, shape: Shape, number: int, out: _Chunk) -> dict[str, Any]:
        draw, messages, ids, starts, mask = self.conversation(shape, number)
        turns = shape.turns_of(number)
        faulty = bool(draw.random() < shape.faulty)
        canonical = ids, mask
        if faulty:
            ids, mask = self._respelled(ids, mask, draw)
        logprobs = np.where(mask == 1, np.round(-draw.exponential(0.4, len(ids)) - 1e-4, 4), 0.0)
        worse = faulty and bool(draw.random() < 0.5)
        out.tokens.append(len(ids))
        out.turns.append(turns)
        out.prompt_tokens.append(int(starts.sum()))
        out.faulty.append(faulty)
        row = {"id": f"{shape.seed}-{number}", "messages": messages, "tools": TOOLS}
        if shape.calls:
            calls = calls_of(ids, mask, logprobs, *(canonical if worse else (ids, mask)))
            out.recorded.append(recorded_ids(calls))
            return {**row, "calls": calls}
        out.recorded.append(len(ids))
        return {**row, "token_ids": ids, "loss_mask": np.roll(mask, 1) if worse else mask, "logprobs": logprobs}

    def conversation(
        self, shape: Shape, number: int
    ) -> tuple[np.random.Generator, list[dict[str, Any]], Any, Any, Any]:
        """The row's random stream, messages, correct ids, starts of answers, and mask."""
        draw = np.random.default_rng([shape.seed, 0, number])
        messages = Writer(self._words, draw, shape.words).conversation(shape.turns_of(number))
        return draw, messages, *self._tokens(messages)

    def _tokens(self, messages: list[dict[str, Any]]) -> tuple[Any, Any, Any]:
        """Ids of a conversation, the starts of its answers, and the mask of what was sampled."""
        from tito_audit.record.message import as_messages, as_tools
        from tito_audit.render.spans import render_spans

        rendering = render_spans(self.renderer, as_messages(messages, "row"), as_tools(TOOLS, "row"))
        ids = self.encode(rendering.text)
        ends = np.cumsum(self.tokenizer.vocabulary.byte_lengths(ids))
        data = np.frombuffer(rendering.text.encode(), np.uint8)
        characters = np.append(np.flatnonzero((data & 0xC0) != 0x80), len(data))
        sampled = np.array([found for found in rendering.sampled.values() if found is not None], np.int64)
        bounds = characters[sampled]
        starts = np.searchsorted(ends, bounds[:, 0], "right")
        stops = np.searchsorted(ends, bounds[:, 1], "left") + 1
        mask = np.zeros(len(ids), np.int8)
        for start, stop in zip(starts, stops, strict=True):
            mask[start:stop] = 1
        return ids, starts, mask

    def _respelled(self, ids: Any, mask: Any, draw: np.random.Generator) -> tuple[Any, Any]:
        """The row with some sampled tokens, at least one, as two that spell the same."""
        sampled = np.flatnonzero(mask)
        wanted = max(1, int(draw.binomial(len(sampled), NON_CANONICAL)))
        new, at = [], []
        for spot in draw.permutation(sampled).tolist():
            halves = self._halves(int(ids[spot]))
            if halves is not None:
                new.append(halves)
                at.append(spot)
            if len(at) == wanted:
                break
        spots = np.array(at, np.int64)
        pairs = np.array(new, np.int32).reshape(-1, 2)
        out = ids.copy()
        out[spots] = pairs[:, 0]
        return np.insert(out, spots + 1, pairs[:, 1]), np.insert(mask, spots + 1, 1)

    def _halves(self, token: int) -> tuple[int, int] | None:
        """Two tokens that read like this one; None for a single byte or a control token."""
        vocabulary = self.tokenizer.vocabulary
        if token in vocabulary.added_ids:
            return None
        data = vocabulary.token_bytes(token)
        for cut in range(1, len(data)):
            left, right = vocabulary.ids_of_bytes(data[:cut]), vocabulary.ids_of_bytes(data[cut:])
            if left and right:
                return left[0], right[0]
        return None


def _words(vocabulary: Any) -> list[str]:
    """Words of a vocabulary, those merged earlier (more common) first."""
    pieces = [vocabulary.piece(i) for i in range(vocabulary.size)]
    begun = [piece[1:] for piece in pieces if piece[:1] == " "]
    plain = [word for word in (begun if len(begun) > 5000 else pieces) if word.isascii() and word.isalpha()]
    return list(dict.fromkeys(word for word in plain if 1 < len(word) < 16))[:30_000]


def _encoder(tokenizer: Any, folder: str) -> Callable[[str], Any]:
    """A fast encoder that agrees with the tokenizer on a probe, else the tokenizer."""
    probe = json.dumps([TOOLS, "héllo 世界 🙂\n\n  x = 12345", "<|im_start|>user\n"], ensure_ascii=False)
    try:
        import fastokens

        fast = fastokens.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    except Exception:  # not installed, or it does not support this tokenizer
        return lambda text: tokenizer.encode(text)

    def encode(text: str) -> Any:
        return np.frombuffer(fast.encode_batch_flat([text])[0], np.uint32).astype(np.int32)

    return encode if np.array_equal(encode(probe), tokenizer.encode(probe)) else tokenizer.encode


def _table(rows: list[dict[str, Any]], calls: bool) -> bytes:
    """The rows as an Arrow stream."""
    import pyarrow as pa

    schema = _schema(calls)

    def lists(name: str, dtype: Any) -> Any:
        offsets = np.cumsum([0, *(len(row[name]) for row in rows)]).astype(np.int32)
        values = np.concatenate([row[name] for row in rows]).astype(dtype)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))

    columns = [
        pa.array([row["id"] for row in rows]),
        *(pa.array([orjson.dumps(row[name]).decode() for row in rows]) for name in ("messages", "tools")),
    ]
    if calls:
        columns.append(pa.array([row["calls"] for row in rows], calls_type()))
    else:
        columns += [lists("token_ids", np.int32), lists("loss_mask", np.int8), lists("logprobs", np.float32)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(pa.table(columns, schema=schema))
    return bytes(sink.getvalue())


def main(argv: Sequence[str] | None = None) -> None:
    """Build corpora and print what they hold, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus", description=main.__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wanted", type=json.loads, help="[[{turns, words, faulty, seed}, tokens], …]")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args(argv)
    factory = Factory(asked.tokenizer, asked.folder, asked.jobs)
    try:
        made = [
            factory.corpus(Shape(**{**shape, "turns": tuple(shape["turns"])}), tokens)
            for shape, tokens in asked.wanted
        ]
    finally:
        factory.close()
    print(json.dumps([asdict(corpus) for corpus in made]))


if __name__ == "__main__":
    main()
