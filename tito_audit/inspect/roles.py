"""Roles: what each column holds, guessed from known names, values and lengths, with the reason."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tito_audit.formats import COMPLETION_IDS, FLAT_IDS, LOGPROBS, MASKS, PROMPT_IDS, STALE
from tito_audit.inspect.columns import Column, Item, Look, NumberFacts
from tito_audit.inspect.decoys import Beside, InVocabulary, may_be_shared_prompt, no_loss_mask, no_tokens, varies
from tito_audit.inspect.relations import Parts, Relation, RelationKind


class Role(StrEnum):
    """What a column holds."""

    IDS = "ids"
    PROMPT_IDS = "prompt ids"
    COMPLETION_IDS = "completion ids"
    MASK = "mask"
    LOGPROBS = "logprobs"
    MESSAGES = "messages"
    TOOLS = "tools"
    CALLS = "calls"
    PER_TOKEN = "per token"  # something else with one entry per token
    ATTENTION = "attention mask"
    POSITIONS = "positions"
    OFFSETS = "offsets"
    LENGTH = "length"
    MODEL = "model"
    FINISH_REASON = "finish reason"
    TEXT = "text"
    SCALAR = "scalar"
    LIST = "list"
    OBJECT = "object"
    NOTHING = "empty"


@dataclass(frozen=True, slots=True)
class RoleGuess:
    """The guessed role of a column, and why."""

    role: Role
    because: str = ""
    alignment: str = ""
    """Which tokens its entries describe: full, response, call, sampled or shifted; "" if unknown."""


_MOST = 32
"""Maximum id columns compared with each other."""

_FEW_VALUES = 8
"""Logprobs rarely repeat: a column with fewer distinct values needs a telling name."""

Roles = dict[str, RoleGuess]
"""By path."""

_PROMPT = re.compile(
    r"prompt|input|query|quer(?:y|ies)|context|ctx|source|request|question|problem|instruct|observ|(?:^|_)(?:in|obs|req)(?:_|$)",
    re.IGNORECASE,
)
_COMPLETION = re.compile(
    r"complet|respon|output|generat|gen_|answer|action|sampled|target|(?:^|_)(?:out|res|resp|reply)(?:$|_)",
    re.IGNORECASE,
)
_WHOLE = re.compile(r"seq|full|all|whole|traj|input|token_?ids|^tokens$|pack|row|concat", re.IGNORECASE)
_OTHERS_IDS = re.compile(r"distill|teacher|top_?[kp]|ref_|expert|chosen|rejected|position|segment", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn|pad", re.IGNORECASE)
_MASK = re.compile(r"mask|label|train|loss|weight", re.IGNORECASE)
_LOGPROB = re.compile(r"log_?p|logit|(?:^|_)lps?(?:$|_)", re.IGNORECASE)
_OTHER_SCORES = re.compile(
    r"advantage|reward|return|value|entrop|kl|temperature|version|ratio|score|^ref|teacher|trainer|prev_|old_"
    r"|prompt_?l|top_?\d*_?l|cum",
    re.IGNORECASE,
)


def roles_of(
    columns: Sequence[Column],
    items: Sequence[Item],
    facts: Mapping[str, NumberFacts],
    relations: Sequence[Relation],
    texts: Sequence[int] = (),
    in_vocabulary: InVocabulary | None = None,
) -> Roles:
    """The role of each column of one scope.

    `texts` are the characters of text by row where objects are rows; `in_vocabulary` says which ids are in it.
    """
    numbers = {column.path: column for column in columns if column.path in facts}
    scope = _Scope(items, numbers, facts, relations, varies(columns), texts, in_vocabulary, {})
    roles = {column.path: _without_numbers(column) for column in columns if column.path not in facts}
    ids = scope.ids()
    roles.update(ids)
    first = {guess.role: path for path, guess in reversed(ids.items())}
    tokens = _Tokens(*map(first.get, (Role.IDS, Role.PROMPT_IDS, Role.COMPLETION_IDS)))
    for column in columns:
        if column.path in facts and column.path not in roles:
            roles[column.path] = scope.guess(column, tokens)
    for relation in relations:
        if relation.kind is RelationKind.LENGTH:
            roles[relation.paths[0]] = RoleGuess(Role.LENGTH, f"always the length of {relation.paths[1]}")
    return roles


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The id columns that other columns are compared with."""

    whole: str | None
    prompt: str | None
    answer: str | None


@dataclass(frozen=True, slots=True)
class _Scope(Parts):
    """Compares the number lists of one scope."""

    columns: Mapping[str, Column]
    facts: Mapping[str, NumberFacts]
    relations: Sequence[Relation]
    varies: bool
    """Whether any column differs from row to row."""
    texts: Sequence[int]
    in_vocabulary: InVocabulary | None
    decoys: dict[str, str]
    """By path: why a list of integers does not hold tokens."""

    def ids(self) -> Roles:
        """The roles of id columns: the whole sequence, prompt or completion."""
        columns = self._without_decoys(
            {
                path: column
                for path, column in self.columns.items()
                if self.facts[path].look is Look.IDS and not _OTHERS_IDS.search(column.name)
            }
        )
        compared = dict(list(columns.items())[:_MOST])
        roles: Roles = {path: self._by_name(column) for path, column in columns.items()}
        for relation in self.relations:
            if relation.kind is not RelationKind.SUM or not set(relation.paths) <= columns.keys():
                continue
            left, right, whole = relation.paths
            for first, second in ((left, right), (right, left)):
                if self.is_start(first, whole) and self.is_end(second, whole):
                    roles[whole] = RoleGuess(Role.IDS, f"{first}, then {second}", "full")
                    roles[first] = RoleGuess(Role.PROMPT_IDS, f"{whole} starts with it")
                    roles[second] = RoleGuess(Role.COMPLETION_IDS, f"{whole} ends with it", "response")
        for path in compared:
            if roles[path].role is Role.IDS and roles[path].alignment != "full":
                roles[path] = self._part_of(path, compared) or roles[path]
        # The roles, corrected where names alone contradict: a prompt without completion, two whole sequences.
        by_role = {role: [p for p, guess in roles.items() if guess.role is role] for role in Role}
        wholes, prompts, answers = by_role[Role.IDS], by_role[Role.PROMPT_IDS], by_role[Role.COMPLETION_IDS]
        if len(wholes) == 1 and answers and not prompts and self.columns[wholes[0]].name == "input_ids":
            # SGLang and the TI/TO provider call the prompt `input_ids`.
            roles[wholes[0]] = RoleGuess(Role.PROMPT_IDS, f"{roles[wholes[0]].because}; {answers[0]} continues it")
        elif len(wholes) == 1 and answers and not prompts and not any(self.holds(wholes[0], a) for a in answers):
            because = f"{roles[wholes[0]].because}; {answers[0]} is not part of it"
            roles[wholes[0]] = RoleGuess(Role.PROMPT_IDS, because)
        elif len(wholes) == 2 and not prompts and not answers and (scored := self._scored_alone(*wholes)):
            prompt = next(path for path in wholes if path != scored)
            roles[prompt] = RoleGuess(Role.PROMPT_IDS, f"{roles[prompt].because}; only {scored} has logprobs")
            roles[scored] = RoleGuess(Role.COMPLETION_IDS, f"{roles[scored].because}; it has logprobs", "call")
        elif len(wholes) == 1 and not prompts and not answers and self._sampled_alone(wholes[0]):
            because = f"{roles[wholes[0]].because}; every token has a logprob"
            roles[wholes[0]] = RoleGuess(Role.COMPLETION_IDS, because, "call")
        elif len(prompts) == 1 and not answers and not wholes:
            roles[prompts[0]] = RoleGuess(Role.IDS, f"{roles[prompts[0]].because}; there is no completion", "full")
        elif len(prompts) == len(wholes) == 1 and not answers and not self.is_start(prompts[0], wholes[0]):
            because = f"{roles[wholes[0]].because}; does not start with {prompts[0]}"
            roles[wholes[0]] = RoleGuess(Role.COMPLETION_IDS, because, "call")
        return {
            path: RoleGuess(guess.role, guess.because, "full") if guess.role is Role.IDS else guess
            for path, guess in roles.items()
        }

    def _part_of(self, path: str, others: Collection[str]) -> RoleGuess | None:
        """The role of a list that another one starts or ends with; None if none does."""
        longer = [other for other in others if other != path and self.is_longer(other, path)]
        if whole := next((other for other in longer if self.is_start(path, other)), None):
            return RoleGuess(Role.PROMPT_IDS, f"{whole} starts with it")
        if whole := next((other for other in longer if self.is_end(path, other)), None):
            return RoleGuess(Role.COMPLETION_IDS, f"{whole} ends with it", "response")
        return None

    def _without_decoys(self, columns: dict[str, Column]) -> dict[str, Column]:
        """The columns without decoys; a prompt may be the same in all rows."""
        why = {path: no_tokens(column, self.facts[path], self._beside(path)) for path, column in columns.items()}
        likely = {path: column for path, column in columns.items() if not why[path]}
        for path, column in columns.items():
            if why[path].startswith("the same list") and any(other != path for other in likely):
                shared = _PROMPT.search(column.name) and may_be_shared_prompt(column.arrays)
                if shared or any(self.is_longer(p, path) and self.is_start(path, p) for p in likely):
                    why[path] = ""
        for path in likely:
            if follows := next((p for p in likely if p != path and not why[p] and self.is_next(path, p)), None):
                why[path] = f"the next token of {follows}"
        self.decoys.update({path: reason for path, reason in why.items() if reason})
        return {path: column for path, column in columns.items() if not why[path]}

    def _beside(self, path: str) -> Beside:
        per_token = (Look.LOGPROBS, Look.MASK, Look.LABELS)
        aligned = any(
            (
                relation.varied
                or _MASK.search(self.columns[other].name)
                or _LOGPROB.search(self.columns[other].name)
            )
            and self.facts[other].look in per_token
            and (self.facts[other].distinct > 1 or _LOGPROB.search(self.columns[other].name))
            for relation in self.relations
            if relation.kind is RelationKind.EQUAL and path in relation.paths
            for other in relation.paths
            if other != path and other in self.facts
        )
        return Beside(aligned, self.varies, self.texts, self.in_vocabulary)

    def _scored_alone(self, left: str, right: str) -> str | None:
        """Which of two disjoint lists of ids has logprobs; None if neither or both."""
        if self.holds(left, right) or self.holds(right, left):
            return None
        scored = [
            path
            for path in (left, right)
            if (
                any(
                    self.facts[other].look is Look.LOGPROBS and not _OTHER_SCORES.search(self.columns[other].name)
                    for other in self._as_long_as(path)
                )
            )
        ]
        return scored[0] if len(scored) == 1 else None

    def _sampled_alone(self, path: str) -> bool:
        """Whether a list holds only what was sampled: no mask, and no token without a logprob."""
        if _WHOLE.search(self.columns[path].name):
            return False
        beside = [self.facts[other] for other in self._as_long_as(path)]
        masked = any(fact.look in (Look.MASK, Look.LABELS) for fact in beside)
        scored = [fact for fact in beside if fact.look is Look.LOGPROBS]
        return not masked and bool(scored) and all(fact.high < 0 and not fact.nulls for fact in scored)

    def _as_long_as(self, path: str) -> list[str]:
        """The number lists that are as long as this one, list by list."""
        equal = (r.paths for r in self.relations if r.kind is RelationKind.EQUAL and path in r.paths)
        return [other for paths in equal for other in paths if other != path and other in self.facts]

    def _by_name(self, column: Column) -> RoleGuess:
        name = column.name
        span = f"{self.facts[column.path].low:.0f} to {self.facts[column.path].high:.0f}"
        if name in FLAT_IDS:
            return RoleGuess(Role.IDS, f"{span}; by its name")
        if name in PROMPT_IDS:
            return RoleGuess(Role.PROMPT_IDS, f"{span}; by its name")
        if name in COMPLETION_IDS:
            return RoleGuess(Role.COMPLETION_IDS, f"{span}; by its name", "call")
        # The name itself says more than that of the object around it.
        for key in (name, *reversed([key for key in column.keys[:-1] if key not in ("[]", name)])):
            if _COMPLETION.search(key):
                return RoleGuess(Role.COMPLETION_IDS, f"{span}; by its name", "call")
            if _PROMPT.search(key):
                return RoleGuess(Role.PROMPT_IDS, f"{span}; by its name")
        return RoleGuess(Role.IDS, span)

    def guess(self, column: Column, tokens: _Tokens) -> RoleGuess:
        """The role of a number column without ids."""
        path, name = column.path, column.name
        fact = self.facts[path]
        alignment = self._alignment(path, tokens)
        fits = bool(alignment)
        if name in MASKS and fact.look is Look.NUMBERS and fact.low >= 0 and fact.high <= 1:
            return RoleGuess(Role.MASK, "weights from 0 to 1; by its name", alignment)
        if fact.look in (Look.MASK, Look.LABELS) and name not in STALE:
            if _ATTENTION.search(name):
                return RoleGuess(Role.ATTENTION, "0 and 1; by its name", alignment)
            values = "-100 and ids" if fact.look is Look.LABELS else "0 and 1"
            if name in MASKS:
                return RoleGuess(Role.MASK, f"{values}; by its name", alignment)
            if fits and (why := self._no_loss_mask(column, tokens)):
                return RoleGuess(Role.PER_TOKEN, f"{values}; {why}", alignment)
            if fits and _MASK.search(name):
                return RoleGuess(Role.MASK, f"{values}; by its name", alignment)
            if fits and fact.distinct > 1 and not _OTHER_SCORES.search(name):
                return RoleGuess(Role.MASK, f"{values}; as long as the ids", alignment)
        if fact.look is Look.POSITIONS and fits:
            return RoleGuess(Role.POSITIONS, "0, 1, 2, …", alignment)
        if any(r.kind is RelationKind.OFFSETS and r.paths[0] == path for r in self.relations):
            return RoleGuess(Role.OFFSETS, "rising from 0 to the length of another list")
        is_score = bool(_OTHER_SCORES.search(name)) or name in STALE
        if name in LOGPROBS and name not in STALE and (fact.look is not Look.IDS):
            return RoleGuess(Role.LOGPROBS, "by its name", alignment)
        if fact.look is Look.LOGPROBS and not is_score:
            if _LOGPROB.search(name):
                return RoleGuess(Role.LOGPROBS, "by its name", alignment)
            if fits and not fact.constant and fact.distinct > min(_FEW_VALUES, fact.count // 4):
                return RoleGuess(Role.LOGPROBS, "never above 0; as long as the ids", alignment)
        why = self.decoys.get(path, "")
        if fits:
            return RoleGuess(
                Role.PER_TOKEN, f"as long as the ids; {why}" if why else "as long as the ids", alignment
            )
        return RoleGuess(Role.LIST, why)

    def _no_loss_mask(self, column: Column, tokens: _Tokens) -> str:
        """Why flags next to the ids are not a loss mask; "" if they may be."""
        if self.facts[column.path].look is Look.LABELS:
            return ""
        lists = [
            (item.lists.get(column.path), item.lists.get(tokens.whole or tokens.answer or ""))
            for item in self.items
        ]
        filled = [(flags, ids) for flags, ids in lists if flags is not None and len(flags)]
        return no_loss_mask(column.name, [flags for flags, _ in filled], [ids for _, ids in filled])

    def _alignment(self, path: str, tokens: _Tokens) -> str:
        """Which tokens entries describe, judged by lengths; "" if they fit none."""
        whole, answer = tokens.whole, tokens.answer
        if whole is not None and (path == whole or self._related(RelationKind.EQUAL, path, whole)):
            return "full"
        if answer is not None and self._related(RelationKind.EQUAL, path, answer):
            return "call" if whole is None else "response"
        if any(r.kind is RelationKind.SAMPLED and r.paths[0] == path for r in self.relations):
            return "sampled"
        if whole is None:
            return "full" if self._covers(path, tokens) else ""
        if any(r.kind is RelationKind.MINUS_ONE and r.paths == (path, whole) for r in self.relations):
            return "shifted"
        # A response after a prompt that the row does not give as ids: shorter, with similar columns as long.
        name = self.columns[path].name
        if self.is_longer(whole, path) and (name in MASKS or name in LOGPROBS):
            return "response"
        partners = (r.paths for r in self.relations if r.kind is RelationKind.EQUAL and path in r.paths)
        names = {*MASKS, *LOGPROBS}
        if self.is_longer(whole, path) and any(
            self.columns[p].name in names for paths in partners for p in paths if p in self.columns and p != path
        ):
            return "response"
        return ""

    def _covers(self, path: str, tokens: _Tokens) -> bool:
        """Whether a list is as long as prompt and completion together."""
        names = (path, tokens.prompt or "", tokens.answer or "")
        sizes = [[item.lengths.get(name) for name in names] for item in self.items]
        full = [(own, prompt + answer) for own, prompt, answer in sizes if own and prompt and answer]
        return bool(full) and 4 * sum(own == both for own, both in full) > 3 * len(full)

    def _related(self, kind: RelationKind, *paths: str) -> bool:
        return any(r.kind is kind and set(paths) <= set(r.paths) for r in self.relations)


def _without_numbers(column: Column) -> RoleGuess:
    """The role of a column without number lists."""
    name, sample = column.name, column.samples[0] if column.samples else None
    if not +column.types:
        return RoleGuess(Role.NOTHING, "always null")
    if isinstance(sample, list | tuple) and len(sample) and isinstance(sample[0], Mapping):
        objects = [entry for entry in sample[:16] if isinstance(entry, Mapping)]
        if all("role" in entry for entry in objects):
            return RoleGuess(Role.MESSAGES, "objects with a role")
        if all(_is_tool(entry) for entry in objects):
            return RoleGuess(Role.TOOLS, "objects with a function")
        if any({*PROMPT_IDS, *COMPLETION_IDS} & entry.keys() for entry in objects):
            return RoleGuess(Role.CALLS, "objects with the ids of a call")
        return RoleGuess(Role.LIST, "objects")
    if isinstance(sample, Mapping):
        return RoleGuess(Role.OBJECT)
    if column.lengths:
        return RoleGuess(Role.LIST)
    if column.types["text of JSON (list)"]:
        return RoleGuess(Role.TEXT, "a list written as text")
    if isinstance(sample, str):
        if name in ("model", "model_name", "model_id"):
            return RoleGuess(Role.MODEL)
        if name in ("finish_reason", "stop_reason"):
            return RoleGuess(Role.FINISH_REASON)
        return RoleGuess(Role.TEXT)
    return RoleGuess(Role.SCALAR)


def _is_tool(entry: Mapping[str, Any]) -> bool:
    """Whether this is a tool definition; a tool call has arguments."""
    function = entry.get("function")
    if isinstance(function, Mapping):
        return "arguments" not in function
    return {"name", "parameters"} <= entry.keys()
