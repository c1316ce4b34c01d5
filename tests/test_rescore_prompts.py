"""`tito-audit rescore --prompts`, asking a scripted server that answers in vLLM's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tests.command import run
from tests.prompt_server import Server, ids_of, running, written
from tests.rescoring import TOY, log_of
from tests.scripted import Scripted
from tests.tables import table
from tito_audit.rescore.prompts import PromptRun, Question
from tito_audit.settings.model import Settings

ASKED = [{"role": "user", "content": "2+2?"}]
CALLED = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
GREEDY = {"temperature": 0.0}


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as script:
        yield script


def call(prompt: Sequence[int], answer: str = "4<|im_end|>", **more: Any) -> dict[str, Any]:
    ids = ids_of(answer)
    values = [-0.7 - at / 10 for at in range(len(ids))]
    return {"prompt_ids": list(prompt), "completion_ids": ids, "completion_logprobs": values, **more}


def row_of(
    *calls: Any, messages: Sequence[Any] = (*ASKED, {"role": "assistant", "content": "4"})
) -> dict[str, Any]:
    return {"messages": list(messages), "calls": list(calls)}


def page_of(folder: Path, server: Server, rows: Sequence[Any], *more: Any, code: int = 0) -> str:
    """What a run prints; what it says, where it fails."""
    words = ("--prompts", "--provider", f"vllm={server.url}")
    result = run("rescore", log_of(folder, rows), *words, *more)
    assert result[0] == code, result
    return result[2] if code == 2 else result[1]


def report_of(folder: Path, server: Server, rows: Sequence[Any], *more: Any, code: int = 0) -> Any:
    """The JSON report of a run."""
    return json.loads(page_of(folder, server, rows, "-t", TOY, "-f", "json", *more, code=code))


def counts(report: Any) -> dict[str, tuple[int, int]]:
    return {each["question"]: (each["compared"], each["differing"]) for each in report["summary"]["questions"]}


def test_prompts_that_the_server_sees_and_writes_pass(tmp_path: Path, server: Server) -> None:
    report = report_of(tmp_path, server, [row_of(call(written(ASKED), **GREEDY))])
    assert counts(report) == {"sent as ids": (1, 0), "sent as messages": (1, 0), "replayed greedily": (1, 0)}
    assert report["differences"] == []
    assert report["summary"]["skipped"] == []
    assert report["summary"]["replayed"] == len(ids_of("4<|im_end|>"))
    rendered = next(body for path, body in server.requests if path.endswith("/render"))
    assert rendered == {"messages": ASKED, "model": "toy"}


def test_a_template_that_strips_reasoning_is_named_with_its_place(tmp_path: Path, server: Server) -> None:
    """The log's prompt has the reasoning of an earlier answer; the server's template leaves it out."""
    opens = "<|im_start|>assistant\n"
    text = f"<|im_start|>user\n2+2?<|im_end|>\n{opens}{{}}4<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
    messages = [
        *ASKED,
        {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
        {"role": "user", "content": "Sure?"},
    ]
    logged = ids_of(text.format("<think>\nTwo and two.\n</think>\n\n") + opens)
    server.render = lambda body: ids_of(text.format("") + opens)
    rows = [row_of(call(logged), messages=[*messages, {"role": "assistant", "content": "4"}])]
    rows[0]["calls"][0]["message_index"] = 3
    report = report_of(tmp_path, server, rows, code=1)
    (differs,) = report["differences"]
    assert (differs["code"], differs["question"], differs["turn"]) == ("TPL204", "sent as messages", 0)
    assert differs["where"] == "prompt"
    start, end = differs["start"], differs["end"]
    assert logged[start:end] == differs["recorded"]
    assert logged[:start] + differs["server"] + logged[end:] == ids_of(text.format("") + opens)
    sent = next(body for path, body in server.requests if path.endswith("/render"))["messages"][1]
    assert sent["reasoning"] == sent["reasoning_content"] == "Two and two."


def kept_tokens() -> tuple[dict[str, Any], list[Any], list[int]]:
    """A call whose answer was sampled letter by letter, the history behind it, and a prompt that keeps it."""
    first = call(written(ASKED))
    first["completion_ids"] = [token for text in "required" for token in ids_of(text)] + ids_of("<|im_end|>")
    first["completion_logprobs"] = [-0.7 - at / 10 for at in range(len(first["completion_ids"]))]
    assert first["completion_ids"] != ids_of("required<|im_end|>")
    history = [*ASKED, {"role": "assistant", "content": "required"}, {"role": "user", "content": "Sure?"}]
    later = written(history)[len(first["prompt_ids"]) + len(ids_of("required<|im_end|>")) :]
    return first, history, [*first["prompt_ids"], *first["completion_ids"], *later]


def test_a_prompt_that_keeps_sampled_tokens_passes_where_the_server_would_merge_them(
    tmp_path: Path, server: Server
) -> None:
    first, history, prompt = kept_tokens()
    messages = [*history, {"role": "assistant", "content": "4"}]
    report = report_of(tmp_path, server, [row_of(first, call(prompt), messages=messages)])
    assert counts(report)["sent as messages"] == (2, 0)
    assert report["summary"]["spliced"] == 1
    # What it adds to them is compared.
    server.render = lambda body: [*written(body["messages"]), *ids_of("<think>\n")]
    report = report_of(tmp_path, server, [row_of(first, call(prompt), messages=messages)], code=1)
    assert [(each["turn"], each["start"]) for each in report["differences"]] == [
        (0, len(first["prompt_ids"])),
        (1, len(prompt)),
    ]


def test_a_prompt_that_keeps_the_tokens_of_another_rollout_passes(tmp_path: Path, server: Server) -> None:
    """A second answer to one prompt, a fork or a retry is a rollout of its own, and keeps what came before."""
    first, history, ids = kept_tokens()
    logged = call(ids, message_index=3)
    rows = [
        row_of(first, messages=[*ASKED, {"role": "assistant", "content": "required"}]),
        row_of(logged, messages=[*history, {"role": "assistant", "content": "4"}]),
    ]
    report = report_of(tmp_path, server, rows)
    assert counts(report)["sent as messages"] == (2, 0)
    assert report["summary"]["spliced"] == 1
    # Without the first row nothing shows that these tokens were sampled.
    (differs,) = report_of(tmp_path, server, rows[1:], code=1)["differences"]
    assert (differs["code"], differs["start"]) == ("TOK101", len(first["prompt_ids"]))


def test_a_server_that_adds_to_ids_is_found(tmp_path: Path, server: Server) -> None:
    server.sees = lambda ids: [ids[0], *ids]
    report = report_of(tmp_path, server, [row_of(call(written(ASKED), **GREEDY))], code=1)
    (differs,) = report["differences"]
    assert differs["question"] == "sent as ids"
    assert (differs["turn"], differs["where"]) == (0, "prompt")
    assert differs["server"] == [written(ASKED)[0]]


@pytest.mark.parametrize(*table(__file__, "replayed"))
def test_only_what_was_certainly_greedy_is_replayed(
    tmp_path: Path, server: Server, fields: str, values: list[float], replayed: int
) -> None:
    logged = call(written(ASKED), **json.loads(fields))
    logged["completion_logprobs"] = values or logged["completion_logprobs"]
    report = report_of(tmp_path, server, [row_of(logged)])
    assert report["summary"]["replayed"] == replayed
    assert counts(report)["replayed greedily"] == (bool(replayed), 0)
    skipped = [each["question"] for each in report["summary"]["skipped"]]
    assert skipped == ([] if replayed else ["replayed greedily"])


def test_another_choice_is_a_difference_unless_it_is_a_tie(tmp_path: Path, server: Server) -> None:
    row = row_of(call(written(ASKED), **GREEDY))
    server.answer = ids_of("5<|im_end|>")
    (differs,) = report_of(tmp_path, server, [row], code=1)["differences"]
    assert (differs["question"], differs["where"], differs["start"]) == ("replayed greedily", "completion", 0)
    assert (differs["recorded"], differs["server"]) == (ids_of("4"), ids_of("5"))
    server.second = {ids_of("4")[0]: -0.3}
    report_of(tmp_path, server, [row], code=1)
    server.second = {ids_of("4")[0]: -0.12}
    assert report_of(tmp_path, server, [row])["differences"] == []
    server.second = {}
    assert counts(report_of(tmp_path, server, [row], "--replay", 0))["replayed greedily"] == (0, 0)


def test_what_is_not_compared_is_said(tmp_path: Path, server: Server) -> None:
    server.render, server.context = None, 100
    rows = [row_of(call(written(ASKED))), {"calls": [call(ids_of("1 2 3 " * 200))]}]
    report = report_of(tmp_path, server, rows, "--replay", 0)
    skipped = {
        each["because"]: (each["question"], each["number"], each["row"]) for each in report["summary"]["skipped"]
    }
    assert [value for because, value in skipped.items() if "does not render" in because] == [
        ("sent as messages", 1, 0)
    ]
    assert skipped["the log does not hold the messages of the call"] == ("sent as messages", 1, 1)
    assert ("sent as ids", 1, 1) in skipped.values()
    page = page_of(tmp_path, server, rows, "-t", TOY)
    assert "could not be made" in page
    assert "does not render messages" in page


def test_the_page_names_place_cause_and_tokens_and_escapes_them(tmp_path: Path, server: Server) -> None:
    server.render = lambda body: ids_of("<|im_start|>user\n2+2?\x1b[31m<|im_end|>\n<|im_start|>assistant\n")
    page = page_of(tmp_path, server, [row_of(call(written(ASKED)))], "-t", TOY, code=1)
    assert f"{tmp_path / 'log.jsonl'}:0 turn 0 prompt" in page.replace("\n", "")
    assert "sent as messages" in page
    assert "\x1b[31m" not in page


def test_without_a_tokenizer_the_place_is_still_named(tmp_path: Path, server: Server) -> None:
    prompt = written(ASKED)
    server.render = lambda body: [*prompt[:2], 7, 8, *prompt[3:]]
    out = page_of(tmp_path, server, [row_of(call(prompt))], "-f", "json", code=1)
    (differs,) = json.loads(out)["differences"]
    assert (differs["start"], differs["end"]) == (2, 3)
    assert (differs["recorded"], differs["server"]) == ([prompt[2]], [7, 8])
    assert differs["what"] == "other tokens; -t TOKENIZER would name the cause"


def test_with_a_tokenizer_that_did_not_write_the_log_no_cause_is_named(tmp_path: Path, server: Server) -> None:
    text = "The tokens that a sampler returned are required, and no tokenizer would have written them so. " * 3
    question = [{"role": "user", "content": text}]
    prompt = written(question)
    server.render = lambda body: [*prompt[:2], 7, 8, *prompt[3:]]
    logged = call(prompt, text, message_index=1)
    rows = [row_of(logged, messages=[*question, {"role": "assistant", "content": text}])] * 16
    report = report_of(tmp_path, server, rows, "-t", TOY.with_name("toy_metaspace"), code=1)
    assert {each["what"] for each in report["differences"]} == {
        "other tokens; the tokenizer of -t did not write this log"
    }


def test_the_json_object_follows_its_schema(tmp_path: Path, server: Server) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(files("tito_audit").joinpath("schemas", "rescore-prompts.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    server.render = lambda body: [*written(body["messages"]), 5]
    rows: list[Any] = [row_of(call(written(ASKED), **GREEDY)), {"token_ids": [1, 2], "loss_mask": [0, 1]}]
    for more in (("-t", TOY), ()):
        report = json.loads(page_of(tmp_path, server, rows, "-f", "json", *more, code=1))
        assert report["differences"]
        assert report["summary"]["skipped"]
        jsonschema.Draft202012Validator(schema).validate(report)


def test_a_server_with_another_template_than_the_tokenizers_is_said_to_have_one(
    tmp_path: Path, server: Server
) -> None:
    server.render = lambda body: ids_of("<|im_start|>system\nHi.<|im_end|>\n") + written(body["messages"])
    report = report_of(tmp_path, server, [row_of(call(written(ASKED)))], code=1)
    (differs,) = report["differences"]
    assert differs["code"] == "TPL206"
    assert "the server has another one" in differs["what"]


def test_a_model_that_does_not_repeat_its_prompt_is_not_counted_as_agreeing(tmp_path: Path) -> None:
    provider = Scripted([ids_of("4<|im_end|>"), ids_of("5<|im_end|>")])
    log = log_of(tmp_path, [row_of(call(written(ASKED), **GREEDY))] * 2)
    prompts = PromptRun(str(log), Settings(tokenizer=str(TOY)), provider)
    equal, other = list(prompts)
    assert equal.compared == other.compared == [Question.REPLAY]
    assert (len(equal.differences), len(other.differences)) == (0, 1)
    assert [question for question, _ in equal.skipped] == [Question.IDS, Question.MESSAGES]
    assert provider.prompts == [written(ASKED)] * 2


def test_arguments_that_are_objects_are_sent_as_text(tmp_path: Path, server: Server) -> None:
    called = {**CALLED, "function": {"name": "add", "arguments": {"a": 2}}}
    history = [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "4"},
    ]
    logged = call(written(history), message_index=3)
    report_of(
        tmp_path, server, [row_of(logged, messages=[*history, {"role": "assistant", "content": "4"}])], code=0
    )
    sent = next(body for path, body in server.requests if path.endswith("/render"))["messages"]
    assert sent[1]["tool_calls"] == [CALLED]
