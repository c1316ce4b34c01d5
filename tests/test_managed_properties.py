"""Whatever a model samples and in whatever order an environment branches, every sampled id is tracked once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command import run
from tests.scripted import END, Scripted, ids_of
from tests.tiers import examples
from tests.toy import TOKENIZERS
from tito_audit import SequenceNode, as_group, managed_server
from tito_audit.provider import GenerationResult

pytest.importorskip("openai")

TOY = TOKENIZERS / "toy_bpe"
VOCABULARY = 2000
QUESTIONS = ("Why?", "And then?", "", " \n")


@dataclass
class Played:
    """What was sampled, and what was tracked of it."""

    sampled: list[GenerationResult] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    """The prompt of each sampled answer."""
    nodes: list[SequenceNode] = field(default_factory=list)


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], bool]:
    """Ids of an answer, and whether its stop token was sampled."""
    return draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6)), draw(st.booleans())


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[int, int, str, list[tuple[list[int], bool]]]]:
    """Calls: which earlier answer one goes on from (-1: none), by which question, and its answers."""
    several = st.lists(answers(), min_size=1, max_size=3)
    size = draw(st.integers(1, 6))
    return [
        (draw(st.integers(-1, 7)), number, draw(st.sampled_from(QUESTIONS)), draw(several))
        for number in range(size)
    ]


async def play(plan: Any, track_tree: bool) -> Played:
    """The calls of a plan, each with the history that a client has."""
    played = Played()
    histories: list[list[dict[str, Any]]] = []
    provider = Scripted([])
    async with managed_server(provider, TOY, track_tree=track_tree) as managed:
        for number, (parent, _, question, given_answers) in enumerate(plan):
            history = histories[parent % len(histories)] if parent >= 0 and histories else []
            messages = [*history, {"role": "user", "content": f"{number}{question}"}]
            results = [generated(ids, stop, number) for ids, stop in given_answers]
            provider.answers += results
            answer = await managed.chat_completion(messages=messages, n=len(results))
            played.sampled += results
            played.prompts += [provider.prompts[-1]] * len(results)
            for choice in answer.choices:
                histories.append([*messages, choice.message.model_dump(exclude_none=True)])
        played.nodes = managed.get_state()["nodes"]
    return played


def generated(ids: list[int], stop: bool, number: int) -> GenerationResult:
    """A sampled answer whose logprobs tell it apart from any other."""
    whole = (*ids, *(ids_of(END) if stop else ()))
    mixed = (token_id * 37 + place * 53 + number * 17 for place, token_id in enumerate(whole))
    logprobs = tuple(-0.01 - value % 997 / 300 for value in mixed)
    return GenerationResult((), whole, logprobs, finish_reason="stop" if stop else "length")


def runs(node: SequenceNode) -> list[tuple[int, ...]]:
    """The trained stretches of a node."""
    labels_of_runs: list[list[int]] = [[]]
    for label in node.masked_tokens:
        if label == -100 and labels_of_runs[-1]:
            labels_of_runs.append([])
        elif label != -100:
            labels_of_runs[-1].append(label)
    return [tuple(run) for run in labels_of_runs if run]


@settings(max_examples=examples(15, 600))
@given(plans(), st.booleans())
def test_every_sampled_answer_is_trained_once_with_its_ids_and_logprobs(plan: Any, track_tree: bool) -> None:
    played = asyncio.run(play(plan, track_tree))
    for node in played.nodes:
        columns = zip(node.tokens, node.masked_tokens, node.logprobs, strict=True)
        assert all(
            (label, value) == (-100, 1.0) or (label == token and value < 0) for token, label, value in columns
        )
    expected = Counter(answer.output_ids for answer in played.sampled)
    assert Counter(run for node in played.nodes for run in runs(node)) == expected
    logprobs = Counter(value for answer in played.sampled for value in answer.logprobs)
    assert Counter(value for node in played.nodes for value in node.logprobs if value != 1.0) == logprobs


@settings(max_examples=examples(15, 600))
@given(plans(), st.booleans())
def test_every_answer_stands_after_the_prompt_that_it_was_sampled_for(plan: Any, track_tree: bool) -> None:
    played = asyncio.run(play(plan, track_tree))
    sequences = [
        [*prompt, *answer.output_ids] for prompt, answer in zip(played.prompts, played.sampled, strict=True)
    ]
    for wanted in sequences:
        assert any(node.tokens[: len(wanted)] == wanted for node in played.nodes)
    if track_tree:
        assert [node.tokens for node in played.nodes] == sequences
    else:
        assert all(node.tokens in sequences for node in played.nodes)


@settings(max_examples=examples(4, 60))
@given(st.lists(plans(), min_size=3, max_size=6), st.booleans())
def test_the_log_of_any_calls_passes_a_scan(
    tmp_path_factory: pytest.TempPathFactory, many: list[Any], track_tree: bool
) -> None:
    log = tmp_path_factory.mktemp("log") / "groups.jsonl"
    groups = [asyncio.run(play(plan, track_tree)).nodes for plan in many]
    rows = [as_group(nodes, [0.0] * len(nodes)) for nodes in groups]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    select = ("--select", "REC,TOK,SEQ,MSK", "--ignore", "REC009")
    out = run("scan", log, "-t", TOY, *select, "--output-format", "json")[1]
    findings = json.loads(out)["summary"]["findings"]
    assert {rule: counts for rule, counts in findings.items() if counts["error"]} == {}


def test_a_folder_of_the_toy_tokenizer_has_as_many_ids_as_are_drawn() -> None:
    assert Path(TOY, "tokenizer.json").exists()
    assert ids_of(END)[0] >= VOCABULARY
