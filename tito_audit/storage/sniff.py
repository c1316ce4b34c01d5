"""Recognizes files that are not logs by their first bytes, and says how to export them."""

from __future__ import annotations

from pathlib import Path

from tito_audit.errors import StorageError

PARQUET_MAGIC = b"PAR1"

_RUNS_CODE = "reading a pickle runs whatever code its writer put in, so no pickle is ever loaded here"
_EXPORT = (
    "Where you trust the file, export it once, in the environment that wrote it:\n"
    '    import json, pickle; rows = pickle.load(open("{name}", "rb")); '
    'open("log.jsonl", "w").writelines(json.dumps(r, default=lambda a: a.tolist()) + "\\n" for r in rows)\n'
    "Marin rollouts are dataclasses inside groups: for those use "
    "rows = [dataclasses.asdict(r) for g in batch.groups for r in g.rollouts]."
)
_NPZ = (
    "Export it once:\n"
    '    import json, numpy as np; d = np.load("{name}"); '
    'open("log.jsonl", "w").writelines('
    'json.dumps({{k: d[k][i].tolist() for k in ("sequences", "loss_mask")}}) + "\\n" '
    'for i in range(len(d["sequences"])))'
)
_SQLITE = 'Export the table that holds the rows once:\n    sqlite3 -json "{name}" "select * from TABLE" > log.json'
_MSGPACK = (
    "Export it once:\n"
    '    import json, msgpack; u = msgpack.Unpacker(open("{name}", "rb")); '
    'open("log.jsonl", "w").writelines(json.dumps(r) + "\\n" for r in u)'
)
_FEATHER = (
    "Write it once as version 2:\n"
    '    from pyarrow import feather; feather.write_feather(feather.read_table("{name}"), "log.feather")'
)
_CSV = (
    "Convert it once:\n"
    '    import ast, pandas as pd; pd.read_csv("{name}").map(lambda cell: ast.literal_eval(cell) '
    'if str(cell)[:1] in ("[", "{{") else cell).to_json("log.jsonl", orient="records", lines=True)'
)
_PAGE = "Pass the address of the file itself; for the Hugging Face hub, hf://datasets/OWNER/NAME."
_UNPACK = "Unpack it first, and pass the files in it."

_BINARY: tuple[tuple[bytes, str, str], ...] = (
    *((bytes([0x80, version]), f"a Python pickle; {_RUNS_CODE}", _EXPORT) for version in range(2, 6)),
    (b"SQLite format 3\0", "an SQLite database, whose tables could hold anything", _SQLITE),
    (b"FEA1", "a Feather file of version 1", _FEATHER),
    (b"ARROW1", "a compressed Arrow file", "Decompress it first; Arrow can be compressed inside."),
    (b"\xff\xff\xff\xff", "a compressed Arrow stream", "Decompress it first; Arrow can be compressed inside."),
    (b"\xff\xfe", "UTF-16 text", "Write it as UTF-8: iconv -f UTF-16 -t UTF-8 LOG > LOG.jsonl"),
    (b"\xfe\xff", "UTF-16 text", "Write it as UTF-8: iconv -f UTF-16 -t UTF-8 LOG > LOG.jsonl"),
    (b"BZh", "compressed with bzip2, which is not read", "Decompress it first: bunzip2 -k LOG"),
    (b"\xfd7zXZ", "compressed with xz, which is not read", "Decompress it first: unxz -k LOG"),
    (
        b"\x93NUMPY",
        "a numpy array, whose rows and columns have no names",
        "Export its rows to JSONL, one object a line.",
    ),
    (b"\x89HDF", "an HDF5 file", "Export its rows to JSONL, one object a line."),
    (b"\x1f\x8b", "compressed twice", "Decompress it once first: gunzip -k LOG"),
    (b"\x28\xb5\x2f\xfd", "compressed twice", "Decompress it once first: unzstd LOG"),
    (PARQUET_MAGIC, "a compressed Parquet file", "Decompress it first; Parquet is compressed inside."),
)


def refuse_binary(path: Path, head: bytes) -> None:
    """Raise StorageError if `head` begins a kind of file that is not read."""
    if head.startswith(b"PK\x03\x04"):
        # Both are zip archives; torch keeps its pickle in a member called data.pkl.
        if path.suffix == ".npz" or b".npy" in head[:512]:
            raise _refusal(path, "a numpy archive, whose arrays have no common rows", _NPZ)
        if path.suffix == ".xlsx":
            raise _refusal(path, "an Excel workbook", "Save the sheet as CSV, and convert that.")
        if b"data.pkl" in head:
            raise _refusal(path, "a Torch file that was compressed", _UNPACK)
        raise _refusal(path, "a zip archive", _UNPACK)
    for magic, what, way_out in _BINARY:
        if head.startswith(magic):
            raise _refusal(path, what, way_out)
    if head[257:262] == b"ustar":
        raise _refusal(path, "a tar archive", _UNPACK)


def text_error(path: Path, head: bytes) -> StorageError:
    """The error for a file without JSON; its suffix hints at what it might be."""
    if path.suffix in {".pkl", ".pickle"}:
        return _refusal(path, f"a Python pickle; {_RUNS_CODE}", _EXPORT)
    if path.suffix in {".csv", ".tsv"}:
        return _refusal(path, "a CSV file, in which lists of token ids are only text", _CSV)
    if path.suffix in {".msgpack", ".mpk", ".bin"} or (head and head[0] >= 0x80):
        return _refusal(path, "binary data, perhaps msgpack, whose fields may have no names", _MSGPACK)
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return _refusal(path, "a web page", _PAGE)
    return StorageError(
        f"{path}: this is neither JSON nor a table; it begins with {head[:32]!r}.\n"
        "A log is JSON (an object per line, one document or an array of objects, plain, .gz or .zst), a Parquet "
        "file or an Arrow file.\nConvert it, or pass the file that holds the rollouts."
    )


def _refusal(path: Path, what: str, way_out: str) -> StorageError:
    return StorageError(f"{path}: this is {what}.\n{way_out.format(name=path.name)}")
