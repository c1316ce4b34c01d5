"""`tito-audit identify`: finds what wrote a log, as flags to paste."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from tito_audit.cli._exit import FAILED
from tito_audit.cli._options import Options
from tito_audit.cli._outputs import print_result, refuse_overwriting
from tito_audit.errors import SetupError
from tito_audit.identify import engine
from tito_audit.identify.engine import Identification, MissingInput, Unexplained, WrittenShare
from tito_audit.identify.ids_alone import IdsAlone, describe_ids
from tito_audit.report_objects import pick
from tito_audit.run.auditor import make_drift_audit
from tito_audit.run.candidates import Candidates, find_candidates, templates_of_files
from tito_audit.run.log_groups import FirstRows, read_first_rows
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
    refuse_overwriting({"--write": options.write}, logs)
    with show_progress(pace := RunProgress(phase="reading the first rows")):
        settings = options.settings()
        templates = templates_of_files(options.chat_templates or options.config_values("chat-template"))
        files = find_logs(logs)
        first = read_first_rows(files, settings, settings.limit or 400)
        pace.enter("loading tokenizers")
        candidates = find_candidates(
            first.rollouts,
            files,
            options.tokenizers,
            options.config_values("tokenizer"),
            templates,
            trust_remote_code=settings.trust_remote_code,
        )
        pace.enter(f"trying {many(len(candidates.tried), 'tokenizer')}")
        identified = engine.identify(first.rollouts, candidates.tried, audit=make_drift_audit(settings))
        for candidate in candidates.tried:
            candidate.tokenizer.save()  # so that the next run need not load it to read its vocabulary
        alone = describe_ids(first.rollouts)
        run = IdentifyRun(logs, first, candidates, identified, alone, options.reading_flags())
    best = run.identified.best
    written = None
    if options.write is not None and best is not None and run.identified.sure:
        written = write_explanation(Path(options.write), best.explanation, force=options.force)
    page, paste = page_lines(run), paste_lines(run)
    print_result(options.shape, lambda: run_object(run), page, paste, options.config_notice())
    if options.write is not None:
        words = written or f"Nothing was written to {options.write}: what wrote the log is not certain."
        sys.stdout.flush()
        print(inert(visible(words)), file=sys.stderr)
    if not run.identified.sure:
        raise typer.Exit(FAILED)


_LISTED = 8
"""How many entries of a list are shown; the others are counted."""
_WIDTH, _VALUE_WIDTH = 200, 60
"""How many characters of logged text are shown."""
_JSON_WORDS = {True: "true", False: "false", None: "null"}
_LACK_WORDS = {
    MissingInput.NO_IDS: "the rows hold no token ids, so there is nothing to explain",
    MissingInput.NO_MESSAGES: "the rows hold no messages that a chat template could write",
    MissingInput.NO_TOKENIZER: "none of the tokenizers can have written these ids",
    MissingInput.NO_TEMPLATE: "the tokenizers that fit have no chat template; pass --chat-template FILE",
}


@dataclass(frozen=True, slots=True)
class IdentifyRun:
    """What a run of `identify` found."""

    logs: Sequence[str]
    """As typed by the user."""
    first: FirstRows
    candidates: Candidates
    identified: Identification
    alone: IdsAlone | None
    more_flags: Sequence[str] = ()
    """The flags that the log was read with; a scan needs them too."""


def page_lines(run: IdentifyRun) -> Iterator[Text]:
    """The page, up to what to paste."""
    first, identified = run.first, run.identified
    names = " ".join(run.logs[:3]) + (" …" if len(run.logs) > 3 else "")
    yield Text("tito-audit identify ", style="bold").append(visible(names))
    rows = f"the first {many(first.rows, 'row')}" if first.stopped else many(first.rows, "row")
    line = Text(f"{rows} read, {many(len(first.rollouts), 'rollout')}")
    if first.unreadable:
        place, why = next(iter(first.unreadable.items()))
        line.append(f" · {len(first.unreadable):,} that cannot be read: ", style="bold yellow")
        line.append(visible(elided(f"{place}: {why}", _WIDTH)))
    yield line
    yield from (Text(visible(elided(notice, 2 * _WIDTH)), style="dim") for notice in first.notices)
    yield Text()
    yield from _explanation_lines(run)
    alone = run.alone
    if not identified.sure and alone is not None:
        yield from heading("From the ids alone")
        counts = f"{alone.ids:,} ids in {many(alone.sequences, 'sequence')}, {alone.distinct:,} different"
        entries = f"the vocabulary has at least {alone.largest + 1:,} entries"
        yield Text(f"  {counts}, from {alone.smallest:,} to {alone.largest:,}: {entries}")
        if alone.opening:
            yield Text(f"  every prompt opens with {', '.join(map(str, alone.opening))}")
        if alone.ends:
            ends = listed([f"{token_id} ({number:,})" for token_id, number in alone.ends])
            yield Text(f"  the last ids of {many(alone.turns, 'sampled turn')}: {ends}")
        if not alone.families:
            yield Text("  they match no tokenizer family known to tito-audit")
        for seen in alone.families:
            marks = ", ".join(f"{text} = {token_id}" for token_id, text in seen.family.marks.items())
            share = f"{seen.sequences:,} of {alone.sequences:,} have {marks}"
            yield Text(f"  they may be from {seen.family.name}: {share}")
    fits = {fit.tokenizer: fit for fit in run.identified.tokenizers}
    yield from heading("Tried")
    if not run.candidates.tried:
        yield Text("  no tokenizer")
    for candidate, because in zip(run.candidates.tried, run.candidates.because, strict=True):
        fit = fits.get(candidate.tokenizer.name)
        words = (
            "" if fit is None else ": fits the ids" if fit.fits else f": {visible(elided(fit.because, _WIDTH))}"
        )
        yield Text(f"  {visible(candidate.tokenizer.name)} ({because}){words}")
    passed_over = run.candidates.passed_over
    for over in passed_over[:_LISTED]:
        yield Text(f"  {visible(over.name)} was not: {visible(elided(over.because, _WIDTH))}", style="dim")
    yield from _rest_lines(passed_over)


def paste_lines(run: IdentifyRun) -> Iterator[Text]:
    """What to paste: a command and the keys of a configuration file; no lines if nothing was identified."""
    best = run.identified.best
    if best is None:
        return
    yield from heading("To paste" if run.identified.sure else "To paste, if it is right")
    yield Text("  " + scan_command(run, best.explanation))
    yield Text("  in tito-audit.toml", style="dim")
    for name, value in best.explanation.config().items():
        try:
            line = f"{toml_key(name)} = {toml_value(value)}"
        except ValueError:
            line = f"# {name} has a value that TOML cannot hold: pass it as a flag"
        yield Text(f"    {line}")


def scan_command(run: IdentifyRun, explanation: Explanation) -> str:
    """The shell command that scans the logs with an explanation's settings."""
    words = ["tito-audit", "scan", *run.logs, *explanation.flags(), *run.more_flags]
    return " ".join(map(shell_word, words))


def explanation_words(explanation: Explanation) -> str:
    """The tokenizer, template and arguments of an explanation, in words."""
    parts = [f"{explanation.tokenizer} with {explanation.template.label}"]
    parts += [
        f"{name}={_JSON_WORDS[value] if isinstance(value, bool | None) else value}"
        for name, value in explanation.template_args.items()
    ]
    if explanation.tool_arguments != "auto":
        parts.append(f"tool-call arguments as {explanation.tool_arguments}s")
    if explanation.clock is not None:
        parts.append(f"on {explanation.clock:%Y-%m-%d}")
    if explanation.without_tools:
        parts.append("without the tools of the log")
    return elided(", ".join(parts), 2 * _WIDTH)


def _explanation_lines(run: IdentifyRun) -> Iterator[Text]:
    """The verdict, then what the settings leave open: departures, causes, and what fits as well."""
    first, identified, best = run.first, run.identified, run.identified.best
    if best is None:
        why = _LACK_WORDS[identified.lack] if identified.lack is not None else "no template writes these prompts"
        if not run.candidates.tried and identified.lack is not MissingInput.NO_IDS:
            why = "there is no tokenizer to try; pass -t DIR or a Hugging Face name"
        if identified.lack is MissingInput.NO_IDS and run.alone is not None:
            why = "the rows hold too few different token ids, or placeholders, so there is nothing to explain"
        if not first.rollouts:
            why = "no row can be read" if first.unreadable else "the log has no rows"
        yield Text("Not identified: ", style="bold red").append(why)
        if identified.lack is None:
            yield from _unexplained_lines(identified.left)
        return
    words = visible(explanation_words(best.explanation))
    if identified.sure:
        yield Text("Written by ", style="bold green").append(words, style="bold")
    else:
        yield Text("Not certain. Closest: ", style="bold yellow").append(words)
    on_which = "The search saw them all."
    if (more := identified.rows_confirmed - identified.rows_searched) > 0:
        on_which = f"The search saw {identified.rows_searched:,} of them; the other {more:,} confirm it."
    yield Text(f"  It writes exactly {share_words(best.share)}. {on_which}")
    if not identified.sure and identified.unsure_because:
        yield Text(f"  Not certain because {visible(elided(identified.unsure_because, 2 * _WIDTH))}.")
    if best.explanation.departures:
        yield from heading("What no flag can express")
    for departure in best.explanation.departures:
        line = Text(f"  {departure}", style="yellow")
        if departure.text:
            line.append(f": {visible(elided(departure.text, _WIDTH))}")
        if departure.values:
            values = [elided(value, _VALUE_WIDTH) for value in departure.values]
            line.append(f" ({visible(elided(', '.join(values), _WIDTH))})")
        yield line
    yield from _unexplained_lines(identified.left)
    if best.undetermined:
        yield from heading("Undetermined by these rows")
        names = ["--tool-arguments" if name == "tool_arguments" else name for name in best.undetermined]
        yield Text(f"  {visible(listed(names))}: the prompts are the same with any value")
    if best.equal:
        yield from heading("Equivalent settings")
        yield from (Text(f"  {visible(explanation_words(equal))}") for equal in best.equal[:_LISTED])
        yield from _rest_lines(best.equal)
    if len(identified.found) > 1:
        yield from heading("Other candidates")
        for other in identified.found[1:_LISTED]:
            yield Text(f"  {visible(explanation_words(other.explanation))}: {share_words(other.share)}")
    if identified.endings:
        yield from heading("How sampled turns end")
    for ending in identified.endings[:_LISTED]:
        then = f", then the prompts hold {visible(ending.followed_by)!r}" if ending.followed_by else ""
        yield Text(f"  {visible(ending.piece)} ({ending.token_id}): {many(ending.turns, 'turn')}{then}")


def share_words(share: WrittenShare) -> str:
    """What is written exactly: `240 of 250 prompts (96 %), ...`."""
    counts = (
        (share.prompts, share.of_prompts, "prompt"),
        (share.turns, share.of_turns, "later turn"),
        (share.tokens, share.of_tokens, "token"),
    )
    parts = [f"{count:,} of {many(of, noun)} ({percent(count / of)})" for count, of, noun in counts if of]
    return listed(parts) if parts else "no prompt"


def _unexplained_lines(left: Sequence[Unexplained]) -> Iterator[Text]:
    if left:
        yield from heading("Not explained")
    for cause in left[:_LISTED]:
        first = visible(str(cause.place)) + (f", turn {cause.turn}" if cause.turn is not None else "")
        yield Text(f"  {cause.number:,} × {visible(elided(cause.cause, _WIDTH))}, first at {first}")
    yield from _rest_lines(left)


def _rest_lines(entries: Sequence[object]) -> Iterator[Text]:
    if len(entries) > _LISTED:
        yield Text(f"  … and {len(entries) - _LISTED:,} more", style="dim")


def run_object(run: IdentifyRun) -> dict[str, Any]:
    """The JSON object of a run; docs/identify.md describes its keys."""
    identified, candidates = run.identified, run.candidates
    fits = {fit.tokenizer: fit for fit in identified.tokenizers}
    best = identified.best
    return {
        "schema_version": 1,
        "sure": identified.sure,
        "because": identified.lack.value if identified.lack is not None else identified.unsure_because,
        "explanations": [
            {
                **_explanation_object(each.explanation),
                "share": each.share,
                "equal": [_explanation_object(other) for other in each.equal],
                "undetermined": each.undetermined,
            }
            for each in identified.found
        ],
        "command": scan_command(run, best.explanation) if best is not None else None,
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
            "read": run.first.rows,
            "unreadable": len(run.first.unreadable),
            "all": not run.first.stopped,
        },
        "prompts": {"searched": identified.rows_searched, "compared": identified.rows_confirmed},
        "ids": None
        if (alone := run.alone) is None
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


def _explanation_object(explanation: Explanation) -> dict[str, Any]:
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


_SET_KEYS = ("tokenizer", "chat-template", "template-name", "template-args", "tool-arguments", "clock")
"""The keys that `--write` sets, or removes where the explanation has no value for them."""
_PATH_KEYS = ("tokenizer", "chat-template")


def write_explanation(path: Path, explanation: Explanation, *, force: bool) -> str:
    """Write an explanation into a configuration file; returns a sentence about what was done.

    SetupError if the file sets one of the keys to something else, unless `force`.
    """
    target = path.absolute()
    if target.is_dir():
        raise SetupError(f"{path}: this is a folder, so nothing was written; name a file in it.")
    keys: dict[str, Any] = dict(explanation.config())
    for name in _PATH_KEYS:  # relative to the file's folder where that is shorter
        if name in keys and Path(keys[name]).exists():
            keys[name] = KEYS[name].kind.to_toml(str(Path(keys[name]).absolute()), target.parent)
    unset = [name for name in _SET_KEYS if name not in keys]
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
