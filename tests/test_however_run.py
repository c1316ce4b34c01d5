"""However it is run, it says and writes the same: each log through each way of running, as scan and as repair."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import elsewhere, test_fit, test_log_wide, test_sessions
from tests.command import written
from tests.elsewhere import Elsewhere
from tests.test_join import captured, split
from tests.test_log_findings import LATE, faulty, right
from tests.tiers import DEEP, crossed, examples, some
from tests.world import BROKEN, CLEAN, FORMATS, TOY, json_lines, lines_of
from tito_audit import Outcome, RepairSettings, Settings, SetupError, StorageError, repair_rollouts, scan_rollouts
from tito_audit.evidence.model import Evidence
from tito_audit.record.arrays import Ids
from tito_audit.record.testimony import Witness
from tito_audit.run import auditor
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.tasks import Batch, RepairBatch, repair_steps, strip_rollout
from tito_audit.run.workers import Executor, InProcess, can_fork
from tito_audit.settings.model import Override
from tito_audit.tokens.encoders import FastEncoder

pytestmark = [pytest.mark.skipif(not can_fork(), reason="processes are not forked on this system")]

TOKENIZER = str(TOY)
LOGS = sorted(FORMATS.glob("*.jsonl"))
CURED = lines_of(FORMATS / "generic.jsonl")[3]
ROWS = examples(20, 40)
"""Rows of a mixed log: of four, two are cured."""
Options = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """How a run is cut, and who works on it."""

    jobs: int = 1
    size: int | None = None
    """Bytes of a chunk or batch; None is what a run of this size takes."""
    pickled: bool = False
    """The work is done by a process that shares nothing with this one."""
    resumed: bool = False
    """All of it was done by a run before."""

    def executor(self) -> Executor | None:
        return Elsewhere() if self.pickled else None  # type: ignore[return-value]


@pytest.fixture(scope="module", autouse=True)
def _elsewhere() -> Iterator[None]:
    """In `make test` the process that got pickles alone is the same for all runs."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, pytest.MonkeyPatch.context() as patched:
        if not DEEP:
            patched.setattr(elsewhere, "ProcessPoolExecutor", lambda *_: nullcontext(pool))
        yield


PLAIN = Way()
WAYS = {
    "two processes, small chunks": Way(2, 997),
    "two processes, a row or two each": Way(2, 150),
    "three processes, large chunks": Way(3, 20_011),
    "two processes, one chunk": Way(2, 1 << 20),
    "a process that got pickles alone": Way(1, 5_000, pickled=True),
    "resumed": Way(resumed=True),
}


@dataclass(frozen=True)
class Logged:
    """Logs, settings, and what a run of them has to find for equal answers to say something."""

    logs: Any
    options: Options = field(default_factory=dict)
    repairs: Options = field(default_factory=dict)
    repaired: int | None = None
    ends: str = ""
    """What the error says that ends the run."""
    notice: str = ""
    whole: tuple[str, ...] = ()
    """The logs of which something is found as a whole."""


SEVERAL = some((Way(3, 900), Way(2, 1), Way(2, 1 << 20)), 1)


def made(path: Path) -> Path:
    path.mkdir()
    return path


def mixed(count: int) -> list[Options]:
    """Rows that are well, that two repairs cure, and that cannot be read."""
    return [{**(CLEAN, CURED, BROKEN, {"no": "ids"})[n % 4], "n": n} for n in range(count)]


def of_all_formats(folder: Path) -> Logged:
    log = folder / "all.jsonl"
    log.write_bytes(
        b"".join(line for log in LOGS for line in log.read_bytes().splitlines(keepends=True)[: examples(1, 99)])
    )
    return Logged(log)


def packed_array(folder: Path) -> Logged:
    (folder / "array.json.gz").write_bytes(gzip.compress(json.dumps(mixed(ROWS)).encode()))
    return Logged(folder / "array.json.gz", repaired=ROWS // 2)


def files(folder: Path) -> Logged:
    written(folder / "a.jsonl", mixed(9))
    written(folder / "b.jsonl", [])
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(json_lines(mixed(ROWS))))
    (folder / "d.json").write_text(json.dumps(mixed(7), indent=1), encoding="utf-8")
    return Logged(str(folder), repaired=4 + 0 + ROWS // 2 + 4)


def row_groups(folder: Path) -> Logged:
    rows = [row for row in mixed(ROWS) if "no" not in row]
    for group in (3, 100):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{group}.parquet", row_group_size=group)  # type: ignore[no-untyped-call]
    return Logged(str(folder), repaired=ROWS)


def wrapped(folder: Path, *, mapped: bool = False) -> Logged:
    named = [{("ids" if mapped and k == "token_ids" else k): v for k, v in row.items()} for row in mixed(12)]
    log = written(folder / "log.jsonl", [{"data": {"rollouts": named[n : n + 4]}, "n": n} for n in (0, 4, 8)])
    columns = {"columns": {"token_ids": "ids"}} if mapped else {}
    return Logged(log, {"rows_at": "data.rollouts", **columns}, repaired=6)


def mapped(folder: Path) -> Logged:
    return wrapped(folder, mapped=True)


def gathered(folder: Path) -> Logged:
    """Calls in lines of two files, and the messages of their rollouts in another place."""
    _, lines, rollouts = captured()
    messages = written(folder.parent / "rollouts.jsonl", rollouts)
    written(folder / "a.tokens.jsonl", lines)
    (folder / "b.tokens.jsonl.gz").write_bytes(gzip.compress(json_lines(lines)))
    how = {"unsafe": True, "strategies": ("splice", "mask")}
    return Logged(str(folder), {"messages": str(messages)}, how)


def with_messages(folder: Path) -> Logged:
    """Several rows for each conversation that stands in another file."""
    _, rows, messages = split("slime")
    log, texts = written(folder / "log.jsonl", rows * 3), written(folder / "messages.jsonl", messages)
    return Logged(log, {"messages": str(texts)}, notice="more than one row of the log")


def threads(folder: Path) -> Logged:
    (folder / "made").mkdir()
    rows = [row for name in test_sessions.LOGS for row in test_sessions.converted(name, folder / "made")]
    calls = test_sessions.apart(list(filter(test_sessions.is_plain, rows)), test_sessions.generic)
    return Logged(written(folder / "log.jsonl", calls), {"session": "session_id"})


def misfits(folder: Path) -> Logged:
    """Two logs that the tokenizer did not write, and one that it did."""
    texts, bpe, own = test_fit.written, test_fit.BPE, test_fit.METASPACE
    rows, right = ([test_fit.row(name, number) for number in range(30)] for name in (bpe, own))
    logs = [texts(folder / f"{n}.jsonl", r) for n, r in (("a", rows), ("b", [{"no": 1}, *rows]), ("c", right))]
    return Logged(logs, {"tokenizer": test_fit.path_of(own)}, whole=("a.jsonl", "b.jsonl"))


def own_settings(folder: Path) -> Logged:
    """Logs of several dates, of another argument, without tools as an override says, and as it is now."""
    row, tools, numbers = test_log_wide.row, test_log_wide.WITH, range(test_log_wide.ROWS)
    rows: dict[str, list[Any]] = {
        "a.jsonl": [row(number, datetime(2024, 7, 1 + number % 9), tools) for number in numbers],
        "b.jsonl": ["x", *(row(number, tools=tools, enable_thinking=False) for number in numbers)],
        "c.jsonl": list(map(row, numbers)),
        "d.jsonl": [row(number, tools=tools) for number in numbers],
    }
    logs = [test_log_wide.log_of(folder, lines, name) for name, lines in rows.items()]
    options = {"chat_template": str(folder / "toy.jinja"), "overrides": (Override((logs[2],), {"tools": "none"}),)}
    return Logged(logs, options, whole=("a.jsonl", "b.jsonl"))


def limited(folder: Path, *, limit: int = 13, **more: Any) -> Logged:
    """A limit that ends in the second of three logs."""
    first = written(folder / "a.jsonl", [CLEAN, BROKEN, CLEAN] * 4)
    last = written(folder / "c.jsonl", [BROKEN, {"no": 1}] * 4)
    return Logged(str(folder) if more else [first, LOGS[0], last], {"limit": limit, **more})


def at_an_end(folder: Path) -> Logged:
    """A limit that ends with the first log."""
    return limited(folder, limit=12)


def sampled(folder: Path) -> Logged:
    return limited(folder, limit=5, sample=0.5)


def broken(folder: Path) -> Logged:
    """A packed log that is cut off, and one after it."""
    data = gzip.compress(json_lines({**CLEAN, "n": n} for n in range(examples(600, 3000))))
    (folder / "a.jsonl.gz").write_bytes(data[: len(data) // 2])
    after = written(folder / "b.jsonl", [CLEAN, BROKEN])
    return Logged([folder / "a.jsonl.gz", after], {"select": ("REC", "LPR"), "tokenizer": None})


def no_log(folder: Path, data: bytes = b"PAR1 no table") -> Logged:
    """A file that is no log, between two that are."""
    first, third = (written(folder / f"{name}.jsonl", [CLEAN, BROKEN] * 5) for name in "ac")
    (folder / "b.jsonl").write_bytes(data)
    return Logged([first, folder / "b.jsonl", third], ends="b.jsonl")


def a_pickle(folder: Path) -> Logged:
    return no_log(folder, b"\x80\x04pickle")


def no_gzip(folder: Path) -> Logged:
    return no_log(folder, gzip.compress(b'{"a": 1}\n' * 9)[:12])


def no_unicode(folder: Path) -> Logged:
    return no_log(folder, b"\xff\xfeU")


CASES: dict[str, Callable[[Path], Logged]] = {
    **{log.stem: lambda folder, log=log: Logged(log) for log in some(LOGS, 2)},  # type: ignore[misc]
    **{
        make.__name__.replace("_", " "): make
        for make in (
            of_all_formats, packed_array, files, row_groups, wrapped, mapped, gathered, limited, at_an_end,
            with_messages, threads, misfits, own_settings, sampled, broken, no_log, no_gzip,
            *((a_pickle, no_unicode) if DEEP else ()),
        )
    },
}  # fmt: skip


def scanned(case: Logged, way: Way, folder: Path) -> tuple[Any, ...]:
    """Results without what only one process holds, the summary without its clock, and the error at the end."""
    for _ in range(1 + way.resumed):
        settings = Settings(**{"tokenizer": TOKENIZER, "jobs": way.jobs, **case.options})
        run = scan_rollouts(case.logs, settings, resume=folder / "journal" if way.resumed else None)
        run.chunk_bytes, run.executor = way.size, way.executor()
        results, error = read(run)
    run.summary.seconds = 0.0
    return [strip_rollout(result) for result in results], run.summary, error


def repaired(case: Logged, way: Way, folder: Path, *, dry: bool = False) -> tuple[Any, ...]:
    """Everything that a repair says and writes, but for clocks and the name of the folder."""
    several = isinstance(case.logs, list) or Path(case.logs).is_dir()
    out = folder / ("out" if several else f"out{''.join(Path(case.logs).suffixes)}")
    how = {} if dry else {"unsafe": True, "quarantine": str(folder / "aside")}
    for _ in range(1 + way.resumed):
        settings = Settings(**{"tokenizer": TOKENIZER, "jobs": way.jobs, **case.options})
        repairs = RepairSettings(force=True, **(case.repairs or how))
        journal = folder.parent / f"{folder.name}.journal" if way.resumed else None
        run = repair_rollouts(case.logs, None if dry else out, settings, repairs, resume=journal)
        run.batch_bytes, run.executor = way.size, way.executor()
        outcomes, error = read(run)
    for summary in (run.before, run.after):
        summary.seconds = 0.0
        summary.files = [Path(file).name for file in summary.files]
        for mismatch in summary.mismatches.values():
            mismatch.worst = {
                cause: (replace(place, file=Path(place.file).name), token)
                for cause, (place, token) in mismatch.worst.items()
            }
        summary.taken = {Path(file).name: formats for file, formats in summary.taken.items()}
        for notices in (summary.notices, summary.joined):
            notices[:] = [notice.replace(str(folder), "") for notice in notices]
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    places = [(log, target.name) for log, target in run.written]
    numbers = [run.before, run.after, run.failing, places, error.replace(str(folder), "")]
    return [plain(outcome) for outcome in outcomes], numbers, files


def plain(outcome: Outcome) -> Outcome:
    """The outcome without what only one process holds."""
    return replace(
        outcome, before=tuple(map(strip_rollout, outcome.before)), after=tuple(map(strip_rollout, outcome.after))
    )


def read(run: Iterable[T]) -> tuple[list[T], str]:
    """What came out of a run, and the error that ended it."""
    came: list[T] = []
    try:
        came.extend(run)
    except (StorageError, SetupError) as error:
        return came, str(error)
    return came, ""


@pytest.mark.parametrize(("case", "way"), crossed(list(CASES), list(WAYS)))
def test_a_scan_says_the_same(case: str, way: str, tmp_path: Path) -> None:
    logged = CASES[case](made(tmp_path / "in"))
    results, summary, error = expected = scanned(logged, PLAIN, tmp_path)
    assert results
    assert any(logged.notice in notice for notice in ["", *summary.notices])
    of_logs = tuple(dict.fromkeys(Path(result.place.file).name for result in results if result.of_log))
    assert logged.whole in ((), of_logs)
    assert logged.ends in error
    assert bool(logged.ends) == bool(error)
    assert scanned(logged, WAYS[way], tmp_path) == expected


@pytest.mark.parametrize(("case", "way"), crossed(list(CASES), list(WAYS)[::-1]))
def test_a_repair_says_and_writes_the_same(case: str, way: str, tmp_path: Path) -> None:
    logged = CASES[case](made(tmp_path / "in"))
    outcomes, *_ = expected = repaired(logged, PLAIN, made(tmp_path / "plain"))
    assert logged.repaired in (None, sum(outcome.repaired for outcome in outcomes))
    assert repaired(logged, WAYS[way], made(tmp_path / "way")) == expected
    if DEEP or logged.logs in LOGS:
        *_, files = dry = repaired(logged, PLAIN, made(tmp_path / "dry"), dry=True)
        assert not files
        assert repaired(logged, WAYS[way], tmp_path / "dry", dry=True) == dry


# What makes it the same


def told_by_the_first_token(evidence: Evidence) -> Witness | None:
    """What a row says here: its first token stands for it, so that the counts alone are looked at."""
    row = evidence.rollout.training_row
    return {5: right(LATE), 6: faulty(LATE)}[int(row.token_ids[0])] if row is not None else None


def test_rows_that_may_have_the_fault_of_others_are_counted_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tito_audit.run.row_repair.witness", "tito_audit.run.auditor.witness"):
        monkeypatch.setattr(name, told_by_the_first_token)
    for name, last in (("a", 6), ("b", 5), ("c", 6)):
        ids = [[first, 6, 7, 8] for first in [*[6] * 5, *[5] * 30, last]]
        written(tmp_path / "in" / f"{name}.jsonl", [{**CLEAN, "token_ids": row_ids} for row_ids in ids])
    case = Logged(str(tmp_path / "in"), {"tokenizer": None})
    _, (before, *_), _ = expected = repaired(case, PLAIN, made(tmp_path / "plain"))
    for number, way in enumerate(SEVERAL):
        assert repaired(case, way, made(tmp_path / str(number))) == expected
    assert (before.open_beside_faults, before.fault_beside) == (91, "--assume logprobs=+1")


def test_a_repair_loads_its_tokenizer_once_for_all_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    load = auditor.load_tokenizer

    def watched(name: str, **how: Any) -> Any:
        loaded.append(name)
        return load(name, **how)

    monkeypatch.setattr(auditor, "load_tokenizer", watched)
    monkeypatch.setattr("tito_audit.run.row_repair.witness", told_by_the_first_token)
    log = written(tmp_path / "log.jsonl", [{**CLEAN, "token_ids": [first, 6, 7, 8]} for first in (6, 5, 6)])
    run = repair_rollouts(log, tmp_path / "out.jsonl", Settings(tokenizer=TOKENIZER))
    assert len(list(run)) == 3
    assert run.after.rollouts == 3, "the written log was read again"
    assert loaded == [TOKENIZER]


@pytest.mark.parametrize(("log", "jobs"), crossed(some(LOGS[::4], 2), (1, 2)))
def test_the_fast_encoder_changes_nothing(log: Path, jobs: int, tmp_path: Path) -> None:
    expected = repaired(Logged(log, {"encoder": "tokenizers"}), PLAIN, made(tmp_path / "plain"))
    fast = repaired(Logged(log, {"encoder": "fastokens"}), Way(jobs, 997), made(tmp_path / "fast"))
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
    flow = RowFlow([LOGS[0]], Settings(tokenizer=TOKENIZER, encoder="fastokens"))
    flow.choose_encoders()
    audits = flow.fitted_group(str(LOGS[0])).auditor
    judge = audits.by_reference()
    assert audits.tokenizer is not None
    assert judge.tokenizer is not None
    text = "What a judge says is the word of the reference."
    encoded.clear()
    (ids,) = judge.tokenizer.encode_fast_batch([text])
    assert judge.tokenizer.encodes_to(text, ids)
    assert encoded == []
    assert np.array_equal(audits.tokenizer.encode_fast_batch([text])[0], ids)
    assert encoded != []
    assert judge.by_reference() is judge
    assert audits.tokenizer.encoder_name == "fastokens, proved by tokenizers"


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
    expected = repaired(case, PLAIN, made(tmp_path / "plain"))[0]
    assert [plain(row.outcome) for answer in answers if answer for row in answer.rows if row] == expected
