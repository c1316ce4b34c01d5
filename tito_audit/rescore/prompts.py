"""`rescore --prompts`: logged prompts sent back to a server as ids and as messages; greedy answers replayed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tito_audit.align.alignment import align
from tito_audit.errors import ProviderError
from tito_audit.evidence.differences import difference, stretches
from tito_audit.evidence.images import states_images
from tito_audit.evidence.model import Against, Evidence, Explained
from tito_audit.evidence.reference import pieces_of
from tito_audit.join import lines_of
from tito_audit.provider import SamplingParams
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Severity, Where
from tito_audit.record.message import Message
from tito_audit.record.prefix import common_prefix, same_ids
from tito_audit.record.rollout import IdsFrom, Place, Turn
from tito_audit.rescore.journal import REFUSALS
from tito_audit.rescore.model import BOUND
from tito_audit.rescore.run import ModelRun, ModelWork
from tito_audit.run.check import explain
from tito_audit.storage.row import RawRow
from tito_audit.ways.observed import prompt_messages

_MAJORITY = -0.6
"""A token with a logprob above this has more than half of the probability, so it is the top choice."""
_ROUNDING = 1e-3
_CHANGES_CHOICE = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens"),
    *("ignore_eos", "allowed_token_ids", "structured_outputs", "response_format", "structural_tag", "regex"),
    *("json_schema", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "forced"),
    *("guided_decoding", "thinking_token_budget", "output_format"),
)
"""Fields of requests and of the gateway's log with which a likely token need not be the model's own top choice."""
_STATED_IN = ("sampling", "sampling_params", "request", "extra_body")
_MOST_SEEN = 1 << 18
"""How many calls are remembered, whose ids later prompts may keep."""


class Question(StrEnum):
    """What a server is asked about a call."""

    IDS = "sent as ids"
    MESSAGES = "sent as messages"
    REPLAY = "replayed greedily"


@runtime_checkable
class RenderingProvider(Protocol):
    """A provider whose server turns chat requests into prompts, and repeats the ids that it was given."""

    async def render(self, chat_request: Mapping[str, Any]) -> Sequence[int]:
        """The ids of the prompt that a chat request leads to; ProviderError if the server refuses."""
        ...


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """One place where a server's tokens are not the log's."""

    question: Question
    place: Place
    turn: int
    where: Where
    start: int
    end: int
    """The tokens of the log that the server has not, half-open."""
    code: str
    """The rule that the cause belongs to; "" where there is none."""
    cause: str
    what: str
    recorded: tuple[int, ...]
    server: tuple[int, ...]

    def __str__(self) -> str:
        code = f"{self.code} " if self.code else ""
        return f"{code}{self.place} turn {self.turn} {self.where} {self.start}:{self.end}"


@dataclass(slots=True)
class AskedRollout:
    """What a server says of the calls of one rollout."""

    place: Place
    compared: list[Question] = field(default_factory=list)
    """One for every call and question that was compared."""
    differences: list[PromptDifference] = field(default_factory=list)
    skipped: list[tuple[Question, str]] = field(default_factory=list)
    """One for every call and question that was not compared, with the reason."""
    spliced: int = 0
    """Calls whose prompt differs only in tokens that it keeps from the call before."""
    replayed: int = 0
    """Tokens that were replayed."""

    def add(self, question: Question, differences: Iterable[PromptDifference] = ()) -> None:
        self.compared.append(question)
        self.differences += differences

    def skip(self, question: Question, because: str) -> None:
        self.skipped.append((question, because))


@dataclass(slots=True)
class PromptSummary:
    """The counts of a run; complete after its last rollout."""

    provider: str
    model: str | None
    rollouts: int = 0
    compared: Counter[Question] = field(default_factory=Counter)
    differing: Counter[Question] = field(default_factory=Counter)
    """Calls with a difference."""
    differences: list[PromptDifference] = field(default_factory=list)
    skipped: dict[tuple[Question, str], tuple[int, Place]] = field(default_factory=dict)
    """By question and reason: how many calls were not compared, and where the first is."""
    spliced: int = 0
    replayed: int = 0

    def add(self, result: AskedRollout) -> None:
        self.rollouts += 1
        self.compared.update(result.compared)
        self.differing.update(question for question, _ in {(d.question, d.turn) for d in result.differences})
        self.differences += result.differences
        self.spliced += result.spliced
        self.replayed += result.replayed
        for key in result.skipped:
            number, first = self.skipped.get(key, (0, result.place))
            self.skipped[key] = (number + 1, first)


@dataclass(eq=False)
class PromptRun(ModelRun[AskedRollout]):
    """The rollouts of logs with what a server says of their prompts; `summary` is complete after the last one."""

    _: KW_ONLY
    replay: int = 8
    """How many tokens of a greedy answer are sampled again."""
    _seen: dict[tuple[int, bytes], None] = field(default_factory=dict, init=False)
    """Prompt and answer of the latest calls, each as its length and hash, the oldest first."""

    def __post_init__(self) -> None:
        self.summary: PromptSummary = PromptSummary(self.provider.name, self.provider.model)

    def finish(self, seconds: float) -> None:
        self.summary.model = self.provider.model or self.summary.model
        if not self.summary.compared and self.summary.skipped:
            (_, because), (number, place) = next(iter(self.summary.skipped.items()))
            raise ProviderError(f"No prompt was compared. {place}: {because} ({number} in all).")

    async def compare(self, work: ModelWork) -> AskedRollout:
        evidence, result = work.evidence, AskedRollout(work.place)
        if evidence is None:
            result.skip(Question.IDS, f"the row cannot be read: {work.error}")
            return result
        if not evidence.rollout.turns:
            result.skip(Question.IDS, "the log holds no calls, so no prompts")
        elif evidence.rollout.stated.dummy_tokens:
            result.skip(Question.IDS, "the ids are placeholders")
        elif states_images(evidence.rollout):
            result.skip(Question.IDS, "it holds images, which ids cannot send")
        if result.skipped:
            return result
        greedy = stated_greedy(work.raw, len(evidence.rollout.turns))
        # Before the first question: a prompt of a later rollout may keep the ids of these calls.
        for seen in [ids for turn in evidence.rollout.turns if (ids := turn.seen_ids) is not None]:
            self._seen[len(seen), blake2b(seen.tobytes(), digest_size=8).digest()] = None
        while len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        for k, turn in enumerate(evidence.rollout.turns):
            if turn.prompt_ids is None or not len(turn.prompt_ids):
                result.skip(Question.IDS, "the log does not hold the prompt")
                continue
            await self._by_ids(result, work, evidence, k, greedy[k])
            await self._by_messages(result, work, evidence, k, turn.prompt_ids)
        return result

    async def _by_ids(
        self, result: AskedRollout, work: ModelWork, evidence: Evidence, k: int, stated: bool | None
    ) -> None:
        """Add what came of a prompt sent as ids: the prompt that the server saw, and its answer."""
        turn = evidence.rollout.turns[k]
        prompt, completion = turn.prompt_ids, turn.completion_ids
        assert prompt is not None
        repeats = isinstance(self.provider, RenderingProvider)
        certain = min(self.replay, _greedy_start(turn, stated))
        if not repeats:
            result.skip(Question.IDS, f"{self.provider.name} does not repeat the prompt that it was given")
        if self.replay and not certain:
            result.skip(Question.REPLAY, "the log does not prove a greedy answer")
        if not certain and not repeats:
            return
        how = SamplingParams(temperature=0.0, max_tokens=max(certain, 1), top_logprobs=2 if certain else 0)
        try:
            answer = await self.provider.generate(prompt.tolist(), how)
        except ProviderError as error:
            if error.prompt_seen is not None:
                theirs = _as_ids(error.prompt_seen)
                result.add(Question.IDS, _differences(Question.IDS, work, evidence, k, prompt, theirs))
            elif error.status in REFUSALS:
                result.skip(Question.IDS, str(error).split("\n")[0])
            else:
                raise
            return
        if repeats:
            result.add(Question.IDS)
        if not certain or completion is None:
            return
        size = min(certain, len(answer.output_ids))
        if not size:
            result.skip(Question.REPLAY, "the server sampled nothing")
            return
        at = next((i for i in range(size) if completion[i] != answer.output_ids[i]), size)
        result.replayed += min(at + 1, size)
        tops = dict(answer.top_logprobs[at]) if at < size and answer.top_logprobs is not None else {}
        # Two runs of one model may choose differently between tokens that it likes as much.
        if at == size or max(tops.values(), default=0.0) - tops.get(int(completion[at]), -np.inf) <= BOUND:
            result.add(Question.REPLAY)
            return
        what = "the server's top choice is another token"
        if turn.completion_logprobs is not None and np.isfinite(turn.completion_logprobs[at]):
            what += (
                f" (logprob {answer.logprobs[at]:.2f}; the log's token was sampled at "
                f"{turn.completion_logprobs[at]:.2f})"
            )
        where = (evidence.rollout.place, k, Where.COMPLETION, at, at + 1)
        sides = ((int(completion[at]),), (answer.output_ids[at],))
        differs = PromptDifference(Question.REPLAY, *where, "", "another choice", what, *sides)
        result.add(Question.REPLAY, (differs,))

    async def _by_messages(
        self, result: AskedRollout, work: ModelWork, evidence: Evidence, k: int, prompt: Ids
    ) -> None:
        """Add how a prompt compares with what the server writes for the messages."""
        rollout, question = evidence.rollout, Question.MESSAGES
        messages = prompt_messages(rollout, k)
        if not messages:
            result.skip(question, "the log does not hold the messages of the call")
        elif messages[-1].sampled:
            result.skip(question, "the messages end with an answer that the prompt may continue")
        elif not isinstance(self.provider, RenderingProvider):
            result.skip(question, f"{self.provider.name} does not render messages")
        else:
            renderer = work.auditor.renderer_for(rollout)
            arguments = {**(renderer.template_args if renderer is not None else {}), **rollout.template_kwargs}
            request: dict[str, Any] = {"messages": [_sent(message) for message in messages]}
            if rollout.tools:
                request["tools"] = [dict(tool) for tool in rollout.tools]
            if arguments:
                request["chat_template_kwargs"] = arguments
            try:
                written = _as_ids(await self.provider.render(request))
            except ProviderError as error:
                if error.status not in (*REFUSALS, 404, 405):
                    raise
                result.skip(question, str(error).split("\n")[0])
                return
            every = _differences(question, work, evidence, k, prompt, written)
            # What a prompt keeps of an earlier call is as it was sampled, however the server would write it.
            before = self._kept_by(prompt) if every else 0
            differing = [differs for differs in every if differs.start >= before]
            result.spliced += bool(every) and not differing
            result.add(question, differing)

    def _kept_by(self, prompt: Ids) -> int:
        """How many ids a prompt has from the longest earlier call of the log that it begins with."""
        longest, hashed, at = 0, blake2b(digest_size=8), 0
        for length in sorted({length for length, _ in self._seen if length <= len(prompt)}):
            hashed.update(prompt[at:length].tobytes())
            at = length
            if (length, hashed.copy().digest()) in self._seen:
                longest = length
        return longest


def _as_ids(server: Sequence[int]) -> Ids:
    """A server's ids as an array; those that no vocabulary has are its largest number."""
    return np.array([min(token, np.iinfo(np.int32).max) for token in server], np.int32)


def _sent(message: Message) -> dict[str, Any]:
    """A message as a request holds it: arguments as text, and reasoning under both names that servers read."""
    sent = dict(message.wire)
    if message.reasoning is not None:
        sent["reasoning"] = message.reasoning
    if message.tool_calls:
        sent["tool_calls"] = calls = [dict(call) for call in sent["tool_calls"]]
        for call in calls:
            function = call.get("function")
            if isinstance(function, Mapping) and not isinstance(function.get("arguments"), str):
                text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
                call["function"] = {**function, "arguments": text}
    return sent


def _differences(
    question: Question, work: ModelWork, evidence: Evidence, k: int, prompt: Ids, server: Ids
) -> tuple[PromptDifference, ...]:
    """Where a server's prompt is not the log's, each place with the cause that a rule names."""
    place = evidence.rollout.place
    if same_ids(prompt, server):
        return ()
    if evidence.vocabulary is None:
        start = common_prefix(prompt, server)
        back = common_prefix(prompt[start:][::-1], server[start:][::-1])
        ours, theirs = (tuple(ids[start : len(ids) - back].tolist()) for ids in (prompt, server))
        unfit = "the tokenizer of -t did not write this log" if work.auditor.misfit is not None else ""
        what = f"other tokens; {unfit or '-t TOKENIZER would name the cause'}"
        where = (Where.PROMPT, start, start + len(ours))
        return (PromptDifference(question, place, k, *where, "", "other tokens", what, ours, theirs),)
    ours_in_text, theirs_in_text = (pieces_of(ids, evidence.vocabulary) for ids in (prompt, server))
    differences = [
        difference(
            stretch, Against.TEMPLATE, Severity.WARNING, "the server was given other tokens than the log holds", k
        )
        for stretch in stretches(ours_in_text, theirs_in_text, align(ours_in_text, theirs_in_text))
    ]
    # The audit may have met the same difference from what the template of -t writes, and proved its cause.
    own = {_key(e): e for e in evidence.explained if (e.difference.where, e.difference.turn) == (Where.PROMPT, k)}
    unlike = k in evidence.rendered and not own and question is Question.MESSAGES
    also = "; the chat template of -t writes what the log holds, so the server has another one" if unlike else ""
    unexplained = replace(evidence, differences=differences, explained=(), memo={})
    out = []
    for explained in explain(unexplained, work.auditor.rules).explained:
        start, end, *sides = _key(explained)
        named = own.get(_key(explained), explained)
        cause = (named.code, named.cause, named.what + also)
        out.append(PromptDifference(question, place, k, Where.PROMPT, start, end, *cause, *sides))
    return tuple(out)


def _key(explained: Explained) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """The same for one difference that was met twice."""
    place = explained.difference
    return place.start, place.end, tuple(place.recorded.ids.tolist()), tuple(place.canonical.ids.tolist())


# What is certain about a greedy answer.


def stated_greedy(raw: RawRow, calls: int) -> list[bool | None]:
    """For each call, whether its row states temperature 0; False if it states what changes the choice, or None."""
    lines: list[Any] = [line.value for line in lines_of(raw)]
    row = lines[0] if len(lines) == 1 else None
    if isinstance(row, Mapping):
        lines = next((row[name] for name in ("calls", "records") if isinstance(row.get(name), list)), lines)
    greedy: list[bool | None] = []
    for call in lines if len(lines) == calls else [None] * calls:
        # The first object that states a temperature has the say.
        stated: list[Mapping[str, Any]] = []
        waiting = [holder for holder in (row, call) if isinstance(holder, Mapping)]
        while waiting:
            stated.append(waiting.pop())
            waiting += [inner for name in _STATED_IN[::-1] if isinstance(inner := stated[-1].get(name), Mapping)]
        temperature = next(
            (place["temperature"] for place in stated if place.get("temperature") is not None), None
        )
        zero = True if type(temperature) in (int, float) and not temperature else None
        greedy.append(False if any(map(_changes_choice, stated)) else zero)
    return greedy


def _changes_choice(stated: Mapping[str, Any]) -> bool:
    """Whether something else than the model has a say in which token is sampled."""
    choice, text, tools = (stated.get(name) for name in ("tool_choice", "text", "tools"))
    forms = [stated.get("response_format"), text.get("format") if isinstance(text, Mapping) else None]
    named = [form for form in forms if isinstance(form, Mapping) and form.get("type") != "text"]
    others = (stated.get(name) for name in _CHANGES_CHOICE if name != "response_format")
    listed = tools if isinstance(tools, list) else ()
    functions = [tool.get("function", tool) for tool in listed if isinstance(tool, Mapping)]
    return bool(
        named
        or any(value and value != 1 for value in others)
        or (choice.get("type") if isinstance(choice, Mapping) else choice) not in (None, "auto", "none")
        or any(isinstance(function, Mapping) and function.get("strict") for function in functions)
    )


def _greedy_start(turn: Turn, stated: bool | None) -> int:
    """How many tokens an answer begins with that were certainly the top choice of the model that sampled it."""
    ids, values = turn.completion_ids, turn.completion_logprobs
    if ids is None or turn.ids_from is not IdsFrom.LOGGED or stated is False:
        return 0
    if stated:
        return len(ids)
    if values is None or not len(values) or ((values == values[0]).all() and (len(values) > 1 or values[0] == 0)):
        return 0  # a column of one value is a placeholder
    sentinel = next((column.sentinel for column in turn.columns if column.role == "logprobs"), None)
    with np.errstate(invalid="ignore"):
        certain = (values > _MAJORITY) & (values <= _ROUNDING) & (values != sentinel)
    return len(certain) if certain.all() else int(certain.argmin())
