"""The scores of a run in a file next to its output, so that a killed run can be resumed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tito_audit.errors import SetupError, StorageError
from tito_audit.record.arrays import Logprobs
from tito_audit.rescore.model import Want

_FORMAT = "tito_audit_scores"
_VERSION = 1


def _mixed(path: Path | None, whose: str) -> SetupError:
    return SetupError(
        f"{path}: these scores are of {whose}.\nScores of two models do not mix: delete the file, or name another."
    )


def key_of(want: Want) -> str:
    """A name for a sequence: equal for equal ids."""
    return hashlib.sha256(np.ascontiguousarray(want.ids, np.int64).tobytes()).hexdigest()[:40]


class ScoreJournal:
    """Scores by sequence, each written to a file as soon as it is known; without a path, kept in memory only.

    Only the file offset of each score is in memory. A last line that was cut off is written again.
    """

    def __init__(self, path: Path | None, provider: str, *, resume: bool = False) -> None:
        self.path = path
        self.model: str | None = None
        """Whose scores these are; None until the provider has said."""
        self.resumed = 0
        """How many scores an earlier run left."""
        self._at: dict[str, tuple[int, int, int]] = {}
        self._kept: dict[str, bytes] = {}
        self._end = 0
        self._fd: int | None = None
        if path is not None:
            header = {_FORMAT: _VERSION, "provider": provider}
            if path.exists() and not resume:
                raise SetupError(
                    f"{path}: this holds the scores of an earlier run.\n"
                    "Pass --resume to continue it, or delete the file."
                )
            try:
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                self._read(path, header)
            except OSError as error:
                raise StorageError(f"{path}: {error.strerror or error}.") from None

    def _read(self, path: Path, header: Mapping[str, Any]) -> None:
        assert self._fd is not None
        with open(self._fd, "rb", closefd=False) as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break  # a kill cut it off
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    record = None
                if not isinstance(record, dict):
                    raise SetupError(f"{path} is not a journal of scores: name another file.")
                if not number and record != header:
                    raise _mixed(path, f"the provider {record.get('provider')!r}")
                if "model" in record:
                    self.model = record["model"]
                elif number:
                    self._at[record["ids"]] = (record["start"], self._end, len(line))
                    self.resumed += 1
                self._end += len(line)
        os.ftruncate(self._fd, self._end)
        if not self._end:
            self._append(orjson.dumps(header) + b"\n")

    def of_model(self, model: str | None) -> None:
        """Note whose scores come now; SetupError if earlier scores are another model's."""
        if model is None or model == self.model:
            return
        if self.model is not None:
            raise _mixed(self.path, f"the model {self.model!r}, not {model!r}")
        self.model = model
        if self._fd is not None:
            self._append(orjson.dumps({"model": model}) + b"\n")

    def get(self, want: Want) -> tuple[Logprobs, str | None] | None:
        """The logprobs `[T]` of a sequence, NaN before its start, and the weight version; None if unknown."""
        key = key_of(want)
        at = self._at.get(key)
        if at is None or at[0] > want.start:
            return None
        line = self._kept[key] if self._fd is None else os.pread(self._fd, at[2], at[1])
        record = orjson.loads(line)
        scores = np.full(len(want.ids), np.nan)
        scores[record["start"] :] = [np.nan if value is None else value for value in record["logprobs"]]
        return scores, record["weight_version"]

    def put(self, want: Want, logprobs: tuple[float, ...], weight_version: str | None) -> None:
        key = key_of(want)
        record = {"ids": key, "start": want.start, "logprobs": logprobs, "weight_version": weight_version}
        line = orjson.dumps(record) + b"\n"
        self._at[key] = (want.start, self._end, len(line))
        if self._fd is None:
            self._kept[key] = line
        else:
            self._append(line)

    def close(self, *, done: bool = False) -> None:
        """Close the file; delete it if everything made from it is written (`done`)."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if done and self.path is not None:
                self.path.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        assert self._fd is not None
        try:
            os.pwrite(self._fd, line, self._end)
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror or error}.") from None
        self._end += len(line)
