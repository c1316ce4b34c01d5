"""Options of `repair` alone, and the RepairSettings they become."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

import typer

from tito_audit.cli import _complete
from tito_audit.errors import SetupError
from tito_audit.settings.model import RepairChoices, RepairSettings

__all__ = [
    "MaskBy",
    "MaskByWord",
    "MaskStyle",
    "Padding",
    "Sentinel",
    "With",
    "repair_settings_of",
]


class MaskByWord(StrEnum):
    """How much `mask` takes out of the loss."""

    SPAN = "span"
    TURN = "turn"
    FIRST_DIVERGENCE = "first-divergence"


class _MaskStyleWord(StrEnum):
    LABELS = "labels"
    BINARY = "binary"
    FLOAT = "float"
    BOOL = "bool"


class _PaddingWord(StrEnum):
    NONE = "none"
    LEFT = "left"
    RIGHT = "right"


With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="NAMES",
        help="Repairs, in the order to try them: splice,mask. [default: all safe]",
        autocompletion=_complete.repairs,
    ),
]
MaskBy = Annotated[
    MaskByWord,
    typer.Option("--mask-by", help="What mask takes out of the loss: the drifted tokens, the turn, or all after."),
]
Sentinel = Annotated[
    str | None,
    typer.Option("--sentinel", metavar="NUMBER|null", help="What normalize writes where there is no logprob."),
]
MaskStyle = Annotated[_MaskStyleWord | None, typer.Option("--mask-style", help="How normalize writes loss masks.")]
Padding = Annotated[_PaddingWord | None, typer.Option("--padding", help="Where normalize puts padding.")]


def repair_settings_of(
    *,
    strategies: Sequence[str] | None = None,
    unsafe: bool = False,
    quarantine: str | None = None,
    force: bool = False,
    provenance: bool = True,
    mask_by: Any = MaskByWord.SPAN,
    sentinel: str | None = None,
    mask_style: str | None = None,
    padding: str | None = None,
) -> RepairSettings:
    """The options of `repair` as RepairSettings; SetupError naming the option that cannot be."""
    choices = RepairChoices(
        mask_by=mask_by.value,
        sentinel=_sentinel(sentinel),
        mask_style=mask_style and str(mask_style),  # type: ignore[arg-type]
        padding=padding and str(padding),  # type: ignore[arg-type]
    )
    names = [name.strip().lower() for part in strategies or () for name in part.split(",")]
    names = [name for name in dict.fromkeys(names) if name]
    _refuse_unused(names, choices)
    return RepairSettings(
        strategies=tuple(names),
        unsafe=unsafe,
        quarantine=quarantine,
        force=force,
        provenance=provenance,
        choices=choices,
    )


def _refuse_unused(names: Sequence[str], choices: RepairChoices) -> None:
    """SetupError when a choice was made for a repair that --with leaves out."""
    from tito_audit.repairs import all_repairs

    for repair in all_repairs():
        if names and repair.chosen(choices) and repair.name not in names:
            raise SetupError(
                f"--with leaves out {repair.name}, which --sentinel, --mask-style and --padding speak to.\n"
                f"Pass --with {','.join((*names, repair.name))}, or leave these options out."
            )


def _sentinel(text: str | None) -> float | Literal["null"] | None:
    if text is None or text == "null":
        return text  # type: ignore[return-value]
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise SetupError(
            f"--sentinel {text}: this is neither a finite number nor null.\nWrite it as --sentinel 0.0 or null"
        )
    return number
