"""The figure of the page: rates of the engines, and how they change as conversations grow."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.studies import SCAN, Comparison, Growth

__all__ = ["plot"]


def plot(compared: Comparison, lengths: Growth | None, path: Path) -> bool:
    """Write an SVG; False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "tito-audit", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    count = 2 if lengths is not None and len(lengths.at) > 1 else 1
    figure, panels = pyplot.subplots(1, count, figsize=(5 * count, 3.4), squeeze=False, layout="constrained")
    _bars(panels[0][0], compared)
    if lengths is not None and count == 2:
        _lines(panels[0][1], lengths)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def _bars(axes: Any, compared: Comparison) -> None:
    engines = sorted(compared.runs, key=lambda one: statistics.median(run.rate for run in compared.timed(one)))
    rates = [statistics.median(run.rate for run in compared.timed(one)) for one in engines]
    names = [f"{name}, {workers} process{'es' * (workers > 1)}" for name, workers in engines]
    bars = axes.barh(names, rates, color=["#c44e52" if name == SCAN else "#8c8c8c" for name, _ in engines])
    axes.bar_label(bars, [f" {rate:,.0f}" for rate in rates])
    axes.set_xscale("log")
    axes.set_xlim(min(rates) / 3, max(rates) * 30)
    axes.set_xlabel("recorded tokens a second")
    axes.set_title(f"{compared.corpus.tokens:,} tokens, {compared.kind}")


def _lines(axes: Any, lengths: Growth) -> None:
    for name, several, color in ((SCAN, lengths.scans, "#c44e52"), ("every turn", lengths.per_turn, "#8c8c8c")):
        rates = [statistics.median(run.rate for run in runs[1:] or runs) for runs in several]
        if rates:
            axes.plot(lengths.at, rates, marker="o", label=name, color=color)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(lengths.at, [str(turns) for turns in lengths.at])
    axes.set_xlabel("answers in a conversation")
    axes.set_ylabel("recorded tokens a second, one process")
    axes.set_title("the same tokens in longer conversations")
    axes.legend()
