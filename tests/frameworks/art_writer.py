"""Logs written by ART itself: `python art_writer.py FOLDER`, by a Python that has it (openpipe-art 0.5.18).

Not a test: tests run it with another Python and read what it wrote. Into FOLDER it puts

    group.jsonl    trajectory groups, by `serialize_trajectory_groups`
    v1.parquet     the same, by `write_trajectory_groups_parquet`
    expected.json  the ids of each choice, before anything was written

`python art_writer.py --read FILE` prints the ids of each choice of a JSONL file as ART reads them. The
conversations are those of `fixtures/formats/make_nemo.py`, in tokens of the toy tokenizer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "formats"))
# LiteLLM, which comes with it, else asks the network for prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

from art.trajectories import History, Trajectory, TrajectoryGroup
from art.utils.trajectory_logging import write_trajectory_groups_parquet
from art.utils.trajectory_migration import deserialize_trajectory_groups, serialize_trajectory_groups
from make_nemo import CONVERSATION, SUM, WEATHER, Call, Toy, Wire, calls_of, chat_tools
from make_responses import entries
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

TOOLS = chat_tools([WEATHER])


def answered(toy: Toy, call: Call, message: Wire, with_ids: bool) -> Choice:
    """The choice of a server's answer, as the client library hands it on."""
    choice: Wire = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": entries(toy, call)}
    if with_ids:
        choice |= {"token_ids": call.completion, "prompt_token_ids": call.prompt}
    about = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "org/model"}
    return ChatCompletion.model_validate({**about, "choices": [choice]}).choices[0]


def dialog(toy: Toy, messages: tuple[Wire, ...], calls: list[Call], with_ids: bool = True) -> list[Any]:
    """A conversation with a choice object for each call."""
    own = {call.index: call for call in calls}
    return [
        answered(toy, own[index], message, with_ids) if index in own else dict(message)
        for index, message in enumerate(messages)
    ]


def groups(toy: Toy) -> list[TrajectoryGroup]:
    """A clean group, one with a further history and a broken prefix, and one from a server without ids."""
    clean, broken = (
        calls_of(toy, CONVERSATION, TOOLS),
        calls_of(toy, CONVERSATION, TOOLS, resplit=1, reencode=True),
    )
    (plain,), (merged,) = calls_of(toy, SUM, []), calls_of(toy, SUM, [], resplit=0)
    more = [History(messages_and_choices=dialog(toy, SUM, [plain]))]
    return [
        TrajectoryGroup(
            [
                Trajectory(messages_and_choices=dialog(toy, SUM, [call]), reward=reward)
                for call, reward in ((plain, 1.0), (merged, -1.0))
            ]
        ),
        TrajectoryGroup(
            [
                Trajectory(
                    messages_and_choices=dialog(toy, CONVERSATION, clean), tools=TOOLS, additional_histories=more
                ),
                Trajectory(messages_and_choices=dialog(toy, CONVERSATION, broken), tools=TOOLS, metadata={"n": 1}),
            ]
        ),
        TrajectoryGroup([Trajectory(messages_and_choices=dialog(toy, CONVERSATION, clean, False), tools=TOOLS)]),
    ]


def ids_of(group: TrajectoryGroup) -> list[list[list[Any]]]:
    """For each history of a group, for each of its choices: prompt ids and completion ids."""
    histories = [h for t in group.trajectories for h in (t, *t.additional_histories)]
    return [
        [
            [getattr(entry, "prompt_token_ids", None), getattr(entry, "token_ids", None)]
            for entry in history.messages_and_choices
            if isinstance(entry, Choice)
        ]
        for history in histories
    ]


def main(arguments: list[str]) -> None:
    """What the command line asks for."""
    if arguments[:1] == ["--read"]:
        text = Path(arguments[1]).read_text(encoding="utf-8")
        print(json.dumps([ids_of(group) for group in deserialize_trajectory_groups(text)]))
        return
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    written = groups(Toy())
    (folder / "expected.json").write_text(json.dumps([ids_of(group) for group in written]))
    (folder / "group.jsonl").write_text(serialize_trajectory_groups(written), encoding="utf-8")
    write_trajectory_groups_parquet(written, folder / "v1.parquet")


if __name__ == "__main__":
    main(sys.argv[1:])
