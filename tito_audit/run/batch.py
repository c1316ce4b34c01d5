"""audit_batch: the audit of a batch in a training loop, without files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from tito_audit.chains.ledger import Ledger
from tito_audit.errors import RecordError
from tito_audit.formats import format_named
from tito_audit.record.arrays import Mask
from tito_audit.record.finding import Finding, Result, Severity, Where
from tito_audit.record.rollout import Place, Rollout
from tito_audit.record.testimony import Testimony
from tito_audit.reports import verdict_lines
from tito_audit.run.auditor import Auditor, Loader, audit_rollout, unreadable
from tito_audit.run.batch_rows import batch_rows
from tito_audit.run.fit import CODE, ROWS, misfit
from tito_audit.run.log_findings import count_logs, note_witness
from tito_audit.run.once import Once
from tito_audit.run.scan import conclude
from tito_audit.settings.model import Settings
from tito_audit.summary import Summary
from tito_audit.tables.shown import Shown

BATCH = "batch"
"""The file that the places of findings name; their row is the row of the batch."""
_AUDITORS = 8
"""How many auditors `audit_batch` keeps."""


@dataclass(eq=False, repr=False)
class BatchAudit(Shown):
    """What the audit of a batch found; `str()` is the verdict with the causes."""

    results: tuple[Result, ...]
    """One for each row, then those about the batch as a whole."""
    summary: Summary
    """Counts, as those of a scan."""
    failing_rows: Mask
    """`[B]` True for rows with a finding at or above `Settings.fail_on`, or if the whole batch has one."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings; `finding.place.row` is the row in the batch."""
        return tuple(finding for result in self.results for finding in result.findings)

    @property
    def failed(self) -> bool:
        """Whether any row fails."""
        return bool(self.failing_rows.any())

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __str__(self) -> str:
        return "\n".join(verdict_lines(self.summary))

    def _counted(self) -> Summary:
        return self.summary


class BatchAuditor:
    """Audits batches; loads rules and tokenizer once."""

    def __init__(self, settings: Settings | None = None, *, tokenizer: str | None = None) -> None:
        """`tokenizer` replaces the one in the settings.

        Of the settings, those for reading files mean nothing here. SetupError if the tokenizer cannot be loaded.
        """
        self.settings = Settings.given(settings)
        if tokenizer is not None:
            self.settings = replace(self.settings, tokenizer=tokenizer)
        self._auditor, self._notice = Loader().auditor(self.settings)
        self._auditor.load()
        self._bar = Severity.bar(self.settings.fail_on)

    def audit(
        self,
        token_ids: Any = None,
        loss_mask: Any = None,
        logprobs: Any = None,
        *,
        prompt_ids: Any = None,
        completion_ids: Any = None,
        attention_mask: Any = None,
        response_lengths: Any = None,
        trainer_logprobs: Any = None,
    ) -> BatchAudit:
        """The audit of one batch; parameters as those of `audit_batch`."""
        started = time.perf_counter()
        name, rows = batch_rows(
            {
                "token_ids": token_ids,
                "prompt_ids": prompt_ids,
                "completion_ids": completion_ids,
                "loss_mask": loss_mask,
                "logprobs": logprobs,
                "trainer_logprobs": trainer_logprobs,
                "attention_mask": attention_mask,
                "response_lengths": response_lengths,
            }
        )
        form, read = format_named(name), list[Rollout | Result]()
        for number, row in enumerate(rows):
            place = Place(BATCH, number)
            try:
                read += form.read(row, place)
            except RecordError as error:
                read.append(unreadable(place, str(error), self._auditor.codes))
        return self._audited(read, len(rows), started)

    def _audited(self, read: Sequence[Rollout | Result], size: int, started: float) -> BatchAudit:
        auditor = self._fitting([one for one in read if isinstance(one, Rollout)])
        tokenizer = auditor.tokenizer
        summary = Summary(files=[BATCH], codes=auditor.codes)
        if self._auditor.tokenizer is not None:
            summary.tokenizer = self._auditor.tokenizer.name
            summary.encoder = None if tokenizer is None else tokenizer.encoder_name
        summary.notices += [] if self._notice is None else [self._notice]
        results = []
        for result in self._results(read, auditor, summary):
            summary.add(result)
            results.append(result)
        conclude(summary)
        summary.seconds = time.perf_counter() - started
        return BatchAudit(tuple(results), summary, self._failing(results, size))

    def _results(self, read: Sequence[Rollout | Result], auditor: Auditor, summary: Summary) -> Iterator[Result]:
        """The results of the rows, with those about the whole batch where a scan has them."""
        if auditor.told:
            yield Result(auditor.told[0].place, None, auditor.told, of_log=True)
        testimonies, ledger = dict[str, Testimony](), Ledger()
        for one in read:
            if isinstance(one, Result):
                yield one
                continue
            result = audit_rollout(one, auditor)
            note_witness(result, testimonies)
            ledger.note(result)
            yield result
        yield from count_logs(testimonies, summary, {BATCH: auditor.codes})
        if len(ledger):
            once = Once.of(ledger)
            yield from once.results()
            summary.notices += once.notices()

    def _fitting(self, rollouts: Sequence[Rollout]) -> Auditor:
        """The auditor; without its tokenizer if the batch was certainly written with another one."""
        tokenizer = self._auditor.tokenizer
        if tokenizer is None or CODE not in self._auditor.codes:
            return self._auditor
        found = misfit(list(islice(rollouts, ROWS)), tokenizer, self._auditor.renderer)
        return self._auditor if found is None else self._auditor.held_back(found)

    def _failing(self, results: Sequence[Result], size: int) -> Mask:
        failing = np.zeros(size, np.bool_)
        for result in results:
            for finding in result.findings:
                if self._bar is not None and finding.severity >= self._bar:
                    failing[slice(None) if finding.hit.where is Where.LOG else finding.place.row] = True
        return failing


_auditors: dict[str, BatchAuditor] = {}


def audit_batch(
    token_ids: Any = None,
    loss_mask: Any = None,
    logprobs: Any = None,
    *,
    prompt_ids: Any = None,
    completion_ids: Any = None,
    attention_mask: Any = None,
    response_lengths: Any = None,
    trainer_logprobs: Any = None,
    tokenizer: str | None = None,
    settings: Settings | None = None,
) -> BatchAudit:
    """Audits a batch as a trainer holds it, with the rules of a scan of these rows; for use in a training loop.

    Every column is a list of rows (lists, arrays, tensors), a two-dimensional array `[B, T]`, or a tensor on any
    device. The ids are `token_ids`, or `prompt_ids` and `completion_ids`. `loss_mask` says what is trained (1,
    True, or labels other than -100), `logprobs` are the sampler's, `trainer_logprobs` the trainer's for
    the same tokens. `attention_mask`, as wide as all ids, is 0 for padding; without it every entry is a token.

    A column of an array that is narrower than `token_ids` covers the response at their end; with one entry less,
    the first token has none. `response_lengths` `[B]` says how many tokens at the end of each row are its response
    if columns of lists cover only these (slime); without a mask all of them are trained.

    `tokenizer` (a folder or hub name) adds the rules that need one. Rules and tokenizer are loaded by the first
    call with these settings; a `BatchAuditor` loads them when you choose. SetupError if columns do not belong
    together; a row that cannot be read is a finding.
    """
    settings = Settings.given(settings)
    key = repr((settings, tokenizer))
    auditor = _auditors.get(key)
    if auditor is None:
        while len(_auditors) >= _AUDITORS:
            _auditors.pop(next(iter(_auditors)))
        auditor = _auditors[key] = BatchAuditor(settings, tokenizer=tokenizer)
    return auditor.audit(
        token_ids,
        loss_mask,
        logprobs,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        attention_mask=attention_mask,
        response_lengths=response_lengths,
        trainer_logprobs=trainer_logprobs,
    )
