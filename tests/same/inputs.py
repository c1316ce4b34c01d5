"""The logs that both checkouts read, written once: fixtures, real data where it is there, logs full of faults."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

from tests.truth.forms import FORMS, write_rows
from tests.truth.plan import files
from tests.truth.source import SHARED

from .mutate import Vocabulary, broken_lines, rows_of

__all__ = ["Inputs", "Log", "make"]

TOY = "in/toy_bpe"
_LOG_SUFFIXES = (".jsonl", ".json", ".parquet")
_SEED = 7
_COPIED = (
    ("formats", "formats"),
    ("docs", "docs"),
    ("tokenizers/toy_bpe", "toy_bpe"),
    ("tokenizers/toy_metaspace", "toy_metaspace"),
)
"""Folders of the fixtures, and what they are called here."""
_RECORDED = {"nemo-rl-merged-tokens.json": "qwen3", "nemo-gym-round-trip.json": "qwen3"}
"""The tokenizer of a recorded log; all others are of smollm2."""


@dataclass(frozen=True, slots=True)
class Log:
    """A log, as a case names it: `path` from the folder that commands run in."""

    path: str
    tokenizer: str
    kind: str
    """`format`, `broken`, `truth`, `packed`, `rollout` or `recorded`."""


@dataclass
class Inputs:
    """A folder of logs."""

    folder: Path
    logs: list[Log] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is missing here, for the summary."""

    def of(self, *kinds: str) -> list[Log]:
        """The logs of some kinds."""
        return [log for log in self.logs if log.kind in kinds]

    def add(self, path: Path, tokenizer: str, kind: str) -> None:
        """Add a log that stands in the folder."""
        self.logs.append(Log(f"in/{path.relative_to(self.folder).as_posix()}", tokenizer, kind))


def make(checkout: Path, folder: Path, *, whole: bool) -> Inputs:
    """All inputs, in a folder that is made here; fixtures are those of the checkout."""
    inputs = Inputs(folder)
    fixtures = checkout / "fixtures"
    for source, name in _COPIED:
        shutil.copytree(fixtures / source, folder / name, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for path in sorted([*(folder / "formats").iterdir(), *(folder / "docs").iterdir()]):
        if path.suffix in _LOG_SUFFIXES:
            inputs.add(path, TOY, "format")
    _broken(inputs, 120 if whole else 24)
    _packed(inputs)
    _joined(inputs)
    if SHARED.is_dir():
        _shared(inputs, whole=whole)
    else:
        inputs.notes.append("no shared/ beside this checkout: real rollouts, recorded logs and truth were skipped")
    return inputs


def _broken(inputs: Inputs, count: int) -> None:
    """Of every format, rows with faults in them."""
    tokenizer = json.loads((inputs.folder / "toy_bpe" / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary, folder = Vocabulary(tokenizer), inputs.folder / "broken"
    folder.mkdir()
    for path in sorted((inputs.folder / "formats").glob("*.json*")):
        rows = rows_of(path.read_text(encoding="utf-8"))
        lines = broken_lines(rows, count, vocabulary, random.Random(f"{_SEED} {path.stem}"))
        out = folder / f"{path.stem}.jsonl"
        out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", errors="surrogatepass")
        inputs.add(out, TOY, "broken")


def _packed(inputs: Inputs) -> None:
    """One log in every way to store it, the faults of plain rows among it."""
    folder = inputs.folder / "packed"
    folder.mkdir()
    source = inputs.folder / "formats" / "slime.jsonl"
    rows = rows_of((inputs.folder / "docs" / "own_columns.jsonl").read_text(encoding="utf-8"))
    plain = [{"token_ids": row["toks"], "loss_mask": row["train_on"], "logprobs": row["lp"]} for row in rows]
    plain += [_slid(row, by) for row in plain for by in (-2, -1, 1, 2)]
    store(plain, folder / "rows")
    for suffix in (".gz", ".zst"):
        _compressed(source.read_bytes(), folder / f"slime.jsonl{suffix}")
        _compressed((inputs.folder / "broken" / "generic.jsonl").read_bytes(), folder / f"broken.jsonl{suffix}")
    for path in sorted(folder.iterdir()):
        inputs.add(path, TOY, "packed")


def _joined(inputs: Inputs) -> None:
    """Rows apart from their messages and tools, and rows deep in a document."""
    folder = inputs.folder / "joined"
    folder.mkdir()
    rows = rows_of((inputs.folder / "formats" / "generic.jsonl").read_text(encoding="utf-8"))
    apart = [{key: value for key, value in row.items() if key not in ("messages", "tools")} for row in rows]
    conversations = [{"id": row["id"], "messages": row["messages"]} for row in rows if "messages" in row]
    tools = next(row["tools"] for row in rows if "tools" in row)
    write_rows(folder / "rows.jsonl", apart)
    write_rows(folder / "messages.jsonl", conversations[::-1])
    (folder / "tools.json").write_text(json.dumps(tools), encoding="utf-8")
    (folder / "deep.json").write_text(json.dumps({"data": {"rollouts": rows}}), encoding="utf-8")


def _slid(row: dict[str, Any], by: int) -> dict[str, Any]:
    """A row whose mask slid; logprobs stayed."""
    mask = row["loss_mask"]
    moved = [0] * by + mask[:-by] if by > 0 else mask[-by:] + [0] * -by
    return {**row, "loss_mask": moved}


def store(rows: list[dict[str, Any]], path: Path) -> None:
    """Rows of one shape as JSON lines, gz, zst, Parquet, Arrow and Feather."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.with_suffix(".jsonl").write_bytes(text)
    for suffix in (".gz", ".zst"):
        _compressed(text, path.with_suffix(f".jsonl{suffix}"))
    table = pa.Table.from_pylist(rows)
    pa.parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=7)
    pa.feather.write_feather(table, str(path.with_suffix(".feather")))
    with pa.OSFile(str(path.with_suffix(".arrow")), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _compressed(data: bytes, path: Path) -> None:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data, mtime=0))
        return
    with pa.CompressedOutputStream(str(path), "zstd") as sink:
        sink.write(data)


def _shared(inputs: Inputs, *, whole: bool) -> None:
    """Real logs with their tokenizers, and training rows made of them with every fault of tests/truth."""
    for name in ("tokenizers", "rollouts", "recorded"):
        (inputs.folder / name).symlink_to((SHARED / name).resolve())
    rollouts = sorted((SHARED / "rollouts").glob("*/*.jsonl.gz"))
    for path in rollouts if whole else [path for path in rollouts if path.parent.name == "smollm2"]:
        model = path.parent.name
        name = inputs.folder / "rollouts" / model / path.name
        inputs.add(name, f"in/tokenizers/{model}", "rollout")
    recorded = [*(SHARED / "recorded").glob("*.json"), *(SHARED / "recorded" / "vllm-cpu").glob("**/*.json*")]
    for path in sorted(recorded)[:: 1 if whole else 12]:
        name = inputs.folder / "recorded" / path.relative_to(SHARED / "recorded")
        inputs.add(name, f"in/tokenizers/{_RECORDED.get(path.name, 'smollm2')}", "recorded")
    models = None if whole else ["smollm2"]
    _truth(inputs, files(900 if whole else 150, list(FORMS), _SEED, models=models))


def _truth(inputs: Inputs, plan: Iterable[Any]) -> None:
    folder = inputs.folder / "truth"
    folder.mkdir()
    for file in plan:
        rows = [file.form.write([case.sample for case in row], file.form.fill) for row in file.rows]
        write_rows(folder / file.name, rows)
        inputs.add(folder / file.name, f"in/tokenizers/{file.model}", "truth")
