"""The source of the site: the pages of this folder, and those that are written from the code.

    python docs/generate.py FOLDER

`make docs` runs it and Sphinx. A table between `<!-- NAME -->` and `<!-- end -->` of a page here is what the code
says. Pages link to the files of this folder, as a reader of the repository finds them: `_rules.md#TOK101` is a
page of its own on the site.
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import yaml

# The examples of the rules are cases of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pages.api import api
from pages.commands import commands, configuration, exit_codes
from pages.install import install_extras, install_measured, install_sizes
from pages.plugins import formats, repairs, reports, rules
from pages.schema import SCHEMAS, schema
from pages.speed import batch_speed
from pages.words import Pages, linked, table

from tito_audit.formats import all_formats
from tito_audit.levels.facts import RecordLevel, all_facts, level_of_format
from tito_audit.parser import Reads
from tito_audit.parsers import all_parsers
from tito_audit.rules import all_rules

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
INTROS = ("api", "commands", "configuration", "formats", "repairs", "reports", "rules", "schema")
"""Pages here, `_NAME.md`, that the code goes on with."""
MARKED = re.compile(r"<!-- (?P<name>[a-z-]+) -->\n(?P<table>.*?)<!-- end -->\n", re.DOTALL)
LISTED = re.compile(r"<!-- tito-audit list .*?<!-- end -->\n", re.DOTALL)
"""A table for readers of the repository; the site has a page for each of its rows, and an index of them."""
MARK = ".generated"
"""A file in a folder that this wrote, and may replace."""


def written() -> list[Path]:
    """The pages of this folder that people write."""
    return sorted((*HERE.glob("*.md"), *HERE.glob("tutorials/*.md")))


def site() -> Pages:
    """Every page by its path."""
    texts = {path.relative_to(HERE).as_posix(): path.read_text(encoding="utf-8") for path in written()}
    # The pages that these become may be in folders.
    intro = {name: re.sub(r"\]\(([a-z-]+\.md)", r"](/\1", texts.pop(f"_{name}.md")) for name in INTROS}
    texts = {name: MARKED.sub(lambda one: one["table"], text) for name, text in texts.items()}
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    pages = {
        **texts,
        "changelog.md": changes,
        **rules(intro["rules"]),
        **formats(intro["formats"]),
        **repairs(intro["repairs"]),
        **reports(intro["reports"], ROOT),
        **commands(intro["commands"]),
        **configuration(intro["configuration"]),
        **schema(intro["schema"]),
        **api(intro["api"]),
    }
    places = {rule.code: f"/rules/{rule.code}.md" for rule in all_rules()}
    return {path: linked(_as_on_site(LISTED.sub("", text), pages), places) for path, text in pages.items()}


def marked() -> dict[str, str]:
    """The tables of pages here that the code says, by the name of their mark."""
    return {
        "batch-speed": batch_speed(),
        "exit-codes": exit_codes(),
        "action-inputs": action_inputs(),
        "action-outputs": action_outputs(),
        "parsers": parsers(),
        "levels": levels(),
        "log-lines": log_lines(),
        "install-extras": install_extras(),
        "install-measured": install_measured(),
        "install-sizes": install_sizes(),
    }


def _as_on_site(text: str, pages: Pages) -> str:
    """A page with its links to files of the repository as links to the pages that they become."""

    def there(link: re.Match[str]) -> str:
        name, anchor = link["name"], link["anchor"] or ""
        one = f"{name}/{anchor[1:]}.md"
        whole = f"{name}.md" if f"{name}.md" in pages else f"{name}/index.md"
        return f"](/{one})" if one in pages else f"](/{whole}{anchor})"

    text = re.sub(r"\]\((?:\.\./)?_(?P<name>\w+)\.md(?P<anchor>#[\w-]+)?\)", there, text)
    return text.replace("](../tito_audit/schemas/", "](/_static/")


def parsers() -> str:
    """What `tito-audit list parsers` lists."""
    words = {Reads.TOOLS: "tools", Reads.REASONING: "reasoning", Reads.TOOLS | Reads.REASONING: "both"}
    rows = [
        (f"`{one.name}`", words[one.reads], one.title, ", ".join(f"`{name}`" for name in one.aliases))
        for one in all_parsers()
    ]
    return table(("parser", "reads", "syntax", "other names"), rows)


def levels() -> str:
    """Each level, and the facts that it asks for."""
    rows = []
    for level in list(RecordLevel)[1:]:
        names = [f"`{fact.name}`" for fact in all_facts().values() if fact.level is level]
        rows.append((str(level), level.words, ", ".join(names)))
    return table(("level", "holds", "facts"), rows)


def log_lines() -> str:
    """What to set in each framework for a fact that its log lacks."""
    rows = []
    for format in sorted(all_formats(), key=lambda format: format.title.lower()):
        level = level_of_format(format.name)
        lines: dict[str, list[str]] = {}
        for name, line in level.lines.items():
            lines.setdefault(line, []).append(all_facts()[name].words)
        words = "; ".join(f"{', '.join(facts)}: {line}" for line, facts in lines.items())
        if words:
            rows.append((format.title, f"[{format.name}](_formats.md)", str(level.holds), words))
    return table(("written by", "format", "holds", "to log it"), rows)


def action_inputs() -> str:
    """What the GitHub Action takes."""
    rows = []
    for name, one in _action()["inputs"].items():
        default = "required" if one.get("required") else f"`{one['default']}`" if one.get("default") else "empty"
        rows.append((f"`{name}`", one["description"], default))
    return table(("input", "", "default"), rows)


def action_outputs() -> str:
    """What the GitHub Action gives."""
    rows = [(f"`{name}`", one["description"]) for name, one in _action()["outputs"].items()]
    return table(("output", ""), rows)


def _action() -> dict[str, dict[str, dict[str, str]]]:
    return dict(yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8")))


def write(folder: Path) -> None:
    """The source of the site in a folder of its own, without anything of an older one."""
    if folder.exists():
        if any(folder.iterdir()) and not (folder / MARK).is_file():
            sys.exit(f"{folder} holds something else; name a folder that may be replaced.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    for name in ("_static", "_moved", "pictures"):
        shutil.copytree(HERE / name, folder / name)
    shutil.copy(HERE / "conf.py", folder)
    for name in SCHEMAS:
        text = files("tito_audit").joinpath("schemas", name).read_text(encoding="utf-8")
        (folder / "_static" / name).write_text(text, encoding="utf-8")
    for path, text in site().items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
