"""The line that shows how far a run is: share, time left, rows, speed; drawn on a terminal, else now and then."""

from __future__ import annotations

import gzip
import os
import pty
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from tests.command import become, run
from tests.tiers import DEEP, examples
from tests.world import FORMATS, TOY
from tito_audit import Settings
from tito_audit.run.repair import Repairs
from tito_audit.run.scan import Scan
from tito_audit.settings.model import RepairSettings
from tito_audit.storage.journal import Journal
from tito_audit.terminal import terminal
from tito_audit.terminal.terminal import ProgressLine, RunProgress, with_progress

ROWS = (FORMATS / "generic.jsonl").read_bytes()
HOUR = 3600.0


@pytest.fixture(params=["a.jsonl", "a.jsonl.gz"] if DEEP else ["a.jsonl.gz"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A log that takes a moment."""
    return repeated(tmp_path / request.param, examples(4, 200))


def repeated(path: Path, times: int) -> Path:
    path.write_bytes(gzip.compress(ROWS * times, 1) if path.suffix == ".gz" else ROWS * times)
    return path


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is drawn all the time, except by a process that `make deep` starts."""
    monkeypatch.setattr(terminal, "_REDRAW_SECONDS", 0.002)
    monkeypatch.setattr(terminal, "_EARLY_SECONDS", 0.0)


def on_terminal(*arguments: object) -> str:
    """What the command writes to a terminal, with a few lines of its own at the end."""
    pid, end = pty.fork()
    if not pid:
        become(*arguments, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"})
    output = b""
    while True:
        try:
            block = os.read(end, 1 << 16)
        except OSError:
            break
        if not block:
            break
        output += block
    os.waitpid(pid, 0)
    os.close(end)
    return output.decode()


LINE = r"\d+:\d\d · \d+% · (?:\w[\w ()]* · )?(?:about \d+ s left · )?[\d,]+ rows · [\d,.]+ rows/s · [\d,.]+ MB/s"


def test_a_scan_shows_share_rows_speed_and_the_time_left(log: Path) -> None:
    repeated(log, examples(8, 200))
    screen = on_terminal("scan", log, "-t", TOY, "--jobs", 1, "--fail-on", "never", "--worst", 0)
    lines = re.findall(LINE, screen)
    assert lines, screen[-2000:]
    shares = [int(line.split(" · ")[1].rstrip("%")) for line in lines]
    assert "about 5 s left" in screen
    assert re.search(r"\d tokens/s|\dk tokens/s", screen)
    assert shares == sorted(shares)
    assert shares[-1] > 50, "the share is of the bytes as they are stored"


@pytest.mark.parametrize(
    ("words", "phases"),
    [
        (("-o", "OUT"), ["repairing (1 of 2)", "scanning the result (2 of 2)"]),
        (("--dry-run",), ["repairing"]),
    ],
)
def test_a_repair_shows_its_phases(log: Path, tmp_path: Path, words: tuple[str, ...], phases: list[str]) -> None:
    how = (str(tmp_path / f"out-{log.name}") if word == "OUT" else word for word in words)
    screen = on_terminal("repair", log, *how, "-t", TOY, "--jobs", 1, "--fail-on", "never")
    shown = [line.split(" · ")[2] for line in re.findall(LINE, screen)]
    assert list(dict.fromkeys(shown)) == phases, screen[-2000:]


def test_identify_says_what_it_is_at(log: Path) -> None:
    screen = on_terminal("identify", log, "-t", TOY)
    assert re.findall(r"0:00 · (reading|loading|trying)", screen)[0] == "reading"
    assert "trying 1 tokenizer" in screen


def test_nothing_is_drawn_without_a_terminal_or_when_quiet(log: Path) -> None:
    options = ("-t", TOY, "--jobs", 1, "--fail-on", "never", "--worst", 0)
    assert run("scan", log, *options)[2] == ""
    assert "rows" not in on_terminal("scan", log, *options, "--quiet", "-r", "json=/dev/null")


def test_without_a_terminal_there_is_a_line_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_LINE_SECONDS", 0.02)
    pace = RunProgress()

    def results() -> Iterator[None]:
        for rows in range(1, 4):
            pace(rows, rows * 10_000_000, 40_000_000)
            time.sleep(0.05)
            yield

    with (tmp_path / "stderr").open("w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert len(list(with_progress(results(), pace))) == 3
        assert len(list(with_progress(results(), pace, silent=True))) == 3
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert 2 < len(lines) < 15
    assert all(re.match(r"tito-audit: 0:00 · \d+% · .*[123] rows", line) for line in lines), lines
    assert "rows/s" in lines[-1], "speed is measured between the lines"


def test_the_rows_of_a_chunk_are_counted_while_another_process_works_on_it(tmp_path: Path) -> None:
    log, times = tmp_path / "a.jsonl", examples(10, 20)
    log.write_bytes(ROWS * times)
    rows = (ROWS * times).count(b"\n")
    for repairs in (False, True):
        pace = RunProgress()
        settings = Settings(tokenizer=str(TOY), jobs=2)
        whole: Scan | Repairs = Scan([str(log)], settings, pace)
        if repairs:
            whole = Repairs([str(log)], None, settings, RepairSettings(), pace)
            whole.batch_bytes = 1 << 30
        else:
            whole.chunk_bytes = 1 << 30  # type: ignore[union-attr]
        seen, ended = set[tuple[int, int, int]](), threading.Event()

        def watch(
            pace: RunProgress = pace, seen: set[tuple[int, int, int]] = seen, ended: threading.Event = ended
        ) -> None:
            while not ended.wait(0.001):
                seen.add(pace.at(0.0)[1:4])

        watching = threading.Thread(target=watch)
        watching.start()
        assert len(list(whole)) >= rows
        ended.set()
        watching.join()
        assert len({count for count, _, _ in seen}) > 5, "not only none and all"
        assert len({tokens for _, _, tokens in seen}) > 5
        assert repairs or len({done for _, done, _ in seen}) > 5
        assert pace.at(0.0)[1:3] == (rows, log.stat().st_size), "and none is counted twice"


def test_logs_that_an_earlier_run_finished_are_no_measure_of_speed(tmp_path: Path) -> None:
    logs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for log in logs:
        log.write_bytes(ROWS)
    with closing(Journal(tmp_path / "journal")):
        pass
    settings = Settings(tokenizer=str(TOY), jobs=1)
    list(Scan([str(logs[0])], settings, resume=tmp_path / "journal"))
    calls: list[tuple[int, int, int]] = []
    list(Scan([*map(str, logs)], settings, lambda *call: calls.append(call), resume=tmp_path / "journal"))
    rows, done, total = calls[-1]
    assert (done, total) == (len(ROWS), len(ROWS))
    assert rows > ROWS.count(b"\n"), "but their rows are counted"


def estimates(share_at: dict[float, float], step: float = 0.25) -> list[tuple[float, float]]:
    """(seconds, estimated seconds left) of a run that is so far at these times, and between them in proportion."""
    pace = RunProgress()
    line, times, shown = ProgressLine(pace), sorted(share_at), []
    for number in range(round(times[-1] / step)):
        now = number * step
        after = next(time for time in times if time > now)
        before = max(time for time in times if time <= now)
        part = (now - before) / (after - before)
        share = share_at[before] + part * (share_at[after] - share_at[before])
        pace(1 + int(share * 1e6), 1 + int(share * 1e9), 10**9)
        words = next((part for part in line.parts(now)[0] if part.startswith("about")), None)
        if words is not None:
            numbers = re.findall(r"(\d+) (s|min|h)", words)
            shown.append((now, sum(int(n) * {"s": 1, "min": 60, "h": HOUR}[unit] for n, unit in numbers)))
    return shown


@pytest.mark.parametrize("total", [30.0, 600.0, 5 * HOUR])
def test_the_estimate_of_a_steady_run_is_right_from_the_first(total: float) -> None:
    for now, left in estimates({0.0: 0.0, total: 1.0}, total / 400):
        assert left == pytest.approx(total - now, rel=0.15, abs=40)


def test_the_estimate_follows_a_run_that_gets_slow_without_a_leap() -> None:
    """One minute for the first half of the bytes, and fourteen for the other: an average from the start is wrong
    for long, and the speed of the last seconds leaps."""
    shown = estimates({0.0: 0.0, 60.0: 0.5, 900.0: 1.0})
    for (_, before), (_, after) in pairwise(shown):
        assert abs(after - before) <= max(60, 0.15 * before)
    later = dict(shown)
    assert later[240.0] == pytest.approx(660, rel=0.4)
    assert later[600.0] == pytest.approx(300, rel=0.2)


def test_the_estimate_does_not_swing_with_the_chunks() -> None:
    """Half of the time nothing moves: chunks of eight seconds, whose rows come all at once."""
    steps = {0.0: 0.0}
    for number in range(1, 60):
        steps[8.0 * number - 1] = (number - 1) / 60
        steps[8.0 * number] = number / 60
    shown = [(now, left) for now, left in estimates(steps) if now > 40]
    for now, left in shown:
        assert left == pytest.approx(480 - now, rel=0.35, abs=60)


def test_a_limit_is_what_there_is_to_do() -> None:
    pace = RunProgress(limit=50)
    pace(10, 10, 10**9)
    assert pace.at(0.0).share == 0.2


def test_a_line_has_as_many_parts_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ["0:02", "20%", "about 2 min left", "12,345 rows", "3,142 rows/s"]
    for columns, text in (
        (200, "━━━━──────────────── 0:02 · 20% · about 2 min left · 12,345 rows · 3,142 rows/s"),
        (70, "0:02 · 20% · about 2 min left · 12,345 rows · 3,142 rows/s"),
        (50, "0:02 · 20% · about 2 min left · 12,345 rows"),
        (4, "0:0"),
    ):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert terminal._fit_line(parts, 0.2, 2) == text
