"""Logs that are written here with a known template, arguments and date: `identify` has to find them again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import Any

import jinja2
import numpy as np
import pytest

from tests.tables import table
from tests.tiers import DEEP, examples
from tests.toy import toy_renderer, toy_tokenizer
from tito_audit.evidence.gather import gather
from tito_audit.identify.engine import Candidate, Identification, MissingInput, WrittenShare, identify
from tito_audit.record.finding import Finding
from tito_audit.record.message import as_messages, as_tools
from tito_audit.record.rollout import Place, Rollout, TrainingRow, Turn
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.rules import all_rules
from tito_audit.run.check import check
from tito_audit.settings.model import Settings
from tito_audit.settings.readers import parse_arguments as arguments_given
from tito_audit.settings.readers import parse_clock as clock_given
from tito_audit.tokens.tokenizer import Tokenizer
from tito_audit.ways.explain import explain_head
from tito_audit.ways.way import GIVEN_TEMPLATE, OWN_TEMPLATE, DepartureKind, Explanation, NamedTemplate

SOURCE = """
{%- if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{%- set effort = reasoning_effort | default('medium') %}
{{- bos_token }}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}Date: {{ date_string }}
Effort: {{ effort }}
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% for message in messages %}
{%- if message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content and (keep_thinking or loop.last) %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}</tool_call>{% endfor %}<|im_end|>
{% elif message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>
{% endif %}{% endif %}
"""
MINE = NamedTemplate("mine.jinja", SOURCE, "mine.jinja")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
WORDS = ("How are you?", "What is 2 + 2?", "Tell me more.", "The sky is blue\nand wide.", "Why — so soon?")


@dataclass(frozen=True)
class Written:
    """How a log is written."""

    source: str = SOURCE
    args: Mapping[str, Any] = field(default_factory=dict)
    date: datetime = datetime(2024, 7, 26)
    parsed: bool = True
    shows_tools: bool = True
    system: str | None = None
    prefill: str = ""
    tokenizer: str = "toy_bpe"

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str:
        """A prompt, by jinja2 alone."""
        sent = [json.loads(json.dumps(message)) for message in messages]
        if self.system is not None:
            sent.insert(0, {"role": "system", "content": self.system})
        for message in sent if self.parsed else ():
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        special = {"bos_token": "", **toy_tokenizer(self.tokenizer).special_tokens}
        scope = {**special, **self.args, "messages": sent, "tools": tools if tools and self.shows_tools else None}
        return (
            str(
                _compiled(self.source).render(**scope, strftime_now=self.date.strftime, add_generation_prompt=True)
            )
            + self.prefill
        )

    def rollout(self, row: int, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> Rollout:
        """A rollout with a prompt before each answer."""
        tokenizer, turns = toy_tokenizer(self.tokenizer), []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = tokenizer.encode(self.text(messages[:index], tools))
                answer = tokenizer.encode((message["content"] or "") + "<|im_end|>")
                turns.append(Turn(prompt, answer, message_index=index, finish_reason="stop"))
        read = as_messages([dict(message) for message in messages], "messages")
        return Rollout(Place("log", row), "toy", read, as_tools(list(tools), "tools"), turns=tuple(turns))


def writes_all_prompts(identified: Identification) -> bool:
    """Whether every first prompt is written exactly."""
    return share(identified).prompts == share(identified).of_prompts > 0


@cache
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)


def conversations(
    rng: random.Random, number: int, *, system: bool = True, calls: bool = False
) -> Iterator[list[dict[str, Any]]]:
    """Conversations of several turns, with tool calls and reasoning if they have calls."""
    for row in range(number):
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"Be kind to {row}."}] if system else []
        for turn in range(rng.randint(1, 3)):
            messages.append({"role": "user", "content": f"{rng.choice(WORDS)} {row}"})
            answer: dict[str, Any] = {"role": "assistant", "content": rng.choice(WORDS)}
            if calls:
                answer["reasoning_content"] = f"Let me see, {turn}."
                text = json.dumps({"at": row, "of": "é"}, separators=(",", ":"))
                answer["tool_calls"] = [{"type": "function", "function": {"name": "look", "arguments": text}}]
            messages.append(answer)
            if calls:
                messages += [{"role": "tool", "content": "12"}, {"role": "assistant", "content": "It is 12."}]
        yield messages


def log(
    written: Written, number: int = 12, seed: int = 1, *, system: bool = True, calls: bool = False
) -> list[Rollout]:
    """A log of rollouts that were written so."""
    tools = TOOLS if calls else []
    several = conversations(random.Random(seed), number, system=system, calls=calls)
    return [written.rollout(row, messages, tools) for row, messages in enumerate(several)]


def search(rollouts: Sequence[Rollout], *templates: NamedTemplate, tokenizer: str = "toy_bpe") -> Identification:
    return identify(rollouts, [Candidate(toy_tokenizer(tokenizer), templates or (OWN_TEMPLATE, MINE))])


def best(identified: Identification) -> Explanation:
    assert identified.best is not None, identified
    return identified.best.explanation


def share(identified: Identification) -> WrittenShare:
    """How much of the log the best explanation writes."""
    assert identified.best is not None, identified
    return identified.best.share


def undetermined(identified: Identification) -> tuple[str, ...]:
    assert identified.best is not None, identified
    return tuple(identified.best.undetermined)


def kinds(identified: Identification) -> list[DepartureKind]:
    """What the best explanation departs in."""
    return [departure.kind for departure in best(identified).departures]


def unsure(identified: Identification, because: str = "") -> bool:
    """Whether nothing is sure, for this reason."""
    assert because in identified.unsure_because, identified.unsure_because
    return not identified.sure


def writes(explanation: Explanation, rollouts: Sequence[Rollout]) -> bool:
    """Whether the renderer of an explanation writes every prompt exactly."""
    tokenizer = next(
        tokenizer
        for tokenizer in map(toy_tokenizer, ("toy_bpe", "toy_metaspace"))
        if tokenizer.name == explanation.tokenizer
    )
    renderer = explanation.renderer(tokenizer)
    return all(
        np.array_equal(
            tokenizer.encode(
                renderer.render(rollout.messages[: turn.message_index], rollout.tools, add_generation_prompt=True)
            ),
            turn.prompt_ids,
        )
        for rollout in rollouts
        for turn in rollout.turns
    )


def test_a_log_of_the_tokenizers_own_template_needs_no_other_flags() -> None:
    written = Written(toy_tokenizer().chat_templates["default"])
    identified = search(log(written))
    assert identified.sure
    assert best(identified).flags() == ("-t", toy_tokenizer().name)
    assert writes_all_prompts(identified)
    assert undetermined(identified) == ()
    assert kinds(identified) == []


def test_arguments_date_and_template_are_found_with_the_flags_that_say_them() -> None:
    written = Written(args={"enable_thinking": False, "reasoning_effort": "high"})
    identified = search(log(written))
    assert identified.sure, identified.unsure_because
    explanation = best(identified)
    words = ("-t", toy_tokenizer().name, "--chat-template", "mine.jinja")
    flags = ("--template-arg", "reasoning_effort=high", "--template-arg", "enable_thinking=false")
    assert explanation.flags()[:4] == words
    assert sorted(explanation.flags()[4:]) == sorted((*flags, "--clock", "2024-07-26"))
    assert explanation.config() == {
        "tokenizer": toy_tokenizer().name,
        "chat-template": "mine.jinja",
        "template-args": {"reasoning_effort": "high", "enable_thinking": False},
        "clock": "2024-07-26",
    }
    settings = explanation.settings(Settings(select=("TPL",)))
    assert settings.select == ("TPL",)
    assert settings.clock == datetime(2024, 7, 26)
    assert dict(settings.template_args) == {"reasoning_effort": "high", "enable_thinking": False}
    assert "keep_thinking" in undetermined(identified)


def random_way(rng: random.Random) -> tuple[Written, bool]:
    """A random way to write a log, and whether it has tool calls."""
    calls = rng.random() < 0.5
    args: dict[str, Any] = {}
    for name, values in (
        ("enable_thinking", (True, False)),
        ("keep_thinking", (True, False)),
        ("reasoning_effort", ("low", "very high", "7")),
        ("date_string", ("1 May 2023", "today")),
    ):
        if rng.random() < 0.4:
            args[name] = rng.choice(values)
    date = datetime(2024, rng.randint(1, 12), rng.randint(1, 28))
    shows = not calls or rng.random() < 0.7
    return Written(args=args, date=date, parsed=rng.random() < 0.5, shows_tools=shows), calls


@pytest.mark.parametrize("seed", range(examples(8, 150)))
def test_whatever_wrote_a_log_is_found_and_writes_other_prompts_too(seed: int) -> None:
    written, calls = random_way(random.Random(seed))
    identified = search(log(written, seed=seed, calls=calls))
    assert identified.sure, identified.unsure_because
    held_out = log(written, 6, seed=seed + 1, calls=calls)
    assert writes(best(identified), held_out)
    assert all(writes(other, log(written, seed=seed, calls=calls)) for other in identified.found[0].equal)


@pytest.mark.parametrize("seed", range(examples(2, 40)))
def test_a_log_of_an_unknown_template_is_never_surely_explained(seed: int) -> None:
    written, calls = random_way(random.Random(seed))
    other = SOURCE.replace("<|im_start|>{{ message.role }}\n", "<|im_start|>{{ message.role }}: ")
    identified = search(log(replace(written, source=other), seed=seed, calls=calls))
    assert not identified.sure
    assert identified.unsure_because
    assert identified.left


def test_the_other_tokenizer_is_named_and_the_right_one_found() -> None:
    rollouts = log(Written(toy_tokenizer().chat_templates["default"]), 16)
    wrong, right = toy_tokenizer("toy_metaspace"), toy_tokenizer()
    alone = identify(rollouts, [Candidate(wrong)])
    assert not alone.sure
    offered = identify(rollouts, [Candidate(wrong), Candidate(right)])
    assert offered.sure
    assert best(offered).tokenizer == right.name


def test_a_log_without_messages_is_told_by_its_tokenizer_alone() -> None:
    rollouts = [replace(rollout, messages=()) for rollout in log(Written())]
    identified = search(rollouts)
    assert identified.lack is MissingInput.NO_MESSAGES
    assert [fit.fits for fit in identified.tokenizers] == [True]
    assert identified.tokenizers[0].same == 1.0
    assert not identified.sure
    assert [ending.piece for ending in identified.endings] == ["<|im_end|>"]


def test_a_log_without_ids_is_not_explained() -> None:
    rollouts = [replace(rollout, turns=()) for rollout in log(Written())]
    assert search(rollouts).lack is MissingInput.NO_IDS
    assert search([]).lack is MissingInput.NO_IDS


def test_dates_that_differ_are_read_from_each_prompt() -> None:
    several = list(conversations(random.Random(3), 12))
    dates = [datetime(2024, 5, 1 + row // 6) for row in range(12)]
    rollouts = [
        Written(date=date).rollout(row, messages)
        for row, (date, messages) in enumerate(zip(dates, several, strict=True))
    ]
    identified = search(rollouts)
    (departure,) = best(identified).departures
    assert departure.kind is DepartureKind.CLOCK_VARIES
    assert departure.values == ("2024-05-01", "2024-05-02")
    assert identified.sure
    assert writes_all_prompts(identified)
    assert best(identified).clock in dates
    assert best(identified).flags()[-2:] == ("--clock", "recorded")
    assert best(identified).config()["clock"] == best(identified).settings(Settings()).clock == "recorded"


def test_a_template_that_never_opens_as_the_log_does_without_a_system_message_is_not_sure() -> None:
    opened = [{"role": "system", "content": "Be kind."}]
    several = [[*opened, *conversation] for conversation in conversations(random.Random(5), 30, system=False)]
    several.append(several[0][1:])
    rollouts = [Written().rollout(row, messages) for row, messages in enumerate(several)]
    greets = "{% if messages[0].role != 'system' %}Hi.{% endif %}" + SOURCE
    identified = search(rollouts, NamedTemplate("greets", greets))
    assert unsure(identified, "none of the first prompts without a system message, without tools (1)")
    assert search(rollouts).sure


def own_systems(written: Written, number: int = 12, *, tools: bool = False) -> list[Rollout]:
    """A log whose prompts open with one of a few system prompts, of which the messages say nothing."""
    several = list(conversations(random.Random(4), number, system=False))
    return [
        replace(written, system=SYSTEMS[row % len(SYSTEMS)]).rollout(row, messages, TOOLS if tools else [])
        for row, messages in enumerate(several)
    ]


SYSTEMS = ("You are a parrot.", "Say little.\nSay it kindly.", "Écris en français !")


@pytest.mark.parametrize("masked", [None, True])
@pytest.mark.parametrize("tools", [False, True])
def test_system_prompts_that_differ_and_the_messages_lack_are_read_row_by_row(
    tools: bool, masked: bool | None
) -> None:
    rollouts = own_systems(Written(ROLES), tools=tools)
    if masked:
        rollouts = [as_row(rollout) for rollout in rollouts]
    identified = search(rollouts, ROLES_TEMPLATE)
    assert writes_all_prompts(identified)
    assert share(identified).turns == share(identified).of_turns
    (departure,) = best(identified).departures
    assert departure.kind is DepartureKind.SYSTEM_VARIES
    assert sorted(departure.values) == sorted(SYSTEMS)
    assert identified.sure, identified.unsure_because


ROLES = """
{%- if messages[0].role != 'system' and default is not defined %}<|im_start|>system
Be good.{% if tools %} {{ tools | tojson }}{% endif %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if message.role == 'system' and tools %} {{ tools | tojson }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""
ROLES_TEMPLATE = NamedTemplate("roles.jinja", ROLES, "roles.jinja")


def test_a_template_that_writes_the_system_prompt_of_some_rows_is_likelier_than_one_that_reads_it() -> None:
    plain = [Written(ROLES).rollout(row, each) for row, each in enumerate(conversations(random.Random(8), 6))]
    bare = [
        replace(rollout, messages=rollout.messages[1:], turns=tuple(map(_earlier, rollout.turns)))
        for rollout in plain
    ]
    none = list(conversations(random.Random(9), 6, system=False))
    rollouts = [*bare, *(Written(ROLES).rollout(6 + row, each) for row, each in enumerate(none))]
    other = NamedTemplate("other.jinja", ROLES.replace("Be good.", "Be bad."), "other.jinja")
    for templates in ((other, ROLES_TEMPLATE), (ROLES_TEMPLATE, other)):
        assert best(search(rollouts, *templates)).template == ROLES_TEMPLATE


def _earlier(turn: Turn) -> Turn:
    assert turn.message_index is not None
    return replace(turn, message_index=turn.message_index - 1)


@pytest.mark.parametrize(*table(__file__, "texts_that_a_template_may_have_written_are_no_sure_system_prompts"))
def test_texts_that_a_template_may_have_written_are_no_sure_system_prompts(
    change: tuple[str, str], because: str
) -> None:
    """The log is of a template that writes more; the one that is offered could read that as system prompts."""
    identified = search(own_systems(Written(ROLES.replace(*change))), ROLES_TEMPLATE)
    if change[1] == "Be good.":  # written only without a system prompt, of which there is none here
        assert identified.sure, identified.unsure_because
        return
    assert unsure(identified, because)


def test_a_default_that_depends_on_the_tools_is_no_system_prompt_of_its_own() -> None:
    source = ROLES.replace("Be good.", "{% if tools %}Call well{% else %}Talk{% endif %}.")
    several = list(conversations(random.Random(4), 12, system=False))
    rollouts = [Written(source).rollout(row, each, TOOLS * (row % 2)) for row, each in enumerate(several)]
    assert unsure(search(rollouts, ROLES_TEMPLATE), "depend on tools or arguments")


def test_what_a_template_writes_of_stated_arguments_is_no_system_prompt() -> None:
    rollouts = own_systems(Written(ROLES))
    stated = [
        replace(rollout, template_kwargs={"persona": SYSTEMS[row % 3]}) for row, rollout in enumerate(rollouts)
    ]
    assert unsure(search(stated, ROLES_TEMPLATE), "depend on tools or arguments")


def test_messages_that_a_log_lacks_are_not_read_as_system_prompts() -> None:
    """The first question and its answer are missing: what stands before the second is no system prompt."""
    rollouts = []
    for row, messages in enumerate(conversations(random.Random(6), 24, system=False)):
        whole = Written(ROLES).rollout(row, [{"role": "system", "content": SYSTEMS[row % 3]}, *messages])
        if len(whole.turns) > 1:
            turns = [replace(turn, message_index=(turn.message_index or 0) - 3) for turn in whole.turns[1:]]
            rollouts.append(replace(whole, messages=whole.messages[3:], turns=tuple(turns)))
    identified = search(rollouts, ROLES_TEMPLATE)
    assert len(rollouts) > 8
    assert not identified.sure
    assert identified.best is None or share(identified).prompts == 0


def test_a_text_in_the_message_of_the_user_is_no_message_of_its_own() -> None:
    source = """{% if messages[0].role == 'system' %}{% set before = messages[0].content + '\n\n' %}
{%- set rest = messages[1:] %}{% else %}{% set before = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}<|im_start|>{{ message.role }}
{{ before if loop.first else '' }}{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    identified = search(own_systems(Written(source)), NamedTemplate("merged", source, "merged.jinja"))
    assert writes_all_prompts(identified)
    assert unsure(identified, "not written as a separate message")


def test_few_prompts_do_not_prove_that_each_has_its_own_system_prompt() -> None:
    assert not search(own_systems(Written(ROLES), 3), ROLES_TEMPLATE).sure


@pytest.mark.parametrize("kind", [DepartureKind.SYSTEM_ADDED, DepartureKind.PREFILL])
def test_a_text_that_every_prompt_has_is_read_and_one_prompt_alone_does_not_prove_it(kind: DepartureKind) -> None:
    text = "You are a parrot.\nSay little."
    added = kind is DepartureKind.SYSTEM_ADDED
    written = Written(system=text) if added else Written(prefill=text)
    identified = search(log(written, system=not added))
    assert [(found.kind, found.text) for found in best(identified).departures] == [(kind, text)]
    assert identified.sure
    assert unsure(search(log(written, 1, system=not added)), "only one prompt")


def test_tools_that_were_not_rendered_are_a_flag() -> None:
    identified = search(log(Written(shows_tools=False), calls=True))
    assert identified.sure
    assert best(identified).without_tools
    assert best(identified).flags()[-2:] == ("--tools", "none")
    assert best(identified).config()["tools"] == "none"


def test_tool_arguments_that_no_prompt_shows_are_undetermined() -> None:
    """Only the last answers call tools: whether their arguments were given as objects changes no prompt."""
    rollouts = [replace(rollout, turns=rollout.turns[:1]) for rollout in log(Written(), calls=True)]
    identified = search(rollouts)
    assert "tool_arguments" in undetermined(identified)
    assert {explanation.tool_arguments for explanation in (best(identified), *identified.best.equal)} == {"auto"}
    shown = search(log(Written(parsed=True), calls=True))
    assert "tool_arguments" not in undetermined(shown)


def test_arguments_that_the_log_states_wrongly_are_told() -> None:
    rollouts = [
        replace(rollout, template_kwargs={"enable_thinking": True})
        for rollout in log(Written(args={"enable_thinking": False}))
    ]
    identified = search(rollouts)
    assert identified.sure
    assert dict(best(identified).template_args) == {"enable_thinking": False}
    assert kinds(identified) == [DepartureKind.STATED_UNUSED]
    right = [replace(rollout, template_kwargs={"enable_thinking": False}) for rollout in rollouts]
    assert dict(best(search(right)).template_args) == {}
    assert best(search(right)).departures == ()


def test_tools_that_only_another_template_writes_are_no_system_prompt() -> None:
    each = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    plain = each + "<|im_start|>assistant\n"
    rollouts = [replace(rollout, turns=rollout.turns[:1]) for rollout in log(Written(), system=False, calls=True)]
    assert unsure(search(rollouts, NamedTemplate("plain", plain, "plain.jinja")), "another template is likelier")


@pytest.mark.parametrize(
    ("shown", "kind"), [("dropped", DepartureKind.REASONING_DROPPED), ("kept", DepartureKind.REASONING_IN_CONTENT)]
)
def test_reasoning_that_a_sampler_moved_or_dropped_is_told(shown: str, kind: DepartureKind) -> None:
    source = SOURCE.replace("(keep_thinking or loop.last)", "false" if shown == "kept" else "true")
    written, rollouts = Written(source), []
    for row, messages in enumerate(conversations(random.Random(7), 12, calls=True)):
        sent = []
        for message in messages:
            thought = message.get("reasoning_content")
            bare = {key: value for key, value in message.items() if key != "reasoning_content"}
            if thought and shown == "kept":
                bare["content"] = f"<think>\n{thought}\n</think>\n\n{bare['content']}"
            sent.append(bare)
        read = as_messages(messages, "messages")
        rollouts.append(replace(written.rollout(row, sent, TOOLS), messages=read))
    identified = search(rollouts, NamedTemplate("other", source, "other.jinja"))
    assert kinds(identified) == [kind]
    assert identified.sure, identified.unsure_because


def test_a_history_that_is_kept_as_it_was_sampled_leaves_the_template_sure() -> None:
    """The template writes the last question in another way than earlier ones, which stay as they were."""
    source = SOURCE.replace(
        "{{ message.content }}<|im_end|>", "{{ message.content }}{% if loop.last %}!{% endif %}<|im_end|>"
    )
    tokenizer, changed = toy_tokenizer(), []
    for rollout in log(Written(source)):
        turns: list[Turn] = []
        for turn in rollout.turns:
            assert turn.prompt_ids is not None
            text, prompt = tokenizer.vocabulary.text(turn.prompt_ids), turn.prompt_ids
            if turns:
                (seen,) = [turns[-1].seen_ids]
                assert seen is not None
                at = text.rindex("<|im_end|>\n<|im_start|>user") + len("<|im_end|>")
                prompt = np.concatenate([seen, tokenizer.encode(text[at:])])
            turns.append(replace(turn, prompt_ids=prompt))
        changed.append(replace(rollout, turns=tuple(turns)))
    identified = search(changed, NamedTemplate("other", source, "other.jinja"))
    assert share(identified).turns < share(identified).of_turns
    assert identified.sure, identified.unsure_because
    assert [left.cause for left in identified.left] == ["another text, in answers"]


def test_rows_without_a_mask_may_differ_in_their_answers() -> None:
    rollouts = [as_row(rollout, masked=False) for rollout in log(Written())]
    spoiled = []
    for rollout in rollouts:
        ids = rollout.training_row.token_ids
        (at,) = np.flatnonzero(ids == toy_tokenizer().encode("<|im_end|>")[0])[-1:]
        text = toy_tokenizer().vocabulary.text(ids[at - 3 : at])
        pieces = [toy_tokenizer().encode(char) for char in text]
        assert len(pieces) > 3
        row = replace(rollout.training_row, token_ids=np.concatenate([ids[: at - 3], *pieces, ids[at:]]))
        spoiled.append(replace(rollout, training_row=row))
    identified = search(spoiled)
    assert identified.sure, identified.unsure_because


def test_rows_of_two_ways_are_explained_by_both_and_neither_is_sure() -> None:
    on, off = log(Written(args={"reasoning_effort": "low"})), log(Written(args={"enable_thinking": False}), seed=2)
    identified = search([*on, *off])
    assert not identified.sure
    explained = [dict(candidate.explanation.template_args) for candidate in identified.found]
    assert {"reasoning_effort": "low"} in explained
    assert {"enable_thinking": False} in explained


SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BROKEN = ("{{ raise_exception('no') }}", "{{ messages[9].content.x.y }}", "{% if %}", "{{ 'x' * 99999999 }}")


@pytest.mark.parametrize("source", (*BROKEN, SLOW) if DEEP else BROKEN)
def test_a_template_that_raises_explains_nothing(source: str) -> None:
    rollouts = log(Written(toy_tokenizer().chat_templates["default"]))
    broken = NamedTemplate("broken", source, "broken.jinja")
    assert not search(rollouts, broken).sure
    assert best(search(rollouts, broken, OWN_TEMPLATE)).template is OWN_TEMPLATE


def test_answers_that_never_end_are_looked_for_once() -> None:
    """A message may spell the start of an answer as often as it likes."""
    hostile = "<|im_start|>assistant\n" * 20_000
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": hostile},
    ]
    written = Written(toy_tokenizer().chat_templates["default"])
    rollout = written.rollout(99, [*messages, {"role": "assistant", "content": "Ha"}])
    last = rollout.turns[-1]
    spoiled = replace(rollout, turns=(rollout.turns[0], replace(last, prompt_ids=last.prompt_ids[:-9])))
    assert search([*log(written), spoiled]).sure


@pytest.mark.parametrize(("more", "kind"), [(1, DepartureKind.BOS_ADDED), (-1, DepartureKind.BOS_MISSING)])
def test_a_bos_token_that_is_doubled_or_missing_is_told(more: int, kind: DepartureKind) -> None:
    rollouts = [_with_bos(rollout, toy_tokenizer("toy_metaspace"), more) for rollout in metaspace_log()]
    assert kinds(search(rollouts, tokenizer="toy_metaspace")) == [kind]


def metaspace_log() -> list[Rollout]:
    renderer, tokenizer = toy_renderer("toy_metaspace"), toy_tokenizer("toy_metaspace")
    rollouts = []
    for row, messages in enumerate(conversations(random.Random(5), 10, system=False)):
        question = as_messages(messages[:1], "messages")
        prompt = tokenizer.encode(renderer.render(question, add_generation_prompt=True))
        turn = Turn(prompt, tokenizer.encode("Fine.</s>"), message_index=1)
        rollouts.append(Rollout(Place("log", row), "toy", as_messages(messages[:2], "messages"), turns=(turn,)))
    return rollouts


def _with_bos(rollout: Rollout, tokenizer: Tokenizer, more: int) -> Rollout:
    """The rollout with a BOS token more or less; the text is encoded again."""
    (turn,) = rollout.turns
    assert turn.prompt_ids is not None
    text = tokenizer.vocabulary.text(turn.prompt_ids)
    assert text.startswith("<s>")
    ids = tokenizer.encode("<s>" + text if more > 0 else text.removeprefix("<s>"))
    return replace(rollout, turns=(replace(turn, prompt_ids=ids),))


def as_row(rollout: Rollout, *, masked: bool = True) -> Rollout:
    """The rollout as one training row, which begins with its first prompt."""
    parts, mask = [], []
    length = 0
    for turn in rollout.turns:
        assert turn.completion_ids is not None
        parts += [turn.prompt_ids[length:], turn.completion_ids]
        mask += [False] * (len(turn.prompt_ids) - length) + [True] * len(turn.completion_ids)
        length = len(turn.prompt_ids) + len(turn.completion_ids)
    row = TrainingRow(np.concatenate(parts), np.array(mask) if masked else None, None)
    return replace(rollout, turns=(), training_row=row)


@pytest.mark.parametrize("masked", [True, False])
def test_training_rows_are_explained_up_to_their_answers_or_as_a_whole(masked: bool) -> None:
    written = Written(args={"reasoning_effort": "low"})
    rollouts = [as_row(rollout, masked=masked) for rollout in log(written)]
    identified = search(rollouts)
    assert identified.sure, identified.unsure_because
    assert dict(best(identified).template_args) == {"reasoning_effort": "low"}
    if masked:
        (ending,) = identified.endings
        assert (ending.piece, ending.followed_by) == ("<|im_end|>", "\n")


def test_the_first_prompt_of_a_row_without_a_mask_counts_though_its_history_drifted() -> None:
    """The answers of most rows are not those of the messages, so that no such row is written as a whole."""
    several = conversations(random.Random(11), 16)
    rollouts = [
        as_row(Written(args={"reasoning_effort": "low"}).rollout(row, each), masked=False)
        for row, each in enumerate(several)
    ]
    changed = [
        replace(rollout, messages=rollout.messages[:-1]) if row % 4 and len(rollout.messages) > 4 else rollout
        for row, rollout in enumerate(rollouts)
    ]
    cut = sum(len(rollout.messages) % 2 == 0 for rollout in changed)
    assert cut > 3
    identified = search(changed)
    assert writes_all_prompts(identified)
    assert share(identified).of_prompts == 16
    assert share(identified).of_turns - share(identified).turns <= cut
    assert dict(best(identified).template_args) == {"reasoning_effort": "low"}
    assert identified.sure, identified.unsure_because


@pytest.mark.parametrize(
    "change",
    [
        ("<|im_start|>assistant\n{% if enable", "<|im_start|>assistant\n> {% if enable"),
        ("{% endfor %}\n{%- if add_gen", "{% endfor %}<|im_start|>note\nGo!<|im_end|>\n{%- if add_gen"),
    ],
)
def test_a_row_without_a_mask_has_to_go_on_with_its_answer_after_its_first_prompt(change: tuple[str, str]) -> None:
    written = SOURCE.replace(*change)
    assert written != SOURCE
    rollouts = [as_row(rollout, masked=False) for rollout in log(Written(written))]
    assert not search(rollouts).sure


def test_rows_without_a_mask_are_not_surely_of_a_template_that_writes_longer_ones_in_another_way() -> None:
    source = SOURCE.replace(
        "{{ message.content }}<|im_end|>", "{{ '~' if loop.index > 3 }}{{ message.content }}<|im_end|>"
    )
    assert source != SOURCE
    rollouts = []
    for row, messages in enumerate(conversations(random.Random(12), 16)):
        text = Written(source).text(messages, []).removesuffix("<|im_start|>assistant\n")
        ids = toy_tokenizer().encode(text)
        whole = Written(source).rollout(row, messages)
        rollouts.append(replace(whole, turns=(), training_row=TrainingRow(ids, None, None)))
    assert any(len(rollout.messages) == 3 for rollout in rollouts)
    identified = search(rollouts)
    assert writes_all_prompts(identified)
    assert unsure(identified, "with answers")


def test_what_an_explanation_leaves_is_counted_by_the_findings_of_an_audit() -> None:
    rollouts = log(Written(), calls=True)
    spoiled = [rollout if number % 3 else _rewritten(rollout) for number, rollout in enumerate(rollouts)]
    candidate = Candidate(toy_tokenizer(), (MINE,))

    def audit(rollout: Rollout, tokenizer: Tokenizer, renderer: Renderer) -> tuple[Finding, ...]:
        evidence = gather(rollout, tokenizer, renderer)
        return check(evidence, all_rules(), frozenset(rule.code for rule in all_rules()))[0]

    identified = identify(spoiled, [candidate], audit=audit)
    assert identified.sure
    assert share(identified).turns < share(identified).of_turns
    assert {left.cause.split()[0] for left in identified.left} & {"TPL203", "TPL299", "SEQ302", "TPL202"}
    without = identify(spoiled, [candidate])
    assert [left.cause for left in without.left] == ["another text, in answers"]
    assert without.left[0].number == share(identified).of_turns - share(identified).turns


def _rewritten(rollout: Rollout) -> Rollout:
    """The rollout with other spaces in the tool calls of later prompts."""
    tokenizer = toy_tokenizer()
    turns = []
    for turn in rollout.turns:
        assert turn.prompt_ids is not None
        text = tokenizer.vocabulary.text(turn.prompt_ids).replace('{"at": ', '{"at":   ')
        turns.append(replace(turn, prompt_ids=tokenizer.encode(text)))
    return replace(rollout, turns=tuple(turns))


def given_renderer(**options: Any) -> Renderer:
    return make_renderer(toy_tokenizer(), chat_template=SOURCE, **options)


def test_the_head_of_a_log_that_fits_needs_no_explanation() -> None:
    written = Written(args={"enable_thinking": False})
    renderer = given_renderer(template_args={"enable_thinking": False}, clock=Clock(written.date))
    assert explain_head(log(written), toy_tokenizer(), renderer) is None
    assert explain_head([], toy_tokenizer(), renderer) is None


def test_the_head_of_a_log_is_explained_with_the_given_template() -> None:
    written = Written(args={"enable_thinking": False}, shows_tools=False)
    renderer = given_renderer(template_args={"reasoning_effort": "high"})
    explanation = explain_head(log(written, calls=True), toy_tokenizer(), renderer)
    assert explanation.template is GIVEN_TEMPLATE
    assert dict(explanation.template_args) == {"enable_thinking": False}
    assert explanation.clock == written.date
    assert explanation.without_tools
    applied = explanation.apply_to(renderer)
    (first, *_) = log(written, calls=True)
    text = applied.render(first.messages[: first.turns[0].message_index], first.tools, add_generation_prompt=True)
    assert np.array_equal(toy_tokenizer().encode(text), first.turns[0].prompt_ids)


def test_the_head_of_a_log_of_another_template_is_not_explained() -> None:
    rollouts = log(Written(SOURCE.replace("Effort", "Zeal")))
    assert explain_head(rollouts, toy_tokenizer(), given_renderer()) is None


def test_flags_are_read_back_as_the_values_they_were() -> None:
    values: dict[str, object] = {"a": "true", "b": True, "c": "7", "d": 7, "e": None, "f": ["x"], "g": "a b"}
    explanation = Explanation(
        "toy", template_args=values, clock=datetime(2024, 7, 26, 14, 30), tool_arguments="string"
    )
    flags = list(explanation.flags())
    pairs = [flags[at + 1] for at, word in enumerate(flags) if word == "--template-arg"]
    assert arguments_given(pairs, "--template-arg") == values
    assert clock_given(flags[flags.index("--clock") + 1], "--clock") == explanation.clock
    assert flags[flags.index("--tool-arguments") + 1] == "string"


def test_a_search_writes_little_however_long_the_log_is() -> None:
    """The time of an identification depends on the number of rows that are looked at, which is bounded."""
    written = Written(toy_tokenizer().chat_templates["default"])
    few = search(log(written, 300))
    many = search(log(written, 900 if DEEP else 450))
    assert few.rows_confirmed <= 260
    assert many.rows_confirmed <= 260
    assert many.rows_searched == few.rows_searched <= 8
