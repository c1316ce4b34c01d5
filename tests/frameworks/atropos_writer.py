"""Logs written by Atropos itself: `python atropos_writer.py FOLDER`, by a Python that has it (atroposlib 0.4.0).

Not a test: tests run it with another Python and read what it wrote. Into FOLDER it puts

    groups.jsonl   groups, by `BaseEnv.handle_send_to_api`, which saves what it would send
    nodes.jsonl    the state of a `ManagedServer`, as a list and as a tree
    expected.json  for each of both, by line: ids, labels and logprobs of every sample, as they were tracked

`python atropos_writer.py --read FILE` prints ids, labels and logprobs of every sample of a file of groups, as
the API's own model reads them; it fails when that refuses a group.

`python atropos_writer.py --managed FILE` prints, for each scenario of a JSON file (`tests/managed_scenarios.py`
says what is in it), the ids, labels and logprobs of the nodes that `ManagedServer` tracks.

The conversations are those of
`fixtures/formats/make_nemo.py`; a server that knows the answers stands in for the model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures" / "formats"))

from atroposlib.api.server import ScoredData
from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup, ServerBaseline
from atroposlib.envs.server_handling.managed_server import ManagedServer, SequenceNode
from make_nemo import ADVICE, ANSWER, QUESTION, SUM, SYSTEM, THANKS, TOY, Call, Toy, Wire, calls_of
from transformers import AutoTokenizer

TALK = (SYSTEM, QUESTION, ANSWER, THANKS, ADVICE)


class Answers:
    """A server of a model that says what was planned, in the order of the plan."""

    config = SimpleNamespace(model_name="org/toy")

    def __init__(self, calls: Iterable[Call]) -> None:
        self.calls = iter(calls)

    async def tokens_and_logprobs_completion(self, input_ids: list[int], **options: Any) -> tuple[Any, ...]:
        """Ids of the prompt as it was sent; ids, logprobs and finish reason of one answer."""
        call = next(self.calls)
        return input_ids, [call.completion], [call.logprobs], ["stop"]


class Written(BaseEnv):
    """An environment that plays nothing: its groups are handed to it."""

    async def get_next_item(self) -> None:
        """Nothing to play."""

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to try."""


async def talked(
    tokenizer: Any, messages: tuple[Wire, ...], calls: list[Call], tree: bool = False
) -> ManagedServer:
    """A managed server after a conversation, told turn by turn."""
    # A tree asks for no ids: it takes those that the server says it was sent.
    server = ManagedServer(Answers(calls), tokenizer, track_tree=tree)  # type: ignore[arg-type]
    for call in calls:
        sent = [dict(message) for message in messages[: call.index]]
        await server.chat_completion(messages=sent, **({"input_ids": call.prompt} if tree else {}))
    return server


def nodes_of(server: ManagedServer) -> list[SequenceNode]:
    """What it tracked, in order."""
    state = server.get_state()
    return list(state["nodes"] if "nodes" in state else state["sequences"].values())


def sample(node: SequenceNode) -> list[Any]:
    """Ids, labels and logprobs of a node."""
    return [node.tokens, node.masked_tokens, node.logprobs]


def group_of(nodes: list[SequenceNode], messages: tuple[Wire, ...] | None) -> ScoredDataGroup:
    """The group that an environment makes of tracked sequences."""
    group: dict[str, Any] = {
        "tokens": [node.tokens for node in nodes],
        "masks": [node.masked_tokens for node in nodes],
        "scores": [1.0 - 2 * (number % 2) for number in range(len(nodes))],
        "inference_logprobs": [node.logprobs for node in nodes],
    }
    if messages is not None:
        group["messages"] = [[dict(message) for message in messages]] * len(nodes)
    return group  # type: ignore[return-value]


def saved(path: Path, groups: list[ScoredDataGroup]) -> None:
    """Groups of two, as an environment saves them."""
    config = BaseEnvConfig(
        group_size=2, tokenizer_name=str(TOY), data_path_to_save_groups=str(path), use_wandb=False
    )
    env = Written(config, ServerBaseline(), testing=True)
    env.max_token_len = config.max_token_length

    async def send() -> None:
        for group in groups:
            await env.handle_send_to_api(group, do_send_to_api=False)

    asyncio.run(send())
    env.jsonl_writer.close()


def write(folder: Path) -> None:
    """Every file."""
    folder.mkdir(parents=True, exist_ok=True)
    toy, tokenizer = Toy(), AutoTokenizer.from_pretrained(str(TOY))
    talks = {
        (name, resplit): asyncio.run(talked(tokenizer, messages, calls_of(toy, messages, [], resplit=resplit)))
        for name, messages in (("sum", SUM), ("talk", TALK))
        for resplit in (None, 0)
    }
    tree = asyncio.run(talked(tokenizer, TALK, calls_of(toy, TALK, []), tree=True))
    pairs = {name: [*nodes_of(talks[name, None]), *nodes_of(talks[name, 0])] for name in ("sum", "talk")}
    groups = {"sum": (pairs["sum"], SUM), "talk": (pairs["talk"], TALK), "bare": (pairs["talk"], None)}
    saved(folder / "groups.jsonl", [group_of(*group) for group in groups.values()])
    servers = [*talks.values(), tree]
    lines = [json.dumps(server.get_state(), default=SequenceNode.model_dump) + "\n" for server in servers]
    (folder / "nodes.jsonl").write_text("".join(lines), encoding="utf-8")
    expected = {
        "groups": [[sample(node) for node in nodes] for nodes, _ in groups.values()],
        "nodes": [[sample(node) for node in nodes_of(server)] for server in servers],
    }
    (folder / "expected.json").write_text(json.dumps(expected), encoding="utf-8")


def samples_of(line: str) -> list[list[Any]]:
    """Ids, labels and logprobs of every sample of a group, after the API has read it."""
    group = ScoredData.model_validate_json(line)
    return list(map(list, zip(group.tokens, group.masks, group.inference_logprobs or [], strict=True)))


class Planned:
    """A server of a model that says what a scenario plans; it encodes a prompt that comes without ids."""

    config = SimpleNamespace(model_name="org/toy")

    def __init__(self, tokenizer: Any, calls: Iterable[dict[str, Any]]) -> None:
        self.tokenizer = tokenizer
        self.calls = iter(calls)

    async def tokens_and_logprobs_completion(self, prompt: str, **options: Any) -> tuple[Any, ...]:
        """Ids of the prompt, and ids, logprobs and finish reasons of the answers."""
        answers = next(self.calls)["answers"]
        sent = options.get("input_ids")
        ids = sent if sent is not None else self.tokenizer.encode(prompt, add_special_tokens=False)
        columns = ([answer[name] for answer in answers] for name in ("ids", "logprobs", "finish"))
        return (ids, *columns)


async def played(tokenizer: Any, scenario: dict[str, Any]) -> list[list[Any]]:
    """Ids, labels and logprobs of what is tracked after the calls of a scenario."""
    planned = Planned(tokenizer, scenario["calls"])
    server = ManagedServer(planned, tokenizer, track_tree=scenario.get("tree", False))  # type: ignore[arg-type]
    replies: list[Any] = []
    for call in scenario["calls"]:
        options = {"n": len(call["answers"]), **({"tools": call["tools"]} if "tools" in call else {})}
        if "prompt" in call:
            parts = [part if isinstance(part, str) else choice_of(replies, part).text for part in call["prompt"]]
            replies.append(await server.completion(prompt="".join(parts), **options))
            continue
        messages = [
            {"role": "assistant", "content": choice_of(replies, part).message.content}
            if "answer" in part
            else part
            for part in call["messages"]
        ]
        replies.append(await server.chat_completion(messages=messages, **options))
    return [sample(node) for node in nodes_of(server)]


def choice_of(replies: list[Any], part: dict[str, Any]) -> Any:
    """The choice that a message stands for."""
    call, choice = part["answer"]
    return replies[call].choices[choice]


if __name__ == "__main__":
    if sys.argv[1] == "--managed":
        toy = AutoTokenizer.from_pretrained(str(TOY))
        scenarios = json.loads(Path(sys.argv[2]).read_text())
        print(json.dumps({name: asyncio.run(played(toy, scenario)) for name, scenario in scenarios.items()}))
    elif sys.argv[1] == "--read":
        print(json.dumps([samples_of(line) for line in Path(sys.argv[2]).read_text().splitlines()]))
    else:
        write(Path(sys.argv[1]))
