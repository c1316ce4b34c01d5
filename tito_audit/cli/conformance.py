"""`tito-audit conformance`: which templates and which ways to build the next prompt keep the sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import typer
from rich.console import RenderableType
from rich.text import Text

from tito_audit.cli._exit import FAILED
from tito_audit.cli._options import Options
from tito_audit.cli._outputs import print_result, refuse_overwriting
from tito_audit.conformance.builders import BUILDERS
from tito_audit.conformance.matrix import (
    DriftCell,
    DriftTrial,
    as_row,
    drift_cells,
    read_table,
    worsened_cells,
    write_table,
)
from tito_audit.conformance.world import CORPUS, CORPUS_VERSION, World, installed_templates, template_files
from tito_audit.errors import SetupError
from tito_audit.run.template import open_template
from tito_audit.terminal.escape import visible
from tito_audit.terminal.page import open_table
from tito_audit.terminal.terminal import RunProgress, show_progress
from tito_audit.terminal.words import many


def conformance(options: Options) -> None:
    """Show which chat templates keep sampled tokens, for each way to build the next prompt."""
    old = None if options.against is None else read_table(Path(options.against))
    refuse_overwriting(
        {"--out": options.out},
        [*options.tokenizers, *options.chat_templates, *([options.against] if options.against else [])],
    )
    settings, table = options.settings(), list[DriftTrial]()
    named = options.tokenizers or (
        [settings.tokenizer] if settings.tokenizer and not (options.chat_templates or options.installed) else []
    )
    files = [(file.stem, file) for name in options.chat_templates for file in template_files(name)]
    files += installed_templates() if options.installed else []
    if not named and not files:
        raise SetupError(
            "conformance: there is no template to try.\n"
            "Name tokenizers with -t, Jinja files or their folders with --chat-template, or pass --installed."
        )
    opened = ((name, open_template(replace(settings, tokenizer=name, chat_template=None))) for name in named)
    worlds = chain(  # each is loaded when it is its turn
        (
            World.of_tokenizer(Path(name).name if Path(name).exists() else name, each.tokenizer, each.renderer)
            for name, each in opened
            if each.tokenizer is not None
        ),
        (World.of_template(name, file, settings) for name, file in files),
    )
    with show_progress(pace := RunProgress(phase="loading the templates")):
        for world in worlds:
            pace.enter(f"trying {world.name}")
            table.append(DriftTrial.of(world, drift_cells(world)))
    worse = [] if old is None else worsened_cells(old, [cell for trial in table for cell in trial.cells])
    if options.out is not None:
        write_table(Path(options.out), table, force=options.force)
    print_result(
        options.shape,
        lambda: {
            "cells": [as_row(trial, cell) for trial in table for cell in trial.cells],
            "verdicts": {trial.name: trial.verdict for trial in table},
            "worse": [{"was": was.outcome.value, **asdict(now)} for was, now in worse]
            if old is not None
            else None,
        },
        (),
        _page(table, worse, compared=old is not None, out=options.out),
        options.config_notice(),
    )
    if worse:
        raise typer.Exit(FAILED)


def _page(
    table: Sequence[DriftTrial], worse: Sequence[tuple[DriftCell, DriftCell]], *, compared: bool, out: str | None
) -> Iterator[RenderableType]:
    yield Text(f"{many(len(table), 'template')}, {len(CORPUS)} conversations (version {CORPUS_VERSION})")
    yield Text("kept + gone on in another training row, of compared; a dash: nothing could be compared")
    yield Text()
    matrix = open_table()
    matrix.add_column("template")
    for builder in BUILDERS:
        matrix.add_column(builder.name, justify="right")
    for trial in table:
        scores = (str(trial.score(builder.name)) for builder in BUILDERS)
        matrix.add_row(Text(visible(trial.name)), *scores)
    yield matrix
    yield from (Text(visible(f"{trial.name}: {trial.verdict}")) for trial in table)
    for was, now in worse:
        cell = f"{now.template}, {now.builder}, {now.conversation}"
        yield Text(visible(f"worse: {cell}: {was.outcome} → {now.outcome}; {now.cause}"))
    yield Text()
    if out is not None:
        yield Text(visible(f"written: {Path(out) / 'index.html'}, drift.jsonl, drift.parquet and badge.svg"))
    if compared:
        count = many(len(worse), "cell")
        yield Text(f"failed: {count} got worse" if worse else "passed: nothing got worse")
