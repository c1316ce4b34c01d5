"""Torch files: samples of rollout dumps, read with tensors as numpy arrays, and written again.

slime and miles dump `{"rollout_id": …, "samples": [object, …]}` (THUDM/slime
`slime/observability/rollout_data_utils.py`, radixark/miles `miles/ray/rollout/debug_data.py`). Such a file is
one pickle, which has to fit in memory. None of the code that a pickle can name is run.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tito_audit.errors import StorageError
from tito_audit.format import Row
from tito_audit.storage.in_memory import ObjectRows
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.row import RawRow, block_seed
from tito_audit.storage.table_edit import FileOutput
from tito_audit.storage.table_rows import Block

TORCH_HEAD = 512
"""Bytes that show whether a file is a Torch file."""
SAMPLES = "samples"
"""The key of the list of rows."""

_ZIP = b"PK\x03\x04"
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickled magic number of older Torch files, which are no zip archives."""
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def is_torch(head: bytes) -> bool:
    """Whether a file that begins so was written by `torch.save`, as a zip archive or in the older form."""
    return head.startswith(_LEGACY) or (head.startswith(_ZIP) and b"data.pkl" in head[:TORCH_HEAD])


class _Samples(ObjectRows):
    size = 0  # nothing is saved by reading few at once: all are in memory

    def row(self, value: Any) -> Row | str:
        """A sample with tensors as arrays, or why it is none."""
        if not isinstance(value, dict):
            return f"the sample is of type {type(value).__name__}, not a dict with named columns"
        row: Row = _tensors_as_arrays(value)
        return row


def torch_blocks(path: Path) -> Iterator[Block]:
    """All samples as one block."""
    samples = load_torch(path)[SAMPLES]
    yield Block(0, len(samples), [_Samples(samples, "frame")], block_seed(path.stat().st_size), 0.0, 1.0)


def load_torch(path: Path) -> dict[str, Any]:
    """The contents of the file, a dict with a list of samples and tensors on the CPU.

    StorageError if torch is missing or too old, if loading would run code from the pickle, or if the file is
    damaged or no rollout dump.
    """
    if not path.is_file():
        raise StorageError(f"{path}: a Torch file cannot be read out of a pipe; save it to a file first.")
    try:
        # By name: type checkers would see its types only where it is installed.
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise StorageError(
            f"{path}: this is a Torch file, and torch is not installed.\n"
            "Install it: pip install 'tito-audit[torch]'"
        ) from None
    release = _RELEASE.match(str(torch.__version__))
    if (tuple(map(int, release.groups())) if release else (0,)) < (2, 10):
        raise StorageError(
            f"{path}: this is a Torch file, and in torch {torch.__version__} a file can run code "
            "even where only tensors are read (CVE-2026-24747).\n"
            "Install torch 2.10 or newer, or write the samples as JSON lines where the file was written."
        )
    # Routing is dumped as numpy arrays, whose pickles name numeric types and two functions, by old or new paths.
    multiarray = importlib.import_module("numpy._core.multiarray")
    names = [
        *(np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"}),
        *((multiarray._reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
        *((multiarray.scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    ]
    try:
        with torch.serialization.safe_globals(names), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles; what matters raises
            source = path.open("rb") if isinstance(path, RemoteFile) else path
            payload = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise exceptions of any type
        raise _load_error(path, error) from None
    samples = payload.get(SAMPLES) if isinstance(payload, dict) else None
    if not isinstance(samples, list | tuple):
        content = f"a {type(payload).__name__}"
        if isinstance(payload, dict):
            content = f"a dict of {', '.join(map(str, list(payload)[:8])) or 'nothing'}"
        raise StorageError(
            f"{path}: a Torch file that holds {content}, and no list {SAMPLES!r}.\n"
            "Rollouts are dumped as {'rollout_id': …, 'samples': [dict, …]} "
            "(slime and miles: rollout_data/ID.pt, not train_data/). Pass such a file."
        )
    return payload  # type: ignore[no-any-return]  # it is a dict


def _tensors_as_arrays(value: Any) -> Any:
    """A value with tensors and arrays as plain values; the same object if it has none.

    One with one dimension becomes an array, with more a list of arrays, with none a number. Types that numpy lacks
    become float32.
    """
    if isinstance(value, Mapping):
        plain = {key: _tensors_as_arrays(inner) for key, inner in value.items()}
        return plain if any(plain[key] is not value[key] for key in plain) else value
    if isinstance(value, list | tuple):
        # Lists of numbers and texts are common and long, and have no tensors.
        if not value or isinstance(value[0], int | float | str):
            return value
        entries = [_tensors_as_arrays(entry) for entry in value]
        return entries if any(a is not b for a, b in zip(entries, value, strict=True)) else value
    array = as_array(value)
    if array is None:
        return value
    return array.item() if array.ndim == 0 else array if array.ndim == 1 else list(array)


def as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """A tensor or an array as an array, which shares memory if possible; None for anything else."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if not (hasattr(value, "detach") and hasattr(value, "numpy")):
        return None
    tensor = value.detach()
    try:
        array: np.ndarray[Any, Any] = tensor.numpy()
    except (TypeError, RuntimeError):
        # bfloat16, quantized and sparse tensors.
        tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
        array = tensor.float().numpy()
    return array


def _load_error(path: Path, error: Exception) -> StorageError:
    """The error for a file that torch refuses to load, or cannot."""
    words = str(error).strip()
    named = _GLOBAL.search(words)
    if named or "weights_only" in words.lower() or "weights only" in words.lower():
        what = f"an object of type {named[1]}" if named else "more than tensors and plain values"
        return StorageError(
            f"{path}: a Torch file that holds {what}.\n"
            "Building it would run code that the file names, so only tensors and plain values are read "
            "(torch.load with weights_only=True).\n"
            "Where you trust the file, write it once without, in the environment that wrote it:\n"
            f'    import json, torch; d = torch.load("{path.name}", weights_only=False); '
            'open("log.jsonl", "w").writelines('
            'json.dumps(s, default=lambda a: a.tolist()) + "\\n" for s in d["samples"])'
        )
    reason = words.splitlines()[0][:200] if words else type(error).__name__
    return StorageError(
        f"{path}: a Torch file that cannot be read ({reason}).\n"
        "The copy is incomplete, or the writer was stopped before it closed the file; copy it again, or write it "
        "again."
    )


class TorchOutput(FileOutput):
    """Writes a Torch file again with some samples replaced; all else is written as it was loaded.

    It is one pickle, so it is loaded again and written at the end. Lists stay lists, and tensors keep their types.
    """

    def __init__(self, source: Path, out: BinaryIO) -> None:
        self._source = source
        self._out = out
        self._rows: dict[int, tuple[RawRow, Sequence[Row]]] = {}

    def replace(self, raw: RawRow, rows: Sequence[Row]) -> None:
        self.changed = True
        self._rows[raw.index] = raw, rows

    def finish(self, log: Any) -> None:
        torch: Any = importlib.import_module("torch")
        payload = load_torch(self._source)
        samples: list[Any] = []
        for index, sample in enumerate(payload[SAMPLES]):
            if index not in self._rows:
                samples.append(sample)
                continue
            raw, rows = self._rows[index]
            try:
                samples += [_restore_types(sample, raw.value, row) for row in rows]
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                raise StorageError(
                    f"{self._source}: sample {index}: the repaired value does not fit its tensors "
                    f"({error}).\nThe types of a Torch file are kept, so the repaired file cannot be written. "
                    "Write the log with a type that can hold the value, or as JSONL, or leave the repair out."
                ) from error
        payload[SAMPLES] = type(payload[SAMPLES])(samples)
        torch.save(payload, self._out)


def _restore_types(original: Any, old: Any, new: Any) -> Any:
    """`new` in the types of `original`, which was read as `old`; raises if a tensor cannot hold a number."""
    if new is old or new is None:
        return original if new is old else None
    if isinstance(original, dict) and isinstance(new, Mapping):
        same = original.copy()  # of the same type, which may be an OrderedDict
        same.clear()
        for key, value in new.items():
            was_there = key in original
            same[key] = _restore_types(original[key], old[key], value) if was_there else _without_numpy(value)
        return same
    array = as_array(original)
    if array is not None:
        wanted = np.asarray(new)
        kind = getattr(original, "dtype", array.dtype)
        if wanted.dtype.kind not in "iufb":
            raise ValueError(f"a list that contains null, in a tensor of {kind}")
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = wanted.astype(array.dtype)
        if numbers.dtype.kind == "f":
            fits = np.array_equal(np.isfinite(numbers), np.isfinite(wanted))
        else:
            fits = np.array_equal(numbers, wanted)
        if not fits:
            raise ValueError(f"a number that {kind} cannot represent")
        if isinstance(original, np.generic):
            return numbers[()]
        if isinstance(original, np.ndarray):
            return numbers
        torch: Any = importlib.import_module("torch")
        tensor = torch.from_numpy(np.ascontiguousarray(numbers).reshape(numbers.shape)).to(original.dtype)
        return tensor.requires_grad_() if original.requires_grad else tensor
    if isinstance(original, list | tuple) and isinstance(new, list | tuple | np.ndarray):
        # Unchanged entries are the file's own objects, at whatever position.
        entries = list(new)
        if old is original and not any(isinstance(entry, Mapping) for entry in entries):
            entries = [_without_numpy(entry) for entry in entries]
        elif len(entries) == len(original):
            entries = [_restore_types(*three) for three in zip(original, old, entries, strict=True)]
        else:
            stored = {id(was): entry for entry, was in zip(original, old, strict=True)}
            entries = [stored[id(entry)] if id(entry) in stored else _without_numpy(entry) for entry in entries]
        return type(original)(entries)
    return _without_numpy(new)


def _without_numpy(value: Any) -> Any:
    """A value with numpy's arrays and numbers as Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _without_numpy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_numpy(inner) for inner in value]
    return value
