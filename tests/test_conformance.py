"""The drift table: templates, builders and conversations, each cell with its proof.

What a template writes is worked out again here by plain jinja2, and a token is a byte or a control token, so that
no code is shared with what is tested.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tests.command import run
from tests.template_oracle.sources import needed
from tests.tiers import DEEP

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "conformance.md"
START, END = "<!-- drift table -->\n", "<!-- end of drift table -->\n"
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and m.reasoning_content %}{%- if SHOWN %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{%- endif %}"
    "{%- endif %}{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name }}"
    "{{ call.function.arguments | tojson }}{{ '</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
KEEPS, STRIPS = CHATML.replace("SHOWN", "true"), CHATML.replace("SHOWN", "loop.last")


def template(folder: Path, source: str, name: str = "mine") -> Path:
    path = folder / f"{name}.jinja"
    path.write_text(source, encoding="utf-8")
    return path


def cells(*arguments: object) -> list[dict[str, Any]]:
    code, out, error = run("conformance", *arguments, "-f", "json")
    assert code == 0, error
    return list(json.loads(out)["cells"])


def of(rows: list[dict[str, Any]], builder: str, conversation: str) -> dict[str, Any]:
    (row,) = [row for row in rows if (row["builder"], row["conversation"]) == (builder, conversation)]
    return row


def test_a_template_that_only_appends_keeps_what_was_sampled_as_it_writes_it(tmp_path: Path) -> None:
    rows = cells("--chat-template", template(tmp_path, KEEPS))
    rendered = Counter(row["outcome"] for row in rows if row["builder"] == "render")
    assert rendered["kept"] > 30
    assert set(rendered) <= {"kept", "broken", "not sampled"}
    broken = {row["conversation"] for row in rows if row["builder"] == "render" and row["outcome"] == "broken"}
    others = {"in other tokens", "with compact JSON", "with another end token"}
    assert {name.split(" ", 2)[2].removeprefix("call ") for name in broken} == others
    assert of(rows, "render", "an answer in other tokens")["cause"].startswith("re-tokenized")
    spliced = {row["outcome"] for row in rows if row["builder"] == "splice"}
    assert spliced == {"kept"}


def test_a_break_is_where_plain_jinja_shows_it_and_names_the_line(tmp_path: Path) -> None:
    lines = STRIPS.replace("{%- endif %}{{ m.content", "\n{%- endif %}\n{{ m.content")
    rows = cells("--chat-template", template(tmp_path, lines))
    row = of(rows, "render", "answer with reasoning, then the user")
    write = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(lines).render
    asked, answer, again = (
        {"role": "user", "content": "What is the weather in Paris?"},
        {
            "role": "assistant",
            "content": "It is sunny in Paris.",
            "reasoning_content": "They ask for the weather, so I look it up.",
        },
        {"role": "user", "content": "And in Rome?"},
    )
    sampled = write(messages=[asked, answer], add_generation_prompt=False)
    after = write(messages=[asked, answer, again], add_generation_prompt=True)
    shared = next(at for at, (left, right) in enumerate(zip(sampled, after, strict=False)) if left != right)
    controls = r"<\|im_start\|>|<\|im_end\|>|</?think>"
    tokens = len(re.sub(controls, "", sampled[:shared])) + len(re.findall(controls, sampled[:shared]))
    # A pair of letters of the stand-in is one token.
    tokens -= len(re.findall("su|nn|Pa|we", sampled[:shared]))
    assert (row["outcome"], row["turn"], row["at"]) == ("broken", 0, tokens)
    assert row["cause"] == "drops earlier reasoning"
    assert row["line"] == lines[: lines.index("loop.last")].count("\n") + 1
    assert "loop.last" in row["detail"]
    assert row["sampled"].startswith("<think>They ask")
    assert row["next"].startswith("It is sunny")
    assert of(rows, "splice", "answer with reasoning, then the user")["outcome"] == "forked"


def test_a_cut_answer_without_its_end_is_off_template(tmp_path: Path) -> None:
    rows = cells("--chat-template", template(tmp_path, KEEPS))
    row = of(rows, "verl", "an answer cut by the limit")
    assert row["outcome"] == "off template"
    assert row["sampled"].startswith("<|im_end|>")
    assert row["next"].startswith("\n<|im_start|>user")
    assert of(rows, "nemo-rl", "an answer cut by the limit")["outcome"] == "kept"


def test_a_builder_that_takes_results_of_tools_only_says_so(tmp_path: Path) -> None:
    rows = cells("--chat-template", template(tmp_path, KEEPS))
    plain, tools = of(rows, "trl", "answer, then the user"), of(rows, "trl", "tool call, then its result")
    assert (plain["outcome"], plain["cause"]) == ("not taken", "it appends results of tools only")
    assert tools["outcome"] == "kept"


def test_two_runs_give_the_same_bytes_and_a_folder_holds_what_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "templates"
    folder.mkdir()
    template(folder, KEEPS, "keeps")
    template(folder, STRIPS, "strips")
    for out in ("one", "two"):
        assert run("conformance", "--chat-template", folder, "-o", tmp_path / out)[0] == 0
    for name in ("drift.jsonl", "drift.parquet", "index.html"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "one" / "drift.jsonl").read_text("utf-8").splitlines()]
    assert {row["template"] for row in rows} == {"keeps", "strips"}
    assert {row["template_sha256"] for row in rows} == {
        sha256(text.encode()).hexdigest() for text in (KEEPS, STRIPS)
    }
    code, _, error = run("conformance", "--chat-template", folder, "-o", tmp_path / "one")
    assert code == 2
    assert "--force" in error


def test_a_change_for_the_worse_fails_and_is_named(tmp_path: Path) -> None:
    path = template(tmp_path, KEEPS)
    run("conformance", "--chat-template", path, "-o", tmp_path / "old")
    old = tmp_path / "old" / "drift.jsonl"
    code, page, _ = run("conformance", "--chat-template", path, "--against", old)
    assert (code, page.splitlines()[-1]) == (0, "passed: nothing got worse")
    template(tmp_path, STRIPS)
    code, page, _ = run("conformance", "--chat-template", path, "--against", old)
    assert code == 1
    assert (
        "worse: mine, render, answer with reasoning, then the user: kept → broken; drops earlier reasoning" in page
    )
    assert re.fullmatch(r"failed: \d+ cells got worse", page.splitlines()[-1])
    template(tmp_path, KEEPS)
    old.write_text(old.read_text("utf-8").replace('"outcome": "kept"', '"outcome": "off template"'), "utf-8")
    assert run("conformance", "--chat-template", path, "--against", old)[0] == 0, "better is not worse"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "there is no template to try"),
        (("--chat-template", "missing"), "there is no Jinja file here"),
        (("-t", "missing-folder/"), "missing-folder"),
    ],
)
def test_a_mistake_gets_one_clear_message(arguments: tuple[str, ...], words: str) -> None:
    code, _, error = run("conformance", *arguments)
    assert code == 2
    assert words in error
    assert "Traceback" not in error


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    path, old = template(tmp_path, KEEPS), tmp_path / "old.jsonl"
    for text, words in (
        ("{}\n", "line 1 is no cell"),
        ('{"corpus": 0}\n', "line 1 is no cell"),
        ("\xff", "no cell"),
    ):
        old.write_text(text, "utf-8")
        code, _, error = run("conformance", "--chat-template", path, "--against", old)
        assert code == 2
        assert words in error


def test_a_hostile_template_neither_runs_code_nor_reaches_the_page_unescaped(tmp_path: Path) -> None:
    hostile = (
        KEEPS + "{# <script>alert(1)</script> #}{{ '<img src=x onerror=alert(1)>' if add_generation_prompt }}"
    )
    path = template(tmp_path, hostile, "<b>name")
    assert run("conformance", "--chat-template", path, "-o", tmp_path / "out")[0] == 0
    page = (tmp_path / "out" / "index.html").read_text("utf-8")
    assert "<img" not in page
    assert "<b>name" not in page
    assert page.count("<script>") == 1
    assert "default-src 'none'" in page


def test_the_conversations_change_only_with_their_version() -> None:
    from tito_audit.conformance import CORPUS, CORPUS_VERSION

    wires = [
        (each.name, each.sampled, [message.wire for message in each.probe.messages], len(each.probe.tools))
        for each in CORPUS
    ]
    digest = sha256(json.dumps(wires, default=dict, sort_keys=True).encode()).hexdigest()[:16]
    assert len({each.name for each in CORPUS}) == len(CORPUS) >= 40
    assert (CORPUS_VERSION, digest) == (1, "b86a432824b44548"), "a changed conversation needs a new CORPUS_VERSION"


@pytest.mark.skipif(not DEEP, reason="a minute: in make deep")
def test_the_table_in_the_docs_is_what_the_command_shows() -> None:
    files = needed()
    rows = cells(*(argument for path in files.values() for argument in ("--chat-template", path)))
    lines = list(table_lines(files, rows))
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(START)[0], text.partition(END)[2]
    wanted = before + START + "".join(line + "\n" for line in lines) + END + after
    if os.environ.get("UPDATE_GOLDENS"):
        PAGE.write_text(wanted, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == wanted


def table_lines(files: dict[str, Path], rows: list[dict[str, Any]]) -> list[str]:
    builders = list(dict.fromkeys(row["builder"] for row in rows))
    lines = [f"| template | {' | '.join(builders)} | way out |", f"| --- |{' ---: |' * len(builders)} --- |"]
    compared = ("kept", "forked", "off template", "broken", "raises")
    for name, path in files.items():
        scores = []
        for builder in builders:
            counts = Counter(
                row["outcome"] for row in rows if (row["template"], row["builder"]) == (name, builder)
            )
            total, forks = sum(counts[each] for each in compared), counts["forked"]
            scores.append(f"{counts['kept']}{f' + {forks}' if forks else ''} of {total}" if total else "–")
        lines.append(f"| `{name}` | {' | '.join(scores)} | {way_out(path)} |")
    return lines


def way_out(path: Path) -> str:
    """What `tito-audit template` advises, in a few words."""
    code, page, _ = run("template", "--chat-template", path)
    advice = re.search(r"^  change +(.*?)(?=^  gateway)", page, re.MULTILINE | re.DOTALL)
    words = " ".join(advice[1].split()) if advice else ""
    if argument := re.search(r"--template-arg \S+", words):
        return f"`{argument[0]}`"
    if words.startswith("choose another"):
        return "another template"
    return "none needed" if code == 0 else "`--training` or the gateway"
