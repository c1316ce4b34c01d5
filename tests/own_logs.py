"""Random logs under column names of their own, with decoys among the columns, and the mapping that is right.

Nothing here knows how `inspect` guesses: rows are made from a rollout, and decoys are what servers, trainers and
data sets write beside them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SEQUENCE = ("toks", "seq", "ids", "sequence", "full", "x", "token_seq", "all_ids", "packed", "trajectory_toks")
PROMPT = ("prompt_toks", "ctx", "query", "prompt_seq", "input_seq", "context_ids", "question_toks", "in_ids")
ANSWER = (
    "response_toks",
    "answer",
    "gen_toks",
    "out_seq",
    "completion_seq",
    "action_toks",
    "sampled_toks",
    "reply_out",
)
MASK = (
    "train_on",
    "trained",
    "loss_on",
    "m",
    "learn",
    "loss_w",
    "assistant_flags",
    "is_action",
    "act_mask",
    "sel",
)
LOGPROBS = (
    "lp",
    "logp",
    "gen_lp",
    "behavior_lp",
    "sampler_logp",
    "rollout_lp",
    "lps",
    "act_logps",
    "vllm_logprob",
    "q",
)
CHAT = ("chat", "dialog", "conversation", "turns_text", "history")
WORDS = ("the", "model", "reads", "what", "it", "was", "given", "and", "writes", "down", "an", "answer")
MEANINGLESS = ("aux", "field_7", "col_b", "v", "zz", "extra_1")


@dataclass(slots=True)
class OwnLog:
    """A log, what its columns are, and what must not be suggested."""

    rows: list[dict[str, Any]]
    right: dict[str, str]
    decoys: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)
    """Columns that a mapping may leave out."""


@dataclass(slots=True)
class _Rollout:
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    text: str

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def mask(self) -> list[int]:
        return [0] * len(self.prompt) + [1] * len(self.answer)


def own_log(seed: int) -> OwnLog:
    """The log of a seed."""
    chance = random.Random(seed)
    rollouts = _rollouts(chance)
    log = OwnLog([{"uid": chance.randrange(10**9)} for _ in rollouts], {})
    chance.choice((_flat, _flat, _flat, _split, _parts, _calls_alone, _text_alone))(log, rollouts, chance)
    for name, make in chance.sample(sorted(DECOYS.items()), chance.randrange(2, 8)):
        if name == "next_ids" and not log.right:
            continue  # a row of tokens after all, where no other column holds them
        free = [column for column in MEANINGLESS if column not in log.rows[0]]
        if name in TOLD_BY_VALUES and free and chance.random() < 0.4:
            name = chance.choice(free)
        _decoy(log, rollouts, name, make, chance)
    for number, row in enumerate(log.rows):
        keys = list(row)
        random.Random(seed).shuffle(keys)
        log.rows[number] = {key: row[key] for key in keys}
    return log


def _rollouts(chance: random.Random) -> list[_Rollout]:
    vocabulary = chance.choice((900, 32_000, 151_000))
    shared = chance.random() < 0.25
    rollouts: list[_Rollout] = []
    for _ in range(chance.randrange(5, 14)):
        fresh = _text(chance, vocabulary, chance.randrange(12, 60))
        prompt = rollouts[0].prompt if shared and rollouts else fresh
        answer = _text(chance, vocabulary, chance.randrange(5, 50))
        values = [-min(chance.expovariate(1.2), 18.0) for _ in answer]
        rollouts.append(_Rollout(prompt, answer, values, " ".join(chance.choices(WORDS, k=len(prompt + answer)))))
    return rollouts


def _text(chance: random.Random, vocabulary: int, length: int) -> list[int]:
    """Ids as a text has them: a few are frequent, most are rare."""
    return [
        min(int(chance.paretovariate(0.35)) + 2, vocabulary - 1 - chance.randrange(200)) for _ in range(length)
    ]


def _name(chance: random.Random, names: tuple[str, ...], log: OwnLog) -> str:
    return chance.choice([name for name in names if name not in log.rows[0]])


def _flat(log: OwnLog, rollouts: list[_Rollout], chance: random.Random) -> None:
    ids, mask, lp = (_name(chance, names, log) for names in (SEQUENCE, MASK, LOGPROBS))
    inside = chance.choice(("", "", "extra", "data"))
    kind = chance.choice((int, bool, float))
    fill = chance.choice((0.0, None))
    for row, rollout in zip(log.rows, rollouts, strict=True):
        holder = row.setdefault(inside, {}) if inside else row
        holder[ids] = rollout.whole
        holder[mask] = [kind(flag) for flag in rollout.mask]
        holder[lp] = [fill] * len(rollout.prompt) + rollout.logprobs
    at = f"{inside}." if inside else ""
    log.right |= {"token_ids": at + ids, "loss_mask": at + mask, "logprobs": at + lp}
    if chance.random() < 0.5:
        _chat(log, rollouts, chance)


def _split(log: OwnLog, rollouts: list[_Rollout], chance: random.Random) -> None:
    prompt, answer, lp = (_name(chance, names, log) for names in (PROMPT, ANSWER, LOGPROBS))
    for row, rollout in zip(log.rows, rollouts, strict=True):
        row |= {prompt: rollout.prompt, answer: rollout.answer, lp: rollout.logprobs}
    log.right |= {"prompt_ids": prompt, "completion_ids": answer, "completion_logprobs": lp}


def _parts(log: OwnLog, rollouts: list[_Rollout], chance: random.Random) -> None:
    _flat(log, rollouts, chance)
    prompt, answer = _name(chance, PROMPT, log), _name(chance, ANSWER, log)
    for row, rollout in zip(log.rows, rollouts, strict=True):
        row |= {prompt: rollout.prompt, answer: rollout.answer}
    log.right |= {"prompt_ids": prompt, "completion_ids": answer}
    log.optional |= {"prompt_ids", "completion_ids"}


def _calls_alone(log: OwnLog, rollouts: list[_Rollout], chance: random.Random) -> None:
    answer, lp = _name(chance, ANSWER, log), _name(chance, LOGPROBS, log)
    for row, rollout in zip(log.rows, rollouts, strict=True):
        row |= {answer: rollout.answer, lp: rollout.logprobs}
    log.right |= {"completion_ids": answer, "completion_logprobs": lp}


def _text_alone(log: OwnLog, rollouts: list[_Rollout], chance: random.Random) -> None:
    _chat(log, rollouts, chance)
    log.right.clear()


def _chat(log: OwnLog, rollouts: list[_Rollout], chance: random.Random) -> None:
    name = _name(chance, CHAT, log)
    for row, rollout in zip(log.rows, rollouts, strict=True):
        half = len(rollout.text) // 2
        row[name] = [
            {"role": "user", "content": rollout.text[:half]},
            {"role": "assistant", "content": rollout.text[half:]},
        ]
    log.right["messages"] = name
    log.optional.add("messages")


# Decoys: each makes the value of one row


Made = Callable[[_Rollout, int, random.Random], Any]


def _noise(size: float) -> Made:
    def noise(rollout: _Rollout, row: int, chance: random.Random) -> list[float]:
        prompt = [-chance.expovariate(1.0) for _ in rollout.prompt]
        return prompt + [min(value + chance.gauss(0, size), -1e-6) for value in rollout.logprobs]

    return noise


def _fixed(value: Any) -> Made:
    return lambda rollout, row, chance: value


def _few(low: int, high: int, count: int) -> Made:
    return lambda rollout, row, chance: [chance.randrange(low, high) for _ in range(count)]


DECOYS: Mapping[str, Made] = {
    "stop_token_ids": _fixed([151643, 151645]),
    "stopTokenIds": _fixed([2, 107]),
    "sampling_params.stop_token_ids": _fixed([151645]),
    "sampling_params.allowed_token_ids": _fixed([15, 16, 17, 18, 19, 220, 13, 11, 7]),
    "generation_config.eos_token_id": _fixed([151645, 151643]),
    "gen_kwargs.suppress": _fixed([3, 1, 7, 22, 9]),
    "bad_words_ids": _fixed([[12, 33], [45]]),
    "banned_token_ids": _fixed([45, 7, 1102]),
    "eos_token_id": _fixed([2, 107]),
    "pad_token_ids": _fixed([0, 0]),
    "sampling_params.logit_bias": _fixed({"50256": -100, "1234": 5}),
    "image_grid_thw": lambda rollout, row, chance: [1, chance.randrange(8, 60), chance.randrange(8, 60)],
    "grid": lambda rollout, row, chance: [[1, chance.randrange(8, 60), chance.randrange(8, 60)]],
    "lora_ids": _few(2, 9, 3),
    "constant_vector": _fixed([1, 0, 0, 0]),
    "constants": _fixed([7, 3, 9, 4, 1]),
    "weights_of_rewards": _fixed([0.25, 0.25, 0.5]),
    "prompt_lens": _few(20, 900, 8),
    "context_lengths": lambda _, row, chance: [chance.randrange(20, 900) for _ in range(chance.randrange(2, 9))],
    "group_sizes": _fixed([8, 8, 8, 4]),
    "sizes": _few(20, 900, 6),
    "eight_numbers": _few(20, 900, 8),
    "retrieved_doc_ids": lambda _, row, chance: [chance.randrange(9000) for _ in range(chance.randrange(3, 9))],
    "nearest": lambda rollout, row, chance: sorted(chance.sample(range(9000), chance.randrange(15, 30))),
    "position_ids": lambda rollout, row, chance: list(range(len(rollout.whole))),
    "places": lambda rollout, row, chance: [*range(len(rollout.prompt)), *range(len(rollout.answer))],
    "attention_mask": lambda rollout, row, chance: [1] * len(rollout.whole),
    "attn": lambda rollout, row, chance: [0] * (row % 4) + [1] * (len(rollout.whole) - row % 4),
    "token_type_ids": lambda rollout, row, chance: rollout.mask,
    "segment_ids": lambda rollout, row, chance: [1 + flag for flag in rollout.mask],
    "policy_versions": lambda rollout, row, chance: [12 + row // 4] * len(rollout.whole),
    "turn_of": lambda rollout, row, chance: [2 + place // 9 for place in range(len(rollout.whole))],
    "token_ranks": lambda rollout, row, chance: [int(chance.paretovariate(1.1)) for _ in rollout.whole],
    "byte_counts": lambda rollout, row, chance: [chance.randrange(1, 9) for _ in rollout.whole],
    "prompt_mask": lambda rollout, row, chance: [1 - flag for flag in rollout.mask],
    "is_prompt": lambda rollout, row, chance: [not flag for flag in rollout.mask],
    "not_sampled": lambda rollout, row, chance: [1 - flag for flag in rollout.mask],
    "dones": lambda rollout, row, chance: [0] * (len(rollout.whole) - 1) + [1],
    "special_tokens_mask": lambda rollout, row, chance: [int(at % 17 == 0) for at in range(len(rollout.whole))],
    "next_ids": lambda rollout, row, chance: [*rollout.whole[1:], 2],
    "ref_lp": _noise(0.4),
    "old_logprobs": _noise(0.01),
    "trainer_lp": _noise(0.01),
    "teacher_logp": _noise(0.9),
    "top_logprobs": lambda rollout, row, chance: [[-0.1, -2.0, -3.0] for _ in rollout.answer],
    "prompt_logprobs": lambda rollout, row, chance: [-chance.expovariate(1.0) for _ in rollout.prompt],
    "advantages": lambda rollout, row, chance: [chance.gauss(0, 1)] * len(rollout.whole),
    "entropy": lambda rollout, row, chance: [chance.expovariate(1.0) for _ in rollout.whole],
    "values": lambda rollout, row, chance: [-chance.random() for _ in rollout.whole],
    "token_rewards": lambda rollout, row, chance: [0.0] * (len(rollout.whole) - 1) + [-1.0],
    "kl": lambda rollout, row, chance: [chance.gauss(0, 0.01) for _ in rollout.whole],
    "scores": _few(2, 90, 4),
    "seeds": _few(2, 2**31 - 1, 2),
    "timestamps": lambda rollout, row, chance: sorted(chance.randrange(10**6) for _ in rollout.answer),
}  # fmt: skip

TOLD_BY_VALUES = {
    "advantages", "attention_mask", "byte_counts", "constants", "constant_vector", "dones", "eight_numbers",
    "entropy", "eos_token_id", "group_sizes", "image_grid_thw", "kl", "lora_ids", "nearest", "next_ids", "places",
    "policy_versions", "position_ids", "prompt_lens", "prompt_mask", "seeds", "segment_ids", "sizes",
    "stop_token_ids", "token_ranks", "token_rewards", "turn_of", "weights_of_rewards",
}  # fmt: skip
"""Decoys that are also written under names of no meaning."""


def _decoy(log: OwnLog, rollouts: list[_Rollout], name: str, make: Made, chance: random.Random) -> None:
    """Add a decoy to every row."""
    *outer, last = name.split(".")
    for number, (row, rollout) in enumerate(zip(log.rows, rollouts, strict=True)):
        holder = row
        for key in outer:
            holder = holder.setdefault(key, {})
        holder[last] = make(rollout, number, chance)
    log.decoys.add(name)
