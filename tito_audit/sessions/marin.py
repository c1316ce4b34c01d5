"""Rollouts from answers of an OpenAI-compatible API, with Marin's function names: exact, or refused.

marin-community/marin `lib/marin/src/marin/rl/environments/inference_ctx/base.py` goes on with another text if a
template fails, and looks ids up by token strings alone; these functions raise if an id is not certain.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tito_audit.errors import ChoiceError
from tito_audit.evidence.recover import recover_ids
from tito_audit.record.arrays import Ids, as_ids
from tito_audit.record.message import as_messages
from tito_audit.record.rollout import TokenText
from tito_audit.render.renderer import make_renderer
from tito_audit.sessions.fit import as_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

PromptInput: TypeAlias = str | Sequence[Mapping[str, Any]]
"""The text of one user message, or a list of messages."""
FloatArray: TypeAlias = NDArray[np.float32]

_TOKEN_ID = re.compile(r"token_id:(\d+)")
"""A token as vLLM writes it if a request sets `return_tokens_as_token_ids`."""
_NOT_AVAILABLE = -9999.0
"""vLLM's logprob where it is minus infinity or unknown."""
_ASK = "Set logprobs=True in the request, and return_token_ids=True where the server knows it (vLLM)."


@dataclass(frozen=True, slots=True)
class MarinRollout:
    """One call with its prompt, its response and a reward per token, in the fields of Marin's `Rollout`."""

    env_name: str
    env_example_id: str
    prompt_tokens: Ids
    """`[P]` int32"""
    response_tokens: Ids
    """`[C]` int32, the end token included when it was sampled"""
    response_logprobs: FloatArray
    """`[C]` float32"""
    token_rewards: FloatArray
    """`[C]` float32"""
    episode_reward: float
    correctness_reward: float | None = None
    is_truncated: bool = False
    """Whether a length limit cut the response."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt's messages and the answer."""

    def as_row(self) -> dict[str, Any]:
        """The rollout as a row of a log, which `scan` reads as the format `marin`."""
        row = asdict(self)
        arrays = {name: value.tolist() for name, value in row.items() if isinstance(value, np.ndarray)}
        return {**row, **arrays, "messages": [dict(message) for message in self.messages]}


def tokenize_prompt_with_chat_template(
    prompt: PromptInput, tokenizer: Tokenizer | str | Path, *, system_prompt: str | None = None
) -> list[int]:
    """The ids of a prompt as the chat template writes it, generation prompt included.

    SetupError where the tokenizer has no template, RenderError where the template refuses the messages.
    """
    own = as_tokenizer(tokenizer)
    messages = as_messages(_prompt_messages(prompt, system_prompt), "the prompt")
    text = make_renderer(own).render(messages, add_generation_prompt=True)
    ids: list[int] = own.encode(text).tolist()
    if not ids:
        raise ChoiceError(
            "The chat template writes nothing for this prompt.\nIts answer was sampled after another prompt."
        )
    return ids


def extract_tokens_and_logprobs_from_choice(
    choice: Any, tokenizer: Tokenizer | str | Path
) -> tuple[Ids, FloatArray]:
    """The ids that were sampled for a choice, `[C]` int32, and their logprobs, `[C]` float32.

    `choice` is one of an OpenAI answer, as an object or a mapping. Its own `token_ids` are taken where a server
    returned them; else each token's id is looked up by its bytes. ChoiceError where logprobs are missing, where
    there are no tokens, and where the id of a token is not certain.
    """
    stated = _field(choice, "logprobs")
    if stated is None:
        raise ChoiceError(f"The choice has no logprobs.\n{_ASK}")
    content = _field(stated, "content")
    if content is None and (tokens := _field(stated, "tokens")) is not None:  # a choice of /v1/completions
        values = _field(stated, "token_logprobs") or ()
        if len(values) != len(tokens):
            raise ChoiceError(f"The choice has {len(tokens)} tokens and {len(values)} logprobs.\n{_ASK}")
        content = [{"token": token, "logprob": value} for token, value in zip(tokens, values, strict=True)]
    if not content:
        raise ChoiceError(f"The choice has zero tokens in its logprobs.\n{_ASK}")
    entries = list(content)
    for place, entry in enumerate(entries):
        value = _field(entry, "logprob")
        if value is None or not math.isfinite(value) or value > 0 or value == _NOT_AVAILABLE:
            which = f"Token {place} ({_field(entry, 'token')!r})"
            raise ChoiceError(f"{which} has the logprob {value}, which no sampler gives.\n{_ASK}")
    logprobs = np.array([float(_field(entry, "logprob")) for entry in entries], np.float32)
    ids = _choice_ids(choice, entries, as_tokenizer(tokenizer))
    if not logprobs.any():
        warnings.warn(
            "all logprobs of the choice are zero: servers that do not know them write zeros, and ratios computed "
            "from them are wrong",
            stacklevel=2,
        )
    return ids, logprobs


def rollout_from_choice(
    prompt: PromptInput,
    choice: Any,
    env_name: str,
    env_example_id: str,
    reward: float,
    tokenizer: Tokenizer | str | Path,
    *,
    system_prompt: str | None = None,
    correctness_reward: float | None = None,
) -> MarinRollout:
    """The rollout of one choice.

    ChoiceError if the choice holds the ids of its prompt (`prompt_token_ids`) and they are not the chat
    template's.
    """
    own = as_tokenizer(tokenizer)
    of_prompt = tokenize_prompt_with_chat_template(prompt, own, system_prompt=system_prompt)
    prompt_ids = as_ids(of_prompt, "the prompt")
    stated = _field(choice, "prompt_token_ids")
    if stated is not None and as_ids(stated, "prompt_token_ids").tolist() != prompt_ids.tolist():
        raise ChoiceError(
            f"{own.name}: the prompt that the server reports is not what this chat template writes.\n"
            "The server uses another template or tokenizer, and its logprobs belong to another prompt.\n"
            "Pass the server's own tokenizer folder."
        )
    ids, logprobs = extract_tokens_and_logprobs_from_choice(choice, own)
    message, answer = _field(choice, "message"), {"role": "assistant", "content": _field(choice, "text")}
    if message is not None:
        wire = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
        answer |= {"content": None, **{key: value for key, value in wire.items() if value is not None}}
    return MarinRollout(
        env_name,
        env_example_id,
        prompt_ids,
        ids,
        logprobs,
        np.full(len(ids), reward, np.float32),
        float(reward),
        correctness_reward,
        _field(choice, "finish_reason") == "length",
        (*_prompt_messages(prompt, system_prompt), answer),
    )


def _prompt_messages(prompt: PromptInput, system_prompt: str | None) -> list[Mapping[str, Any]]:
    """The messages of a prompt; a text is one user message, after the system prompt if there is one."""
    if not isinstance(prompt, str):
        if system_prompt is not None:
            raise ValueError("system_prompt cannot be combined with a list of messages.")
        return list(prompt)
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    return [*system, {"role": "user", "content": prompt}]


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _choice_ids(choice: Any, entries: Sequence[Any], tokenizer: Tokenizer) -> Ids:
    """`[C]` the id of each token: from `token_ids`, from `token_id:N`, or looked up by its bytes."""
    stated = _field(choice, "token_ids")
    if stated is not None:
        ids = as_ids(stated, "token_ids")
        if len(ids) != len(entries):
            raise ChoiceError(
                f"The choice has {len(ids)} token ids and {len(entries)} logprobs.\nThey cannot be matched."
            )
        return ids
    named = [_TOKEN_ID.fullmatch(str(_field(entry, "token"))) for entry in entries]
    if all(named):
        return as_ids([int(match[1]) for match in named if match], "token_id")
    data = [_field(entry, "bytes") for entry in entries]
    texts = [
        TokenText(str(_field(entry, "token")), None if own is None else bytes(own), math.nan)
        for entry, own in zip(entries, data, strict=True)
    ]
    recovered = recover_ids(texts, tokenizer.vocabulary, tokenizer.eos_ids)
    if recovered.ids is None:
        raise ChoiceError(f"{tokenizer.name}: no id for a sampled token: {recovered.problem}.\n{_ASK}")
    if recovered.ambiguous:
        raise ChoiceError(
            f"{tokenizer.name}: {recovered.ambiguous} of {len(entries)} sampled tokens may have several ids, as "
            f"the vocabulary spells their bytes more than once.\n{_ASK}"
        )
    return recovered.ids
