"""The documentation: it has all that the code has and nothing else, its examples run, its links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import doctest
import html.parser
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

import pytest

import tito_audit
from tests.checkers import checked
from tests.command import run
from tests.test_ci_files import with_command
from tests.tiers import DEEP
from tests.world import ROOT
from tito_audit.cli._exit import EXIT_CODES
from tito_audit.cli.explain import GUIDES
from tito_audit.evidence import reference
from tito_audit.formats import all_formats
from tito_audit.repairs import all_repairs
from tito_audit.reports import all_reports
from tito_audit.rules import FAMILIES, all_rules
from tito_audit.settings.file import EXTEND, OVERRIDES, read_config
from tito_audit.settings.options import FLAG_ONLY, KEYS

yaml = pytest.importorskip("yaml", reason="PyYAML is in the extra docs")

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import generate  # noqa: E402
from pages.commands import walked  # noqa: E402

WRITTEN = [ROOT / "README.md", *generate.written()]
"""Pages that people write; the others are written from the code."""
FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[a-z]+)\n(?P<text>.*?)\n(?P=fence)$", re.M | re.S)
PLACEHOLDERS = {"LOG", "DIR", "OUT", "FILE", "…", "...", "NAME", "CODE", "COMMAND"}
"""Commands that need nothing but a checkout."""
SHELL_ONLY = set("|&;<>$*?`(){}")
"""What no command is given as it is typed."""
PACE = re.compile(r"· [\d.]+ s(, [\d,]+ tokens/s)?")
EXTERNAL = {
    "https://github.com/pradyunsg/furo": "the theme's own footer",
    "https://pradyunsg.me": "the theme's own footer",
}
"""All addresses that the site links to."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str
    language: str
    text: str
    start: int

    def __str__(self) -> str:
        return f"{self.page}-{self.language}-{self.start}"


@cache
def pages() -> dict[str, str]:
    """Every page of the site by its path, and the README."""
    return {**generate.site(), "README.md": (ROOT / "README.md").read_text(encoding="utf-8")}


def site() -> dict[str, str]:
    """Every page of the site by its path."""
    return {path: text for path, text in pages().items() if path != "README.md"}


def called(path: Path) -> str:
    """The name of a written page: its path in the docs."""
    return path.relative_to(DOCS).as_posix() if DOCS in path.parents else path.name


def blocks(*languages: str, written: bool = False) -> list[Block]:
    """The blocks in these languages, of all pages or of those that people write."""
    texts = {called(path): path.read_text(encoding="utf-8") for path in WRITTEN} if written else pages()
    fences = ((name, fence) for name, text in texts.items() for fence in FENCE.finditer(text))
    return [
        Block(name, fence["language"], fence["text"], fence.start("text"))
        for name, fence in fences
        if fence["language"] in languages
    ]


# What there is stands in the docs


def test_every_rule_format_repair_and_report_has_its_page_and_stands_in_the_index() -> None:
    kinds = {
        "rules": [rule.code for rule in all_rules()],
        "formats": [format.name for format in all_formats()],
        "repairs": [repair.name for repair in all_repairs()],
        "reports": [report.name for report in all_reports()],
    }
    for kind, names in kinds.items():
        written = {path.split("/")[1].removesuffix(".md") for path in pages() if path.startswith(f"{kind}/")}
        assert written == {"index", *names}
        listed = re.findall(r"^\| \[(\w+)\]\(\1\.md\) ", pages()[f"{kind}/index.md"], re.M)
        assert sorted(listed) == sorted(names)
    for rule in all_rules():
        page = pages()[f"rules/{rule.code}.md"]
        headings = re.findall("^## .*", page, re.M)
        assert headings[:4] == re.findall("^## .*", rule.doc, re.M)
        assert headings[4:] in ([], ["## The example, repaired"])
        assert rule.title in page
    for format in all_formats():
        assert format.shows in pages()[f"formats/{format.name}.md"]


def test_every_family_of_rules_is_told() -> None:
    assert all(f"## {family}: {about}" in pages()["rules/index.md"] for family, about in FAMILIES.items())


@pytest.mark.parametrize(
    ("name", "command", "context"), list(walked()), ids=lambda command: command if type(command) is str else ""
)
def test_every_command_is_documented_with_all_its_flags(name: str, command: Any, context: Any) -> None:
    short = name.removeprefix("tito-audit").strip().replace(" ", "-") or "index"
    page = pages()[f"commands/{short}.md"]
    written = re.findall(r"^`{4}\{option\} (.*)\n(.+)", page, re.M)
    signatures = [signature for signature, _ in written]
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument":
            assert any(not signature.startswith("-") for signature in signatures)
            continue
        if parameter.hidden:
            continue
        (signature,) = (spelling for spelling in signatures if parameter.opts[0] in re.split(r", | ", spelling))
        spelt = (parameter.opts[0], *(flag for flag in parameter.opts if len(flag) == 2))
        assert all(flag in re.split(r", | ", signature) for flag in (*spelt, *parameter.secondary_opts))
        if isinstance(parameter.default, int | float | str) and parameter.default not in (True, False, ""):
            help = dict(written)[signature]
            assert f"Default: {parameter.default}" in help, signature
    assert f"[`{name}`]({short}.md)" in pages()["commands/index.md"] or short == "index"


def test_every_key_of_the_configuration_file_is_documented() -> None:
    page = pages()["configuration.md"]
    keys = re.findall(r"^`{4}\{confval\} (.*)\n:type: (.*)\n", page, re.M)
    assert sorted(name for name, _ in keys) == sorted([*KEYS, EXTEND, OVERRIDES])
    assert re.findall(r"confval\} quiet\n:type: true or false\n:default: (\w+)", page) == ["false"]
    assert {(key, option.kind.takes) for key, option in KEYS.items()} <= set(keys)
    for flag, why in FLAG_ONLY.items():
        assert f"| `--{flag}` | {why} |" in page


def test_every_public_name_is_documented_and_no_other() -> None:
    page = pages()["api.md"]
    named = re.findall(r"^:+\{py:(?:class|function|exception|data)\} (\w+)", page, re.M)
    assert sorted(named) == sorted(tito_audit.__all__)
    for name in named:
        doc = (getattr(tito_audit, name).__doc__ or "").strip().partition("\n")[0]
        assert name == "__version__" or doc in re.sub(r"\[(\w+)\]\(/rules/\w+\.md\)", r"\1", page)


def test_every_exit_code_stands_in_the_one_table() -> None:
    table = re.findall(r"^\| `(\d+)` \| ([\w ]+) \| (.*) \|$", pages()["exit-codes.md"], re.M)
    assert {int(code): word for code, word, _ in table} == {code: word for code, (word, _) in EXIT_CODES.items()}


def test_every_variable_of_the_environment_that_is_read_is_documented() -> None:
    read = re.compile(r"environ(?:\.get|\.setdefault)?[\[(]\"(\w+)\"|^VARIABLE = \"(\w+)\"", re.M)
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tito_audit").rglob("*.py"))
    ours = {getter or constant for getter, constant in read.findall(code)} - {"TOKENIZERS_PARALLELISM"}
    assert "TITO_AUDIT_CACHE" in ours
    assert all(f"`{name}`" in pages()["commands/index.md"] for name in ours)


def test_every_input_and_output_of_the_action_is_documented() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert all(f"| `{name}` | " in pages()["ci.md"] for name in (*action["inputs"], *action["outputs"]))


# What the docs say exists


@cache
def flags_of() -> dict[str, dict[str, Any]]:
    """Flags by command, each with its parameter."""
    return {
        name: {
            flag: parameter
            for parameter in command.get_params(context)
            if parameter.param_type_name == "option"
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, command, context in walked()
    }


def commands_in(block: Block) -> Iterator[str]:
    """Every call of the program in a block, without what other programs do with it."""
    for line in block.text.split("\n"):
        if block.language == "console" and not line.startswith("$ "):
            continue  # what a command printed
        call = re.search(r"(?:^|[\s'\"(])tito-audit(?=\s+[a-z-])(?!:)(.*)", line)
        if call and not line.lstrip().startswith(("#", "- id", "- repo", "stage(")):
            words = re.split(r"\s#\s|\s[|>]{1,2}\s|\s(?:&&|\|\|)\s", call[1])[0]
            yield "tito-audit" + words.rstrip("'\" ")


def test_calls_in_the_docs_name_commands_and_flags_that_there_are() -> None:
    usages = [block for block in blocks("text") if block.page.startswith("commands/")]
    calls = {
        (block.page, call)
        for block in [*blocks("console", "bash", "yaml", "groovy"), *usages]
        for call in commands_in(block)
    }
    assert len(calls) > 100
    for page, call in sorted(calls):
        assert_is_a_call(page, call)


def assert_is_a_call(page: str, call: str) -> None:
    """Every command, flag and name of a call is one that there is."""
    words = shlex.split(call)
    name = max((name for name in flags_of() if words[: len(name.split())] == name.split()), key=len)
    rest = words[len(name.split()) :]
    if name == "tito-audit" and rest and not rest[0].startswith("-"):
        assert rest[0] in PLACEHOLDERS or rest[0].startswith("["), f"{page}: no command {rest[0]}"
    registered = {
        "--report": {report.name for report in all_reports()},
        "--format": {form.name for form in all_formats()} | {"auto"},
        "--with": {repair.name for repair in all_repairs()},
    }
    takes: str | None = None
    for word in rest:
        flag, _, value = word.partition("=")
        if takes is not None:
            named = word.partition("=")[0].split(",")
            assert takes not in registered or set(named) <= registered[takes] | PLACEHOLDERS, f"{page}: {word}"
            takes = None
        elif re.match(r"--?[a-z]", word):
            assert flag in flags_of()[name], f"{page}: {name} has no {flag}"
            parameter = flags_of()[name][flag]
            long = next(option for option in parameter.opts if option.startswith("--"))
            takes = None if parameter.is_flag or value else long


def prose(text: str) -> str:
    """A page without its blocks."""
    return FENCE.sub("", text)


def test_prose_names_flags_and_rules_that_there_are() -> None:
    flags = set(chain.from_iterable(flags_of().values()))
    codes = {rule.code for rule in all_rules()}
    lines = (ROOT / "tito_audit" / "levels" / "levels.toml").read_text(encoding="utf-8")
    of_frameworks = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", lines))
    for page, written in pages().items():
        text = prose(written)
        for span in re.findall(r"`((?!make |BENCH=)[^`\n]+)`", text):
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span):
                assert flag in flags | (of_frameworks if page == "validate.md" else set()), f"{page} names {flag}"
        named = set(re.findall(rf"\b(?:{'|'.join(FAMILIES)})\d{{3}}\b", text))
        assert named <= codes, f"{page} names {sorted(named - codes)}"


# Examples run


def typed(text: str) -> Iterator[tuple[str, str]]:
    """Each command of a console block, and what is shown beneath it."""
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown.strip("\n")


def environment(place: Path) -> dict[str, str]:
    return {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "100",
        "HOME": str(place),
        "LC_ALL": "C.UTF-8",
        "TITO_AUDIT_CACHE": "off",
    }


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as a reader's: the example logs, and the command on the path."""
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    return with_command(tmp_path)


def tried(command: str, code: int, place: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command behind one that ended so; `make deep` asks a shell for all."""
    if DEEP or set(command) & SHELL_ONLY or not command.startswith("tito-audit "):
        script = ["bash", "-c", f"(exit {code}); {command}"]
        done = subprocess.run(script, capture_output=True, encoding="utf-8", cwd=place, env=environment(place))
        return done.returncode, done.stdout, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for name, value in environment(place).items():
            patch.setenv(name, value)
        return run(*shlex.split(command)[1:])


def as_shown(code: int, out: str, err: str) -> str:
    """What a reader sees of a run."""
    return (out + (err if code == 2 else "")).strip("\n")


def fits(shown: str, printed: str) -> bool:
    """Whether it was printed so; a line `…` stands for any lines."""
    wanted = [re.escape(line) for line in PACE.sub("", shown).split("\n")]
    pattern = "\n".join(wanted).replace(f"\n{re.escape('…')}\n", r"\n(?:.*\n)*")
    pattern = re.sub(rf"\n{re.escape('…')}$", r"(?:\n.*)*", pattern)
    return re.fullmatch(pattern, PACE.sub("", printed)) is not None


def renewed(shown: str, output: str) -> str:
    """What is printed now; where a line `…` cut it, with as many lines before that and after it."""
    wanted, lines = shown.split("\n"), output.split("\n")
    if "…" not in wanted:
        return output
    at = wanted.index("…")
    behind = wanted[at + 1 :]
    return shown if "…" in behind else "\n".join([*lines[:at], "…", *lines[len(lines) - len(behind) :]])


@pytest.mark.parametrize("path", [path for path in WRITTEN if "```console" in path.read_text()], ids=called)
def test_the_commands_of_a_page_do_what_it_shows(path: Path, place: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code = 0
    for block in [block for block in blocks("console", written=True) if block.page == called(path)]:
        fresh = []
        for command, shown in typed(block.text):
            ours = re.match(
                r"tito-audit (.*fixtures/|explain \w|list \w|scan cured|scan no-such|--version)", command
            )
            if not ours and command != "echo $?":
                assert not shown, f"{command}: what it prints cannot be checked"
                fresh.append(f"$ {command}")
                continue
            code, out, err = tried(command, code, place)
            output = as_shown(code, out, err)
            assert code in EXIT_CODES, err
            if shown and os.environ.get("UPDATE_GOLDENS") and not fits(shown, output):
                shown = renewed(shown, output)
            assert not shown or fits(shown, output), (
                f"{called(path)} is stale: {command}\n{output}\n"
                "UPDATE_GOLDENS=1 pytest tests/test_docs.py renews what has no more than one line …"
            )
            fresh.append("\n".join([f"$ {command}", *([shown] if shown else [])]))
        if os.environ.get("UPDATE_GOLDENS"):
            text = text.replace(block.text, "\n".join(fresh))
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("block", blocks("python", written=True), ids=str)
def test_python_of_the_docs_runs(block: Block, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # `make test` tries on one log what is shown for the folder of all examples.
    text = block.text if DEEP else block.text.replace('"fixtures/formats"', '"fixtures/formats/nemo_gym.jsonl"')
    names: dict[str, Any] = {"__name__": "example"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, block.page, "exec"), names)
        for name, value in list(names.items()):
            if name.startswith("test_"):
                value()
    assert bool(printed.getvalue()) == ("print(" in block.text)


def test_the_examples_of_docstrings_are_true() -> None:
    finder, runner = doctest.DocTestFinder(recurse=True), doctest.DocTestRunner()
    public = {name: getattr(tito_audit, name) for name in tito_audit.__all__}
    for name, value in public.items():
        if not isinstance(value, str):
            for test in finder.find(value, name, globs=public.copy()):
                runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("block", blocks("toml", written=True), ids=str)
def test_settings_of_the_docs_can_be_read(block: Block, tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('tokenizer = "models/base"\n')
    folder = tmp_path / "project"
    folder.mkdir()
    name = "pyproject.toml" if "[tool.tito-audit]" in block.text else "tito-audit.toml"
    (folder / name).write_text(block.text)
    assert read_config(folder / name).values


def schema_of(value: Any) -> list[str]:
    """The checker of what a recipe is for."""
    if "repos" in value:
        return ["pre_commit", "validate-config"]
    kind = "vendor.github-workflows" if "jobs" in value else "vendor.gitlab-ci"
    return ["check_jsonschema", "--builtin-schema", kind]


@pytest.mark.parametrize("block", blocks("yaml", written=True), ids=str)
def test_a_recipe_is_a_file_that_its_system_takes(block: Block, tmp_path: Path) -> None:
    # `on` is a word of YAML 1.1 for true.
    value = {("on" if key is True else key): entry for key, entry in yaml.safe_load(block.text).items()}
    if {"dataset", "datasets"} & value.keys():
        return  # a trainer's configuration, not a recipe for CI
    checker = schema_of(value)
    file = tmp_path / "recipe.yaml"
    file.write_text(block.text)
    code, message = checked(*checker, str(file))
    assert code == 0, message
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    steps = [step for job in value.get("jobs", {}).values() for step in job["steps"]]
    for step in steps:
        if step.get("uses") == "./tito-audit":
            assert set(step["with"]) <= set(action["inputs"])
            call = f"tito-audit scan {step['with'].get('args', '')}"
            assert_is_a_call(block.page, call)
    for name in re.findall(r"steps\.gate\.outputs\.([\w-]+)", block.text):
        assert name in action["outputs"]
    hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    for repository in value.get("repos", []):
        for hook in repository["hooks"]:
            assert hook["id"] in hooks
            call = f"tito-audit scan {shlex.join(hook.get('args', []))}"
            assert_is_a_call(block.page, call)


# The site


class Page(html.parser.HTMLParser):
    """Links and anchors of a page, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what the tag names."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("script", "img", "iframe") and "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(values["href"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Every page of the site, as `make docs` builds it: warnings are errors."""
    if not DEEP:
        pytest.skip("`make deep` builds the site")
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module, reason=f"{module} is in the extra docs")
    folder = tmp_path_factory.mktemp("site")
    (recipe,) = re.findall(r"-m sphinx (.*) build/docs-source build/docs$", (ROOT / "Makefile").read_text(), re.M)
    assert {"-W", "--keep-going", "-n"} <= set(recipe.split())
    subprocess.run([sys.executable, str(DOCS / "generate.py"), str(folder / "source")], check=True, cwd=ROOT)
    command = [sys.executable, "-m", "sphinx", *recipe.split(), str(folder / "source"), str(folder / "html")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return {path: Page(path.read_text(encoding="utf-8")) for path in (folder / "html").rglob("*.html")}


def test_every_tutorial_is_in_the_menu_of_the_site() -> None:
    menu = set((ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines())
    assert {f"tutorials/{page.stem}" for page in (ROOT / "docs" / "tutorials").glob("*.md")} <= menu


def test_every_page_is_in_the_site(built: dict[Path, Page]) -> None:
    root = next(path for path in built if path.name == "search.html").parent
    names = {path.relative_to(root).with_suffix("").as_posix() for path in built}
    assert {path.removesuffix(".md") for path in pages() if path != "README.md"} <= names


def test_every_link_of_the_site_leads_somewhere(built: dict[Path, Page]) -> None:
    checked = 0
    for path, page in built.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            target, anchor = urldefrag(link)
            place = (path.parent / unquote(target)).resolve() if target else path
            assert place.is_file(), f"{path.name} links to {link}"
            if anchor and place.suffix == ".html":
                assert unquote(anchor) in built[place].anchors, f"{path.name} links to {link}"
            checked += 1
    assert checked > 1000


def test_the_site_names_no_address_of_others_but_those_listed_and_loads_nothing_from_them(
    built: dict[Path, Page],
) -> None:
    outside = {link for page in built.values() for link in page.links if re.match(r"[a-z]+:|//", link)}
    assert outside <= set(EXTERNAL)
    for path, page in built.items():
        for source in page.loads:
            assert not re.match(r"[a-z]+:|//", source), source
            assert (path.parent / urldefrag(source)[0].split("?")[0]).is_file(), source


def test_a_link_between_pages_leads_to_a_page() -> None:
    checked = 0
    for path, text in site().items():
        for link in re.findall(r"\]\(([^)\s#:]+\.md)[)#]", prose(text)):
            place = urljoin(f"/{path}", link).removeprefix("/")
            assert place in site(), f"{path} links to {link}"
            checked += 1
    assert checked > 500


def test_no_page_names_an_address_of_this_project_as_it_has_none() -> None:
    for name, text in pages().items():
        assert "OWNER/tito-audit" not in text, name
        addresses = re.findall(r"(?:github|gitlab)\.com/([\w.-]+/[\w.-]+)", text)
        assert not addresses or name.startswith(("formats/", "reports/")), f"{name}: {addresses}"


def headings(text: str) -> set[str]:
    """Where links into a page may lead, as GitHub names its headings."""
    titles = re.findall("^#+ (.*)", prose(text), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", WRITTEN, ids=called)
def test_a_page_links_to_files_and_headings_that_there_are_in_the_repository(path: Path) -> None:
    links = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", prose(path.read_text(encoding="utf-8")))
    for label, link in links:
        target, anchor = urldefrag(link)
        place = path.parent / target if target else path
        assert label, f"{path.name}: no words for {link}"
        assert place.is_file(), f"{path.name} links to {link}"
        kind = place.stem.removeprefix("_")
        is_heading = not anchor or anchor in headings(place.read_text(encoding="utf-8"))
        assert is_heading or f"{kind}/{anchor}.md" in pages(), link


def test_the_readme_is_a_page_long_and_leads_to_what_a_newcomer_needs() -> None:
    text = pages()["README.md"]
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)[)#]", text))
    first = ("index", "install", "getting-started", "red-gate", "gate", "ci", "record-clean-rollouts")
    assert {f"{name}.md" for name in first} <= linked
    assert {f"_{kind}.md" for kind in ("rules", "repairs", "formats", "reports", "commands", "api")} <= linked
    tutorials = {path.name for path in (DOCS / "tutorials").glob("*.md")}
    assert set(re.findall(r"\]\(docs/tutorials/([\w-]+\.md)\)", text)) == tutorials
    assert text.count("\n") <= 140
    assert "<!--" not in text, "what is made from the code is in the docs"
    assert all(f"make {target}" in text for target in ("demo", "test")), "two commands set up a fresh machine"


def test_the_index_of_the_docs_leads_to_every_guide() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([\w-]+\.md)[)#]", text)) == {path.name for path in DOCS.glob("*.md")} - {
        "index.md"
    }


def test_a_question_is_linked_with_the_findings_that_raise_it() -> None:
    for page, (title, codes) in GUIDES.items():
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n")
        assert text.count("\n") <= 52, f"{page}.md is more than a screen"
        for code in codes.split():
            assert f"](_rules.md#{code})" in text, f"{page}.md does not link to {code}"
            assert f"[{title}](/{page}.md)" in pages()[f"rules/{code}.md"]
            _, manual, _ = run("explain", code)
            assert manual.rstrip().partition("Read also: ")[2].count(f"{title} (docs/{page}.md)") == 1
            assert f'"docs/{page}.md"' in run("explain", code, "-f", "json")[1]
    assert "Read also" not in run("explain", "REC003")[1]


def test_the_search_of_the_site_finds_the_questions(built: dict[Path, Page]) -> None:
    (index,) = (path for path in {page.parent for page in built} if (path / "searchindex.js").is_file())
    text = (index / "searchindex.js").read_text(encoding="utf-8")
    for title, _ in GUIDES.values():
        assert f'"{title}"' in text, f"the search has no title {title}"
    for word in ("explod", "ratio", "reason", "strip", "framework", "numer", "drift", "kl"):
        assert re.search(rf'["{{,]{word}"?:', text), f"the search does not know {word}"


def test_every_picture_of_a_page_is_there_and_has_words() -> None:
    seen = set()
    for path in WRITTEN:
        text = prose(path.read_text(encoding="utf-8"))
        tags = re.findall(r"<(?:img|source)\b[^>]*>", text)
        named = [re.findall(r'(?:src|srcset)="([^"]+)"', tag)[0] for tag in tags]
        assert all('alt="' in tag for tag in tags if tag.startswith("<img")), path.name
        for words, place in re.findall(r"!\[([^\]]*)\]\(([^)\s]+)\)", text):
            assert words, f"{path.name}: no words for {place}"
            named.append(place)
        for place in named:
            assert (path.parent / place).is_file(), f"{path.name} shows {place}"
            seen.add(Path(place).name)
    assert seen == {path.name for path in (DOCS / "pictures").iterdir()}


def test_the_tables_of_the_guides_are_what_the_code_says() -> None:
    tables = generate.marked()
    seen = []
    for path in sorted(DOCS.glob("*.md")):
        text = fresh = path.read_text(encoding="utf-8")
        for table in generate.MARKED.finditer(text):
            seen.append(table["name"])
            fresh = fresh.replace(table["table"], tables[table["name"]])
        if os.environ.get("UPDATE_GOLDENS"):
            path.write_text(fresh, encoding="utf-8")
        else:
            assert text == fresh, f"{path.name} is stale; UPDATE_GOLDENS=1 pytest tests/test_docs.py renews it"
    assert sorted(seen) == sorted(tables)


def test_the_page_on_exactness_names_tests_that_there_are_and_the_sample_that_is_taken() -> None:
    text = pages()["how-it-is-exact.md"]
    named = re.findall(r"\b((?:tests|benchmarks)/\w+(?:\.py|\.md)?)", text)
    assert len(named) > 8
    assert all((ROOT / name).exists() for name in named)
    assert f"one segment in {reference._ONE_IN:,}" in " ".join(text.split())


def test_every_report_says_what_it_is_for() -> None:
    chosen = pages()["reports/index.md"].partition("## ")[0]
    assert all(f"`{report.name}`" in chosen for report in all_reports())


def test_a_report_is_shown_as_it_is_written_of_an_example_log() -> None:
    for report in all_reports():
        page = pages()[f"reports/{report.name}.md"]
        assert (report.suffix == "html") == ("## How it begins" not in page)
    assert re.search(r"^fixtures/formats/nemo_gym.jsonl:2:2:129-130 SEQ302", pages()["reports/concise.md"], re.M)
    assert re.search(r"^::error file=fixtures/formats/nemo_gym.jsonl,", pages()["reports/github.md"], re.M)


def test_what_is_built_is_not_tracked() -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    assert "build/" in ignored


def test_the_generator_replaces_no_folder_that_it_did_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "site", site)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds something else"):
        generate.write(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    generate.write(tmp_path / "site")
    (tmp_path / "site" / "old.md").write_text("old")
    generate.write(tmp_path / "site")
    assert not (tmp_path / "site" / "old.md").exists()


def test_pages_of_the_docs_have_docstrings_and_no_long_lines() -> None:
    for path in DOCS.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
    for path in generate.written():
        inside = False
        for line in path.read_text(encoding="utf-8").split("\n"):
            inside ^= line.startswith("```")
            assert inside or len(line) <= 130 or line.startswith("|"), f"{path.name}: {line[:60]}…"
