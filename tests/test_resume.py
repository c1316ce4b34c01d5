"""Resume: a run that was killed goes on where it stopped, and gives what an uninterrupted one gives."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command import run
from tests.tiers import DEEP, examples, some
from tests.world import FORMATS, ROOT, TOY
from tito_audit import Settings, SetupError, StorageError, repair_rollouts, scan_rollouts
from tito_audit.record.finding import Result
from tito_audit.record.rollout import Place
from tito_audit.run import resume
from tito_audit.run.resume import FinishedRow, _StoredResult, _StoredRow, file_state, pack, unpack
from tito_audit.run.tasks import strip_rollout
from tito_audit.run.workers import can_fork
from tito_audit.settings.model import RepairSettings
from tito_audit.storage import find_logs
from tito_audit.storage.journal import Journal
from tito_audit.viewer.model import View, observed_of

REPORTS = ("json", "html", "text", "jsonl", "sarif", "junit", "markdown", "github", "concise")[: examples(4, 9)]
TIMES = re.compile(
    rb'(?<="seconds":)[0-9.e-]+|(?<=time=")[0-9.]+|[0-9.]+ s\b|(?<=timestamp=")[^"]*|[0-9,]+ tokens/s'
)
WIDE = {"COLUMNS": "300"}
"""So wide that the digits of a time move no word into the next line."""
SEED = random.Random(0 if not DEEP else None).randrange(1 << 30)


def shards(folder: Path, number: int, rows: int = 4) -> Path:
    """A folder of logs with the first rows of a fixture each, of different formats."""
    folder.mkdir(parents=True)
    names = ("areal", "atropos_group", "slime", "prime_rl_tokens", "verl_batch", "generic", "tito_sample")
    for at in range(number):
        log = FORMATS / f"{names[at % len(names)]}.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{at:03}.jsonl").write_text("".join(lines[:rows]), encoding="utf-8")
    return folder


CONVERSATIONS = ("gateway", "openai_chat", "sglang", "vllm", "areal")
"""Fixtures with calls of the same conversations."""


def copied(folder: Path, *names: str) -> Path:
    """A folder of these fixtures."""
    folder.mkdir()
    for name in names:
        shutil.copy(FORMATS / f"{name}.jsonl", folder)
    return folder


def scan(logs: Path, out: Path, *more: object) -> tuple[int, str, str]:
    """A scan with every report in a folder."""
    out.mkdir(exist_ok=True)
    named = [word for name in REPORTS for word in ("-r", f"{name}={out / name}")]
    return run("scan", logs, "-t", TOY, "-j", 1, "-q", *named, *more, env=WIDE)


def reports(out: Path) -> dict[str, bytes]:
    """The reports in a folder, without times."""
    return {name: words(TIMES.sub(b"", (out / name).read_bytes())) for name in REPORTS}


def words(report: bytes) -> bytes:
    """A report without line ends, which depend on the digits of a time and the length of a name."""
    return b" ".join(report.split())


def files_in(folder: Path) -> dict[str, bytes]:
    """The files in a folder, but for what a SIGKILL left beside an output."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".part")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def stripped(scanned: Iterable[Result]) -> list[Result]:
    return [strip_rollout(result) for result in scanned]


def unread(log: Path) -> None:
    """Replace the content of a log, so that no one can tell without reading it."""
    about = log.stat()
    log.write_bytes(b"?" * about.st_size)
    os.utime(log, ns=(about.st_atime_ns, about.st_mtime_ns))


# What is kept of a result


def results(**more: Any) -> Iterator[Result]:
    for log in some(sorted(FORMATS.glob("*.jsonl")), 8):
        yield from scan_rollouts([log], Settings(tokenizer=str(TOY)), observe=True, **more)


def test_a_result_is_read_from_json_as_it_was() -> None:
    """With findings, skips, counts, testimony, what it trains and its measures; only the rollout is bare."""
    packed = []
    for result in results():
        whole = strip_rollout(result)
        packed.append((whole, pack(_StoredResult.store(whole))))
    assert len(packed) > 50
    assert any(whole.findings for whole, _ in packed)
    assert any(whole.witness is not None and whole.trainings is not None for whole, _ in packed)
    for whole, text in packed:
        again = unpack(text, _StoredResult).restore(Path(whole.place.file))
        with pytest.raises(ValueError, match="another file"):
            unpack(text, _StoredResult).restore(Path("another"))
        assert replace(again, observed=None) == replace(whole, observed=None)
        assert [f.fingerprint for f in again.findings] == [f.fingerprint for f in whole.findings]
        same_measures(again, whole)


def same_measures(result: Result, other: Result) -> None:
    seen, theirs = observed_of(result), observed_of(other)
    assert (seen is None) == (theirs is None)
    if seen is not None and theirs is not None:
        assert seen.measures.roles == theirs.measures.roles
        for name in ("by_turn", "by_position", "by_logprob", "without_logprob"):
            assert np.array_equal(getattr(seen.measures, name), getattr(theirs.measures, name))


def test_an_outcome_is_read_from_json_as_it_was(tmp_path: Path) -> None:
    repairs = RepairSettings(quarantine=str(tmp_path / "q.jsonl"))
    logs = shards(tmp_path / "logs", 8)
    settings = Settings(tokenizer=str(TOY), jobs=1)
    seen = 0
    for outcome in repair_rollouts(logs, tmp_path / "out", settings, repairs):
        before = tuple(map(strip_rollout, outcome.before))
        after = before if outcome.after is outcome.before else tuple(map(strip_rollout, outcome.after))
        whole = replace(outcome, before=before, after=after)
        row = FinishedRow(whole, moved=(b"moved\n",))
        assert unpack(pack(_StoredRow.store(row)), _StoredRow).restore(Path(outcome.place.file)) == row
        seen += bool(outcome.cured) + bool(outcome.declined) + (outcome.quarantined is not None)
    assert seen > 5


def test_text_that_is_not_unicode_is_kept(tmp_path: Path) -> None:
    """A message may quote half of a surrogate pair, and a value may be infinite."""
    log = tmp_path / "a.jsonl"
    row = {"messages": [{"role": "user", "content": "\ud83d"}], "token_ids": [1, 2], "logprobs": [0.0, -0.5]}
    log.write_text(json.dumps({**row, "loss_mask": [1, 0]}) + "\nnot json \\ud83d\n")
    whole = stripped(scan_rollouts([log], Settings(tokenizer=str(TOY))))
    first = stripped(scan_rollouts([log], Settings(tokenizer=str(TOY)), resume=tmp_path / "j"))
    again = list(scan_rollouts([log], Settings(tokenizer=str(TOY)), resume=tmp_path / "j"))
    assert first == whole
    assert again == whole


# A scan


def test_a_finished_scan_is_not_repeated_and_reports_the_same(tmp_path: Path) -> None:
    logs = shards(tmp_path / "logs", examples(10, 16))
    scan(logs, tmp_path / "whole")
    scan(logs, tmp_path / "out", "--resume")
    assert reports(tmp_path / "out") == reports(tmp_path / "whole")
    for log in sorted(logs.iterdir())[8:]:  # the first ones are read again for the tokens that the page shows
        unread(log)
    scan(logs, tmp_path / "out", "--resume")
    without_html = {name: report for name, report in reports(tmp_path / "whole").items() if name != "html"}
    assert {name: report for name, report in reports(tmp_path / "out").items() if name != "html"} == without_html


@pytest.mark.skipif(not can_fork(), reason="runs are forked")
@pytest.mark.parametrize("what", ["scan", "repair", "steps"] if DEEP else ["scan repair steps"])
def test_runs_that_are_killed_again_and_again_give_what_uninterrupted_ones_do(tmp_path: Path, what: str) -> None:
    """And so does a repair that dies just before it opens, links or removes something."""
    logs, few = shards(tmp_path / "logs", examples(7, 200)), shards(tmp_path / "few", 2)
    some_logs = shards(tmp_path / "some", examples(4, 200))
    jobs, kills, works = str(examples(1, 2)), examples(2, 20), []
    if "scan" in what:
        works.append(work("scan", logs, SCANNING, jobs, tmp_path / "scan", kills=kills))
    if "repair" in what:
        works.append(work("repair", some_logs, REPAIRING, jobs, tmp_path / "repair", kills=kills))
    if "steps" in what:
        for step in range(1, 60) if DEEP else (1, 30):
            works.append(work("repair", few, REPAIRING, "1", tmp_path / f"step{step:02}", before=step))
    for job, codes in zip(works, ended(works), strict=True):
        assert codes[-1] in (0, 1), (SEED, job, codes)
        assert -signal.SIGKILL in codes or job.get("before", 0) > 40, (SEED, job, codes)
    if "scan" in what:
        scan(logs, tmp_path / "whole")
        assert reports(tmp_path / "scan") == reports(tmp_path / "whole"), SEED
        assert sorted(files_in(tmp_path / "scan")) == sorted([*REPORTS, "json.journal"])
    if "repair" in what:
        same_repairs(some_logs, tmp_path, ["repair"])
    same_repairs(few, tmp_path, [Path(job["folder"]).name for job in works if "before" in job])


SCANNING = [word for name in REPORTS for word in ("-r", f"{name}={{}}/{name}")]
REPAIRING = ["-o", "{}/logs", "--quarantine", "{}/q.jsonl", "-r", "json={}/json", "-r", "text={}/text"]


def work(command: str, logs: Path, named: list[str], jobs: str, folder: Path, **how: int) -> dict[str, Any]:
    words = [command, str(logs), "-t", str(TOY), "-j", jobs, "-q", *named, "--resume"]
    return {"arguments": words, "folder": str(folder), **how}


def ended(works: list[dict[str, Any]]) -> list[list[int]]:
    """How the runs of each work ended."""
    start, env = [sys.executable, "-m", "tests.kill_often", str(SEED)], {**os.environ, **WIDE}
    stdin = json.dumps(works).encode()
    done = subprocess.run(start, input=stdin, capture_output=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, (SEED, done.stderr.decode()[-3000:])
    codes: list[list[int]] = json.loads(done.stdout)
    return codes


def same_repairs(logs: Path, parent: Path, names: list[str]) -> None:
    """All of these wrote what an uninterrupted repair writes."""
    repair(logs, parent / f"whole_{logs.name}")
    whole = written(parent / f"whole_{logs.name}")
    for name in names:
        assert written(parent / name) == whole, (SEED, name)
        leftovers = files_in(parent / name).keys() - whole.keys()
        assert leftovers == {"logs.journal"}, (SEED, name, leftovers)


def test_changed_added_and_deleted_logs_are_all_that_a_later_scan_does(tmp_path: Path) -> None:
    count = examples(6, 8)
    logs = shards(tmp_path / "logs", count)
    scan(logs, tmp_path / "out", "--resume")
    (logs / "000.jsonl").unlink()
    shutil.copy(logs / "003.jsonl", logs / "0015.jsonl")
    with (logs / "005.jsonl").open("a") as out:
        out.write('{"token_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, 3.0]}\n')
    scan(logs, tmp_path / "whole")
    code, _, err = scan(logs, tmp_path / "out", "--resume")
    assert code == 1
    assert reports(tmp_path / "out") == reports(tmp_path / "whole")
    assert not err, "-q"
    _, _, err = run("scan", logs, "-t", TOY, "-r", f"jsonl={tmp_path / 'l'}", "--journal", tmp_path / "j", "-j", 1)
    (logs / "001.jsonl").touch()
    _, _, err = run("scan", logs, "-t", TOY, "--journal", tmp_path / "j", "--resume", "-j", 1)
    assert f"{count - 1} of {count} logs were finished before: {tmp_path / 'j'}" in err


@pytest.mark.parametrize("change", ["settings", "template", "tokenizer", "code"])
def test_results_of_other_settings_are_not_used_and_a_notice_says_so(
    tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, tokenizer, place = shards(tmp_path / "logs", 3), tmp_path / "tokenizer", tmp_path / "j"
    shutil.copytree(TOY, tokenizer)
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    settings = Settings(tokenizer=str(tokenizer), chat_template=str(template))
    list(scan_rollouts([logs], settings, resume=place))
    if change == "settings":
        settings = replace(settings, ignore=("TOK",))
    elif change == "template":
        template.write_text("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    elif change == "tokenizer":
        (tokenizer / "generation_config.json").write_text('{"eos_token_id": 3}')
    else:
        monkeypatch.setattr("tito_audit.run.resume.VERSION", "another")
        monkeypatch.setattr("tito_audit.run.resume._code_hash", lambda: "another")
    again = scan_rollouts([logs], settings, resume=place)
    bare = stripped(again)
    assert again.resumed == 0
    word = {"settings": "settings", "template": "chat template", "tokenizer": "tokenizer files", "code": "code"}
    assert f"{place}: 3 logs had been finished by a run with other {word[change]}" in again.summary.notices[0]
    assert bare == stripped(scan_rollouts([logs], settings))
    more = scan_rollouts([logs], replace(settings, fail_on="note", jobs=2), resume=place)
    assert list(more) == bare
    assert more.resumed == 3, "what fails, and how many processes do it, decides no result"


def test_a_log_that_changes_while_it_is_audited_is_not_recorded_as_finished(tmp_path: Path) -> None:
    logs = shards(tmp_path / "logs", 3)
    results = iter(scan_rollouts([logs], Settings(), resume=tmp_path / "j"))
    for result in results:
        if result.place.file.endswith("001.jsonl"):
            with (logs / "001.jsonl").open("a") as out:
                out.write("\n")
            break
    list(results)
    again = scan_rollouts([logs], Settings(), resume=tmp_path / "j")
    list(again)
    assert again.resumed == 2


@pytest.mark.parametrize("more", [{"limit": 20}, {"sample": 0.5}, {"sample": 0.5, "limit": 9}])
def test_a_limit_and_a_sample_count_the_rows_of_finished_logs(tmp_path: Path, more: dict[str, Any]) -> None:
    logs, settings = shards(tmp_path / "logs", 6), Settings(tokenizer=str(TOY), **more)
    whole = scan_rollouts([logs], settings)
    bare = stripped(whole)
    for _ in range(2):
        again = scan_rollouts([logs], settings, resume=tmp_path / "j")
        assert stripped(again) == bare
        assert again.summary.sampled == whole.summary.sampled
        assert again.summary.notices == whole.summary.notices
    assert again.resumed


def test_views_are_those_of_an_uninterrupted_run_whatever_came_before(tmp_path: Path) -> None:
    """Which rollouts get one depends on the logs before; those are gone in the second run."""
    logs = tmp_path / "logs"
    logs.mkdir()
    for number in range(8):
        shutil.copy(FORMATS / "areal.jsonl", logs / f"{number}.jsonl")
    settings = Settings(tokenizer=str(TOY))
    list(scan_rollouts([logs], settings, observe=True, resume=tmp_path / "j"))
    for number in range(4):
        (logs / f"{number}.jsonl").unlink()
    again = scan_rollouts([logs], settings, observe=True, resume=tmp_path / "j")
    seen = views(again)
    assert again.resumed == 4
    assert seen == views(scan_rollouts([logs], settings, observe=True))
    assert sum(view is not None for _, view in seen) > 3


def views(results: Iterable[Result]) -> list[tuple[Place, View | None]]:
    return [(result.place, seen.view) for result in results if (seen := observed_of(result)) is not None]


def test_calls_that_are_joined_across_logs_are_joined_again(tmp_path: Path) -> None:
    logs = copied(tmp_path / "logs", *CONVERSATIONS)
    whole = scan_rollouts([logs], Settings(tokenizer=str(TOY)))
    bare = stripped(whole)
    for resumed in (0, 5):
        again = scan_rollouts([logs], Settings(tokenizer=str(TOY)), resume=tmp_path / "j")
        assert stripped(again) == bare
        assert again.summary.joined == whole.summary.joined != []
        assert again.summary.notices == whole.summary.notices
        assert again.resumed == resumed
    shutil.copy(FORMATS / "rllm_gateway.jsonl", logs)
    more = scan_rollouts([logs], Settings(tokenizer=str(TOY)), resume=tmp_path / "j")
    bare = stripped(more)
    assert more.resumed == 1, "the calls of another log may continue any of the others"
    assert bare == stripped(scan_rollouts([logs], Settings(tokenizer=str(TOY))))


def test_a_pipe_is_never_recorded(tmp_path: Path) -> None:
    assert file_state(Path("/dev/null")) is None
    log = FORMATS / "areal.jsonl"
    assert file_state(log) == [log.stat().st_size, log.stat().st_mtime_ns, None]


# The journal


def record(path: Path, number: int) -> list[int]:
    """A journal of so many logs; where it ends after each of them."""
    ends = []
    journal = Journal(path)
    for at in range(number):
        journal.begin_log()
        for part in range(2):
            journal.add_part({"rows": [at, part]})
        journal.finish_log("scan", f"{at}.jsonl", [at, at, None], {"code": "x"}, left_out=0)
        ends.append(path.stat().st_size)
    journal.close()
    return ends


def finished_in(path: Path, number: int) -> list[int]:
    journal = Journal(path)
    numbers = []
    for at in range(number):
        finished = journal.find_finished("scan", f"{at}.jsonl")
        if finished is not None:
            assert list(journal.read_parts(finished)) == [{"rows": [at, 0]}, {"rows": [at, 1]}]
            numbers.append(at)
    journal.close()
    return numbers


def test_a_journal_cut_off_at_any_byte_keeps_what_was_finished_by_then(tmp_path: Path) -> None:
    ends = record(tmp_path / "whole", 3)
    data = (tmp_path / "whole").read_bytes()
    torn = tmp_path / "torn"
    for size in some(range(len(data) + 1), 60):
        torn.write_bytes(data[:size])
        assert finished_in(torn, 3) == [at for at, end in enumerate(ends) if end <= size]
        assert data.startswith(torn.read_bytes()), "what was cut off is gone"
        journal = Journal(torn)
        journal.begin_log()
        journal.add_part({"rows": [7, 0]})
        journal.add_part({"rows": [7, 1]})
        journal.finish_log("scan", "7.jsonl", [], {})
        journal.close()
        assert 7 in finished_in(torn, 8)


def test_a_journal_that_is_damaged_foreign_or_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    """What is said of other files stands in `tests/transcripts/resume.txt`."""
    logs, place = shards(tmp_path / "logs", 2), tmp_path / "j"
    record(place, 3)
    data = place.read_bytes()
    for at in some(range(len(data) // 2, len(data) // 2 + 40), 8):
        place.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(SetupError, match=r"damaged at byte [\d,]+.*\n.*[Dd]elete it"):
            Journal(place)
    place.write_bytes(b"\x00" * 90)
    code, _, error = run("scan", logs, "--journal", place, "--resume", "-q")
    assert (code, place.read_bytes()) == (2, b"\x00" * 90)
    assert "not a journal" in error


@pytest.mark.skipif(not can_fork(), reason="the other run is a fork")
def test_two_runs_do_not_share_a_journal(tmp_path: Path) -> None:
    place = tmp_path / "j"
    read, write = os.pipe()
    child = os.fork()
    if not child:
        _journal = Journal(place)
        os.write(write, b"!")
        signal.pause()
    os.read(read, 1)
    try:
        with pytest.raises(SetupError, match="another run is using this journal"):
            Journal(place)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    Journal(place).close()


def test_a_journal_holds_a_checksum_and_json_in_each_line(tmp_path: Path) -> None:
    """And it is neither a log nor a file that a scan of its folder speaks of."""
    logs = shards(tmp_path / "logs", 2)
    run("scan", logs, "-r", f"json={logs / 'report'}", "--resume", "-q")
    head, *lines = (logs / "report.journal").read_bytes().splitlines()
    assert json.loads(head) == {"tito_audit_journal": 2}
    for line in lines:
        assert int(line[:8], 16) == zlib.crc32(line[9:])
        assert json.loads(line[9:]).keys() & {"part", "done"}
    shutil.copy(logs / "report.journal", logs / "other.jsonl")
    (logs / "report").unlink()
    _, out, _ = run("scan", logs, "-r", "json")
    assert len(json.loads(out)["summary"]["files"]) == 2
    assert "report.journal" not in out


def test_only_a_file_on_disk_can_be_a_journal(tmp_path: Path) -> None:
    logs = shards(tmp_path / "logs", 1)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "a\0b"):
        code, _, error = run("scan", logs, "--journal", place, "--resume", "-q")
        assert code == 2
        assert "name another file" in error
        assert "Traceback" not in error


@pytest.mark.skipif(not can_fork(), reason="the limit of a file's size is that of a fork")
def test_a_full_disk_ends_a_run_in_one_line_and_the_next_goes_on(tmp_path: Path) -> None:
    logs, place = shards(tmp_path / "logs", 4), tmp_path / "j"
    for most in (10, 3_000):
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            code = 1
            try:
                list(scan_rollouts([logs], Settings(), resume=place))
            except StorageError as error:
                code = 0 if re.fullmatch(r".*: the journal cannot be written \(.*\); name .*", str(error)) else 1
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0, most
        assert place.stat().st_size <= most
    assert stripped(scan_rollouts([logs], Settings(), resume=place)) == stripped(scan_rollouts([logs], Settings()))


@pytest.mark.skipif(not can_fork(), reason="the other run is a fork")
def test_a_journal_among_the_logs_stays_locked_when_they_are_listed(tmp_path: Path) -> None:
    """Its name is that of a log: to look into it and close it would drop the lock."""
    logs = shards(tmp_path / "logs", 1)
    journal = Journal(logs / "j.jsonl")
    assert [file.name for file in find_logs([logs])] == ["000.jsonl"]
    child = os.fork()
    if not child:
        code = 1
        try:
            Journal(logs / "j.jsonl")
        except SetupError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    journal.close()
    assert [file.name for file in find_logs([logs])] == ["000.jsonl"]


def test_whatever_records_hold_that_no_run_wrote_a_resumed_run_ends_in_one_line(tmp_path: Path) -> None:
    """Their checksums are right: each value of each record in turn is of another type, or not there."""
    logs, chance = shards(tmp_path / "logs", 4), random.Random(SEED)
    runs: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
        (scan_rollouts, {"settings": Settings(tokenizer=str(TOY), sample=0.9)}),
        (repair_rollouts, {"settings": Settings(tokenizer=str(TOY)), "repairs": RepairSettings(unsafe=True)}),
    )
    for function, how in runs:
        place = tmp_path / function.__name__
        list(function([logs], resume=place, **how))
        head, *lines = place.read_bytes().splitlines(keepends=True)
        refused = 0
        for _ in range(examples(20, 2_000)):
            at = chance.randrange(len(lines))
            value = json.loads(lines[at][9:])
            holder, key = (
                (value, "part") if "part" in value else (value["said"], "kept") if "said" in value else ({}, "")
            )
            inside = [json.loads(zlib.decompress(b64decode(holder[key])))] if key else [value]
            spots = list(_places(inside))
            rows = [spot[name] for spot, name in spots if name == "place"]
            if rows and chance.random() < 0.3:
                chance.choice(rows)["row"] = chance.choice([-1, 1 << 40])
            else:
                spot, name = chance.choice(spots)
                others: list[Any] = ["\x1b[2J", -1, 10**400, None, [], {}, [[1]], 0.5, True, "../../etc/passwd"]
                spot[name] = chance.choice([other for other in others if type(other) is not type(spot[name])])
            if key:
                holder[key] = b64encode(zlib.compress(json.dumps(inside[0]).encode())).decode()
            text = json.dumps(value, separators=(",", ":")).encode()
            forged = [*lines[:at], b"%08x %s\n" % (zlib.crc32(text), text), *lines[at + 1 :]]
            place.write_bytes(head + b"".join(forged))
            message = ""
            try:
                list(function([logs], resume=place, **how))
            except SetupError as error:
                message = str(error)
            refused += bool(message)
            assert not message or re.search(r": the journal is damaged at byte [\d,]+", message), (SEED, value)
        assert refused, SEED


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each value in a record, as what holds it and its key."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


# A repair


def repair(logs: Path, out: Path, *more: object) -> tuple[int, str, str]:
    """A repair with quarantine and reports beside what it writes."""
    out.mkdir(exist_ok=True)
    named = ("-o", out / "logs", "--quarantine", out / "q.jsonl", "-r", f"json={out / 'json'}")
    return run("repair", logs, "-t", TOY, "-j", 1, *named, "-r", f"text={out / 'text'}", *more, env=WIDE)


def written(out: Path) -> dict[str, bytes]:
    """Everything that a repair wrote, without times and its own name."""
    files = {name: data for name, data in files_in(out).items() if not name.endswith(".journal")}
    return {name: plain(data, out) if "/" not in name else data for name, data in files.items()}


def plain(data: bytes, out: Path) -> bytes:
    """A report without times and the place of the run."""
    return words(re.sub(re.escape(str(out).encode()), b"", TIMES.sub(b"", data)))


def test_a_finished_repair_is_not_repeated_and_says_the_same(tmp_path: Path) -> None:
    count = examples(5, 8)
    logs = shards(tmp_path / "logs", count)
    _, whole, _ = repair(logs, tmp_path / "whole", "--diff")
    _, first, _ = repair(logs, tmp_path / "out", "--diff", "--resume")
    assert written(tmp_path / "out") == written(tmp_path / "whole")
    stamps = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out" / "logs").iterdir()}
    _, again, err = repair(logs, tmp_path / "out", "--diff", "--resume")
    assert f"{count} of {count} logs were finished before" in err
    assert written(tmp_path / "out") == written(tmp_path / "whole")
    assert stamps == {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out" / "logs").iterdir()}
    printed = [plain(first.encode(), tmp_path / "out"), plain(again.encode(), tmp_path / "out")]
    assert printed == [plain(whole.encode(), tmp_path / "whole")] * 2
    assert "repaired by" in whole
    assert files_in(tmp_path / "out").keys() - files_in(tmp_path / "whole").keys() == {"logs.journal"}


def test_files_that_this_journal_did_not_write_are_refused(tmp_path: Path) -> None:
    logs, out = shards(tmp_path / "logs", 3), tmp_path / "out"
    repair(logs, out, "--resume")
    changed = out / "logs" / "001.jsonl"
    changed.write_bytes(b"mine\n")
    code, _, error = repair(logs, out, "--resume")
    assert code == 2
    assert "001.jsonl: the file exists" in error
    assert changed.read_bytes() == b"mine\n"
    changed.unlink()
    code, _, err = repair(logs, out, "--resume")
    assert "2 of 3 logs were finished before" in err
    repair(logs, tmp_path / "whole")
    assert written(out) == written(tmp_path / "whole")
    _, _, error = repair(logs, out)
    assert "the file exists" in error, "without --resume"


def test_a_changed_log_is_repaired_again_over_its_old_file(tmp_path: Path) -> None:
    logs, out = shards(tmp_path / "logs", 3), tmp_path / "out"
    repair(logs, out, "--resume")
    shutil.copy(FORMATS / "atropos_item.jsonl", logs / "001.jsonl")
    shutil.copy(FORMATS / "areal.jsonl", logs / "009.jsonl")
    _, _, err = repair(logs, out, "--resume")
    assert "2 of 4 logs were finished before" in err
    repair(logs, tmp_path / "whole")
    assert written(out) == written(tmp_path / "whole")
    repair(logs, out, "--resume", "--no-provenance")
    repair(logs, tmp_path / "other", "--no-provenance")
    notice = json.loads((out / "json").read_bytes())["before"]["notices"]
    assert any("other repairs" in line for line in notice)
    assert files_in(out / "logs") == files_in(tmp_path / "other" / "logs")


def test_tokens_trained_twice_are_those_of_all_logs(tmp_path: Path) -> None:
    """Where `once` asks what the run trains, another log may change what is repaired in this one."""
    logs, out = shards(tmp_path / "logs", 3), tmp_path / "out"
    repair(logs, out, "--resume", "--with", "once")
    _, _, err = repair(logs, out, "--resume", "--with", "once")
    assert "3 of 3 logs" in err
    shutil.copy(logs / "000.jsonl", logs / "0000.jsonl")
    _, _, err = repair(logs, out, "--resume", "--with", "once")
    assert "finished before" not in err
    repair(logs, tmp_path / "whole", "--with", "once")
    assert files_in(out / "logs") == files_in(tmp_path / "whole" / "logs")


def test_logs_with_calls_of_one_conversation_are_repaired_together(tmp_path: Path) -> None:
    logs, out = copied(tmp_path / "logs", *CONVERSATIONS), tmp_path / "out"
    repair(logs, out, "--resume")
    _, _, err = repair(logs, out, "--resume")
    assert "5 of 5 logs" in err
    (out / "logs" / "vllm.jsonl").unlink()
    _, _, err = repair(logs, out, "--resume")
    assert "1 of 5 logs" in err
    repair(logs, tmp_path / "whole")
    assert written(out) == written(tmp_path / "whole")


def test_a_dry_run_is_resumed_too(tmp_path: Path) -> None:
    logs, place = shards(tmp_path / "logs", 3), tmp_path / "j"
    _, whole, _ = run("repair", logs, "-t", TOY, "--dry-run", "-f", "json")
    for _ in range(2):
        _, out, err = run("repair", logs, "-t", TOY, "--dry-run", "-f", "json", "--journal", place, "--resume")
        assert TIMES.sub(b"", out.encode()) == TIMES.sub(b"", whole.encode())
    assert "3 of 3 logs" in err


@pytest.mark.skipif(not DEEP, reason="datasets takes seconds to import")
def test_the_metadata_of_a_data_set_is_written_again(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [json.loads(line) for line in (FORMATS / "areal.jsonl").read_text().splitlines()]
    rows = [{name: row[name] for name in ("input_ids", "loss_mask")} for row in rows if "input_ids" in row][:2]
    rows = rows or [{"token_ids": [5, 6], "loss_mask": [0, 1]}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "logs")
    for out in ("out", "out", "whole"):
        code, _, error = repair(tmp_path / "logs", tmp_path / out, *(["--resume"] if out == "out" else []))
        assert code != 2, error
    assert files_in(tmp_path / "out" / "logs") == files_in(tmp_path / "whole" / "logs")


@pytest.mark.skipif(not DEEP, reason="a store takes seconds to start")
def test_logs_and_repaired_logs_in_a_bucket_are_known_by_what_the_store_says(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    from tests.remote.s3 import S3Server

    logs = shards(tmp_path / "logs", 4)
    with closing(S3Server()) as store:
        there = store.upload(logs, "in")

        def remote(*words: str) -> str:
            start, env = [sys.executable, "-m", "tito_audit"], {**os.environ, **WIDE, **store.env}
            done = subprocess.run([*start, *words], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
            assert done.returncode in (0, 1), done.stderr[-2000:]
            return done.stderr

        place = ["--journal", str(tmp_path / "j"), "--resume", "-t", str(TOY), "-j", "1"]
        remote("scan", there, *place)
        assert "4 of 4 logs were finished before" in remote("scan", there, *place)
        out = ["-o", "s3://logs/out", *place]
        remote("repair", there, *out)
        assert "4 of 4 logs were finished before" in remote("repair", there, *out)
        store.put("in/001.jsonl", (logs / "002.jsonl").read_bytes())
        assert "3 of 4 logs were finished before" in remote("scan", there, *place)
        assert "3 of 4 logs were finished before" in remote("repair", there, *out)
        remote("repair", there, "-o", "s3://logs/whole", "-t", str(TOY), "-j", "1")
        for log in ("000.jsonl", "001.jsonl", "002.jsonl", "003.jsonl"):
            assert store.get(f"out/{log}") == store.get(f"whole/{log}")


def test_a_part_that_unpacks_to_more_than_any_run_writes_is_refused_before_it_fills_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert resume._MOST_UNPACKED == 256 << 20
    most = examples(8, 256)
    monkeypatch.setattr(resume, "_MOST_UNPACKED", most << 20)
    bomb = b64encode(zlib.compress(b" " * (most + 44 << 20) + b"1", 1)).decode()
    with pytest.raises(ValueError, match=f"holds more than {most} MiB"):
        unpack(bomb, int)
    assert unpack(pack(7), int) == 7
