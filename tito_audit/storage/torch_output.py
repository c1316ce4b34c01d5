"""TorchOutput: a Torch file written again with some of its samples changed."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.storage.log import Log
from tito_audit.storage.row import RawRow
from tito_audit.storage.torch_files import SAMPLES, as_array, load_torch


class TorchOutput:
    """A Torch file with some samples replaced; everything else is written as it was loaded.

    Such a file is one pickle, so it is loaded again and written as a whole at the end. A list stays a list and
    a tensor keeps its type. If no sample changed, the file is copied.
    """

    def __init__(self, source: Path, out: BinaryIO) -> None:
        self.changed = False
        """Whether any row was changed, forked or dropped."""
        self.not_kept: Sequence[str] = ()
        self._source = source
        self._out = out
        self._rows: dict[int, tuple[RawRow, Sequence[Row]]] = {}

    def keep(self, raw: RawRow) -> None:
        """Keep the row as it is."""

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        """Write these rows instead of one: none drops it, several are a fork."""
        self.changed = True
        self._rows[raw.index] = raw, rows

    def finish(self, log: Log) -> None:
        """Write the file; if no row changed, copy the source."""
        if not self.changed:
            with self._source.open("rb") as source:
                shutil.copyfileobj(source, self._out)
            return
        torch: Any = importlib.import_module("torch")
        payload = load_torch(self._source)
        samples: list[Any] = []
        for index, sample in enumerate(payload[SAMPLES]):
            if index not in self._rows:
                samples.append(sample)
                continue
            raw, rows = self._rows[index]
            samples += [self._sample(index, sample, raw.value, row) for row in rows]
        payload[SAMPLES] = type(payload[SAMPLES])(samples)
        torch.save(payload, self._out)

    def _sample(self, index: int, sample: Any, old: Any, new: Row) -> Any:
        """The sample with the changes that turned its row `old` into `new`."""
        try:
            return _restored(sample, old, new)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise StorageError(
                f"{self._source}: sample {index}: the repaired value does not fit its tensors "
                f"({error}).\nThe types of a Torch file are kept, so the repaired file cannot be written. "
                "Write the log with a type that can hold the value, or as JSONL, or leave the repair out."
            ) from error


def _restored(original: Any, old: Any, new: Any) -> Any:
    """`new` in the types of `original`, which was read as `old`; `original` itself if nothing changed."""
    if new is old or new is None:
        return original if new is old else None
    if isinstance(original, dict) and isinstance(new, Mapping):
        same = original.copy()  # of the same type, which may be an OrderedDict
        same.clear()
        for key, value in new.items():
            same[key] = _restored(original[key], old[key], value) if key in original else _native(value)
        return same
    array = as_array(original)
    if array is not None:
        return _like(original, array, new)
    if isinstance(original, list | tuple) and isinstance(new, list | tuple | np.ndarray):
        return type(original)(_entries(original, old, list(new)))
    return _native(new)


def _entries(original: Sequence[Any], old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """The entries of a list; unchanged ones are the file's own objects, wherever they are now."""
    if old is not original or any(isinstance(entry, Mapping) for entry in new):
        if len(new) == len(original):
            return [_restored(*three) for three in zip(original, old, new, strict=True)]
        known = {id(was): one for one, was in zip(original, old, strict=True)}
        return [known[id(entry)] if id(entry) in known else _native(entry) for entry in new]
    return [_native(entry) for entry in new]


def _like(original: Any, array: np.ndarray[Any, Any], new: Any) -> Any:
    """A value as a tensor, an array or a numpy number, with the type of `original`.

    ValueError if that type cannot hold it.
    """
    wanted = np.asarray(new)
    kind = getattr(original, "dtype", array.dtype)
    if wanted.dtype.kind not in "iufb":
        raise ValueError(f"a list that contains null, in a tensor of {kind}")
    with np.errstate(over="ignore", invalid="ignore"):
        made = wanted.astype(array.dtype)
    if made.dtype.kind == "f":
        fits = np.array_equal(np.isfinite(made), np.isfinite(wanted))
    else:
        fits = np.array_equal(made, wanted)
    if not fits:
        raise ValueError(f"a number that {kind} cannot represent")
    if isinstance(original, np.generic):
        return made[()]
    if isinstance(original, np.ndarray):
        return made
    torch: Any = importlib.import_module("torch")
    tensor = torch.from_numpy(np.ascontiguousarray(made).reshape(made.shape)).to(original.dtype)
    return tensor.requires_grad_() if original.requires_grad else tensor


def _native(value: Any) -> Any:
    """A value without numpy types, as plain Python."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _native(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_native(inner) for inner in value]
    return value
