"""Logs as users have them, made from corpora and from rollouts that real models sampled.

A corpus is also written as TRL's table, as a table of one row group, and compressed. Recorded rollouts are
repeated under other row ids: each copy has its digits permuted, in all texts and tokens, and its first question
has the number of the copy. So texts of whole prompts hardly ever repeat, but answers without a digit do; the page
says how many of their tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.calls import ids_of, names_of
from benchmarks.measure import ROOT, SHARED

__all__ = ["UserLog", "Varied", "logs_of_users", "main", "real_logs"]

Row = dict[str, Any]
_MODELS = ("qwen2.5-coder", "gemma-3", "smollm2")


@dataclass(frozen=True, slots=True)
class UserLog:
    """One log."""

    name: str
    path: str
    tokenizer: str
    rows: int
    note: str = ""
    """Remarks about it."""
    compared: bool = False
    """Whether other engines run on it too."""
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """By the length of conversations: tokens of the prompts of all their turns."""


def logs_of_users(
    corpora: Sequence[tuple[str, str, str]], tokenizer: Path, folder: Path, tokens: int
) -> list[UserLog]:
    """Logs of about this many ids, built by a separate process; existing ones are kept.

    A corpus is given as its kind, `rows` or `calls`, and its JSONL and Parquet file.
    """
    command = [sys.executable, "-m", "benchmarks.logs", str(tokenizer), str(folder), str(tokens)]
    done = subprocess.run([*command, json.dumps(corpora)], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return [UserLog(**made) for made in json.loads(done.stdout)]


def real_logs() -> Iterator[tuple[str, str, list[Path]]]:
    """The recorded logs next to the checkout: name, tokenizer, files."""
    for model in _MODELS:
        files = sorted((SHARED / "rollouts" / model).glob("*.jsonl.gz"))
        if files and (SHARED / "tokenizers" / model).is_dir():
            yield f"rollouts of {model}", model, files
    files = sorted((SHARED / "recorded" / "vllm-cpu").glob("generic-*.jsonl"))
    if files and (SHARED / "tokenizers" / "smollm2").is_dir():
        yield "answers of a vLLM server", "smollm2", files


def main(argv: Sequence[str] | None = None) -> None:
    """Build logs and print them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.logs", description=main.__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokens", type=int)
    parser.add_argument("corpora", type=json.loads)
    asked = parser.parse_args(argv)
    asked.folder.mkdir(parents=True, exist_ok=True)
    logs: list[UserLog] = []
    for what, lines, table in asked.corpora:
        logs += _of_corpus(what, Path(lines), Path(table), str(asked.tokenizer))
    logs += [_repeated(*real, asked.folder, asked.tokens // 2) for real in real_logs()]
    print(json.dumps([asdict(log) for log in logs]))


# Corpora, written otherwise


def _of_corpus(what: str, lines: Path, table: Path, tokenizer: str) -> Iterator[UserLog]:
    said = orjson.loads(lines.with_suffix(".json").read_bytes())
    rows = said["rows"]
    if what == "calls":
        prompts = said["prompt_tokens"]
        yield UserLog("calls, JSONL", str(lines), tokenizer, rows, compared=True, prompt_tokens=prompts)
        yield UserLog("calls, Parquet", str(table), tokenizer, rows)
        return
    yield UserLog("training rows, JSONL", str(lines), tokenizer, rows)
    yield UserLog("training rows, Parquet", str(table), tokenizer, rows)
    for kind, suffix in (("gzip", ".gz"), ("zstd", ".zst")):
        path = _once(lines.with_name(lines.name + suffix), lambda target, kind=kind: _pack(lines, target, kind))
        yield UserLog(f"training rows, JSONL, {kind}", str(path), tokenizer, rows)
    path = _once(table.with_name(f"{table.stem}-one-group.parquet"), lambda target: _one_group(table, target))
    yield UserLog("training rows, Parquet, one row group", str(path), tokenizer, rows)
    path = _once(table.with_name(f"{table.stem}-trl.parquet"), lambda target: _as_trl(lines, target))
    yield UserLog("TRL's columns, Parquet", str(path), tokenizer, rows)


def _once(path: Path, write: Any) -> Path:
    """The file, written if it does not exist."""
    if not path.is_file():
        part = path.with_name(f"part-{path.name}")
        write(part)
        part.replace(path)
    return path


def _pack(source: Path, target: Path, kind: str) -> None:
    import pyarrow as pa

    with pa.CompressedOutputStream(str(target), kind) as out, source.open("rb") as lines:
        while block := lines.read(1 << 20):
            out.write(block)


def _one_group(source: Path, target: Path) -> None:
    from pyarrow import parquet

    table = parquet.read_table(source)
    parquet.write_table(table, target, row_group_size=table.num_rows, compression="zstd")


def _as_trl(source: Path, target: Path) -> None:
    """The columns of TRL's completions log, with the ids that a user adds."""
    import pyarrow as pa
    from pyarrow import parquet

    with source.open("rb") as lines:
        rows = [_trl_row(number, orjson.loads(line)) for number, line in enumerate(lines)]
    ints, masks, floats = (pa.list_(one) for one in (pa.int32(), pa.int8(), pa.float32()))
    types = {"prompt_ids": ints, "completion_ids": ints, "completion_mask": masks, "logprobs": floats}
    columns = {name: pa.array([row[name] for row in rows], types.get(name)) for name in rows[0]}
    parquet.write_table(pa.table(columns), target, row_group_size=64, compression="zstd")


def _trl_row(number: int, row: Row) -> Row:
    said = [message.get("content") or "" for message in row["messages"]]
    cut = row["loss_mask"].index(1) if 1 in row["loss_mask"] else len(row["loss_mask"])
    return {
        "step": number // 8,
        "prompt": "\n".join(said[:2]),
        "completion": "\n".join(said[2:]),
        "accuracy_reward": float(number % 2),
        "advantage": float(number % 2) - 0.5,
        "prompt_ids": row["token_ids"][:cut],
        "completion_ids": row["token_ids"][cut:],
        "completion_mask": row["loss_mask"][cut:],
        "logprobs": row["logprobs"][cut:],
        "messages": orjson.dumps(row["messages"]).decode(),
        "tools": orjson.dumps(row["tools"]).decode(),
    }


# Recorded rollouts, repeated


def _repeated(name: str, model: str, files: Sequence[Path], folder: Path, tokens: int) -> UserLog:
    """A log of copies of recorded rows."""
    read = (path.read_bytes() for path in (*files, Path(__file__)))
    key = sha256(b"".join(sha256(data).digest() for data in read)).hexdigest()[:10]
    path = folder / f"{model}-{tokens}-{key}.jsonl"
    note = path.with_suffix(".json")
    if not (path.is_file() and note.is_file()):
        rows = [orjson.loads(line) for file in files for line in _lines(file)]
        note.write_bytes(orjson.dumps(_write_copies(rows, str(SHARED / "tokenizers" / model), path, tokens)))
    said = orjson.loads(note.read_bytes())
    return UserLog(
        name,
        str(path),
        str(SHARED / "tokenizers" / model),
        said["rows"],
        f"{said['copies']} copies of {said['of']} rows; {said['repeats']:.0%} of the answers' tokens are in "
        "answers that came before, word for word",
        compared=model == _MODELS[0],
        prompt_tokens=said["prompt_tokens"],
    )


def _lines(file: Path) -> Iterator[bytes]:
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
        yield from lines


def _write_copies(rows: Sequence[Row], tokenizer: str, path: Path, tokens: int) -> Row:
    """Write copies until there are this many ids; returns how many, and the share of the answers that repeats."""
    varied, written, copies, ids = Varied(tokenizer), 0, 0, 0
    seen: set[bytes] = set()
    answered = repeated = 0
    prompts: Counter[str] = Counter()
    with path.open("wb") as out:
        for copy in count():
            if ids >= tokens:
                break
            copies += 1
            for row in rows:
                new = varied.copy(row, copy)
                out.write(orjson.dumps(new) + b"\n")
                written += 1
                for prompt, answer in map(ids_of, new["calls"]):
                    ids += len(prompt) + len(answer)
                    prompts[str(len(new["calls"]))] += len(prompt)
                    answered += len(answer)
                    data = np.array(answer, np.int32).tobytes()
                    repeated += len(answer) * (data in seen)
                    seen.add(data)
    repeats = repeated / max(answered, 1)
    return {
        **{"tokens": ids, "rows": written, "copies": copies, "of": len(rows), "repeats": repeats},
        "prompt_tokens": dict(prompts),
    }


class Varied:
    """Makes copies of rows of calls that are correct where the row is."""

    def __init__(self, tokenizer: str) -> None:
        from tito_audit.tokens.load import load_tokenizer

        self._tokenizer = load_tokenizer(tokenizer)
        vocabulary = self._tokenizer.vocabulary
        self._digits = [vocabulary.ids_of_bytes(digit.encode()) for digit in "123456789"]
        pieces = (vocabulary.token_bytes(token) for token in range(vocabulary.size))
        single = {token for tokens in self._digits for token in tokens[:1]}
        odd = [any(49 <= byte <= 57 for byte in piece) for piece in pieces]
        self._odd = {token for token, has_digit in enumerate(odd) if has_digit and token not in single}
        """Tokens of a digit and other characters, which cannot be exchanged."""

    def copy(self, row: Row, number: int) -> Row:
        """Copy `number` of the row; copy 0 keeps its digits."""
        order = np.random.default_rng(number).permutation(9).tolist() if number else list(range(9))
        new = self._exchanged(row, order)
        self._question(new, number)
        return {**new, "id": f"{row['id']}-{number}"}

    def _exchanged(self, row: Row, order: Sequence[int]) -> Row:
        """The row with the digits from 1 to 9 permuted, if each is a separate token."""
        ids = {token for call in row["calls"] for part in ids_of(call) for token in part}
        said = {name: row[name] for name in ("messages", "tools") if name in row}
        texts = [call.get("text") for call in row["calls"]]
        data = orjson.dumps([said, texts]).decode()
        if ids & self._odd or "\\u" in data or not all(self._digits):
            return orjson.loads(orjson.dumps(row))
        digits = str.maketrans("123456789", "".join("123456789"[at] for at in order))
        said, texts = orjson.loads(data.translate(digits))
        table = {self._digits[at][0]: self._digits[to][0] for at, to in enumerate(order)}
        calls = []
        for call, text in zip(row["calls"], texts, strict=True):
            moved = {name: [table.get(token, token) for token in call[name]] for name in names_of(call)}
            calls.append({**call, **moved, **({} if text is None else {"text": text})})
        return {**row, **said, "calls": calls}

    def _question(self, row: Row, number: int) -> None:
        """Add the number of the copy to the end of the first question, in the messages and in every prompt."""
        vocabulary = self._tokenizer.vocabulary
        first = np.array(ids_of(row["calls"][0])[0], np.int32)
        control = np.flatnonzero(vocabulary.control(first)).tolist()
        asked = next((one for one in row.get("messages") or () if one["role"] == "user"), None)
        if len(control) < 3:
            return
        before, end = control[-3:-1]
        said, text = first[before + 1 : end], f" [{number}]"
        spelled = vocabulary.text(said)
        longer = self._tokenizer.encode(spelled + text)
        head = len(said)
        right = (
            longer[:head].tolist() == said.tolist()
            and (asked is None or (isinstance(asked["content"], str) and spelled.endswith(asked["content"])))
            and all(ids_of(call)[0][:end] == first[:end].tolist() for call in row["calls"])
        )
        if not right:
            return
        if asked is not None:
            asked["content"] += text
        for call in row["calls"]:
            prompt = ids_of(call)[0]
            prompt[end:end] = longer[head:].tolist()


if __name__ == "__main__":
    main()
