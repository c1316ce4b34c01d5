"""Quarantine: rows removed from a log, with where they were and why, as JSONL that can be audited again."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from tito_audit.record.edits import Edit
from tito_audit.record.json_text import rewrite_json
from tito_audit.record.rollout import Place
from tito_audit.storage.atomic import Sealed, new_file
from tito_audit.storage.row import RawRow, dump_row, json_form


class Quarantine:
    """One file for the rows of all logs of a run."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self.rows = 0

    @classmethod
    @contextmanager
    def opened(cls, path: Path, *, overwrite: bool, sealed: Sealed | None = None) -> Iterator[Quarantine]:
        """A quarantine whose file appears when the run is over; StorageError if it cannot be written."""
        with new_file(path, overwrite=overwrite, sealed=sealed) as out:
            yield cls(out)

    def add(self, raw: RawRow, place: Place, columns: Mapping[str, Mapping[str, Any]]) -> bytes:
        """Write a row as it was, plus one column; a row that is not an object goes into that column as `text`,
        and as `base64` if it is not UTF-8.

        Returns what was written.
        """
        (column, about), *_ = columns.items()
        about = {**about, "file": place.file, "row": place.row}
        if raw.value is None:
            line = orjson.dumps({column: {**about, **_as_text(raw.text or b"")}})
        elif raw.text is not None:
            # A row of a document may span lines; here each row is one line.
            text = " ".join(raw.text.decode("utf-8").split("\n")).strip()
            line = rewrite_json(text, [Edit((column,), about)]).encode("utf-8")
        elif raw.of_text:
            # As Python writes it, NaN and lone surrogates included.
            line = json.dumps({**raw.value, column: about}, default=json_form).encode("ascii")
        else:
            line = dump_row({**raw.value, column: about})
        self.write(line)
        return line

    def write(self, line: bytes) -> None:
        """Write a row as `add` returned it."""
        self._out.write(line + b"\n")
        self.rows += 1


def _as_text(data: bytes) -> dict[str, str]:
    """The text of a row that is no object; with its bytes in base64 if it is not UTF-8."""
    try:
        return {"text": data.decode("utf-8")}
    except UnicodeDecodeError:
        return {"text": data.decode("utf-8", "backslashreplace"), "base64": b64encode(data).decode("ascii")}
