"""The least that each stage of a scan could take: its library alone on the rows of a log, in CPU seconds.

reading     orjson on every line, or pyarrow on every row group
rendering   minijinja on every conversation, with its messages ready
encoding    fastokens on every text
comparing   numpy on ids: those of each text with the recorded ones, and each prompt with what precedes it
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import orjson

__all__ = ["floors", "main"]

Row = dict[str, Any]
Array = Any


def floors(log: Path, tokenizer: Path) -> dict[str, float]:
    """CPU seconds of each stage's library; for a table only reading."""
    spent = {"reading": _spent(lambda: _read(log))}
    if log.suffix == ".parquet":  # everything else is as with JSONL
        return spent
    rows = list(_rows(log))
    render = _renderer(tokenizer) if all(row.get("messages") for row in rows) else None
    texts: list[str] = []
    if render is not None:
        spent["rendering"] = _spent(lambda: texts.extend(map(render, rows)))
    encode = _encoder(tokenizer)
    found: list[Array] = []
    if texts and encode is not None:
        encode(texts[0])
        spent["encoding"] = _spent(lambda: found.extend(map(encode, texts)))
    pairs = list(_pairs(rows, found))
    spent["comparing"] = _spent(lambda: [np.array_equal(one[: len(other)], other) for one, other in pairs])
    return spent


def _spent(work: Callable[[], Any]) -> float:
    began = process_time()
    work()
    return process_time() - began


def _read(log: Path) -> None:
    if log.suffix == ".parquet":
        from pyarrow import parquet

        file = parquet.ParquetFile(log)
        for group in range(file.num_row_groups):
            file.read_row_group(group, use_threads=False)
        return
    with log.open("rb") as lines:
        for line in lines:
            orjson.loads(line)


def _rows(log: Path) -> Iterator[Row]:
    """The rows, ids as arrays."""
    with log.open("rb") as file:
        for line in file:
            row = orjson.loads(line)
            for message in row.get("messages") or ():
                for call in message.get("tool_calls") or ():
                    call["function"]["arguments"] = orjson.loads(call["function"]["arguments"])
            for name in {"token_ids", "loss_mask", "logprobs"} & row.keys():
                row[name] = np.array(row[name], np.int32) if name == "token_ids" else None
            for call in row.get("calls") or ():
                for name in ("prompt_token_ids", "generation_token_ids"):
                    call[name] = np.array(call[name], np.int32)
            yield row


def _pairs(rows: Sequence[Row], found: Sequence[Array]) -> Iterator[tuple[Array, Array]]:
    for number, row in enumerate(rows):
        seen: Array = row.get("token_ids")
        for call in row.get("calls") or ():
            if seen is not None:
                yield call["prompt_token_ids"], seen
            seen = np.concatenate([call["prompt_token_ids"], call["generation_token_ids"]])
        if number < len(found) and seen is not None:
            yield found[number], seen


def _renderer(folder: Path) -> Callable[[Row], str] | None:
    """A function from rows to texts; None without the template or the library."""
    from tito_audit.render.globals import raise_exception, strftime_now, to_json
    from tito_audit.tokens.load import load_tokenizer

    try:
        import minijinja
    except ImportError:
        return None
    loaded = load_tokenizer(str(folder))
    environment = minijinja.Environment(
        templates={"chat": loaded.chat_templates["default"]},
        trim_blocks=True,
        lstrip_blocks=True,
        filters={"tojson": to_json},
        globals={"raise_exception": raise_exception, "strftime_now": strftime_now},
        finalizer=lambda value: NotImplemented,
    )
    special = dict(loaded.special_tokens)

    def render(row: Row) -> str:
        return environment.render_template(
            "chat", messages=row["messages"], tools=row.get("tools"), add_generation_prompt=False, **special
        )

    return render


def _encoder(folder: Path) -> Callable[[str], Array] | None:
    try:
        import fastokens

        fast = fastokens.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # not installed, or it does not support this tokenizer
        return None
    return lambda text: np.frombuffer(fast.encode_batch_flat([text])[0], np.int32)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a log of a corpus and print the seconds as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floors", description=main.__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("tokenizer", type=Path)
    asked = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):  # one processor: fastokens starts a thread for each
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import pyarrow.parquet  # noqa: F401 - loading is not part of the time

    print(json.dumps(floors(asked.log, asked.tokenizer)))


if __name__ == "__main__":
    main()
