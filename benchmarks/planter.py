"""Logs with faults planted in some rows, written in chunks by several processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.calls import calls_type, recorded_ids
from benchmarks.conversations import TOOLS
from benchmarks.corpus import Builder, Shape
from benchmarks.faults import CATALOGUE, Draft, Fault, Kit

__all__ = ["planted_log", "rows_of"]

TURNS = (2, 3, 8)
WORDS = 90
CHUNK_ROWS = 200
RIGHT_AHEAD = 64
"""The first rows of a log are correct: they decide whether the tokenizer fits."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Task:
    """One chunk of a log."""

    tokenizer: str
    rows: int
    calls: bool
    foreign: bool
    parquet: bool
    rate: float
    seed: int
    first: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Serialized rows, with the fault of each, or ""."""

    data: bytes
    faults: list[str]
    tokens: int


def planted_log(
    log: Path, tokenizer: str, *, tokens: int, rate: float, seed: tuple[int, int], jobs: int
) -> list[str]:
    """Write a log of about this many tokens; returns the fault of each row, or "".

    The file name says what it holds: `rows`, `calls`, or `foreign` rows of another vocabulary, as `.jsonl` or
    `.parquet`.
    A row depends only on seed and number.
    """
    calls, parquet, foreign = "calls" in log.name, log.suffix == ".parquet", "foreign" in log.name
    number = int(np.random.default_rng(seed).integers(1 << 31))
    truth: list[str] = []
    with ExitStack() as stack:
        write = stack.enter_context(_writer(log, calls) if parquet else _lines(log))
        rows = max(20, min(CHUNK_ROWS, tokens // 2000))
        tasks = (_Task(tokenizer, rows, calls, foreign, parquet, rate, number, at) for at in count(0, rows))
        for chunk in stack.enter_context(_made(tasks, jobs)):
            write(chunk.data)
            truth += chunk.faults
            tokens -= chunk.tokens
            if tokens <= 0:
                break
    return truth


@contextmanager
def _made(tasks: Iterator[_Task], jobs: int) -> Iterator[Iterator[_Chunk]]:
    """The chunks of tasks, in order, a few built ahead."""
    if jobs == 1:
        yield map(_chunk, tasks)
        return
    # New interpreters: the libraries have threads, and a fork with threads can hang.
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:

        def ordered() -> Iterator[_Chunk]:
            ahead: deque[Future[_Chunk]] = deque()
            for task in tasks:
                ahead.append(pool.submit(_chunk, task))
                if len(ahead) > 2 * jobs:
                    yield ahead.popleft().result()

        try:
            yield ordered()
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _lines(log: Path) -> Iterator[Callable[[bytes], Any]]:
    with log.open("wb") as file:
        yield file.write


@contextmanager
def _writer(log: Path, calls: bool) -> Iterator[Callable[[bytes], Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    with parquet.ParquetWriter(log, _schema(calls), compression="zstd") as writer:

        def write(data: bytes) -> None:
            with pa.ipc.open_stream(data) as stream:
                writer.write_table(stream.read_all())

        yield write


# In the processes


def _chunk(task: _Task) -> _Chunk:
    made = list(rows_of(task.tokenizer, task.seed, task.first, task.rows, task.rate, calls=task.calls))
    rows = [row for row, _ in made]
    if task.foreign:
        size = _kit(task.tokenizer)[1].vocabulary.size
        for row in rows:
            row["token_ids"] = (row["token_ids"].astype(np.int64) * 7 % size).astype(np.int32)
    data = _table(rows, task.calls) if task.parquet else b"".join(map(_line, rows))
    tokens = sum(recorded_ids(row["calls"]) if task.calls else len(row["token_ids"]) for row in rows)
    return _Chunk(data, [name for _, name in made], tokens)


def rows_of(
    tokenizer: str, seed: int, first: int, rows: int, rate: float, *, calls: bool
) -> Iterator[tuple[Row, str]]:
    """Rows of a log, each with the name of its planted fault, or ""."""
    builder, kit = _kit(tokenizer)
    wanted = [one for one in CATALOGUE.values() if (one.calls if calls else one.rows)]
    shape = Shape(turns=TURNS, words=WORDS, faulty=0.0, seed=seed)
    for number in range(first, first + rows):
        draw, messages, ids, _, mask = builder.conversation(shape, number)
        logprobs = np.where(mask == 1, np.round(-draw.exponential(0.4, len(ids)) - 1e-4, 4), 0.0)
        draft = Draft(kit, draw, messages, list(TOOLS), ids.copy(), mask, logprobs)
        spoiled = number >= RIGHT_AHEAD and draw.random() < rate
        # In turn, so that all are tried equally often; if a row cannot take one, the next.
        order = [number % len(wanted), *draw.permutation(len(wanted)).tolist()] if spoiled else []
        row, name = _spoiled(draft, [wanted[at] for at in order], calls=calls)
        yield {"id": f"{seed}-{number}", **row}, name


def _spoiled(draft: Draft, faults: list[Fault], *, calls: bool) -> tuple[Row, str]:
    """A row with the first of the faults that can be planted in it; unchanged if none can."""
    before = draft.copy()
    for one in faults:
        attempt = before.copy()
        if calls and one.made:
            attempt.make_calls()
        if one.plant(attempt):
            return _row(attempt, calls), one.name
    return _row(before, calls), ""


def _row(draft: Draft, calls: bool) -> Row:
    text = orjson.dumps(draft.messages).decode()
    row: Row = {"messages": text[:-2] if draft.broken else text, "tools": draft.tools}
    if calls:
        if draft.calls is None:
            draft.make_calls()
        return {**row, "calls": draft.calls}
    return {**row, "token_ids": draft.ids, "loss_mask": draft.mask, "logprobs": draft.logprobs, **draft.more}


@lru_cache(maxsize=1)
def _kit(tokenizer: str) -> tuple[Builder, Kit]:
    from tito_audit.record.message import as_messages, as_tools

    builder = Builder(tokenizer)

    def template(messages: list[dict[str, Any]], opens: bool) -> str:
        said = as_messages(messages, "messages")
        return builder.renderer.render(said, as_tools(TOOLS, "tools"), add_generation_prompt=opens)

    return builder, Kit(builder.encode, builder.tokenizer.vocabulary, builder.tokenizer.bos_id, template)


def _line(row: Row) -> bytes:
    """A row as a JSON line; messages that are not JSON break the whole line."""
    text = row["messages"]
    rest = orjson.dumps({**row, "messages": None}, option=orjson.OPT_SERIALIZE_NUMPY)
    return rest.replace(b'"messages":null', b'"messages":' + text.encode(), 1) + b"\n"


def _table(rows: list[Row], calls: bool) -> bytes:
    """The rows as an Arrow stream; messages and tools are JSON, as most exports have them."""
    import pyarrow as pa

    texts = [{**row, "tools": orjson.dumps(row["tools"]).decode()} for row in rows]
    schema = _schema(calls)
    columns = [pa.array([row.get(one.name) for row in texts], one.type) for one in schema]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_table(pa.table(columns, schema=schema))
    return bytes(sink.getvalue())


def _schema(calls: bool) -> Any:
    import pyarrow as pa

    row = [("token_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.int8()))]
    values = [("logprobs", pa.list_(pa.float32())), ("trainer_logprobs", pa.list_(pa.float32()))]
    sets = [(name, pa.list_(pa.int32())) for name in ("token_versions", "top_p_token_ids", "top_p_token_offsets")]
    columns = [*row, *values, *sets, ("routed_experts", pa.string()), ("advantages", pa.list_(pa.float32()))]
    own = [("calls", calls_type(text=True))] if calls else columns
    return pa.schema([*((name, pa.string()) for name in ("id", "messages", "tools")), *own])
