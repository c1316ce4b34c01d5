"""Sessions, case by case: what counts as the same answer, how turns end, why a call forks, what leaves memory."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from tests.session_agents import STYLES, Style
from tests.tables import stored, table
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


def styled(style: str) -> Renderer:
    return make_renderer(toy_tokenizer(), chat_template=STYLES[style].source)


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


def test_a_result_refers_to_its_call_whatever_the_id_is():
    def history(name: str, refers: str):
        calls = say(None, None, look("1", id=f"{name}1"), look("2", id=f"{name}2"))
        return message_keys(
            as_messages([ASKED, calls, {"role": "tool", "tool_call_id": refers, "content": "r"}], "messages")
        )

    assert history("a", "a2") == history("b", "b2")
    assert history("a", "a1") != history("a", "a2")


STORIES = stored(__file__, "stories")


def message(turn: Any) -> dict[str, Any]:
    """A message of a story: a user's text, or a table."""
    if isinstance(turn, str):
        return {"role": "user", "content": turn}
    if "say" not in turn:
        ((role, text),) = turn.items()
        return {"role": role, "content": text, **({"tool_call_id": "c1"} if role == "tool" else {})}
    return say(turn["say"] or None, turn.get("why"), *map(look, turn.get("looks", ())))


def renderer_of(story: dict[str, Any]) -> Renderer | None:
    """With the template of a story: a style by its name or its end, some text before it; None: the toy's."""
    if "template" not in story:
        return None
    style = STYLES.get(story["template"], Style(end=story["template"]))
    return make_renderer(toy_tokenizer(), chat_template=story.get("before", "") + style.source)


def check_prompt(prompt: Prompt, step: dict[str, Any], nodes: list[Node]) -> None:
    """A prompt is as its step says, and what it keeps or renders is what it says it is."""
    parent, fork = prompt.parent, prompt.fork
    assert (fork is not None) == (prompt.branch is Branch.FORK)
    facts = {
        "branch": prompt.branch,
        "parent": next((number for number, node in enumerate(nodes) if node is parent), -1),
        "proof": prompt.proof,
        "reason": fork and fork.reason,
        "at": -1 if fork is None or fork.message is None else fork.message,
        "kept": prompt.kept,
        "added": prompt.added,
        "detail": fork and fork.detail,
    }
    assert {name: facts[name] for name in step if name in facts} == {n: step[n] for n in step if n in facts}
    texts = {"prompt": text_of(prompt), "new": prompt.added, "words": fork.detail if fork else ""}
    for where, text in texts.items():
        for part in step.get(where, ()):
            assert text.count(part) == 1, (where, text)
    assert not any(part in texts["prompt"] for part in step.get("lacks", ()))
    if parent is None:
        assert prompt.ids.tolist() == toy_tokenizer().encode(prompt.added).tolist()
    else:
        assert prompt.ids[: prompt.kept].tolist() == parent.seen_ids[: prompt.kept].tolist()
        assert prompt.kept == len(parent.seen_ids) - step.get("less", 0)
        assert prompt.added or prompt.kept == prompt.length


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story["name"])
def test_a_call_continues_or_forks_as_its_story_tells(story):
    session = conversations(renderer_of(story)).open("s")
    nodes: list[Node] = []
    for step in story["calls"]:
        tools = ({"type": "function", "function": {"name": "look", "parameters": {}}},) if "tools" in step else ()
        how = {"template_kwargs": step.get("kwargs", {}), "add_generation_prompt": not step.get("goes_on", False)}
        request = call(*map(message, step["ask"]), tools=tools, **how)
        prompt = session.prompt(request)
        check_prompt(prompt, step, nodes)
        if "says" in step:
            text = step["says"].replace("$", END)
            finish = step.get("finish", "stop" if text.endswith(END) else "length")
            sampled = result(text.removeprefix("*"), prompt, pieces=text.startswith("*"), finish=finish)
            shown = message(step.get("shown", {"say": text.removeprefix("*").removesuffix(END)}))
            nodes += session.commit(f"call-{len(nodes)}", prompt, request, [sampled], [shown])
    if "respelled" in story:
        assert prompt.ids.tolist() != toy_tokenizer().encode(text_of(prompt)).tolist(), (
            "the case would show nothing"
        )


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


def test_an_answer_without_a_text_cannot_be_continued():
    with pytest.raises(RenderError, match="continued"):
        conversations(styled("appends")).open("s").prompt(call(ASKED, say(None), add_generation_prompt=False))


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
