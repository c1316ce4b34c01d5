"""What each column holds, guessed from names, values and lengths, each guess with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from tito_audit.formats import (
    COMPLETION_IDS,
    FLAT_IDS,
    LOGPROBS,
    MASKS,
    PARAMETER,
    PROMPT_IDS,
    STALE_COLUMNS,
    is_other_mask_name,
    snake_case,
    why_not_token_ids,
)
from tito_audit.inspect.columns import Item, LogColumn, Look, NumberFacts, Numbers, Relation, RelationKind
from tito_audit.record.prefix import starts_with

InVocabulary = Callable[[Numbers], Numbers]
"""Which of these ids are in the vocabulary."""

_ID_NAMES = {*FLAT_IDS, *PROMPT_IDS, *COMPLETION_IDS}
_SHORT_LIST = 4
"""Lists up to this length count as tokens only if a mask or logprobs are equally long."""
_FEW_DISTINCT = 8

_SETTINGS = re.compile(
    r"sampling|(?:^|_)(?:params?|parameters|config|configuration|kwargs|args|options|settings|hparams|usage)$"
    r"|extra_body|^generation$",
    re.IGNORECASE,
)
_END_FLAGS = re.compile(r"(?:^|_)(?:dones?|terminals?|eos|eot|end|last|final|truncated)(?:_|$)", re.IGNORECASE)


def why_no_loss_mask(name: str, pairs: Sequence[tuple[Numbers, Numbers | None]]) -> str:
    """Why flags are no loss mask; "" if they may be one. Each list comes with the tokens of its object."""
    if is_other_mask_name(name):
        return "not a loss mask by its name"
    filled = [array for array, _ in pairs if len(array) > 1]
    if not filled:
        return ""
    ones = sum(int(np.count_nonzero(array)) == 1 and bool(array[-1]) for array in filled)
    if ones == len(filled) and (_END_FLAGS.search(snake_case(name)) or min(map(len, filled)) > _FEW_DISTINCT):
        return "marks only the last token"
    if 2 * sum(bool(array[0]) and not array[-1] for array in filled) > len(filled):
        return "marks the beginning, not what was sampled"
    hidden = [tokens[flags == 0] for flags, tokens in pairs if tokens is not None and len(flags) == len(tokens)]
    padding = max(map(len, hidden), default=0) > 2 and len(np.unique(np.concatenate(hidden))) == 1
    return "marks everything but one token: padding" if padding else ""


def are_all_equal(lists: Sequence[Numbers]) -> bool:
    """Whether all lists are equal."""
    return all(len(array) == len(lists[0]) and bool((array == lists[0]).all()) for array in lists[1:])


def varies(columns: Iterable[LogColumn]) -> bool:
    """Whether any of these columns has different values in different rows."""
    for column in columns:
        lists = column.arrays
        if len(lists) > 1 and not are_all_equal(lists):
            return True
        if len(column.samples) > 1 and any(_differs(value, column.samples[0]) for value in column.samples[1:]):
            return True
    return False


def _differs(value: Any, other: Any) -> bool:
    """Whether two values differ; lists of numbers may be arrays."""
    if isinstance(value, np.ndarray) or isinstance(other, np.ndarray):
        return not np.array_equal(value, other)
    if isinstance(value, Mapping) and isinstance(other, Mapping):
        return value.keys() != other.keys() or any(_differs(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) != len(other) or any(map(_differs, value, other))
    return bool(value != other)


def count_characters(row: Mapping[str, Any]) -> int:
    """Characters of prose and code in a row: of texts with spaces, which names and encoded images lack."""
    count, left = 0, [row]
    for _ in range(10_000):
        if not left:
            break
        value: Any = left.pop()
        if isinstance(value, str):
            count += len(value) if " " in value[:256] else 0
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
            left += value
    return count


def _strip_padding(array: Numbers) -> Numbers:
    """The list without the runs of one number at both ends, which may be padding."""
    if len(array) < 2:
        return array
    differs = np.flatnonzero(np.diff(array))
    return array[:0] if not len(differs) else array[differs[0] + 1 : differs[-1] + 1]


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
    """The role that a column most likely has, and why."""

    role: Role
    because: str = ""
    alignment: str = ""
    """The tokens that its entries belong to: full, response, call, sampled or shifted; "" if unknown."""


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
_OTHER_IDS = re.compile(r"distill|teacher|top_?[kp]|ref_|expert|chosen|rejected|position|segment", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn|pad", re.IGNORECASE)
_MASK = re.compile(r"mask|label|train|loss|weight", re.IGNORECASE)
_LOGPROB = re.compile(r"log_?p|logit|(?:^|_)lps?(?:$|_)", re.IGNORECASE)
_OTHER_SCORES = re.compile(
    r"advantage|reward|return|value|entrop|kl|temperature|version|ratio|score|^ref|teacher|trainer|prev_|old_"
    r"|prompt_?l|top_?\d*_?l|cum",
    re.IGNORECASE,
)


def guess_roles(
    columns: Sequence[LogColumn],
    items: Sequence[Item],
    facts: Mapping[str, NumberFacts],
    relations: Sequence[Relation],
    texts: Sequence[int] = (),
    in_vocabulary: InVocabulary | None = None,
) -> Roles:
    """The role of each column of one scope.

    `texts` are the characters of text of each row, [] where objects are no rows; `in_vocabulary` tells which ids
    the tokenizer has.
    """
    numbers = {column.path: column for column in columns if column.path in facts}
    scope = _ScopeColumns(items, numbers, facts, relations, varies(columns), texts, in_vocabulary, {})
    roles = {column.path: _role_without_numbers(column) for column in columns if column.path not in facts}
    ids = scope.guess_id_roles()
    roles.update(ids)
    first = {guess.role: path for path, guess in reversed(ids.items())}
    tokens = (first.get(Role.IDS), first.get(Role.PROMPT_IDS), first.get(Role.COMPLETION_IDS))
    for column in columns:
        if column.path in facts and column.path not in roles:
            roles[column.path] = scope.guess_role(column, tokens)
    for relation in relations:
        if relation.kind is RelationKind.LENGTH:
            roles[relation.paths[0]] = RoleGuess(Role.LENGTH, f"always the length of {relation.paths[1]}")
    return roles


_Tokens = tuple[str | None, str | None, str | None]
"""Paths of the whole sequence, the prompt and the completion; None for each that the scope lacks."""


@dataclass(frozen=True, slots=True)
class _ScopeColumns:
    """The number lists of one scope, compared with each other."""

    items: Sequence[Item]
    columns: Mapping[str, LogColumn]
    facts: Mapping[str, NumberFacts]
    relations: Sequence[Relation]
    varies: bool
    """Whether any column has different values in different rows."""
    texts: Sequence[int]
    in_vocabulary: InVocabulary | None
    decoys: dict[str, str]
    """By path: why a list of integers does not hold tokens."""

    def is_shifted(self, path: str, other: str) -> bool:
        """Whether a list is another one without its first token, as the targets of a loss are.

        The other may also be a completion, at the end of the list.
        """
        pairs = [(a, b) for a, b in self.pairs(path, other) if len(a) > 2 and len(b) > 1]
        ends = [(a[:-1], b[1:] if len(a) == len(b) else b) for a, b in pairs if len(b) <= len(a)]
        return 0 < len(pairs) == sum(starts_with(a[::-1], b[::-1]) for a, b in ends) and not all(
            (a[1:] == a[0]).all() for a, _ in pairs
        )

    def pairs(self, part: str, whole: str) -> list[tuple[Numbers, Numbers]]:
        """Both lists of each object that has both, the first not empty."""
        lists = ((item.lists.get(part), item.lists.get(whole)) for item in self.items)
        return [(a, b) for a, b in lists if a is not None and b is not None and len(a)]

    def is_longer(self, whole: str, part: str) -> bool:
        """Whether the whole is sometimes longer than the part, and never shorter."""
        pairs = self.pairs(part, whole)
        return bool(pairs) and all(len(b) >= len(a) for a, b in pairs) and any(len(b) > len(a) for a, b in pairs)

    def is_prefix(self, part: str, whole: str) -> bool:
        """Whether the whole starts with the part in most objects: a few may have drifted."""
        pairs = self.pairs(part, whole)
        return 2 * sum(starts_with(b, a) for a, b in pairs) > len(pairs)

    def holds(self, whole: str, part: str) -> bool:
        """Whether the whole holds the part in most objects."""
        pairs, count = self.pairs(part, whole), 0
        for a, b in pairs:
            places = np.flatnonzero(b[: len(b) - len(a) + 1] == a[0]) if len(a) <= len(b) else ()
            count += any(bool((b[place : place + len(a)] == a).all()) for place in places)
        return 2 * count > len(pairs)

    def is_suffix(self, part: str, whole: str) -> bool:
        """Whether the whole ends with the part in most objects."""
        pairs = self.pairs(part, whole)
        return 2 * sum(starts_with(b[::-1], a[::-1]) for a, b in pairs) > len(pairs)

    def guess_id_roles(self) -> Roles:
        """The columns of ids, each as the whole sequence, a prompt or a completion; notes why others are none."""
        columns = {
            path: column
            for path, column in self.columns.items()
            if self.facts[path].look is Look.IDS and not _OTHER_IDS.search(column.name)
        }
        why = {path: self._why_no_tokens(column) for path, column in columns.items()}
        likely = [path for path in columns if not why[path]]
        for path, column in columns.items():
            # A prompt may be the same in all rows.
            if why[path].startswith("the same list") and any(other != path for other in likely):
                ids = next((array for array in column.arrays if len(array)), np.empty(0))
                shared = _PROMPT.search(column.name) and len(ids) >= 8 and (np.diff(ids) < 0).any()
                if shared or any(self.is_longer(p, path) and self.is_prefix(path, p) for p in likely):
                    why[path] = ""
        for path in likely:
            if follows := next((p for p in likely if p != path and not why[p] and self.is_shifted(path, p)), None):
                why[path] = f"the next token of {follows}"
        self.decoys.update({path: reason for path, reason in why.items() if reason})
        columns = {path: column for path, column in columns.items() if not why[path]}
        compared = list(columns)[:32]
        roles: Roles = {path: self._role_by_name(column) for path, column in columns.items()}
        for relation in self.relations:
            if relation.kind is not RelationKind.SUM or not set(relation.paths) <= columns.keys():
                continue
            left, right, whole = relation.paths
            for first, second in ((left, right), (right, left)):
                if self.is_prefix(first, whole) and self.is_suffix(second, whole):
                    roles[whole] = RoleGuess(Role.IDS, f"{first}, then {second}", "full")
                    roles[first] = RoleGuess(Role.PROMPT_IDS, f"{whole} starts with it")
                    roles[second] = RoleGuess(Role.COMPLETION_IDS, f"{whole} ends with it", "response")
        for path in compared:
            if roles[path].role is Role.IDS and roles[path].alignment != "full":
                longer = [other for other in compared if other != path and self.is_longer(other, path)]
                if begins := next((other for other in longer if self.is_prefix(path, other)), None):
                    roles[path] = RoleGuess(Role.PROMPT_IDS, f"{begins} starts with it")
                elif ends := next((other for other in longer if self.is_suffix(path, other)), None):
                    roles[path] = RoleGuess(Role.COMPLETION_IDS, f"{ends} ends with it", "response")
        self._correct_id_roles(roles)
        return {
            path: RoleGuess(guess.role, guess.because, "full") if guess.role is Role.IDS else guess
            for path, guess in roles.items()
        }

    def _correct_id_roles(self, roles: Roles) -> None:
        """Correct what makes no sense together, such as a prompt without a completion or two whole sequences."""
        by_role = {role: [p for p, guess in roles.items() if guess.role is role] for role in Role}
        wholes, prompts, answers = by_role[Role.IDS], by_role[Role.PROMPT_IDS], by_role[Role.COMPLETION_IDS]
        if len(wholes) == 1 and answers and not prompts and self.columns[wholes[0]].name == "input_ids":
            # SGLang and the TI/TO provider call the prompt `input_ids`.
            roles[wholes[0]] = RoleGuess(Role.PROMPT_IDS, f"{roles[wholes[0]].because}; {answers[0]} continues it")
        elif len(wholes) == 1 and answers and not prompts and not any(self.holds(wholes[0], a) for a in answers):
            because = f"{roles[wholes[0]].because}; {answers[0]} is not part of it"
            roles[wholes[0]] = RoleGuess(Role.PROMPT_IDS, because)
        elif len(wholes) == 2 and not prompts and not answers and not any(map(self.holds, wholes, wholes[::-1])):
            scores = {path for path, fact in self.facts.items() if fact.look is Look.LOGPROBS}
            scores = {path for path in scores if not _OTHER_SCORES.search(self.columns[path].name)}
            scored = [path for path in wholes if any(other in scores for other, _ in self.equally_long(path))]
            if len(scored) == 1:
                (answer,), (prompt,) = scored, [path for path in wholes if path not in scored]
                roles[prompt] = RoleGuess(Role.PROMPT_IDS, f"{roles[prompt].because}; only {answer} has logprobs")
                roles[answer] = RoleGuess(Role.COMPLETION_IDS, f"{roles[answer].because}; it has logprobs", "call")
        elif len(wholes) == 1 and not prompts and not answers:
            # Every token was sampled if all have logprobs, and no mask tells them apart.
            beside = [self.facts[other] for other, _ in self.equally_long(wholes[0])]
            masked = any(fact.look in (Look.MASK, Look.LABELS) for fact in beside)
            logprobs = [fact for fact in beside if fact.look is Look.LOGPROBS]
            complete = bool(logprobs) and all(fact.high < 0 and not fact.nulls for fact in logprobs)
            if complete and not masked and not _WHOLE.search(self.columns[wholes[0]].name):
                because = f"{roles[wholes[0]].because}; every token has a logprob"
                roles[wholes[0]] = RoleGuess(Role.COMPLETION_IDS, because, "call")
        elif len(prompts) == 1 and not answers and not wholes:
            roles[prompts[0]] = RoleGuess(Role.IDS, f"{roles[prompts[0]].because}; there is no completion", "full")
        elif len(prompts) == len(wholes) == 1 and not answers and not self.is_prefix(prompts[0], wholes[0]):
            because = f"{roles[wholes[0]].because}; does not start with {prompts[0]}"
            roles[wholes[0]] = RoleGuess(Role.COMPLETION_IDS, because, "call")

    def _why_no_tokens(self, column: LogColumn) -> str:
        """Why a column of integers does not hold tokens; "" if it may."""
        lists = [array for array in column.arrays if len(array)]
        if self.in_vocabulary is not None and lists:
            share = 1 - float(self.in_vocabulary(np.concatenate(lists).astype(np.int64)).mean())
            if share > 0.25:
                return f"{share:.0%} of its numbers are not in the vocabulary"
        by_name = why_not_token_ids(column.name)
        if by_name == PARAMETER:
            return by_name
        inside = next((key for key in column.keys[:-1] if _SETTINGS.search(snake_case(key))), None)
        # Whether a mask or logprobs are equally long in every object.
        aligned = any(
            (varied or _MASK.search(self.columns[other].name) or _LOGPROB.search(self.columns[other].name))
            and self.facts[other].look in (Look.LOGPROBS, Look.MASK, Look.LABELS)
            and (self.facts[other].distinct > 1 or _LOGPROB.search(self.columns[other].name))
            for other, varied in self.equally_long(column.path)
        )
        if inside is not None and not aligned:
            return f"a parameter: it is in {inside}"
        if column.name in _ID_NAMES:
            return ""
        if by_name:
            return by_name
        facts = self.facts[column.path]
        distinct = lists[:1] if len(lists) > 1 and are_all_equal(lists) else lists  # repeats are no evidence
        steps = np.concatenate([np.diff(array) for array in distinct]) if distinct else np.empty(0)
        if facts.constant and facts.count >= _SHORT_LIST and len(steps) >= _SHORT_LIST:
            return "one number per list"
        if len(steps) >= 12:
            if (steps == 1).mean() > 0.6:
                return "it counts up by one"
            if (steps >= 0).all() or (steps <= 0).all():
                return "its numbers only rise" if steps.max() > 0 else "its numbers only fall"
        every = np.concatenate([_strip_padding(array) for array in distinct])
        if len(every) >= 48:
            values, counts = np.unique(every, return_counts=True)
            if len(values) <= _FEW_DISTINCT:
                return f"only {len(values)} different numbers"
            if counts.max() > 0.4 * len(every):
                return f"{counts.max() / len(every):.0%} of it is the number {values[counts.argmax()]:g}"
        if aligned:
            return ""
        if len(distinct) < len(lists) and self.varies:
            return f"the same list in all {len(lists):,} rows"
        lengths = [len(array) for array in lists]
        if max(lengths, default=0) <= _SHORT_LIST:
            return f"at most {max(lengths, default=0)} numbers per list"
        # Padded to one length: most lists begin or end with a run of one number.
        padded = 2 * sum(len(_strip_padding(array)) < len(array) - 2 for array in lists) > len(lists)
        if len(lists) >= 4 and len(set(lengths)) == 1 and not padded:
            return f"always {lengths[0]:,} numbers"
        texts = [count for count in self.texts if count]
        if texts and np.median(texts) > 40 * np.median(lengths):  # 3 to 5 characters a token are usual
            return "too few numbers for the text of its rows"
        return ""

    def equally_long(self, path: str) -> Iterator[tuple[str, bool]]:
        """The number lists that are as long as this one in every object, each with whether lengths vary."""
        for relation in self.relations:
            if relation.kind is RelationKind.EQUAL and path in relation.paths:
                others = (other for other in relation.paths if other != path and other in self.facts)
                yield from ((other, relation.varied) for other in others)

    def _role_by_name(self, column: LogColumn) -> RoleGuess:
        """The role of a column of ids by its name, or else by the names of the objects around it."""
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

    def guess_role(self, column: LogColumn, tokens: _Tokens) -> RoleGuess:
        """The role of a column of numbers that are no ids."""
        path, name = column.path, column.name
        fact = self.facts[path]
        alignment = self._guess_alignment(path, tokens)
        fits = bool(alignment)
        if name in MASKS and fact.look is Look.NUMBERS and fact.low >= 0 and fact.high <= 1:
            return RoleGuess(Role.MASK, "weights from 0 to 1; by its name", alignment)
        if fact.look in (Look.MASK, Look.LABELS) and name not in STALE_COLUMNS:
            if _ATTENTION.search(name):
                return RoleGuess(Role.ATTENTION, "0 and 1; by its name", alignment)
            values = "-100 and ids" if fact.look is Look.LABELS else "0 and 1"
            if name in MASKS:
                return RoleGuess(Role.MASK, f"{values}; by its name", alignment)
            lists = [(item.lists.get(path), item.lists.get(tokens[0] or tokens[2] or "")) for item in self.items]
            pairs = [(flags, ids) for flags, ids in lists if flags is not None and len(flags)]
            if fits and fact.look is Look.MASK and (why := why_no_loss_mask(name, pairs)):
                return RoleGuess(Role.PER_TOKEN, f"{values}; {why}", alignment)
            if fits and _MASK.search(name):
                return RoleGuess(Role.MASK, f"{values}; by its name", alignment)
            if fits and fact.distinct > 1 and not _OTHER_SCORES.search(name):
                return RoleGuess(Role.MASK, f"{values}; as long as the ids", alignment)
        if fact.look is Look.POSITIONS and fits:
            return RoleGuess(Role.POSITIONS, "0, 1, 2, …", alignment)
        if any(r.kind is RelationKind.OFFSETS and r.paths[0] == path for r in self.relations):
            return RoleGuess(Role.OFFSETS, "rising from 0 to the length of another list")
        is_score = bool(_OTHER_SCORES.search(name)) or name in STALE_COLUMNS
        if name in LOGPROBS and name not in STALE_COLUMNS and (fact.look is not Look.IDS):
            return RoleGuess(Role.LOGPROBS, "by its name", alignment)
        if fact.look is Look.LOGPROBS and not is_score:
            if _LOGPROB.search(name):
                return RoleGuess(Role.LOGPROBS, "by its name", alignment)
            if fits and not fact.constant and fact.distinct > min(8, fact.count // 4):  # logprobs rarely repeat
                return RoleGuess(Role.LOGPROBS, "never above 0; as long as the ids", alignment)
        why = self.decoys.get(path, "")
        if fits:
            return RoleGuess(
                Role.PER_TOKEN, f"as long as the ids; {why}" if why else "as long as the ids", alignment
            )
        return RoleGuess(Role.LIST, why)

    def _guess_alignment(self, path: str, tokens: _Tokens) -> str:
        """The tokens that a column's entries belong to, judged by lengths; "" if they fit none."""
        whole, prompt, answer = tokens
        equal = {other for other, _ in self.equally_long(path)}
        if whole is not None and whole in {path, *equal}:
            return "full"
        if answer in equal:
            return "call" if whole is None else "response"
        if any(r.kind is RelationKind.SAMPLED and r.paths[0] == path for r in self.relations):
            return "sampled"
        if whole is None:
            # As long as prompt and completion together.
            columns = (path, prompt or "", answer or "")
            sizes = [[item.lengths.get(column) for column in columns] for item in self.items]
            full = [(own, before + after) for own, before, after in sizes if own and before and after]
            return "full" if full and 4 * sum(own == both for own, both in full) > 3 * len(full) else ""
        if any(r.kind is RelationKind.MINUS_ONE and r.paths == (path, whole) for r in self.relations):
            return "shifted"
        # Shorter, and as long as a known mask or logprobs: a response whose prompt is not logged as ids.
        name = self.columns[path].name
        names = {name, *(self.columns[other].name for other in equal)}
        return "response" if self.is_longer(whole, path) and not names.isdisjoint((*MASKS, *LOGPROBS)) else ""


def _role_without_numbers(column: LogColumn) -> RoleGuess:
    name, sample = column.name, column.samples[0] if column.samples else None
    if not +column.types:
        return RoleGuess(Role.NOTHING, "always null")
    if isinstance(sample, list | tuple) and len(sample) and isinstance(sample[0], Mapping):
        objects = [entry for entry in sample[:16] if isinstance(entry, Mapping)]
        if all("role" in entry for entry in objects):
            return RoleGuess(Role.MESSAGES, "objects with a role")
        tools = (
            "arguments" not in called  # which a tool call has
            if isinstance(called := entry.get("function"), Mapping)
            else {"name", "parameters"} <= entry.keys()
            for entry in objects
        )
        if all(tools):
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
