"""Very large logs for `benchmarks.large`: a block of rows with planted faults, repeated with other digits."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.measure import TOY
from benchmarks.planter import rows_of

ROWS = 300
"""Rows of a block."""
RATE = 0.2
_DIGITS = b"123456789"
_POOL = 16
_PATTERN = 4096
_TOGETHER = 4
KINDS = {
    "token_ids": "int64",
    "loss_mask": "int64",
    "logprobs": "float64",
    "trainer_logprobs": "float64",
    "token_versions": "int64",
}
"""Lists of numbers and their types, as `datasets` writes them."""


class Block:
    """Rows with planted faults, and copies of them with other digits."""

    def __init__(self, tokenizer: str = str(TOY)) -> None:
        from tito_audit.tokens.load import load_tokenizer

        vocabulary = load_tokenizer(tokenizer).vocabulary
        digits = [vocabulary.ids_of_bytes(bytes([digit]))[0] for digit in _DIGITS]
        self._digits = np.array(digits)
        self._size = vocabulary.size
        made = [one for one in rows_of(tokenizer, 7, 0, ROWS, RATE, calls=False) if self._varies(one[0])]
        self.rows = [row for row, _ in made]
        self.faults = [fault for _, fault in made]
        """The fault of each row, or ""."""

    def _varies(self, row: dict[str, Any]) -> bool:
        """Whether other digits make another row of it."""
        return len(np.intersect1d(row["token_ids"], self._digits)) > 5

    def copy(self, number: int) -> list[dict[str, Any]]:
        """Copy `number` of all rows, whose messages are JSON text."""
        order = np.random.default_rng(number).permutation(9) if number else np.arange(9)
        ids = np.arange(1 << 20, dtype=np.int32)
        ids[self._digits] = self._digits[order]
        texts = bytes.maketrans(_DIGITS, bytes(_DIGITS[at] for at in order))
        return [self._copied(row, number, at, ids, texts) for at, row in enumerate(self.rows)]

    def _copied(self, row: dict[str, Any], number: int, at: int, ids: Any, texts: bytes) -> dict[str, Any]:
        said = row["messages"].encode().translate(texts).decode()
        return {**row, "id": f"{number}-{at}", "messages": said, "token_ids": ids[row["token_ids"]]}


def image(number: int, size: int, *, text: bool = False) -> bytes:
    """Bytes that stand for an image; a few different ones take turns.

    As text, they are base64 and cannot be compressed much further; else they repeat, so that a file system that
    compresses stores many of them.
    """
    draw = np.random.default_rng(number % _POOL)
    if text:
        return base64.b64encode(draw.bytes(size * 3 // 4))
    return (b"\x89PNG\r\n\x1a\n" + draw.bytes(_PATTERN - 8)) * (size // _PATTERN)


def table_of(block: Block, first: int, copies: int, image_bytes: int) -> Any:
    """Copies of the block as an Arrow table; images share their memory."""
    import pyarrow as pa

    rows = [row for number in range(first, first + copies) for row in block.copy(number)]
    words = [orjson.dumps(tools).decode() if (tools := row["tools"]) is not None else None for row in rows]
    columns = {
        "id": pa.array([row["id"] for row in rows]),
        "messages": pa.array([row["messages"] for row in rows]),
        "tools": pa.array(words),
        **{name: _lists(rows, name, kind) for name, kind in KINDS.items()},
    }
    if image_bytes:
        columns["image"] = _images(len(rows), image_bytes)
    return pa.table(columns)


def _lists(rows: Sequence[dict[str, Any]], name: str, kind: str) -> Any:
    import pyarrow as pa

    values = [row.get(name) for row in rows]
    return pa.array(values, pa.list_(getattr(pa, kind)()))


def _images(rows: int, size: int) -> Any:
    import pyarrow as pa

    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pool = [pa.array([{"bytes": image(at, size), "path": f"{at}.png"}], kind) for at in range(_POOL)]
    return pa.chunked_array([pool[at % _POOL] for at in range(rows)], kind)


def write_parquet(path: Path, block: Block, size: int, image_bytes: int, large: int) -> int:
    """Write a Parquet file of about `size` bytes; returns how many copies of the block it has.

    A row group is one copy, and one is large: about `large` bytes.
    """
    from pyarrow import parquet

    done, writer, each = 0, None, 1
    tokens = [f"{name}.list.element" for name in KINDS]
    while writer is None or path.stat().st_size < size:
        copies = large // max(each, 1) if done == 2 else 1
        table = table_of(block, done, copies, image_bytes)
        if writer is None:
            codecs = {"messages": "zstd", "tools": "zstd", "id": "snappy"}
            codecs = {name: codecs.get(name, "none") for name in (*table.column_names, *tokens)}
            writer = parquet.ParquetWriter(path, table.schema, compression=codecs, use_dictionary=["tools"])
        writer.write_table(table, row_group_size=len(table))
        done += copies
        each = path.stat().st_size // done
    writer.close()
    return done


def write_gzip(path: Path, block: Block, size: int, image_bytes: int) -> int:
    """Write JSONL of about `size` compressed bytes, of many members; returns how many copies it has."""
    pool = [gzip.compress(image(at, image_bytes, text=True) + b'"}\n', 1, mtime=0) for at in range(_POOL)]
    done = 0
    with path.open("wb") as out:
        while out.tell() < size:
            for at, row in enumerate(block.copy(done)):
                out.write(gzip.compress(line_of(row)[:-1] + b',"image":"', 1, mtime=0))
                out.write(pool[at % _POOL])
            done += 1
    return done


def line_of(row: dict[str, Any]) -> bytes:
    """A row as JSON; messages that are not JSON break the whole line."""
    rest = orjson.dumps({**row, "messages": None}, option=orjson.OPT_SERIALIZE_NUMPY)
    return rest.replace(b'"messages":null', b'"messages":' + row["messages"].encode(), 1)


def write_lines(path: Path, block: Block, size: int, image_bytes: int) -> int:
    """Write `.jsonl.zst`, or `.json` with one array, of about `size` bytes of text; returns its number of copies.

    An array has no rows that are not JSON.
    """
    import pyarrow as pa

    array, done, written = path.suffix == ".json", 0, 0
    with pa.CompressedOutputStream(str(path), "zstd") if not array else path.open("wb") as out:
        while written < size:
            for line in _lines(block, done, image_bytes, whole=array):
                out.write(((b",\n" if written else b"[\n") + line) if array else line + b"\n")
                written += len(line)
            done += 1
        out.write(b"\n]\n" if array else b"")
    return done


def _lines(block: Block, number: int, image_bytes: int, *, whole: bool) -> Iterator[bytes]:
    for at, row in enumerate(block.copy(number)):
        line = line_of(row)[:-1] + b',"image":"' + image(at, image_bytes, text=True) + b'"}'
        try:
            orjson.loads(line)
        except ValueError:
            if whole:
                continue
        yield line


def write_arrow(path: Path, block: Block, size: int, image_bytes: int) -> int:
    """Write `.arrow`, with a footer, or `.arrows`, a stream, of about `size` bytes; returns its number of copies.

    A record batch is four copies of the block, over a thousand rows, as `datasets` writes them.
    """
    import pyarrow as pa

    done, writer = 0, None
    with path.open("wb") as out:
        while writer is None or out.tell() < size:
            table = table_of(block, done, _TOGETHER, image_bytes).combine_chunks()
            new = pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream
            writer = writer or new(out, table.schema)
            writer.write_table(table)
            done += _TOGETHER
        writer.close()
    return done
