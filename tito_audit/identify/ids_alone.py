"""What recorded ids show without a tokenizer: range, openings of prompts, ends of turns, known control ids.

Every family of tokenizers is named whose vocabulary holds all ids and whose control ids nearly every sequence has
where a chat has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from tito_audit.record.arrays import Ids
from tito_audit.record.rollout import Rollout
from tito_audit.record.runs import trained_runs


@dataclass(frozen=True, slots=True)
class IdFamily:
    """Tokenizers that share a vocabulary and its control ids."""

    name: str
    size: int
    """Every id is below this."""
    opens: tuple[tuple[int, ...], ...]
    """The ids that a chat may open with; low ids count only with the next one, being common."""
    marks: Mapping[int, str]
    """Control ids that every chat holds, and their texts."""

    def fits(self, ids: Ids) -> bool:
        """Whether a sequence opens like a chat of the family and holds all its marks."""
        head = tuple(ids[:3].tolist())
        opens = any(head[: len(opening)] == opening for opening in self.opens)
        return opens and bool(np.isin(list(self.marks), ids).all())


_QWEN: dict[int, str] = {151644: "<|im_start|>", 151645: "<|im_end|>"}
_MISTRAL: dict[int, str] = {3: "[INST]", 4: "[/INST]"}

FAMILIES: tuple[IdFamily, ...] = (
    IdFamily("SmolLM2", 49_152, ((1, 9690), (1, 4093)), {1: "<|im_start|>", 2: "<|im_end|>"}),
    IdFamily("Mistral (SentencePiece v3)", 32_768, ((1, 3), (1, 6), (1, 1, 3), (3,)), _MISTRAL),
    IdFamily("Mistral (Tekken)", 131_072, ((1, 3), (1, 5), (1, 17), (1, 1, 3), (3,), (17,)), _MISTRAL),
    IdFamily("Phi-4", 100_352, ((100264,),), {100264: "<|im_start|>", 100266: "<|im_sep|>", 100265: "<|im_end|>"}),
    IdFamily(
        "Llama 3",
        128_256,
        ((128000, 128006), (128000, 128000, 128006), (128006,)),
        {128006: "<|start_header_id|>", 128007: "<|end_header_id|>", 128009: "<|eot_id|>"},
    ),
    IdFamily("DeepSeek V3, R1", 128_815, ((0,), (128803,)), {128803: "<｜User｜>", 128804: "<｜Assistant｜>"}),
    IdFamily("Qwen2", 151_646, ((151644,),), _QWEN),
    IdFamily("Qwen2.5", 151_665, ((151644,),), _QWEN),
    IdFamily("Qwen3", 151_669, ((151644,),), _QWEN),
    IdFamily("GLM-4, GLM-4.5", 151_552, ((151331, 151333),), {151336: "<|user|>", 151337: "<|assistant|>"}),
    IdFamily(
        "Kimi K2",
        163_840,
        ((163594,), (163587,)),
        {163587: "<|im_user|>", 163588: "<|im_assistant|>", 163601: "<|im_middle|>", 163586: "<|im_end|>"},
    ),
    IdFamily("gpt-oss", 200_019, ((200006,),), {200006: "<|start|>", 200008: "<|message|>", 200007: "<|end|>"}),
    IdFamily("Gemma 2", 256_000, ((2, 106), (2, 2, 106), (106,)), {106: "<start_of_turn>", 107: "<end_of_turn>"}),
    IdFamily("Gemma 3", 262_145, ((2, 105), (2, 2, 105), (105,)), {105: "<start_of_turn>", 106: "<end_of_turn>"}),
)
"""Sources: the `tokenizer.json` of SmolLM2, Llama 3.1, DeepSeek-V3, Qwen2.5, Qwen3, gpt-oss and Gemma 3, which a
test compares with this table; the published `tokenizer_config.json` of Qwen2, Phi-4, GLM-4.5, Kimi K2 and Gemma 2;
`mistral-common` for both kinds of Mistral."""


@dataclass(frozen=True, slots=True)
class FamilyMatch:
    """A family that sequences fit."""

    family: IdFamily
    sequences: int
    """How many fit it."""


@dataclass(frozen=True, slots=True)
class IdsAlone:
    """What the ids of a log show by themselves."""

    sequences: int
    ids: int
    distinct: int
    smallest: int
    largest: int
    opening: tuple[int, ...]
    """The ids that all prompts open with; () if they open differently."""
    turns: int
    """Sampled turns."""
    ends: tuple[tuple[int, int], ...]
    """(id, turns) of the ids that most often end sampled turns."""
    families: tuple[FamilyMatch, ...]
    """The families that fit, the smallest vocabulary first."""


def describe_ids(rollouts: Sequence[Rollout]) -> IdsAlone | None:
    """What the ids of rollouts show without a tokenizer; None if there are none."""
    sequences = id_sequences(rollouts)
    if not sequences:
        return None
    every = np.unique(np.concatenate(sequences))
    largest = int(every[-1])
    ends: Counter[int] = Counter()  # the last id of each sampled turn
    heads: list[tuple[int, ...]] = []
    for rollout in rollouts:
        row, turns = rollout.training_row, rollout.turns
        completions = [ids for turn in turns if (ids := turn.completion_ids) is not None and len(ids)]
        ends.update(int(ids[-1]) for ids in completions)
        if row is not None and row.loss_mask is not None and not turns:
            ends.update(int(row.token_ids[end - 1]) for _, end in trained_runs(row.loss_mask))
        opened = (*(turn.prompt_ids for turn in turns), None if row is None else row.token_ids)
        heads += [tuple(ids[:8].tolist()) for ids in opened if ids is not None]
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(min(heads), max(heads), strict=False)) if heads else ()
    families = (
        FamilyMatch(family, sum(family.fits(ids) for ids in sequences))
        for family in sorted(FAMILIES, key=lambda family: family.size)
        if largest < family.size
    )
    return IdsAlone(
        sequences=len(sequences),
        ids=sum(map(len, sequences)),
        distinct=len(every),
        smallest=int(every[0]),
        largest=largest,
        opening=tuple(first for first, _ in alike),
        turns=ends.total(),
        ends=tuple(ends.most_common(4)),
        families=tuple(seen for seen in families if seen.sequences >= 0.9 * len(sequences)),
    )


def id_sequences(rollouts: Iterable[Rollout]) -> list[Ids]:
    """The ids of each training row and of each prompt with its completion, without negative ones."""
    sequences: list[Ids | None] = []
    for rollout in rollouts:
        sequences.append(rollout.training_row.token_ids if rollout.training_row is not None else None)
        for turn in rollout.turns:
            sequences.append(turn.seen_ids if turn.completion_ids is not None else turn.prompt_ids)
    real = (ids[ids >= 0] for ids in sequences if ids is not None)
    return [ids for ids in real if len(ids)]
