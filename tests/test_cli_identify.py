"""The command `identify`: its page, its JSON, what it writes, which tokenizers it tries, and how it ends."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written
from tests.identified import writer
from tests.identified.writer import Case, log_of, rows_of
from tests.world import TOKENIZERS, TOY, lines_of

OTHER = TOKENIZERS / "toy_metaspace"

DATED = """{{- '<|im_start|>system\\nToday is ' + strftime_now('%Y-%m-%d') + '.<|im_end|>\\n' }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@pytest.fixture(autouse=True)
def _nothing_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No hub cache of whoever runs the tests, no configuration file, the toy tokenizers."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    before = list(writer._FOLDER)
    writer.use(TOKENIZERS)
    yield
    writer._FOLDER[:] = before


def chats(number: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"How much is {n} and {n + 3}?"},
                {"role": "assistant", "content": f"It is {2 * n + 3}."},
                {"role": "user", "content": f"And {n} times {n}?"},
                {"role": "assistant", "content": f"That is {n * n}."},
            ],
            "tools": None,
            "texts": [f"It is {2 * n + 3}.", f"That is {n * n}."],
        }
        for n in range(number)
    ]


def log_at(path: Path, rows: int = 8, turns: int = 2, **case: Any) -> Path:
    """A log written by the toy tokenizer with its template, or as a case says."""
    writer = Case(1, "toy_bpe", stop="<|im_end|>", **case)
    cut = [{**chat, "messages": chat["messages"][: 2 * turns]} for chat in chats(rows)]
    return written(path, rows_of(writer, log_of(writer, cut, rows)))


def finds_nothing(*arguments: object) -> bool:
    """Whether a scan finds no difference from what tokenizer and template write."""
    return run("scan", *arguments, "--select", "TOK,TPL,SEQ", "--fail-on", "note")[0] == 0


def reply(*arguments: object, **how: Any) -> dict[str, Any]:
    code, out, error = run("identify", *arguments, "-f", "json", **how)
    answer: dict[str, Any] = json.loads(out)
    assert code == (not answer["sure"]), error
    return answer


def test_the_object_has_the_command_and_the_keys_to_paste(tmp_path: Path) -> None:
    answer = reply(log_at(tmp_path / "a log.jsonl", arguments={"enable_thinking": False}), "-t", TOY)
    log = shlex.quote(f"{tmp_path}/a log.jsonl")
    assert answer["command"] == f"tito-audit scan {log} -t {TOY} --template-arg enable_thinking=false"
    table = {"tokenizer": str(TOY), "template-args": {"enable_thinking": False}}
    assert answer["explanations"][0]["config"] == table


def test_a_date_is_read_out_of_the_prompts_and_a_file_is_a_template_to_try(tmp_path: Path) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(DATED, encoding="utf-8")
    log = log_at(tmp_path / "log.jsonl", template=str(template), at=datetime(2024, 2, 29))
    best = reply(log, "-t", TOY, "--chat-template", "dated.jinja")["explanations"][0]
    assert best["flags"] == ["-t", str(TOY), "--chat-template", "dated.jinja", "--clock", "2024-02-29"]
    assert finds_nothing(log, *best["flags"])


def test_how_the_log_was_read_is_part_of_the_command(tmp_path: Path) -> None:
    rows = lines_of(log_at(tmp_path / "log.jsonl", form="binary"))
    log = written(tmp_path / "named.jsonl", ({"toks": row.pop("token_ids"), **row} for row in rows))
    command = reply(log, "-t", TOY, "--map", "token_ids=toks", "--map", "loss_mask=loss_mask")["command"]
    assert command.endswith("--map token_ids=toks --map loss_mask=loss_mask")
    assert finds_nothing(*shlex.split(command)[2:])


# Which tokenizers are tried


def cached(folder: Path, repository: str, tokenizer: Path, revision: str = "abc", main: bool = True) -> Path:
    """A tokenizer in a hub cache, as the hub client leaves it there."""
    place = folder / f"models--{repository.replace('/', '--')}"
    snapshot = place / "snapshots" / revision
    (place / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    for file in sorted(tokenizer.iterdir()):
        blob = place / "blobs" / str(hash(file.read_bytes()))
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    if main:
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / "main").write_text(revision, encoding="utf-8")
    return snapshot


def test_tokenizers_of_the_hub_cache_are_tried(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    assert reply(log)["tokenizers"] == []
    cached(tmp_path / "hub", "org/toy", TOY)
    cached(tmp_path / "hub", "org/same-as-toy", TOY)
    cached(tmp_path / "hub", "org/other", OTHER)
    answer = reply(log)
    assert answer["sure"]
    assert answer["explanations"][0]["tokenizer"] in ("org/toy", "org/same-as-toy")
    names = {tokenizer["name"] for tokenizer in answer["tokenizers"]}
    assert len(names & {"org/toy", "org/same-as-toy"}) == 1, "the same files are tried once"
    tried = names | {tokenizer["name"] for tokenizer in answer["passed_over"]}
    assert "org/other" in tried


def test_a_tokenizer_without_room_for_the_ids_is_passed_over(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    small = tmp_path / "small"
    shutil.copytree(TOY, small)
    whole = json.loads((small / "tokenizer.json").read_text(encoding="utf-8"))
    whole["added_tokens"], whole["model"]["vocab"] = [], {"a": 0, "b": 1}
    (small / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    cached(tmp_path / "hub", "org/small", small)
    answer = reply(log)
    assert answer["tokenizers"] == []
    assert answer["passed_over"] == [{"name": "org/small", "because": "its ids end at 1, the log has 2,002"}]


def test_a_snapshot_that_is_not_the_main_one_is_named_by_its_folder(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    snapshot = cached(tmp_path / "hub", "org/toy", TOY, main=False)
    assert reply(log)["explanations"][0]["flags"] == ["-t", str(snapshot)]


def test_a_broken_tokenizer_in_the_cache_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    broken = tmp_path / "broken"
    shutil.copytree(TOY, broken)
    (broken / "tokenizer.json").write_text("{}", encoding="utf-8")
    cached(tmp_path / "hub", "org/broken", broken)
    assert [tokenizer["name"] for tokenizer in reply(log)["passed_over"]] == ["org/broken"]


def test_what_the_log_names_is_looked_for_beside_it_and_in_the_cache(tmp_path: Path) -> None:
    rows = lines_of(log_at(tmp_path / "plain.jsonl"))
    log = written(tmp_path / "log.jsonl", ({**row, "model": "org/policy"} for row in rows))
    answer = reply(log)
    (only,) = answer["passed_over"]
    assert only["name"] == "org/policy"
    assert "not on this machine" in only["because"]
    shutil.copytree(TOY, tmp_path / "policy")
    (tried,) = reply(log)["tokenizers"]
    assert (tried["name"], tried["from"]) == (str(tmp_path / "policy"), "the log names its model 'org/policy'")
    shutil.rmtree(tmp_path / "policy")
    cached(tmp_path / "hub", "org/policy", TOY)
    (tried,) = reply(log)["tokenizers"]
    assert (tried["name"], tried["from"]) == ("org/policy", "the log names its model 'org/policy'")


@pytest.mark.parametrize("name", ["../toy", "/etc", "a/../../toy", "..", "-t", "a\x1b[2Jb"])
def test_a_name_in_a_log_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    shutil.copytree(TOY, tmp_path / "toy")
    (tmp_path / "logs").mkdir()
    rows = lines_of(log_at(tmp_path / "plain.jsonl"))
    log = written(tmp_path / "logs" / "log.jsonl", ({**row, "model": name} for row in rows))
    answer = reply(log)
    assert (answer["tokenizers"], answer["passed_over"]) == ([], [])


def test_the_configured_tokenizer_is_tried_unless_others_are_given(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    (tmp_path / "tito-audit.toml").write_text(f'tokenizer = "{TOY}"\n', encoding="utf-8")
    assert [(row["name"], row["from"]) for row in reply(log)["tokenizers"]] == [(str(TOY), "configured")]
    assert [(row["name"], row["from"]) for row in reply(log, "-t", OTHER)["tokenizers"]] == [(str(OTHER), "given")]


def test_of_two_tokenizers_the_one_that_wrote_the_log_is_named(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    answer = reply(log, "-t", OTHER, "-t", TOY)
    assert answer["sure"]
    assert answer["explanations"][0]["tokenizer"] == str(TOY)
    wrong = reply(log, "-t", OTHER)
    assert not wrong["sure"]


# What cannot be explained


def test_rows_without_messages_or_ids_say_so(tmp_path: Path) -> None:
    rows = lines_of(log_at(tmp_path / "plain.jsonl", form="binary"))
    ids = [{key: value for key, value in row.items() if key != "messages"} for row in rows]
    assert reply(written(tmp_path / "ids.jsonl", ids), "-t", TOY)["because"] == "no messages"
    texts = [{"messages": row["messages"]} for row in rows]
    assert reply(written(tmp_path / "texts.jsonl", texts), "-t", TOY)["because"] == "no token ids"


def test_a_row_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    log.write_text(log.read_text() + "{broken\n")
    answer = reply(log, "-t", TOY)
    assert answer["sure"]
    assert (answer["rows"]["read"], answer["rows"]["unreadable"]) == (9, 1)


def test_a_limit_is_shared_by_the_logs(tmp_path: Path) -> None:
    logs = [log_at(tmp_path / f"{index}.jsonl", rows=rows) for index, rows in enumerate((2, 8, 8))]
    assert reply(*logs, "-t", TOY, "--limit", "9")["rows"]["read"] == 9
    assert reply(*logs, "-t", TOY, "--limit", "9")["rows"]["all"] is False
    assert reply(*logs, "-t", TOY)["rows"] | {"read": 18, "all": True} == reply(*logs, "-t", TOY)["rows"]


def test_nothing_of_a_log_acts_on_a_terminal(tmp_path: Path) -> None:
    hostile = "\x1b[2J\u202e##[error]x"
    case = {"system": f"Be {hostile}."}
    log = log_at(tmp_path / "log.jsonl", **case)
    for arguments in ((log, "-t", TOY), (log, "-t", TOY, "-f", "json")):
        code, page, _ = run("identify", *arguments)
        assert code == 0
        assert "system prompt not in the messages" in page
        assert "\x1b" not in page
        assert "\u202e" not in page
        assert "##[error]" not in page


def test_a_template_that_never_ends_does_not_stop_the_search(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl", rows=3)
    (tmp_path / "bad.jinja").write_text(
        "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"
    )
    (tmp_path / "worse.jinja").write_text("{% if %}")
    answer = reply(log, "-t", TOY, "--chat-template", "bad.jinja", "--chat-template", "worse.jinja")
    assert answer["sure"]
    assert answer["explanations"][0]["template"]["chat_template"] is None


def test_what_was_read_of_each_tokenizer_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, cache = log_at(tmp_path / "log.jsonl"), tmp_path / "cache"
    toy_copy, other = shutil.copytree(TOY, tmp_path / "mine"), shutil.copytree(OTHER, tmp_path / "other")
    monkeypatch.setenv("TITO_AUDIT_CACHE", str(cache))
    assert reply(log, "-t", other, "-t", toy_copy)["sure"]
    assert len(list(cache.glob("*.tables"))) == 2
