"""Samples answers and scores ids with a model in this process, one forward pass at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tito_audit.errors import ProviderError
from tito_audit.provider import GenerationChunk, SamplingParams, ScoredTokens, TopLogprobs
from tito_audit.providers._endings import Endings
from tito_audit.providers._model import CausalModel
from tito_audit.providers._sampling import choose, choosing_of, refusal

if TYPE_CHECKING:
    import torch

_PIECE = 1 << 24
"""Logits per piece when scoring: 64 MiB of float32."""
_PIECE_OF_ALL = 1 << 28
"""The same for a model without a cache, which recomputes all ids for each piece: 1 GiB."""
_TOKENS = 2048
"""The most ids of one forward pass with a cache."""


@dataclass(slots=True)
class _Answer:
    """One answer that is being sampled."""

    index: int
    endings: Endings
    generator: torch.Generator
    output_ids: list[int] = field(default_factory=list)


class Sampling:
    """The answers to one prompt while they are being sampled; call `step` until `done`."""

    def __init__(
        self, model: CausalModel, input_ids: Sequence[int], sampling: SamplingParams, weight_version: str | None
    ) -> None:
        self._model, self._version = model, weight_version
        self._prompt = model.checked(input_ids)
        self._choosing = choosing_of(sampling, model.defaults)
        self._top = sampling.top_logprobs
        self._eos: tuple[int, ...] = () if self._choosing.ignore_eos else model.eos_ids
        self._end_ids = {*self._eos, *sampling.stop_token_ids}
        self._cache: Any = None
        self._answers = self._begun(sampling)
        # ProviderError if a parameter names a token that the model does not have.
        choosing = self._choosing
        size = model.vocabulary_size
        named = [*(choosing.allowed_token_ids or ()), *choosing.logit_bias, *sampling.stop_token_ids]
        wrong = next((token for token in named if not 0 <= token < size), None)
        if wrong is not None:
            raise refusal(
                f"a sampling parameter names id {wrong}, which is outside the model's vocabulary of {size}"
            )

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return not self._answers

    def step(self) -> list[GenerationChunk]:
        """One forward pass: the next token of each unfinished answer."""
        import torch

        with torch.inference_mode():
            chunks = [self._next(*pair) for pair in zip(self._answers, self._logits(), strict=True)]
            going = [place for place, chunk in enumerate(chunks) if chunk.finish_reason is None]
            if self._cache is not None and 0 < len(going) < len(chunks):
                self._cache.batch_select_indices(torch.tensor(going))
            self._answers = [self._answers[place] for place in going]
        return chunks

    def _begun(self, sampling: SamplingParams) -> list[_Answer]:
        """The answers before their first token; answer k with seed s equals the first answer with seed s + k."""
        import torch

        if sampling.n < 1:
            raise refusal(f"n is {sampling.n}; it has to be at least 1")
        # The most tokens that an answer may have.
        wanted = sampling.max_tokens
        if wanted is not None and wanted < 1:
            raise refusal(f"max_tokens is {wanted}; it has to be at least 1")
        if self._model.context is None:
            if wanted is None:
                raise refusal("max_tokens is needed: the model does not say how long its context is")
            room = wanted
        else:
            left = self._model.context - len(self._prompt)
            if left < (wanted or 1):
                raise refusal(
                    f"{len(self._prompt)} tokens of prompt and {wanted or 1} to sample do not fit into the "
                    f"model's context of {self._model.context}"
                )
            room = left if wanted is None else wanted
        answers = []
        for index in range(sampling.n):
            generator = torch.Generator()
            if sampling.seed is None:
                generator.seed()
            else:
                generator.manual_seed(sampling.seed + index)
            stops = Endings(self._eos, sampling.stop_token_ids, sampling.stop, room, self._spelled)
            answers.append(_Answer(index, stops, generator))
        return answers

    def _spelled(self, token: int) -> bytes:
        """The text of a token; the tokenizer is loaded only for stop texts."""
        return self._model.token_bytes(token)

    def _logits(self) -> torch.Tensor:
        """`[N, V]` for the next token of each answer."""
        import torch

        if not self._model.has_cache:
            whole = [[*self._prompt, *answer.output_ids] for answer in self._answers]
            return torch.cat([self._model.forward([ids], None, 1)[0][:, -1] for ids in whole])
        if self._cache is None:
            logits, self._cache = self._model.forward([self._prompt], None, 1)
            if len(self._answers) > 1:
                self._cache.batch_repeat_interleave(len(self._answers))
            return logits[:, -1].expand(len(self._answers), -1)
        last = [answer.output_ids[-1:] for answer in self._answers]
        logits, self._cache = self._model.forward(last, self._cache, 1)
        return logits[:, -1]

    def _next(self, answer: _Answer, logits_V: torch.Tensor) -> GenerationChunk:
        """The next token of one answer, chosen and scored."""
        if not bool(logits_V.isfinite().any()) or bool(logits_V.isnan().any()):
            raise ProviderError("the model's logits are not numbers (NaN): its weights are broken")
        token = choose(logits_V, self._choosing, answer.generator, self._prompt, answer.output_ids, self._end_ids)
        logprobs = logits_V.log_softmax(-1)
        answer.output_ids.append(token)
        end = answer.endings.after(token)
        return GenerationChunk(
            index=answer.index,
            output_ids=(token,),
            logprobs=(float(logprobs[token]),),
            top_logprobs=_tops(logprobs[None], self._top),
            finish_reason=end.finish_reason if end else None,
            stop_reason=end.stop_reason if end else None,
            weight_version=self._version,
        )


def _tops(logprobs_TV: torch.Tensor, count: int) -> tuple[TopLogprobs, ...] | None:
    """The likeliest tokens at each position; None if `count` is 0."""
    if count < 1:
        return None
    best = logprobs_TV.topk(min(count, logprobs_TV.shape[-1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(tuple(zip(ids, values, strict=True)) for ids, values in pairs)


class Scoring:
    """Scores ids piece by piece, so that the logits of a long text are never all in memory."""

    def __init__(self, model: CausalModel, ids: Sequence[int], start: int, top: int) -> None:
        self._model, self._ids, self._start, self._top = model, model.checked(ids), max(1, start), top
        if self._start > len(self._ids):
            raise refusal(f"there are {len(self._ids)} ids, and no position {start} to score from")
        self._pieces = self._planned()
        self._cache: Any = None
        self._logprobs: list[float] = []
        self._tops: list[TopLogprobs] = []

    def step(self) -> bool:
        """Scores the next piece; False if there was none."""
        import torch

        begin, end = next(self._pieces, (0, 0))
        if not end:
            return False
        wanted = end >= self._start
        first = begin if self._model.has_cache else 0
        with torch.inference_mode():
            kept = end - begin if wanted else 1
            logits, self._cache = self._model.forward([self._ids[first:end]], self._cache, kept)
            if wanted:
                # Add the logprobs of some ids and the likeliest tokens at their positions.
                logprobs_TV = logits[0].log_softmax(-1)
                targets_T = torch.tensor(self._ids[begin + 1 : end + 1])
                self._logprobs += logprobs_TV.gather(1, targets_T[:, None])[:, 0].tolist()
                self._tops += _tops(logprobs_TV, self._top) or ()
        return True

    def _planned(self) -> Iterator[tuple[int, int]]:
        """The start and end of each piece: first those before `start`, which only fill the cache, then those that
        are scored.
        """
        model, before = self._model, self._start - 1
        numbers = _PIECE if model.has_cache else _PIECE_OF_ALL
        size = max(1, numbers // model.vocabulary_size)
        size = min(size, _TOKENS) if model.has_cache else size
        if model.has_cache:
            step = _TOKENS if model.keeps_few else size
            yield from ((at, min(at + step, before)) for at in range(0, before, step))
        last = len(self._ids) - 1
        yield from ((at, min(at + size, last)) for at in range(before, last, size))

    def scored(self, weight_version: str | None) -> ScoredTokens:
        """All of it, after the last step."""
        tops = tuple(self._tops) if self._top > 0 else None
        return ScoredTokens(self._ids, self._start, tuple(self._logprobs), tops, weight_version)
