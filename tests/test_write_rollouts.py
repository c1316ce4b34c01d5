"""write_rollouts: a log again, with rollouts that a caller changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tito_audit import RecordError, read_rollouts, write_rollouts
from tito_audit.record.move_row import move_row

ROOT = Path(__file__).resolve().parents[1]
LOGS = sorted((ROOT / "fixtures" / "formats").glob("*.jsonl"))
PLAIN = '{"token_ids": [5, 6,7], "loss_mask": [0, 1, 1], "logprobs": [0.0, -0.50, -1e-3], "note": "caf\\u00e9"}\n'


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_rollouts_as_they_were_read_give_the_same_bytes(log: Path, tmp_path: Path) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    source = tmp_path / log.name
    readable = []
    for line in lines:
        source.write_bytes(line)
        try:
            list(read_rollouts(source))
        except RecordError:
            continue
        readable.append(line)
    source.write_bytes(b"".join(readable))
    assert write_rollouts(source, read_rollouts(source), tmp_path / "out.jsonl") == 0
    assert (tmp_path / "out.jsonl").read_bytes() == source.read_bytes()


def test_a_changed_training_row_is_written_and_nothing_else(tmp_path: Path) -> None:
    source, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    source.write_text(PLAIN + PLAIN)
    first, second = read_rollouts(source)
    assert second.training_row is not None
    mask = np.array([False, False, True])
    row = move_row(
        second.training_row,
        second.training_row.token_ids,
        np.arange(3),
        loss_mask=mask,
        logprobs=second.training_row.logprobs,
    ).row
    assert write_rollouts(source, [first, replace(second, training_row=row)], out) == 1
    assert out.read_text() == PLAIN + PLAIN.replace("[0, 1, 1]", "[0, 0, 1]")


def test_rollouts_out_of_order_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    source, out = tmp_path / "log.jsonl", tmp_path / "out.jsonl"
    source.write_text(PLAIN + PLAIN)
    with pytest.raises(RecordError, match=r"log\.jsonl:0: no row of .* is left"):
        write_rollouts(source, reversed(list(read_rollouts(source))), out)
    assert not out.exists()
    assert json.loads(source.read_text().splitlines()[0])["token_ids"] == [5, 6, 7]
