"""What a template writes around the texts of a conversation, derived once for each shape of conversation.

    messages   user: Hi                        assistant: Hello
    scaffold   <|im_start|>user\\n ·  <|im_end|>\\n<|im_start|>assistant\\n ·     <|im_end|>\\n

If a template is known to look only for a few markers in texts and to strip them of white space (see
`fast/looked_for.py`), it writes conversations of the same shape alike, except for the words between markers. So
one of each shape is rendered with stand-ins for the words, which have every sign that a filter would change: a
template that changes words has no scaffold. One text in 256 is rendered anyway, as a check. Like everything that
the fast engine writes, a text is a guess until recorded ids confirm it, or the reference environment is known to
write the same scaffold.
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NamedTuple

from tito_audit.errors import RenderError
from tito_audit.record.memo import memoized
from tito_audit.record.message import Message
from tito_audit.render.facts import LookedFor
from tito_audit.render.renderer import Chat, Forms, Renderer, is_plain_text
from tito_audit.render.template import Template
from tito_audit.tokens.encoders import well_formed
from tito_audit.tokens.segments import pattern_of, shared_start

Shape = Hashable
"""Everything by which a template can tell values apart."""
_ROLE = "role"
_DETAILS = frozenset(("tool_calls", "tool_call_id", "name", "id"))
_MOST_SHAPES, _MOST_AROUND = 1 << 16, 128
_MOST_BETWEEN = 1 << 12
"""How many markers, and characters around words, a text may have."""
_MOST = 1 << 12
"""How many shapes of conversations are remembered."""
_MOST_WRITTEN = 1 << 24
"""How many characters a text, and all scaffolds together, may have."""
_ONE_IN = 256
"""One in this many texts is also rendered."""
_TAG = "Zq7x"
_SIGNS = "\"\\'\n\t  <&>%s {{}} Aa \u00df\u00e9\u4e2d/"
"""What filters escape, change or read."""


class ReadMessage(NamedTuple):
    """What a template can tell about a message."""

    shape: int
    """A number for its shape."""
    around: int
    """A number for what a template sees of it while it writes another one: its shape without the details of its
    calls."""
    whole: int
    """A number for all of it but its words; -1 if a template may tell words from stand-ins."""
    words: tuple[str, ...]
    """Its texts between markers, without the white space around them."""


class Shapes:
    """Gives the shapes of messages for one template."""

    def __init__(self, looked_for: LookedFor) -> None:
        whole, inside, sizes = looked_for
        self._whole = frozenset(whole)
        self._inside = inside
        self._sizes = frozenset((*sizes, 0, 1))
        self._measured = sizes
        self._begin = shared_start(inside[0], inside[-1]) if inside else ""
        """How every marker begins, to search for that first."""
        self._split = re.compile(f"({pattern_of(sorted(inside))})").split if inside else None
        cuts = [(marker[:size], marker[size:]) for marker in inside for size in range(1, len(marker))]
        self._parts = tuple({first for first, _ in cuts}), tuple({last for _, last in cuts})
        """With what a marker may begin and end without being whole."""
        self._overlap = not {*self._parts[0]}.isdisjoint(self._parts[1])
        self._of: dict[type, Callable[[Any], Shape]] = {
            str: self._text,
            int: self._number,
            float: self._number,
            bool: lambda value: value,
            type(None): lambda value: value,
            dict: self._object,
            list: lambda value: tuple(map(self.of, value)),
        }
        self._words: list[str] = []
        self._numbers: list[str] = []
        self._told_apart = False
        """Whether the template may tell the words of the value that is read from stand-ins."""
        self._of_words: dict[tuple[Any, ...], ReadMessage] = {}
        """By keys and role, what was read of messages with only a role and words."""
        self._shapes: dict[Shape, int] = {}
        self._around: dict[Shape, int] = {}
        self._wholes: dict[Shape, int] = {}

    def read(self, messages: Sequence[Message], forms: Forms) -> list[ReadMessage] | None:
        """What the template can tell about each of these messages; None if there are too many shapes."""
        before, of_words = forms.read, {} if self._measured else self._of_words
        for message in messages:
            if id(message) in before:
                continue
            wire, alike = message.wire, None
            words = wire.get("content")
            plain = len(wire) == 2 and type(words) is str and type(wire) is dict and words.strip() == words
            if plain and words and words not in self._whole and not (self._inside and self._begin in words):
                alike = of_words.get((*wire, wire.get(_ROLE)))
            if alike is not None:  # as for most messages: only the words are new, and no Python makes the tuple
                before[id(message)] = tuple.__new__(ReadMessage, (*alike[:3], (words,))), message
                continue
            if len(self._shapes) > _MOST_SHAPES or len(self._around) > _MOST_AROUND:
                return None
            try:
                if not is_plain_text(wire):
                    wire = forms.of(message, parsed=True, no_content="absent")
                self._words, self._numbers, self._told_apart = [], [], False
                shape = self._object(wire)
                if _DETAILS.isdisjoint(wire):
                    around: tuple[object, ...] = (False, *shape)
                else:
                    around = bool(wire.get("tool_calls")), *[pair for pair in shape if pair[0] not in _DETAILS]
                read = ReadMessage(
                    self._shapes.setdefault(shape, len(self._shapes)),
                    self._around.setdefault(around, len(self._around)),
                    -1
                    if self._told_apart or len(self._wholes) > _MOST_SHAPES
                    else self._wholes.setdefault((shape, *self._numbers), len(self._wholes)),
                    tuple(self._words),
                )
            except (TypeError, RecursionError):  # values that are not JSON, or too much of them
                return None
            if type(wire) is dict and wire.keys() == {_ROLE, "content"} and read.words == (wire["content"],):
                self._of_words[(*wire, wire[_ROLE])] = read
            before[id(message)] = read, message  # kept alive, so no other can get its id
        return [before[id(message)][0] for message in messages]

    def of(self, value: Any) -> Shape:
        """The shape of a value of plain JSON types, such as a message; TypeError for any other."""
        read = self._of.get(type(value))
        if read is None:
            raise TypeError(f"a {type(value).__name__} has no shape")
        return type(value), read(value)

    def with_stand_ins(self, value: Any, stand_in: Callable[[], str]) -> Any:
        """A value with its words replaced, in the order in which they are read."""
        if type(value) is str:
            between, words = self._divided(value)
            return between[0] + "".join([stand_in() + after for _, after in zip(words, between[1:], strict=True)])
        if type(value) is dict:
            return {
                key: inner if key == _ROLE and type(inner) is str else self.with_stand_ins(inner, stand_in)
                for key, inner in value.items()
            }
        return [self.with_stand_ins(inner, stand_in) for inner in value] if type(value) is list else value

    def _object(self, value: Mapping[str, Any]) -> tuple[tuple[str, Shape], ...]:
        pairs: list[tuple[str, Shape]] = []
        for key, inner in value.items():
            if type(inner) is not str:
                pairs.append((key, self.of(inner)))
            else:
                pairs.append((key, inner if key == _ROLE else (str, self._text(inner))))
        return tuple(pairs)

    def _number(self, value: float) -> Shape:
        self._numbers.append(repr(value))
        return value if value in self._sizes else "number"

    def _text(self, text: str) -> Shape:
        if self._split is None or self._begin not in text or True not in [each in text for each in self._inside]:
            if not self._measured and text and text not in self._whole and text.strip() == text:
                self._words.append(text)
                return None
            marked: object = None
        else:
            marked = self._overlap and [*map(text.count, self._inside)]
        between, words = self._divided(text)
        if len(between) + sum(map(len, between)) > _MOST_BETWEEN:
            raise TypeError("a text with more between its words than is remembered")
        self._words += words
        firsts, lasts = self._parts
        if marked is not None:
            cut = [word.endswith(firsts) or word.startswith(lasts) for word in words]
            self._told_apart |= self._overlap or True in cut
        if self._measured:
            self._told_apart |= min(map(len, words), default=len(text)) <= max(self._measured)
        sizes = [(len(text) > size) - (len(text) < size) for size in self._measured]
        return tuple(sizes), tuple(marked) if isinstance(marked, list) else None, tuple(between)

    def _divided(self, text: str) -> tuple[list[str], list[str]]:
        """What is before, between and after the words of a text, and the words."""
        between, words, before = [], [], ""
        for number, part in enumerate([text] if self._split is None else self._split(text)):
            word = "" if number & 1 else part.strip()
            if not word or word in self._whole:
                before += part
            else:
                at = part.index(word)
                between.append(before + part[:at])
                words.append(word)
                before = part[at + len(word) :]
        return [*between, before], words


_Run = Callable[[Chat, "Inputs", bool], str | None]
"""An engine: what it writes for messages, with a generation prompt or without."""


class Inputs(NamedTuple):
    """What a template gets besides messages."""

    number: int
    variables: Mapping[str, Any]

    def with_chat(self, chat: Chat, opens: bool) -> dict[str, Any]:
        """All variables of a rendering."""
        return {**self.variables, "messages": chat, "add_generation_prompt": opens}


@dataclass(slots=True, eq=False)
class Scaffold:
    """What a template writes around the words of conversations of one shape."""

    pieces: tuple[str, ...]
    """`[words written + 1]`"""
    order: tuple[int, ...]
    """The word after each piece; `~word` if it is written as part of a JSON text."""
    opener: str | None
    """What a generation prompt adds after any messages; None if this may depend on them."""
    is_exact: bool | None = None
    """Whether the reference environment writes it too; None: not known yet."""

    def text(self, words: Sequence[str]) -> str:
        """The conversation with these words."""
        parts = [""] * (2 * len(self.order) + 1)
        parts[::2] = self.pieces
        parts[1::2] = [words[at] if at >= 0 else json_inner(words[~at]) for at in self.order]
        return "".join(parts)


def json_inner(text: str) -> str:
    """A text as JSON writes it, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Scaffolds:
    """The scaffolds of one template."""

    def __init__(self, template: Template, looked_for: LookedFor) -> None:
        self.shapes = Shapes(looked_for)
        self._template = template
        self._inputs: dict[bytes, int] = {}
        self._seen: set[int] = set()
        """Hashes of shapes of conversations."""
        self._scaffolds: dict[tuple[int, ...], Scaffold | None] = {}
        self._characters = 0
        self._used = 0
        whole, inside, sizes = looked_for
        signs = _SIGNS * (1 + max(sizes, default=0) // len(_SIGNS))
        for marker in inside:
            signs = signs.replace(marker, "")
        self._signs = signs + "\u00a4"
        """How a stand-in goes on after its number."""
        self._find = re.compile(
            f"\u00a4{_TAG}(\\d+)w(?:({re.escape(self._signs)})|{re.escape(json_inner(self._signs))})"
        )
        # A template that looks for one character may look at each of a text, and one may know the time.
        self._off = (
            True in [len(text) == 1 for text in whole]
            or True in [marker in self._stand_in(0) for marker in inside]
            or json_inner(self._signs) == self._signs
            or max(sizes, default=0) > _MOST
            or "strftime_now" in template.source
        )

    def inputs(self, variables: Mapping[str, Any]) -> Inputs | None:
        """All that a template gets besides messages; None if it cannot be compared, or there is too much."""
        try:
            key = marshal.dumps(dict(variables), 2)
        except ValueError:
            return None
        number = self._inputs.get(key)
        if number is None:
            if len(self._inputs) >= 64:
                return None
            number = self._inputs[key] = len(self._inputs)
        return Inputs(number, variables)

    def written(
        self, messages: Sequence[Message], inputs: Inputs, opens: bool, forms: Forms
    ) -> tuple[str, Scaffold] | None:
        """What the fast engine writes for these messages, and their scaffold; None if that is not known."""
        read = self.shapes.read(messages, forms) if not self._off else None
        key = (inputs.number, opens, *[each.whole for each in read]) if read else (-1,)
        if read is None or -1 in key:
            return None
        if key not in self._scaffolds and not self._derives(key, messages, inputs, opens, forms):
            return None
        scaffold = self._scaffolds[key]
        if scaffold is None:
            return None
        text = scaffold.text([word for each in read for word in each.words])
        self._used += 1
        if self._used % _ONE_IN == 0:
            rendered = None if scaffold.is_exact else self._fast(self._chat(messages, forms), inputs, opens)
            if text != (rendered or self._reference(self._chat(messages, forms), inputs, opens)):
                self._off = True
                return None
        # A lone surrogate, which no tokenizer keeps, or more than templates may write.
        if len(text) > _MOST_WRITTEN or not (text.isascii() or well_formed(text) is text):
            return None
        return text, scaffold

    def _derives(
        self, key: tuple[int, ...], messages: Sequence[Message], inputs: Inputs, opens: bool, forms: Forms
    ) -> bool:
        """Whether it is now known how conversations of this shape are written; only if there are several."""
        if len(self._scaffolds) >= _MOST or self._characters > _MOST_WRITTEN:
            return False
        if hash(key) not in self._seen:
            if len(self._seen) < _MOST_SHAPES:
                self._seen.add(hash(key))
            return False
        scaffold = self._derived(self._fast, messages, inputs, opens, forms)
        self._scaffolds[key] = scaffold
        self._characters += sum(map(len, scaffold.pieces)) if scaffold is not None else 0
        return True

    def is_exact(
        self, scaffold: Scaffold, messages: Sequence[Message], inputs: Inputs, opens: bool, forms: Forms
    ) -> bool:
        """Whether the reference environment writes these messages, and all of their shape, with this scaffold."""
        if scaffold.is_exact is None:
            other = self._derived(self._reference, messages, inputs, opens, forms)
            scaffold.is_exact = (
                other is not None and other.pieces == scaffold.pieces and other.order == scaffold.order
            )
        return scaffold.is_exact

    def _derived(
        self, run: _Run, messages: Sequence[Message], inputs: Inputs, opens: bool, forms: Forms
    ) -> Scaffold | None:
        """The scaffold of these messages by one engine; None if there is none."""
        numbers = count()
        chat = self._chat(messages, forms)
        try:
            stand_ins = self.shapes.with_stand_ins(chat, lambda: self._stand_in(next(numbers)))
        except RecursionError:  # just not too deep to be read
            return None
        scaffold = self._around(run(stand_ins, inputs, opens), inputs)
        read = self.shapes.read(messages, forms) or ()
        words = [*chain.from_iterable(each.words for each in read)]
        return scaffold if scaffold is not None and scaffold.text(words) == run(chat, inputs, opens) else None

    def _around(self, text: str | None, inputs: Inputs) -> Scaffold | None:
        """What stands around stand-ins; None if one of them was changed."""
        if text is None:
            return None
        parts = self._find.split(text)
        pieces = tuple(parts[::3])
        if True in ["\u00a4" in piece or _TAG.lower() in piece.lower() for piece in pieces]:
            return None
        numbers = zip(map(int, parts[1::3]), parts[2::3], strict=True)
        order = tuple([at if verbatim else ~at for at, verbatim in numbers])
        return Scaffold(pieces, order, self._template.opener(inputs.variables))

    def _stand_in(self, number: int) -> str:
        return f"\u00a4{_TAG}{number}w{self._signs}"

    def _chat(self, messages: Sequence[Message], forms: Forms) -> Chat:
        return forms.chat(messages, parsed=True, no_content="absent")

    def _fast(self, chat: Chat, inputs: Inputs, opens: bool) -> str | None:
        """What the fast engine writes; None if the template refuses, or it does not know."""
        from tito_audit.render.fast.render import GivenUp

        fast = self._template.fast
        try:
            return fast.run(inputs.with_chat(chat, opens)) if fast is not None else None
        except (RenderError, GivenUp):
            return None

    def _reference(self, chat: Chat, inputs: Inputs, opens: bool) -> str | None:
        """What the reference environment writes; None if the template refuses."""
        try:
            return self._template.run(inputs.with_chat(chat, opens))
        except RenderError:
            return None


def scaffolds_of(renderer: Renderer, with_tools: bool) -> Scaffolds | None:
    """The scaffolds of a renderer's template; None if more than shapes may decide what it writes."""
    if renderer.tool_arguments == "string" or renderer.wraps_texts:
        return None
    return scaffolds(renderer.template(with_tools))


@memoized
def scaffolds(template: Template) -> Scaffolds | None:
    """The same for a template that gets parsed arguments of tools."""
    return None if template.looked_for is None else Scaffolds(template, template.looked_for)
