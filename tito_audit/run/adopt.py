"""Adoption: the template, arguments, date and tools that a log was written with, where the settings differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from tito_audit.errors import SetupError
from tito_audit.record.finding import Finding, Hit, Severity, Where
from tito_audit.record.rollout import Rollout, with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.render.renderer import Renderer
from tito_audit.run.headlines import with_headline
from tito_audit.settings.model import NO_TOOLS, RECORDED, Settings
from tito_audit.terminal.escape import shell_word
from tito_audit.terminal.words import listed, many
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.explain import explain_head
from tito_audit.ways.observations import Observation, observe_first_prompt
from tito_audit.ways.way import GIVEN_TEMPLATE, OWN_TEMPLATE, DepartureKind, Explanation, NamedTemplate, Way
from tito_audit.ways.writer import FirstWriter

ARGUMENTS, DATE, TOOLS = "REC011", "TPL210", "TPL212"
ADOPTION_CODES = frozenset((ARGUMENTS, DATE, TOOLS))
"""Codes of the finding that a log was written with other settings."""
_FEWEST_PROMPTS = 3
"""The fewest prompts that allow a conclusion; if as many match, no more are rendered."""
_FITTING_SHARE = 0.8
"""Above this share of matching prompts, the settings fit."""
_EXPLAINED_SHARE = 0.75
"""The share of the prompts that an explanation has to write exactly."""
_ADOPTABLE = frozenset((DepartureKind.CLOCK_VARIES, DepartureKind.STATED_UNUSED))
"""Departures that a log can be audited with although no flag expresses them."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a log is audited with instead of the settings."""

    finding: Finding
    """Tells the user about it."""
    renderer: Renderer
    own_dates: bool
    """Whether each rollout is rendered on the date that its first prompt holds."""


def find_adoption(
    head: Sequence[Rollout], tokenizer: Tokenizer, renderer: Renderer, settings: Settings, codes: frozenset[str]
) -> Adoption | None:
    """What the first rollouts of a log prove that it was written with.

    None if the settings fit, if nothing else certainly does, or if the finding's code is not among `codes`.
    EncodeError if the tokenizer cannot encode the prompts.
    """
    speakers = Speakers(settings.sampled_roles)
    rollouts = [with_speakers(rollout, speakers) for rollout in head]
    prompts = [prompt for prompt in map(observe_first_prompt, rollouts) if prompt is not None]
    given_writer = FirstWriter(tokenizer, renderer, own_dates=settings.clock == RECORDED)
    if len(prompts) < _FEWEST_PROMPTS:
        return None
    # Usually a few prompts, spread over all, suffice to show that the settings fit.
    if all(map(given_writer.writes, prompts[:: len(prompts) // _FEWEST_PROMPTS][:_FEWEST_PROMPTS])):
        return None
    matching = sum(map(given_writer.writes, prompts))
    if matching > _FITTING_SHARE * len(prompts):
        return None
    # Where at least half of the prompts match as given, an explanation has to write all of them.
    needed = _EXPLAINED_SHARE * len(prompts) if 2 * matching < len(prompts) else len(prompts)
    for change in _candidate_changes(rollouts, prompts, tokenizer, renderer, settings):
        writer = FirstWriter(tokenizer, change.renderer, own_dates=change.own_dates)
        exact = sum(map(writer.is_exact, prompts))
        if exact >= needed:
            if change.code not in codes:
                return None
            of = many(len(prompts), "prompt")
            message = (
                f"{change.summary}: {exact:,} of the first {of} match exactly that way, {matching or 'none'} as "
                f"given; the log is audited that way; {change.advice}"
            )
            hit = Hit(Where.LOG, 0, 0, message, cause=change.cause, severity=change.severity)
            finding = with_headline(Finding(change.code, change.severity, prompts[0].place, hit))
            return Adoption(finding, change.renderer, change.own_dates)
    return None


def _candidate_changes(
    head: Sequence[Rollout],
    prompts: Sequence[Observation],
    tokenizer: Tokenizer,
    renderer: Renderer,
    settings: Settings,
) -> Iterator[_SettingsChange]:
    """Changes to the settings that certainly explain the first rollouts of a log, all or every fourth of them.

    The tokenizer's other templates come last.
    """
    for part in (head, *(head[start::4] for start in range(4))):
        explanation = _explain_certainly(part, tokenizer, renderer)
        if explanation is not None:
            yield _SettingsChange(explanation, settings, prompts, renderer)
    # The templates that are not in use, the default first.
    names = sorted(tokenizer.chat_templates, key=lambda name: (name != "default", name))
    used = None if settings.chat_template else settings.template_name or "default"
    for name in names[:8]:
        if name == used:
            continue
        template = OWN_TEMPLATE
        if name != "default":
            template = NamedTemplate(f"its template {name}", template_name=name)
        try:
            named = template.renderer(tokenizer, time_limit=settings.template_seconds)
        except SetupError:
            continue
        other = replace(renderer, templates=named.templates, name=named.name)
        way = Way.from_renderer(renderer)
        same = dict(way.args), way.tool_arguments, way.clock, way.without_tools
        yield _SettingsChange(Explanation(tokenizer.name, template, *same), settings, prompts, other)
        explanation = _explain_certainly(head, tokenizer, other)
        if explanation is not None:
            yield _SettingsChange(replace(explanation, template=template), settings, prompts, other)


def _explain_certainly(head: Sequence[Rollout], tokenizer: Tokenizer, renderer: Renderer) -> Explanation | None:
    """What certainly explains rollouts with this template; None if nothing does that a log can be audited with."""
    explanation = explain_head(head, tokenizer, renderer)
    if explanation is None or not all(departure.kind in _ADOPTABLE for departure in explanation.departures):
        return None
    return explanation


class _SettingsChange:
    """An explanation as a change to the settings, in words."""

    def __init__(
        self, explanation: Explanation, settings: Settings, prompts: Sequence[Observation], renderer: Renderer
    ) -> None:
        kinds = {departure.kind: departure for departure in explanation.departures}
        self._explanation = explanation
        self._settings = settings
        self._renderer = renderer
        self._unused = DepartureKind.STATED_UNUSED in kinds
        varies = kinds.get(DepartureKind.CLOCK_VARIES)
        self._dates = varies.values if varies is not None else ()
        self.own_dates = varies is not None or (settings.clock == RECORDED and explanation.clock is not None)
        self._stated_arguments = _stated_arguments(prompts) if self._unused else {}
        self._parts = list(self._differences())

    @property
    def renderer(self) -> Renderer:
        """The renderer with this change."""
        changed = replace(self._explanation.apply_to(self._renderer), without_stated=self._unused)
        return replace(changed, clock=self._renderer.clock) if self.own_dates else changed

    @property
    def code(self) -> str:
        """The rule that reports the change."""
        codes = {code for code, _, _ in self._parts}
        return codes.pop() if len(codes) == 1 else ARGUMENTS

    @property
    def severity(self) -> Severity:
        """An error if the rows state something else; a note if only the date differs, as in any older log."""
        if self._unused:
            return Severity.ERROR
        another_day = self.code == DATE and not isinstance(self._settings.clock, datetime)
        return Severity.NOTE if another_day else Severity.WARNING

    @property
    def cause(self) -> str:
        """The cause of the finding, without counts."""
        return listed([cause for _, cause, _ in self._parts]) or "other template arguments"

    @property
    def summary(self) -> str:
        """A clause: what the log was written with, and instead of what."""
        return f"the prompts of this log were rendered {listed([words for _, _, words in self._parts])}"

    @property
    def advice(self) -> str:
        """A clause: what to pass or to log."""
        old = self._settings
        as_given = NamedTemplate("", None, old.chat_template, old.template_name)
        template = as_given if self._explanation.template == GIVEN_TEMPLATE else self._explanation.template
        clock = None if self.own_dates else self._explanation.clock
        stated = replace(
            self._explanation, tokenizer=old.tokenizer or "", template=template, clock=clock, departures=()
        )
        flags = " ".join(map(shell_word, (*stated.flags(), *(("--clock", RECORDED) if self.own_dates else ()))))
        if self._unused:
            return f"log the arguments that were used, or leave the stated ones out and pass {flags}"
        return f"pass {flags}"

    def _differences(self) -> Iterator[tuple[str, str, str]]:
        """The code, the cause and the words of each difference from the settings."""
        new, old = self._explanation, self._settings
        if new.template != GIVEN_TEMPLATE:
            instead = old.chat_template or f"its template {old.template_name or 'default'}"
            yield (
                ARGUMENTS,
                "another chat template",
                f"with the tokenizer's {new.template.label[4:]}, not with {instead}",
            )
        now_args, old_args = new.template_args, old.template_args
        for name in sorted({*now_args, *old_args, *self._stated_arguments}):
            now, stated = _argument_words(now_args, name), self._stated_arguments.get(name)
            if self._unused and stated is not None and now != stated:
                yield ARGUMENTS, f"{now}, not as stated", f"with {now}, where the rows state {stated}"
            elif now != (was := _argument_words(old_args, name)):
                how = f"with {now}" if name in now_args else f"without {name}"
                yield ARGUMENTS, now, f"{how}, not with {was}" if name in old_args else how
        if new.tool_arguments != old.tool_arguments:
            form = "texts" if new.tool_arguments == "string" else "objects"
            yield ARGUMENTS, f"tool arguments as {form}", f"with the arguments of tool calls as {form}"
        if self._dates:
            dates = self._dates
            on = listed(dates) if len(dates) <= 3 else f"many dates, {listed(dates[:3])} among them"
            yield DATE, "other dates", f"on {on}, not on the date that the template writes now"
        elif new.clock is not None and not self.own_dates and new.clock != old.clock:
            is_stated = isinstance(old.clock, datetime)
            instead = (
                f"{old.clock:%Y-%m-%d}, as --clock says" if is_stated else f"{datetime.now():%Y-%m-%d}, as now"
            )
            yield DATE, f"written on {new.clock:%Y-%m-%d}", f"on {new.clock:%Y-%m-%d}, not on {instead}"
        if new.without_tools and old.tools != NO_TOOLS:
            yield TOOLS, "all tools missing", "without the tools that the rows state"


def _argument_words(arguments: Mapping[str, object], name: str) -> str:
    """`enable_thinking=false`, or `no enable_thinking` where it is not among the arguments."""
    if name not in arguments:
        return f"no {name}"
    return f"{name}={json.dumps(arguments[name], ensure_ascii=False, default=str)}"


def _stated_arguments(prompts: Sequence[Observation]) -> Mapping[str, str]:
    """The template arguments that the rows state, in words; of several values the first."""
    stated: dict[str, str] = {}
    for prompt in prompts:
        for name in prompt.stated:
            stated.setdefault(name, _argument_words(prompt.stated, name))
    return stated
