"""The pictures of the guide: each token by its logprob at the trainer, and how much higher the sampler's is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

PANELS = (
    ("mismatch-temperature.svg", "temperature=0.7", "temperature 0.7 on the sampler's side"),
    ("mismatch-truncated.svg", "top_p=0.9", "top-p 0.9 on the sampler's side"),
    ("mismatch-stale.svg", "versions=8", "weights eight optimizer steps old"),
    ("mismatch-numerics.svg", "bfloat16", "bfloat16 against float32"),
)
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 460, 260, 52, 28, 12, 40
X, Y = (-8.0, 0.0), (-1.0, 1.0)
TOKENS = 900


def pictures(columns: Mapping[str, np.ndarray]) -> Iterator[tuple[str, str]]:
    """Name and SVG of each picture."""
    for name, setting, title in PANELS:
        sampler, trainer = columns[setting].astype(float)[:, :TOKENS]
        yield name, svg(title, trainer, sampler - trainer)


def svg(title: str, trainer: np.ndarray, higher: np.ndarray) -> str:
    """A scatter plot of 900 tokens; those outside lie on its edge."""
    across = LEFT + (np.clip(trainer, *X) - X[0]) / (X[1] - X[0]) * (WIDTH - LEFT - RIGHT)
    down = TOP + (Y[1] - np.clip(higher, *Y)) / (Y[1] - Y[0]) * (HEIGHT - TOP - BOTTOM)
    path = "".join(f"M{x:.0f} {y:.0f}h0" for x, y in zip(across, down, strict=True))
    middle, bottom = TOP + (HEIGHT - TOP - BOTTOM) / 2, HEIGHT - BOTTOM
    texts = [
        f'<text x="{LEFT}" y="17" font-weight="bold">{title}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        "logprob by the trainer</text>",
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        "sampler minus trainer</text>",
    ]
    for value in range(int(X[0]), int(X[1]) + 1, 2):
        x = LEFT + (value - X[0]) / (X[1] - X[0]) * (WIDTH - LEFT - RIGHT)
        texts.append(f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="middle">{value}</text>')
    for value in (-1, 0, 1):
        y = TOP + (Y[1] - value) / (Y[1] - Y[0]) * (HEIGHT - TOP - BOTTOM)
        texts.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{value:+d}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="11" fill="#222">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n'
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{bottom - TOP}" fill="none" '
        'stroke="#999"/>\n'
        f'<path d="M{LEFT} {middle:.0f}H{WIDTH - RIGHT}" stroke="#999"/>\n'
        f'<path d="{path}" stroke="#c44e52" stroke-opacity="0.5" stroke-width="3" stroke-linecap="round"/>\n'
        + "\n".join(texts)
        + "\n</svg>\n"
    )
