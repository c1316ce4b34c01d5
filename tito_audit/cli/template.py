"""`tito-audit template`: shows what a chat template does with a conversation, and whether it only appends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tito_audit.cli._exit import FAILED
from tito_audit.cli._options import Options
from tito_audit.cli._outputs import print_result, refuse_overwriting
from tito_audit.errors import SetupError
from tito_audit.render.tracer import Tag
from tito_audit.report_objects import pick
from tito_audit.run.template import TemplateComparison, compare_templates, log_probes, open_template
from tito_audit.sessions.delimiters import Delimiters, delimiters
from tito_audit.settings.model import Settings
from tito_audit.storage.atomic import new_file, refuse_target
from tito_audit.templates.append_only import AppendCheck, Step, StepOutcome
from tito_audit.templates.breaks import Break, BreakSide, explain_breaks, group_breaks
from tito_audit.templates.comparison import PromptCause
from tito_audit.templates.facts import Fidelity, RoundTrip, TemplateFacts, template_facts
from tito_audit.templates.seams import Seam
from tito_audit.templates.training import HistoryReport, TemplateVariant, find_variant
from tito_audit.templates.verdict import advice, break_line, claims, format_flags, short_verdict, verdict
from tito_audit.terminal.escape import elided, visible
from tito_audit.terminal.page import facts_table, heading, open_table
from tito_audit.terminal.words import listed, many


def template(options: Options, named: str | None) -> None:
    """Show what a chat template does."""
    if options.training is not None and options.against is not None:
        raise SetupError("template: --training and --against exclude each other.\nPass only one of them.")
    settings = options.settings()
    settings = settings if named is None else replace(settings, tokenizer=named)
    if options.training is not None or options.against is not None:
        refuse_overwriting({"--training": options.training}, options.logs, options.input_files(settings))
        if options.training is not None:
            place, shape = options.training, options.shape
            passed = write_training_variant(settings, options.logs, place, shape, force=options.force)
        else:
            both = compare_templates(settings, options.logs, options.against)
            print_result(options.shape, lambda: against_object(both), (), _against_page(both))
            passed = both.same
        if not passed:
            raise typer.Exit(FAILED)
        return
    opened = open_template(settings)
    of_log = explain_breaks(opened.renderer, log_probes(options.logs, settings)) if options.logs else None
    facts = template_facts(opened.renderer, tokenizer := opened.tokenizer)
    between = delimiters(tokenizer, opened.renderer) if tokenizer is not None else None
    run = TemplateRun(opened.name, facts, of_log, between)
    page = page_lines(run, full=options.full)
    print_result(options.shape, lambda: template_object(run), (), page, options.config_notice())
    if not run.facts.append.is_append_only or (of_log is not None and of_log[0].broken):
        raise typer.Exit(FAILED)


_BEFORE, _AFTER = 40, 60
"""How many characters are shown before and after a difference."""
_MOST_BREAKS = 8
_MOST_NAMES = 3
_MOST_IDS = 12
_FATE_WORDS = {
    StepOutcome.KEPT: ("kept", "green"),
    StepOutcome.BROKEN: ("changed", "bold red"),
    StepOutcome.UNKNOWN: ("unknown", "yellow"),
    StepOutcome.LEFT_OUT: ("left out", "yellow"),
    StepOutcome.REFUSED: ("refused", "dim"),
}
_OBJECT_WIDTH = 200
"""How many characters a JSON object holds before and after a difference."""


@dataclass(frozen=True, slots=True)
class TemplateRun:
    """What a run found out about one template."""

    name: str
    facts: TemplateFacts
    log: tuple[AppendCheck, Sequence[Break]] | None = None
    """What the template does with the conversations of a log; None: no log was given."""
    delimiters: Delimiters | None = None
    """None: there was no tokenizer."""


def page_lines(run: TemplateRun, *, full: bool) -> Iterator[RenderableType]:
    """The verdict and what to do; with `full`, the evidence too."""
    facts = run.facts
    yield Text("tito-audit template ", style="bold").append(visible(run.name))
    style = "bold green" if facts.append.is_append_only else "bold red"
    short = short_verdict(facts.append)
    yield Text(visible(short), style=style).append(visible(verdict(facts).removeprefix(short)), style="")
    if run.log is not None:
        rollouts: dict[str, set[StepOutcome]] = {}
        for step in run.log[0].steps:
            rollouts.setdefault(step.probe.name, set()).add(step.outcome)
        whole = sum(outcomes == {StepOutcome.KEPT} for outcomes in rollouts.values())
        line = Text(f"For the log's messages it is append-only in {whole:,} of {many(len(rollouts), 'rollout')}")
        line.stylize("green" if whole == len(rollouts) else "red")
        counts = Counter(outcome for outcomes in rollouts.values() for outcome in outcomes - {StepOutcome.KEPT})
        words = [f"{_FATE_WORDS[outcome][0]} in {counts[outcome]:,}" for outcome in _FATE_WORDS if counts[outcome]]
        nothing = "No answer in the log is followed by anything, so the log shows nothing."
        line.append(f"; answers are {listed(words)}." if words else ".")
        yield line if rollouts else Text(nothing, style="yellow")
    yield from heading("What to do")
    yield facts_table(advice(facts).items())
    if not full:
        yield from heading("Next")
        what = "which answers change, and the lines of the template that do it"
        yield Text(f"  tito-audit template … --full   {what}")
        return
    yield from heading("What becomes of a sampled answer, by what it is and what follows")
    nexts, by_kind = list(facts.append.by_speaker()), facts.append.by_kind()
    table = open_table()
    table.add_column("  answer", no_wrap=True)
    for name in nexts:
        table.add_column(f"then {visible(name)}")
    for kind in dict.fromkeys(kind for kind, _ in by_kind):
        cells = [Text(f"  {visible(kind)}")]
        for name in nexts:
            steps = by_kind[kind, name].steps if (kind, name) in by_kind else ()
            counts = Counter(step.outcome for step in steps)
            cells.append(Text())
            for outcome in (outcome for outcome in _FATE_WORDS if counts[outcome]):
                fate, style = _FATE_WORDS[outcome]
                fate += "" if counts[outcome] == len(steps) else f" {counts[outcome]:,}"
                cells[-1].append(", " if cells[-1].plain else "").append(fate, style=style)
        table.add_row(*cells)
    yield table
    yield from heading("Facts")
    yield facts_table(_fact_rows(facts, run.delimiters is not None))
    yield from _change_lines("Where earlier text changes", facts.breaks)
    yield from _change_lines("Where earlier text changes in the log", () if run.log is None else run.log[1])
    yield from _evidence_parts(run)


def _evidence_parts(run: TemplateRun) -> Iterator[RenderableType]:
    """What servers, splices and arguments do: answers parsed again, the text between messages, what to rely on."""
    facts = run.facts
    if facts.returned:
        yield from heading("Sampled answers, parsed by a server and rendered again")
    forms: dict[tuple[str, str], list[RoundTrip]] = {}
    for answer in facts.returned:
        forms.setdefault((answer.part, answer.form), []).append(answer)
    for (part, form), answers in forms.items():
        rewritten = [answer.case for answer in answers if answer.outcome is Fidelity.REWRITTEN]
        refused = [answer.case for answer in answers if answer.outcome is Fidelity.REFUSED]
        same = len(answers) - len(rewritten) - len(refused)
        if same == len(answers):
            yield Text(f"  {part}, {form}: ").append(f"all {same} forms come back as sampled", style="green")
        else:
            yield Text(f"  {part}, {form}: {same} of {len(answers)} forms come back")
        if rewritten:
            yield Text("    rewritten: ", style="red").append("; ".join(rewritten), style="")
        if refused:
            yield Text("    refused: ", style="dim").append("; ".join(refused))
    if facts.seams:
        yield from heading("Between messages")
        yield _seams_table(facts.seams, run.delimiters is not None)
        for pair in run.delimiters.pairs.values() if run.delimiters is not None else ():
            if pair.reason is not None:
                yield Text(f"  no delimiter between {pair.left} and {pair.right}: ").append(visible(pair.reason))
    if facts.effects:
        yield from heading("Arguments")
        names = (visible(f"{effect.name}={effect.value!r}") for effect in facts.effects)
        yield facts_table(
            zip(names, (f"changes {listed(each.changes) or 'nothing'}" for each in facts.effects), strict=True)
        )
        for setting in facts.settings[:_MOST_NAMES]:
            left = len(setting.append.broken)
            words = (
                f"{many(left, 'answer')} of usual ones change" if left else "append-only for usual conversations"
            )
            yield Text(f"  {visible(format_flags(setting.arguments))}: {words}")
    yield from heading("What a splice or a gateway may rely on")
    marks = {True: ("yes", "green"), False: ("no", "bold red"), None: ("–", "dim")}
    for claim in claims(facts):
        word, style = marks[claim.holds]
        line = Text("  ").append(f"{word:<4}", style=style).append(claim.what)
        yield line.append(f": {visible(claim.because)}" if claim.because else ".")
    reasons = Counter(step.refusal or "" for step in facts.append.refused)
    if reasons:
        yield from heading("Refused")
    for reason, count in reasons.most_common(_MOST_BREAKS):
        yield Text(f"  {many(count, 'answer')}: {visible(reason)}")


def _change_lines(title: str, breaks: Sequence[Break]) -> Iterator[Text]:
    """Each place where earlier text changes: in which answers, by which condition, and both texts."""
    groups = list(group_breaks(breaks).values())
    yield from heading(title) if groups else ()
    for group in groups[:_MOST_BREAKS]:
        first = group[0]
        yield Text(f"  {first.change}", style="bold red").append(f" · {many(len(group), 'answer')}", style="")
        names = list(dict.fromkeys(each.step.probe.name for each in group))
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield Text(f"    in: {visible('; '.join(names[:_MOST_NAMES]))}{more}", style="dim")
        for number, decision in enumerate(first.conditions):
            words = "and" if number else "decided by"
            then, now = ("true", "false") if decision.outcome else ("false", "true")
            when = f"{then} when it was sampled, {now} in the next prompt"
            yield Text(f"    {words} {_tag_words(decision.tag)}: {when}")
        for words, side, style in (("sampled", first.sampled, "red"), ("rendered", first.rendered, "green")):
            line = Text(f"    {words:<9}", style="dim")
            before = ("…" if len(side.before) > _BEFORE else "") + side.before[-_BEFORE:]
            line.append(visible(before)).append("│").append(visible(elided(side.text, _AFTER)) or "∅", style=style)
            yield line
            if side.tag is not None:
                yield Text(f"             by {_tag_words(side.tag)}", style="dim")
    if len(groups) > _MOST_BREAKS:
        yield Text(f"  … and {len(groups) - _MOST_BREAKS} more places; --output-format json has them all")


def _tag_words(tag: Tag) -> str:
    return f"line {tag.line}:{tag.column} {visible(elided(' '.join(tag.source.split()), 120))}"


def _seams_table(seams: Sequence[Seam], has_ids: bool) -> Table:
    table = open_table()
    table.add_column("  between", no_wrap=True)
    table.add_column("text", overflow="fold", ratio=2)
    table.add_column("ids", overflow="fold", ratio=1)
    table.add_column("tokens merge with", overflow="fold", ratio=1)
    for seam in seams:
        text = visible(elided(seam.texts[0], 60)) if seam.is_fixed else f"{len(seam.texts)} different texts"
        ids = [] if seam.ids is None else [str(token_id) for token_id in seam.ids[:_MOST_IDS]]
        ids += ["…"] if seam.ids is not None and len(seam.ids) > _MOST_IDS else []
        cells = (f"  {seam.left} → {seam.right}", text or "∅", " ".join(ids) or ("" if has_ids else "unknown"))
        # `before: ⏎; after: ·a`: tokens of the messages that merge with the text between.
        sides = (("before", seam.merges_before), ("after", seam.merges_after))
        merges = [f"{at}: {' '.join(visible(each, edges=True) for each in texts)}" for at, texts in sides if texts]
        table.add_row(*map(Text, (*cells, "; ".join(merges))))
    return table


def _fact_rows(facts: TemplateFacts, has_ids: bool) -> Iterator[tuple[str, str]]:
    """Names and values: generation prompt, end and beginning tokens, clock, contents, cut answers."""
    opener = facts.generation_prompt
    texts = listed([_quoted(text) for text in opener.texts[:4]]) or "none"
    yield "generation prompt", texts + ("" if len(opener.texts) < 2 else ", depending on the messages")
    yield "answers continue it", "yes" if opener.continued else "no: a rendered answer begins differently"
    ends = []
    for stop in facts.stops:
        about = [str(stop.id)] if stop.id is not None else []
        about += ["ends answers"] if stop.written else []
        about += ["named by the tokenizer"] if stop.of_tokenizer else []
        ends.append(f"{visible(stop.text)} ({', '.join(about)})" if about else visible(stop.text))
    yield "end tokens", "; ".join(ends) or "none"
    bos = facts.bos
    added = {True: ", added by the tokenizer", False: ", not added by the tokenizer", None: ""}[bos.added]
    words = f"{visible(bos.text or '')}, {'' if bos.written else 'not '}written by the template{added}"
    if bos.doubled:
        words = (
            f"{visible(bos.text or '')}, written by the template and added by the tokenizer: encode with "
            "add_special_tokens=False, or it occurs twice"
        )
    none = "the tokenizer has none" if has_ids else "unknown"
    yield "beginning token", words if bos.text else none
    formats = listed([_quoted(each) for each in facts.clock_formats or ()])
    read = f"read{f' as {formats}' if formats else ''}: prompts differ from day to day; pass --clock DATE"
    yield "clock", "not read" if facts.clock_formats is None else read
    if facts.contents:
        roles: dict[str, list[str]] = {}
        for content in facts.contents:
            example = f", such as {_quoted(content.unlike)}" if content.unlike is not None else ""
            roles.setdefault(f"{content.writing}{example}", []).append(content.role)
        yield "contents of messages", "; ".join(f"{how} ({listed(names)})" for how, names in roles.items())
    for partial in facts.partial:
        where = "written before it" if partial.case.startswith("prefill") else "added after it, never sampled"
        stays = f"stays, with {_quoted(partial.added)} {where}" if partial.added else "stays as it is"
        changes = {Fidelity.REFUSED: "refused", Fidelity.REWRITTEN: "does not come back as sampled"}
        yield partial.case, changes.get(partial.outcome, stays)
    if not has_ids:
        yield "token ids", "unknown: without a tokenizer, <bos> and <eos> are placeholders"


def _quoted(text: str) -> str:
    """A text in quotes, shortened, with control characters made visible."""
    return f"“{visible(elided(text, 80))}”"


def template_object(run: TemplateRun) -> dict[str, Any]:
    """The JSON object of a run; the docs describe its keys."""
    facts, (append, breaks) = run.facts, run.log or (None, ())
    return {
        "schema_version": 1,
        "template": run.name,
        "append_only": facts.append.is_append_only,
        "title": short_verdict(facts.append),
        "verdict": verdict(facts),
        "advice": advice(facts),
        "answers": _answer_objects(facts.append),
        "breaks": [_break_object(each) for each in facts.breaks],
        "log": None
        if append is None
        else {
            "rollouts": len({step.probe.name for step in append.steps}),
            "broken_rollouts": list(dict.fromkeys(step.probe.name for step in append.broken)),
            "answers": _answer_objects(append),
            "breaks": [_break_object(each) for each in breaks],
        },
        "sampled": facts.returned,
        "cut": facts.partial,
        "between": [pick(seam, "left right texts seen ids merges_before merges_after") for seam in facts.seams],
        "delimiters": None
        if run.delimiters is None
        else [pick(each, "left right text ids seen reason") for each in run.delimiters.pairs.values()],
        "contents": facts.contents,
        "generation_prompt": pick(facts.generation_prompt, "texts continued"),
        "end_tokens": [pick(stop, "text id of_tokenizer written") for stop in facts.stops],
        "beginning_token": pick(facts.bos, "text written added doubled"),
        "clock": facts.clock_formats,
        "arguments": facts.effects,
        "settings": [
            {
                "arguments": dict(setting.arguments),
                "flags": format_flags(setting.arguments),
                "append_only": setting.append.is_append_only,
                "broken": len(setting.append.broken),
            }
            for setting in facts.settings
        ],
        "rely_on": list(claims(facts)),
        "refusals": [{**_step_object(step), "reason": step.refusal} for step in facts.append.refused],
    }


def _answer_objects(append: AppendCheck) -> list[dict[str, Any]]:
    """One object for each kind of answer and kind of message after it."""
    return [
        {"answer": kind, "next": after, "tried": len(tried.steps), **Counter(step.outcome for step in tried.steps)}
        for (kind, after), tried in append.by_kind().items()
    ]


def _break_object(each: Break) -> dict[str, Any]:
    return {
        **_step_object(each.step),
        "change": each.change,
        "line": break_line(each),
        "conditions": [
            {**pick(decision.tag, "line column source"), "held_when_sampled": decision.outcome}
            for decision in each.conditions
        ],
        "sampled": _side_object(each.sampled),
        "rendered": _side_object(each.rendered),
    }


def _step_object(step: Step) -> dict[str, Any]:
    named = {"conversation": step.probe.name, "message": step.answer}
    return {**named, "answer": step.answer_kind, "next": step.next_speaker}


def _side_object(side: BreakSide) -> dict[str, Any]:
    tag = pick(side.tag, "line column source") if side.tag is not None else None
    return {"before": side.before[-_OBJECT_WIDTH:], "text": side.text[:_OBJECT_WIDTH], "tag": tag}


_MOST_OBSTACLES = 6
_EDIT_WIDTH = 100
_DIFF_COLORS = {"+": "green", "-": "red", "@": "cyan"}
_PROMPT_BEFORE, _PROMPT_AFTER = 30, 70


def write_training_variant(settings: Settings, logs: Sequence[str], file: str, shape: str, *, force: bool) -> bool:
    """Search a training variant, print what was found, and return whether it was proved and written."""
    refuse_target(Path(file), overwrite=force)  # before the search, which takes seconds
    opened = open_template(settings)
    if opened.renderer.name is None and len(opened.renderer.templates) > 1:
        raise SetupError(
            f"{opened.name}: there is a template for conversations with tools, and one for those without.\n"
            "A variant is one template for both, so prompts would change.\n"
            f"Name the one to edit: --template-name {' or '.join(sorted(opened.renderer.templates))}."
        )
    log = tuple(log_probes(logs, settings)) if logs else ()
    run = TrainingRun(opened.name, find_variant(opened.renderer, log), Path(file))
    if run.variant.keeps_history:
        with new_file(run.file, overwrite=force) as out:
            out.write(run.variant.text.encode())
    variant, keeps = run.variant, run.variant.keeps_history
    name = Text("tito-audit template ", style="bold").append(visible(run.name))
    page = [name, Text(visible(training_verdict(run)), style="bold green" if keeps else "bold red")]
    page += [Text(f"  line {edit.line}: {visible(elided(edit.does, _EDIT_WIDTH))}") for edit in variant.edits]
    if variant.edits:
        page += [Text(), *(Text(visible(line), style=_DIFF_COLORS.get(line[:1], "")) for line in run.diff)]
    page += heading("Proved by rendering")
    page += [Text(f"  {visible(line)}") for line in proof_lines(variant)]
    if lost := sorted(variant.after.lost):
        # The answers that still change, and the lines of the template that cause it.
        more = f", and {len(lost) - _MOST_OBSTACLES} more" if len(lost) > _MOST_OBSTACLES else ""
        obstacles = [f"these change: {'; '.join(lost[:_MOST_OBSTACLES])}{more}"]
        for edit, why in variant.rejected:
            does = elided(edit.does, _EDIT_WIDTH)
            obstacles.append(f"line {edit.line}: a template that {does} keeps more, but {why}")
        if not variant.rejected:
            obstacles.append("no condition and no cut of the template alone decides about them")
        page += [*heading("Obstacles"), *(Text(f"  {visible(line)}") for line in obstacles)]
    print_result(shape, lambda: training_object(run), (), page)
    return keeps


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A training variant of a template, and the file for it."""

    name: str
    """The template that it is a variant of."""
    variant: TemplateVariant
    file: Path

    @property
    def diff(self) -> list[str]:
        """The edits as a unified diff, line by line."""
        before, after = (text.splitlines() for text in (self.variant.source, self.variant.text))
        return [line.rstrip("\n") for line in unified_diff(before, after, self.name, str(self.file), lineterm="")]


def training_verdict(run: TrainingRun) -> str:
    """The verdict, in a sentence."""
    variant = run.variant
    edits = many(len(variant.edits), "edit")
    still = f"{many(len(variant.after.lost), 'answer')} still change once something follows"
    if not variant.after.answers:
        return "No answer comes back with this template, so nothing can be proved; no file is written."
    if not run.variant.keeps_history:
        more = f"{edits.capitalize()} would keep more of history, but not all"
        return f"{more if variant.edits else 'No edit found'}: {still}; no file is written."
    but = f" With tools {still}." if variant.after.lost else ""
    if not variant.edits:
        return f"It keeps history already; {run.file} is the same template.{but}"
    return f"{edits.capitalize()}, and history stays as it was sampled: {run.file}.{but}"


def proof_lines(variant: TemplateVariant) -> Iterator[str]:
    """What was proved by rendering with both templates, line by line."""
    with_ = f", with {listed(list(variant.arguments))}" if variant.arguments else ""
    yield f"first prompts: {variant.firsts} of {variant.firsts} are byte for byte unchanged{with_}"
    before, after = _kept_words(variant.before), _kept_words(variant.after)
    yield f"answers that come back as sampled: {before} before, {after} now"
    if variant.after.unsampled:
        yield (
            f"{many(len(variant.after.unsampled), 'answer')} not counted: before a system message, or without "
            "reasoning after a prompt that begins it"
        )
    if variant.after.trimmed:
        yield "whitespace at the ends of an answer is still removed"
    if variant.of_log is not None:
        log = variant.of_log
        yield f"the log's first prompts: {log.firsts} of {log.firsts} are byte for byte unchanged"
        yield f"the log's answers that come back: {_kept_words(log.before)} before, {_kept_words(log.after)} now"


def _kept_words(judged: HistoryReport) -> str:
    return f"{len(judged.answers):,} of {len(judged.answers) + judged.faults:,}"


def training_object(run: TrainingRun) -> dict[str, Any]:
    """The JSON object of `--training`."""
    variant, log = run.variant, run.variant.of_log
    return {
        "schema_version": 1,
        "template": run.name,
        "file": str(run.file) if run.variant.keeps_history else None,
        "keeps_history": run.variant.keeps_history,
        "verdict": training_verdict(run),
        "edits": [pick(edit, "line was new does") for edit in variant.edits],
        "diff": run.diff,
        "first_prompts": variant.firsts,
        "arguments": list(variant.arguments),
        "before": _judged(variant.before),
        "after": _judged(variant.after),
        "log": None
        if log is None
        else {"first_prompts": log.firsts, "before": _judged(log.before), "after": _judged(log.after)},
        "in_the_way": [{**pick(edit, "line was"), "why": why} for edit, why in variant.rejected]
        if variant.after.lost
        else [],
    }


def _judged(judged: HistoryReport) -> dict[str, Any]:
    return {
        "kept": len(judged.answers),
        "changed": sorted(judged.lost),
        "trimmed": sorted(judged.trimmed),
        "not_counted": len(judged.unsampled),
    }


def _against_page(both: TemplateComparison) -> Iterator[RenderableType]:
    """How many prompts are equal, and the first of each kind that is not."""
    prompts = both.prompts
    line = Text("tito-audit template ", style="bold").append(visible(both.names[0]))
    yield line.append(" against ", style="bold").append(visible(both.names[1]))
    of = "the log's" if both.of_log else "the built-in conversations'"
    style = "bold green" if both.same else "bold red"
    yield Text(f"{prompts.equal:,} of {prompts.prompts:,} of {of} prompts are equal.", style=style)
    if both.equal_ids is not None and prompts.equal:
        yield Text(f"{both.equal_ids:,} of them have the same ids with both tokenizers.")
    for cause, group in prompts.by_cause().items():
        yield Text()
        yield Text(f"{cause}", style="bold red").append(f" · {many(len(group), 'prompt')}", style="")
        prompt = group[0]
        yield Text(f"  {visible(prompt.probe.name)}, the prompt of message {prompt.count}", style="dim")
        width = max(map(len, both.names))
        for name, text, style in zip(both.names, (prompt.first, prompt.second), ("red", "green"), strict=True):
            line = Text(f"  {visible(name):<{width}} ", style="dim")
            if prompt.cause in (PromptCause.REFUSED, PromptCause.BOTH_REFUSE):
                yield line.append(visible(elided(text, _PROMPT_AFTER)))
                continue
            before = text[max(prompt.at - _PROMPT_BEFORE, 0) : prompt.at]
            after = visible(elided(text[prompt.at :], _PROMPT_AFTER)) or "∅"
            line.append(visible(("…" if prompt.at > _PROMPT_BEFORE else "") + before))
            yield line.append("│").append(after, style=style)


def against_object(both: TemplateComparison) -> dict[str, Any]:
    """The JSON object of `--against`."""
    return {
        "schema_version": 1,
        "template": both.names[0],
        "against": both.names[1],
        "of_log": both.of_log,
        **pick(both.prompts, "prompts equal"),
        "equal_ids": both.equal_ids,
        "differences": [
            {
                "cause": cause,
                "prompts": len(group),
                "first": {
                    "conversation": group[0].probe.name,
                    "message": group[0].count,
                    "at": (at := group[0].at),
                    "texts": [
                        text[max(at - _PROMPT_BEFORE, 0) : at + _OBJECT_WIDTH]
                        for text in (group[0].first, group[0].second)
                    ],
                },
            }
            for cause, group in both.prompts.by_cause().items()
        ],
    }
