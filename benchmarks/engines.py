"""The engines that a scan is compared with, each in a separate process that prints one line of JSON.

    per-turn  the frameworks' way: for every answer `apply_chat_template` on the history, with transformers, and
              compare the ids with the recorded ones. On a sample of turns, since it is quadratic.
    linear    a linear way: each rollout rendered once, encoded in batches with tokenizers, arrays compared
    floor     the file's columns read and nothing else

Time starts when libraries and tokenizers are loaded; processes forked after that count.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.calls import ids_of, recorded_ids

__all__ = ["Outcome", "floor", "linear", "main", "per_turn"]

PART_BYTES = 1 << 20
PACKED = {".gz": "gzip", ".zst": "zstd"}
BATCH_ROWS = 32
TURNS_OF_A_ROW = 4
"""The number of turns per conversation that the quadratic way samples."""
SAMPLE_TOKENS = 100_000
"""The least number of prompt tokens that it encodes for each length of conversation."""

Part = tuple[int, int]
"""Bytes `[start, stop)` of a JSONL file, or one row group `[n, n + 1)` of a Parquet file."""
Columns = dict[str, Any]
_Sampled = tuple[Any, Any, Any, list[int]]
"""A chat, its tools, the recorded ids, and the answers whose prompts are sampled."""


@dataclass(slots=True)
class Outcome:
    """Time, memory and findings of an engine."""

    seconds: float = 0.0
    tokens: int = 0
    """Recorded tokens of the rollouts that it read."""
    rows: int = 0
    different: int = 0
    """Rows (for `per-turn`: prompts) whose ids are not what template and tokenizer write."""
    encoded: dict[str, int] = field(default_factory=dict)
    """`per-turn`: prompt tokens encoded, by the length of conversations."""
    spent: dict[str, float] = field(default_factory=dict)
    """`per-turn`: seconds for these."""
    cpu: float = 0.0
    """CPU seconds of all processes, loading included."""


def floor(log: Path, workers: int = 1, tokens: int | None = None) -> Outcome:
    """Reading alone: each line with orjson and its ids as an array, or each column of a table."""
    return _in_parts(_read_part, log, workers, tokens)


def linear(log: Path, tokenizer: Path, workers: int = 1, tokens: int | None = None) -> Outcome:
    """Render and encode each rollout once, and compare arrays."""
    return _in_parts(partial(_linear_part, _render_and_encode(tokenizer)), log, workers, tokens)


def per_turn(log: Path, tokenizer: Path, sample_tokens: int = SAMPLE_TOKENS, workers: int = 1) -> Outcome:
    """Render and encode the prompts of a sample of turns, as trainers and environments do.

    For each length of conversation, as many rows, with a few evenly spaced turns of each, as it takes to encode
    `sample_tokens` in every process. Reading the log is not counted. Processes take the longest prompts first, so
    that none waits long for the last.
    """
    import transformers

    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(str(tokenizer))
    out = Outcome()
    for length, rows in _sample(log, sample_tokens * workers, TURNS_OF_A_ROW * workers).items():
        prompts = [(row, index) for row in rows for index in row[3]]
        prompts.sort(key=lambda prompt: -prompt[1])
        started = time.perf_counter()
        tried = list(_each(partial(_prompt, oracle), prompts, workers))
        out.spent[str(length)] = time.perf_counter() - started
        out.encoded[str(length)] = sum(encoded for encoded, _ in tried)
        out.different += sum(differs for _, differs in tried)
        out.tokens += sum(len(row[2]) for row in rows)
        out.rows += len(rows)
    out.seconds = sum(out.spent.values())
    return out


def _prompt(oracle: Any, prompt: tuple[_Sampled, int]) -> tuple[int, bool]:
    """The number of tokens of a prompt, and whether they differ from the recorded ones."""
    (chat, tools, recorded, _), index = prompt
    ids = oracle.apply_chat_template(chat[:index], tools=tools, add_generation_prompt=True, return_dict=False)
    return len(ids), ids != recorded[: len(ids)].tolist()


def _sample(log: Path, wanted: int, turns_of_a_row: int) -> dict[int, list[_Sampled]]:
    """By length: chats with tools, recorded ids and sampled messages, until each length has enough.

    The number of prompt tokens is estimated as half of the row for each turn.
    """
    found: dict[int, list[_Sampled]] = {}
    about: dict[int, float] = {}
    note = _note(log)
    lengths = len(note["prompt_tokens"]) if note else 1 << 30
    for part in _parts(log, None):
        for row in _rows(log, part):
            chat = _chat(row["messages"])
            answers = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
            length = len(answers)
            if about.get(length, 0) >= wanted:
                continue
            step = max(1, length // turns_of_a_row)
            tried = answers[step // 2 :: step][:turns_of_a_row]
            about[length] = about.get(length, 0) + len(tried) * len(row["token_ids"]) / 2
            found.setdefault(length, []).append((chat, row["tools"], row["token_ids"], tried))
        if len(about) == lengths and min(about.values()) >= wanted:
            break
    return found


def _in_parts(work: Callable[[Path, Part], Outcome], log: Path, workers: int, tokens: int | None) -> Outcome:
    """The summed results for all parts of a log, and the total time."""
    started = time.perf_counter()
    total = Outcome()
    jobs = [(log, part) for part in _parts(log, tokens)]
    _add(total, _each(lambda job: work(*job), jobs, workers))
    total.seconds = time.perf_counter() - started
    return total


def _each(work: Callable[[Any], Any], jobs: Sequence[Any], workers: int) -> Iterator[Any]:
    """The results of all jobs, in any order, from this many processes."""
    global _work, _jobs
    _work, _jobs = work, jobs
    if workers == 1:
        yield from map(work, jobs)
        return
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap_unordered(_working, range(len(jobs)))
        pool.close()  # and wait: CPU time is known only for ended processes
        pool.join()


_work: Callable[[Any], Any]
"""The work of forked processes; a tokenizer cannot be sent to them."""
_jobs: Sequence[Any]


def _working(number: int) -> Any:
    return _work(_jobs[number])


def _add(total: Outcome, outcomes: Iterator[Outcome]) -> None:
    for one in outcomes:
        total.tokens += one.tokens
        total.rows += one.rows
        total.different += one.different


def _parts(log: Path, tokens: int | None) -> list[Part]:
    """The log in parts at row boundaries; only the first ones with about `tokens` in all."""
    note = _note(log)
    share = 1.0 if tokens is None or note is None else min(1.0, tokens / note["tokens"])
    if log.suffix == ".parquet":
        from pyarrow import parquet

        groups = parquet.ParquetFile(log).num_row_groups
        return [(group, group + 1) for group in range(max(1, round(groups * share)))]
    size = log.stat().st_size
    if log.suffix in PACKED:
        return [(0, size)]
    bounds = [0]
    with log.open("rb") as file:
        while bounds[-1] < size * share:
            file.seek(min(bounds[-1] + PART_BYTES, size))
            file.readline()
            bounds.append(file.tell())
    return list(pairwise(bounds))


def _note(log: Path) -> dict[str, Any] | None:
    """The note that the builder left about a log."""
    note = log.with_suffix(".json")
    return dict(orjson.loads(note.read_bytes())) if note.is_file() else None


def _lines(log: Path, part: Part) -> Iterator[bytes]:
    if log.suffix in PACKED:
        import pyarrow as pa

        with pa.CompressedInputStream(str(log), PACKED[log.suffix]) as stream:
            yield from io.BufferedReader(stream, 1 << 20)
        return
    with log.open("rb") as file:
        file.seek(part[0])
        while file.tell() < part[1]:
            yield file.readline()


def _rows(log: Path, part: Part) -> Iterator[Columns]:
    """Messages, tools and ids of the rows of a part, and the number of ids in each row."""
    if log.suffix == ".parquet":
        from pyarrow import parquet

        names = ["messages", "tools", "token_ids"]
        table = parquet.ParquetFile(log).read_row_group(part[0], columns=names, use_threads=False)
        for messages, tools, ids in zip(*(table[name] for name in names), strict=True):
            yield {
                "messages": orjson.loads(messages.as_py()),
                "tools": orjson.loads(tools.as_py()),
                "token_ids": ids.values.to_numpy(),
                "recorded": len(ids),
            }
        return
    for line in _lines(log, part):
        row = orjson.loads(line)
        ids, recorded = _ids(row)
        yield {**row, "token_ids": np.array(ids, np.int32), "recorded": recorded}


def _ids(row: Columns) -> tuple[list[int], int]:
    """The ids of a whole conversation (of calls: the last prompt and answer), and how many the row holds."""
    if "calls" not in row:
        return row["token_ids"], len(row["token_ids"])
    return [one for part in ids_of(row["calls"][-1]) for one in part], recorded_ids(row["calls"])


def _read_part(log: Path, part: Part) -> Outcome:
    if log.suffix == ".parquet":
        from pyarrow import parquet

        table = parquet.ParquetFile(log).read_row_group(part[0], use_threads=False)
        whole = table["token_ids"].chunks if "token_ids" in table.column_names else ()
        return Outcome(tokens=sum(len(chunk.flatten()) for chunk in whole), rows=table.num_rows)
    out = Outcome()
    for line in _lines(log, part):
        row = orjson.loads(line)
        ids, recorded = _ids(row)
        np.array(ids, np.int32)
        out.tokens += recorded
        out.rows += 1
    return out


def _linear_part(encode: Callable[[Sequence[Columns]], list[Any]], log: Path, part: Part) -> Outcome:
    out = Outcome()
    rows = list(_rows(log, part))
    for first in range(0, len(rows), BATCH_ROWS):
        batch = rows[first : first + BATCH_ROWS]
        for row, ids in zip(batch, encode(batch), strict=True):
            end = len(row["token_ids"]) if "calls" in row else None  # the template closes the last answer
            out.different += not np.array_equal(np.array(ids[:end], np.int32), row["token_ids"])
            out.tokens += row["recorded"]
            out.rows += 1
    return out


def _render_and_encode(folder: Path) -> Callable[[Sequence[Columns]], list[Any]]:
    """A function from rows to the ids that their conversations encode to."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from tito_audit.tokens.load import load_tokenizer

    loaded = load_tokenizer(str(folder))
    # Set up as transformers does, but compiled once and called without its checks.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    template = environment.from_string(loaded.chat_templates["default"])

    def encode(rows: Sequence[Columns]) -> list[Any]:
        texts = [
            template.render(
                messages=_chat(row["messages"]),
                tools=row["tools"],
                add_generation_prompt=False,
                **loaded.special_tokens,
            )
            for row in rows
        ]
        return [one.ids for one in loaded.backend.encode_batch_fast(texts, add_special_tokens=False)]

    return encode


def _chat(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as servers pass them to a template: tool-call arguments as objects."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = orjson.loads(call["function"]["arguments"])
    return messages


def main(argv: Sequence[str] | None = None) -> None:
    """Run one engine and print its outcome."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("engine", choices=["per-turn", "linear", "floor"])
    parser.add_argument("log", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--tokens", type=int, help="linear: of the first rows only; per-turn: to encode for each length"
    )
    asked = parser.parse_args(argv)
    # One core per process, as in the scan: the libraries' threads are off.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    if asked.log.suffix == ".parquet":
        import pyarrow.parquet  # noqa: F401 - loading is not part of the time
    if asked.engine == "per-turn":
        out = per_turn(asked.log, asked.tokenizer, asked.tokens or SAMPLE_TOKENS, asked.workers)
    elif asked.engine == "linear":
        out = linear(asked.log, asked.tokenizer, asked.workers, asked.tokens)
    else:
        out = floor(asked.log, asked.workers)
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    out.cpu = sum(one.ru_utime + one.ru_stime for one in spent)
    print(json.dumps(asdict(out)))


if __name__ == "__main__":
    main()
