"""The managed server: what is sent is what was sampled, and nodes are what a trainer may train."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.command import run
from tests.managed_scenarios import STORIES, planned, play
from tests.scripted import END, Scripted, ids_of, spelled
from tests.tables import table
from tests.tiers import some
from tests.toy import TOKENIZERS, toy_tokenizer
from tito_audit import SequenceNode, as_group, managed_server
from tito_audit.errors import ProviderError, RenderError, SetupError
from tito_audit.provider import GenerationResult
from tito_audit.tokens.load import load_tokenizer

pytest.importorskip("openai")

TOY = TOKENIZERS / "toy_bpe"
OPENER = "<|im_start|>assistant\n"
ASKED = {"role": "user", "content": "What is 2 + 2?"}
THANKS = {"role": "user", "content": "Thank you."}
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": ADD}


def managing(
    answers: Sequence[Any], work: Callable[[Any], Awaitable[Any]], **choices: Any
) -> tuple[Any, Scripted]:
    """What some work with a managed server returns, and the provider."""
    provider = Scripted(answers)

    async def inside() -> Any:
        async with managed_server(provider, tokenizer=TOY, **choices) as managed:
            return await work(managed)

    return asyncio.run(inside()), provider


def text_of(ids: Sequence[int]) -> str:
    return toy_tokenizer().vocabulary.text(np.array(ids, np.int32))


def texts_of(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def turned(message: Mapping[str, Any], answer: Any, *more: Mapping[str, Any], choice: int = 0) -> list[Any]:
    """The history after an answer, as a client sends it back."""
    back = answer.choices[choice].message.model_dump(exclude_none=True)
    return [message, back, *more]


def is_aligned(node: SequenceNode) -> bool:
    """Whether every list of a node is as long as its ids, and labels are ids where logprobs are logprobs."""
    columns = list(zip(node.tokens, node.masked_tokens, node.logprobs, strict=True))
    return all(
        (label == token and value <= 0) or (label == -100 and value == 1.0) for token, label, value in columns
    )


def trained(node: SequenceNode) -> str:
    """The text of the trained tokens."""
    return text_of([label for label in node.masked_tokens if label != -100])


def scanned(path: Path, *flags: str, tokenizer: Path = TOY) -> tuple[int, dict[str, int]]:
    """The exit code of a scan, and errors and warnings by rule."""
    code, out = run("scan", path, "-t", tokenizer, "--output-format", "json", *flags)[:2]
    by_rule = json.loads(out)["summary"]["findings"]
    counts = {rule: numbers["error"] + numbers["warning"] for rule, numbers in by_rule.items()}
    return code, {rule: count for rule, count in counts.items() if count}


def group_file(folder: Path, nodes: Sequence[SequenceNode], **more: Any) -> Path:
    path = folder / "groups.jsonl"
    path.write_text(json.dumps(as_group(nodes, [1.0] * len(nodes), **more)) + "\n")
    return path


@pytest.mark.parametrize("name", STORIES)
def test_nodes_hold_what_was_sampled_once_and_pass_a_scan(name, tmp_path):
    story, scenario = STORIES[name], planned(name)
    if "refused" in story:
        with pytest.raises(ProviderError):
            asyncio.run(play(scenario))
        return
    nodes, provider = asyncio.run(play(scenario, **story.get("choices", {})))
    assert all(is_aligned(node) and node.full_text == text_of(node.tokens) for node in nodes)
    for prompt, call in zip(provider.prompts, scenario["calls"], strict=True):
        for answer in call["answers"]:
            whole, own = [*prompt, *answer["ids"]], slice(len(prompt), len(prompt) + len(answer["ids"]))
            holders = [node for node in nodes if node.tokens[: len(whole)] == whole]
            assert any(
                (n.masked_tokens[own], n.logprobs[own]) == (answer["ids"], answer["logprobs"]) for n in holders
            )
    if "prompts" in story:
        assert [text_of(prompt).replace(END, "$") for prompt in provider.prompts] == story["prompts"]
    if "trained" in story:
        assert [trained(node).replace(END, "$") for node in nodes] == story["trained"]
    for key, values in story.get("nodes", {}).items():
        assert [node.metadata.get(key) or "" for node in nodes] == values
    if "parents" in story:
        keys = {node.metadata["key"]: node for node in nodes}
        parents = [keys.get(node.metadata["parent"]) for node in nodes]
        assert [trained(parent).replace(END, "$") if parent else "" for parent in parents] == story["parents"]
        assert all(
            not parent or node.tokens[: len(parent.tokens)] == parent.tokens
            for node, parent in zip(nodes, parents, strict=True)
        )
    log = tmp_path / "nodes.jsonl"
    log.write_text(json.dumps({"nodes": [node.model_dump() for node in nodes]}) + "\n")
    assert scanned(log) == scanned(group_file(tmp_path, nodes)) == (0, {})


def test_samples_of_one_prompt_are_nodes_of_their_own():
    async def work(managed):
        answer = await managed.chat_completion(messages=[ASKED], n=4, max_tokens=512, temperature=0.7)
        return answer, managed.get_state()["nodes"]

    (answer, nodes), provider = managing(["4.", "Four.", "It is 4.", "4."], work)
    assert texts_of(answer) == ["4.", "Four.", "It is 4.", "4."]
    (prompt,) = provider.prompts
    assert (answer.object, answer.model, answer.usage.prompt_tokens) == ("chat.completion", "org/toy", len(prompt))
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
    assert [node.tokens for node in nodes] == [[*prompt, *ids_of(text + END)] for text in texts_of(answer)]
    assert [trained(node) for node in nodes] == [text + END for text in texts_of(answer)]
    assert {(node.metadata["finish_reason"], node.metadata["weight_version"]) for node in nodes} == {("stop", "7")}
    assert nodes[0].logprobs != nodes[3].logprobs, "two equal samples stay apart"
    (sampling,) = provider.asked
    assert (sampling.temperature, sampling.n, sampling.max_tokens) == (0.7, 4, 512)


def test_a_tool_call_with_odd_spacing_keeps_its_ids_when_its_result_comes():
    called = '<tool_call>\n{ "name":"add","arguments": {"a":2} }\n</tool_call>'

    async def work(managed):
        first = await managed.chat_completion(messages=[ASKED], tools=[TOOL])
        call = first.choices[0].message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        function = {"name": "add", "arguments": '{"a": 2}'}
        calls = [{"id": call.id, "type": "function", "function": function}]
        back = {"role": "assistant", "content": None, "tool_calls": calls}
        second = await managed.chat_completion(messages=[ASKED, back, result], tools=[TOOL])
        return first, second, managed.get_state()["nodes"]

    (first, second, nodes), _ = managing([called, "It is 4."], work, tool_parser="hermes")
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.tool_calls[0].function.name == "add"
    assert texts_of(second) == ["It is 4."]
    (node,) = nodes
    assert trained(node) == f"{called}{END}It is 4.{END}"


def test_tools_are_not_parsed_without_tools_or_where_the_caller_wants_none():
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'

    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        asking = lambda managed, more=more: managed.chat_completion(messages=[ASKED], **more)  # noqa: E731
        assert texts_of(managing([called], asking, tool_parser="hermes")[0]) == [called]


def test_text_completions_continue_by_text_and_by_ids():
    odd = spelled(" 4, I think")

    async def work(managed):
        first = await managed.completion(prompt="2 + 2 =", max_tokens=9)
        by_text = await managed.completion(prompt="2 + 2 =" + first.choices[0].text + ". And 3?")
        ids = [*by_text.choices[0].prompt_token_ids, *by_text.choices[0].token_ids, *ids_of("\n")]
        by_ids = await managed.completion(prompt=ids)
        return first, by_text, by_ids, managed.get_state()["nodes"]

    (first, _, by_ids, nodes), provider = managing([odd, " Also.", " Yes."], work)
    assert first.choices[0].text == " 4, I think"
    assert first.choices[0].finish_reason == "length"
    assert provider.prompts[1] == [*ids_of("2 + 2 ="), *odd, *ids_of(". And 3?")]
    assert by_ids.choices[0].text == " Yes."
    (node,) = nodes
    assert trained(node) == f" 4, I think Also.{END} Yes.{END}"
    assert node.full_text == f"2 + 2 = 4, I think. And 3? Also.{END}\n Yes.{END}"
    assert is_aligned(node)


def test_nothing_is_left_after_a_reset_or_outside_of_the_block():
    provider = Scripted(["4", "5"])

    async def work() -> Any:
        async with managed_server(provider, TOY) as managed:
            first = await managed.chat_completion(messages=[ASKED])
            state = managed.get_state()
            managed.reset()
            assert managed.get_state()["nodes"] == []
            await managed.chat_completion(messages=turned(ASKED, first, THANKS))
            (node,) = managed.get_state()["nodes"]
            assert trained(node) == f"5{END}", "the answer before it was forgotten"
        assert managed.get_state()["nodes"] == []
        with pytest.raises(SetupError, match="closed"):
            await managed.chat_completion(messages=[ASKED])
        return state

    assert len(asyncio.run(work())["nodes"]) == 1
    assert not provider.closed, "its owner closes it"


def test_calls_under_way_at_the_same_time_do_not_mix():
    async def work(managed):
        questions = [{"role": "user", "content": f"Question {number}"} for number in range(8)]
        firsts = await asyncio.gather(*(managed.chat_completion(messages=[question]) for question in questions))
        histories = [turned(*pair, THANKS) for pair in zip(questions, firsts, strict=True)]
        await asyncio.gather(*(managed.chat_completion(messages=history) for history in histories))
        return managed.get_state()["nodes"]

    nodes, _ = managing([f"First {n}" for n in range(8)] + [f"Second {n}" for n in range(8)], work)
    assert [trained(node) for node in nodes] == [f"First {n}{END}Second {n}{END}" for n in range(8)]


def test_a_failure_of_the_provider_or_the_template_tracks_nothing():
    class Failing(Scripted):
        async def generate_n(self, input_ids, sampling):
            raise ProviderError("out of memory")

    async def work() -> Any:
        async with managed_server(Failing([]), TOY) as managed:
            with pytest.raises(ProviderError):
                await managed.chat_completion(messages=[ASKED])
            assert managed.get_state()["nodes"] == []
        refusing = "{{ raise_exception('no') }}"
        async with managed_server(Scripted([]), TOY, chat_template=refusing) as managed:
            with pytest.raises(RenderError):
                await managed.chat_completion(messages=[ASKED])

    asyncio.run(work())


def test_parameters_reach_the_provider():
    shape = {"max_completion_tokens": 7, "stop": "x", "top_p": 0.9, "seed": 3, "logprobs": True, "top_logprobs": 2}
    more = {"repetition_penalty": 1.1, "extra_body": {"min_p": 0.1, "ignore_eos": True, "stop_token_ids": [5]}}
    _, provider = managing(["4"], lambda managed: managed.chat_completion(messages=[ASKED], **shape, **more))
    (sampling,) = provider.asked
    assert (sampling.max_tokens, sampling.stop, sampling.top_p, sampling.seed) == (7, ("x",), 0.9, 3)
    assert (sampling.min_p, sampling.stop_token_ids, sampling.top_logprobs) == (0.1, (5,), 2)
    assert sampling.extra == {"repetition_penalty": 1.1, "ignore_eos": True}


@pytest.mark.parametrize(*table(__file__, "refused"))
def test_what_cannot_be_done_is_named_before_anything_is_sampled(asked, words):
    async def work(managed):
        with pytest.raises(ValueError, match=words):
            await managed.chat_completion(**{"messages": [ASKED], **json.loads(asked)})

    assert not managing([], work)[1].prompts


def test_logprobs_of_answers_are_those_of_the_nodes():
    async def work(managed):
        text = await managed.completion(prompt="Hi", n=3, logprobs=1)
        nodes = managed.get_state()["nodes"]
        chat = await managed.chat_completion(messages=[ASKED], logprobs=True)
        return (
            text.choices[0].logprobs,
            nodes[0],
            chat.choices[0].logprobs.content,
            managed.get_state()["nodes"][-1],
        )

    (text, first, chat, last), _ = managing(["a", "b", "a", "4."], work)
    assert (text.tokens, text.token_logprobs, text.text_offset) == (["a", END], first.logprobs[-2:], [2, 3])
    assert [entry.token for entry in chat] == ["4", ".", END]
    assert [entry.logprob for entry in chat] == last.logprobs[-3:]


def test_the_logprobs_of_a_prompt_are_what_the_provider_scores():
    async def work(managed):
        by_text = await managed.get_logprobs(prompt="2 + 2", top_k=2)
        by_ids = await managed.get_logprobs(input_ids=ids_of("2 + 2"), top_logprobs=2)
        by_messages = await managed.get_logprobs(messages=[ASKED])
        return by_text, by_ids, by_messages

    (by_text, by_ids, by_messages), _ = managing([], work)
    assert by_text == by_ids
    assert by_text["prompt_tokens"] == ids_of("2 + 2")
    assert by_text["prompt_topk_token_ids"][:2] == [[], [by_text["prompt_tokens"][1] + k for k in (0, 1)]]
    assert by_text["prompt_topk_logprobs"][1] == [-1.0, -2.0]
    assert len(by_messages["prompt_tokens"]) == len(by_messages["prompt_topk_logprobs"])


def test_a_group_has_the_conversations_as_the_template_was_given_them(tmp_path):
    reasoned = "<think>\nTwo and two.\n</think>\n\n4."

    async def work(managed):
        first = await managed.chat_completion(messages=[ASKED])
        without = {"role": "assistant", "content": first.choices[0].message.content}
        await managed.chat_completion(messages=[ASKED, without, THANKS])
        with_messages = managed.get_state()["nodes"]
        await managed.chat_completion(messages=[ASKED], tools=[TOOL])
        return with_messages, managed.get_state()["nodes"]

    (nodes, more), _ = managing([reasoned, "Welcome.", "4."], work, reasoning_parser="qwen3")
    path = group_file(tmp_path, nodes)
    conversations = json.loads(path.read_text())["messages"]
    assert [len(conversation) for conversation in conversations] == [2, 4]
    assert "Two and two." in conversations[0][1]["reasoning_content"]
    assert scanned(path) == (0, {})
    assert "messages" not in as_group(nodes, [0.0, 0.0], messages=False)
    assert "messages" not in as_group(more, [0.0] * 3), "a group has no place for tools"


def test_a_group_needs_a_score_for_each_node():
    node = SequenceNode("a", [1], [1], [-0.5])
    assert as_group([node], [1])["scores"] == [1.0]
    with pytest.raises(ValueError, match="1 nodes and 2 scores"):
        as_group([node], [1, 2])
    assert "messages" not in as_group([node], [1])


# Endpoints without ids


class TextApi:
    """A client of an API that returns text."""

    def __init__(self) -> None:
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._chat))
        self.completions = SimpleNamespace(create=self._text)

    async def _chat(self, **options: Any) -> Any:
        choice = SimpleNamespace(message=SimpleNamespace(content="4."), finish_reason="stop")
        return SimpleNamespace(choices=[choice] * options.get("n", 1))

    async def _text(self, **options: Any) -> Any:
        return SimpleNamespace(choices=[SimpleNamespace(text=" four", finish_reason="length")])


async def told_by_text(**choices: Any) -> dict[str, Any]:
    async with managed_server(TextApi(), TOY, **choices) as managed:
        await managed.chat_completion(messages=[ASKED], n=2)
        await managed.completion(prompt="2 + 2 =")
        with pytest.raises(SetupError, match="no logprobs"):
            await managed.get_logprobs(prompt="x")
        return managed.get_state()


def test_a_client_that_returns_text_is_refused_with_the_reason(monkeypatch):
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
    with pytest.raises(SetupError, match="needs token ids, and TextApi returns text"):
        asyncio.run(told_by_text())


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_placeholders_say_what_they_are_and_a_scan_reports_them(by, monkeypatch, tmp_path):
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1" if by == "variable" else "0")
    state = asyncio.run(told_by_text(dummy=by == "argument"))
    nodes = state["nodes"]
    assert [node.full_text for node in nodes[1:]] == ["user:What is 2 + 2?\n\nassistant:4.", "2 + 2 = four"]
    assert all(node.metadata["dummy_tokens"] is True for node in nodes)
    assert {label for node in nodes for label in node.masked_tokens} == {-100}, "none of them is trained"
    path = tmp_path / "nodes.jsonl"
    path.write_text(json.dumps({"nodes": [node.model_dump() for node in nodes]}) + "\n")
    for log in (path, group_file(tmp_path, nodes)):
        code, counts = scanned(log)
        assert (code, counts["REC004"]) == (1, 3)
        assert scanned(log, "--select", "REC,SEQ,TOK") == (1, {"REC004": 3})


class States(Scripted):
    """A provider whose server states its tokenizer, and encodes as it is told to."""

    def __init__(self, place: str | None, encodes: list[int] | None = None) -> None:
        super().__init__([])
        self.model, self.encodes = place, encodes

    async def find_tokenizer(self) -> str | None:
        """The stated place."""
        return self.model

    async def tokenized(self, text: str) -> list[int] | None:
        """What the server encodes every text as."""
        return self.encodes


async def tokenizer_of(provider: Scripted) -> Any:
    async with managed_server(provider) as managed:
        return managed.tokenizer


@pytest.mark.parametrize("provider", [States(str(TOY)), Scripted([])], ids=["stated", "by its model's name"])
def test_the_tokenizer_is_that_of_the_served_model(provider: Scripted, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(provider, "model", str(TOY))

    tokenizer = asyncio.run(tokenizer_of(provider))
    assert tokenizer.encode("2 + 2").tolist() == ids_of("2 + 2")


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        (States(None), "scripted does not state its model, so its tokenizer is not known.\nPass tokenizer=FOLDER"),
        (States("no/such"), "scripted serves no/such, and there is no tokenizer of that name here ("),
        (States(str(TOY), [1, 2]), "with another tokenizer: scripted encodes a text in 2 tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_found_or_does_not_fit_is_asked_for(
    provider: Scripted, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SetupError) as refused:
        asyncio.run(tokenizer_of(provider))
    assert message in str(refused.value)
    assert "Pass tokenizer=FOLDER" in str(refused.value).splitlines()[1]


def test_a_tokenizer_without_a_template_completes_texts_only(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((TOY / "tokenizer.json").read_bytes())

    async def work() -> None:
        async with managed_server(Scripted(["4"]), tmp_path) as managed:
            assert (await managed.completion(prompt="2 + 2 =")).choices[0].token_ids
            with pytest.raises(SetupError, match="no chat template"):
                await managed.chat_completion(messages=[ASKED])

    asyncio.run(work())


def test_a_result_of_other_lengths_is_refused_and_never_padded():
    short = GenerationResult((1,), (7, 8), (-0.5,), finish_reason="stop")

    async def work(managed):
        with pytest.raises(ProviderError, match="2 token ids and 1 logprobs"):
            await managed.chat_completion(messages=[ASKED])
        return managed.get_state()["nodes"]

    assert managing([short], work)[0] == []


def test_without_the_openai_package_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai.types", None)

    with pytest.raises(SetupError, match=r"pip install 'tito-audit\[serve\]'"):
        managing([], lambda managed: managed.completion(prompt="x"))


REAL = sorted(
    path.parent
    for path in Path(os.environ.get("TITO_AUDIT_TOKENIZERS", "no-such-folder")).glob("*/tokenizer.json")
    if path.parent.name != "gpt-oss"  # it comes without a chat template
)


@pytest.mark.parametrize("folder", some(REAL[::-1], 1), ids=lambda path: path.name)
@pytest.mark.parametrize("odd", [False, True])
def test_with_a_real_template_turns_continue_and_a_group_with_messages_passes_a_scan(folder, odd, tmp_path):
    tokenizer = load_tokenizer(str(folder))

    def sampled(text: str) -> GenerationResult:
        parts = text if odd else [text]
        ids = [token_id for part in parts for token_id in tokenizer.encode(part).tolist()] + [tokenizer.eos_ids[0]]
        logprobs = [-0.05 - (token_id * 37 + place * 53) % 200 / 100 for place, token_id in enumerate(ids)]
        return GenerationResult((), tuple(ids), tuple(logprobs), finish_reason="stop")

    answers = [sampled(text) for text in ("The answer is 4.", "You are welcome.", "Bye.")]

    async def work() -> Any:
        history: list[Any] = [{"role": "system", "content": "Be brief."}, ASKED]
        async with managed_server(Scripted(answers), tokenizer) as managed:
            for _ in answers:
                answer = await managed.chat_completion(messages=history)
                history += [answer.choices[0].message.model_dump(exclude_none=True), THANKS]
            return managed.get_state()["nodes"]

    (node,) = asyncio.run(work())
    labels = [label for label in node.masked_tokens if label != -100]
    assert labels == [token_id for answer in answers for token_id in answer.output_ids]
    path = group_file(tmp_path, [node])
    roles = [message["role"] for message in json.loads(path.read_text())["messages"][0]]
    assert roles[-3:] == ["assistant", "user", "assistant"]
    assert scanned(path, tokenizer=folder) == (0, {})
