"""Chat data before SFT: what a trainer would make of the rows of logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tito_audit.errors import RecordError, SetupError
from tito_audit.evidence.reference import Reference
from tito_audit.record.rollout import Place, with_speakers
from tito_audit.record.speakers import Speakers
from tito_audit.render.globals import has_generation
from tito_audit.run.auditor import Loader
from tito_audit.run.log_groups import RowFlow
from tito_audit.run.progress import Progress
from tito_audit.run.template import open_other_template
from tito_audit.settings.model import Settings
from tito_audit.sft.preflight import PlannedRow, Planner, SetPlan, prompt_and_completion
from tito_audit.storage import find_logs

_NO_TOKENIZER = "there is no tokenizer to write the messages with.\nPass -t with a folder or a Hugging Face name."


class PreFlight:
    """What a trainer would make of a data set: iterate over the planned rows, then read `plan`."""

    def __init__(
        self,
        logs: Sequence[str],
        settings: Settings,
        against: str | None = None,
        max_length: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`against` is the template at inference, a Jinja file or a tokenizer; None: the same as in training."""
        if settings.tokenizer is None:
            raise SetupError(f"sft: {_NO_TOKENIZER}")
        self.logs = list(logs)
        self.settings = settings
        auditor, _ = Loader().load_auditor(settings)
        assert auditor.tokenizer is not None
        self.against = against
        inference = auditor.renderer if against is None else open_other_template(settings, against).renderer
        self.reference = Reference(auditor.tokenizer, auditor.renderer)
        self.planner = Planner(self.reference, inference, max_length)
        self.plan = SetPlan()
        self.progress = progress

    @property
    def has_markers(self) -> bool:
        """Whether the template marks what an assistant writes with `{% generation %}`."""
        renderer = self.reference.renderer
        return renderer is not None and any(has_generation(each.source) for each in renderer.templates.values())

    def __iter__(self) -> Iterator[PlannedRow]:
        files = find_logs(self.logs)
        flow = RowFlow(files, replace(self.settings, limit=None), audits=False)
        speakers, done, rows = Speakers(self.settings.sampled_roles), 0, 0
        for file in flow.files:
            group = flow.groups[str(file)]
            log = group.open(file)
            for raw in log:
                place = Place(str(file), raw.index)
                rows += 1
                try:
                    read = group.read_row(raw, place)
                    planned = [
                        self.planner.plan_messages(with_speakers(rollout, speakers))
                        if rollout.messages
                        else self._plan_texts(read.row, rollout.place)
                        for rollout in read.rollouts
                    ]
                except RecordError as error:
                    if raw.value is not None and isinstance(raw.value.get("text"), str):
                        planned = [self._plan_texts(raw.value, place)]
                    else:
                        planned = [self.planner.refuse(place, str(error))]
                for row in planned:
                    self.plan.add(row)
                    yield row
                if self.progress is not None:
                    self.progress(rows, done + log.position, flow.size)
            done += log.size

    def _plan_texts(self, row: Mapping[str, Any], place: Place) -> PlannedRow:
        texts = prompt_and_completion(row)
        if texts is None:
            return self.planner.refuse(place, "it holds neither messages nor a prompt and a completion")
        return self.planner.plan_texts(place, *texts)
