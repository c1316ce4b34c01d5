"""Roles: what each column is for, guessed from known names, values and lengths, with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tito_audit.align.prefix import starts_with
from tito_audit.formats import COMPLETION_IDS, FLAT_IDS, LOGPROBS, MASKS, PROMPT_IDS, STALE
from tito_audit.inspect.columns import Column, Item, Numbers
from tito_audit.inspect.facts import Facts, Look
from tito_audit.inspect.relations import Relation, RelationKind


class Role(StrEnum):
    """What a column is for."""

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
class Guess:
    """The guessed role of a column, and why."""

    role: Role
    because: str = ""
    alignment: str = ""
    """Which tokens its entries describe: full, response, call, sampled or shifted; "" if unknown."""


_MOST = 32
"""Maximum id columns compared with each other."""

Roles = dict[str, Guess]
"""By path."""

_PROMPT = re.compile(r"prompt|input|query|quer(?:y|ies)|context|source|request", re.IGNORECASE)
_COMPLETION = re.compile(
    r"complet|respon|output|generat|gen_|answer|action|sampled|target|(?:^|_)out(?:$|_)", re.IGNORECASE
)
_OTHERS_IDS = re.compile(r"distill|teacher|top_?[kp]|ref_|expert|chosen|rejected|position|segment", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn|pad", re.IGNORECASE)
_MASK = re.compile(r"mask|label|train|loss|weight", re.IGNORECASE)
_LOGPROB = re.compile(r"log_?p|logit|(?:^|_)lps?(?:$|_)", re.IGNORECASE)
_OTHER_SCORES = re.compile(
    r"advantage|reward|return|value|entrop|kl|temperature|version|ratio|score|^ref|teacher|trainer|prev_|old_",
    re.IGNORECASE,
)


def roles_of(
    columns: Sequence[Column], items: Sequence[Item], facts: Mapping[str, Facts], relations: Sequence[Relation]
) -> Roles:
    """The role of each column of one scope."""
    scope = _Scope({column.path: column for column in columns if column.path in facts}, items, facts, relations)
    roles = {column.path: _without_numbers(column) for column in columns if column.path not in facts}
    ids = scope.ids()
    roles.update(ids)
    whole = next((path for path, guess in ids.items() if guess.role is Role.IDS), None)
    answer = next((path for path, guess in ids.items() if guess.role is Role.COMPLETION_IDS), None)
    for column in columns:
        if column.path in facts and column.path not in roles:
            roles[column.path] = scope.guess(column, whole, answer)
    for relation in relations:
        if relation.kind is RelationKind.LENGTH:
            roles[relation.paths[0]] = Guess(Role.LENGTH, f"always the length of {relation.paths[1]}")
    return roles


@dataclass(frozen=True, slots=True)
class _Scope:
    """The number lists of one scope, compared with each other."""

    columns: Mapping[str, Column]
    items: Sequence[Item]
    facts: Mapping[str, Facts]
    relations: Sequence[Relation]

    def ids(self) -> Roles:
        """The roles of id columns: the whole sequence, prompt or completion."""
        found = {
            path: column
            for path, column in self.columns.items()
            if self.facts[path].look is Look.IDS and not _OTHERS_IDS.search(column.name)
        }
        compared = dict(list(found.items())[:_MOST])
        roles: Roles = {path: self._by_name(column) for path, column in found.items()}
        for relation in self.relations:
            if relation.kind is not RelationKind.SUM or not set(relation.paths) <= found.keys():
                continue
            one, two, whole = relation.paths
            for first, second in ((one, two), (two, one)):
                if self._is_start(first, whole) and self._is_end(second, whole):
                    roles[whole] = Guess(Role.IDS, f"{first}, then {second}", "full")
                    roles[first] = Guess(Role.PROMPT_IDS, f"{whole} starts with it")
                    roles[second] = Guess(Role.COMPLETION_IDS, f"{whole} ends with it", "response")
        for path in compared:
            guess = roles[path]
            whole = next((p for p in compared if p != path and self._is_longer(p, path)), "")
            if guess.role is Role.IDS and guess.alignment != "full" and whole:
                if self._is_start(path, whole):
                    roles[path] = Guess(Role.PROMPT_IDS, f"{whole} starts with it")
                elif self._is_end(path, whole):
                    roles[path] = Guess(Role.COMPLETION_IDS, f"{whole} ends with it", "response")
        return self._settled(roles)

    def _by_name(self, column: Column) -> Guess:
        name = column.name
        said = f"{self.facts[column.path].low:.0f} to {self.facts[column.path].high:.0f}"
        if name in FLAT_IDS:
            return Guess(Role.IDS, f"{said}; by its name")
        if name in PROMPT_IDS:
            return Guess(Role.PROMPT_IDS, f"{said}; by its name")
        if name in COMPLETION_IDS:
            return Guess(Role.COMPLETION_IDS, f"{said}; by its name", "call")
        if _COMPLETION.search(name):
            return Guess(Role.COMPLETION_IDS, f"{said}; by a word in its name", "call")
        if _PROMPT.search(name):
            return Guess(Role.PROMPT_IDS, f"{said}; by a word in its name")
        return Guess(Role.IDS, said)

    def _settled(self, roles: Roles) -> Roles:
        """The roles, corrected where names alone contradict: a prompt without completion, two whole sequences."""
        by_role = {role: [p for p, guess in roles.items() if guess.role is role] for role in Role}
        wholes, prompts, answers = by_role[Role.IDS], by_role[Role.PROMPT_IDS], by_role[Role.COMPLETION_IDS]
        if len(wholes) == 1 and answers and not prompts and self.columns[wholes[0]].name == "input_ids":
            # SGLang and the TI/TO provider call the prompt `input_ids`.
            roles[wholes[0]] = Guess(Role.PROMPT_IDS, f"{roles[wholes[0]].because}; {answers[0]} goes on from it")
        elif len(prompts) == 1 and not answers and not wholes:
            roles[prompts[0]] = Guess(Role.IDS, f"{roles[prompts[0]].because}; there is no completion", "full")
        elif len(prompts) == len(wholes) == 1 and not answers and not self._is_start(prompts[0], wholes[0]):
            said = f"{roles[wholes[0]].because}; does not start with {prompts[0]}"
            roles[wholes[0]] = Guess(Role.COMPLETION_IDS, said, "call")
        return {
            path: Guess(guess.role, guess.because, "full") if guess.role is Role.IDS else guess
            for path, guess in roles.items()
        }

    def guess(self, column: Column, whole: str | None, answer: str | None) -> Guess:
        """The role of a number column that does not hold ids."""
        path, name = column.path, column.name
        fact = self.facts[path]
        alignment = self._alignment(path, whole, answer)
        fits = bool(alignment)
        if name in MASKS and fact.look is Look.NUMBERS and fact.low >= 0 and fact.high <= 1:
            return Guess(Role.MASK, "weights from 0 to 1; by its name", alignment)
        if fact.look in (Look.MASK, Look.LABELS) and name not in STALE:
            if _ATTENTION.search(name):
                return Guess(Role.ATTENTION, "0 and 1; by its name", alignment)
            said = "-100 and ids" if fact.look is Look.LABELS else "0 and 1"
            if name in MASKS or _MASK.search(name):
                return Guess(Role.MASK, f"{said}; by its name", alignment)
            if fits and fact.distinct > 1 and not _OTHER_SCORES.search(name):
                return Guess(Role.MASK, f"{said}; as long as the ids", alignment)
        if fact.look is Look.POSITIONS and fits:
            return Guess(Role.POSITIONS, "0, 1, 2, …", alignment)
        if any(r.kind is RelationKind.OFFSETS and r.paths[0] == path for r in self.relations):
            return Guess(Role.OFFSETS, "rising from 0 to the length of another list")
        is_score = bool(_OTHER_SCORES.search(name)) or name in STALE
        if name in LOGPROBS and name not in STALE and (fact.look is not Look.IDS):
            return Guess(
                Role.LOGPROBS, ("not above 0; " if fact.look is Look.LOGPROBS else "") + "by its name", alignment
            )
        if fact.look is Look.LOGPROBS and not is_score:
            if _LOGPROB.search(name):
                return Guess(Role.LOGPROBS, "not above 0; by a word in its name", alignment)
            if fits and not fact.constant:
                return Guess(Role.LOGPROBS, "not above 0; as long as the ids", alignment)
        if fits:
            return Guess(Role.PER_TOKEN, "as long as the ids", alignment)
        return Guess(Role.LIST)

    def _alignment(self, path: str, whole: str | None, answer: str | None) -> str:
        """Which tokens entries describe, judged by lengths; "" if they fit none."""
        if whole is not None and (path == whole or self._related(RelationKind.EQUAL, path, whole)):
            return "full"
        if answer is not None and self._related(RelationKind.EQUAL, path, answer):
            return "call" if whole is None else "response"
        if any(r.kind is RelationKind.SAMPLED and r.paths[0] == path for r in self.relations):
            return "sampled"
        if whole is None:
            return ""
        if any(r.kind is RelationKind.MINUS_ONE and r.paths == (path, whole) for r in self.relations):
            return "shifted"
        # A response after a prompt that the row does not give as ids: shorter, with similar columns as long.
        name = self.columns[path].name
        if self._is_longer(whole, path) and (name in MASKS or name in LOGPROBS):
            return "response"
        partners = (r.paths for r in self.relations if r.kind is RelationKind.EQUAL and path in r.paths)
        known = {*MASKS, *LOGPROBS}
        if self._is_longer(whole, path) and any(
            self.columns[p].name in known for paths in partners for p in paths if p in self.columns and p != path
        ):
            return "response"
        return ""

    def _related(self, kind: RelationKind, *paths: str) -> bool:
        return any(r.kind is kind and set(paths) <= set(r.paths) for r in self.relations)

    def _pairs(self, part: str, whole: str) -> list[tuple[Numbers, Numbers]]:
        lists = ((item.lists.get(part), item.lists.get(whole)) for item in self.items)
        return [(a, b) for a, b in lists if a is not None and b is not None and len(a)]

    def _is_longer(self, whole: str, part: str) -> bool:
        pairs = self._pairs(part, whole)
        return bool(pairs) and all(len(b) >= len(a) for a, b in pairs) and any(len(b) > len(a) for a, b in pairs)

    def _is_start(self, part: str, whole: str) -> bool:
        """Whether the whole starts with the part in most objects; a few may have drifted."""
        pairs = self._pairs(part, whole)
        held = sum(starts_with(b, a) for a, b in pairs)
        return bool(pairs) and 2 * held > len(pairs)

    def _is_end(self, part: str, whole: str) -> bool:
        pairs = self._pairs(part, whole)
        held = sum(starts_with(b[::-1], a[::-1]) for a, b in pairs)
        return bool(pairs) and 2 * held > len(pairs)


def _without_numbers(column: Column) -> Guess:
    """The role of a column without number lists."""
    name, sample = column.name, column.samples[0] if column.samples else None
    if not +column.types:
        return Guess(Role.NOTHING, "always null")
    if isinstance(sample, list | tuple) and len(sample) and isinstance(sample[0], Mapping):
        return _list_of_objects(name, sample)
    if isinstance(sample, Mapping):
        return Guess(Role.OBJECT)
    if column.lengths:
        return Guess(Role.LIST)
    if isinstance(sample, str):
        if name in ("model", "model_name", "model_id"):
            return Guess(Role.MODEL)
        if name in ("finish_reason", "stop_reason"):
            return Guess(Role.FINISH_REASON)
        return Guess(Role.TEXT)
    return Guess(Role.SCALAR)


def _list_of_objects(name: str, entries: Sequence[Any]) -> Guess:
    objects = [entry for entry in entries[:16] if isinstance(entry, Mapping)]
    if all("role" in entry for entry in objects):
        return Guess(Role.MESSAGES, "objects with a role")
    if all(_is_tool(entry) for entry in objects):
        return Guess(Role.TOOLS, "objects with a function")
    if any({*PROMPT_IDS, *COMPLETION_IDS} & entry.keys() for entry in objects):
        return Guess(Role.CALLS, "objects with the ids of a call")
    return Guess(Role.LIST, "objects")


def _is_tool(entry: Mapping[str, Any]) -> bool:
    """Whether this is a tool definition; a tool call has arguments."""
    function = entry.get("function")
    if isinstance(function, Mapping):
        return "arguments" not in function
    return {"name", "parameters"} <= entry.keys()
