"""Logs written by the models of ATIF: `python atif_writer.py FOLDER`, by a Python that has them (atif 1.8.0).

Not a test: tests run it with another Python and read what it wrote. Into FOLDER it puts

    trajectory.json  a trajectory with a sub-agent and a step copied from elsewhere, nulls left out
    broken.json      one whose last prompt was re-tokenized
    expected.json    the ids of each call, before anything was written

`python atif_writer.py --read FILE` prints the ids of each call of a document as the models read it; it fails
when they refuse the document. The conversations are those of `fixtures/formats/make_nemo.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "formats"))

from atif import Agent, FinalMetrics, Metrics, Observation, ObservationResult, Step, ToolCall, Trajectory
from make_atif import TOOLS, indented
from make_nemo import CONVERSATION, SUM, Call, Toy, Wire, calls_of

Ids = list[list[int]]


def steps(conversation: tuple[Wire, ...], calls: list[Call]) -> list[Step]:
    """A conversation as steps, what tools said inside the step that called them."""
    own = {call.index: call for call in calls}
    listed: list[Step] = []
    for index, message in enumerate(conversation):
        if message["role"] == "tool":
            result = ObservationResult(source_call_id=message["tool_call_id"], content=message["content"])
            listed[-1] = listed[-1].model_copy(update={"observation": Observation(results=[result])})
            continue
        call = own.get(index)
        listed.append(
            Step(
                step_id=len(listed) + 1,
                timestamp="2025-10-16T14:30:00Z",
                source="agent" if message["role"] == "assistant" else message["role"],
                message=message["content"] or "",
                tool_calls=[
                    ToolCall(
                        tool_call_id=tool_call["id"],
                        function_name=tool_call["function"]["name"],
                        arguments=json.loads(tool_call["function"]["arguments"]),
                    )
                    for tool_call in message.get("tool_calls", ())
                ]
                or None,
                metrics=None if call is None else metrics(call),
            )
        )
    return listed


def metrics(call: Call) -> Metrics:
    """What a step says of its call."""
    return Metrics(
        prompt_tokens=len(call.prompt),
        completion_tokens=len(call.completion),
        prompt_token_ids=call.prompt,
        completion_token_ids=call.completion,
        logprobs=call.logprobs,
        extra={"routed_experts": [[1, 2]] * len(call.completion)},
    )


def trajectory(name: str, listed: list[Step], inner: list[Trajectory] | None = None) -> Trajectory:
    """A whole document."""
    prompts = [step.metrics.prompt_tokens or 0 for step in listed if step.metrics]
    return Trajectory(
        schema_version="ATIF-v1.8",
        trajectory_id=name,
        agent=Agent(name="toy-agent", version="1.0", model_name="org/toy", tool_definitions=TOOLS),
        steps=listed,
        final_metrics=FinalMetrics(total_prompt_tokens=sum(prompts), total_steps=len(listed)),
        subagent_trajectories=inner,
    )


def ids_of(document: Trajectory) -> list[list[Ids]]:
    """The ids of each call that is not copied, the trajectory's before those of its sub-agents."""
    own: list[Ids] = [
        [step.metrics.prompt_token_ids or [], step.metrics.completion_token_ids or []]
        for step in document.steps
        if step.metrics is not None and not step.is_copied_context
    ]
    return [own, *(ids for inner in document.subagent_trajectories or () for ids in ids_of(inner))]


def write(folder: Path) -> None:
    """Every document, and what it was made of."""
    folder.mkdir(parents=True, exist_ok=True)
    toy = Toy()
    outer = steps(CONVERSATION, calls_of(toy, CONVERSATION, TOOLS))
    outer[2] = outer[2].model_copy(update={"is_copied_context": True})
    inner = trajectory("inner", steps(SUM, calls_of(toy, SUM, TOOLS)))
    broken = calls_of(toy, CONVERSATION, TOOLS, resplit=1, reencode=True)
    documents = {
        "trajectory": trajectory("outer", outer, [inner]),
        "broken": trajectory("broken", steps(CONVERSATION, broken)),
    }
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(indented(document.to_json_dict()), encoding="utf-8")
    expected: dict[str, Any] = {name: ids_of(document) for name, document in documents.items()}
    (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--read":
        read = Trajectory.model_validate_json(Path(sys.argv[2]).read_text(encoding="utf-8"))
        print(json.dumps(ids_of(read)))
    else:
        write(Path(sys.argv[1]))
