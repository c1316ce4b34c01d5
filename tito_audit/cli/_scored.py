"""A model's scores for `repair --with rescore`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tito_audit.errors import SetupError
from tito_audit.provider import ProviderOptions
from tito_audit.providers import key_of, open_provider
from tito_audit.rescore.fill import ScoresOf
from tito_audit.rescore.journal import Journal
from tito_audit.rescore.run import RescoreChoices, Rescoring
from tito_audit.rescore.write import scores_of
from tito_audit.settings.model import RepairSettings, Settings
from tito_audit.terminal.terminal import RunProgress, with_progress


def scored(
    logs: Sequence[str], settings: Settings, how: RepairSettings, provider: str | None, *, silent: bool
) -> tuple[Settings, RepairSettings]:
    """The settings with a model's scores of every rollout, if `rescore` is among the repairs and a model is
    given.
    """
    if provider is None or "rescore" not in how.strategies:
        return settings, how
    if settings.engine != "local":
        raise SetupError(
            f"--engine {settings.engine}: one process uses a model's scores, so --with rescore runs without it.\n"
            "Leave out --engine, or fill the logprobs first: tito-audit rescore LOG -o OUT"
        )
    scorer = open_provider(provider, ProviderOptions(api_key=key_of(provider)))
    journal, pace = Journal(None, scorer.name), RunProgress()
    run = Rescoring(logs, settings, scorer, RescoreChoices(keeps=True), journal=journal, progress=pace)
    for _ in with_progress(iter(run), silent=silent, pace=pace):
        pass
    values: ScoresOf = scores_of(logs, journal, f"{journal.model or 'the model'} ({scorer.name})")
    # Threads that the provider left running must not be forked.
    return replace(settings, jobs=1), replace(how, choices=replace(how.choices, rescored=values))
