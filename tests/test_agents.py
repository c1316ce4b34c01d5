"""`rollout`: an agent and an environment run to a sample whose tokens are those that were sampled."""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openai")

from tests.command import run, written
from tests.scripted import END, Scripted, ids_of, spelled
from tests.world import ROOT, TOY
from tito_audit import (
    Sample,
    SampleStatus,
    SamplingParams,
    SequenceNode,
    audit_batch,
    managed_server,
    rollout,
    rollout_client,
)
from tito_audit.errors import ProviderError

QUESTION = "What is 2 + 2?"
ANSWERS = [[*spelled("It is 5"), *ids_of(END)], "Maybe 6", "It is 4"]
"""The first is in tokens that no tokenizer would write."""


async def asks(messages: list[dict[str, Any]], client: Any) -> str:
    """An agent as most are written, async."""
    answer = await client.chat.completions.create(model="any", messages=messages)
    return str(answer.choices[0].message.content)


def asks_sync(messages: list[dict[str, Any]], client: Any) -> str:
    """The same, blocking, with the usual `strip`."""
    answer = client.chat.completions.create(model="any", messages=messages)
    return str(answer.choices[0].message.content).strip() + "\n"


class Game:
    """A game of text, in Gymnasium's shape: an answer with 4 in it ends it."""

    def __init__(self, reply: str = "No. Try again.") -> None:
        self.reply, self.texts = reply, list[str]()

    def reset(self) -> tuple[str, dict[str, Any]]:
        self.texts = []
        return QUESTION, {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.texts.append(text)
        return self.reply, 1.0 if "4" in text else -0.1, "4" in text, False, {}


def run_agent(
    agent: Any, environment: Any, answers: Sequence[Any] = ANSWERS, **more: Any
) -> tuple[Sample, Scripted]:
    provider = Scripted(answers)
    return asyncio.run(rollout(agent, environment, provider, tokenizer=TOY, **more)), provider


def check_columns(sample: Sample, provider: Scripted) -> None:
    """Every trained token is a sampled one, in order, with its logprob; no other is trained."""
    rows = [sample, *sample.others]
    assert sample.proven, sample.findings
    for row in rows:
        assert row.rollout_log_probs is not None
        assert len(row.tokens) == len(row.loss_mask) == len(row.rollout_log_probs) == len(row.token_rewards)
        spans = {at for turn in row.turns for at in range(turn.start, turn.end)}
        assert spans == {at for at, weight in enumerate(row.loss_mask) if weight}
        assert all(value == 0 for at, value in enumerate(row.rollout_log_probs) if at not in spans)
        for turn in row.turns:
            assert row.tokens[: turn.start] in provider.prompts


@pytest.mark.parametrize("agent", [asks, asks_sync])
def test_an_agent_runs_through_an_environment_to_one_row(agent: Any) -> None:
    game = Game()
    sample, provider = run_agent(agent, game, index=3, group_index=1, metadata={"task": "sum"})
    check_columns(sample, provider)
    assert [text.strip() for text in game.texts] == ["It is 5", "Maybe 6", "It is 4"]
    assert sample.rewards == [-0.1, -0.1, 1.0]
    assert sample.reward == pytest.approx(0.8)
    assert (sample.status, sample.error, sample.others) == (SampleStatus.COMPLETED, None, [])
    assert (sample.index, sample.group_index, sample.metadata["task"]) == (3, 1, "sum")
    assert sample.prompt == [{"role": "user", "content": QUESTION}]
    assert sample.tokens[: sample.prompt_length] == provider.prompts[0]
    assert sample.tokens[sample.prompt_length :][: len(ANSWERS[0])] == ANSWERS[0]
    assert sample.response.startswith("It is 5<|im_end|>")
    assert [message["role"] for message in sample.messages] == ["user", "assistant"] * 3
    assert sample.token_rewards[-1] == 1.0
    assert sum(sample.token_rewards) == pytest.approx(0.8)
    assert {turn.weight_version for turn in sample.turns} == {"7"}


def test_a_sample_is_a_line_of_a_log_that_scans_clean(tmp_path: Path) -> None:
    sample, _ = run_agent(asks, Game())
    log = written(tmp_path / "samples.jsonl", [sample.to_dict()])
    code, printed, _ = run("scan", log, "-t", TOY, "-r", "json")
    report = json.loads(printed)
    assert (code, list(report["summary"]["formats"])) == (0, ["tito_sample"])
    assert {finding["severity"] for finding in report["findings"]} <= {"note"}
    last = {"turn": 2, "start": sample.turns[2].start, "end": sample.turns[2].end, "reward": 1.0}
    assert json.loads(log.read_text())["metadata"]["turns"][2] == last


class Class:
    """An agent that is an object with a client and a state of its own."""

    def __init__(self, client: Any) -> None:
        self.client, self.calls = client, 0

    async def __call__(self, messages: list[dict[str, Any]]) -> str:
        self.calls += 1
        return await asks(messages, self.client)


def test_an_agent_that_has_its_client_already_gets_only_messages() -> None:
    client, sync = rollout_client(), rollout_client(sync=True)
    agent = Class(client)
    check_columns(*run_agent(agent, Game()))
    assert agent.calls == 3
    check_columns(*run_agent(lambda messages: asks_sync(messages, sync), Game()))


def test_many_rollouts_at_once_do_not_mix() -> None:
    agent, sync = Class(rollout_client()), rollout_client(sync=True)

    def other(messages: list[dict[str, Any]]) -> str:
        return asks_sync(messages, sync)

    async def each(number: int) -> Sample:
        provider = Scripted([f"Is it {chr(97 + number)}?", f"It is 4 ({number})"])
        return await rollout([agent, other][number % 2], Game(f"No, {number}."), provider, tokenizer=TOY)

    async def all_of_them() -> list[Sample]:
        return await asyncio.gather(*map(each, range(12)))

    for number, sample in enumerate(asyncio.run(all_of_them())):
        contents = [message["content"] for message in sample.messages]
        assert contents == [QUESTION, f"Is it {chr(97 + number)}?", f"No, {number}.", f"It is 4 ({number})"]
        assert sample.proven


def test_a_client_outside_a_rollout_says_so() -> None:
    with pytest.raises(RuntimeError, match="only inside a rollout"):
        asks_sync([], rollout_client(sync=True))


def test_a_function_that_scores_a_text_is_an_environment() -> None:
    sample, provider = run_agent(asks, lambda text: "4" in text, ["It is 4"], prompt=QUESTION)
    check_columns(sample, provider)
    assert (sample.reward, sample.rewards, len(sample.turns)) == (1.0, [1.0], 1)


class SkyRL:
    """`BaseTextEnv` of SkyRL: messages in `init`, a mapping from `step`."""

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return [{"role": "system", "content": "Be short."}, *prompt], {}

    async def step(self, action: str) -> dict[str, Any]:
        done = "4" in action
        tool = [] if done else [{"role": "user", "content": f"<result>{action}</result>"}]
        stated = {"reward": float(done), "done": done, "metadata": {}, "postprocessed_action": None}
        return {"observations": tool, **stated}


@dataclass
class StepResult:
    """OpenEnv's result of `reset` and `step`."""

    observation: str
    reward: float | None = None
    done: bool = False


class OpenEnv:
    def reset(self) -> StepResult:
        return StepResult(QUESTION)

    def step(self, action: str) -> StepResult:
        return StepResult("Again.", 1.0 if "4" in action else None, "4" in action)


@pytest.mark.parametrize("environment", [SkyRL(), SkyRL, OpenEnv()], ids=["SkyRL", "a class", "OpenEnv"])
def test_environments_of_other_stacks_fit(environment: Any) -> None:
    sample, provider = run_agent(asks, environment, prompt=QUESTION)
    check_columns(sample, provider)
    assert (sample.rewards, sample.status, sample.others) == ([0.0, 0.0, 1.0], SampleStatus.COMPLETED, [])


@pytest.mark.parametrize(
    ("value", "reward", "done"),
    [
        (True, 1.0, True),
        (np.float32(0.5), 0.5, True),
        (("Go on.", 0.5, False), 0.5, False),
        (("", None, True, {}), 0.0, True),
        ((None, 2, False, True, {}), 2.0, True),
        (SimpleNamespace(observation="Go on.", reward=None, done=False), 0.0, False),
        ({"observation": {"role": "user", "content": "Go on."}, "reward": 1}, 1.0, False),
        ("Go on.", 0.0, False),
        ([{"role": "user", "content": "Go on."}], 0.0, False),
    ],
)
def test_what_a_step_returns_is_read_in_every_usual_shape(value: Any, reward: float, done: bool) -> None:
    sample, provider = run_agent(asks, lambda text: value, ["a", "b"], prompt=QUESTION, max_turns=1)
    assert (sample.reward, len(provider.prompts)) == (reward, 1)
    ended = SampleStatus.TRUNCATED if not done or (isinstance(value, tuple) and len(value) == 5) else "completed"
    assert sample.status == ended


@pytest.mark.parametrize("value", [None, ("a", 1), object(), ({1}, 1.0, False), [1, 2]])
def test_what_no_environment_returns_aborts_with_words(value: Any) -> None:
    sample, _ = run_agent(asks, lambda text: value, prompt=QUESTION)
    assert sample.status is SampleStatus.ABORTED
    assert isinstance(sample.error, ValueError)
    assert sample.turns
    assert sample.proven


# Limits and errors


@pytest.mark.parametrize(
    ("environment", "answers", "more", "rewards"),
    [
        (Game(), ANSWERS, {"max_turns": 2}, [-0.1, -0.1]),
        (Game("No. " * 30), ANSWERS, {"max_length": 60}, [-0.1]),
        (lambda text: 0.0, [ids_of("It is")], {"prompt": QUESTION}, [0.0]),
    ],
    ids=["out of turns", "out of tokens", "an answer that was cut"],
)
def test_a_rollout_that_runs_out_is_truncated_and_no_answer_is_longer(
    environment: Any, answers: Any, more: dict[str, Any], rewards: list[float]
) -> None:
    sample, provider = run_agent(asks, environment, answers, **more)
    check_columns(sample, provider)
    assert (sample.status, sample.error, sample.rewards) == (SampleStatus.TRUNCATED, None, rewards)
    if "max_length" in more:
        assert provider.asked[0].max_tokens == 60 - len(provider.prompts[0])
    assert (sample.turns[-1].finish_reason == "length") == ("prompt" in more)


def fails(_: Any) -> Any:
    raise RuntimeError("the sandbox is gone")


@pytest.mark.parametrize("answers", [[], ANSWERS])
def test_an_error_aborts_the_sample_and_keeps_what_was_sampled(answers: Sequence[Any]) -> None:
    async def agent(messages: list[dict[str, Any]], client: Any) -> str:
        return await asks(messages, client) if answers else fails(messages)

    sample, provider = run_agent(agent, fails, answers, prompt=QUESTION)
    assert sample.status is SampleStatus.ABORTED
    assert str(sample.error) == "the sandbox is gone"
    assert sample.to_dict()["metadata"]["error"] == "RuntimeError: the sandbox is gone"
    assert len(sample.turns) == len(provider.prompts) == bool(answers)
    if answers:
        check_columns(sample, provider)


@pytest.mark.parametrize("agent", [asks, asks_sync])
def test_a_provider_that_fails_aborts_with_its_own_error(agent: Any) -> None:
    class Broken(Scripted):
        async def generate_n(self, input_ids: Any, sampling: Any) -> Any:
            raise ProviderError("the server is gone", status=503)

    sample = asyncio.run(rollout(agent, Game(), Broken([]), tokenizer=TOY))
    assert (sample.status, sample.tokens) == (SampleStatus.ABORTED, [])
    assert isinstance(sample.error, ProviderError)


def test_a_cancelled_rollout_ends_at_once_also_in_a_thread() -> None:
    class Slow(Scripted):
        async def generate_n(self, input_ids: Any, sampling: Any) -> Any:
            await asyncio.sleep(3600)

    async def work() -> float:
        task = asyncio.ensure_future(rollout(asks_sync, Game(), Slow([]), tokenizer=TOY))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - began

    assert asyncio.run(work()) < 2


class Runs:
    """An environment that runs the model itself, as those of verifiers do."""

    async def rollout(self, client: Any) -> None:
        """Never called here."""


class Undescribed:
    def reset(self) -> None:
        """Nothing."""

    def add(self, a):  # type: ignore[no-untyped-def]
        return a


@pytest.mark.parametrize(
    ("environment", "more", "message"),
    [
        (object(), {}, "has no `step`, is no function, and has no tools"),
        (Runs(), {}, r"run the model themselves \(verifiers, Atropos\) take the gateway's address"),
        (Undescribed(), {"prompt": QUESTION}, "Undescribed: a tool cannot be described"),
        (lambda text: 1.0, {}, "has no first message"),
        (Game(), {"tokenizer": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_a_wrong_setting_is_an_error_and_no_sample(
    environment: Any, more: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(Exception, match=message):
        asyncio.run(rollout(asks, environment, Scripted(ANSWERS), **{"tokenizer": TOY, **more}))


def test_a_sync_client_in_an_async_agent_is_an_error_and_no_deadlock() -> None:
    client = rollout_client(sync=True)

    async def agent(messages: list[dict[str, Any]]) -> str:
        return asks_sync(messages, client)

    sample, _ = run_agent(agent, Game())
    assert sample.status is SampleStatus.ABORTED
    assert "needs the async client" in str(sample.error)


# What agents do


def test_an_agent_that_changes_history_gives_several_rows_each_answer_trained_once() -> None:
    async def agent(messages: list[dict[str, Any]], client: Any) -> str:
        return (await asks(messages, client)).upper()

    sample, provider = run_agent(agent, Game(), ["It is 5", "It is 4"])
    check_columns(sample, provider)
    (other,) = sample.others
    assert (other.rewards, sample.rewards) == ([-0.1], [1.0])
    assert (other.reward, sample.reward) == (0.9, 0.9)
    assert sample.metadata["branch"] == "fork"
    assert sample.messages[-1]["content"] == "It is 4"


def test_an_agent_may_call_several_times_in_a_turn_and_the_row_stays_one() -> None:
    async def agent(messages: list[dict[str, Any]], client: Any) -> str:
        draft = await asks(messages, client)
        again = [*messages, {"role": "assistant", "content": draft}, {"role": "user", "content": "Sure?"}]
        return await asks(again, client)

    sample, provider = run_agent(agent, Game(), ["5", "It is 5", "4", "It is 4"])
    check_columns(sample, provider)
    assert (sample.others, [turn.turn for turn in sample.turns]) == ([], [0, 0, 1, 1])
    assert sample.rewards == [0.0, -0.1, 0.0, 1.0]


def test_the_answer_that_an_agent_picks_of_several_is_the_row() -> None:
    async def agent(messages: list[dict[str, Any]], client: Any) -> str:
        answer = await client.chat.completions.create(model="any", messages=messages, n=3)
        return str(answer.choices[1].message.content)

    sample, provider = run_agent(agent, Game(), ["a", "b", "c", "d", "It is 4", "e"])
    check_columns(sample, provider)
    assert [message["content"] for message in sample.messages][1::2] == ["b", "It is 4"]
    assert (len(sample.others), sample.reward) == (4, 0.9)
    assert sum(len(row.turns) for row in (sample, *sample.others)) == 6


def test_an_agent_may_stream_and_may_end_the_rollout() -> None:
    async def agent(messages: list[dict[str, Any]], client: Any) -> str | None:
        if len(messages) > 2:
            return None
        chunks = await client.chat.completions.create(model="any", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])

    sample, provider = run_agent(agent, Game(), ["It is 5"])
    check_columns(sample, provider)
    assert (sample.status, sample.rewards) == (SampleStatus.COMPLETED, [-0.1])


def test_sampling_fills_what_the_agent_leaves_out() -> None:
    async def agent(messages: list[dict[str, Any]], client: Any) -> Any:
        return await client.chat.completions.create(model="any", messages=messages, temperature=0.2)

    sampling = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=7, extra={"min_tokens": 1})
    sample, provider = run_agent(agent, lambda text: 1.0, ["4"], prompt=QUESTION, sampling=sampling)
    assert sample.reward == 1.0
    how = provider.asked[0]
    assert (how.temperature, how.top_p, how.max_tokens, how.extra) == (0.2, 0.9, 7, {"min_tokens": 1})


# Environments of tools, as TRL has them


class Calculator:
    """TRL's shape: `reset`, public methods as tools, `get_reward`."""

    def reset(self, question: str) -> str:
        self.results = list[int]()
        return f" {question}"

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.results.append(a + b)
        return a + b

    def get_reward(self) -> float:
        return float(4 in self.results)


def test_an_environment_of_tools_runs_the_calls_of_the_model() -> None:
    pytest.importorskip("transformers")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "fly", "arguments": {}}\n</tool_call>'

    async def agent(messages: list[dict[str, Any]], client: Any) -> Any:
        return (await client.chat.completions.create(model="any", messages=messages)).choices[0].message.content

    more: Any = {"prompt": "Use the tool.", "task": {"question": QUESTION}, "tool_parser": "hermes"}
    sample, provider = run_agent(agent, Calculator, [bad, call, "It is 4"], **more)
    assert sample.error is None
    check_columns(sample, provider)
    assert (sample.rewards, sample.reward, sample.others) == ([0.0, 0.0, 1.0], 1.0, [])
    assert sample.prompt == [{"role": "user", "content": f"Use the tool. {QUESTION}"}]
    assert "KeyError: 'fly'" in sample.response


# Trainers


def test_what_the_guide_returns_to_trl_is_a_batch_that_passes() -> None:
    guide = (ROOT / "docs" / "rollout.md").read_text(encoding="utf-8")
    block = next(block for block in guide.split("```python\n") if block.startswith("def rollout_func"))
    provider = Scripted([*ANSWERS, "It is 42"])

    async def in_turn(agent: Any, environment: Any, source: Any, **more: Any) -> Sample:
        async with lock:  # the answers are in their order
            return await rollout(agent, environment, source, tokenizer=TOY)

    lock = asyncio.Lock()
    names = {"asyncio": asyncio, "rollout": in_turn, "agent": asks, "Quiz": Game, "provider": provider}
    exec(block.split("```")[0], names)
    batch = names["rollout_func"](["a", "b"], None)  # type: ignore[operator]
    assert batch["env_reward"] == [pytest.approx(0.8), 1.0]
    assert [len(row) for row in batch["completion_ids"]] == [len(row) for row in batch["env_mask"]]
    columns = {name: batch[name] for name in ("prompt_ids", "completion_ids", "logprobs")}
    audit = audit_batch(**columns, loss_mask=batch["env_mask"], tokenizer=str(TOY))
    assert not audit.failed, audit.findings


@pytest.mark.parametrize("track_tree", [False, True])
def test_a_node_of_a_managed_server_is_a_sample(track_tree: bool, tmp_path: Path) -> None:
    async def nodes() -> Any:
        async with managed_server(Scripted(ANSWERS), TOY, track_tree) as managed:
            question = {"role": "user", "content": QUESTION}
            first = await managed.chat_completion(messages=[question])
            answer = first.choices[0].message.model_dump(exclude_none=True)
            await managed.chat_completion(messages=[question, answer, {"role": "user", "content": "Sure?"}])
            await managed.completion(prompt="2 + 2 =")
            return managed.get_state()["nodes"]

    for node in asyncio.run(nodes()):
        sample = node.as_sample(0.5, index=7)
        assert (sample.reward, sample.index, sample.tokens, sample.rewards) == (0.5, 7, node.tokens, [])
        assert [bool(weight) for weight in sample.loss_mask] == [label != -100 for label in node.masked_tokens]
        pairs = zip(sample.rollout_log_probs or [], node.logprobs, strict=True)
        assert all(own == (0.0 if value == 1.0 else value) for own, value in pairs)
        assert node.full_text.endswith(sample.response)
        text = sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"]
        assert text == ("2 + 2 =" if not sample.messages else QUESTION)
        log = written(tmp_path / "sample.jsonl", [sample.to_dict()])
        code, printed, _ = run("scan", log, "-t", TOY, "-r", "json")
        assert (code, list(json.loads(printed)["summary"]["formats"])) == (0, ["tito_sample"]), printed


def test_placeholders_are_no_sample() -> None:
    node = SequenceNode("", [0, 1], [-100, -100], [1.0, 1.0], {"dummy_tokens": True})
    with pytest.raises(ValueError, match="placeholders"):
        node.as_sample()


# The audit


def test_a_sampled_token_that_the_row_changes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit compares a row with the provider's own answers, so it does not depend on how the row was made."""
    from tito_audit.sessions import managed

    whole: Callable[..., Any] = managed.SequenceNode.as_sample

    def changed(node: Any, *arguments: Any, **more: Any) -> Sample:
        sample: Sample = whole(node, *arguments, **more)
        sample.rollout_log_probs[-1] -= 1
        return sample

    monkeypatch.setattr(managed.SequenceNode, "as_sample", changed)
    sample, _ = run_agent(asks, Game())
    assert not sample.proven
    assert sample.findings


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is in the extra hf")
def test_the_example_runs_with_a_real_model_and_the_model_agrees_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.tiny_model import build_tiny_model

    model, log = build_tiny_model(tmp_path / "model"), tmp_path / "samples.jsonl"
    script, choices = str(ROOT / "examples" / "rollout" / "guess.py"), ["--size", "4", "--turns", "2"]
    monkeypatch.setattr(sys, "argv", [script, "--provider", f"hf={model}", "--out", str(log), *choices])
    runpy.run_path(script, run_name="__main__")
    assert capsys.readouterr().out.count("of them trained") == 4
    # Random weights sample control tokens, which a row without its calls shows as text of the template.
    code, printed, _ = run("scan", log, "-t", model, "-r", "json", "--select", "REC,LPR,SEQ")
    report = json.loads(printed)
    assert code == 0, report["findings"][:2]
    assert report["summary"]["rollouts"] >= 4
    _, priced, _ = run("rescore", log, "--provider", f"hf={model}", "-t", model, "-r", "json")
    agreement = json.loads(priced)["summary"]["agreement"]
    assert agreement["tokens"] > 100
    assert agreement["largest"] < 0.001
