"""The pictures of the guides: each token by its logprob at the trainer, and how much higher the sampler's is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .plant import COLUMNS, HELD_OUT

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 460, 260, 52, 28, 12, 40
LOWEST = -8.0
TOKENS = 900
NUMERICS, CAUSE = "#8a8a8a", "#c44e52"


def pictures() -> Iterator[tuple[str, str]]:
    """Name and SVG of each picture; tokens that are not of the cause are grey."""
    panels = (
        ("temperature", COLUMNS["temperature=0.7"], "temperature 0.7 on the sampler's side"),
        ("truncated", COLUMNS["top_p=0.9"], "top-p 0.9 on the sampler's side"),
        ("stale", COLUMNS["versions=8"], "weights eight optimizer steps old"),
        ("numerics", COLUMNS["bfloat16"], "bfloat16 against float32"),
    )
    for name, pair, title in panels:
        yield f"mismatch-{name}.svg", svg(title, pair[:, :TOKENS].astype(float), np.ones(TOKENS, bool), 1)
    pair = HELD_OUT["drift"][:, :TOKENS].astype(float)
    differ = np.abs(pair[0] - pair[1]) > 1e-3
    yield (
        "mismatch-drift.svg",
        svg("pairs of tokens encoded otherwise, and the tokens behind them", pair, differ, 8),
    )
    pair, both = HELD_OUT["experts coarse router"], HELD_OUT["both experts coarse router"]
    differ = (both[0] != both[1]).any(axis=(1, 2))[:TOKENS]
    yield "mismatch-routing.svg", svg("other experts before the token", pair[:, :TOKENS].astype(float), differ, 1)
    sampler, trainer = COLUMNS["bfloat16"][:, :TOKENS].astype(float)
    late = np.stack((sampler, np.roll(trainer, 1)))
    yield "mismatch-shifted.svg", svg("the trainer's column one place late", late, np.ones(TOKENS, bool), 8)
    filled = np.random.default_rng(0).random(TOKENS) < 0.1
    holed = np.stack((sampler, np.where(filled, 0.0, trainer)))
    yield "mismatch-placeholder.svg", svg("0.0 at the trainer where nothing was computed", holed, filled, 8)
    copied = np.stack((sampler, sampler))
    yield "mismatch-copied.svg", svg("the trainer's column is the sampler's", copied, np.ones(TOKENS, bool), 1)


def svg(title: str, pair: np.ndarray, of_cause: np.ndarray, far: int) -> str:
    """A scatter plot of tokens; those outside lie on its edge."""
    trainer, higher = pair[1], pair[0] - pair[1]
    across = LEFT + (np.clip(trainer, LOWEST, 0) - LOWEST) / -LOWEST * (WIDTH - LEFT - RIGHT)
    down = TOP + (far - np.clip(higher, -far, far)) / (2 * far) * (HEIGHT - TOP - BOTTOM)
    middle, bottom = TOP + (HEIGHT - TOP - BOTTOM) / 2, HEIGHT - BOTTOM
    texts = [
        f'<text x="{LEFT}" y="17" font-weight="bold">{title}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
        "logprob by the trainer</text>",
        f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
        "sampler minus trainer</text>",
    ]
    for value in range(int(LOWEST), 1, 2):
        x = LEFT + (value - LOWEST) / -LOWEST * (WIDTH - LEFT - RIGHT)
        texts.append(f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="middle">{value}</text>')
    for value in (-far, 0, far):
        y = TOP + (far - value) / (2 * far) * (HEIGHT - TOP - BOTTOM)
        texts.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{value:+d}</text>')
    paths = []
    for colour, part in ((NUMERICS, ~of_cause), (CAUSE, of_cause)):
        if part.any():
            path = "".join(f"M{x:.0f} {y:.0f}h0" for x, y in zip(across[part], down[part], strict=True))
            style = f'stroke="{colour}" stroke-opacity="0.5" stroke-width="3" stroke-linecap="round"'
            paths.append(f'<path d="{path}" {style}/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="11" fill="#222">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n'
        f'<rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{bottom - TOP}" fill="none" '
        'stroke="#999"/>\n'
        f'<path d="M{LEFT} {middle:.0f}H{WIDTH - RIGHT}" stroke="#999"/>\n'
        + "\n".join((*paths, *texts))
        + "\n</svg>\n"
    )
