"""The page of `identify`: the verdict, its evidence, and what to paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from tito_audit.identify import Explanation, Found, Identified, Lack, Left, Share
from tito_audit.identify.ids_alone import IdsAlone
from tito_audit.run.candidates import Candidates
from tito_audit.run.first_rows import FirstRows
from tito_audit.settings.file import toml_key, toml_value
from tito_audit.terminal.cut import elided
from tito_audit.terminal.escape import visible
from tito_audit.terminal.shell import shell_word
from tito_audit.terminal.words import listed, many, percent

_LISTED = 8
"""How many entries of a list are shown; the rest are counted."""
_TEXT, _VALUE = 200, 60
"""How many characters of logged text are shown."""
_LACKS = {
    Lack.NO_IDS: "the rows hold no token ids, so there is nothing to explain",
    Lack.NO_MESSAGES: "the rows hold no messages that a chat template could write",
    Lack.NO_TOKENIZER: "none of the tokenizers can have written these ids",
    Lack.NO_TEMPLATE: "the tokenizers that fit have no chat template; pass --chat-template FILE",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a run of `identify` found."""

    logs: Sequence[str]
    """As typed by the user."""
    first: FirstRows
    candidates: Candidates
    found: Identified
    alone: IdsAlone | None
    more_flags: Sequence[str] = ()
    """Flags that the log was read with, which a scan needs too."""


def page_lines(outcome: Outcome) -> Iterator[Text]:
    """Everything but what to paste."""
    yield from _head(outcome)
    yield Text()
    yield from _verdict(outcome)
    found = outcome.found
    best = found.best
    if best is not None:
        yield from _departures(best.explanation)
        yield from _left(found.left)
        yield from _others(found)
        yield from _endings(found)
    if not found.sure:
        yield from _alone(outcome.alone)
    yield from _tried(outcome)


def paste_lines(outcome: Outcome) -> Iterator[Text]:
    """What to paste: a command, and the keys of a configuration file."""
    best = outcome.found.best
    if best is None:
        return
    yield from _title("To paste" if outcome.found.sure else "To paste, if it is right")
    yield Text("  " + command(outcome, best.explanation))
    yield Text("  in tito-audit.toml", style="dim")
    for line in toml_lines(best.explanation):
        yield Text(f"    {line}")


def command(outcome: Outcome, explanation: Explanation) -> str:
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
    said = [f"{explanation.tokenizer} with {explanation.template.label}"]
    said += [f"{name}={_value(value)}" for name, value in explanation.template_args.items()]
    if explanation.tool_arguments != "auto":
        said.append(f"tool-call arguments as {explanation.tool_arguments}s")
    if explanation.clock is not None:
        said.append(f"on {explanation.clock:%Y-%m-%d}")
    if explanation.without_tools:
        said.append("without the tools of the log")
    return elided(", ".join(said), 2 * _TEXT)


def _value(value: object) -> str:
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)


def _head(outcome: Outcome) -> Iterator[Text]:
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
    yield from (Text(visible(elided(one, 2 * _TEXT)), style="dim") for one in first.notices)


def _verdict(outcome: Outcome) -> Iterator[Text]:
    found = outcome.found
    best = found.best
    if best is None:
        yield Text("Not identified: ", style="bold red").append(_why_nothing(outcome))
        if found.lack is None:
            yield from _left(found.left)
        return
    if found.sure:
        yield Text("Written by ", style="bold green").append(visible(described(best.explanation)), style="bold")
    else:
        yield Text("Not certain. Closest: ", style="bold yellow").append(visible(described(best.explanation)))
    yield Text(f"  It writes exactly {share_words(best.share)}. {_on_which(found)}")
    if not found.sure and found.unsure_because:
        yield Text(f"  Not certain because {visible(elided(found.unsure_because, 2 * _TEXT))}.")


def _why_nothing(outcome: Outcome) -> str:
    """Why there is no explanation at all."""
    found, first = outcome.found, outcome.first
    if not first.rollouts:
        return "no row can be read" if first.unreadable else "the log has no rows"
    if not outcome.candidates.tried and found.lack is not Lack.NO_IDS:
        return "there is no tokenizer to try; pass -t DIR or a Hugging Face name"
    return _LACKS[found.lack] if found.lack is not None else "no template writes these prompts"


def share_words(share: Share) -> str:
    """What is written exactly: `240 of 250 prompts (96 %), ...`."""
    counts = (
        (share.prompts, share.of_prompts, "prompt"),
        (share.turns, share.of_turns, "later turn"),
        (share.tokens, share.of_tokens, "token"),
    )
    said = [f"{one:,} of {many(of, noun)} ({percent(one / of)})" for one, of, noun in counts if of]
    return listed(said) if said else "no prompt"


def _on_which(found: Identified) -> str:
    more = found.rows_confirmed - found.rows_searched
    if more <= 0:
        return "The search saw them all."
    return f"The search saw {found.rows_searched:,} of them; the other {more:,} confirm it."


def _departures(explanation: Explanation) -> Iterator[Text]:
    if explanation.departures:
        yield from _title("What no flag can express")
    for one in explanation.departures:
        line = Text(f"  {one}", style="yellow")
        if one.text:
            line.append(f": {visible(elided(one.text, _TEXT))}")
        if one.values:
            values = [elided(value, _VALUE) for value in one.values]
            line.append(f" ({visible(elided(', '.join(values), _TEXT))})")
        yield line


def _left(left: Sequence[Left]) -> Iterator[Text]:
    if left:
        yield from _title("Not explained")
    for one in left[:_LISTED]:
        turn = f", turn {one.turn}" if one.turn is not None else ""
        yield Text(
            f"  {one.number:,} × {visible(elided(one.cause, _TEXT))}, first at {visible(str(one.place))}{turn}"
        )
    yield from _more(left)


def _others(found: Identified) -> Iterator[Text]:
    best = found.found[0]
    if best.undetermined:
        yield from _title("Undetermined by these rows")
        names = ["--tool-arguments" if name == "tool_arguments" else name for name in best.undetermined]
        yield Text(f"  {visible(listed(names))}: the prompts are the same with any value")
    if best.equal:
        yield from _title("Equivalent settings")
        yield from (Text(f"  {visible(described(one))}") for one in best.equal[:_LISTED])
        yield from _more(best.equal)
    if len(found.found) > 1:
        yield from _title("Other candidates")
        yield from (Text(f"  {_next(one)}") for one in found.found[1:_LISTED])


def _next(found: Found) -> str:
    return f"{visible(described(found.explanation))}: {share_words(found.share)}"


def _endings(found: Identified) -> Iterator[Text]:
    if found.endings:
        yield from _title("How sampled turns end")
    for one in found.endings[:_LISTED]:
        then = f", then the prompts hold {visible(one.followed_by)!r}" if one.followed_by else ""
        yield Text(f"  {visible(one.piece)} ({one.token_id}): {many(one.turns, 'turn')}{then}")


def _alone(alone: IdsAlone | None) -> Iterator[Text]:
    """What the ids show without a tokenizer."""
    if alone is None:
        return
    yield from _title("From the ids alone")
    yield Text(
        f"  {alone.ids:,} ids in {many(alone.sequences, 'sequence')}, {alone.distinct:,} different, from "
        f"{alone.smallest:,} to {alone.largest:,}: the vocabulary has at least {alone.largest + 1:,} entries"
    )
    if alone.opening:
        yield Text(f"  every prompt opens with {', '.join(map(str, alone.opening))}")
    if alone.ends:
        ends = listed([f"{one} ({number:,})" for one, number in alone.ends])
        yield Text(f"  the last ids of {many(alone.turns, 'sampled turn')}: {ends}")
    if not alone.families:
        yield Text("  they match no tokenizer family known to tito-audit")
    for seen in alone.families:
        marks = ", ".join(f"{text} = {one}" for one, text in seen.family.marks.items())
        yield Text(
            f"  they may be from {seen.family.name}: {seen.sequences:,} of {alone.sequences:,} have {marks}"
        )


def _tried(outcome: Outcome) -> Iterator[Text]:
    fits = {one.tokenizer: one for one in outcome.found.tokenizers}
    yield from _title("Tried")
    if not outcome.candidates.tried:
        yield Text("  no tokenizer")
    for candidate, because in zip(outcome.candidates.tried, outcome.candidates.because, strict=True):
        fit = fits.get(candidate.tokenizer.name)
        said = "" if fit is None else ": fits the ids" if fit.fits else f": {visible(elided(fit.because, _TEXT))}"
        yield Text(f"  {visible(candidate.tokenizer.name)} ({because}){said}")
    passed_over = outcome.candidates.passed_over
    for one in passed_over[:_LISTED]:
        yield Text(f"  {visible(one.name)} was not: {visible(elided(one.because, _TEXT))}", style="dim")
    yield from _more(passed_over)


def _more(entries: Sequence[object]) -> Iterator[Text]:
    if len(entries) > _LISTED:
        yield Text(f"  … and {len(entries) - _LISTED:,} more", style="dim")


def _title(words: str) -> Iterator[Text]:
    yield Text()
    yield Text(words, style="bold")
