"""`tito-audit template`: what a chat template does with a conversation, and whether it only appends."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Optional

import typer

from tito_audit.cli._command import command
from tito_audit.cli._options import Options
from tito_audit.cli._outs import print_result, refuse_inputs
from tito_audit.errors import SetupError


@command("template")
def template(
    options: Options,
    named: Annotated[
        Optional[str],  # noqa: UP045 - read by Typer
        typer.Argument(metavar="[TOKENIZER]", help="A folder with tokenizer.json, or a Hugging Face name."),
    ] = None,
) -> None:
    """Show what a chat template does: whether it only appends, what it rewrites, adds and refuses. Exits 1 unless
    it only appends.

    It is rendered for built-in conversations with each kind of answer and message. --chat-template FILE alone,
    without a tokenizer, shows the same for text but nothing about token ids. --full adds the evidence.
    """
    from tito_audit.cli._ends import FAILED
    from tito_audit.cli._template import Looked, as_object, compare, page_lines, train
    from tito_audit.run.template import log_probes, open_template
    from tito_audit.sessions.delimiters import delimiters
    from tito_audit.templates import explained, template_facts

    if options.training is not None and options.against is not None:
        raise SetupError("template: --training and --against exclude each other.\nPass only one of them.")
    settings = options.settings()
    settings = settings if named is None else replace(settings, tokenizer=named)
    if options.training is not None or options.against is not None:
        refuse_inputs({"--training": options.training}, options.logs, options.inputs(settings))
        passed = (
            train(settings, options.logs, options.training, options.shape, force=options.force)
            if options.training is not None
            else compare(settings, options.logs, options.against or "", options.shape)
        )
        if not passed:
            raise typer.Exit(FAILED)
        return
    opened = open_template(settings)
    of_log = explained(opened.renderer, log_probes(options.logs, settings)) if options.logs else None
    facts = template_facts(opened.renderer, tokenizer := opened.tokenizer)
    between = delimiters(tokenizer, opened.renderer) if tokenizer is not None else None
    looked = Looked(opened.name, facts, tokenizer is not None, of_log, between)
    print_result(
        options.shape, lambda: as_object(looked), (), page_lines(looked, full=options.full), options.notice()
    )
    if not looked.facts.append.holds or (of_log is not None and of_log[0].broken):
        raise typer.Exit(FAILED)
