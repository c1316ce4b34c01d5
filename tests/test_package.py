"""The package: what it needs, what it leaves out, and how an index and a container show it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.tables import stored
from tests.tiers import DEEP
from tests.world import FORMATS, ROOT, TOY
from tito_audit import __version__
from tools import package

packaging = pytest.importorskip("packaging.requirements", reason="packaging comes with pytest")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
ADDRESS = "https://github.com/OWNER/tito-audit"
INDEX = pytest.mark.skipif(
    not os.environ.get("TITO_AUDIT_INDEX"), reason="TITO_AUDIT_INDEX=1 installs from a package index"
)


@cache
def setup() -> ModuleType:
    """setup.py, which sets nothing up when it is imported."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What it needs


def needed(names: list[str]) -> set[str]:
    """Distributions that these need, and those that they need, as they are installed here; without extras."""
    distributions: set[str] = set()
    rest = list(names)
    while rest:
        requirement = packaging.Requirement(rest.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in distributions or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        distributions.add(name)
        rest += importlib.metadata.requires(name) or []
    return distributions


def modules_of_others() -> list[str]:
    """Every module that is installed here, and is neither the package nor of what it needs."""
    ours = needed(PROJECT["dependencies"]) | {"tito-audit"}
    return [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} & ours
    ]


ALONE = """
import json, sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in others:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
others, calls = set(json.loads(sys.argv[1])), json.loads(sys.argv[2])
sys.meta_path.insert(0, Missing())
from tito_audit.cli import app
codes = []
for call in calls:
    try:
        app(call)
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps(codes), file=sys.stderr)
"""


def test_what_the_package_needs_is_enough_for_every_command_but_the_live_ones(tmp_path: Path) -> None:
    (parquet, *_) = sorted(map(str, (ROOT / "fixtures").rglob("*.parquet")))
    reports = [f"--report={name}={tmp_path / name}" for name in ("html", "json", "markdown", "sarif", "junit")]
    logs = {name: [str(FORMATS / f"{name}.jsonl")] for name in ("nemo_gym", "tito_sample")}
    words = {**logs, "PARQUET": [parquet], "TOY": [str(TOY)], "REPORTS": reports}
    expected = stored(__file__, "CALLS")
    calls = [[word for name in line.split() for word in words.get(name, [name])] for line in expected]
    others = modules_of_others()
    assert {"transformers", "pytest"} <= {*others, "transformers"}
    assert not {"numpy", "tokenizers", "click", "yaml"} & set(others)
    command = [sys.executable, "-c", ALONE, json.dumps(others), json.dumps(calls)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert json.loads(done.stderr.splitlines()[-1]) == list(expected.values()), done.stdout + done.stderr
    assert json.loads((tmp_path / "json").read_text())["findings"]


def test_an_extra_that_is_named_is_one_that_there_is() -> None:
    files = [
        *(ROOT / "tito_audit").rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
        ROOT / "Makefile",
    ]
    named = {
        extra
        for file in files
        for listed in re.findall(r"tito-audit\[([\w,]+)\]", file.read_text(encoding="utf-8"))
        for extra in listed.split(",")
    }
    assert {"hf", "serve", "torch", "transformers"} <= named <= set(EXTRAS)


# What it says of itself


def test_the_version_is_written_once() -> None:
    assert setup().version() == __version__
    assert __version__ not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def changes() -> Iterator[tuple[str, str, str]]:
    """Versions of the changelog with their dates and what was written of them."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    for heading, body in zip(parts[::2], parts[1::2], strict=True):
        match = re.fullmatch(r"(\d+\.\d+\.\d+) - (unreleased|\d{4}-\d\d-\d\d)", heading)
        assert match, f"## {heading}"
        yield match[1], match[2], body


def test_the_changelog_has_a_heading_for_each_version_the_newest_first() -> None:
    versions = [version for version, _, _ in changes()]
    assert versions[0] == __version__
    assert versions == sorted(versions, key=lambda text: [*map(int, text.split("."))], reverse=True)
    assert [date for _, date, _ in changes()].count("unreleased") <= 1
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    for version, _, body in changes():
        headings = re.findall(r"^### (.*)$", body, re.MULTILINE)
        assert headings, version
        assert set(headings) <= kinds
        assert re.fullmatch(r"(?:[^#][^\n]*\n|\n)*", body.partition("\n### ")[0] + "\n")
        assert "- " not in body.partition("\n### ")[0], f"{version}: a change before the first heading"


README = stored(__file__, "README")


def test_an_index_shows_links_of_the_readme_as_whole_addresses() -> None:
    shown = setup().long_description(README, "1.2.3", ADDRESS)
    blob, raw = f"{ADDRESS}/blob/v1.2.3", f"{ADDRESS}/raw/v1.2.3"
    assert f"[a guide]({blob}/docs/gate.md#rates), [elsewhere](https://example.org), [below](#below)" in shown
    assert f"![a picture]({raw}/docs/picture.svg) [![both]({raw}/docs/both.png)]({blob}/docs/page.md)" in shown
    assert f'srcset="{raw}/docs/dark.svg"' in shown
    assert f'<img alt="a page" src="{raw}/docs/light.svg" width="700">' in shown
    assert f'<a href="{blob}/docs/show.md">show</a>' in shown
    assert "```text\n[a link](in/code.md)\n```" in shown
    assert "`[code](of/a/label)`" in shown


def test_without_an_address_an_index_shows_words_where_links_would_lead_nowhere() -> None:
    shown = setup().long_description(README, "1.2.3")
    assert shown.startswith("a guide, [elsewhere](https://example.org), [below](#below), `[code](of/a/label)`\n")
    assert "a picture both\na page show\n```text\n[a link](in/code.md)\n```" in shown
    assert setup().urls(None) == {}


def test_the_addresses_of_the_package_are_below_the_one_that_was_given() -> None:
    addresses = setup().urls(ADDRESS)
    assert {"Documentation", "Changelog", "Source", "Issues"} <= addresses.keys()
    for address in addresses.values():
        assert address.startswith(ADDRESS)
        path = re.sub(r"^/(?:blob|tree)/HEAD/", "", address.removeprefix(ADDRESS))
        assert path in ("", "/issues") or (ROOT / path).exists(), address


@pytest.mark.parametrize("address", [None, ADDRESS])
def test_the_readme_is_shown_by_an_index_without_a_link_that_leads_nowhere(address: str | None) -> None:
    markdown = pytest.importorskip("readme_renderer.markdown", reason="readme_renderer is in the extra dev")
    if not markdown.variants:
        pytest.skip("what readme_renderer[md] adds is in the extra dev")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = markdown.render(setup().long_description(text, __version__, address))
    assert shown is not None
    targets = re.findall(r'\b(?:href|src|srcset)="([^"]*)"', shown)
    assert all(target.startswith(("https://", "#")) for target in targets), targets
    if address:
        files = [target for target in targets if target.startswith(f"{address}/")]
        assert files
        for target in files:
            path = re.sub(rf"^{re.escape(address)}/(?:blob|raw)/v{re.escape(__version__)}/", "", target)
            assert (ROOT / path.partition("#")[0]).exists(), target


def test_the_license_and_the_types_are_where_tools_look_for_them() -> None:
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (ROOT / "tito_audit" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]


# What is built


@pytest.mark.skipif(not DEEP, reason="`make deep` and `make package` build it")
@INDEX
def test_the_package_is_built_installed_and_scans_from_outside_the_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert package.main([str(tmp_path)]) == 0, capsys.readouterr().out


# In a container


def instructions(text: str) -> list[tuple[str, str]]:
    """Each instruction of a Dockerfile with what it is given."""
    joined = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.split("\n") if line.strip())]


DOCKERFILE = instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))
CONTEXT = [
    line.removeprefix("!")
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    if line.startswith("!")
]
"""What reaches the build: everything else is left out."""


def test_a_container_runs_the_command_as_an_ordinary_user() -> None:
    stages = [number for number, (name, _) in enumerate(DOCKERFILE) if name == "FROM"]
    assert len(stages) == 2
    last = dict(DOCKERFILE[stages[-1] :])
    assert last["ENTRYPOINT"] == '["tito-audit"]'
    assert json.loads(last["CMD"]) == ["--help"]
    assert last["USER"] not in ("root", "0")
    assert last["WORKDIR"] == "/work"
    assert last["COPY"] == "--from=build /opt/tito-audit /opt/tito-audit"
    assert "PATH=/opt/tito-audit/bin:$PATH" in last["ENV"]
    bases = {rest.split()[0] for name, rest in DOCKERFILE if name == "FROM"}
    assert len(bases) == 1, "an environment is run by the Python that made it"


def test_a_container_is_built_from_the_package_alone() -> None:
    assert "*" in (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert sorted(CONTEXT) == ["LICENSE", "README.md", "pyproject.toml", "setup.py", "tito_audit"]
    assert all((ROOT / name).exists() for name in CONTEXT)


@pytest.mark.parametrize(("extras", "what"), [(None, "."), ("", "."), ("serve,hf", ".[serve,hf]")])
def test_a_container_has_the_extras_that_are_asked_for(extras: str | None, what: str) -> None:
    assert ("ARG", "EXTRAS=") in DOCKERFILE
    (word,) = (rest.split()[-1] for name, rest in DOCKERFILE if name == "RUN" and "pip" in rest)
    environment = {} if extras is None else {"EXTRAS": extras}
    ran = subprocess.run(
        ["sh", "-ec", f"echo {word}"], capture_output=True, text=True, env=environment, check=True
    )
    assert ran.stdout == f"{what}\n"


@pytest.mark.skipif(not DEEP, reason="`make deep` builds it")
@INDEX
def test_what_a_container_is_built_with_gives_the_command_and_what_it_needs(tmp_path: Path) -> None:
    source, place = tmp_path / "source", tmp_path / "tito-audit"
    source.mkdir()
    for name in CONTEXT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    for name, rest in DOCKERFILE:
        if name == "RUN" and "/opt/" in rest:
            environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            script = rest.replace("/opt/tito-audit", str(place))
            subprocess.run(["bash", "-ec", script], check=True, cwd=source, env=environment)
    command = [place / "bin" / "tito-audit", "scan", FORMATS / "tito_sample.jsonl", "-t", TOY]
    empty = {"PATH": str(place / "bin"), "HOME": "/", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=empty)
    assert done.returncode == 0, done.stderr
    assert not (place / "bin" / "pip").exists()
