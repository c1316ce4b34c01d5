"""Repair with several processes: the files and the words of one, and nothing left behind when it is ended."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command import written
from tests.ready import program
from tests.test_however_run import PLAIN, Logged, Way, mixed, plain, repaired
from tests.test_jobs import (
    CLEAN,
    FORMATS,
    LONG,
    ROOT,
    TOKENIZER,
    alive,
    children,
    held,
    printed_by,
    workers_of,
)
from tests.test_log_findings import LATE, faulty, right
from tests.tiers import crossed, some
from tito_audit import RepairSettings, Settings, repair_rollouts
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Ids
from tito_audit.record.testimony import Witness
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.repair import Repairs
from tito_audit.run.tasks import Batch, RepairBatch, repair_steps
from tito_audit.run.workers import InProcess, can_fork, is_small
from tito_audit.tokens.encoders import FastEncoder

pytestmark = [
    pytest.mark.skipif(not can_fork(), reason="processes are not forked on this system"),
]

SEVERAL = some((Way(3, 900), Way(2, 1), Way(2, 1 << 20)), 1)


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def told_by_the_first_token(evidence: Evidence) -> Witness | None:
    """What a row says here: its first token stands for it, so that the counts alone are looked at."""
    row = evidence.rollout.training_row
    return {5: right(LATE), 6: faulty(LATE)}[int(row.token_ids[0])] if row is not None else None


def test_rows_that_may_have_the_fault_of_others_are_counted_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tito_audit.run.row_repair.witness", "tito_audit.run.auditor.witness"):
        monkeypatch.setattr(name, told_by_the_first_token)
    (tmp_path / "in").mkdir()
    for name, last in (("a", 6), ("b", 5), ("c", 6)):
        ids = [[first, 6, 7, 8] for first in [*[6] * 5, *[5] * 30, last]]
        written(tmp_path / "in" / f"{name}.jsonl", [{**CLEAN, "token_ids": row_ids} for row_ids in ids])
    case = Logged(str(tmp_path / "in"), {"tokenizer": None})
    _, (before, *_), _ = expected = repaired(case, PLAIN, folder(tmp_path / "plain"))
    for number, way in enumerate(SEVERAL):
        assert repaired(case, way, folder(tmp_path / str(number))) == expected
    assert (before.open_beside_faults, before.fault_beside) == (91, "--assume logprobs=+1")


def test_a_repair_loads_its_tokenizer_once_for_all_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tito_audit.run.auditor as auditor

    loaded: list[str] = []
    load = auditor.load_tokenizer

    def watched(name: str, **how: Any) -> Any:
        loaded.append(name)
        return load(name, **how)

    monkeypatch.setattr(auditor, "load_tokenizer", watched)
    monkeypatch.setattr("tito_audit.run.row_repair.witness", told_by_the_first_token)
    log = written(tmp_path / "log.jsonl", [{**CLEAN, "token_ids": [first, 6, 7, 8]} for first in (6, 5, 6)])
    run = repair_rollouts(log, tmp_path / "out.jsonl", Settings(tokenizer=str(TOKENIZER)))
    assert len(list(run)) == 3
    assert run.after.rollouts == 3, "the written log was read again"
    assert loaded == [str(TOKENIZER)]


# Encoders


@pytest.mark.parametrize(("log", "jobs"), crossed(some(FORMATS[::4], 2), (1, 2)))
def test_the_fast_encoder_changes_nothing(log: Path, jobs: int, tmp_path: Path) -> None:
    expected = repaired(Logged(log, {"encoder": "tokenizers"}), PLAIN, folder(tmp_path / "plain"))
    fast = repaired(Logged(log, {"encoder": "fastokens"}), Way(jobs, 997), folder(tmp_path / "fast"))
    assert fast[1][1].encoder == "fastokens, proved by tokenizers"
    fast[1][1].encoder = expected[1][1].encoder
    assert fast == expected


def test_no_repair_is_proven_by_a_fast_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    class Watched(FastEncoder):
        def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
            encoded.extend(texts)
            return super().encode_batch(texts)

    monkeypatch.setattr("tito_audit.tokens.tokenizer.FastEncoder", Watched)
    flow = RowFlow([FORMATS[0]], Settings(tokenizer=TOKENIZER, encoder="fastokens"))
    flow.choose_encoders()
    auditor = flow.fitted_group(str(FORMATS[0])).auditor
    judge = auditor.by_reference()
    assert auditor.tokenizer is not None
    assert judge.tokenizer is not None
    text = "What a judge says is the word of the reference."
    encoded.clear()
    (ids,) = judge.tokenizer.encode_fast_batch([text])
    assert judge.tokenizer.encodes_to(text, ids)
    assert encoded == []
    assert np.array_equal(auditor.tokenizer.encode_fast_batch([text])[0], ids)
    assert encoded != []
    assert judge.by_reference() is judge
    assert auditor.tokenizer.encoder_name == "fastokens, proved by tokenizers"


# Executors


def test_rows_that_wait_hold_their_text_only(tmp_path: Path) -> None:
    log = written(tmp_path / "log.jsonl", mixed(8))
    flow = RowFlow([log], Settings())
    parts = [(part, task) for part, task in repair_steps(flow, 1, keep_text=True) if isinstance(part, Batch)]
    assert [len(part.rows) for part, _ in parts] == [1] * 8
    assert all(raw.value is None and raw.text for part, _ in parts for raw in part.rows)
    assert [str(part) for part, _ in parts][:2] == [f"{log}, rows 0 to 0", f"{log}, rows 1 to 1"]
    work = RepairBatch(flow, RepairSettings(), writes=True, strips_rollouts=False)
    again = pickle.loads(pickle.dumps([task for _, task in parts]))
    answers = [answer for _, answer in InProcess().map(work, ((None, task) for task in again))]
    case = Logged(log, {"tokenizer": None}, {"unsafe": False})
    expected = repaired(case, PLAIN, folder(tmp_path / "plain"))[0]
    assert [plain(row.outcome) for answer in answers if answer for row in answer.rows if row] == expected


# Ends


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A log that takes two processes some seconds, and in which a repair has something to do."""
    row = {"token_ids": [5] * 4000, "loss_mask": [1] * 4000, "logprobs": [0.5] * 4000}
    path = tmp_path / "in" / "long.jsonl"
    path.parent.mkdir()
    path.write_bytes((json.dumps(row).encode() + b"\n") * 600)
    return path


def command(log: Path, jobs: int, *more: str) -> list[str]:
    return [sys.executable, "-m", "tito_audit", "repair", str(log), "--jobs", str(jobs), *more]


@pytest.mark.parametrize("who", ["worker", "parent"])
def test_a_repair_that_is_ended_leaves_no_file(long: Path, tmp_path: Path, who: str) -> None:
    children()
    out, aside = tmp_path / "out", tmp_path / "aside"
    out.mkdir()
    words = held(LONG, *command(long, 2, "-o", str(out / "out.jsonl"), "--quarantine", str(aside))[3:])
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True, start_new_session=True
    ) as run:
        workers = workers_of(run.pid)
        if who == "worker":
            os.kill(workers[1], signal.SIGKILL)
        else:
            os.killpg(run.pid, signal.SIGINT)
        printed, err = printed_by(run)
    assert printed == ""
    assert "Traceback" not in err
    assert list(out.iterdir()) == []
    assert not aside.exists()
    if who == "worker":
        assert run.returncode == 2
        assert "was killed by SIGKILL" in err
        assert str(long) in err
    else:
        assert run.returncode == 130
        assert "interrupted" in err
    assert not any(map(alive, workers))


def test_processes_end_with_the_outcomes(tmp_path: Path) -> None:
    before = children()
    log = written(tmp_path / "log.jsonl", mixed(400))
    run: Repairs = repair_rollouts(log, tmp_path / "out.jsonl", Settings(jobs=2))
    run.batch_bytes = 100
    outcomes = iter(run)
    next(outcomes)
    assert len(children()) == len(before) + 2
    outcomes.close()  # type: ignore[attr-defined]
    assert children() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.jsonl"]


def test_the_command_prints_and_writes_the_same(tmp_path: Path) -> None:
    # Large enough for several batches, by what no rule reads.
    log = written(tmp_path / "log.jsonl", [{**row, "note": "x" * 90_000} for row in mixed(40)])
    assert not is_small([log])
    printed = []
    for jobs in (1, 2):
        out = tmp_path / f"{jobs}.jsonl"
        words = [
            *program(),
            *command(log, jobs, "-o", str(out), "-t", TOKENIZER)[3:],
            "--report",
            f"json={tmp_path / 'page'}",
        ]
        words += ["--diff", "--worst", "5"]
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
        page = json.loads((tmp_path / "page").read_text(encoding="utf-8"))
        for summary in (page["before"], page["after"]):
            summary.pop("seconds")
        text = json.dumps(page).replace(str(out), "OUT")
        output = re.sub(r"[0-9.]+ s\b", "", done.stdout.replace(str(out), "OUT"))
        printed.append((done.returncode, " ".join(output.split()), done.stderr, text, out.read_bytes()))
    assert printed[0] == printed[1]
    assert printed[0][0] == 1
    assert "repaired by" in printed[0][1]
