"""`tito-audit rescore`: a log's logprobs compared with a model's, and what its drift costs."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryFile

import typer

from tito_audit.cli._command import command
from tito_audit.cli._deliver import deliver_finished, wanted_reports
from tito_audit.cli._options import Logs, Options
from tito_audit.cli._outs import is_url, refuse_inputs
from tito_audit.errors import SetupError


@command("rescore")
def rescore(
    options: Options,
    logs: Logs,
) -> None:
    """Score recorded tokens with a model: how far its logprobs are from the recorded ones, and what drift costs.

    Each drift finding gets a price: the logprob of what was sampled, and of what replaced it. Exits 1 if recorded
    logprobs disagree with the model beyond --tolerance, or if something with ids could not be scored; a price
    alone never fails a log. A server's key comes from VLLM_API_KEY or SGLANG_API_KEY.

    With --prompts nothing is scored: is each prompt the one that this server sees or would write? Exits 1 if one
    is not.
    """
    from tito_audit.cli._ends import FAILED
    from tito_audit.cli._rescored import PROMPT_REPORTS, REPORTS, Prompts, Rescored, rollout_object
    from tito_audit.provider import ProviderOptions
    from tito_audit.providers import key_of, open_provider
    from tito_audit.report import ReportOptions
    from tito_audit.report_objects import as_json
    from tito_audit.rescore.journal import ScoreJournal
    from tito_audit.rescore.prompts import PromptRun
    from tito_audit.rescore.run import RescoreChoices, Rescoring
    from tito_audit.rescore.write import Filling, check_target, scores_of
    from tito_audit.terminal.terminal import RunProgress, colors, page_width, with_progress

    settings = options.settings()
    out, journal = options.out, options.journal
    places = [path for path in (out, journal) if path is not None]
    read = options.inputs(settings)
    refuse_inputs({"-o": out, "--journal": journal}, logs, read)
    reports = PROMPT_REPORTS if options.prompts else REPORTS
    wanted = wanted_reports(options, logs, places, read, reports)
    keeping = {"-o": out, "--journal": journal, "--resume": options.resume, "--unsafe": options.unsafe}
    if options.prompts and (flags := [flag for flag, value in keeping.items() if value]):
        raise SetupError(f"{', '.join(flags)}: --prompts scores nothing, so there is nothing to keep or write.")
    kept_in = journal
    if journal is None and out is not None:
        # The journal of a remote output is in this folder: it grows while the model is asked.
        kept_in = f"{Path(out).name if is_url(out) else out.rstrip('/')}.scores"
    if kept_in is None and options.resume:
        raise SetupError("--resume: no journal is named.\nName it with --journal FILE, or pass -o OUT.")
    if out is not None:
        check_target(logs, out, force=options.force)
    scorer = open_provider(
        options.provider, ProviderOptions(options.model, key_of(options.provider), connections=options.requests)
    )
    pace = RunProgress()
    page = ReportOptions(color=colors(sys.stdout), width=page_width())
    if options.prompts:
        asking = PromptRun(logs, settings, scorer, replay=options.replay, jobs=options.requests, progress=pace)
        for _ in with_progress(asking, pace, silent=options.quiet):
            pass
        deliver_finished(
            Prompts(asking.summary, asking.scan, options.worst, asking.pieces), PROMPT_REPORTS, wanted, page
        )
        if asking.summary.differences:
            raise typer.Exit(FAILED)
        return
    with ExitStack() as stack:
        scores = ScoreJournal(None if kept_in is None else Path(kept_in), scorer.name, resume=options.resume)
        stack.callback(scores.close)
        choices = RescoreChoices(options.requests, keeps=out is not None, tolerance=options.tolerance)
        run = Rescoring(logs, settings, scorer, choices, journal=scores, progress=pace)
        details = None
        if "json" in [name for name, _ in wanted]:
            details = stack.enter_context(TemporaryFile("w+", encoding="utf-8"))
        with closing(with_progress(run, pace, silent=options.quiet)) as results:
            for number, result in enumerate(results):
                if details is not None:
                    details.write((",\n" if number else "\n") + as_json(rollout_object(result)))
        written = None
        if out is not None:
            model_said = f"{scores.model or 'the model'} ({scorer.name})"
            values = scores_of(logs, scores, model_said, replaces=options.unsafe)
            pace = RunProgress()
            filling = Filling(logs, out, settings, values, force=options.force, progress=pace)
            for _ in with_progress(filling, pace, silent=options.quiet):
                pass
            written = filling.written
            scores.close(done=journal is None)
        done = Rescored(run.summary, details, options.worst, run.pieces, written)
        deliver_finished(done, REPORTS, wanted, page)
    if run.summary.failed:
        raise typer.Exit(FAILED)
