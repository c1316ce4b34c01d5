"""The auditor of a log (tokenizer, template and rules, loaded once), and the audit of one rollout."""

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
from tito_audit.run.adopt import Adopted
from tito_audit.run.check import SINGLE, check_explained, explain
from tito_audit.run.fit import TOKENIZER
from tito_audit.run.guard import LEAVE_OUT, failed
from tito_audit.run.headlines import headed
from tito_audit.settings.model import NO_TOOLS, RECORDED, Settings
from tito_audit.tokens.bounds import read_template
from tito_audit.tokens.encoders import ReferenceEncoder
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.tokens.vocab import Vocabulary
from tito_audit.viewer.model import Observed, ViewSize
from tito_audit.ways.writer import renderer_at_own_date

Viewed = Callable[[Iterable[Finding], int], ViewSize | None]
"""The size of the view of a rollout with these findings in this row; called once per rollout, in order."""


@dataclass(frozen=True, slots=True)
class Auditor:
    """What rollouts are audited with, loaded once, before processes are forked."""

    tokenizer: Tokenizer | None
    renderer: Renderer | None
    rules: Sequence[Rule]
    codes: frozenset[str]
    """The selected rules."""
    repairs: Callable[[], Sequence[Repair]]
    """Imported when the first finding needs the name of its repair."""
    speakers: Speakers = DEFAULT_SPEAKERS
    """Which roles were sampled."""
    misfit: Finding | None = None
    """Why the tokenizer or renderer is withheld: the log was written with another one; None if neither is
    withheld."""
    told: tuple[Finding, ...] = ()
    """Findings about the whole log that its first rows show, including `misfit`."""
    own_dates: bool = False
    """Whether each rollout is rendered on the date that its first prompt holds."""
    conventions: Conventions = NO_CONVENTIONS
    """What the run states about how training rows were written."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """To show tokens as text; None without a tokenizer."""
        return self.tokenizer.vocabulary if self.tokenizer is not None else None

    def held_back(self, misfit: Finding) -> Auditor:
        """The same without the tokenizer or template with which, by this finding, the log was not written."""
        tokenizer = None if misfit.hit.cause == TOKENIZER else self.tokenizer
        return replace(self, tokenizer=tokenizer, renderer=None, misfit=misfit, told=(misfit,))

    def adopting(self, adopted: Adopted) -> Auditor:
        """The same with the renderer with which, by this finding, the log was written."""
        return replace(self, renderer=adopted.renderer, own_dates=adopted.own_dates).telling(adopted.finding)

    def telling(self, finding: Finding | None) -> Auditor:
        """The same with one more finding about the whole log, if there is one."""
        return self if finding is None else replace(self, told=(*self.told, finding))

    def renderer_for(self, rollout: Rollout) -> Renderer | None:
        """The renderer of one rollout; None without a template."""
        if not self.own_dates or self.renderer is None or self.tokenizer is None:
            return self.renderer
        return renderer_at_own_date(with_speakers(rollout, self.speakers), self.tokenizer, self.renderer)

    def by_reference(self) -> Auditor:
        """The same without the fast encoder: all ids come from `tokenizers`."""
        if self.tokenizer is None or self.tokenizer.encoder_name == ReferenceEncoder.name:
            return self
        return replace(self, tokenizer=replace(self.tokenizer))

    def without_tokenizer(self) -> Auditor:
        """The same without tokenizer and template, for a rollout that the tokenizer cannot encode."""
        return replace(self, tokenizer=None, renderer=None)

    def load(self) -> None:
        """Load everything that forked processes can share."""
        if self.tokenizer is not None:
            self.tokenizer.load()
        if self.renderer is not None:
            self.renderer.load()
        self.repairs()


_DRIFT = ("TOK", "TPL", "SEQ")
"""Families of rules about what tokenizer and template write differently."""
TRAINED_ONCE = "REC009"
"""The rule that compares what all rows of a run train."""
READS_ONLY = Auditor(None, None, (), frozenset(), tuple)
"""For logs that are read but not audited."""


def audit_rollout(rollout: Rollout, auditor: Auditor, viewed: Viewed | None = None) -> Result:
    """The audit of one rollout; with `viewed`, also what a viewer shows of it. PluginError if any of it fails.

    A rollout with a text that the tokenizer cannot encode is audited without it, and a finding says so.
    """
    try:
        try:
            return _audited(rollout, auditor, viewed)
        except EncodeError as error:
            reason = str(error)
        return unencoded(_audited(rollout, auditor.without_tokenizer(), viewed), reason, auditor.codes)
    except TitoAuditError:
        raise
    except ODD_VALUES as error:
        raise failed("the audit", rollout.place, LEAVE_OUT, error) from error


def _audited(rollout: Rollout, auditor: Auditor, viewed: Viewed | None) -> Result:
    renderer = auditor.renderer_for(rollout)
    evidence = gather(rollout, auditor.tokenizer, renderer, auditor.speakers, auditor.conventions)
    evidence = explain(evidence, auditor.rules, auditor.codes)
    findings, skips = check_explained(evidence, auditor.rules, auditor.codes, auditor.repairs, SINGLE)
    at = rollout.stated.calls_at
    if at:  # rows were joined: each finding is placed in its call's own row
        findings = tuple(
            finding
            if (turn := finding.hit.turn) is None
            else replace(finding, place=replace(finding.place, file=at[turn][0], row=at[turn][1]))
            for finding in findings
        )
    observed = None
    if viewed is not None:
        from tito_audit.viewer.measures import measure  # slow to import, and rarely needed
        from tito_audit.viewer.sequences import view_rollout

        size = viewed(findings, evidence.rollout.place.row)
        view = None if size is None else view_rollout(evidence, findings, size)
        observed = Observed(measure(evidence, findings), view)
    shows, counts, misfit = witness(evidence), counts_of(evidence), auditor.misfit
    if auditor.tokenizer is None:
        counts |= uncompared(counts, skips, auditor.codes)
    if misfit is not None:
        what = misfit.hit.cause.removeprefix("another ")
        skips = _lacking(skips, f"the {what} does not fit the log ({misfit.code})")
    partial = partly_recorded(evidence.rollout)
    return Result(
        rollout.place,
        evidence.rollout,
        findings,
        skips,
        counts,
        observed=observed,
        witness=shows,
        trainings=trainings_of(evidence.rollout) if TRAINED_ONCE in auditor.codes else None,
        misfit=misfit,
        told=auditor.told,
        mismatches=evidence.memo.get(MISMATCH, ()),
        partial=_partial(partial, evidence.present, auditor, skips) if partial else (),
    )


UNENCODED = "the tokenizer cannot encode it"
"""The cause of the finding, and why rules that need the tokenizer are skipped."""
_WITHOUT_TOKENIZER = describe_missing(Needs.TOKENIZER)
_COMPARING = frozenset(("SEQ301", "SEQ302", "SEQ303", "MSK401", "MSK402", "MSK404"))
"""Rules that compare calls with each other or with the training row, without a tokenizer."""


def uncompared(counts: Mapping[str, int], skips: Sequence[Skip], codes: frozenset[str]) -> dict[str, int]:
    """The count of a rollout with ids in which nothing could be compared for lack of a tokenizer; {} of others."""
    if not counts["tokens"] or True not in [_WITHOUT_TOKENIZER in skip.because for skip in skips]:
        return {}
    return {} if (codes & _COMPARING) - {skip.code for skip in skips} else {"uncompared": 1}


_LACKED = tuple(map(describe_missing, (Needs.TOKENIZER, Needs.RENDERING, Needs.SAMPLED, Needs.TEMPLATE)))
"""What a rollout lacks if the tokenizer or template is withheld."""


@lru_cache(64)
def _lacking(skips: tuple[Skip, ...], because: str) -> tuple[Skip, ...]:
    """The skips, with the reason why the tokenizer or template is withheld."""
    return tuple(
        Skip(skip.code, because) if any(words in skip.because for words in _LACKED) else skip for skip in skips
    )


def _partial(partial: Needs, present: Needs, auditor: Auditor, skips: Sequence[Skip]) -> tuple[Skip, ...]:
    """The rules that ran and need what only some calls have, and that nothing else of the rollout replaces."""
    ran = auditor.codes - {skip.code for skip in skips}
    return tuple(
        Skip(rule.code, f"{describe_missing(need & partial)} in some calls")
        for rule in auditor.rules
        if rule.code in ran
        for need in rule.needs
        if need & partial and not need & present & ~partial
    )


def unreadable(place: Place, error: str, codes: frozenset[str]) -> Result:
    """The result of a row that cannot be read: one finding, REC001."""
    hit = Hit(Where.ROW, 0, 0, error, cause="row cannot be read")
    finding = headed(Finding("REC001", Severity.ERROR, place, hit))
    return Result(place, None, (finding,) if "REC001" in codes else ())


def unencoded(result: Result, error: str, codes: frozenset[str]) -> Result:
    """The result of a rollout audited without the tokenizer, with the finding that says why, REC001."""
    hit = Hit(Where.ROW, 0, 0, error, cause=UNENCODED)
    finding = headed(Finding("REC001", Severity.ERROR, result.place, hit))
    skips = _lacking(result.skips, UNENCODED)
    return replace(result, findings=(*((finding,) if "REC001" in codes else ()), *result.findings), skips=skips)


def counts_of(evidence: Evidence) -> dict[str, int]:
    """How many turns, audited tokens and generated tokens there are; the last as `measure` counts them."""
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
    """The tokenizers and templates of a run, each loaded once.

    `commits` are those of hub tokenizers by name, as another process resolved them: a branch may have moved since.
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
        """By name, the commits of the loaded tokenizers that are from the hub."""
        return {each.name: each.commit for each in self.tokenizers if each.commit is not None}

    def auditor(self, settings: Settings) -> tuple[Auditor, str | None]:
        """The auditor for logs with these settings, and a notice about what it lacks."""
        tokenizer, renderer, notice = self._loaded(settings)
        speakers = Speakers(settings.sampled_roles)
        codes, own = selected_codes(settings), settings.clock == RECORDED
        conventions = parse_conventions(settings.conventions, settings.assume)
        auditor = Auditor(
            tokenizer, renderer, all_rules(), codes, all_repairs, speakers, own_dates=own, conventions=conventions
        )
        return auditor, notice

    def _loaded(self, settings: Settings) -> tuple[Tokenizer | None, Renderer | None, str | None]:
        """Tokenizer and renderer, None if missing, and a notice that says so."""
        if settings.tokenizer is None:
            if settings.chat_template:
                raise SetupError(
                    "--chat-template was given without a tokenizer.\n"
                    "The rendered text has to be encoded before it can be compared.\n"
                    "Pass --tokenizer DIR as well."
                )
            notice = "No tokenizer given: only rules that need none could run. Pass --tokenizer DIR or a hub name."
            return None, None, notice
        key = repr((settings.tokenizer, settings.trust_remote_code))
        tokenizer = self._tokenizers.get(key)
        if tokenizer is None:
            tokenizer = load_tokenizer(
                settings.tokenizer,
                trust_remote_code=settings.trust_remote_code,
                commit=self._commits.get(settings.tokenizer),
            )
            self._tokenizers[key] = tokenizer
        if not settings.chat_template and not tokenizer.chat_templates:
            return (
                tokenizer,
                None,
                f"{tokenizer.name} has no chat template, so nothing could be rendered. "
                "Pass --chat-template FILE to check prompts against one.",
            )
        # All settings that a renderer depends on besides the tokenizer.
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
            renderer = self._renderers[key] = _renderer(tokenizer, settings)
        return tokenizer, renderer, None


def drift_audit(settings: Settings) -> Callable[[Rollout, Tokenizer, Renderer], tuple[Finding, ...]]:
    """A function that audits a rollout for differences from what a tokenizer and template write."""
    rules = all_rules()
    codes = frozenset(rule.code for rule in rules if rule.code.startswith(_DRIFT))
    speakers = Speakers(settings.sampled_roles)

    def audit(rollout: Rollout, tokenizer: Tokenizer, renderer: Renderer) -> tuple[Finding, ...]:
        return audit_rollout(rollout, Auditor(tokenizer, renderer, rules, codes, tuple, speakers)).findings

    return audit


def load_renderer(tokenizer: str, settings: Settings | None = None) -> Renderer:
    """The renderer of the chat template of a tokenizer folder or hub name; SetupError if it has none."""
    settings = Settings.given(settings)
    loaded = load_tokenizer(tokenizer, trust_remote_code=settings.trust_remote_code)
    return _renderer(loaded, settings)


def _renderer(tokenizer: Tokenizer, settings: Settings) -> Renderer:
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
    """The selected codes; SetupError for a prefix that matches no rule."""
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
