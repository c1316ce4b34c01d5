"""ART trajectory groups as JSONL: one group per line; a sampled turn is a choice object among the messages.

The writer removes `logprobs` from the choices; ids are there only if the server returned them.
OpenPipe/ART `src/art/utils/trajectory_migration.py` (`serialize_trajectory_groups`), openpipe-art 0.5.18.
"""

from __future__ import annotations

from collections.abc import Sequence

from tito_audit.errors import RecordError
from tito_audit.format import Format, Row, Signature
from tito_audit.formats._answers import Thread, ThreadRows
from tito_audit.formats._art import is_trajectory, trajectory_threads
from tito_audit.record.rollout import Place
from tito_audit.record.stated import NOTHING_STATED, Stated


def read_threads(row: Row, place: Place) -> Sequence[Thread]:
    if "trajectories" not in row:
        return trajectory_threads(row, row, (), place, FORMAT.name, NOTHING_STATED)
    listed = row["trajectories"]
    if not isinstance(listed, list | tuple):
        raise RecordError("trajectories is not a list")
    parts: list[Thread] = []
    for number, each in enumerate(listed):
        if not is_trajectory(each):
            raise RecordError(f"trajectories[{number}] is not a trajectory: it has no list `messages_and_choices`")
        parts += trajectory_threads(
            row, each, ("trajectories", number), place, FORMAT.name, Stated(group=place.row)
        )
    return parts


FORMAT = Format(
    name="art_group",
    title="ART trajectory groups (JSONL)",
    signature=Signature("{trajectories[].messages_and_choices}; or {messages_and_choices} of one trajectory"),
    precedence=120,
    matches=lambda row: (
        any(is_trajectory(entry) for entry in row["trajectories"][:8])
        if isinstance(row.get("trajectories"), list | tuple)
        else "trajectories" not in row and isinstance(row.get("messages_and_choices"), list | tuple)
    ),
    **ThreadRows(read_threads).functions,
    shows="Messages, tools and finish reasons; each call's prompt and completion when the server returned ids. "
    "Logprobs are not written. Additional histories are rollouts of their own.",
)
