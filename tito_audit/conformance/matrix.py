"""Whether sampled tokens are kept, by template, builder and conversation; a verdict on each one; the files."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from tito_audit.conformance.builders import BUILDERS, AnsweredTurn, Build, NewRow, NotBuilt, NotFit, PromptBuilder
from tito_audit.conformance.world import (
    CORPUS,
    CORPUS_VERSION,
    CorpusConversation,
    SamplingForm,
    Tokens,
    UnknownSample,
    World,
)
from tito_audit.errors import RenderError, SetupError
from tito_audit.render.spans import common_start
from tito_audit.storage.atomic import make_folder, new_file
from tito_audit.templates.append_only import Step, StepOutcome, check_append_only
from tito_audit.templates.breaks import HistoryChange, starts_with_end
from tito_audit.templates.facts import find_settings
from tito_audit.templates.verdict import format_flags
from tito_audit.terminal.escape import visible
from tito_audit.terminal.words import listed
from tito_audit.version import VERSION

_AROUND = 24
"""How many tokens of each side of a break are shown."""


class TokenFate(StrEnum):
    """What became of the sampled tokens of a conversation."""

    KEPT = "kept"
    """Each prompt starts with all tokens before it, and adds what the template writes there."""
    FORKED = "forked"
    """The builder begins another training row; what was sampled stays in the row before."""
    OFF_TEMPLATE = "off template"
    """The tokens are kept, but the prompt adds other text than the template writes there."""
    BROKEN = "broken"
    """A prompt does not start with what was sampled before it."""
    RAISES = "raises"
    """The builder raises an error in place of a prompt."""
    NOT_TAKEN = "not taken"
    """The builder is not made for these messages."""
    REFUSED = "refused"
    """The template refuses the conversation."""
    UNSAMPLED = "not sampled"
    """What the model sampled is not known, so nothing is compared."""


ORDER = tuple(TokenFate)
"""The best outcome first."""


@dataclass(frozen=True, slots=True)
class DriftCell:
    """What one builder does with one conversation of one template."""

    template: str
    builder: str
    conversation: str
    outcome: TokenFate
    turn: int | None = None
    """The answer after which it happened, counted from 0."""
    at: int | None = None
    """The first token that differs, in the next prompt."""
    cause: str = ""
    detail: str = ""
    """The lines and conditions of the template that decide; "" if none do."""
    line: int | None = None
    sampled: str = ""
    """The text from the break on, as it was sampled or as the template writes it."""
    next: str = ""
    """The text from the break on in the next prompt."""


def drift_cells(world: World) -> Iterator[DriftCell]:
    """The cells of one template, conversation by conversation."""
    ways = [(builder, builder.begin(world)) for builder in BUILDERS]
    for conversation in CORPUS:
        for builder, build in ways:
            yield _compare(world, builder, build, conversation)


def _compare(world: World, builder: PromptBuilder, build: Build, conversation: CorpusConversation) -> DriftCell:
    """The outcome of one conversation: of the first turn that is not kept, else of all turns."""
    probe, prompt = conversation.probe, None
    cell = partial(DriftCell, world.name, builder.name, conversation.name)
    for number, (answer, until) in enumerate(conversation.turns):
        try:
            text = world.text(probe.messages[:until], probe.tools, opens=True)
            sample = world.sample(conversation, answer)
            if prompt is None:
                prompt = world.ids(world.text(probe.messages[:answer], probe.tools, opens=True))
        except RenderError as error:
            return cell(TokenFate.REFUSED, number, cause=str(error))
        except UnknownSample as error:
            return cell(TokenFate.UNSAMPLED, number, cause=str(error))
        turn = AnsweredTurn(probe, answer, until, prompt, sample, number)
        try:
            after = build(turn)
        except NotFit as error:
            outcome = TokenFate.KEPT if number else TokenFate.NOT_TAKEN
            return cell(outcome, number, cause=f"up to here: {error}" if number else str(error))
        except (RenderError, NotBuilt) as error:
            return cell(TokenFate.RAISES, number, cause=str(error))
        except NewRow as error:
            return cell(TokenFate.FORKED, number, cause=str(error))
        seen, prompt = turn.seen_ids, after
        if after[: len(seen)] != seen:
            pairs = enumerate(zip(seen, after, strict=False))
            at = next((place for place, (old, new) in pairs if old != new), len(after))
            sides = world.decode(seen[at : at + _AROUND]), world.decode(after[at : at + _AROUND])
            return cell(TokenFate.BROKEN, number, at, *_cause(world, conversation, turn, after, text), *sides)
        # The tokens are kept. Does the prompt add what the template writes after them?
        tail, wanted = world.decode(after[len(seen) :]), _text_after_answer(text, turn, world)
        if wanted is None or not tail:
            fits = text.endswith(tail)
        else:  # the sampled end token stays, even if the template ends earlier turns with another one
            ended = sample.ended and wanted.endswith(tail) and starts_with_end(wanted[: len(wanted) - len(tail)])
            fits = tail == wanted or ended
        if not fits:
            shared = common_start(wanted or "", tail)
            return cell(
                TokenFate.OFF_TEMPLATE,
                number,
                len(seen) + len(world.ids(tail[:shared])),
                "what the prompt adds is not what the template writes there",
                sampled=(wanted or text)[shared : shared + 4 * _AROUND],
                next=tail[shared : shared + 4 * _AROUND],
            )
    return cell(TokenFate.UNSAMPLED if prompt is None else TokenFate.KEPT)


def _text_after_answer(text: str, turn: AnsweredTurn, world: World) -> str | None:
    """What the template writes from where sampling ended; None if the answer is not in its text."""
    body = turn.sample.text
    for end in sorted(filter(None, world.ends), key=len, reverse=True):
        body = body.removesuffix(end)
    # Search for a long end of the answer first: its last words may come again in the next turn.
    ends = (body.strip()[-size:] for size in (96, 48, 24, 12))
    last = next((each for each in ends if each and each in text), "")
    if not last:
        return None
    at = text.rfind(last)
    rest = text[at + len(last) :]
    ended = next((each for each in world.ends if each and rest.lstrip().startswith(each)), "")
    if turn.sample.ended and ended:  # with the white space before it, as sampled or as the template trims it
        return rest.lstrip()[len(ended) :]
    return rest.removeprefix(body[len(body.rstrip()) :])


def _cause(
    world: World, conversation: CorpusConversation, turn: AnsweredTurn, after: Tokens, text: str
) -> tuple[str, str, int | None]:
    """The cause of a break, what decides it, and its line in the template."""
    history, then = world.decode(turn.seen_ids), world.decode(after)
    if then.startswith(history):
        return "re-tokenized: the same text in other tokens", "", None
    prompt = world.text(turn.probe.messages[: turn.answer], turn.probe.tools, opens=True)
    written = world.sample(replace(conversation, sampled=SamplingForm.AS_WRITTEN), turn.answer).text
    if text.startswith(prompt + written):
        return f"the template writes it otherwise than it was sampled: {conversation.sampled}", "", None
    shared = common_start(prompt + written, text)
    step = Step(turn.probe, turn.answer, turn.until, StepOutcome.BROKEN, prompt, written, text, shared)
    explained = world.explained(step)
    tags = [decision.tag for decision in explained.conditions] or [
        tag for tag in (explained.rendered.tag, explained.sampled.tag) if tag is not None
    ]
    detail = "; ".join(f"line {tag.line}: {tag.source}" for tag in dict.fromkeys(tags))
    return str(explained.change), detail, tags[0].line if tags else None


def worsened_cells(old: Iterable[DriftCell], new: Iterable[DriftCell]) -> list[tuple[DriftCell, DriftCell]]:
    """The cells that got worse, as they were and as they are; cells that only one table has do not count."""
    before = {(each.template, each.builder, each.conversation): each for each in old}
    pairs = [(before.get((each.template, each.builder, each.conversation)), each) for each in new]
    return [
        (was, now) for was, now in pairs if was is not None and ORDER.index(now.outcome) > ORDER.index(was.outcome)
    ]


_CONVERSATIONS = {each.name: each for each in CORPUS}
_FOLLOWS = {
    "user": ("each user turn", "some user turns"),
    "tool": ("each result of a tool", "some results of tools"),
    "system": ("each system message", "some system messages"),
}
_TEMPLATE_CAUSES = frozenset(map(str, HistoryChange))


class TemplateFate(StrEnum):
    """What becomes of the sampled tokens of a template where ids are stored and joined."""

    KEPT = "tokens kept"
    FORKED = "forks"
    BROKEN = "not all kept"
    UNKNOWN = "not compared"


_COMPARED = (TokenFate.KEPT, TokenFate.FORKED, TokenFate.OFF_TEMPLATE, TokenFate.BROKEN, TokenFate.RAISES)
"""Outcomes of conversations that were compared."""


@dataclass(frozen=True, slots=True)
class DriftTrial:
    """One template, and what each builder does with its conversations."""

    name: str
    template_sha256: str
    tokenizer_digest: str
    """Of the tokenizer's files; "" for a stand-in."""
    cells: tuple[DriftCell, ...]
    argument: str = ""
    """The flags with which the template keeps usual conversations; "" if it needs none, or none help."""

    @classmethod
    def of(cls, world: World, cells: Iterable[DriftCell]) -> DriftTrial:
        trial = cls(world.name, *world.digests, tuple(cells))
        if trial.fate in (TemplateFate.KEPT, TemplateFate.UNKNOWN):
            return trial
        better = find_settings(world.renderer, check_append_only(world.renderer))
        flags = next((format_flags(each.arguments) for each in better if not each.append.broken), "")
        return replace(trial, argument=flags)

    def cells_by(self, builder: str) -> list[DriftCell]:
        return [cell for cell in self.cells if cell.builder == builder]

    def score(self, builder: str) -> DriftScore:
        return DriftScore.of(self.cells_by(builder))

    @property
    def fate(self) -> TemplateFate:
        """What our gateway, the builder `splice`, does with its tokens."""
        score = self.score("splice")
        if not score.compared:
            return TemplateFate.UNKNOWN
        if score.safe < score.compared:
            return TemplateFate.BROKEN
        return TemplateFate.FORKED if score.forked else TemplateFate.KEPT

    @property
    def safe(self) -> list[str]:
        """The builders that keep in one training row every conversation that they take."""
        scores = {name: self.score(name) for name in {cell.builder: 0 for cell in self.cells}}
        return [name for name, score in scores.items() if score.compared and score.whole == score.compared]

    @property
    def verdict(self) -> str:
        """`safe with splice`, or where the gateway forks: at which turns, why, and what helps."""
        score, fate = self.score("splice"), self.fate
        if fate is TemplateFate.UNKNOWN:
            causes = Counter(cell.cause for cell in self.cells_by("splice"))
            return f"nothing to compare: {causes.most_common(1)[0][0]}"
        names = [f"{name} (results of tools)" if name == "trl" else name for name in self.safe]
        parts = [f"safe with {listed(names)}"] if names else []
        if fate is not TemplateFate.KEPT:
            what = [f"keeps {score}"] * (score.safe < score.compared)
            # At which turns it forks, by the role of the message that follows.
            forked, stayed = Counter[str](), Counter[str]()
            for cell in self.cells_by("splice"):
                conversation = _CONVERSATIONS[cell.conversation]
                nexts = [conversation.probe.messages[answer + 1].role for answer, _ in conversation.turns]
                if cell.outcome is TokenFate.FORKED and cell.turn is not None:
                    stayed.update(nexts[: cell.turn])
                    forked.update(nexts[cell.turn : cell.turn + 1])
                elif cell.outcome is TokenFate.KEPT:
                    stayed.update(nexts)
            places = [words[bool(stayed[role])] for role, words in _FOLLOWS.items() if forked[role]]
            what += [f"forks at {listed(places) if places else 'times'}"] * (score.forked > 0)
            # What the template does most often there, and in which line.
            lines: dict[str, list[int | None]] = {}
            for cell in self.cells_by("render"):
                if cell.cause in _TEMPLATE_CAUSES:
                    lines.setdefault(cell.cause, []).append(cell.line)
            most = sorted(lines, key=lambda cause: -len(lines[cause]))[:2]
            reasons = [c + (f" (line {line})" if (line := lines[c][0]) is not None else "") for c in most]
            why = f" because it {listed(reasons)}" if reasons else ""
            seek = "no argument helps: seek a variant with `template --training`"
            parts += [f"splice {', and '.join(what)}{why}", f"set {self.argument}" if self.argument else seek]
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class DriftScore:
    """What a builder does with the conversations of a template."""

    whole: int
    """How many conversations keep their tokens in one training row."""
    forked: int
    compared: int

    @classmethod
    def of(cls, cells: Iterable[DriftCell]) -> DriftScore:
        each = Counter(cell.outcome for cell in cells)
        return cls(each[TokenFate.KEPT], each[TokenFate.FORKED], sum(each[outcome] for outcome in _COMPARED))

    @property
    def safe(self) -> int:
        """How many conversations train only what was sampled: kept or forked."""
        return self.whole + self.forked

    def __str__(self) -> str:
        """`27 of 30`, with forks `20 + 7 of 30`; a dash where nothing was compared."""
        if not self.compared:
            return "–"
        return f"{self.whole}{f' + {self.forked}' if self.forked else ''} of {self.compared}"


_COLOURS = {
    TemplateFate.KEPT: "#2e7d32",
    TemplateFate.FORKED: "#9a6700",
    TemplateFate.BROKEN: "#b3261e",
    TemplateFate.UNKNOWN: "#5f6368",
}


def badge(table: Sequence[DriftTrial]) -> str:
    """An SVG for a README: the fate of one template's tokens, or how many of several templates keep them."""
    states = Counter(trial.fate for trial in table)
    worst = max(states, key=list(TemplateFate).index)
    score = DriftScore.of(cell for trial in table for cell in trial.cells_by("splice"))
    message = f"{worst} ({score})" if len(table) == 1 else f"{states[TemplateFate.KEPT]} of {len(table)} templates"
    label, colour = "token-in, token-out", _COLOURS[worst]
    left, right = (13 + round(6.6 * len(text)) for text in (label, message))
    texts = "".join(
        f'<text x="{at}" y="14">{escape(text)}</text>'
        for at, text in ((left / 2, label), (left + right / 2, message))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{escape(f"{label}: {message}")}"><rect width="{left}" height="20" fill="#444"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{colour}"/><g fill="#fff" text-anchor="middle" '
        f'font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{texts}</g></svg>\n'
    )


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
