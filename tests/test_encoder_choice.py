"""Which logs the fast encoder is loaded for: those with more text than the reference encodes meanwhile."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.world import TOY
from tito_audit.run.encoders import _characters_per_byte_and_row
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.rows import LogGroup
from tito_audit.settings.model import Settings
from tito_audit.tokens.encoders import FastEncoder

LOADS_ANEW = True

ENOUGH = 240_000
"""More characters than the reference encodes while the fast encoder loads for this tokenizer."""


def texts(rows: int, characters: int) -> Iterator[str]:
    """Texts of this length, each a different one."""
    return ("".join(Random(seed).choices("abcdefghijk \n", k=characters)) for seed in range(rows))


def row(text: str, numbers: int = 0) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
    return {"messages": messages, "token_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "advantages": [0.125] * numbers}


def written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def is_loaded(*logs: Path, **choices: Any) -> bool:
    """Whether the fast encoder is chosen for these logs."""
    flow = RowFlow(list(logs), Settings(tokenizer=str(TOY), **choices))
    flow.choose_encoders()
    return "fastokens" in flow.tokenizers[0].encoder_name


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_log_with_much_text_is_worth_it_and_one_with_little_is_not(name, tmp_path):
    rows = [row(text) for text in texts(60, ENOUGH // 60)]
    assert is_loaded(written(tmp_path / name, rows))
    assert not is_loaded(written(tmp_path / name, rows[:30]))


def test_a_text_that_comes_again_counts_once(tmp_path):
    (same,) = texts(1, ENOUGH // 60)
    log = written(tmp_path / "log.jsonl", [row(same)] * 120)
    assert log.stat().st_size > ENOUGH
    assert not is_loaded(log)


def test_numbers_are_no_text(tmp_path):
    log = written(tmp_path / "log.jsonl", [row(text, 5000) for text in texts(100, 1000)])
    assert log.stat().st_size > 10 * ENOUGH
    assert not is_loaded(log)


def test_a_log_is_judged_by_its_first_rows(tmp_path):
    log = written(tmp_path / "log.jsonl", [row(text, 3000) for text in texts(600, 3000)])
    group = RowFlow([log], Settings(tokenizer=str(TOY))).groups[str(log)]
    by_byte, by_row = _characters_per_byte_and_row(log, group, group.auditor.vocabulary)
    assert by_row == pytest.approx(3000, rel=0.01)
    assert by_byte * log.stat().st_size == pytest.approx(600 * 3000, rel=0.1)
    assert is_loaded(log)


def test_a_log_of_ids_alone_has_the_text_of_its_ids(tmp_path):
    rows = [{"token_ids": [300 + i % 1000 for i in range(4000)], "loss_mask": [1] * 4000}] * 40
    assert is_loaded(written(tmp_path / "log.jsonl", rows))
    assert not is_loaded(written(tmp_path / "log.jsonl", rows[:4]))


def test_only_the_rows_that_are_read_count(tmp_path):
    log = written(tmp_path / "log.jsonl", [row(text) for text in texts(120, ENOUGH // 60)])
    assert is_loaded(log)
    assert is_loaded(log, limit=100)
    assert not is_loaded(log, limit=30)
    assert not is_loaded(log, row=3)
    assert not is_loaded(log, sample=0.2)


def test_logs_count_together(tmp_path):
    logs = [
        written(tmp_path / f"{number}.jsonl", [row(f"{number} {text}") for text in texts(20, ENOUGH // 60)])
        for number in range(3)
    ]
    assert is_loaded(*logs)
    assert not is_loaded(logs[0])


def test_a_wanted_encoder_is_used_whatever_the_log(tmp_path):
    small = written(tmp_path / "small.jsonl", [row("a")])
    large = written(tmp_path / "large.jsonl", [row(text) for text in texts(60, ENOUGH // 60)])
    assert is_loaded(small, encoder="fastokens")
    assert not is_loaded(large, encoder="tokenizers")


def test_a_log_that_cannot_be_read_or_is_empty_loads_nothing(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(b"{" * ENOUGH * 2)
    empty = written(tmp_path / "empty.jsonl", [])
    assert not is_loaded(broken)
    assert not is_loaded(empty)
    assert not is_loaded(tmp_path / "gone.jsonl")


def test_the_first_rows_are_read_once_for_all_that_looks_at_them_before_the_run(tmp_path, monkeypatch):
    heads: list[Path] = []
    head = LogGroup.first_rollouts

    def watched(self: LogGroup, file: Path, rows: int, *, joined: bool = False) -> Iterator[Any]:
        heads.append(file)
        return head(self, file, rows, joined=joined)

    monkeypatch.setattr(LogGroup, "first_rollouts", watched)
    log = written(tmp_path / "log.jsonl", [row(text) for text in texts(60, ENOUGH // 60)])
    flow = RowFlow([log], Settings(tokenizer=str(TOY)))
    flow.choose_encoders()
    assert flow.fitted_group(str(log)).auditor.tokenizer is flow.tokenizers[0]
    assert "fastokens" in flow.tokenizers[0].encoder_name
    assert heads == [log]


def test_a_fast_encoder_that_errs_on_the_first_rows_is_not_used(tmp_path, monkeypatch):
    encode = FastEncoder.encode_batch

    def erring(self: FastEncoder, some: Sequence[str]) -> list[Any]:
        return [ids[::-1] if "zzz" in text else ids for text, ids in zip(some, encode(self, some), strict=True)]

    monkeypatch.setattr(FastEncoder, "encode_batch", erring)
    rows = [row(text) for text in texts(60, ENOUGH // 60)]
    assert is_loaded(written(tmp_path / "right.jsonl", rows))
    rows[3]["messages"][0]["content"] += "zzz"
    assert not is_loaded(written(tmp_path / "wrong.jsonl", rows))
