"""`tito-audit identify`: what wrote a log, as flags to paste."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from tito_audit.cli._command import command
from tito_audit.cli._options import Logs, Options
from tito_audit.cli._outs import print_result, refuse_inputs


@command("identify")
def identify(
    options: Options,
    logs: Logs,
) -> None:
    """Find what wrote a log: tokenizer, chat template, its arguments, date. Exits 1 unless that is certain.

    A setting counts if it writes a recorded prompt exactly, token by token. What is found on a few rows is
    confirmed on others. Without -t, the tokenizers named by the configuration or the log and those in the local
    hub cache are tried; only what -t names is downloaded.
    """
    from tito_audit.cli._ends import FAILED
    from tito_audit.cli._identified import IdentifyRun, as_object, page_lines, paste_lines, write_found
    from tito_audit.identify import engine
    from tito_audit.identify.ids_alone import ids_alone
    from tito_audit.run.auditor import drift_audit
    from tito_audit.run.candidates import candidates_for, templates_of_files
    from tito_audit.run.log_groups import first_rows
    from tito_audit.storage import find_logs
    from tito_audit.terminal.escape import inert, visible
    from tito_audit.terminal.terminal import RunProgress, progress_shown
    from tito_audit.terminal.words import many

    refuse_inputs({"--write": options.write}, logs)
    with progress_shown(pace := RunProgress(phase="reading the first rows")):
        settings = options.settings()
        templates = templates_of_files(options.chat_templates or options.configured("chat-template"))
        files = find_logs(logs)
        first = first_rows(files, settings, settings.limit or 400)
        pace.enter("loading tokenizers")
        candidates = candidates_for(
            first.rollouts,
            files,
            options.tokenizers,
            options.configured("tokenizer"),
            templates,
            trust_remote_code=settings.trust_remote_code,
        )
        pace.enter(f"trying {many(len(candidates.tried), 'tokenizer')}")
        identified = engine.identify(first.rollouts, candidates.tried, audit=drift_audit(settings))
        for candidate in candidates.tried:
            candidate.tokenizer.save()  # so that the next run need not load it to read its vocabulary
        alone = ids_alone(first.rollouts)
        outcome = IdentifyRun(logs, first, candidates, identified, alone, options.reading_flags())
    best = outcome.identified.best
    written = None
    if options.write is not None and best is not None and outcome.identified.sure:
        written = write_found(Path(options.write), best.explanation, force=options.force)
    page, paste = page_lines(outcome), paste_lines(outcome)
    print_result(options.shape, lambda: as_object(outcome), page, paste, options.notice())
    if options.write is not None:
        words = written or f"Nothing was written to {options.write}: what wrote the log is not certain."
        sys.stdout.flush()
        print(inert(visible(words)), file=sys.stderr)
    if not outcome.identified.sure:
        raise typer.Exit(FAILED)
