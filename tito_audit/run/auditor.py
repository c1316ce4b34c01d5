"""The auditor of a log (tokenizer, template, rules), the loader that makes it, and the audit of one rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import numpy as np

from tito_audit.errors import ODD_VALUES, EncodeError, SetupError, TitoAuditError
from tito_audit.evidence.gather import gather, partly_recorded
from tito_audit.evidence.model import Evidence
from tito_audit.evidence.needs import Needs, describe_missing
from tito_audit.evidence.sft import sft_facts
from tito_audit.evidence.trainings import trainings_of
from tito_audit.evidence.witness import witness
from tito_audit.join import joined_counts
from tito_audit.record.finding import Finding, Hit, Result, Severity, Skip, Where
from tito_audit.record.mismatch import MISMATCH
from tito_audit.record.reading import NO_CONVENTIONS, Conventions, parse_conventions
from tito_audit.record.rollout import Place, Rollout, with_speakers
from tito_audit.record.speakers import DEFAULT_SPEAKERS, Speakers
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.repair import Repair
from tito_audit.repairs import all_repairs
from tito_audit.rule import Rule, is_selected
from tito_audit.rules import all_rules
from tito_audit.run.adopt import Adoption
from tito_audit.run.check import SINGLE, check_explained, explain_differences
from tito_audit.run.fit import ANOTHER_TOKENIZER
from tito_audit.run.guard import LEAVE_OUT, plugin_error
from tito_audit.run.headlines import with_headline
from tito_audit.settings.model import NO_TOOLS, RECORDED, Settings
from tito_audit.tokens.bounds import read_template
from tito_audit.tokens.encoders import ReferenceEncoder
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.viewer.model import Observed, ViewSize
from tito_audit.ways.writer import renderer_at_own_date

ChooseView = Callable[[Iterable[Finding], int], ViewSize | None]
"""Called once per rollout, in order, with its findings and row: the size of its view; None for no view."""


@dataclass(frozen=True, slots=True)
class Auditor:
    """What the rollouts of a log are audited with."""

    tokenizer: Tokenizer | None
    renderer: Renderer | None
    rules: Sequence[Rule]
    codes: frozenset[str]
    """The selected rules."""
    repairs: Callable[[], Sequence[Repair]]
    """Called, and so imported, when the first finding needs the name of its repair."""
    speakers: Speakers = DEFAULT_SPEAKERS
    """Which roles were sampled."""
    misfit: Finding | None = None
    """The finding that the log was written with another tokenizer or template, which is why it is None here."""
    log_findings: tuple[Finding, ...] = ()
    """Findings about the whole log that its first rows show, `misfit` among them."""
    own_dates: bool = False
    """Whether each rollout is rendered on the date that its first prompt holds."""
    conventions: Conventions = NO_CONVENTIONS
    """What the user states about how training rows were written."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """To show tokens as text; None without a tokenizer."""
        return self.tokenizer.vocabulary if self.tokenizer is not None else None

    def without_misfit(self, misfit: Finding) -> Auditor:
        """A copy without the tokenizer or template that does not fit the log."""
        tokenizer = None if misfit.hit.cause == ANOTHER_TOKENIZER else self.tokenizer
        return replace(self, tokenizer=tokenizer, renderer=None, misfit=misfit, log_findings=(misfit,))

    def with_adoption(self, adoption: Adoption) -> Auditor:
        """A copy with the renderer that the log was written with."""
        findings = (*self.log_findings, adoption.finding)
        return replace(self, renderer=adoption.renderer, own_dates=adoption.own_dates, log_findings=findings)

    def renderer_for(self, rollout: Rollout) -> Renderer | None:
        """The renderer of one rollout, set to its date if `own_dates`; None without a template."""
        if not self.own_dates or self.renderer is None or self.tokenizer is None:
            return self.renderer
        return renderer_at_own_date(with_speakers(rollout, self.speakers), self.tokenizer, self.renderer)

    def by_reference(self) -> Auditor:
        """A copy without the fast encoder: all ids come from `tokenizers`."""
        if self.tokenizer is None or self.tokenizer.encoder_name == ReferenceEncoder.name:
            return self
        return replace(self, tokenizer=replace(self.tokenizer))

    def without_tokenizer(self) -> Auditor:
        """A copy without tokenizer and template, for a rollout that the tokenizer cannot encode."""
        return replace(self, tokenizer=None, renderer=None)

    def load(self) -> None:
        """Load everything that forked processes can share."""
        if self.tokenizer is not None:
            self.tokenizer.load()
        if self.renderer is not None:
            self.renderer.load()
        self.repairs()


_DRIFT_FAMILIES = ("TOK", "TPL", "SEQ")
"""Rule families about what tokenizer and template would write differently."""
TRAINED_ONCE = "REC009"
"""The rule about tokens that the rows of a run train more than once."""
READS_ONLY = Auditor(None, None, (), frozenset(), tuple)
"""For logs that are read but not audited."""


def audit_rollout(rollout: Rollout, auditor: Auditor, choose_view: ChooseView | None = None) -> Result:
    """Audit one rollout; with `choose_view`, also prepare its view. PluginError if any of it fails.

    A rollout with a text that the tokenizer cannot encode is audited without the tokenizer; a finding says so.
    """
    try:
        try:
            return _audit(rollout, auditor, choose_view)
        except EncodeError as error:
            reason = str(error)
        return add_encode_error(_audit(rollout, auditor.without_tokenizer(), choose_view), reason, auditor.codes)
    except TitoAuditError:
        raise
    except ODD_VALUES as error:
        raise plugin_error("the audit", rollout.place, LEAVE_OUT, error) from error


def _audit(rollout: Rollout, auditor: Auditor, choose_view: ChooseView | None) -> Result:
    """The audit of a rollout that the tokenizer can encode; EncodeError if it cannot."""
    renderer = auditor.renderer_for(rollout)
    evidence = gather(rollout, auditor.tokenizer, renderer, auditor.speakers, auditor.conventions)
    evidence = explain_differences(evidence, auditor.rules, auditor.codes)
    findings, skips = check_explained(evidence, auditor.rules, auditor.codes, auditor.repairs, SINGLE)
    at = rollout.stated.calls_at
    if at:  # rows were joined: a finding's place is the row of its call
        findings = tuple(
            finding
            if (turn := finding.hit.turn) is None
            else replace(finding, place=replace(finding.place, file=at[turn][0], row=at[turn][1]))
            for finding in findings
        )
    observed = None
    if choose_view is not None:
        from tito_audit.viewer.measures import measure  # slow to import, and rarely needed
        from tito_audit.viewer.sequences import view_rollout

        size = choose_view(findings, evidence.rollout.place.row)
        view = None if size is None else view_rollout(evidence, findings, size)
        observed = Observed(measure(evidence, findings), view)
    shows, counts, misfit = witness(evidence), count_rollout(evidence), auditor.misfit
    if auditor.tokenizer is None:
        counts |= uncompared_count(counts, skips, auditor.codes)
    if misfit is not None:
        what = misfit.hit.cause.removeprefix("another ")
        skips = _restate_skips(skips, f"the {what} does not fit the log ({misfit.code})")
    partial, present = partly_recorded(evidence.rollout), evidence.present
    partly_run: tuple[Skip, ...] = ()
    if partial:  # rules that ran although some calls lack what they need
        ran = auditor.codes - {skip.code for skip in skips}
        partly_run = tuple(
            Skip(rule.code, f"{describe_missing(need & partial)} in some calls")
            for rule in auditor.rules
            if rule.code in ran
            for need in rule.needs
            if need & partial and not need & present & ~partial
        )
    return Result(
        rollout.place,
        evidence.rollout,
        findings,
        skips,
        counts,
        observed=observed,
        witness=shows,
        trainings=trainings_of(evidence.rollout, evidence.links) if TRAINED_ONCE in auditor.codes else None,
        misfit=misfit,
        told=auditor.log_findings,
        mismatches=evidence.memo.get(MISMATCH, ()),
        partial=partly_run,
    )


UNENCODED = "the tokenizer cannot encode it"
"""The cause of the finding, and the reason for skipping rules that need the tokenizer."""
_WITHOUT_TOKENIZER = describe_missing(Needs.TOKENIZER)
_COMPARING_RULES = frozenset(("SEQ301", "SEQ302", "SEQ303", "MSK401", "MSK402", "MSK404"))
"""Rules that compare calls with each other or with the training row and need no tokenizer."""


def uncompared_count(counts: Mapping[str, int], skips: Sequence[Skip], codes: frozenset[str]) -> dict[str, int]:
    """{"uncompared": 1} for a rollout with ids of which nothing could be compared without a tokenizer, else {}."""
    if not counts["tokens"] or True not in [_WITHOUT_TOKENIZER in skip.because for skip in skips]:
        return {}
    return {} if (codes & _COMPARING_RULES) - {skip.code for skip in skips} else {"uncompared": 1}


_WITHHELD_REASONS = tuple(map(describe_missing, (Needs.TOKENIZER, Needs.RENDERING, Needs.SAMPLED, Needs.TEMPLATE)))
"""The reasons for skips that a withheld tokenizer or template causes."""


@lru_cache(64)
def _restate_skips(skips: tuple[Skip, ...], because: str) -> tuple[Skip, ...]:
    """The skips; those for lack of a tokenizer or template name `because` as their reason instead."""
    return tuple(
        Skip(skip.code, because) if any(words in skip.because for words in _WITHHELD_REASONS) else skip
        for skip in skips
    )


def unreadable_result(place: Place, error: str, codes: frozenset[str]) -> Result:
    """The result of a row that cannot be read: the finding REC001, if selected."""
    hit = Hit(Where.ROW, 0, 0, error, cause="row cannot be read")
    finding = with_headline(Finding("REC001", Severity.ERROR, place, hit))
    return Result(place, None, (finding,) if "REC001" in codes else ())


def add_encode_error(result: Result, error: str, codes: frozenset[str]) -> Result:
    """The result of a rollout audited without the tokenizer, plus the finding that says why (REC001)."""
    hit = Hit(Where.ROW, 0, 0, error, cause=UNENCODED)
    finding = with_headline(Finding("REC001", Severity.ERROR, result.place, hit))
    skips = _restate_skips(result.skips, UNENCODED)
    return replace(result, findings=(*((finding,) if "REC001" in codes else ()), *result.findings), skips=skips)


def count_rollout(evidence: Evidence) -> dict[str, int]:
    """The counts of a rollout: turns, audited tokens, generated tokens (as `measure` counts them), and others."""
    rollout = evidence.rollout
    generated = tokens = 0
    for turn in rollout.turns:
        generated += 0 if turn.completion_ids is None else len(turn.completion_ids)
        tokens += 0 if turn.prompt_ids is None else len(turn.prompt_ids)
    row = rollout.training_row
    if row is not None:
        sampled = evidence.generated_in_row
        in_row = 0 if sampled is None else int(np.count_nonzero(sampled))
        generated, tokens = generated + in_row, tokens + len(row.token_ids) - in_row
    facts = sft_facts(evidence)
    return {
        "turns": len(rollout.turns),
        "tokens": generated + tokens,
        "generated_tokens": generated,
        **joined_counts(rollout),
        **({f"sft_{fact}": count for fact, count in facts.items()} if facts else {}),
    }


class Loader:
    """Loads the tokenizers and templates of a run, each once.

    `commits` pins tokenizers of the hub, by name: to those of another process, as a branch may have moved since.
    """

    def __init__(self, commits: Mapping[str, str] | None = None) -> None:
        self._commits = commits or {}
        self._tokenizers: dict[str, Tokenizer] = {}
        self._renderers: dict[str, Renderer] = {}

    @property
    def tokenizers(self) -> list[Tokenizer]:
        """The loaded tokenizers, in the order of their first use."""
        return list(self._tokenizers.values())

    @property
    def commits(self) -> dict[str, str]:
        """By name, the commits of the loaded hub tokenizers."""
        return {each.name: each.commit for each in self.tokenizers if each.commit is not None}

    def load_auditor(self, settings: Settings) -> tuple[Auditor, str | None]:
        """The auditor for logs with these settings, and a notice about what it lacks; None if nothing."""
        tokenizer: Tokenizer | None = None
        renderer: Renderer | None = None
        notice = "No tokenizer given: only rules that need none could run. Pass --tokenizer DIR or a hub name."
        if settings.tokenizer is None and settings.chat_template:
            raise SetupError(
                "--chat-template was given without a tokenizer.\n"
                "The rendered text has to be encoded before it can be compared.\n"
                "Pass --tokenizer DIR as well."
            )
        key = repr((settings.tokenizer, settings.trust_remote_code))
        if settings.tokenizer is not None:
            tokenizer = self._tokenizers.get(key)
            if tokenizer is None:
                tokenizer = self._tokenizers[key] = load_tokenizer(
                    settings.tokenizer,
                    trust_remote_code=settings.trust_remote_code,
                    commit=self._commits.get(settings.tokenizer),
                )
            notice = (
                f"{tokenizer.name} has no chat template, so nothing could be rendered. "
                "Pass --chat-template FILE to check prompts against one."
            )
        if tokenizer is not None and (settings.chat_template or tokenizer.chat_templates):
            # The tokenizer, and all other settings that a renderer depends on.
            key += repr(
                (
                    settings.chat_template,
                    settings.template_name,
                    dict(settings.template_args),
                    settings.tool_arguments,
                    settings.clock,
                    settings.tools == NO_TOOLS,
                    settings.template_seconds,
                )
            )
            renderer = self._renderers.get(key)
            if renderer is None:
                renderer = self._renderers[key] = _make_renderer(tokenizer, settings)
        auditor = Auditor(
            tokenizer,
            renderer,
            all_rules(),
            selected_codes(settings),
            all_repairs,
            Speakers(settings.sampled_roles),
            own_dates=settings.clock == RECORDED,
            conventions=parse_conventions(settings.conventions, settings.assume),
        )
        return auditor, notice if renderer is None else None


def make_drift_audit(settings: Settings) -> Callable[[Rollout, Tokenizer, Renderer], tuple[Finding, ...]]:
    """A function that finds where a rollout differs from what a tokenizer and template write."""
    rules = all_rules()
    codes = frozenset(rule.code for rule in rules if rule.code.startswith(_DRIFT_FAMILIES))
    speakers = Speakers(settings.sampled_roles)

    def audit(rollout: Rollout, tokenizer: Tokenizer, renderer: Renderer) -> tuple[Finding, ...]:
        return audit_rollout(rollout, Auditor(tokenizer, renderer, rules, codes, tuple, speakers)).findings

    return audit


def load_renderer(tokenizer: str, settings: Settings | None = None) -> Renderer:
    """The renderer of a tokenizer's chat template, by folder or hub name; SetupError if it has none."""
    settings = Settings.given(settings)
    loaded = load_tokenizer(tokenizer, trust_remote_code=settings.trust_remote_code)
    return _make_renderer(loaded, settings)


def _make_renderer(tokenizer: Tokenizer, settings: Settings) -> Renderer:
    return make_renderer(
        tokenizer,
        chat_template=template_source(str(Path(settings.chat_template))) if settings.chat_template else None,
        template_file=settings.chat_template,
        template_name=settings.template_name,
        template_args=settings.template_args,
        tool_arguments=settings.tool_arguments,
        clock=Clock(settings.clock) if isinstance(settings.clock, datetime) else None,
        without_tools=settings.tools == NO_TOOLS,
        time_limit=settings.template_seconds,
    )


def template_source(file: str) -> str:
    """The chat template in a Jinja file; SetupError for one that cannot be read."""
    try:
        return read_template(Path(file))
    except (OSError, ValueError) as error:
        raise SetupError(
            f"{file}: the chat template cannot be read ({error}).\n"
            "Pass --chat-template with the path of a Jinja text file."
        ) from None


def selected_codes(settings: Settings) -> frozenset[str]:
    """The codes of the selected rules; SetupError for a prefix that matches no rule."""
    codes = [rule.code for rule in all_rules()]
    for prefix in (*settings.select, *settings.extend_select, *settings.ignore):
        if not any(code.startswith(prefix) for code in codes):
            raise SetupError(
                f"No rule matches {prefix!r}.\n"
                "A selection that matches nothing would let every error pass.\n"
                "`tito-audit list rules` prints the codes."
            )
    return frozenset(
        code for code in codes if is_selected(code, settings.select, settings.ignore, settings.extend_select)
    )
