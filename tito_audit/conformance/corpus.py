"""The conversations of the table, and the form in which a model sampled their answers.

Raise `CORPUS_VERSION` when a conversation is added, removed or changed: tables of different versions are not
compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from tito_audit.templates import probes
from tito_audit.templates.probes import ANSWER, REASONING, TOOLS, USER, Probe, assistant, make_probe, tool_call

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
