"""How far a loss mask may be off the spans of a row, and where each span then ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from tito_audit.evidence.model import SampledSpan
from tito_audit.record.arrays import Mask
from tito_audit.record.runs import run_ends

FARTHEST = 4
"""How many places off its tokens a mask or a column is looked for."""
Ends: TypeAlias = tuple[int | None, ...]
"""Where the sampling of each span ended; None where several ends are possible."""


def slides_of(
    mask: Mask | None, spans: tuple[SampledSpan, ...], first: int
) -> tuple[dict[int | None, Ends], Ends]:
    """Every number of places that all trained runs may be off their spans, with the ends of the spans then.

    Also the ends for a mask that no single number explains: those of the spans that it trains, or leaves out, in
    place. `first` is the first token that the mask covers: what slid before it is lost.
    """
    known = tuple(span.ends[0] if len(span.ends) == 1 else None for span in spans)
    if mask is None or not mask.any():
        return {}, known
    bounds, runs = (first, len(mask)), run_ends(mask)
    ends = _slid(runs, spans, 0, bounds)
    if ends is not None and (len(spans) > 1 or spans[0].start > first):
        return {0: _together(known, ends)}, _together(known, ends)
    found = {far: _slid(runs, spans, far, bounds) for far in sorted(range(-FARTHEST, FARTHEST + 1), key=abs)}
    slides: dict[int | None, Ends] = {
        far: _together(known, ends) for far, ends in found.items() if ends is not None
    }
    if ends is not None:  # a single span from the mask's first token on may fit several slides
        return slides, slides[0]
    turned = ~mask
    turned[:first] = False
    ends = _slid(run_ends(turned), spans, 0, bounds)
    if ends is None:
        ends = [next(iter(_fitted(span, runs, 0, bounds) or ()), None) for span in spans]
    irregular = _together(known, ends)
    if any(not (mask & ~_sampled(spans, ends, len(mask))).any() for ends in slides.values()):
        slides = {0: irregular, **slides}  # nothing else is trained, so part of an answer may be left out
    return slides, irregular


def _sampled(spans: Sequence[SampledSpan], ends: Ends, size: int) -> Mask:
    """`[T]` what was or may have been sampled, if the spans ended there."""
    out = np.zeros(size, np.bool_)
    for span, end in zip(spans, ends, strict=True):
        out[span.start : span.ends[-1] if end is None else end] = True
    return out


def _slid(
    runs: Mapping[int, int], spans: tuple[SampledSpan, ...], far: int, bounds: tuple[int, int]
) -> list[int | None] | None:
    """Where each span ended if the trained runs lie `far` places off the spans; None where they do not."""
    if len(runs) > len(spans):
        return None
    fitted = [_fitted(span, runs, far, bounds) for span in spans]
    if sum(bool(ends) for ends in fitted) != len(runs) or any(ends == [] for ends in fitted):
        return None
    return [ends[0] if ends is not None and len(ends) == 1 else None for ends in fitted]


def _together(known: Ends, ends: Sequence[int | None]) -> Ends:
    return tuple(a if b is None else b for a, b in zip(known, ends, strict=True))


def _fitted(span: SampledSpan, runs: Mapping[int, int], far: int, bounds: tuple[int, int]) -> list[int] | None:
    """The ends of a span for which a run is `far` places off; None where no run begins there.

    [] where a run begins there but ends elsewhere.
    """
    first, size = bounds
    start = max(span.start + far, first)
    if start not in runs:
        return None
    return [end for end in span.ends if max(min(end + far, size), first) == runs[start]]
