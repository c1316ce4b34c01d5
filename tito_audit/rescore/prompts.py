"""`rescore --prompts`: logged prompts sent back to a server as ids and as messages; greedy answers replayed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import numpy as np

from tito_audit.align.alignment import align
from tito_audit.errors import ProviderError
from tito_audit.evidence.differences import difference, stretches
from tito_audit.evidence.images import has_images
from tito_audit.evidence.model import Against, Evidence, Explained
from tito_audit.evidence.reference import pieces_of
from tito_audit.join import rows_behind
from tito_audit.provider import SamplingParams
from tito_audit.record.arrays import Ids
from tito_audit.record.finding import Severity, Where
from tito_audit.record.prefix import common_prefix, same_ids
from tito_audit.record.rollout import IdsFrom, Place, Turn
from tito_audit.rescore.journal import REFUSALS
from tito_audit.rescore.model import TOLERANCE
from tito_audit.rescore.run import ModelRun, RolloutToCompare
from tito_audit.run.check import explain_differences
from tito_audit.storage.row import RawRow
from tito_audit.ways.observations import prompt_messages

_MAJORITY = -0.6
"""A token with a logprob above this has more than half of the probability, so it is the top choice."""
_ROUNDING = 1e-3
_CHOICE_FIELDS = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens"),
    *("ignore_eos", "allowed_token_ids", "structured_outputs", "response_format", "structural_tag", "regex"),
    *("json_schema", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "forced"),
    *("guided_decoding", "thinking_token_budget", "output_format"),
)
"""Fields of a request or of the gateway's log that let something else than the model choose a token."""
_STATED_IN = ("sampling", "sampling_params", "request", "extra_body")
_MAX_SEEN = 1 << 18
"""How many calls are remembered, as later prompts may begin with their ids."""


class Question(StrEnum):
    """How a call is compared with a server."""

    IDS = "sent as ids"
    MESSAGES = "sent as messages"
    REPLAY = "replayed greedily"


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """One place where a server's tokens are not the log's."""

    question: Question
    place: Place
    turn: int
    where: Where
    start: int
    end: int
    """The tokens of the log that the server does not have, half-open."""
    code: str
    """The rule that names the cause; "" if none does."""
    cause: str
    what: str
    recorded: tuple[int, ...]
    server: tuple[int, ...]

    def __str__(self) -> str:
        code = f"{self.code} " if self.code else ""
        return f"{code}{self.place} turn {self.turn} {self.where} {self.start}:{self.end}"


@dataclass(slots=True)
class AskedRollout:
    """How the calls of one rollout compare with a server."""

    place: Place
    compared: list[Question] = field(default_factory=list)
    """An entry for every comparison that was made."""
    differences: list[PromptDifference] = field(default_factory=list)
    skipped: list[tuple[Question, str]] = field(default_factory=list)
    """An entry for every comparison that could not be made, with the reason."""
    spliced: int = 0
    """How many prompts differ only in tokens that they keep from an earlier call."""
    replayed: int = 0
    """How many tokens were sampled again."""

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
    """How many calls have a difference."""
    differences: list[PromptDifference] = field(default_factory=list)
    skipped: dict[tuple[Question, str], tuple[int, Place]] = field(default_factory=dict)
    """How many calls were not compared, and the first of them, by question and reason."""
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
    """Compares the prompts of logs with a server, rollout by rollout; `summary` is complete after the last one."""

    _: KW_ONLY
    replay: int = 8
    """How many tokens of a greedy answer are sampled again."""
    _seen: dict[tuple[int, bytes], None] = field(default_factory=dict, init=False)
    """The latest calls, the oldest first: the length and hash of prompt and answer."""

    def __post_init__(self) -> None:
        self.summary: PromptSummary = PromptSummary(self.provider.name, self.provider.model)

    def finish(self, seconds: float) -> None:
        self.summary.model = self.provider.model or self.summary.model
        if not self.summary.compared and self.summary.skipped:
            (_, because), (number, place) = next(iter(self.summary.skipped.items()))
            raise ProviderError(f"No prompt was compared. {place}: {because} ({number} in all).")

    async def compare(self, work: RolloutToCompare) -> AskedRollout:
        evidence, result = work.evidence, AskedRollout(work.place)
        if evidence is None:
            result.skip(Question.IDS, f"the row cannot be read: {work.error}")
            return result
        if not evidence.rollout.turns:
            result.skip(Question.IDS, "the log holds no calls, so no prompts")
        elif evidence.rollout.stated.dummy_tokens:
            result.skip(Question.IDS, "the ids are placeholders")
        elif has_images(evidence.rollout):
            result.skip(Question.IDS, "it holds images, which ids cannot send")
        if result.skipped:
            return result
        greedy = greedy_calls(work.raw, len(evidence.rollout.turns))
        # Before the first await: prompts of later rollouts may begin with the ids of these calls.
        for turn in evidence.rollout.turns:
            if (seen := turn.seen_ids) is not None:
                self._seen[len(seen), blake2b(seen.tobytes(), digest_size=8).digest()] = None
        while len(self._seen) > _MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        for k, turn in enumerate(evidence.rollout.turns):
            if turn.prompt_ids is None or not len(turn.prompt_ids):
                result.skip(Question.IDS, "the log does not hold the prompt")
                continue
            await self._ask_by_ids(result, work, evidence, k, greedy[k])
            await self._ask_by_messages(result, work, evidence, k, turn.prompt_ids)
        return result

    async def _ask_by_ids(
        self, result: AskedRollout, work: RolloutToCompare, evidence: Evidence, k: int, stated: bool | None
    ) -> None:
        """Send a prompt as ids; compare what the server saw, and how its greedy answer begins."""
        turn = evidence.rollout.turns[k]
        prompt, completion = turn.prompt_ids, turn.completion_ids
        assert prompt is not None
        repeats = hasattr(self.provider, "render")  # such servers also repeat the ids that they were sent
        certain = min(self.replay, _count_greedy(turn, stated))
        if not repeats:
            result.skip(Question.IDS, f"{self.provider.name} does not repeat the prompt that it was given")
        if self.replay and not certain:
            result.skip(Question.REPLAY, "the log does not prove a greedy answer")
        if not certain and not repeats:
            return
        sampling = SamplingParams(temperature=0.0, max_tokens=max(certain, 1), top_logprobs=2 if certain else 0)
        try:
            answer = await self.provider.generate(prompt.tolist(), sampling)
        except ProviderError as error:
            if error.prompt_seen is not None:
                seen_ids = _clip_ids(error.prompt_seen)
                result.add(Question.IDS, _differences(Question.IDS, work, evidence, k, prompt, seen_ids))
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
        # Two runs of one model may choose differently between equally likely tokens.
        if at == size or max(tops.values(), default=0.0) - tops.get(int(completion[at]), -np.inf) <= TOLERANCE:
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

    async def _ask_by_messages(
        self, result: AskedRollout, work: RolloutToCompare, evidence: Evidence, k: int, prompt: Ids
    ) -> None:
        """Compare a prompt with what the server renders for its messages."""
        rollout, question = evidence.rollout, Question.MESSAGES
        messages = prompt_messages(rollout, k)
        if not messages:
            result.skip(question, "the log does not hold the messages of the call")
            return
        if messages[-1].sampled:
            result.skip(question, "the messages end with an answer that the prompt may continue")
            return
        render = getattr(self.provider, "render", None)
        if render is None:
            result.skip(question, f"{self.provider.name} does not render messages")
            return
        renderer = work.auditor.renderer_for(rollout)
        arguments = {**(renderer.template_args if renderer is not None else {}), **rollout.template_kwargs}
        request: dict[str, Any] = {"messages": []}
        for message in messages:  # arguments as text, and reasoning under both names that servers read
            sent = dict(message.wire)
            if message.reasoning is not None:
                sent["reasoning"] = message.reasoning
            if message.tool_calls:
                sent["tool_calls"] = [dict(call) for call in sent["tool_calls"]]
                for call in sent["tool_calls"]:
                    function = call.get("function")
                    if isinstance(function, Mapping) and not isinstance(function.get("arguments"), str):
                        text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
                        call["function"] = {**function, "arguments": text}
            request["messages"].append(sent)
        if rollout.tools:
            request["tools"] = [dict(tool) for tool in rollout.tools]
        if arguments:
            request["chat_template_kwargs"] = arguments
        try:
            written = _clip_ids(await render(request))
        except ProviderError as error:
            if error.status not in (*REFUSALS, 404, 405):
                raise
            result.skip(question, str(error).split("\n")[0])
            return
        every = _differences(question, work, evidence, k, prompt, written)
        # The ids that a prompt keeps of an earlier call are right, however the server would write them.
        longest, hashed, at = 0, blake2b(digest_size=8), 0
        for length in sorted({length for length, _ in self._seen if length <= len(prompt)}) if every else ():
            hashed.update(prompt[at:length].tobytes())
            at = length
            if (length, hashed.copy().digest()) in self._seen:
                longest = length
        differing = [differs for differs in every if differs.start >= longest]
        result.spliced += bool(every) and not differing
        result.add(question, differing)


def _clip_ids(server: Sequence[int]) -> Ids:
    """A server's ids as an array; ids above int32, which no vocabulary has, become its largest number."""
    return np.array([min(token, np.iinfo(np.int32).max) for token in server], np.int32)


def _differences(
    question: Question, work: RolloutToCompare, evidence: Evidence, k: int, prompt: Ids, server: Ids
) -> tuple[PromptDifference, ...]:
    """Where a server's prompt differs from the log's, with the causes that rules name."""
    place = evidence.rollout.place
    if same_ids(prompt, server):
        return ()
    if evidence.vocabulary is None:
        start = common_prefix(prompt, server)
        back = common_prefix(prompt[start:][::-1], server[start:][::-1])
        recorded, seen_ids = (tuple(ids[start : len(ids) - back].tolist()) for ids in (prompt, server))
        unfit = "the tokenizer of -t did not write this log" if work.auditor.misfit is not None else ""
        what = f"other tokens; {unfit or '-t TOKENIZER would name the cause'}"
        where = (Where.PROMPT, start, start + len(recorded))
        return (PromptDifference(question, place, k, *where, "", "other tokens", what, recorded, seen_ids),)
    recorded_pieces, server_pieces = (pieces_of(ids, evidence.vocabulary) for ids in (prompt, server))
    differences = [
        difference(
            stretch, Against.TEMPLATE, Severity.WARNING, "the server was given other tokens than the log holds", k
        )
        for stretch in stretches(recorded_pieces, server_pieces, align(recorded_pieces, server_pieces))
    ]
    # The audit may have met the same difference from what the template of -t writes, and proved its cause.
    here = (Where.PROMPT, k)
    audited = {_place(e): e for e in evidence.explained if (e.difference.where, e.difference.turn) == here}
    unlike = k in evidence.rendered and not audited and question is Question.MESSAGES
    also = "; the chat template of -t writes what the log holds, so the server has another one" if unlike else ""
    unexplained = replace(evidence, differences=differences, explained=(), memo={})
    out = []
    for explained in explain_differences(unexplained, work.auditor.rules).explained:
        start, end, *sides = _place(explained)
        named = audited.get(_place(explained), explained)
        cause = (named.code, named.cause, named.what + also)
        out.append(PromptDifference(question, place, k, Where.PROMPT, start, end, *cause, *sides))
    return tuple(out)


def _place(explained: Explained) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Identifies a difference: its start and end, and the ids of both sides."""
    place = explained.difference
    return place.start, place.end, tuple(place.recorded.ids.tolist()), tuple(place.canonical.ids.tolist())


# Which tokens were certainly sampled greedily.


def greedy_calls(raw: RawRow, calls: int) -> list[bool | None]:
    """Whether each call was sampled greedily: True if the log states temperature 0, None if it states nothing, and
    False if it states something that lets another than the top token win."""
    lines: list[Any] = [line.value for line in rows_behind(raw)]
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
        temperatures = (holder.get("temperature") for holder in stated)
        temperature = next((value for value in temperatures if value is not None), None)
        zero = True if type(temperature) in (int, float) and not temperature else None
        greedy.append(False if any(map(_restricts_choice, stated)) else zero)
    return greedy


def _restricts_choice(stated: Mapping[str, Any]) -> bool:
    """Whether a request has penalties, biases, a grammar or forced calls, which change the top token."""
    choice, text, tools = (stated.get(name) for name in ("tool_choice", "text", "tools"))
    forms = [stated.get("response_format"), text.get("format") if isinstance(text, Mapping) else None]
    named = [form for form in forms if isinstance(form, Mapping) and form.get("type") != "text"]
    others = (stated.get(name) for name in _CHOICE_FIELDS if name != "response_format")
    listed = tools if isinstance(tools, list) else ()
    functions = [tool.get("function", tool) for tool in listed if isinstance(tool, Mapping)]
    return bool(
        named
        or any(value and value != 1 for value in others)
        or (choice.get("type") if isinstance(choice, Mapping) else choice) not in (None, "auto", "none")
        or any(isinstance(function, Mapping) and function.get("strict") for function in functions)
    )


def _count_greedy(turn: Turn, stated: bool | None) -> int:
    """How many of the first tokens of an answer were certainly the model's top choice."""
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
