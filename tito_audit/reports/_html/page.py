"""Renders a page: template, style and script, blocks of data, and a content policy that admits nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from tito_audit.report_objects import as_json
from tito_audit.terminal.escape import visible
from tito_audit.terminal.verdict import covered_share, required_name
from tito_audit.terminal.words import many, rate_number

if TYPE_CHECKING:
    from jinja2 import Template

DATA_MARKER = "<!-- data -->\n"
"""The place of the data blocks in a rendered page."""
_SCRIPTS = (
    *("store", "words", "state", "copy", "tokens", "rows"),
    *("findings", "sequence", "over", "viewer", "keys", "page"),
)
SITE_SCRIPTS = (*_SCRIPTS[:-1], "files", "search", "logs", "compare", _SCRIPTS[-1])
"""Scripts of the pages of a site; `page`, the last, starts the others."""
_STYLES = ("style", "charts", "findings", "viewer", "site", "narrow")
_ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>"
    "<rect width='16' height='16' rx='3' fill='#205493'/>"
    "<path d='M3 5h4v2H3zM9 5h4v2H9zM3 9h7v2H3z' fill='#fff'/></svg>"
)
MAX_PLAIN_BLOCK = 1 << 16
"""Maximum characters of a plain JSON block; longer blocks are compressed."""
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_UNSAFE = re.compile("[<>&\u2028\u2029]")


@dataclass(frozen=True, slots=True)
class SitePage:
    """The place of a page in a site, as relative paths."""

    root: str
    """From the page to the site's folder: `../`, or "" for one that lies in it."""
    data: str
    """From the site's folder to the folder of its style, script and data."""
    files: str = ""
    """From that folder to the data of this page."""


def render_page(template: str = "page.html", site: SitePage | None = None, **values: Any) -> tuple[str, str]:
    """The page before and after its data; every string in `values` is made visible and escaped.

    A page of a site loads style, script and data from files beside it. Its policy names `file:` beside `'self'`
    because browsers do not agree on the origin of a page opened from disk; neither admits a network.
    """
    style, script = page_style(), page_script(_SCRIPTS)
    sources = ("'self' file:", "'self' file:") if site is not None else (_csp_hash(script), _csp_hash(style))
    policy = (
        f"default-src 'none'; script-src {sources[0]}; style-src {sources[1]}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    icon = "data:image/svg+xml;base64," + base64.b64encode(_ICON.encode()).decode()
    shared = {"style": style, "script": script, "policy": policy, "icon": icon, "site": site}
    text = _template(template).render(**shared, **values)
    before, _, after = text.partition(DATA_MARKER)
    return before, after


def page_style() -> str:
    """The style sheet of every page."""
    return "\n".join(_asset(f"{name}.css") for name in _STYLES)


def page_script(names: Iterable[str]) -> str:
    """The script of a page, made of the parts with these names."""
    script = "\n".join(_asset(f"{name}.js") for name in names)
    return f'(() => {{\n"use strict";\n{script}}})();\n'


def page_name(files: list[str]) -> str:
    """The name of a page: the file name of a single log, or `12 logs in FOLDER`."""
    if len(files) == 1:
        return PurePath(files[0]).name or files[0]
    heads = [PurePath(file).parts[:-1] for file in files]
    shared = [parts[0] for parts in zip(*heads, strict=False) if len(set(parts)) == 1]
    alike = bool(shared) and all(parts[: len(shared)] == tuple(shared) for parts in heads)
    return many(len(files), "log") + (f" in {shared[-1]}" if alike else "")


@cache
def _template(name: str) -> Template:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = lambda number: f"{number:,}"
    environment.filters["many"] = many
    environment.filters["rate"] = rate_number
    environment.filters["required"] = required_name
    environment.filters["covered"] = covered_share
    return environment.get_template(name)


@cache
def _asset(name: str) -> str:
    return files("tito_audit.reports._html").joinpath("assets", name).read_text(encoding="utf-8")


def _csp_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode()}'"


def data_block(kind: str, value: Any) -> str:
    """A `<script>` element that holds a value as data and runs nothing; the value may hold model output."""
    text = escape_for_script(as_json(value))
    if len(text) <= MAX_PLAIN_BLOCK:
        return f'<script type="application/json" data-kind="{kind}">{text}</script>\n'
    data = base64.b64encode(zlib.compress(text.encode("utf-8"), 6)).decode("ascii")
    return f'<script type="text/plain" data-kind="{kind}" data-packed="deflate">{data}</script>\n'


def escape_for_script(text: str) -> str:
    """The same JSON value, escaped so that nothing can end a `<script>` or begin a comment."""
    return _UNSAFE.sub(lambda match: _ESCAPES[match[0]], text)
