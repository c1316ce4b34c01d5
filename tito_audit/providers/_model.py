"""A causal language model in this process: synchronous forward passes with a KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tito_audit.errors import ProviderError, SetupError
from tito_audit.providers._sampling import refusal
from tito_audit.settings.home import user_path
from tito_audit.tokens.load import load_tokenizer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CausalModel:
    """A transformers model with its tokenizer's folder and its settings."""

    model: Any
    """`AutoModelForCausalLM`, in evaluation mode."""
    folder: str
    """Where its tokenizer is."""

    @cached_property
    def vocabulary_size(self) -> int:
        """The number of embeddings; ids must be below it."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @cached_property
    def context(self) -> int | None:
        """Its context length in tokens; None if its configuration does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Its end tokens, from its generation settings or else its configuration."""
        for settings in (self.model.generation_config, self.model.config):
            end_ids = getattr(settings, "eos_token_id", None)
            if end_ids is not None:
                return tuple(end_ids) if isinstance(end_ids, list | tuple) else (int(end_ids),)
        return ()

    @cached_property
    def defaults(self) -> Mapping[str, Any]:
        """Sampling defaults from its generation settings, as vLLM reads them."""
        wanted = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        stated = self.model.generation_config.to_diff_dict() if self.model.generation_config else {}
        return {name: stated[name] for name in wanted if stated.get(name) is not None}

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        """The bytes of each token."""
        return load_tokenizer(self.folder).vocabulary.token_bytes

    @cached_property
    def has_cache(self) -> bool:
        """Whether its cache can be kept, split and continued by any number of ids, as in pure attention models; if
        not (Mamba, Qwen3-Next), every pass starts at the first id.
        """
        import torch

        with torch.inference_mode():
            output = self.model(torch.zeros(1, 1, dtype=torch.long, device=self.model.device), use_cache=True)
        cache = getattr(output, "past_key_values", None)
        return all(hasattr(part, "batch_select_indices") for part in (cache, *getattr(cache, "layers", ())))

    @cached_property
    def cache_name(self) -> str:
        """What the model calls its cache: Transformers renamed it in 5.24."""
        return "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    @cached_property
    def keeps_few(self) -> bool:
        """Whether it can compute logits for the last positions only."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def forward(self, ids_NT: Sequence[Sequence[int]], cache: Any, keep: int) -> tuple[torch.Tensor, Any]:
        """The logits `[N, keep, V]` float32 of the last `keep` ids after the cache, and the new cache; None if it
        has none.
        """
        import torch

        ids = torch.tensor(ids_NT, device=self.model.device)
        few = {"logits_to_keep": keep} if self.keeps_few else {}
        if not self.has_cache:
            return self.model(ids, use_cache=False, **few).logits[:, -keep:].float().cpu(), None
        output = self.model(ids, use_cache=True, **{self.cache_name: cache}, **few)
        return output.logits[:, -keep:].float().cpu(), output.past_key_values

    def checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids as plain integers; ProviderError if the model cannot take them."""
        if self.model.training:
            raise ProviderError(
                "the model is in training mode, where dropout changes its logprobs: call model.eval()"
            )
        plain = tuple(int(token) for token in ids)
        if not plain:
            raise refusal("there are no ids: a model needs at least one token to continue")
        wrong = next((at for at, token in enumerate(plain) if not 0 <= token < self.vocabulary_size), None)
        if wrong is not None:
            raise refusal(
                f"id {plain[wrong]} at position {wrong} is outside the vocabulary of {self.vocabulary_size}"
            )
        if self.context is not None and len(plain) > self.context:
            raise refusal(f"{len(plain)} tokens do not fit into the model's context of {self.context}")
        return plain


def load_model(name: str, dtype: str, device: str) -> CausalModel:
    """The model of a folder or hub name; SetupError without torch, or if it cannot be loaded."""
    path = user_path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise SetupError(f"{name}: no config.json here.\nPass the folder of a model, with its weights.")
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise SetupError(f"{name}: no such folder.\nPass the folder of a model, or a hub name such as org/model.")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise SetupError(
            f"A model in this process needs torch and transformers: pip install 'tito-audit[hf]' ({error})"
        ) from None
    where = str(path) if path.is_dir() else name
    key = "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"
    with _no_progress_bars():
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(where, **{key: getattr(torch, dtype)})
        except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
            raise SetupError(f"{name}: the model cannot be loaded: {str(error).splitlines()[0]}") from error
    return CausalModel(model.to(device).eval(), where)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """No progress bars on stderr while a model loads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
