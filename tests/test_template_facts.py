"""What is told about chat templates: of templates with one known fault each, and of real ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from tests.tables import stored, table
from tests.tiers import examples, some
from tests.toy import TOKENIZERS, toy_tokenizer
from tito_audit.errors import RenderError
from tito_audit.record.message import as_messages
from tito_audit.render.globals import Clock
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.render.template import compile_template
from tito_audit.templates.append_only import StepOutcome, check_append_only
from tito_audit.templates.breaks import BreakExplainer, HistoryChange, explain_breaks
from tito_audit.templates.facts import Fidelity, TemplateFacts, answer_form, template_facts
from tito_audit.templates.probes import (
    ANSWER,
    CORE,
    PROBES,
    TOOLS,
    Probe,
    answer_kind,
    assistant,
    tool_call,
)
from tito_audit.templates.verdict import claims, verdict
from tito_audit.tokens.load import load_tokenizer

REAL = Path(os.environ.get("TITO_AUDIT_TOKENIZERS", "no-such-folder"))
PIECES: dict[str, str] = stored(__file__, "PIECES")
CALLS, LATEST, OPENER = PIECES["CALLS"], PIECES["LATEST"], PIECES["OPENER"]


def chatml(answer: str, *, before: str = "", opener: str = "OPENER", other: str = "{{ m.content }}") -> str:
    """A ChatML template of these pieces; `answer` writes what is inside of an assistant message `m`."""
    source = PIECES["CHATML"].replace("OPENER", opener)
    for name, piece in {"BEFORE": before, "ANSWER": answer, "OTHER": other, **PIECES}.items():
        source = source.replace(name, piece)
    return source


KEEPS = chatml("THOUGHT{{ m.content or '' }}CALLS")


def renderer_of(source: str, **settings: object) -> Renderer:
    """A renderer of a template with the toy tokenizer's special tokens."""
    return make_renderer(toy_tokenizer(), chat_template=source, **settings)  # type: ignore[arg-type]


def facts_of(source: str) -> TemplateFacts:
    return template_facts(renderer_of(source), toy_tokenizer())


def changes_of(source: str) -> dict[str, set[str]]:
    """The changes that a template makes, each with who speaks after the answers that it changes."""
    renderer = renderer_of(source)
    explainer = BreakExplainer(renderer)
    speakers: dict[str, set[str]] = {}
    for step in check_append_only(renderer).broken:
        speakers.setdefault(explainer.explain(step).change, set()).add(step.next_speaker)
    return speakers


def test_a_template_that_writes_each_message_by_itself_only_appends() -> None:
    append = check_append_only(renderer_of(KEEPS))
    assert append.is_append_only
    assert {step.outcome for step in append.steps} == {StepOutcome.KEPT}
    assert set(append.by_speaker()) == {"user", "tool", "system", "assistant"}


def test_the_probes_have_every_kind_of_answer_and_of_message_after_it() -> None:
    append = check_append_only(renderer_of(KEEPS))
    kinds = {kind for kind, _ in append.by_kind()}
    assert kinds >= {
        "answer", "empty answer", "answer with reasoning", "answer with <think> in its content", "tool call",
        "tool call with text", "tool call with reasoning", "tool call with text and reasoning",
        "several tool calls", "several tool calls with text and reasoning",
    }  # fmt: skip
    assert len({probe.name for probe in PROBES}) == len(PROBES)
    assert {probe.name for probe in CORE} < {probe.name for probe in PROBES}


def faulty(
    changes: Mapping[str, list[str]], replace: Sequence[str] = ("", ""), **pieces: str
) -> tuple[str, dict[HistoryChange, set[str]]]:
    """A template with a fault, and the changes that it makes, each with who speaks after what it changes."""
    source = chatml(**pieces)
    whole = source.replace(*replace) if replace[0] else source
    return whole, {HistoryChange[name]: set(speakers) for name, speakers in changes.items()}


FAULTS = {name: faulty(**fault) for name, fault in stored(__file__, "FAULTS").items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_known_fault_is_named(fault: str) -> None:
    source, wanted = FAULTS[fault]
    changes = changes_of(source)
    assert changes == wanted


def test_a_break_names_both_tags_and_the_condition_that_decided() -> None:
    source = FAULTS["drops reasoning before the last user message"][0]
    renderer = renderer_of(source)
    step = check_append_only(renderer).by_kind()["answer with reasoning", "user"].broken[0]
    explanation = BreakExplainer(renderer).explain(step)
    (condition,) = explanation.conditions
    line = (
        source.splitlines().index(next(text for text in source.splitlines() if "loop.index0 > ns.last" in text))
        + 1
    )
    assert (condition.tag.line, condition.outcome) == (line, True)
    assert condition.tag.source == "{% if loop.index0 > ns.last %}"
    assert explanation.sampled.tag is not None
    assert "reasoning_content" in explanation.sampled.tag.source
    assert explanation.rendered.tag is not None
    assert explanation.rendered.tag.source == "{{ m.content or '' }}"
    assert explanation.sampled.before == explanation.rendered.before
    assert explanation.sampled.text.startswith("<think>\n")
    assert explanation.rendered.text.startswith(ANSWER)


def test_conditions_are_named_only_if_history_would_be_kept_with_them_turned() -> None:
    both = chatml(
        "{% if loop.index0 > ns.last %}\n{% if loop.last %}\n{{ '<think>\n\n</think>\n\n' }}{% endif %}\n"
        "{% endif %}\n{{ m.content or '' }}" + CALLS,
        before=LATEST,
    )
    renderer = renderer_of(both)
    step = check_append_only(renderer).by_kind()["answer", "user"].broken[0]
    explanation = BreakExplainer(renderer).explain(step)
    assert [condition.tag.source for condition in explanation.conditions] == [
        "{% if loop.index0 > ns.last %}",
        "{% if loop.last %}",
    ]
    by_value = chatml("{{ 'x' * (loop.length - loop.index) }}{{ m.content or '' }}" + CALLS)
    broken = check_append_only(renderer_of(by_value)).broken
    assert broken
    assert {BreakExplainer(renderer_of(by_value)).explain(step).conditions for step in broken} == {()}


def test_what_is_shown_of_a_break_is_what_the_template_wrote() -> None:
    for source, _ in some(list(FAULTS.values()), 5):
        renderer = renderer_of(source)
        for step in check_append_only(renderer).broken:
            explanation = BreakExplainer(renderer).explain(step)
            assert explanation.sampled.before + explanation.sampled.text == step.prompt + step.sampled
            assert explanation.rendered.before + explanation.rendered.text == step.after
            assert not step.after.startswith(step.prompt + step.sampled)
            again = renderer.render(
                step.probe.messages[: step.until], step.probe.tools, add_generation_prompt=True
            )
            assert again == step.after


def test_a_part_that_is_never_written_is_left_out_and_not_kept() -> None:
    append = check_append_only(renderer_of(chatml("{{ m.content or '' }}")))
    kinds = append.by_kind()
    assert {step.left_out for step in kinds["answer with reasoning", "user"].steps} == {("reasoning",)}
    assert {step.left_out for step in kinds["tool call", "tool"].steps} == {("tool calls",)}
    assert {step.outcome for step in kinds["answer", "user"].steps} == {StepOutcome.KEPT}
    assert append.is_append_only, "it appends to all that it writes"


def test_a_template_that_refuses_everything_has_one_clear_verdict() -> None:
    facts = facts_of("{{ raise_exception('not today') }}")
    assert not facts.append.is_append_only
    assert verdict(facts) == "refuses every conversation: chat template, line 1: not today."
    assert facts.returned == facts.partial == facts.seams == facts.contents == ()


def test_a_template_that_loops_or_writes_without_end_is_refused() -> None:
    for source in (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a * b %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}",
    ):
        renderer = make_renderer(toy_tokenizer(), chat_template=source, time_limit=0.2, size_limit=10_000)
        facts = template_facts(renderer, toy_tokenizer())
        assert verdict(facts).startswith("refuses every conversation: ")


def test_refusals_are_counted_with_the_words_of_the_template() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    append = check_append_only(renderer_of(source + KEEPS))
    assert {step.refusal for step in append.refused} == {"chat template, line 1: no tools"}
    assert append.by_speaker()["user"].is_append_only
    assert append.is_append_only
    assert {step.next_speaker for step in append.refused} <= {"tool", "user"}


def test_an_end_token_that_is_not_written_in_history_is_a_break() -> None:
    without = KEEPS.replace("{{ '<|im_end|>\n' }}", "{{ '<|im_end|>\n' if not m.tool_calls else '' }}")
    changes = changes_of(without)
    assert changes == {HistoryChange.NO_TURN_END: {"tool"}}


def test_of_several_end_tokens_the_first_ends_the_turn() -> None:
    source = KEEPS.replace(
        OPENER, "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}<eos>{% endif %}"
    )
    assert check_append_only(renderer_of(source)).is_append_only
    alone = Renderer(templates={"default": compile_template(source, "a test")})
    assert check_append_only(alone).is_append_only


# What comes back as sampled


def outcomes(facts: TemplateFacts, part: str, form: str) -> dict[str, Fidelity]:
    return {
        returned.case: returned.outcome
        for returned in facts.returned
        if (returned.part, returned.form) == (part, form)
    }


@pytest.mark.parametrize(*table(__file__, "what_comes_back_as_sampled"))
def test_what_comes_back_as_sampled(
    answer: str, part: str, form: str, kept: list[str], rewritten: list[str]
) -> None:
    outcome_of = outcomes(facts_of(chatml(answer)), part, form)
    assert {outcome_of[case] for case in (outcome_of if kept == ["all"] else kept)} <= {Fidelity.KEPT}
    assert {outcome_of[case] for case in rewritten} <= {Fidelity.REWRITTEN}
    assert outcome_of


def test_trimming_is_told_case_by_case() -> None:
    trims = facts_of(chatml("{{ (m.content or '') | trim }}"))
    outcome_of = outcomes(trims, "answer", "as sampled")
    rewritten = {case for case, outcome in outcome_of.items() if outcome is Fidelity.REWRITTEN}
    assert rewritten == {"a space before", "a line break before", "a space after", "a line break after"}
    assert trims.append.is_append_only, "the template's own form of an answer has nothing to trim"


def test_an_answer_that_was_cut_gets_what_was_never_sampled() -> None:
    partial = {answer.case: answer for answer in facts_of(KEEPS).partial}
    assert partial["cut inside the answer"].added == "<|im_end|>\n"
    assert partial["cut inside the reasoning"].added == "\n</think>\n\n<|im_end|>\n"
    assert partial["prefill: the beginning of an answer"].outcome is Fidelity.KEPT
    assert partial["prefill: the beginning of an answer"].added == ""


# Other facts


def test_the_text_between_messages_and_the_tokens_that_reach_across_it() -> None:
    facts = facts_of(KEEPS)
    seams = {(seam.left, seam.right): seam for seam in facts.seams}
    after = seams["assistant", "user"]
    assert after.texts == ("\n<|im_start|>user\n",)
    assert after.ids == tuple(toy_tokenizer().encode("\n<|im_start|>user\n").tolist())
    assert seams["user", "answer"].texts == ("<|im_end|>\n<|im_start|>assistant\n",)
    assert {seam.is_fixed for seam in facts.seams} == {True}
    encode = toy_tokenizer().encode
    for seam in facts.seams:
        assert seam.ids is not None
        for text in seam.merges_after:
            assert encode(seam.texts[0] + text).tolist() != [*seam.ids, *encode(text).tolist()]


def test_a_text_between_messages_that_varies_is_not_called_fixed() -> None:
    varies = KEEPS.replace(
        "{{ '<|im_start|>'", "{{ '' if m.role == 'assistant' else loop.index }}{{ '<|im_start|>'"
    )
    facts = facts_of(varies)
    assert not next(seam for seam in facts.seams if (seam.left, seam.right) == ("assistant", "user")).is_fixed
    holds = {claim.what: claim.holds for claim in claims(facts)}
    assert holds["The text between an answer and the next message is always the same"] is False


def test_end_tokens_the_clock_and_a_doubled_beginning_are_told() -> None:
    facts = facts_of("{{ bos_token }}{{ strftime_now('%d %b %Y') }}" + KEEPS)
    assert facts.clock_formats == ("%d %b %Y",)
    assert facts_of(KEEPS).clock_formats is None
    assert [(stop.text, stop.written) for stop in facts.stops if stop.written] == [("<|im_end|>", True)]
    metaspace = load_tokenizer(str(TOKENIZERS / "toy_metaspace"))
    bos = template_facts(make_renderer(metaspace, chat_template="{{ bos_token }}" + KEEPS), metaspace).bos
    assert bos.written
    ids = metaspace.backend.encode("x", add_special_tokens=True).ids
    assert bos.added == (ids[0] == metaspace.bos_id)


SWITCHED = chatml(
    "{% if preserve or loop.index0 > ns.last %}THOUGHT{% endif %}{{ m.content or '' }}CALLS", before="LATEST"
)


def test_the_argument_that_makes_it_append_only_is_found() -> None:
    facts = facts_of(SWITCHED)
    assert not facts.append.is_append_only
    assert [dict(setting.arguments) for setting in facts.settings] == [{"preserve": True}]
    assert not facts.settings[0].append.broken
    assert "--template-arg preserve=true" in verdict(facts)
    assert {effect.name: effect.changes for effect in facts.effects if effect.value is True} == {
        "preserve": ("messages",)
    }
    preserving = renderer_of(SWITCHED, template_args={"preserve": True})
    assert check_append_only(preserving).is_append_only
    assert [dict(setting.arguments) for setting in template_facts(preserving).settings] == [{"preserve": False}]


def test_two_arguments_that_have_to_be_set_together_are_found() -> None:
    both = SWITCHED.replace("preserve or", "(preserve and mode == 'all') or")
    assert [dict(setting.arguments) for setting in facts_of(both).settings] == [{"preserve": True, "mode": "all"}]


def test_what_each_argument_changes_is_told() -> None:
    source = "{% if short %}{{ 'Be short.' }}{% endif %}" + KEEPS.replace(
        "'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n' }}{% if quiet %}{{ '<q>' }}{% endif %}"
    )
    changes = {effect.name: effect.changes for effect in facts_of(source).effects if effect.value is True}
    assert changes == {"short": ("beginning",), "quiet": ("generation prompt",)}


# A log's own conversations


def test_the_kind_of_an_answer_is_in_words() -> None:
    def kind(wire: Mapping[str, object]) -> str:
        return answer_kind(as_messages([wire], "a test")[0])

    assert kind(assistant("yes", "hm")) == "answer with reasoning"
    assert kind(assistant("", None, tool_call("{}"), tool_call("{}", 2))) == "several tool calls"
    assert kind(assistant("I look.", "hm", tool_call("{}"))) == "tool call with text and reasoning"
    assert kind({"role": "assistant", "content": None}) == "empty answer"


def test_a_conversation_of_a_log_is_a_probe_with_the_arguments_that_the_log_states() -> None:
    wires = [{"role": "user", "content": "a"}, assistant("b", "c"), {"role": "user", "content": "d"}]
    messages = as_messages(wires, "a log")
    renderer = renderer_of(SWITCHED)
    assert check_append_only(renderer, [Probe("log:0", messages, TOOLS)]).broken
    assert check_append_only(renderer, [Probe("log:0", messages, TOOLS, {"preserve": True})]).is_append_only


def test_what_is_told_of_a_log_is_the_same_with_less_text() -> None:
    renderer = renderer_of(FAULTS["drops reasoning before the last user message"][0])
    whole, explainer = check_append_only(renderer), BreakExplainer(renderer)
    append, breaks = explain_breaks(renderer, PROBES)
    assert [step.outcome for step in append.steps] == [step.outcome for step in whole.steps]
    for brief, step in zip(breaks, whole.broken, strict=True):
        full = explainer.explain(step)
        assert (brief.change, brief.conditions, brief.step.answer) == (full.change, full.conditions, step.answer)
        assert full.sampled.before.endswith(brief.sampled.before)
        assert full.rendered.text.startswith(brief.rendered.text)
        assert not brief.step.prompt_and_sampled


def test_a_template_that_does_not_show_what_was_sampled_is_not_called_append_only() -> None:
    hides = KEEPS.replace("{{ '<|im_start|>' +", "{{ '<|im_start|>' + ('last ' if loop.last else '') +")
    renderer = renderer_of(hides.replace("if loop.last", "if loop.last and not add_generation_prompt"))
    append = check_append_only(renderer)
    assert {step.outcome for step in append.by_kind()["answer", "user"].steps} == {StepOutcome.UNKNOWN}
    assert not append.is_append_only
    hidden = BreakExplainer(renderer).explain(append.by_kind()["answer", "user"].broken[0])
    assert hidden.change is HistoryChange.HIDDEN


def test_a_renderer_with_a_clock_is_looked_at_with_it() -> None:
    source = "{{ strftime_now('%Y') }}" + KEEPS
    form = answer_form(replace(renderer_of(source), clock=Clock(datetime(1999, 1, 1))))
    assert form is not None
    assert form.prompt.startswith("1999<|im_start|>")


# Real templates

VERDICTS = {
    "qwen3": {HistoryChange.REASONING: {"user"}, HistoryChange.EMPTY_REASONING: {"user", "tool", "system"}},
    "deepseek-v3": {
        HistoryChange.MOVED: {"system"},
        HistoryChange.NO_TURN_END: {"tool"},
    },
    "llama-3.1": {},
    "gemma-3": {},
    "qwen2.5-coder": {},
    "smollm2": {},
}


@pytest.mark.parametrize("name", some(sorted(VERDICTS), 3))
def test_what_real_templates_change(name: str) -> None:
    if not (REAL / name).is_dir():
        pytest.skip("no such tokenizer here")
    renderer = make_renderer(load_tokenizer(str(REAL / name)))
    explainer = BreakExplainer(renderer)
    speakers: dict[str, set[str]] = {}
    for step in check_append_only(renderer).broken:
        speakers.setdefault(explainer.explain(step).change, set()).add(step.next_speaker)
    assert speakers == VERDICTS[name]


@pytest.mark.parametrize("name", some(sorted(VERDICTS), 2))
def test_the_pieces_of_a_traced_rendering_are_the_rendering(name: str) -> None:
    if not (REAL / name).is_dir():
        pytest.skip("no such tokenizer here")
    renderer = make_renderer(load_tokenizer(str(REAL / name)))
    traced = 0
    for probe in PROBES[: examples(8, len(PROBES))]:
        try:
            chat, text = renderer.render_chat(probe.messages, probe.tools, add_generation_prompt=True)
        except RenderError:
            continue
        variables = {**renderer.variables(probe.tools, None), "messages": chat, "add_generation_prompt": True}
        tracer = renderer.template(bool(probe.tools)).tracer()
        pieces = tracer.trace(variables, text)
        assert pieces is not None
        assert "".join(piece.text for piece in pieces) == text
        assert [piece.start for piece in pieces] == [
            sum(len(piece.text) for piece in pieces[:n]) for n in range(len(pieces))
        ]
        assert tracer.trace(variables, text + "x") is None, "a text that it does not write"
        traced += 1
    assert traced


def test_an_answer_has_its_end_token_where_it_does_not_continue_the_generation_prompt() -> None:
    """The prompt holds an empty reasoning block that rendered answers lack."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}"
    )
    facts = facts_of(source)
    assert not facts.generation_prompt.continued
    assert [stop.text for stop in facts.stops if stop.written] == ["<|im_end|>"]
