"""The page of `show`: every token in its column, what is said of it, places as people give them, hostile logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from tests import command, world
from tests.tables import table
from tests.tiers import crossed, some
from tests.world import FORMATS, ROOT
from tito_audit import Settings, read_rollouts, scan_rollouts
from tito_audit.cli.show import page_lines, parse_place
from tito_audit.errors import SetupError
from tito_audit.record.finding import Result, Where
from tito_audit.report import ReportOptions
from tito_audit.storage import open_log
from tito_audit.terminal.page import console_for
from tito_audit.terminal.sequence import DrawOptions, TokenLine, draw_tokens, logprob_words

LOGS = sorted(path for path in FORMATS.iterdir() if path.suffix != ".py" and path.is_file())
NEMO = "fixtures/formats/nemo_gym.jsonl"
TOY = str(world.TOY)
OWN_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
ACTING = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2064\u2066-\u2069\ufeff]"
)
HOSTILE = (
    "\x1b]0;a title\x07\x1b[2J\x1b[31mred\x1b]52;c;cm0gLXJm\x07\x1b]8;;http://x\x1b\\link\x9b2J"
    "\r\n\x08\u202eturned\u2066\u200b\u2028\ufeff\x00##[error]"
)


def run(*arguments: object, width: int = 100, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command at the root of the checkout."""
    return command.run(*arguments, env={"COLUMNS": str(width), **environment})


def shown(*arguments: object, width: int = 100, **environment: str) -> str:
    code, out, err = run("show", *arguments, width=width, **environment)
    assert (code, err) == (0, "")
    return out


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("NO_COLOR", "FORCE_COLOR", "PAGER"):
        monkeypatch.delenv(name, raising=False)


def named(value: Any) -> str:
    """How a case is called by a log, and by whether there is a tokenizer."""
    if isinstance(value, Path):
        return value.stem
    return value if isinstance(value, str) and value != TOY else "tokens" if value else "ids"


def pages(file: Path, tokenizer: str | None, **look: Any) -> Iterator[tuple[Result, list[str]]]:
    """Every rollout of a log with the lines of its page."""
    scan = scan_rollouts(file, Settings(tokenizer=tokenizer))
    console = console_for(StringIO(), ReportOptions(width=80))
    for result in scan:
        piece = scan.vocabulary.piece if scan.vocabulary is not None else None
        yield (
            result,
            [line.plain for line in page_lines(result, DrawOptions(width=80, piece=piece, **look), console)],
        )


@pytest.mark.parametrize(("file", "tokenizer"), crossed(some(LOGS, 6), (TOY, None)), ids=named)
def test_every_row_of_every_format_is_shown_with_all_of_its_findings(file: Path, tokenizer: str | None) -> None:
    for result, lines in pages(file, tokenizer, ids=True, logprobs=True):
        text = "\n".join(lines)
        assert lines[0].endswith(str(result.place))
        assert text.count("fingerprint ") == len(result.findings)
        assert all(finding.fingerprint in text for finding in result.findings)
        assert all(cell_len(line) <= 80 for line in lines if "│" in line or "…" in line)


def drawn(
    look: DrawOptions, ids: int | np.ndarray, *line: Any, findings: Sequence[tuple[int, int]] = ()
) -> list[str]:
    """The lines that tokens are drawn in: these ids, or so many from 0 on."""
    tokens = TokenLine(np.arange(ids, dtype=np.int32) if isinstance(ids, int) else ids, *line)
    return [line.plain for part in draw_tokens(tokens, look, findings=findings) for line in part.lines]


def columns(lines: list[str]) -> Iterator[dict[str, str]]:
    """What stands in the column of each token, by cells of a terminal: its piece, mark, id and logprob."""
    for at, line in enumerate(lines):
        if re.match(r" *\d+ │", line) is None:
            continue
        edges = [cell_len(line[:place]) for place, char in enumerate(line) if char == "│"]
        below = {"piece": line}
        for other in lines[at + 1 : at + 4]:
            if (named := re.match(r" +(id|logprob)  ", other)) is not None:
                below[named[1]] = other
            elif re.match(r" {10}[ ^=#*]*$", other) is not None:
                below["mark"] = other
            else:
                break
        first = int(line.split("│")[0])
        for number, (left, right) in enumerate(pairwise(edges)):
            values = {name: in_cells(text, left + 1, right) for name, text in below.items()}
            yield {"position": str(first + number), "mark": "", "id": "", "logprob": "", **values}


def in_cells(text: str, left: int, right: int) -> str:
    """What of a line stands in these cells, without blanks."""
    at, inside = 0, ""
    for char in text:
        if left <= at < right:
            inside += char
        at += cell_len(char)
    return inside.strip()


def sequences(lines: list[str]) -> dict[str, list[dict[str, str]]]:
    """The columns of every sequence of a page, by the words that name it."""
    titles = [at for at, line in enumerate(lines) if re.match(r"(turn \d+ \w+|training row) · ", line)]
    parts = pairwise([*titles, len(lines)])
    return {lines[at].split(" · ")[0]: list(columns(lines[at + 1 : end])) for at, end in parts}


@pytest.mark.parametrize("width", some([60, 80, 100, 160], 1))
@pytest.mark.parametrize("file", [NEMO, "fixtures/formats/slime.jsonl", "fixtures/formats/atropos_item.jsonl"])
def test_ids_and_logprobs_stand_under_their_tokens(file: str, width: int) -> None:
    for row, rollout in enumerate(read_rollouts(file)):
        text = shown(f"{file}:{row}", "-t", TOY, "--ids", "--logprobs", "--full", width=width)
        tables = sequences(text.splitlines())
        wanted: dict[str, tuple[Any, Any, Any]] = {}
        for number, turn in enumerate(rollout.turns):
            wanted[f"turn {number} prompt"] = (turn.prompt_ids, None, None)
            wanted[f"turn {number} completion"] = (turn.completion_ids, turn.completion_logprobs, None)
        if rollout.training_row is not None:
            training = rollout.training_row
            wanted["training row"] = (training.token_ids, training.logprobs, training.loss_mask)
        wanted = {name: columns for name, columns in wanted.items() if columns[0] is not None}
        assert sorted(tables) == sorted(wanted)
        for name, (ids, logprobs, trained) in wanted.items():
            assert [cell["id"] for cell in tables[name]] == [str(token_id) for token_id in ids], name
            assert [cell["position"] for cell in tables[name]] == [str(at) for at in range(len(ids))]
            words = [""] * len(ids) if logprobs is None else [logprob_words(logprob) for logprob in logprobs]
            if trained is not None:
                words = [
                    "" if word == "?" and not is_trained else word
                    for word, is_trained in zip(words, trained, strict=True)
                ]
            assert [cell["logprob"].rstrip("!") for cell in tables[name]] == words, name


@pytest.mark.parametrize("width", range(60, 161, 7))
def test_wide_and_combining_characters_keep_their_columns(width: int) -> None:
    pieces = ["日本", "語", " 한국", "👍", "é", "e\u0301", "\u0301", "", " ", "\t", "ก็", "🙂" * 3]
    pieces += ["x" * 90, "日" * 40]
    ids = np.arange(200, dtype=np.int32) * 7 + 100_000
    logprobs = -np.arange(200.0) / 7
    look = DrawOptions(
        width, lambda token_id: pieces[(token_id - 100_000) // 7 % len(pieces)], full=True, ids=True, logprobs=True
    )
    lines = drawn(look, ids, None, logprobs, findings=[(3, 5), (40, 40)])
    cells = list(columns(lines))
    assert [cell["id"] for cell in cells] == [str(token_id) for token_id in ids]
    assert [cell["logprob"].rstrip("!") for cell in cells] == [logprob_words(logprob) for logprob in logprobs]
    assert [number for number, cell in enumerate(cells) if cell["mark"]] == [3, 4, 40]
    assert max(map(cell_len, lines)) <= width


def test_ids_that_the_log_does_not_hold_are_said_to_be_recovered() -> None:
    assert "8 tokens, ended by stop, ids recovered from token texts" in shown(
        "fixtures/formats/openai_chat.jsonl:1", "-t", TOY
    )
    assert "recovered" not in shown("fixtures/formats/sglang.jsonl:1", "-t", TOY)


def test_an_unknown_logprob_is_a_question_and_an_unlikely_token_is_marked() -> None:
    trained, look = np.arange(6) >= 2, DrawOptions(100, "abcdef".__getitem__, logprobs=True)
    cells = columns(drawn(look, 6, trained, np.array([np.nan, -9.0, np.nan, -0.001, -7.0, 0.0])))
    assert [cell["logprob"] for cell in cells] == ["", "-9.00", "?", "-0.00", "-7.00!", "0"]


@pytest.mark.parametrize(*table(__file__, "a_logprob_takes_few_columns_whatever_it_is"))
def test_a_logprob_takes_few_columns_whatever_it_is(value: float, words: str) -> None:
    assert logprob_words(value) == words


@pytest.mark.parametrize(
    ("size", "trained", "mark", "line", "below"),
    [
        (3, None, (3, 3), "       0 │a│b│c│", "                ^"),
        (4, np.arange(4) >= 2, (1, 3), "       0 │a│b│c│d│", "            ^ # ="),
    ],
    ids=["a missing end, behind the last token", "a trained token in a finding, with the mark of both"],
)
def test_tokens_are_marked(size: int, trained: Any, mark: tuple[int, int], line: str, below: str) -> None:
    assert drawn(DrawOptions(80, "abcd".__getitem__), size, trained, findings=[mark]) == [line, below]


def test_what_nothing_is_said_about_is_left_out_and_counted() -> None:
    lines = drawn(DrawOptions(80), 1000, np.arange(1000) >= 950, findings=[(500, 502)])
    text = "\n".join(lines)
    assert "tokens left out" in text
    shown = {int(number) for number in re.findall(r"\d+(?=│)", text)}
    assert {0, 500, 501, 949, 950, 999} <= shown
    assert len(shown) + sum(int(number) for number in re.findall(r"… (\d+) tokens", text)) == 1000
    assert text.count("^^^") == 2
    whole = drawn(DrawOptions(80, full=True), 1000)
    assert {int(number) for line in whole for number in re.findall(r"\d+(?=│)", line)} == set(range(1000))
    assert max(map(len, whole)) <= 80


def test_a_code_and_a_fingerprint_show_their_findings_alone() -> None:
    whole = shown(f"{NEMO}:4", "-t", TOY)
    fingerprint = re.search(r"TOK101.*?fingerprint (\w{16})", whole, re.DOTALL)
    assert fingerprint is not None
    by_code = shown(f"{NEMO}:4", "-t", TOY, "--around", "tok101")
    by_fingerprint = shown(f"{NEMO}:4", "-t", TOY, "--around", fingerprint[1])
    assert by_code == by_fingerprint == shown(f"{NEMO}:4", "-t", TOY, "--around", fingerprint[1][:6])
    assert list(sequences(by_code.splitlines())) == ["turn 1 completion"]
    assert by_code.count("fingerprint ") == 1
    both = shown(f"{NEMO}:4", "-t", TOY, "--around", "TOK101", "--around", "SEQ")
    assert list(sequences(both.splitlines())) == ["turn 1 completion", "turn 2 prompt"]


@pytest.mark.parametrize("name", some(["nemo_gym", "slime", "sglang", "verifiers_v1", "verl_batch"], 3))
def test_every_place_of_the_concise_report_can_be_pasted(name: str) -> None:
    file = f"fixtures/formats/{name}.jsonl"
    _, out, _ = run("scan", file, "-t", TOY, "--report", "concise", "--fail-on", "never")
    lines = [line.split(" ") for line in out.splitlines() if line.startswith(file)]
    assert lines
    for place, code, *_ in lines:
        if code == "REC009":
            continue  # A single row is compared with no other.
        text = shown(place, "-t", TOY, "--context", 1)
        assert re.search(rf"^(error|warning|note) {code}", text, re.MULTILINE), (place, code)
        if not place.endswith(":-"):
            assert "not checked" not in text


@pytest.mark.parametrize(*table(__file__, "a_place_is_read_as_reports_print_it"))
def test_a_place_is_read_as_reports_print_it(tmp_path: Path, rest: str, place: str) -> None:
    log = tmp_path / "a run:7.jsonl"
    log.touch()
    asked = parse_place(f"{log}:{rest}")
    span = asked.span and [asked.span.start, asked.span.end, asked.span.where, asked.span.turn]
    assert asked.log == str(log)
    assert json.loads(json.dumps([asked.row, asked.item, asked.turn, span])) == json.loads(place)


def test_a_file_that_exists_wins_over_a_place(tmp_path: Path) -> None:
    for name in ("run", "run:3", "run:3:1"):
        (tmp_path / name).touch()
    assert parse_place(f"{tmp_path}/run:3").log == f"{tmp_path}/run:3"
    assert parse_place(f"{tmp_path}/run:3").row is None
    longest = parse_place(f"{tmp_path}/run:3:1:2")
    assert (longest.log, longest.row) == (f"{tmp_path}/run:3:1", 2)
    assert parse_place(f"{tmp_path}/run:4:1").turn == 1
    assert parse_place("no-such:3:1:5-9").log == "no-such"
    assert parse_place("x" * 5000 + ":3").row == 3
    with pytest.raises(SetupError, match="names row 3, but --row is 4"):
        parse_place("no-such:3", row=4)


def test_json_holds_every_token_and_finding() -> None:
    whole = json.loads(shown(f"{NEMO}:4", "-t", TOY, "--json"))
    rollout = list(read_rollouts(NEMO))[4]
    completions = [part for part in whole["sequences"] if part["where"] == "completion"]
    for turn, sequence in zip(rollout.turns, completions, strict=True):
        assert turn.completion_ids is not None
        assert sequence["ids"] == turn.completion_ids.tolist()
        assert len(sequence["pieces"]) == len(sequence["ids"])
        assert sequence["logprobs"] == (
            None if turn.completion_logprobs is None else turn.completion_logprobs.tolist()
        )
    assert [finding["code"] for finding in whole["findings"]] == [
        finding.code for finding in scan_of(NEMO, 4).findings
    ]
    one_turn = json.loads(shown(f"{NEMO}:4:1", "-t", TOY, "--json"))
    assert {entry["turn"] for entry in (*one_turn["sequences"], *one_turn["findings"])} == {1}


def scan_of(file: str, row: int) -> Result:
    return next(result for result in scan_rollouts(file, Settings(tokenizer=TOY, row=row)) if not result.of_log)


def poisoned(value: Any) -> Any:
    """The same with something hostile behind every text."""
    if isinstance(value, dict):
        return {name: poisoned(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return value + HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    crossed(("nemo_gym", "slime", "openai_chat", "vllm", "verifiers_v1", "tinker", "nemo_rl"), (("-t", TOY), ())),
    ids=named,
)
def test_nothing_that_a_log_says_acts_on_a_terminal(tmp_path: Path, name: str, tokenizer: tuple[str, ...]) -> None:
    log = tmp_path / f"a\x1b]0;name\x07{name}.jsonl"
    rows = (FORMATS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    log.write_text("".join(json.dumps(poisoned(json.loads(row))) + "\n" for row in rows), encoding="utf-8")
    for row in some(range(len(rows)), 2):
        for options in (["--full"], ["--json"]):
            colored = shown(f"{log}:{row}", *tokenizer, *options, FORCE_COLOR="1")
            text = OWN_ESCAPES.sub("", colored)
            assert (text == colored) == (options == ["--json"])
            assert ACTING.search(text) is None
            assert "##[" not in text


def test_hostile_tokens_of_a_vocabulary_are_seen_and_do_not_act() -> None:
    look = DrawOptions(80, lambda token_id: HOSTILE[token_id], ids=True, full=True)
    text = "\n".join(drawn(look, len(HOSTILE)))
    assert ACTING.search(text) is None
    assert "│␛ │" in text
    assert "\\u202e" in text


def test_a_row_is_found_without_a_look_at_the_others(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    rows = ['{"token_ids": [1', "", '{"token_ids": [2]}', "nonsense", '{"token_ids": [3, 4]}', '{"token_ids": [5']
    log.write_text("\n".join(rows) + "\n", encoding="utf-8")
    source = open_log(log)
    source.only = 4
    read = list(source)
    assert [row.value for row in read if row.index == 4] == [{"token_ids": [3, 4]}]
    assert all(row.value is None and row.error == "the row was passed over" for row in read if row.index != 4)
    assert source.count() == 6
    assert "│3│4│" in shown(f"{log}:4")
    assert "REC001" in shown(f"{log}:5")
    assert "blank line" in run("show", f"{log}:1")[2]


def test_a_row_of_parquet_is_read_out_of_its_row_group_alone(tmp_path: Path) -> None:
    log = tmp_path / "run.parquet"
    pq.write_table(
        pa.table({"token_ids": [[number, number + 1] for number in range(100)]}), log, row_group_size=10
    )
    about = pq.ParquetFile(log).metadata.row_group(0).column(0)
    data = bytearray(log.read_bytes())
    data[about.data_page_offset : about.data_page_offset + about.total_compressed_size] = (
        b"\xff" * about.total_compressed_size
    )
    log.write_bytes(data)
    assert "│57│58│" in shown(f"{log}:57")
    assert "│99│100│" in shown(f"{log}:99")
    assert "it holds 100 rows" in run("show", f"{log}:100")[2]


def test_findings_stand_beneath_the_stretch_where_they_end() -> None:
    result = scan_of(NEMO, 4)
    hit = replace(result.findings[0].hit, where=Where.PROMPT, turn=0)
    findings = tuple(replace(result.findings[0], hit=replace(hit, start=at, end=at + 1)) for at in (20, 90))
    console = console_for(StringIO(), ReportOptions(width=80))
    text = "\n".join(
        line.plain for line in page_lines(replace(result, findings=findings), DrawOptions(80, context=4), console)
    )
    order = [
        text.index(part)
        for part in ("\n      16 │", "prompt 20:21", "\n      86 │", "prompt 90:91", "\n     121 │")
    ]
    assert order == sorted(order)
