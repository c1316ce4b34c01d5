"""The table as files: `drift.jsonl`, `drift.parquet`, a badge and a page that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from tito_audit.conformance.builders import BUILDERS
from tito_audit.conformance.corpus import CORPUS, CORPUS_VERSION
from tito_audit.conformance.matrix import ORDER, DriftCell, TokenFate
from tito_audit.conformance.verdicts import DriftScore, DriftTrial, badge
from tito_audit.errors import SetupError
from tito_audit.storage.atomic import make_folder, new_file
from tito_audit.terminal.escape import visible
from tito_audit.version import VERSION

_NAMES = tuple(each.name for each in fields(DriftCell))


def as_row(trial: DriftTrial, cell: DriftCell) -> dict[str, Any]:
    """A line of `drift.jsonl`."""
    return {
        **asdict(cell),
        "outcome": cell.outcome.value,
        "template_sha256": trial.template_sha256,
        "tokenizer_digest": trial.tokenizer_digest,
        "tito_audit": VERSION,
        "corpus": CORPUS_VERSION,
    }


def read_table(path: Path) -> list[DriftCell]:
    """The cells of a `drift.jsonl`; SetupError if it is not one, or of another corpus."""
    cells = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(
            f"--against {path}: it cannot be read ({error}).\nName the drift.jsonl of an earlier run."
        ) from None
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
            version = row["corpus"]
            cell = DriftCell(**{name: row[name] for name in _NAMES} | {"outcome": TokenFate(row["outcome"])})
        except (ValueError, KeyError, TypeError):
            what = f"line {number + 1} is no cell of this table"
            raise SetupError(f"--against {path}: {what}.\nName the drift.jsonl of an earlier run.") from None
        if version != CORPUS_VERSION:
            raise SetupError(
                f"--against {path}: its conversations are those of version {version}, ours of {CORPUS_VERSION}.\n"
                "Tables of different versions are not compared: write the old one again with this version."
            )
        cells.append(cell)
    return cells


def write_table(folder: Path, table: Sequence[DriftTrial], *, force: bool) -> list[Path]:
    """Write the four files; StorageError if one exists and `force` is not set."""
    import pyarrow
    import pyarrow.parquet

    make_folder(folder)
    rows = [as_row(trial, cell) for trial in table for cell in trial.cells]
    paths = [folder / name for name in ("drift.jsonl", "drift.parquet", "index.html", "badge.svg")]
    with new_file(paths[0], overwrite=force) as out:
        for row in rows:
            out.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
    with new_file(paths[1], overwrite=force) as out:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    with new_file(paths[2], overwrite=force) as out:
        out.write(page(table).encode())
    with new_file(paths[3], overwrite=force) as out:
        out.write(badge(table).encode())
    return paths


def page(table: Sequence[DriftTrial]) -> str:
    """The HTML page: the matrix, and what happens in each cell. Every text of a template is escaped."""
    assets = files("tito_audit.conformance").joinpath("assets")
    style, script, html = (assets.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js", "html"))
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    heads = "".join(f'<th scope="col"><button>{_escape(each.name)}</button></th>' for each in BUILDERS)
    parts = [
        "<h1>Which templates keep tokens</h1>"
        f"<p class='quiet'>tito-audit {_escape(VERSION)}, {len(CORPUS)} conversations (version "
        f"{CORPUS_VERSION}). A cell: conversations whose tokens are kept, + those that go on in another training "
        "row, of those that were compared. Click a head to sort, a cell to see what happens in the others.</p>",
        "<div class='scroll'><table id='matrix'><thead><tr><th scope='col'><button>template</button></th>"
        f"{heads}</tr></thead><tbody>",
    ]
    for number, trial in enumerate(table):
        parts.append(f"<tr><th scope='row'>{_escape(trial.name)}</th>")
        for each in BUILDERS:
            score = trial.score(each.name)
            share = score.safe / score.compared if score.compared else -1.0
            kind = "none" if share < 0 else "part" if score.safe else "bad"
            kind = "good" if score.compared and score.whole == score.compared else kind
            link = f"<a href='#t{number}-{each.name}'>{score}</a>"
            parts.append(f"<td class='{kind}' data-sort='{share:.6f}'>{link}</td>")
        parts.append("</tr>")
    parts.append("</tbody></table></div><h2>The builders</h2><dl>")
    parts.append("".join(f"<dt>{_escape(each.name)}</dt><dd>{_escape(each.source)}</dd>" for each in BUILDERS))
    parts.append("</dl><h2>What happens</h2>")
    for number, trial in enumerate(table):
        parts.append(f"<h3>{_escape(trial.name)}</h3><p>{_escape(trial.verdict)}</p>")
        parts.append(f"<p class='quiet'>template {trial.template_sha256[:12]}</p>")
        for each in BUILDERS:
            # Its conversations that are not kept, grouped by cause.
            cells, groups = trial.cells_by(each.name), dict[tuple[TokenFate, str, str], list[DriftCell]]()
            for cell in sorted(cells, key=lambda cell: -ORDER.index(cell.outcome)):
                if cell.outcome is not TokenFate.KEPT:
                    groups.setdefault((cell.outcome, cell.cause, cell.detail), []).append(cell)
            summary = f"{_escape(each.name)}: {DriftScore.of(cells)}"
            parts.append(f"<details id='t{number}-{each.name}'><summary>{summary}</summary>")
            for (outcome, cause, detail), group in groups.items():
                head = f"<h4>{_escape(outcome)} ({len(group)}): {_escape(cause)}</h4>"
                names = ", ".join(_escape(cell.conversation) for cell in group)
                parts.append(f"<section>{head}<p class='quiet'>{names}</p>")
                if detail:
                    parts.append(f"<p><code>{_escape(detail)}</code></p>")
                first = group[0]
                if first.sampled or first.next:
                    parts.append(
                        f"<p>after answer {(first.turn or 0) + 1}, token {first.at}</p>"
                        f"<pre><span class='gone'>{_escape(first.sampled)}</span>\n"
                        f"<span class='came'>{_escape(first.next)}</span></pre>"
                    )
                parts.append("</section>")
            parts.append("</details>")
    return Template(html).substitute(policy=policy, style=style, script=script, body="\n".join(parts))


def _escape(text: str) -> str:
    return escape(visible(text))
