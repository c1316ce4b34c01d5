"""Logs written by the verifiers framework itself: `python verifiers_writer.py FOLDER`, by a Python that has it.

Not a test: tests run it with another Python and read what it wrote. Into FOLDER it puts, of what the installed
release can write,

    v1/traces.jsonl    episodes, by `write_episode` (release 0.4.0) or `v1.cli.output` (0.3.1)
    v1/trace.jsonl     the same traces as bare lines, by `Trace.to_record`
    v1/uploaded.parquet  the table that is uploaded, by `prime_runs` (where it and pyarrow are installed)
    v1/expected.json   what the framework says of each trace: its branches as training samples
    old/results.jsonl  rollouts with their trajectory, by `legacy.utils.save_utils` (gone in 0.4.0)

`python verifiers_writer.py --branches FILE...` prints a line for each file: the branches of its episodes, as the
framework reads them. The tests look for two Pythons: `verifiers` with verifiers 0.4.0 and pyarrow, and
`verifiers_0_3` with verifiers 0.3.1, tokenizers and jinja2.

`python verifiers_writer.py --converse BASE_URL SESSION STEPS` has the framework's client talk to a server, as one
rollout, and prints its messages.

The conversations are those of `fixtures/formats/make_nemo.py`, in tokens of the toy tokenizer; they are
committed turn by turn, so that the framework itself makes nodes and branches of them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "formats"))

from make_nemo import CONVERSATION, SUM, WEATHER, Call, Toy, Wire, calls_of, chat_tools

TOOLS = chat_tools([WEATHER])
MODEL = "org/model"


def spans_of(toy: Toy, messages: list[Wire], tools: list[Wire], call: Call) -> list[tuple[int, int]]:
    """Where each message of a prompt ends in its tokens, as a renderer attributes them."""
    canonical = toy.encode(toy.render(messages, tools, opened=True))
    shift = len(call.prompt) - len(canonical)
    ends, at = [], 0
    for number, message in enumerate(messages):
        text = toy.render(messages[: number + 1], tools, opened=False)
        # The newline behind an answer is no token of it.
        end = len(toy.encode(text)) - (message["role"] == "assistant")
        moved = end + shift
        ends.append(end if call.prompt[:end] == canonical[:end] else moved)
    spans = []
    for end in ends:
        spans.append((at, end))
        at = end
    return spans


def rollouts(toy: Toy) -> dict[str, list[tuple[tuple[Wire, ...], list[Wire], Call]]]:
    """By name the calls of each rollout: the messages that it was sent and its answer, its tools, its tokens."""

    def turns(messages: tuple[Wire, ...], tools: list[Wire], calls: list[Call]) -> list[Any]:
        return [(messages[: call.index + 1], tools, call) for call in calls]

    both = (CONVERSATION, TOOLS)
    return {
        "clean": turns(*both, calls_of(toy, *both)),
        "sum": turns(SUM, [], calls_of(toy, SUM, [])),
        "merge-in-completion": turns(*both, calls_of(toy, *both, resplit=1)),
        "prefix-broken-by-retokenization": turns(*both, calls_of(toy, *both, resplit=1, reencode=True)),
        "retry": turns(SUM, [], [*calls_of(toy, SUM, []), *calls_of(toy, SUM, [], resplit=0)]),
    }


# v1


def wire_message(message: Wire) -> Any:
    """A message as verifiers types it."""
    from verifiers.v1 import types

    if message["role"] == "assistant":
        calls = [
            types.ToolCall(id=call["id"], **call["function"]) for call in message.get("tool_calls") or ()
        ] or None
        return types.AssistantMessage(content=message.get("content"), tool_calls=calls)
    if message["role"] == "tool":
        return types.ToolMessage(tool_call_id=message["tool_call_id"], content=message["content"])
    kind = types.SystemMessage if message["role"] == "system" else types.UserMessage
    return kind(content=message["content"])


def trace_of(toy: Toy, name: str, turns: list[Any], with_ids: bool = True) -> Any:
    """A trace whose turns were committed one after the other."""
    import verifiers.v1.trace as traces
    from verifiers.v1 import graph, types
    from verifiers.v1.state import State
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, ModelCall, Trace, TraceTask

    task = TraceTask(type="WeatherTask", data=WireTaskData(idx=0, prompt="What is the weather in Oslo?"))
    config = traces.WireAgentConfig(model=MODEL)
    trace = Trace[WireTaskData, State, traces.WireAgentConfig](id=name, task=task, agent=AgentInfo(config=config))
    for messages, tools, call in turns:
        sent = [wire_message(message) for message in messages[:-1]]
        wire_tools = [types.Tool(**tool["function"]) for tool in tools]
        try:
            pending = graph.prepare_turn(trace, sent, wire_tools)
        except TypeError:
            # Before 0.4.0 a turn knows no tools; the trace has them.
            pending = graph.prepare_turn(trace, sent)
            trace.tools = wire_tools
        spans = spans_of(toy, list(messages[:-1]), tools, call)
        tokens = types.TurnTokens(
            prompt_ids=call.prompt,
            completion_ids=call.completion,
            completion_logprobs=[value - 0.00001234 for value in call.logprobs],
            message_spans=spans,
            is_content=[False] * len(call.prompt),
        )
        answer = wire_message(messages[-1])
        usage = types.Usage(prompt_tokens=len(call.prompt), completion_tokens=len(call.completion))
        response = types.Response(
            id="r",
            created=0,
            model=MODEL,
            message=answer,
            finish_reason="tool_calls" if answer.tool_calls else "stop",
            usage=usage,
            tokens=tokens if with_ids else None,
        )
        node = pending.commit(response)
        node = len(trace.nodes) - 1 if node is None else node
        reason = response.finish_reason
        trace.calls.append(ModelCall(node=node, model=MODEL, finish_reason=reason, usage=usage))
    for node in trace.nodes:
        if node.sampled and with_ids:
            node.advantages = [0.7] * sum(node.mask)
    trace.record_reward("correct", 1.0)
    trace.is_completed = trace.ok = True
    return trace


def episode_of(trace: Any) -> Any:
    """An episode of one trace, as a training run records it."""
    from verifiers.v1 import episode as episodes
    from verifiers.v1.state import State
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import WireAgentConfig

    policy = episodes.PolicySpan(start=3, end=3)
    run = episodes.TrainRunInfo(id="run", work=episodes.TrainWorkInfo(step=3, policy=policy))
    return episodes.Episode[WireTaskData, State, WireAgentConfig](
        id=trace.id,
        env=episodes.EnvInfo(id="weather"),
        task=trace.task,
        group=episodes.GroupInfo(id="group-0"),
        run=run,
        ok=True,
        traces=[trace],
    )


def branches_of(trace: Any) -> list[Wire]:
    """The training samples that the framework makes of a trace."""
    return [
        {
            "token_ids": branch.token_ids,
            "mask": branch.sampled_mask,
            "logprobs": branch.logprobs,
            "advantages": branch.advantages,
            "roles": [message.role for message in branch.messages],
        }
        for branch in trace.branches
    ]


def write_v1(folder: Path) -> None:
    """Every file of `v1/`."""
    folder.mkdir(parents=True)
    toy = Toy()
    named = rollouts(toy)
    traces = [trace_of(toy, name, turns) for name, turns in named.items()]
    traces.append(trace_of(toy, "text-only", named["clean"], with_ids=False))
    episodes = [episode_of(trace) for trace in traces]
    if importlib.util.find_spec("verifiers.v1.utils.trace_store"):
        from verifiers.v1.utils.trace_store import write_episode
    else:
        from verifiers.v1.cli.output import write_episode
    for episode in episodes:
        write_episode(folder, episode)
    lines = [json.dumps(trace.to_record()) + "\n" for trace in traces]
    (folder / "trace.jsonl").write_text("".join(lines))
    expected = {trace.id: branches_of(trace) for trace in traces}
    (folder / "expected.json").write_text(json.dumps(expected))
    if importlib.util.find_spec("prime_runs") and importlib.util.find_spec("pyarrow"):
        from prime_runs.projection import episodes_to_parquet_bytes

        (folder / "uploaded.parquet").write_bytes(episodes_to_parquet_bytes(episodes, "run", 3))


def print_branches(path: Path) -> None:
    """The branches of every trace in a file of episodes, by trace id."""
    from verifiers.v1.episode import WireEpisode

    branches = {}
    for line in path.read_text().splitlines():
        for trace in WireEpisode.model_validate_json(line).traces:
            branches[trace.id] = branches_of(trace)
    print(json.dumps(branches))


# Before v1


def write_old(folder: Path) -> None:
    """`old/results.jsonl`, by the functions that a run of an environment ends with."""
    import asyncio

    from verifiers.legacy.types import Response, ResponseMessage, ResponseTokens, RolloutTiming, Tool, Usage
    from verifiers.legacy.utils.message_utils import normalize_messages
    from verifiers.legacy.utils.response_utils import parse_response_message, parse_response_tokens
    from verifiers.legacy.utils.save_utils import save_outputs, state_to_output

    def flat(message: Wire) -> Wire:
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]
        return {**message, **({"tool_calls": calls} if calls else {})}

    outputs = []
    for number, (name, turns) in enumerate(rollouts(Toy()).items()):
        trajectory = []
        for messages, _, call in turns:
            sent = normalize_messages([flat(message) for message in messages[:-1]], field_name="prompt")
            tokens = ResponseTokens(
                prompt_ids=call.prompt,
                prompt_mask=[0] * len(call.prompt),
                completion_ids=call.completion,
                completion_mask=[1] * len(call.completion),
                completion_logprobs=call.logprobs,
            )
            answer = flat(messages[-1])
            reply = ResponseMessage(**answer, finish_reason="stop", is_truncated=False, tokens=tokens)
            total = len(call.prompt) + len(call.completion)
            usage = Usage(
                prompt_tokens=len(call.prompt),
                reasoning_tokens=0,
                completion_tokens=len(call.completion),
                total_tokens=total,
            )
            response = Response(id="r", created=0, model=MODEL, usage=usage, message=reply)
            step = {
                "prompt": sent,
                "completion": asyncio.run(parse_response_message(response)),
                "response": response,
                "tokens": asyncio.run(parse_response_tokens(response, None)),
                "reward": None,
                "advantage": None,
                "is_truncated": False,
                "trajectory_id": name,
                "extras": {},
            }
            trajectory.append(step)
        first = trajectory[0]["prompt"]
        state: dict[str, Any] = {
            "example_id": number,
            "prompt": first,
            "completion": [*trajectory[-1]["prompt"][len(first) :], *trajectory[-1]["completion"]],
            "reward": 1.0,
            "timing": RolloutTiming(),
            "is_completed": True,
            "is_truncated": False,
            "metrics": {"correct": 1.0},
            "tool_defs": [Tool(**tool["function"]) for tool in turns[0][1]],
            "trajectory": trajectory,
        }
        outputs.append(state_to_output(state, ["trajectory"]))  # type: ignore[arg-type]
    save_outputs(outputs, folder)


async def converse(base_url: str, session: str, steps: int) -> list[Wire]:
    """The messages of one rollout that the framework's client asks a server for: a question, then results of the
    calls that come back."""
    from verifiers.v1.clients.eval import EvalClient
    from verifiers.v1.configs.client import EvalClientConfig
    from verifiers.v1.dialects.chat import ChatDialect
    from verifiers.v1.types import SamplingConfig

    client = EvalClient(EvalClientConfig(base_url=base_url, api_key_var="NO_KEY_IS_ASKED_FOR"))
    messages: list[Wire] = [{"role": "user", "content": "Is it warm in Paris and in Oslo?"}]
    for _ in range(steps):
        body = {"model": "toy", "messages": messages, "tools": TOOLS}
        answer = await client.get_response(ChatDialect(), body, SamplingConfig(), session_id=session)
        message = answer.raw["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{number} degrees"}
            for number, call in enumerate(message.get("tool_calls") or ())
        ]
        messages = [*messages, message, *(results or [{"role": "user", "content": "Are you sure?"}])]
    await client.close()
    return messages


def main(arguments: list[str]) -> None:
    """What the command line asks for."""
    if arguments[:1] == ["--branches"]:
        for name in arguments[1:]:
            print_branches(Path(name))
        return
    if arguments[:1] == ["--converse"]:
        print(json.dumps(asyncio.run(converse(arguments[1], arguments[2], int(arguments[3])))))
        return
    folder = Path(arguments[0])
    write_v1(folder / "v1")
    if importlib.util.find_spec("verifiers.legacy"):
        write_old(folder / "old")


if __name__ == "__main__":
    main(sys.argv[1:])
