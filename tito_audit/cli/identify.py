"""`tito-audit identify`: what wrote a log, as flags to paste."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from tito_audit.cli._ends import FAILED
from tito_audit.cli._options import Options
from tito_audit.cli._outs import print_result, refuse_inputs
from tito_audit.errors import SetupError
from tito_audit.identify import engine
from tito_audit.identify.engine import Identified, Lack, Left, Share
from tito_audit.identify.ids_alone import IdsAlone, ids_alone
from tito_audit.report_objects import pick
from tito_audit.run.auditor import drift_audit
from tito_audit.run.candidates import Candidates, candidates_for, templates_of_files
from tito_audit.run.log_groups import FirstRows, first_rows
from tito_audit.settings.file import merge_config, read_config, toml_key, toml_value
from tito_audit.settings.model import NO_TOOLS
from tito_audit.settings.options import KEYS
from tito_audit.storage import find_logs
from tito_audit.storage.atomic import new_file
from tito_audit.terminal.escape import elided, inert, shell_word, visible
from tito_audit.terminal.page import heading
from tito_audit.terminal.terminal import RunProgress, show_progress
from tito_audit.terminal.words import listed, many, percent
from tito_audit.ways.way import Explanation


def identify(options: Options, logs: list[str]) -> None:
    """Find what wrote a log."""
    refuse_inputs({"--write": options.write}, logs)
    with show_progress(pace := RunProgress(phase="reading the first rows")):
        settings = options.settings()
        templates = templates_of_files(options.chat_templates or options.configured("chat-template"))
        files = find_logs(logs)
        first = first_rows(files, settings, settings.limit or 400)
        pace.enter("loading tokenizers")
        candidates = candidates_for(
            first.rollouts,
            files,
            options.tokenizers,
            options.configured("tokenizer"),
            templates,
            trust_remote_code=settings.trust_remote_code,
        )
        pace.enter(f"trying {many(len(candidates.tried), 'tokenizer')}")
        identified = engine.identify(first.rollouts, candidates.tried, audit=drift_audit(settings))
        for candidate in candidates.tried:
            candidate.tokenizer.save()  # so that the next run need not load it to read its vocabulary
        alone = ids_alone(first.rollouts)
        outcome = IdentifyRun(logs, first, candidates, identified, alone, options.reading_flags())
    best = outcome.identified.best
    written = None
    if options.write is not None and best is not None and outcome.identified.sure:
        written = write_found(Path(options.write), best.explanation, force=options.force)
    page, paste = page_lines(outcome), paste_lines(outcome)
    print_result(options.shape, lambda: as_object(outcome), page, paste, options.notice())
    if options.write is not None:
        words = written or f"Nothing was written to {options.write}: what wrote the log is not certain."
        sys.stdout.flush()
        print(inert(visible(words)), file=sys.stderr)
    if not outcome.identified.sure:
        raise typer.Exit(FAILED)


_LISTED = 8
"""How many entries of a list are shown; the rest are counted."""
_TEXT, _VALUE = 200, 60
"""How many characters of logged text are shown."""
_WORDS = {True: "true", False: "false", None: "null"}
_LACKS = {
    Lack.NO_IDS: "the rows hold no token ids, so there is nothing to explain",
    Lack.NO_MESSAGES: "the rows hold no messages that a chat template could write",
    Lack.NO_TOKENIZER: "none of the tokenizers can have written these ids",
    Lack.NO_TEMPLATE: "the tokenizers that fit have no chat template; pass --chat-template FILE",
}


@dataclass(frozen=True, slots=True)
class IdentifyRun:
    """Everything that a run of `identify` found."""

    logs: Sequence[str]
    """As typed by the user."""
    first: FirstRows
    candidates: Candidates
    identified: Identified
    alone: IdsAlone | None
    more_flags: Sequence[str] = ()
    """Flags that the log was read with, which a scan needs too."""


def page_lines(outcome: IdentifyRun) -> Iterator[Text]:
    """Everything but what to paste."""
    yield from _head(outcome)
    identified = outcome.identified
    if identified.best is not None:
        explanation = identified.best.explanation
        if explanation.departures:
            yield from heading("What no flag can express")
        for departure in explanation.departures:
            line = Text(f"  {departure}", style="yellow")
            if departure.text:
                line.append(f": {visible(elided(departure.text, _TEXT))}")
            if departure.values:
                values = [elided(value, _VALUE) for value in departure.values]
                line.append(f" ({visible(elided(', '.join(values), _TEXT))})")
            yield line
        yield from _left(identified.left)
        best = identified.found[0]
        if best.undetermined:
            yield from heading("Undetermined by these rows")
            names = ["--tool-arguments" if name == "tool_arguments" else name for name in best.undetermined]
            yield Text(f"  {visible(listed(names))}: the prompts are the same with any value")
        if best.equal:
            yield from heading("Equivalent settings")
            yield from (Text(f"  {visible(described(equal))}") for equal in best.equal[:_LISTED])
            yield from _more(best.equal)
        if len(identified.found) > 1:
            yield from heading("Other candidates")
            for other in identified.found[1:_LISTED]:
                yield Text(f"  {visible(described(other.explanation))}: {share_words(other.share)}")
        if identified.endings:
            yield from heading("How sampled turns end")
        for ending in identified.endings[:_LISTED]:
            then = f", then the prompts hold {visible(ending.followed_by)!r}" if ending.followed_by else ""
            yield Text(f"  {visible(ending.piece)} ({ending.token_id}): {many(ending.turns, 'turn')}{then}")
    if not identified.sure:
        yield from _alone(outcome.alone)
    fits = {fit.tokenizer: fit for fit in outcome.identified.tokenizers}
    yield from heading("Tried")
    if not outcome.candidates.tried:
        yield Text("  no tokenizer")
    for candidate, because in zip(outcome.candidates.tried, outcome.candidates.because, strict=True):
        fit = fits.get(candidate.tokenizer.name)
        words = "" if fit is None else ": fits the ids" if fit.fits else f": {visible(elided(fit.because, _TEXT))}"
        yield Text(f"  {visible(candidate.tokenizer.name)} ({because}){words}")
    passed_over = outcome.candidates.passed_over
    for over in passed_over[:_LISTED]:
        yield Text(f"  {visible(over.name)} was not: {visible(elided(over.because, _TEXT))}", style="dim")
    yield from _more(passed_over)


def paste_lines(outcome: IdentifyRun) -> Iterator[Text]:
    """What to paste: a command, and the keys of a configuration file."""
    best = outcome.identified.best
    if best is None:
        return
    yield from heading("To paste" if outcome.identified.sure else "To paste, if it is right")
    yield Text("  " + command(outcome, best.explanation))
    yield Text("  in tito-audit.toml", style="dim")
    for line in toml_lines(best.explanation):
        yield Text(f"    {line}")


def command(outcome: IdentifyRun, explanation: Explanation) -> str:
    """The command that scans the logs with an explanation, as words of a shell."""
    words = ["tito-audit", "scan", *outcome.logs, *explanation.flags(), *outcome.more_flags]
    return " ".join(map(shell_word, words))


def toml_lines(explanation: Explanation) -> Iterator[str]:
    """The keys of a configuration file; a value that TOML cannot hold is said to be for the flag."""
    for name, value in explanation.config().items():
        try:
            yield f"{toml_key(name)} = {toml_value(value)}"
        except ValueError:
            yield f"# {name} has a value that TOML cannot hold: pass it as a flag"


def described(explanation: Explanation) -> str:
    """An explanation in words."""
    parts = [f"{explanation.tokenizer} with {explanation.template.label}"]
    parts += [
        f"{name}={_WORDS[value] if isinstance(value, bool | None) else value}"
        for name, value in explanation.template_args.items()
    ]
    if explanation.tool_arguments != "auto":
        parts.append(f"tool-call arguments as {explanation.tool_arguments}s")
    if explanation.clock is not None:
        parts.append(f"on {explanation.clock:%Y-%m-%d}")
    if explanation.without_tools:
        parts.append("without the tools of the log")
    return elided(", ".join(parts), 2 * _TEXT)


def _head(outcome: IdentifyRun) -> Iterator[Text]:
    """What was read, and the verdict."""
    first = outcome.first
    names = " ".join(outcome.logs[:3]) + (" …" if len(outcome.logs) > 3 else "")
    yield Text("tito-audit identify ", style="bold").append(visible(names))
    rows = f"the first {many(first.rows, 'row')}" if first.stopped else many(first.rows, "row")
    line = Text(f"{rows} read, {many(len(first.rollouts), 'rollout')}")
    if first.unreadable:
        place, why = next(iter(first.unreadable.items()))
        line.append(f" · {len(first.unreadable):,} that cannot be read: ", style="bold yellow")
        line.append(visible(elided(f"{place}: {why}", _TEXT)))
    yield line
    yield from (Text(visible(elided(notice, 2 * _TEXT)), style="dim") for notice in first.notices)
    yield Text()
    identified, best = outcome.identified, outcome.identified.best
    if best is None:
        why = _LACKS[identified.lack] if identified.lack is not None else "no template writes these prompts"
        if not outcome.candidates.tried and identified.lack is not Lack.NO_IDS:
            why = "there is no tokenizer to try; pass -t DIR or a Hugging Face name"
        if not first.rollouts:
            why = "no row can be read" if first.unreadable else "the log has no rows"
        yield Text("Not identified: ", style="bold red").append(why)
        if identified.lack is None:
            yield from _left(identified.left)
        return
    if identified.sure:
        yield Text("Written by ", style="bold green").append(visible(described(best.explanation)), style="bold")
    else:
        yield Text("Not certain. Closest: ", style="bold yellow").append(visible(described(best.explanation)))
    on_which = "The search saw them all."
    if (more := identified.rows_confirmed - identified.rows_searched) > 0:
        on_which = f"The search saw {identified.rows_searched:,} of them; the other {more:,} confirm it."
    yield Text(f"  It writes exactly {share_words(best.share)}. {on_which}")
    if not identified.sure and identified.unsure_because:
        yield Text(f"  Not certain because {visible(elided(identified.unsure_because, 2 * _TEXT))}.")


def share_words(share: Share) -> str:
    """What is written exactly: `240 of 250 prompts (96 %), ...`."""
    counts = (
        (share.prompts, share.of_prompts, "prompt"),
        (share.turns, share.of_turns, "later turn"),
        (share.tokens, share.of_tokens, "token"),
    )
    parts = [f"{count:,} of {many(of, noun)} ({percent(count / of)})" for count, of, noun in counts if of]
    return listed(parts) if parts else "no prompt"


def _left(left: Sequence[Left]) -> Iterator[Text]:
    if left:
        yield from heading("Not explained")
    for cause in left[:_LISTED]:
        first = visible(str(cause.place)) + (f", turn {cause.turn}" if cause.turn is not None else "")
        yield Text(f"  {cause.number:,} × {visible(elided(cause.cause, _TEXT))}, first at {first}")
    yield from _more(left)


def _alone(alone: IdsAlone | None) -> Iterator[Text]:
    """What the ids show without a tokenizer."""
    if alone is None:
        return
    yield from heading("From the ids alone")
    yield Text(
        f"  {alone.ids:,} ids in {many(alone.sequences, 'sequence')}, {alone.distinct:,} different, from "
        f"{alone.smallest:,} to {alone.largest:,}: the vocabulary has at least {alone.largest + 1:,} entries"
    )
    if alone.opening:
        yield Text(f"  every prompt opens with {', '.join(map(str, alone.opening))}")
    if alone.ends:
        ends = listed([f"{token_id} ({number:,})" for token_id, number in alone.ends])
        yield Text(f"  the last ids of {many(alone.turns, 'sampled turn')}: {ends}")
    if not alone.families:
        yield Text("  they match no tokenizer family known to tito-audit")
    for seen in alone.families:
        marks = ", ".join(f"{text} = {token_id}" for token_id, text in seen.family.marks.items())
        yield Text(
            f"  they may be from {seen.family.name}: {seen.sequences:,} of {alone.sequences:,} have {marks}"
        )


def _more(entries: Sequence[object]) -> Iterator[Text]:
    if len(entries) > _LISTED:
        yield Text(f"  … and {len(entries) - _LISTED:,} more", style="dim")


def as_object(outcome: IdentifyRun) -> dict[str, Any]:
    """Everything as one object; its keys are described in docs/identify.md."""
    identified, candidates = outcome.identified, outcome.candidates
    fits = {fit.tokenizer: fit for fit in identified.tokenizers}
    best = identified.best
    return {
        "schema_version": 1,
        "sure": identified.sure,
        "because": identified.lack.value if identified.lack is not None else identified.unsure_because,
        "explanations": [
            {
                **_explanation(each.explanation),
                "share": each.share,
                "equal": [_explanation(other) for other in each.equal],
                "undetermined": each.undetermined,
            }
            for each in identified.found
        ],
        "command": command(outcome, best.explanation) if best is not None else None,
        "left": [
            {**pick(left, "cause number"), **pick(left.place, "file row item"), "turn": left.turn}
            for left in identified.left
        ],
        "endings": identified.endings,
        "tokenizers": [
            {
                "name": candidate.tokenizer.name,
                "from": because,
                "templates": [template.label for template in candidate.templates],
                "fits": fits[name].fits if (name := candidate.tokenizer.name) in fits else None,
                "because": fits[name].because if name in fits else "",
            }
            for candidate, because in zip(candidates.tried, candidates.because, strict=True)
        ],
        "passed_over": candidates.passed_over,
        "rows": {
            "read": outcome.first.rows,
            "unreadable": len(outcome.first.unreadable),
            "all": not outcome.first.stopped,
        },
        "prompts": {"searched": identified.rows_searched, "compared": identified.rows_confirmed},
        "ids": None
        if (alone := outcome.alone) is None
        else {
            **pick(alone, "sequences ids distinct smallest largest turns opening"),
            "ends": [{"id": token_id, "turns": turns} for token_id, turns in alone.ends],
            "families": [
                {
                    **pick(seen.family, "name size"),
                    "sequences": seen.sequences,
                    "marks": {str(token_id): text for token_id, text in seen.family.marks.items()},
                }
                for seen in alone.families
            ],
        },
    }


def _explanation(explanation: Explanation) -> dict[str, Any]:
    clock = explanation.clock
    return {
        "tokenizer": explanation.tokenizer,
        "template": pick(explanation.template, "label chat_template template_name"),
        "template_args": dict(explanation.template_args),
        "tool_arguments": explanation.tool_arguments,
        "clock": clock.isoformat() if clock is not None else None,
        "without_tools": explanation.without_tools,
        "departures": [pick(departure, "kind text values") for departure in explanation.departures],
        "flags": list(explanation.flags()),
        "config": dict(explanation.config()),
    }


_DECIDED = ("tokenizer", "chat-template", "template-name", "template-args", "tool-arguments", "clock")
"""The keys that an explanation sets, or else removes."""

_PATHS = ("tokenizer", "chat-template")


def write_found(path: Path, explanation: Explanation, *, force: bool) -> str:
    """Write an explanation as keys of a configuration file; returns what was done in a sentence.

    SetupError if the file sets one of them to something else and `force` is not given.
    """
    target = path.absolute()
    if target.is_dir():
        raise SetupError(f"{path}: this is a folder, so nothing was written; name a file in it.")
    keys: dict[str, Any] = dict(explanation.config())
    for name in _PATHS:  # relative to the folder of the file where that is shorter
        if name in keys and Path(keys[name]).exists():
            keys[name] = KEYS[name].kind.to_toml(str(Path(keys[name]).absolute()), target.parent)
    unset = [name for name in _DECIDED if name not in keys]
    existed = target.exists()
    if not explanation.without_tools and existed and read_config(target).values.get("tools") == NO_TOOLS:
        unset.append("tools")
    merged = merge_config(target, keys, unset, force=force)
    if merged.is_unchanged:
        return f"{path} already has these settings."
    with new_file(target, overwrite=existed) as out:
        out.write(merged.text.encode())
    done = (("added", merged.added), ("changed", merged.changed))
    return f"{path}: {'; '.join(f'{verb} {listed(list(names))}' for verb, names in done if names)}."
