"""How a token is chosen from a model's logits, in vLLM's order: edits, temperature, min_p, top_k, top_p."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tito_audit.errors import ProviderError
from tito_audit.provider import SamplingParams

if TYPE_CHECKING:
    import torch

_NO_EFFECT = {"include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "user"}
"""Server fields that change the text but no token."""


@dataclass(frozen=True, slots=True)
class Choosing:
    """What changes the distribution that a token is drawn from."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: any number of tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    """None: any token."""
    min_tokens: int = 0
    """No end token is drawn before this many tokens."""
    ignore_eos: bool = False


def choosing_of(sampling: SamplingParams, defaults: Mapping[str, Any]) -> Choosing:
    """The settings of `sampling`, its `extra` included; `defaults` fill what it leaves unset.

    ProviderError with status 400 for an invalid value or an unknown field.
    """
    settings = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    settings |= {name: value for name, value in sampling.extra.items() if name not in _NO_EFFECT}
    settings = {name: value for name, value in settings.items() if value is not None}
    fields = Choosing.__dataclass_fields__
    unknown = sorted(settings.keys() - fields.keys())
    if unknown:
        raise refusal(f"an in-process model does not support {', '.join(unknown)}; it knows {', '.join(fields)}")
    try:
        choosing = _typed({name: value for name, value in defaults.items() if name in fields} | settings)
    except (TypeError, ValueError, AttributeError) as error:
        raise refusal(f"a sampling parameter has the wrong type: {error}") from None
    _refuse_nonsense(choosing)
    return choosing


def refusal(message: str) -> ProviderError:
    """A ProviderError with status 400, for a bad request."""
    return ProviderError(message, status=400)


def _typed(settings: dict[str, Any]) -> Choosing:
    """The values as numbers; TypeError or ValueError if they are not."""
    if "logit_bias" in settings:
        settings["logit_bias"] = {int(token): float(bias) for token, bias in settings["logit_bias"].items()}
    if "allowed_token_ids" in settings:
        settings["allowed_token_ids"] = tuple(int(token) for token in settings["allowed_token_ids"])
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if name in settings:
            settings[name] = float(settings[name])
    for name in ("top_k", "min_tokens"):
        if name in settings:
            settings[name] = max(0, int(settings[name]))
    return Choosing(**settings)


def _refuse_nonsense(choosing: Choosing) -> None:
    """ProviderError for the first value that is out of its range."""
    ranges = {
        "temperature": (0 <= choosing.temperature < float("inf"), "at least 0"),
        "top_p": (0 < choosing.top_p <= 1, "above 0 and at most 1"),
        "min_p": (0 <= choosing.min_p <= 1, "between 0 and 1"),
        "repetition_penalty": (0 < choosing.repetition_penalty < float("inf"), "above 0"),
        "allowed_token_ids": (choosing.allowed_token_ids != (), "at least one id"),
    }
    for name, (fits, range_) in ranges.items():
        if not fits:
            raise refusal(f"{name} is {getattr(choosing, name)}; it has to be {range_}")


def choose(
    logits_V: torch.Tensor,
    choosing: Choosing,
    generator: torch.Generator | None,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    end_ids: Collection[int],
) -> int:
    """The next token; `logits_V`, `[V]` float32, is not changed."""
    logits = _edited(logits_V, choosing, prompt_ids, output_ids, end_ids)
    if choosing.temperature == 0:
        return int(logits.argmax())
    probabilities = _truncated(logits / choosing.temperature, choosing).double().softmax(0)
    return _drawn(probabilities, generator)


def _edited(
    logits: torch.Tensor,
    choosing: Choosing,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    end_ids: Collection[int],
) -> torch.Tensor:
    """The logits with allowed tokens, biases and penalties applied; the same tensor if there are none."""
    import torch

    edited = logits
    if choosing.allowed_token_ids is not None:
        allowed = torch.tensor(choosing.allowed_token_ids)
        edited = torch.full_like(logits, float("-inf")).index_copy_(0, allowed, logits[allowed])
    if choosing.logit_bias:
        edited = edited.clone()
        for token, bias in choosing.logit_bias.items():
            edited[token] += bias
    if len(output_ids) < choosing.min_tokens and end_ids:
        edited = edited.index_fill(0, torch.tensor(sorted(end_ids)), float("-inf"))
    if choosing.repetition_penalty != 1:
        edited = _repetition(edited, choosing.repetition_penalty, torch.tensor([*{*prompt_ids, *output_ids}]))
    if output_ids and (choosing.presence_penalty or choosing.frequency_penalty):
        seen, counts = torch.tensor(output_ids).unique(return_counts=True)
        penalty = choosing.presence_penalty + choosing.frequency_penalty * counts.float()
        edited = edited.index_add(0, seen, -penalty)
    return edited


def _repetition(logits: torch.Tensor, penalty: float, seen: torch.Tensor) -> torch.Tensor:
    """Makes tokens that occurred less likely: divides positive logits by the penalty, multiplies negative ones."""
    values = logits[seen]
    return logits.index_copy(
        0, seen, values.where(values < 0, values / penalty).where(values > 0, values * penalty)
    )


def _truncated(logits: torch.Tensor, choosing: Choosing) -> torch.Tensor:
    """The logits with -inf for what min_p, top_k and then top_p exclude; the likeliest token always stays."""
    import torch

    nothing = float("-inf")
    if choosing.min_p > 0:
        probabilities = logits.softmax(0)
        logits = logits.masked_fill(probabilities < choosing.min_p * probabilities.max(), nothing)
    if 0 < choosing.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(choosing.top_k).values[-1], nothing)
    if choosing.top_p < 1:
        ordered, places = logits.sort(descending=True)
        before = ordered.softmax(0).cumsum(0).roll(1)
        before[0] = 0
        out = torch.zeros_like(logits, dtype=torch.bool).index_copy_(0, places, before >= choosing.top_p)
        logits = logits.masked_fill(out, nothing)
    return logits


def _drawn(probabilities: torch.Tensor, generator: torch.Generator | None) -> int:
    """One token by its probability, `[V]` float64; never one of probability 0."""
    import torch

    bounds = probabilities.cumsum(0)
    point = torch.rand((), dtype=torch.float64, generator=generator) * bounds[-1]
    token = int(torch.searchsorted(bounds, point, right=True))
    return min(token, int(probabilities.nonzero()[-1]))
