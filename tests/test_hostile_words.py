"""What logs say, in every text that they hold, does nothing to whoever shows what a command prints or writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markdown_it import MarkdownIt

from tests import command
from tests.runner import commands
from tests.tables import stored
from tests.tiers import DEEP, examples, some
from tests.world import FORMATS, ROOT
from tito_audit.reports import all_reports

TOY = str(ROOT / "fixtures" / "tokenizers" / "toy_bpe")
REPORTS = tuple(report.name for report in all_reports())
OWN_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
ACTING = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
FLOOD = re.compile("[\u0300-\u036f]{8}")
TRAPS = {
    "script": "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=2>--> ]]>",
    "runner": "::error::x\n::error file=a::x\r\n ::stop-commands::x\r::warning::y ##[error]x ##vso[a]d %0A::debug",
    "after blanks": "   ::error::x",
    "markdown": "@someone #1 http://x.example [a](b) ![i](j) | a | b ` `` ``` **b** </details> <b>",
    "terminal": "\x1b[31mred\x1b[2J\x1b]8;;http://x\x1b\\l\x1b]8;;\x1b\\\x1b]52;c;cm0gLXJm\x07\x07\r\x08\x9b2J\x7f\x00",
    "letters": "\u202eturned\u202c\u2066\u200b\u200d\u2028\u2029\x85\ufeff\ud83d\udcff\ufff9\U000e0041\u3164",
    "marks": "e" + "\u0301" * examples(40, 400),
}
"""What a model may say to make somebody's terminal, page or runner do something."""
POISONED = ("nemo_gym", "slime", "openai_chat", "nemo_rl", "tito_sample")
"""Formats whose rows are poisoned: in `make test` two of them with each trap."""
TOGETHER = [(name,) for name in TRAPS] if DEEP else [tuple(TRAPS)]
"""The traps of each log: all in one, or in `make deep` one alone."""


def run(*arguments: object, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    return command.run(*arguments, env={"COLUMNS": "80", **environment})


def poisoned(value: Any, trap: str, *, keys: bool) -> Any:
    """The same with the trap as every text but roles and types, or in every text and key there is."""
    if isinstance(value, dict):
        fields = {
            name: inner if name in ("role", "type") and not keys else poisoned(inner, trap, keys=keys)
            for name, inner in value.items()
        }
        return {**fields, trap: trap, f"a{trap}": {trap: [trap]}} if keys else fields
    if isinstance(value, list):
        return [poisoned(inner, trap, keys=keys) for inner in value]
    return trap + value + trap if isinstance(value, str) else value


def encodable(text: str) -> str:
    """The text without halves of surrogate pairs, for places that hold UTF-8 only."""
    return text.encode("utf-8", "replace").decode()


def hostile_rows(trap: str) -> Iterator[str]:
    """Rows of many formats with the trap in them, of no format, unreadable ones, very long and very deep ones."""
    first = [*TRAPS.values()].index(trap)
    for name in POISONED if DEEP else (POISONED * 2)[first % len(POISONED) :][:2]:
        path = FORMATS / f"{name}.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines()[: examples(1, 2)]:
            for keys in (False, True):
                yield json.dumps(poisoned(json.loads(line), trap, keys=keys))
    called = {"id": trap, "type": "function", "function": {"name": trap, "arguments": json.dumps({trap: trap})}}
    messages = [
        {"role": "system", "content": trap},
        {"role": "user", "content": [{"type": "text", "text": trap}, {"type": trap, trap: trap}]},
        {"role": "assistant", "content": trap, "tool_calls": [called], "reasoning_content": trap},
        {"role": "tool", "tool_call_id": trap, "name": trap, "content": trap},
        {"role": trap, "content": trap},
        {"role": "assistant", "content": trap},
    ]
    call = {"prompt_token_ids": [5, 6], "generation_token_ids": [7, 8, 300], "finish_reason": trap, "text": trap}
    tools = [{"type": "function", "function": {"name": trap, "description": trap, "parameters": {trap: trap}}}]
    yield json.dumps({"id": trap, "group_id": trap, "messages": messages, "tools": tools, "calls": [call, call]})
    ids = {"token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, 0.5, 0.0]}
    yield json.dumps({**ids, "group_id": trap, trap: trap})
    for column in ids:
        yield json.dumps({**ids, column: [trap, 1, 2, 3]})
        yield json.dumps({**ids, column: trap})
    yield json.dumps({trap: trap})
    yield json.dumps(trap)
    yield '{"token_ids": [1, ' + json.dumps(encodable(trap), ensure_ascii=False)
    if trap != TRAPS["runner"]:
        return
    yield json.dumps({**ids, "text": trap * examples(1_000, 20_000)})
    yield '{"messages": ' + "[" * 50_000 + json.dumps(trap) + "]" * 50_000 + "}"


@pytest.fixture(scope="module", params=TOGETHER, ids=lambda names: names[0] if DEEP else "all")
def traps(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(TRAPS[name] for name in request.param)


def file_name(traps: Sequence[str]) -> str:
    """A name that says the traps, each as long as there is room for it."""
    parts = [encodable(trap).replace("/", "\u2215").replace("\0", "") for trap in traps]
    return "".join(part[: 60 if len(parts) == 1 else 20] for part in parts)


@pytest.fixture(scope="module")
def logs(traps: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same words in lines and in Parquet, in a file whose name says them as well."""
    folder = tmp_path_factory.mktemp("logs")
    lines = folder / f"{file_name(traps)}.jsonl"
    rows = [row + "\n" for trap in traps for row in hostile_rows(trap)]
    lines.write_text("".join(rows), encoding="utf-8")
    ids = {"token_ids": [5, 6, 7, 300], "loss_mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, 0.5, 0.0]}
    words = [encodable(trap) for trap in traps]
    ids |= dict(zip(words, words, strict=True))  # type: ignore[arg-type]
    whole = [{**ids, "group_id": text, "messages": [{"role": text, "content": text}]} for text in words]
    table = folder / f"{file_name(traps)}.parquet"
    pq.write_table(
        pa.Table.from_pylist([record for row in whole for record in (row, {**row, "loss_mask": [1]})]), table
    )
    return {"lines": lines, "parquet": table}


def holds_still(text: str, *, colored: bool = False) -> None:
    """No line of it acts on a terminal or on a runner."""
    plain = OWN_ESCAPES.sub("", text) if colored else text
    assert ACTING.search(plain) is None, repr(plain[max(0, ACTING.search(plain).start() - 80) :][:160])  # type: ignore[union-attr]
    assert commands(plain) == []
    assert "##vso[" not in plain
    assert FLOOD.search(plain) is None


COMMANDS = stored(__file__, "COMMANDS")
"""Every command that prints what is in a log, by a name; `show` prints a row and the next."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "lines") for name in some(list(COMMANDS), 4)),
        *((name, "parquet") for name in ("scan", "show", "repair", "convert", "inspect")),
    ],
)
def test_what_a_command_prints_holds_still(
    name: str, kind: str, traps: tuple[str, ...], logs: dict[str, Path], tmp_path: Path
) -> None:
    per_trap = [2 if kind == "parquet" else len(list(hostile_rows(trap))) for trap in traps]
    firsts = [sum(per_trap[:number]) for number in range(len(traps))]
    log = logs[kind]
    for row in firsts if name.startswith("show") else [0]:
        places = {"log": log, "row": row, "next": row + 1, "toy": TOY, "out": tmp_path, "stem": log.stem}
        prints_still([word.format(**places) for word in COMMANDS[name].split()])


def prints_still(arguments: list[object]) -> None:
    """A command holds still, whether it may use colours or not."""
    code, out, err = run(*arguments)
    assert code in (0, 1, 2)
    assert out or err
    for text in (out, err):
        holds_still(text)
    if out.startswith("{"):
        return
    _, out, err = run(*arguments, FORCE_COLOR="1")
    for text in (out, err):
        holds_still(text, colored=True)


@pytest.mark.parametrize("arguments", stored(__file__, "MISTAKES"))
def test_what_a_mistake_is_told_with_holds_still(arguments: str, traps: tuple[str, ...], tmp_path: Path) -> None:
    for trap in traps:
        tells_still(arguments.split(), trap, tmp_path)


def tells_still(arguments: list[str], trap: str, folder: Path) -> None:
    """A command that is given a trap, in its arguments or in a file that they name, holds still."""
    word = encodable(trap).replace("\0", "")
    log = folder / f"{file_name([trap])}.jsonl"
    log.write_text("".join(row + "\n" for row in some(list(hostile_rows(trap)), 6)), encoding="utf-8")
    template = folder / "chat.jinja"
    template.write_text(f"{{{{ raise_exception({json.dumps(word, ensure_ascii=False)}) }}}}", encoding="utf-8")
    config = folder / "tito-audit.toml"
    config.write_text(f"{json.dumps(word)} = {json.dumps(word)}\n", encoding="utf-8")
    places = {"LOG": str(log), "TEMPLATE": str(template), "CONFIG": str(config), "TOY": TOY}
    code, out, err = run(*(places.get(name, name).replace("TRAP", word) for name in arguments), HF_HUB_OFFLINE="1")
    assert code in (0, 1, 2)
    holds_still(out)
    holds_still(err)


@pytest.fixture(scope="module")
def written(logs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every report of the hostile logs."""
    folder = tmp_path_factory.mktemp("reports")
    named = [part for name in REPORTS for part in ("--report", f"{name}={folder / name}")]
    code, out, err = run("scan", *logs.values(), "-t", TOY, "-q", *named, "--max-rate", "TOK=0.001")
    assert (code, out, err) == (1, "", "")
    return folder


def read(folder: Path, name: str) -> str:
    return (folder / name).read_bytes().decode("utf-8")


@pytest.mark.parametrize("name", [name for name in REPORTS if name not in ("github", "html")])
def test_what_a_report_writes_holds_still(name: str, written: Path) -> None:
    holds_still(read(written, name))


def test_annotations_are_all_that_github_reads(written: Path) -> None:
    text = read(written, "github")
    read_by_github = commands(text)
    assert len(read_by_github) == text.count("\n") > 1
    assert {annotation.name for annotation in read_by_github} <= {"error", "warning", "notice"}
    assert {key for annotation in read_by_github for key in annotation.properties} <= {"file", "line", "title"}
    assert ACTING.search(text) is None


def test_markdown_holds_no_link_image_html_or_table_of_a_log(written: Path) -> None:
    reader = MarkdownIt("commonmark", {"html": True, "linkify": False}).enable("table")
    tokens = [
        part for token in reader.parse(read(written, "markdown")) for part in (token, *(token.children or ()))
    ]
    assert not [
        token for token in tokens if token.type in ("link_open", "image", "heading_open") and token.tag != "h3"
    ]
    html = "".join(token.content for token in tokens if token.type.startswith("html"))
    assert not re.sub(r"</?(details|summary)( open)?>|[\w ,.:'()-]|\n", "", html), html
    outside = " ".join(token.content for token in tokens if token.type == "text")
    assert not re.search(r"[@#]\w|http|\bwww\.", outside), outside


def test_junit_is_xml_of_its_own_elements(written: Path) -> None:
    tags = {element.tag for element in ElementTree.fromstring(read(written, "junit")).iter()}
    own = "testsuites testsuite testcase failure skipped system-out properties property"
    assert tags <= set(own.split())


def test_what_a_page_holds_of_a_log_is_text(written: Path) -> None:
    page = read(written, "html")
    assert ACTING.search(page) is None
    assert "<script>window" not in page
    assert "<img" not in page
    assert page.count("<script>") + page.count("<script ") == page.count("</script>")
    assert "pwned=1" not in re.sub(r"<script[^>]*data-kind.*?</script>", "", page, flags=re.S).replace(
        "&lt;script&gt;window.pwned=1", ""
    )


@pytest.mark.parametrize("name", ["json", "jsonl", "sarif"])
def test_machines_get_the_words_as_they_were(name: str, written: Path) -> None:
    text = read(written, name)
    for document in text.splitlines() if name == "jsonl" else [text]:
        json.loads(document)
