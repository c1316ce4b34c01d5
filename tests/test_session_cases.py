"""Sessions, case by case: what counts as the same answer, how turns end, why a call forks, what leaves memory."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from tests.session_agents import STYLES, Style
from tests.tables import table
from tests.toy import toy_renderer, toy_tokenizer
from tito_audit.errors import RecordError, RenderError
from tito_audit.provider import GenerationResult
from tito_audit.record.message import as_message, as_messages
from tito_audit.render import globals as render_globals
from tito_audit.render.renderer import Renderer, make_renderer
from tito_audit.sessions import next_prompt
from tito_audit.sessions.engine import Conversations, Limits, Session
from tito_audit.sessions.index import message_keys
from tito_audit.sessions.model import Branch, ChatCall, ForkReason, Node, Prompt, Proof

END = "<|im_end|>"
ASKED = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "more"}


def say(content: str | None, reasoning: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": "assistant", "content": content}
    wire |= {"reasoning_content": reasoning} if reasoning is not None else {}
    return wire | ({"tool_calls": list(calls)} if calls else {})


def look(arguments: object, name: str = "look", id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def call(*messages: dict[str, Any], **choices: Any) -> ChatCall:
    return ChatCall(as_messages(list(messages), "messages"), **choices)


def styled(style: Style | str) -> Renderer:
    return make_renderer(
        toy_tokenizer(), chat_template=STYLES[style].source if isinstance(style, str) else style.source
    )


def conversations(renderer: Renderer | None = None, **limits: int) -> Conversations:
    return Conversations(toy_tokenizer(), renderer or toy_renderer(), limits=Limits(**limits))


def result(text: str, prompt: Prompt, *, pieces: bool = False, finish: str = "stop") -> GenerationResult:
    """An answer as sampled; with `pieces` in other tokens than the tokenizer writes."""
    tokenizer = toy_tokenizer()
    body = text.removesuffix(END)
    stops = tokenizer.encode(END).tolist() if text.endswith(END) else []
    parts = list(body) if pieces else [body]
    ids = [token for part in parts for token in tokenizer.encode(part).tolist()] + stops
    return GenerationResult(tuple(prompt.ids.tolist()), tuple(ids), (-1.0,) * len(ids), finish_reason=finish)


def answer(session: Session, request: ChatCall, text: str, message: dict[str, Any], **how: Any) -> Node:
    """One call, answered."""
    prompt = session.prompt(request)
    name = f"call-{len(session.nodes)}"
    (node,) = session.commit(name, prompt, request, [result(text, prompt, **how)], [message])
    return node


def text_of(prompt: Prompt) -> str:
    return toy_tokenizer().vocabulary.text(prompt.ids)


def wire(text: str) -> dict[str, Any]:
    """An answer of the tables."""
    own = json.loads(text)
    calls = [
        look(entry) if not isinstance(entry, list) else look(entry[2], entry[1], entry[0])
        for entry in own.pop("calls", ())
    ]
    return {**say(own.pop("content", None), own.pop("reasoning_content", None), *calls), **own}


@pytest.mark.parametrize(*table(__file__, "same"))
def test_an_answer_that_comes_back_is_the_same_answer(what, given, sent):
    assert keys(wire(given)) == keys(wire(sent))


@pytest.mark.parametrize(*table(__file__, "other"))
def test_an_answer_that_was_changed_is_another(what, given, sent):
    assert keys(wire(given)) != keys(wire(sent))


def keys(wire: dict[str, Any]) -> list[bytes]:
    return message_keys([as_message(wire, "a message")])


def test_a_message_of_the_client_counts_with_all_it_says():
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert keys({"role": "user", "content": "ab"}) != keys({"role": "user", "content": two})
    assert keys({"role": "user", "content": "a", "name": "x"}) != keys({"role": "user", "content": "a"})
    assert keys({"role": "system", "content": "a"}) != keys({"role": "developer", "content": "a"})


def test_a_result_refers_to_its_call_whatever_the_id_is():
    def history(name: str, refers: str):
        calls = say(None, None, look("1", id=f"{name}1"), look("2", id=f"{name}2"))
        return message_keys(
            as_messages([ASKED, calls, {"role": "tool", "tool_call_id": refers, "content": "r"}], "messages")
        )

    assert history("a", "a2") == history("b", "b2")
    assert history("a", "a1") != history("a", "a2")


def test_a_prompt_starts_with_the_ids_that_were_sampled_however_they_were_cut():
    session = conversations().open("s")
    first = answer(session, call(ASKED), "hi there" + END, say("hi there"), pieces=True)
    prompt = session.prompt(call(ASKED, say("hi there"), MORE))
    assert (prompt.branch, prompt.parent, prompt.proof) == (Branch.CONTINUES, first, Proof.SAME_TEXT)
    assert prompt.ids[: prompt.kept].tolist() == first.seen_ids.tolist()
    assert prompt.added == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.ids.tolist() != toy_tokenizer().encode(text_of(prompt)).tolist(), "the case would show nothing"


def test_reasoning_that_the_client_left_out_stays_and_reasoning_that_it_changed_is_an_edit():
    session = conversations(styled("appends")).open("s")
    first = answer(session, call(ASKED), f"<think>\nwhy\n</think>\n\nhi{END}", say("hi", "why"))
    for sent in (say("hi"), say("hi", "why"), say("hi", "")):
        prompt = session.prompt(call(ASKED, sent, MORE))
        assert (prompt.branch, prompt.parent) == (Branch.CONTINUES, first)
        assert "why" in text_of(prompt)
    prompt = session.prompt(call(ASKED, say("hi", "why not"), MORE))
    assert (prompt.fork.reason, prompt.fork.message, prompt.kept) == (ForkReason.EDITED, 1, 0)
    assert "'why not', not 'why'" in prompt.fork.detail


def test_of_answers_that_look_the_same_the_latest_is_continued_and_the_others_are_counted():
    session = conversations().open("s")
    request = call(ASKED)
    prompt = session.prompt(request)
    results = [result("hi there" + END, prompt, pieces=pieces) for pieces in (True, False)]
    first, second = session.commit("c", prompt, request, results, [say("hi there")] * 2)
    prompt = session.prompt(call(ASKED, say("hi there"), MORE))
    assert (prompt.parent, prompt.alike) == (second, 1)
    assert prompt.parent is not first


def test_the_ids_of_tool_calls_tell_answers_apart_that_look_the_same():
    session = conversations().open("s")
    request = call(ASKED)
    prompt = session.prompt(request)
    text = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>' + END
    answers = [say(None, None, look("{}", id=f"c{number}")) for number in range(3)]
    results = [result(text, prompt, pieces=number == 1) for number in range(3)]
    nodes = session.commit("c", prompt, request, results, answers)
    for number, node in enumerate(nodes):
        tool = {"role": "tool", "tool_call_id": f"c{number}", "content": "seen"}
        prompt = session.prompt(call(ASKED, answers[number], tool))
        assert (prompt.parent, prompt.alike) == (node, 0)


@pytest.mark.parametrize(*table(__file__, "cut"))
def test_an_answer_that_was_cut_gets_the_end_that_the_template_writes(where, text, said, expected):
    session = conversations(styled("appends")).open("s")
    first = answer(session, call(ASKED), text, wire(said), pieces=True, finish="length")
    prompt = session.prompt(call(ASKED, wire(said), MORE))
    assert (prompt.branch, prompt.parent) == (Branch.CONTINUES, first)
    assert expected in text_of(prompt)


def test_a_stop_token_that_the_template_does_not_write_stays_and_gets_no_second():
    session = conversations().open("s")
    request = call(ASKED)
    prompt = session.prompt(request)
    ids = tuple(toy_tokenizer().encode("hi<|endoftext|>").tolist())
    sampled = GenerationResult((), ids, (-1.0,) * len(ids), finish_reason="stop")
    session.commit("c", prompt, request, [sampled], [say("hi")])
    prompt = session.prompt(call(ASKED, say("hi"), MORE))
    assert "hi<|endoftext|>\n<|im_start|>user\nmore" in text_of(prompt)


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_stop_token_that_opens_the_next_turn_is_not_written_twice(end):
    session = conversations(styled(Style(end=end))).open("s")
    request = call(ASKED)
    prompt = session.prompt(request)
    ids = tuple(toy_tokenizer().encode("hi<|im_start|>").tolist())
    sampled = GenerationResult((), ids, (-1.0,) * len(ids), finish_reason="stop")
    session.commit("c", prompt, request, [sampled], [say("hi")])
    prompt = session.prompt(call(ASKED, say("hi"), MORE))
    assert prompt.branch is Branch.CONTINUES
    assert f"hi<|im_start|>user\nmore{end}<|im_start|>assistant\n" in text_of(prompt)


def test_an_answer_that_spells_a_stop_token_ends_where_it_ends():
    session = conversations(styled("appends")).open("s")
    message = say(f"it is {END}", None, look(f'{{"at": "{END}"}}'))
    text = f'it is {END[:5]}{END[5:]}<tool_call>\n{{"name":"look","arguments":{{"at":"{END}"}}}}\n</tool_call>'
    ids = [
        token
        for part in (text, END)
        for char in ([part] if part == END else part)
        for token in toy_tokenizer().encode(char)
    ]
    request = call(ASKED)
    prompt = session.prompt(request)
    sampled = GenerationResult((), tuple(map(int, ids)), (-1.0,) * len(ids), finish_reason="stop")
    (node,) = session.commit("c", prompt, request, [sampled], [message])
    prompt = session.prompt(call(ASKED, message, {"role": "tool", "tool_call_id": "c1", "content": "seen"}))
    assert (prompt.branch, prompt.parent) == (Branch.CONTINUES, node)
    assert prompt.added == "\n<|im_start|>tool\nseen<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(*table(__file__, "forks"))
def test_a_fork_says_why(what, messages, reason, at, words):
    session = conversations().open("s")
    answer(session, call(ASKED), f"hi{END}", say("hi"))
    answer(session, call(ASKED, say("hi"), MORE), f"two{END}", say("two"))
    prompt = session.prompt(call(*json.loads(messages)))
    fork = (prompt.fork.reason, -1 if prompt.fork.message is None else prompt.fork.message)
    assert (prompt.branch, *fork) == (Branch.FORK, reason, at)
    assert words in prompt.fork.detail
    assert prompt.parent is None
    assert prompt.ids.tolist() == toy_tokenizer().encode(prompt.added).tolist()


def test_a_fork_keeps_what_was_sampled_before_the_change():
    session = conversations().open("s")
    first = answer(session, call(ASKED), f"hi{END}", say("hi"), pieces=True)
    answer(session, call(ASKED, say("hi"), MORE), f"two{END}", say("two"))
    prompt = session.prompt(call(ASKED, say("hi"), MORE, say("Two"), MORE))
    assert (prompt.branch, prompt.fork.reason, prompt.fork.message) == (Branch.FORK, ForkReason.EDITED, 3)
    assert (prompt.parent, prompt.ids[: prompt.kept].tolist()) == (first, first.seen_ids.tolist())


def test_a_template_that_strips_reasoning_forks_and_shows_both_texts():
    session = conversations().open("s")
    answer(session, call(ASKED), f"<think>\nwhy\n</think>\n\nhi{END}", say("hi", "why"))
    prompt = session.prompt(call(ASKED, say("hi"), MORE))
    assert (prompt.fork.reason, prompt.fork.message) == (ForkReason.TEMPLATE_REWRITES, 1)
    assert "<think>" in prompt.fork.detail
    assert "became" in prompt.fork.detail
    assert "why" not in text_of(prompt)


def test_a_template_that_never_writes_reasoning_forks():
    session = conversations(styled("never writes reasoning")).open("s")
    answer(session, call(ASKED), f"<think>\nwhy\n</think>\n\nhi{END}", say("hi", "why"))
    prompt = session.prompt(call(ASKED, say("hi"), MORE))
    assert prompt.fork.detail == "the template leaves the answer's reasoning out"


def test_other_tools_and_other_arguments_fork_only_where_the_template_writes_them():
    session = conversations().open("s")
    answer(session, call(ASKED), f"hi{END}", say("hi"))
    history = (ASKED, say("hi"), MORE)
    tools = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
    prompt = session.prompt(call(*history, tools=tools))
    assert prompt.fork.reason is ForkReason.TOOLS_CHANGED
    prompt = session.prompt(call(*history, template_kwargs={"enable_thinking": False}))
    assert prompt.branch is Branch.CONTINUES
    assert prompt.added.endswith("<think>\n\n</think>\n\n")
    dated = make_renderer(toy_tokenizer(), chat_template="{{ date }}" + STYLES["appends"].source)
    session = conversations(dated).open("s")
    answer(session, call(ASKED, template_kwargs={"date": "one"}), f"hi{END}", say("hi"))
    prompt = session.prompt(call(*history, template_kwargs={"date": "two"}))
    assert prompt.fork.reason is ForkReason.ARGUMENTS_CHANGED


def test_a_conversation_that_goes_on_past_midnight_keeps_its_date(monkeypatch):
    class Today(datetime):
        day = 1

        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 1, cls.day)

    for module in (next_prompt, render_globals):
        monkeypatch.setattr(module, "datetime", Today)
    source = "{{ strftime_now('%d %b') }}" + STYLES["appends"].source
    many = conversations(make_renderer(toy_tokenizer(), chat_template=source))
    session = many.open("s")
    first = answer(session, call(ASKED), f"hi{END}", say("hi"))
    Today.day = 2
    prompt = session.prompt(call(ASKED, say("hi"), MORE))
    assert (prompt.branch, prompt.parent) == (Branch.CONTINUES, first)
    assert text_of(prompt).startswith("01 Jan")
    assert text_of(many.open("t").prompt(call(ASKED))).startswith("02 Jan")


def test_a_call_that_is_made_again_gets_the_same_prompt():
    session = conversations().open("s")
    first = answer(session, call(ASKED), f"hi{END}", say("hi"))
    assert session.prompt(call(ASKED)).branch is Branch.START
    again = [session.prompt(call(ASKED, say("hi"), MORE)) for _ in range(2)]
    assert [prompt.branch for prompt in again] == [Branch.CONTINUES] * 2
    assert [prompt.parent for prompt in again] == [first] * 2


def test_an_answer_that_was_cut_can_go_on_and_comes_back_as_one_message_or_as_two():
    session = conversations(styled("appends")).open("s")
    first = answer(session, call(ASKED), "hi th", say("hi th"), pieces=True, finish="length")
    request = call(ASKED, say("hi th"), add_generation_prompt=False)
    prompt = session.prompt(request)
    assert (prompt.branch, prompt.parent, prompt.new_ids.tolist()) == (Branch.CONTINUES, first, [])
    (second,) = session.commit("c2", prompt, request, [result(f"ere{END}", prompt)], [say("ere")])
    for history in ([ASKED, say("hi there"), MORE], [ASKED, say("hi th"), say("ere"), MORE]):
        prompt = session.prompt(call(*history))
        assert (prompt.branch, prompt.parent) == (Branch.CONTINUES, second)
        assert text_of(prompt).count("hi there<|im_end|>\n<|im_start|>user\nmore") == 1


def test_a_client_may_begin_the_answer():
    session = conversations(styled("appends")).open("s")
    request = call(ASKED, say("Well, "), add_generation_prompt=False)
    prompt = session.prompt(request)
    assert prompt.branch is Branch.START
    assert text_of(prompt).endswith("<|im_start|>assistant\nWell, ")
    (node,) = session.commit("c", prompt, request, [result(f"hi{END}", prompt, pieces=True)], [say("hi")])
    prompt = session.prompt(call(ASKED, say("Well, hi"), MORE))
    assert (prompt.branch, prompt.parent) == (Branch.CONTINUES, node)
    with pytest.raises(RenderError, match="continued"):
        session.prompt(call(ASKED, say(None), add_generation_prompt=False))


def test_an_answer_that_ended_goes_on_without_its_stop_token_as_a_fork():
    session = conversations().open("s")
    first = answer(session, call(ASKED), f"hi{END}", say("hi"))
    prompt = session.prompt(call(ASKED, say("hi"), add_generation_prompt=False))
    assert (prompt.branch, prompt.fork.reason) == (Branch.FORK, ForkReason.STOP_LEFT_OUT)
    assert prompt.ids.tolist() == first.seen_ids[:-1].tolist()


def test_a_message_of_the_system_in_the_middle_is_new_text():
    session = conversations().open("s")
    first = answer(session, call(ASKED), f"hi{END}", say("hi"))
    prompt = session.prompt(call(ASKED, say("hi"), {"role": "system", "content": "be brief"}, MORE))
    assert (prompt.branch, prompt.parent) == (Branch.CONTINUES, first)
    assert prompt.added.startswith("\n<|im_start|>system\nbe brief<|im_end|>\n")


def test_an_answer_of_another_model_is_new_text():
    session = conversations().open("s")
    first = answer(session, call(ASKED), f"hi{END}", say("hi"))
    prompt = session.prompt(call(ASKED, say("hi"), MORE, say("from elsewhere"), MORE))
    assert (prompt.branch, prompt.parent) == (Branch.CONTINUES, first)


# text prompts


def committed(session: Session, text: str, sampled: str, shown: str, **how: Any) -> Node:
    prompt = session.text_prompt(text)
    (node,) = session.commit(
        f"t{len(session.nodes)}", prompt, None, [result(sampled, prompt, **how)], [{"text": shown}]
    )
    return node


@pytest.mark.parametrize(*table(__file__, "texts"))
def test_a_text_prompt_goes_on_from_the_answer_that_it_starts_with(what, sampled, given, then, branch, less):
    session = conversations(None).open("s")
    node = committed(session, "Q: ", sampled, given, pieces=True)
    prompt = session.text_prompt(then)
    assert (prompt.branch, prompt.parent, prompt.proof) == (branch, node, Proof.SAME_IDS)
    seen = node.seen_ids.tolist()
    assert prompt.kept == len(seen) - less
    assert prompt.ids[: prompt.kept].tolist() == seen[: prompt.kept]
    assert text_of(prompt) == then
    assert prompt.ids[prompt.kept :].tolist() == toy_tokenizer().encode(prompt.added).tolist()


def test_a_prompt_of_ids_goes_on_from_the_answer_that_it_starts_with():
    session = conversations().open("s")
    node = committed(session, "Q: ", f"ab{END}", "ab", pieces=True)
    seen = node.seen_ids.tolist()
    prompt = session.text_prompt([*seen, 5, 6])
    assert (prompt.branch, prompt.parent, prompt.ids.tolist()) == (Branch.CONTINUES, node, [*seen, 5, 6])
    prompt = session.text_prompt([*seen[:-1], 5])
    assert (prompt.branch, prompt.parent, prompt.ids.tolist()) == (Branch.FORK, node, [*seen[:-1], 5])
    prompt = session.text_prompt([5, 6])
    assert (prompt.branch, prompt.parent, prompt.ids.tolist()) == (Branch.FORK, None, [5, 6])
    with pytest.raises(RecordError):
        session.text_prompt([5, "6"])  # type: ignore[list-item]


def test_text_prompts_need_no_template_and_chats_do():
    session = Conversations(toy_tokenizer(), None).open("s")
    committed(session, "Q: ", f"ab{END}", "ab")
    assert session.text_prompt(f"Q: ab{END}").branch is Branch.CONTINUES
    assert session.text_prompt("Q: ").branch is Branch.START
    with pytest.raises(RenderError, match="no chat template"):
        session.prompt(call(ASKED))


# many sessions


def test_a_session_is_found_by_what_it_answered():
    many = conversations()
    first, second = many.open("a"), many.open("b")
    answer(first, call(ASKED), f"hi{END}", say("hi"))
    answer(second, call(ASKED), f"ho{END}", say("ho"))
    answer(first, call(ASKED, say("hi"), MORE), f"more{END}", say("more"))
    assert many.find(call(ASKED, say("ho"), MORE)) is second
    assert many.find(call(ASKED, say("hi", ""), MORE, say("more"), MORE)) is first
    assert many.find(call(ASKED, say("hi"), MORE, say("changed"), MORE)) is first
    new = many.find(call(ASKED))
    assert new not in (first, second)
    assert new.prompt(call(ASKED)).branch is Branch.START
    committed(second, "Q: ", f"ab{END}", "ab")
    assert many.find_text("Q: ab and on") is second
    assert many.find_text("A: ab") not in (first, second)


def test_two_clients_with_equal_answers_keep_their_own_sessions():
    many = conversations()
    history = [{"id": "c1", "role": "user", "content": "hello"}]
    own = {}
    for name in "ab":
        message = say("hi", f"I am {name}", look('{"x": 1}', id=f"id-{name}"))
        own[name] = answer(many.open(name), call(*history), f"hi {name}{END}", message), message
    for node, message in own.values():
        bare = {key: value for key, value in message.items() if key != "reasoning_content"}
        others = {**message, "tool_calls": [look('{"x":1.0e0}', id="new")]}
        assert many.find(call(*history, others, MORE)).id not in own
        respelled = {**message, "tool_calls": [look('{"x":  1}', id="new")]}
        for variant in (message, bare, respelled):
            session = many.find(call(*history, variant, MORE))
            assert session.nodes == (node,)
            fork = session.prompt(call(*history, variant, MORE)).fork
            assert fork is None or fork.reason is ForkReason.TEMPLATE_REWRITES
    edited = say("hi", "I am nobody", look('{"x": 1}', id="id-a"))
    fork = many.find(call(*history, edited, MORE)).prompt(call(*history, edited, MORE)).fork
    assert fork.reason is ForkReason.EDITED


def test_of_equal_siblings_the_one_that_a_whole_history_names_is_continued():
    session = conversations().open("s")
    first_prompt = session.prompt(call(ASKED))
    firsts = [say("", None, look("{}", id=f"id-{n}")) for n in range(2)]
    sampled = [result(f"a {n}{END}", first_prompt) for n in range(2)]
    session.commit("c", first_prompt, call(ASKED), sampled, firsts)
    second = {}
    for number in (0, 1):
        history = call(ASKED, firsts[number], MORE)
        second[number] = answer(session, history, f"same {number}{END}", say("same"))
    for number in (0, 1):
        prompt = session.prompt(call(ASKED, firsts[number], MORE, say("same"), MORE))
        assert (prompt.parent, prompt.alike) == (second[number], 0)


def test_what_is_over_the_limit_leaves_memory_and_says_so():
    many = conversations(sessions=2)
    for name in "abc":
        answer(many.open(name), call(ASKED), f"hi {name}{END}", say(f"hi {name}"))
    assert [session.id for session in many] == ["b", "c"]
    assert many.find_open("a") is None
    back = many.open("a").prompt(call(ASKED, say("hi a"), MORE))
    assert (back.branch, back.fork.reason) == (Branch.FORK, ForkReason.LEFT_MEMORY)
    assert many.find(call(ASKED, say("hi a"), MORE)).id not in ("a", "b", "c")


def test_bytes_and_idle_sessions_leave_memory_whole():
    many = conversations(bytes=20_000)
    for number in range(9):
        answer(many.open(f"s{number}"), call(ASKED), f"hi{END}", say("hi"))
    assert 1 < len(many) < 6
    assert many.size == sum(session.size for session in many) <= 20_000 + 5000
    many.open("s8", now=5.0)
    assert len(many.drop_idle(5.0)) > 0
    assert [session.id for session in many] == ["s8"]
    assert many.close("s8") is not None
    assert (len(many), many.size) == (0, 0)
    assert many.find(call(ASKED, say("hi"), MORE)).nodes == ()


def test_an_answer_to_a_session_that_left_meanwhile_is_held_by_none():
    many = conversations()
    session = many.open("a")
    prompt = session.prompt(call(ASKED))
    many.close("a")
    (node,) = session.commit("c", prompt, call(ASKED), [result(f"hi{END}", prompt)], [say("hi")])
    assert node.seen_ids.tolist()[: prompt.length] == prompt.ids.tolist()
    assert (session.nodes, many.size) == ((), 0)
    assert many.find(call(ASKED, say("hi"), MORE)) is not session


def test_of_too_many_answers_the_older_half_leaves_and_the_rest_is_continued():
    session = conversations(nodes=8).open("s")
    history: list[dict[str, Any]] = [ASKED]
    for number in range(12):
        node = answer(session, call(*history), f"hi {number}{END}", say(f"hi {number}"))
        assert node.prompt.branch is (Branch.CONTINUES if number else Branch.START)
        history += [say(f"hi {number}"), MORE]
    assert len(session.nodes) <= 8
    prompt = session.prompt(call(*history[:3]))
    assert prompt.fork.reason is ForkReason.LEFT_MEMORY


# what it costs


def test_a_call_renders_its_history_twice_at_most_and_encodes_only_what_is_new(monkeypatch):
    written: list[str] = []
    encoded: list[str] = []
    run, encode = Renderer.render, type(toy_tokenizer()).encode
    monkeypatch.setattr(Renderer, "render", lambda *a, **k: written.append("") or run(*a, **k))
    session = conversations(styled("appends")).open("s")
    history: list[dict[str, Any]] = [ASKED]
    for number in range(12):
        monkeypatch.setattr(
            type(toy_tokenizer()), "encode", lambda self, text: encoded.append(text) or encode(self, text)
        )
        request = call(*history)
        before = len(written)
        prompt = session.prompt(request)
        monkeypatch.setattr(type(toy_tokenizer()), "encode", encode)
        assert number < 2 or len(written) - before <= 2
        assert encoded[-1] == prompt.added
        message = say(f"hi {number}", None, look('{"a":1}', id=f"c{number}"))
        text = f'hi {number}<tool_call>\n{{"name":"look","arguments":{{"a":1}}}}\n</tool_call>{END}'
        session.commit(f"c{number}", prompt, request, [result(text, prompt)], [message])
        history += [message, {"role": "tool", "tool_call_id": f"c{number}", "content": "seen"}]
    assert len(encoded[-1]) < 100
    assert session.nodes[-1].prompt.proof is Proof.SAME_SUFFIX
