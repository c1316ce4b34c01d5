"""audit_batch: audits a batch in a training loop, without files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from tito_audit.errors import RecordError, SetupError
from tito_audit.format import Format, Row
from tito_audit.formats import format_named, pick_format, with_sampling_settings
from tito_audit.record.arrays import Mask
from tito_audit.record.finding import Finding, Result, Severity, Where
from tito_audit.record.rollout import Place, Rollout
from tito_audit.run.auditor import Loader, audit_rollout, unreadable_result
from tito_audit.run.fit import MISFIT_CODE, TESTED_ROLLOUTS, find_misfit
from tito_audit.run.log_findings import RunCounts
from tito_audit.run.scan import add_coverage_notices
from tito_audit.settings.model import Settings
from tito_audit.summary import Summary
from tito_audit.tables.display import DisplayableResults
from tito_audit.terminal.verdict import verdict_lines
from tito_audit.terminal.words import many

TOKENS, PROMPT, COMPLETION, ATTENTION = "token_ids", "prompt_ids", "completion_ids", "attention_mask"
_MASK, _RESPONSE = "loss_mask", "response_lengths"
GENERIC, PADDED = "generic", "verl_batch"
"""The formats that read the rows: plain columns, or prompt and response columns with their padding."""


@dataclass(frozen=True, slots=True)
class BatchColumn:
    """One column of a batch."""

    name: str
    rows: Sequence[Any]
    """A list or array for each row; None where a row has no values."""
    width: int | None = None
    """The second dimension of an array or tensor `[B, width]`; None for a list of rows."""

    def left_padded(self, width: int) -> BatchColumn:
        """The column of an array, filled up on the left to this width with values that say nothing."""
        missing, rows = width - (self.width or 0), []
        for row in self.rows:
            fill: float = np.nan
            if self.name == _MASK:  # not trained, as a mask or a label says it
                fill = -100 if row.dtype.kind == "i" and (row == -100).any() else 0
            rows.append(np.concatenate([np.full(missing, fill), row]))
        return BatchColumn(self.name, rows, width)


def batch_rows(passed: Mapping[str, Any]) -> tuple[str, Sequence[Row]]:
    """The name of the format that reads a batch, and the rows; `passed` are the columns, None if not passed.

    SetupError, in one line, if the columns do not belong together.
    """
    columns = {
        name: column(name, value) for name, value in passed.items() if value is not None and name != _RESPONSE
    }
    if (TOKENS in columns) == (COMPLETION in columns):
        what = "token_ids and completion_ids are both given" if TOKENS in columns else "There are no token ids"
        raise SetupError(f"{what}: pass token_ids, or completion_ids with prompt_ids.")
    if PROMPT in columns and TOKENS in columns:
        raise SetupError("prompt_ids are given with token_ids, which hold them: leave them out.")
    lead = columns.get(TOKENS) or columns[COMPLETION]
    size = len(lead.rows)
    for each in columns.values():
        if len(each.rows) != size:
            rows_of_it = many(len(each.rows), "row")
            raise SetupError(f"{each.name} holds {rows_of_it}, {lead.name} {size}: pass one for each.")
    columns = _align_columns(columns)
    padded = ATTENTION in columns and TOKENS not in columns
    names = {PROMPT: "prompts", COMPLETION: "responses"} if padded else {}
    rows: list[dict[str, Any]] = [
        {
            names.get(name, name): each.rows[number]
            for name, each in columns.items()
            if each.rows[number] is not None
        }
        for number in range(size)
    ]
    response = passed.get(_RESPONSE)
    if response is not None:
        try:
            lengths = np.asarray(_tensor_array(_RESPONSE, response) if hasattr(response, "detach") else response)
        except ValueError:  # lists of several lengths
            lengths = np.empty(0)
        if lengths.shape != (size,) or lengths.dtype.kind not in "iu":
            raise SetupError(f"response_lengths are not {size} whole numbers, one for each row.")
        for number, (row, length, ids) in enumerate(zip(rows, lengths.tolist(), lead.rows, strict=True)):
            if ids is not None and not 0 <= length <= len(ids):
                raise SetupError(f"response_lengths[{number}] is {length}, and the row has {len(ids)} tokens.")
            row["response_length"] = length
    return PADDED if padded else GENERIC, rows


def column(name: str, value: Any) -> BatchColumn:
    """A column of a batch: a list of rows, a two-dimensional array, or a tensor on any device.

    SetupError if it is none of these.
    """
    if hasattr(value, "detach"):
        value = list(value.unbind()) if getattr(value, "is_nested", False) else _tensor_array(name, value)
    elif not isinstance(value, list | tuple) and hasattr(value, "__array__"):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        if value.ndim != 2:
            raise SetupError(
                f"{name} has {many(value.ndim, 'dimension')}; a batch has two: rows and their tokens."
            )
        return BatchColumn(name, list(value), value.shape[1])
    if not isinstance(value, list | tuple | np.ndarray):
        raise SetupError(f"{name} is a value of type {type(value).__name__}, not a batch: pass a list of rows.")
    rows: list[Any] = []  # lists and arrays `[T]`; None for no values
    for number, row in enumerate(value):
        if hasattr(row, "detach"):
            row = _tensor_array(f"{name}[{number}]", row)
        elif isinstance(row, tuple):
            row = list(row)
        elif isinstance(row, list):
            row = np.asarray(row) if row and isinstance(row[0], np.generic) else row
        elif hasattr(row, "__array__") and np.ndim(row):
            row = np.asarray(row)
        if not (row is None or isinstance(row, list) or (isinstance(row, np.ndarray) and row.ndim == 1)):
            what = many(row.ndim, "dimension") if isinstance(row, np.ndarray) else f"type {type(row).__name__}"
            raise SetupError(f"{name}[{number}] is not a row but a value of {what}; for one row, pass [{name}].")
        rows.append(row)
    return BatchColumn(name, rows)


def _tensor_array(name: str, tensor: Any) -> Any:
    """A tensor on any device as an array; SetupError unless it is dense."""
    try:
        tensor = tensor.detach().cpu()
        if tensor.is_floating_point() and tensor.element_size() < 4:  # numpy has no bfloat16
            tensor = tensor.float()
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:  # sparse, or on the meta device
        raise SetupError(f"{name} is not an array ({str(error).splitlines()[0]}): pass a dense tensor.") from error


def _align_columns(columns: dict[str, BatchColumn]) -> dict[str, BatchColumn]:
    """The columns with one entry per id: narrower arrays cover the response at the end of the ids.

    Where all other arrays are as narrow, the ids are split into prompt and completion instead. Prompts and
    completions are joined if there is padding and another column covers both.
    """
    ids = columns.get(TOKENS)
    if ids is None:
        prompt, completion, attention = (columns.get(name) for name in (PROMPT, COMPLETION, ATTENTION))
        if attention is None or completion is None:
            return columns
        if prompt is None or prompt.width is None or completion.width is None:
            raise SetupError("attention_mask with completion_ids needs arrays of prompt_ids and completion_ids.")
        whole = prompt.width + completion.width
        if attention.width != whole:
            raise SetupError(
                f"attention_mask has {attention.width} columns; "
                f"prompt_ids and completion_ids together have {whole}."
            )
        others = {name: each for name, each in columns.items() if name not in (PROMPT, COMPLETION)}
        if not any(each.width == whole for each in others.values() if each is not attention):
            return columns
        rows = [np.concatenate(pair) for pair in zip(prompt.rows, completion.rows, strict=True)]
        ids = BatchColumn(TOKENS, rows, whole)
        columns = {TOKENS: ids, **others}
    width = ids.width
    narrow = [each for each in columns.values() if width and each.width is not None and each.width < width]
    if not narrow or width is None:
        return columns
    if ATTENTION in columns and columns[ATTENTION].width != width:
        raise SetupError(
            f"attention_mask has {columns[ATTENTION].width} columns, token_ids {width}: pass one for each id."
        )
    beside = [each for each in columns.values() if each.name not in (TOKENS, ATTENTION)]
    response = narrow[0].width or 0
    if response < width - 1 and all(each.width == response for each in beside):
        split = {name: each for name, each in columns.items() if name != TOKENS}
        parts = {
            PROMPT: BatchColumn(PROMPT, [row[: width - response] for row in ids.rows], width - response),
            COMPLETION: BatchColumn(COMPLETION, [row[width - response :] for row in ids.rows], response),
        }
        return {**parts, **split}
    if ATTENTION not in columns and response == width - 1:
        return columns
    return {name: each.left_padded(width) if each in narrow else each for name, each in columns.items()}


BATCH = "batch"
"""The file name in the places of findings; their row is the row in the batch."""


@dataclass(eq=False, repr=False)
class BatchAudit(DisplayableResults):
    """What the audit of a batch found; `str()` is the verdict with its causes."""

    results: tuple[Result, ...]
    """One for each row, then those about the batch as a whole."""
    summary: Summary
    """Counts, as of a scan."""
    failing_rows: Mask
    """bool `[B]`: rows with a finding at or above `Settings.fail_on`; all rows if the whole batch has one."""

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

    def _finished_summary(self) -> Summary:
        return self.summary

    def _repr_html_(self) -> str:
        return super(BatchAudit, self.run())._repr_html_()


class BatchAuditor:
    """Audits batches; loads the rules and the tokenizer once."""

    def __init__(self, settings: Settings | None = None, *, tokenizer: str | None = None) -> None:
        """`tokenizer` replaces the one in the settings; settings for reading files have no effect.

        SetupError if the tokenizer cannot be loaded.
        """
        self.settings = Settings.given(settings)
        if tokenizer is not None:
            self.settings = replace(self.settings, tokenizer=tokenizer)
        self._auditor, self._notice = Loader().load_auditor(self.settings)
        self._auditor.load()
        self._bar = Severity.threshold(self.settings.fail_on)

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
        """Audit one batch; the parameters are those of `audit_batch`."""
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
        form = format_named(name)
        return self._audit(self._read(rows, lambda row: form), len(rows), started)

    def audit_rows(self, rows: Sequence[Row]) -> BatchAudit:
        """Audit rows as a log holds them: objects in any format that a scan reads; columns may be arrays.

        `failing_rows` has an entry for each row.
        """
        started = time.perf_counter()
        return self._audit(self._read(rows, pick_format), len(rows), started)

    def _read(self, rows: Sequence[Row], format_of: Callable[[Row], Format]) -> list[Rollout | Result]:
        """The rollouts of all rows; in place of a row that cannot be read, the result that says so."""
        read = list[Rollout | Result]()
        for number, row in enumerate(rows):
            place = Place(BATCH, number)
            try:
                read += with_sampling_settings(row, format_of(row).read(row, place))
            except RecordError as error:
                read.append(unreadable_result(place, str(error), self._auditor.codes))
        return read

    def _audit(self, read: Sequence[Rollout | Result], size: int, started: float) -> BatchAudit:
        """Audit what was read of a batch of `size` rows."""
        auditor, tokenizer = self._auditor, self._auditor.tokenizer
        if tokenizer is not None and MISFIT_CODE in auditor.codes:
            # Drop the tokenizer if the batch was certainly written with another one.
            head = islice((row for row in read if isinstance(row, Rollout)), TESTED_ROLLOUTS)
            finding = find_misfit(list(head), tokenizer, auditor.renderer)
            auditor = auditor if finding is None else auditor.without_misfit(finding)
            tokenizer = auditor.tokenizer
        summary = Summary(files=[BATCH], codes=auditor.codes)
        if self._auditor.tokenizer is not None:
            summary.tokenizer = self._auditor.tokenizer.name
            summary.encoder = None if tokenizer is None else tokenizer.encoder_name
        summary.notices += [] if self._notice is None else [self._notice]
        counts = RunCounts(summary)
        results = list(counts.add_log_findings(auditor.log_findings))
        for row in read:
            result = row if isinstance(row, Result) else audit_rollout(row, auditor)
            counts.add(result)
            results.append(result)
        results += counts.close_all({BATCH: auditor.codes})
        add_coverage_notices(summary)
        summary.seconds = time.perf_counter() - started
        failing = np.zeros(size, np.bool_)
        for finding in (finding for result in results for finding in result.findings):
            if self._bar is not None and finding.severity >= self._bar:
                failing[slice(None) if finding.hit.where is Where.LOG else finding.place.row] = True
        return BatchAudit(tuple(results), summary, failing)


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
    """Audit a batch as a trainer holds it, with the rules of a scan; for use in a training loop.

    Every column is a list of rows (lists, arrays, tensors), an array `[B, T]`, or a tensor on any device. The ids
    are `token_ids`, or `prompt_ids` and `completion_ids`. `loss_mask` says what is trained (1, True, or labels
    other than -100), `logprobs` are the sampler's, `trainer_logprobs` the trainer's for the same tokens.
    `attention_mask`, as wide as all ids, is 0 for padding; without it every entry is a token.

    An array narrower than `token_ids` covers the response at their end; with one entry less, the first token has
    none. `response_lengths` `[B]` are the numbers of response tokens at the end of the rows, where columns of
    lists cover only these (slime); without a mask all of them are trained.

    `tokenizer` (a folder or hub name) adds the rules that need one. The first call with given settings loads the
    rules and the tokenizer; a `BatchAuditor` loads them when it is made. SetupError if columns do not belong
    together; a row that cannot be read is a finding.
    """
    settings = Settings.given(settings)
    key = repr((settings, tokenizer))
    auditor = _auditors.get(key)
    if auditor is None:
        while len(_auditors) >= 8:
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
