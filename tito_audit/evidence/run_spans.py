"""The runs of a mask as spans that a model may have sampled: columns where there are very many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from tito_audit.evidence.model import SampledSpan
from tito_audit.record.arrays import Mask
from tito_audit.record.runs import ManyRuns, Run, trained_runs


@dataclass(frozen=True, slots=True, eq=False)
class RunSpans(Sequence[SampledSpan]):
    """Very many spans, each with one end; each is made only while it is looked at."""

    runs: ManyRuns

    def __len__(self) -> int:
        return len(self.runs)

    @overload
    def __getitem__(self, number: int) -> SampledSpan: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[SampledSpan]: ...
    def __getitem__(self, number: int | slice) -> SampledSpan | Sequence[SampledSpan]:
        if isinstance(number, slice):
            return RunSpans(ManyRuns(self.runs.bounds[number]))
        return _span(self.runs[number])

    def __iter__(self) -> Iterator[SampledSpan]:
        return map(_span, self.runs)


def spans_of_runs(mask: Mask) -> Sequence[SampledSpan]:
    """A span for each run in which the mask is true."""
    runs = trained_runs(mask)
    return RunSpans(runs) if isinstance(runs, ManyRuns) else tuple(map(_span, runs))


def _span(run: Run) -> SampledSpan:
    return SampledSpan(run[0], (run[1],))
