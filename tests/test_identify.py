"""The command `identify`: its page, its JSON, what it writes, which tokenizers it tries, and how it ends."""

from __future__ import annotations

import json
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.command import run, written
from tests.identified import writer
from tests.identified.writer import Case, log_of, rows_of

ROOT = Path(__file__).resolve().parents[1]
TOKENIZERS = ROOT / "fixtures" / "tokenizers"
TOY = TOKENIZERS / "toy_bpe"
OTHER = TOKENIZERS / "toy_metaspace"

DATED = """{{- '<|im_start|>system\\nToday is ' + strftime_now('%Y-%m-%d') + '.<|im_end|>\\n' }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

pytestmark = pytest.mark.usefixtures("loaded_once")


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
                {"role": "user", "content": f"How much is {one} and {one + 3}?"},
                {"role": "assistant", "content": f"It is {2 * one + 3}."},
                {"role": "user", "content": f"And {one} times {one}?"},
                {"role": "assistant", "content": f"That is {one * one}."},
            ],
            "tools": None,
            "texts": [f"It is {2 * one + 3}.", f"That is {one * one}."],
        }
        for one in range(number)
    ]


def log_at(path: Path, rows: int = 8, turns: int = 2, **case: Any) -> Path:
    """A log written by the toy tokenizer with its template, or as a case says."""
    made = Case(1, "toy_bpe", stop="<|im_end|>", **case)
    cut = [{**chat, "messages": chat["messages"][: 2 * turns]} for chat in chats(rows)]
    return written(path, rows_of(made, log_of(made, cut, rows)))


def finds_nothing(*arguments: object) -> bool:
    """Whether a scan finds no difference from what tokenizer and template write."""
    return run("scan", *arguments, "--select", "TOK,TPL,SEQ", "--fail-on", "note")[0] == 0


def said(*arguments: object, **how: Any) -> dict[str, Any]:
    code, out, error = run("identify", *arguments, "-f", "json", **how)
    found: dict[str, Any] = json.loads(out)
    assert code == (not found["sure"]), error
    return found


def test_the_command_to_paste_audits_the_log_without_a_finding(tmp_path: Path) -> None:
    log = log_at(tmp_path / "a log.jsonl", turns=1, arguments={"enable_thinking": False})
    code, page, _ = run("identify", log, "-t", TOY)
    assert code == 0
    assert page.splitlines()[3].startswith(f"Written by {TOY} with its own template")
    calls = [call for line in log.read_text().splitlines() for call in json.loads(line)["calls"]]
    tokens = sum(len(call["prompt_token_ids"]) for call in calls)
    assert f"8 of 8 prompts (100%) and {tokens} of {tokens} tokens (100%)." in " ".join(page.split())
    (command,) = (line for line in page.splitlines() if line.startswith("  tito-audit scan "))
    words = shlex.split(command)
    assert words == ["tito-audit", "scan", str(log), "-t", str(TOY), "--template-arg", "enable_thinking=false"]
    assert finds_nothing(*words[2:])
    assert not finds_nothing(log, "-t", TOY), "the argument matters"
    assert said(log, "-t", TOY)["command"] == command.strip()


def test_the_keys_to_paste_say_the_same(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl", arguments={"enable_thinking": False})
    page = run("identify", log, "-t", TOY)[1]
    keys = page[page.index("  in tito-audit.toml\n") :].splitlines()[1:]
    assert all(line.startswith("    ") for line in keys)
    table = tomllib.loads("\n".join(keys))
    assert table == {"tokenizer": str(TOY), "template-args": {"enable_thinking": False}}
    assert said(log, "-t", TOY)["explanations"][0]["config"] == table


def test_a_date_is_read_out_of_the_prompts_and_a_file_is_a_template_to_try(tmp_path: Path) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(DATED, encoding="utf-8")
    log = log_at(tmp_path / "log.jsonl", template=str(template), at=datetime(2024, 2, 29))
    best = said(log, "-t", TOY, "--chat-template", "dated.jinja")["explanations"][0]
    assert best["flags"] == ["-t", str(TOY), "--chat-template", "dated.jinja", "--clock", "2024-02-29"]
    assert finds_nothing(log, *best["flags"])


def test_how_the_log_was_read_is_part_of_the_command(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in log_at(tmp_path / "log.jsonl", form="binary").read_text().splitlines()]
    log = written(tmp_path / "named.jsonl", ({"toks": row.pop("token_ids"), **row} for row in rows))
    command = said(log, "-t", TOY, "--map", "token_ids=toks", "--map", "loss_mask=loss_mask")["command"]
    assert command.endswith("--map token_ids=toks --map loss_mask=loss_mask")
    assert finds_nothing(*shlex.split(command)[2:])


# What it writes


def test_what_was_found_is_written_and_then_used(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl", turns=1, arguments={"enable_thinking": False})
    code, _, told = run("identify", log, "-t", TOY, "--write", "tito-audit.toml")
    assert (code, told) == (0, "tito-audit.toml: added tokenizer and template-args.\n")
    assert finds_nothing(log)
    before = (tmp_path / "tito-audit.toml").read_bytes()
    assert run("identify", log, "-w", "tito-audit.toml")[2] == "tito-audit.toml says all of it already.\n"
    assert (tmp_path / "tito-audit.toml").read_bytes() == before


def test_a_key_that_differs_is_replaced_only_by_force(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl", arguments={"enable_thinking": False})
    file = tmp_path / "pyproject.toml"
    before = '[tool.tito-audit]\nclock = "2020-01-01"\nfail-on = "note"\n'
    file.write_text(before, encoding="utf-8")
    code, _, told = run("identify", log, "-t", TOY, "-w", "pyproject.toml")
    assert code == 2
    assert "clock = '2020-01-01', found: none" in told
    assert "--force" in told
    assert file.read_text(encoding="utf-8") == before
    assert run("identify", log, "-t", TOY, "-w", "pyproject.toml", "--force")[0] == 0
    table = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["tito-audit"]
    assert table == {
        "fail-on": "note",
        "template-args": {"enable_thinking": False},
        "tokenizer": table["tokenizer"],
    }
    assert (tmp_path / table["tokenizer"]).resolve() == TOY


def test_a_file_in_another_folder_gets_paths_that_it_can_follow(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    shutil.copytree(TOY, tmp_path / "tok")
    (tmp_path / "there").mkdir()
    assert run("identify", log, "-t", "tok", "-w", "there/tito-audit.toml")[0] == 0
    assert finds_nothing(log, "--config", "there/tito-audit.toml")


def test_what_is_not_sure_is_not_written(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl", rows=4)
    rows = log.read_text().splitlines()
    log.write_text("\n".join([*rows, *(row.replace("How much is", "Why is") for row in rows)]) + "\n")
    code, page, told = run("identify", log, "-t", TOY, "-w", "tito-audit.toml")
    assert code == 1
    assert "Not sure. Closest:" in page
    assert "4 of 8 prompts (50%)" in page
    assert "Nothing was written" in told
    assert not (tmp_path / "tito-audit.toml").exists()


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
    assert said(log)["tokenizers"] == []
    cached(tmp_path / "hub", "org/toy", TOY)
    cached(tmp_path / "hub", "org/same-as-toy", TOY)
    cached(tmp_path / "hub", "org/other", OTHER)
    found = said(log)
    assert found["sure"]
    assert found["explanations"][0]["tokenizer"] in ("org/toy", "org/same-as-toy")
    names = {one["name"] for one in found["tokenizers"]}
    assert len(names & {"org/toy", "org/same-as-toy"}) == 1, "the same files are tried once"
    tried = names | {one["name"] for one in found["passed_over"]}
    assert "org/other" in tried


def test_a_tokenizer_without_room_for_the_ids_is_passed_over(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    small = tmp_path / "small"
    shutil.copytree(TOY, small)
    whole = json.loads((small / "tokenizer.json").read_text(encoding="utf-8"))
    whole["added_tokens"], whole["model"]["vocab"] = [], {"a": 0, "b": 1}
    (small / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    cached(tmp_path / "hub", "org/small", small)
    found = said(log)
    assert found["tokenizers"] == []
    assert found["passed_over"] == [{"name": "org/small", "because": "its ids end at 1, the log has 2,002"}]


def test_a_snapshot_that_is_not_the_main_one_is_named_by_its_folder(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    snapshot = cached(tmp_path / "hub", "org/toy", TOY, main=False)
    assert said(log)["explanations"][0]["flags"] == ["-t", str(snapshot)]


def test_a_broken_tokenizer_in_the_cache_is_no_mistake_of_the_user(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    broken = tmp_path / "broken"
    shutil.copytree(TOY, broken)
    (broken / "tokenizer.json").write_text("{}", encoding="utf-8")
    cached(tmp_path / "hub", "org/broken", broken)
    assert [one["name"] for one in said(log)["passed_over"]] == ["org/broken"]


def test_what_the_log_names_is_looked_for_beside_it_and_in_the_cache(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in log_at(tmp_path / "plain.jsonl").read_text().splitlines()]
    log = written(tmp_path / "log.jsonl", ({**row, "model": "org/policy"} for row in rows))
    found = said(log)
    (only,) = found["passed_over"]
    assert only["name"] == "org/policy"
    assert "not on this machine" in only["because"]
    shutil.copytree(TOY, tmp_path / "policy")
    (tried,) = said(log)["tokenizers"]
    assert (tried["name"], tried["from"]) == (str(tmp_path / "policy"), "the log names its model 'org/policy'")
    shutil.rmtree(tmp_path / "policy")
    cached(tmp_path / "hub", "org/policy", TOY)
    (tried,) = said(log)["tokenizers"]
    assert (tried["name"], tried["from"]) == ("org/policy", "the log names its model 'org/policy'")


@pytest.mark.parametrize("name", ["../toy", "/etc", "a/../../toy", "..", "-t", "a\x1b[2Jb"])
def test_a_name_in_a_log_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    shutil.copytree(TOY, tmp_path / "toy")
    (tmp_path / "logs").mkdir()
    rows = [json.loads(line) for line in log_at(tmp_path / "plain.jsonl").read_text().splitlines()]
    log = written(tmp_path / "logs" / "log.jsonl", ({**row, "model": name} for row in rows))
    found = said(log)
    assert (found["tokenizers"], found["passed_over"]) == ([], [])


def test_the_configured_tokenizer_is_tried_unless_others_are_given(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    (tmp_path / "tito-audit.toml").write_text(f'tokenizer = "{TOY}"\n', encoding="utf-8")
    assert [(one["name"], one["from"]) for one in said(log)["tokenizers"]] == [(str(TOY), "configured")]
    assert [(one["name"], one["from"]) for one in said(log, "-t", OTHER)["tokenizers"]] == [(str(OTHER), "given")]


def test_of_two_tokenizers_the_one_that_wrote_the_log_is_named(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    found = said(log, "-t", OTHER, "-t", TOY)
    assert found["sure"]
    assert found["explanations"][0]["tokenizer"] == str(TOY)
    wrong = said(log, "-t", OTHER)
    assert not wrong["sure"]


# What cannot be explained


def test_without_a_tokenizer_the_ids_speak_for_themselves(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    code, page, _ = run("identify", log)
    assert code == 1
    assert "Not identified: there is no tokenizer to try" in page
    assert "ids in 16 sequences" in page
    assert "to 2,002: the vocabulary has at least 2,003 entries" in " ".join(page.split())
    assert said(log)["ids"]["largest"] == 2002


def test_rows_without_messages_or_ids_say_so(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in log_at(tmp_path / "plain.jsonl", form="binary").read_text().splitlines()]
    ids = [{key: value for key, value in row.items() if key != "messages"} for row in rows]
    assert said(written(tmp_path / "ids.jsonl", ids), "-t", TOY)["because"] == "no messages"
    texts = [{"messages": row["messages"]} for row in rows]
    assert said(written(tmp_path / "texts.jsonl", texts), "-t", TOY)["because"] == "no token ids"


def test_a_row_that_cannot_be_read_is_counted(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    log.write_text(log.read_text() + "{broken\n")
    found = said(log, "-t", TOY)
    assert found["sure"]
    assert (found["rows"]["read"], found["rows"]["unreadable"]) == (9, 1)


def test_a_limit_is_shared_by_the_logs(tmp_path: Path) -> None:
    logs = [log_at(tmp_path / f"{one}.jsonl", rows=rows) for one, rows in enumerate((2, 8, 8))]
    assert said(*logs, "-t", TOY, "--limit", "9")["rows"]["read"] == 9
    assert said(*logs, "-t", TOY, "--limit", "9")["rows"]["all"] is False
    assert said(*logs, "-t", TOY)["rows"] | {"read": 18, "all": True} == said(*logs, "-t", TOY)["rows"]


def test_mistakes_are_one_message(tmp_path: Path) -> None:
    log = log_at(tmp_path / "log.jsonl")
    for arguments, words in (
        ((log, "-t", "no/such/folder"), "no such folder"),
        ((log, "-t", TOY, "--chat-template", "none.jinja"), "cannot be read"),
        ((tmp_path / "none.jsonl",), "no such file"),
        ((log, "-t", TOY, "-w", "missing/tito-audit.toml"), "missing"),
    ):
        code, _, error = run("identify", *arguments)
        assert code == 2, error
        assert words in error
        assert "Traceback" not in error


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


@pytest.mark.parametrize("seed", range(examples(2, 40)))
def test_a_log_of_an_unknown_template_is_never_surely_explained(seed: int) -> None:
    written, calls = random_way(random.Random(seed))
    other = SOURCE.replace("<|im_start|>{{ message.role }}\n", "<|im_start|>{{ message.role }}: ")
    identified = found(log(replace(written, source=other), seed=seed, calls=calls))
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
    rollouts = [replace(one, messages=()) for one in log(Written())]
    identified = found(rollouts)
    assert identified.lack is Lack.NO_MESSAGES
    assert [fit.fits for fit in identified.tokenizers] == [True]
    assert identified.tokenizers[0].same == 1.0
    assert not identified.sure
    assert [ending.piece for ending in identified.endings] == ["<|im_end|>"]


def test_a_log_without_ids_is_not_explained() -> None:
    rollouts = [replace(one, turns=()) for one in log(Written())]
    assert found(rollouts).lack is Lack.NO_IDS
    assert found([]).lack is Lack.NO_IDS


def test_dates_that_differ_are_read_from_each_prompt() -> None:
    several = list(conversations(random.Random(3), 12))
    dates = [datetime(2024, 5, 1 + row // 6) for row in range(12)]
    rollouts = [
        Written(date=date).rollout(row, messages)
        for row, (date, messages) in enumerate(zip(dates, several, strict=True))
    ]
    identified = found(rollouts)
    (departure,) = best(identified).departures
    assert departure.kind is DepartureKind.CLOCK_VARIES
    assert departure.values == ("2024-05-01", "2024-05-02")
    assert identified.sure
    assert identified.best is not None
    assert identified.best.share.all_prompts
    assert best(identified).clock in dates
    assert best(identified).flags()[-2:] == ("--clock", "recorded")
    assert best(identified).config()["clock"] == best(identified).settings(Settings()).clock == "recorded"


def test_a_template_that_never_opens_as_the_log_does_without_a_system_message_is_not_sure() -> None:
    opened = [{"role": "system", "content": "Be kind."}]
    several = [[*opened, *one] for one in conversations(random.Random(5), 30, system=False)]
    several.append(several[0][1:])
    rollouts = [Written().rollout(row, messages) for row, messages in enumerate(several)]
    greets = "{% if messages[0].role != 'system' %}Hi.{% endif %}" + SOURCE
    identified = found(rollouts, NamedTemplate("greets", greets))
    assert identified.best is not None
    assert not identified.sure
    assert "none of the first prompts without a system message, without tools (1)" in identified.unsure_because
    assert found(rollouts).sure


def test_a_system_prompt_that_the_messages_lack_is_read() -> None:
    written = Written(system="You are a parrot.\nSay little.")
    identified = found(log(written, system=False))
    (departure,) = best(identified).departures
    assert departure.kind is DepartureKind.SYSTEM_ADDED
    assert departure.text == "You are a parrot.\nSay little."
    assert identified.sure


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
        rollouts = [as_row(one) for one in rollouts]
    identified = found(rollouts, ROLES_TEMPLATE)
    assert identified.best is not None
    assert identified.best.share.all_prompts
    assert identified.best.share.turns == identified.best.share.of_turns
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
    bare = [replace(one, messages=one.messages[1:], turns=tuple(map(_earlier, one.turns))) for one in plain]
    none = list(conversations(random.Random(9), 6, system=False))
    rollouts = [*bare, *(Written(ROLES).rollout(6 + row, each) for row, each in enumerate(none))]
    other = NamedTemplate("other.jinja", ROLES.replace("Be good.", "Be bad."), "other.jinja")
    for templates in ((other, ROLES_TEMPLATE), (ROLES_TEMPLATE, other)):
        assert best(found(rollouts, *templates)).template == ROLES_TEMPLATE


def _earlier(turn: Turn) -> Turn:
    assert turn.message_index is not None
    return replace(turn, message_index=turn.message_index - 1)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        (
            ("{{ message.content }}", "{% if loop.first %}Today is a good day.\n{% endif %}{{ message.content }}"),
            "begin",
        ),
        (
            ("{{ message.content }}", "{{ message.content }}{% if loop.first %} Use your tools well.{% endif %}"),
            "begin",
        ),
        (("<|im_start|>system\nBe good.", "Be good."), ""),
        (("{% endfor %}", "{% endfor %}<|im_start|>system\nNow!<|im_end|>\n"), "of"),
    ],
)
def test_texts_that_a_template_may_have_written_are_no_sure_system_prompts(
    change: tuple[str, str], because: str
) -> None:
    """The log is of a template that writes more; the one that is offered could read that as system prompts."""
    identified = found(own_systems(Written(ROLES.replace(*change))), ROLES_TEMPLATE)
    if change[1] == "Be good.":  # written only without a system prompt, of which there is none here
        assert identified.sure, identified.unsure_because
        return
    assert not identified.sure
    assert because in identified.unsure_because


def test_a_default_that_depends_on_the_tools_is_no_system_prompt_of_its_own() -> None:
    source = ROLES.replace("Be good.", "{% if tools %}Call well{% else %}Talk{% endif %}.")
    several = list(conversations(random.Random(4), 12, system=False))
    rollouts = [Written(source).rollout(row, each, TOOLS * (row % 2)) for row, each in enumerate(several)]
    identified = found(rollouts, ROLES_TEMPLATE)
    assert not identified.sure
    assert "depend on tools or arguments" in identified.unsure_because


def test_what_a_template_writes_of_stated_arguments_is_no_system_prompt() -> None:
    rollouts = own_systems(Written(ROLES))
    stated = [replace(one, template_kwargs={"persona": SYSTEMS[row % 3]}) for row, one in enumerate(rollouts)]
    identified = found(stated, ROLES_TEMPLATE)
    assert not identified.sure
    assert "depend on tools or arguments" in identified.unsure_because


def test_messages_that_a_log_lacks_are_not_read_as_system_prompts() -> None:
    """The first question and its answer are missing: what stands before the second is no system prompt."""
    rollouts = []
    for row, messages in enumerate(conversations(random.Random(6), 24, system=False)):
        whole = Written(ROLES).rollout(row, [{"role": "system", "content": SYSTEMS[row % 3]}, *messages])
        if len(whole.turns) > 1:
            turns = [replace(turn, message_index=(turn.message_index or 0) - 3) for turn in whole.turns[1:]]
            rollouts.append(replace(whole, messages=whole.messages[3:], turns=tuple(turns)))
    identified = found(rollouts, ROLES_TEMPLATE)
    assert len(rollouts) > 8
    assert not identified.sure
    assert identified.best is None or identified.best.share.prompts == 0


def test_a_text_in_the_message_of_the_user_is_no_message_of_its_own() -> None:
    source = """{% if messages[0].role == 'system' %}{% set before = messages[0].content + '\n\n' %}
{%- set rest = messages[1:] %}{% else %}{% set before = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}<|im_start|>{{ message.role }}
{{ before if loop.first else '' }}{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    identified = found(own_systems(Written(source)), NamedTemplate("merged", source, "merged.jinja"))
    assert identified.best is not None
    assert identified.best.share.all_prompts
    assert not identified.sure
    assert "not written as a message of its own" in identified.unsure_because


def test_few_prompts_do_not_prove_that_each_has_its_own_system_prompt() -> None:
    identified = found(own_systems(Written(ROLES), 3), ROLES_TEMPLATE)
    assert not identified.sure


def test_a_prefill_is_read_and_one_prompt_alone_does_not_prove_it() -> None:
    written = Written(prefill="Sure! ")
    identified = found(log(written))
    (departure,) = best(identified).departures
    assert (departure.kind, departure.text) == (DepartureKind.PREFILL, "Sure! ")
    assert identified.sure
    single = found(log(written, 1)[:1])
    assert not single.sure
    assert "only one prompt" in single.unsure_because


def test_tools_that_were_not_rendered_are_a_flag() -> None:
    identified = found(log(Written(shows_tools=False), calls=True))
    assert identified.sure
    assert best(identified).without_tools
    assert best(identified).flags()[-2:] == ("--tools", "none")
    assert best(identified).config()["tools"] == "none"


def test_tool_arguments_that_no_prompt_shows_are_undetermined() -> None:
    """Only the last answers call tools: whether their arguments were given as objects changes no prompt."""
    rollouts = [replace(one, turns=one.turns[:1]) for one in log(Written(), calls=True)]
    identified = found(rollouts)
    assert identified.best is not None
    assert "tool_arguments" in identified.best.undetermined
    assert {one.tool_arguments for one in (best(identified), *identified.best.equal)} == {"auto"}
    shown = found(log(Written(parsed=True), calls=True))
    assert shown.best is not None
    assert "tool_arguments" not in shown.best.undetermined


def test_arguments_that_the_log_states_wrongly_are_told() -> None:
    rollouts = [
        replace(one, template_kwargs={"enable_thinking": True})
        for one in log(Written(args={"enable_thinking": False}))
    ]
    identified = found(rollouts)
    assert identified.sure
    assert dict(best(identified).template_args) == {"enable_thinking": False}
    assert [departure.kind for departure in best(identified).departures] == [DepartureKind.STATED_UNUSED]
    right = [replace(one, template_kwargs={"enable_thinking": False}) for one in rollouts]
    assert dict(best(found(right)).template_args) == {}
    assert best(found(right)).departures == ()


def test_tools_that_only_another_template_writes_are_no_system_prompt() -> None:
    each = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    plain = each + "<|im_start|>assistant\n"
    rollouts = [replace(one, turns=one.turns[:1]) for one in log(Written(), system=False, calls=True)]
    identified = found(rollouts, NamedTemplate("plain", plain, "plain.jinja"))
    assert not identified.sure
    assert "another template is likelier" in identified.unsure_because


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
    identified = found(rollouts, NamedTemplate("other", source, "other.jinja"))
    assert [departure.kind for departure in best(identified).departures] == [kind]
    assert identified.sure, identified.unsure_because


def test_rows_without_a_mask_may_differ_in_their_answers() -> None:
    rollouts = [as_row(one, masked=False) for one in log(Written())]
    spoiled = []
    for one in rollouts:
        assert one.training_row is not None
        ids = one.training_row.token_ids
        (at,) = np.flatnonzero(ids == toy_tokenizer().encode("<|im_end|>")[0])[-1:]
        text = toy_tokenizer().vocabulary.text(ids[at - 3 : at])
        pieces = [toy_tokenizer().encode(char) for char in text]
        assert len(pieces) > 3
        row = replace(one.training_row, token_ids=np.concatenate([ids[: at - 3], *pieces, ids[at:]]))
        spoiled.append(replace(one, training_row=row))
    identified = found(spoiled)
    assert identified.sure, identified.unsure_because


def test_rows_of_two_ways_are_explained_by_both_and_neither_is_sure() -> None:
    on, off = log(Written(args={"reasoning_effort": "low"})), log(Written(args={"enable_thinking": False}), seed=2)
    identified = found([*on, *off])
    assert not identified.sure
    explained = [dict(one.explanation.template_args) for one in identified.found]
    assert {"reasoning_effort": "low"} in explained
    assert {"enable_thinking": False} in explained


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ messages[9].content.x.y }}", "{% if %}"])
def test_a_template_that_raises_explains_nothing(source: str) -> None:
    rollouts = log(Written(toy_tokenizer().chat_templates["default"]))
    broken = NamedTemplate("broken", source, "broken.jinja")
    assert not found(rollouts, broken).sure
    assert best(found(rollouts, broken, OWN_TEMPLATE)).template is OWN_TEMPLATE


def test_a_bos_token_that_is_doubled_or_missing_is_told() -> None:
    tokenizer = toy_tokenizer("toy_metaspace")
    rollouts = [_with_bos(one, tokenizer, 1) for one in metaspace_log()]
    kinds = [departure.kind for departure in best(found(rollouts, tokenizer="toy_metaspace")).departures]
    assert kinds == [DepartureKind.BOS_ADDED]
    rollouts = [_with_bos(one, tokenizer, -1) for one in metaspace_log()]
    kinds = [departure.kind for departure in best(found(rollouts, tokenizer="toy_metaspace")).departures]
    assert kinds == [DepartureKind.BOS_MISSING]


def metaspace_log() -> list[Rollout]:
    renderer, tokenizer = toy_renderer("toy_metaspace"), toy_tokenizer("toy_metaspace")
    rollouts = []
    for row, messages in enumerate(conversations(random.Random(5), 10, system=False)):
        asked = as_messages(messages[:1], "messages")
        prompt = tokenizer.encode(renderer.render(asked, add_generation_prompt=True))
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
    held = 0
    for turn in rollout.turns:
        assert turn.prompt_ids is not None
        assert turn.completion_ids is not None
        parts += [turn.prompt_ids[held:], turn.completion_ids]
        mask += [False] * (len(turn.prompt_ids) - held) + [True] * len(turn.completion_ids)
        held = len(turn.prompt_ids) + len(turn.completion_ids)
    row = TrainingRow(np.concatenate(parts), np.array(mask) if masked else None, None)
    return replace(rollout, turns=(), training_row=row)


@pytest.mark.parametrize("masked", [True, False])
def test_training_rows_are_explained_up_to_their_answers_or_as_a_whole(masked: bool) -> None:
    written = Written(args={"reasoning_effort": "low"})
    rollouts = [as_row(one, masked=masked) for one in log(written)]
    identified = found(rollouts)
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
        replace(one, messages=one.messages[:-1]) if row % 4 and len(one.messages) > 4 else one
        for row, one in enumerate(rollouts)
    ]
    cut = sum(len(one.messages) % 2 == 0 for one in changed)
    assert cut > 3
    identified = found(changed)
    assert identified.best is not None
    assert identified.best.share.all_prompts
    assert identified.best.share.of_prompts == 16
    assert identified.best.share.of_turns - identified.best.share.turns <= cut
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
    rollouts = [as_row(one, masked=False) for one in log(Written(written))]
    assert not found(rollouts).sure


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
    assert any(len(one.messages) == 3 for one in rollouts)
    identified = found(rollouts)
    assert identified.best is not None
    assert identified.best.share.all_prompts
    assert not identified.sure
    assert "with answers" in identified.unsure_because


def test_what_an_explanation_leaves_is_counted_by_the_findings_of_an_audit() -> None:
    rollouts = log(Written(), calls=True)
    spoiled = [one if number % 3 else _rewritten(one) for number, one in enumerate(rollouts)]
    candidate = Candidate(toy_tokenizer(), (MINE,))

    def audit(rollout: Rollout, tokenizer: Tokenizer, renderer: Renderer) -> tuple[Finding, ...]:
        evidence = gather(rollout, tokenizer, renderer)
        return check(evidence, all_rules(), frozenset(rule.code for rule in all_rules()))[0]

    identified = identify(spoiled, [candidate], audit=audit)
    assert identified.sure
    assert identified.best is not None
    assert identified.best.share.turns < identified.best.share.of_turns
    assert {left.cause.split()[0] for left in identified.left} & {"TPL203", "TPL299", "SEQ302", "TPL202"}
    without = identify(spoiled, [candidate])
    assert [left.cause for left in without.left] == ["another text, in answers"]
    assert without.left[0].number == identified.best.share.of_turns - identified.best.share.turns


def _rewritten(rollout: Rollout) -> Rollout:
    """The rollout with other spaces in the tool calls of later prompts."""
    tokenizer = toy_tokenizer()
    turns = []
    for turn in rollout.turns:
        assert turn.prompt_ids is not None
        text = tokenizer.vocabulary.text(turn.prompt_ids).replace('{"at": ', '{"at":   ')
        turns.append(replace(turn, prompt_ids=tokenizer.encode(text)))
    return replace(rollout, turns=tuple(turns))


def given_renderer(**given: Any) -> Renderer:
    return make_renderer(toy_tokenizer(), chat_template=SOURCE, **given)


def test_the_head_of_a_log_that_fits_needs_no_explanation() -> None:
    written = Written(args={"enable_thinking": False})
    renderer = given_renderer(template_args={"enable_thinking": False}, clock=Clock(written.date))
    assert explain_head(log(written), toy_tokenizer(), renderer) is None
    assert explain_head([], toy_tokenizer(), renderer) is None


def test_the_head_of_a_log_is_explained_with_the_given_template() -> None:
    written = Written(args={"enable_thinking": False}, shows_tools=False)
    renderer = given_renderer(template_args={"reasoning_effort": "high"})
    explanation = explain_head(log(written, calls=True), toy_tokenizer(), renderer)
    assert explanation is not None
    assert explanation.template is GIVEN_TEMPLATE
    assert dict(explanation.template_args) == {"enable_thinking": False}
    assert explanation.clock == written.date
    assert explanation.without_tools
    applied = explanation.applied(renderer)
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
    (tmp_path / "worse.jinja").write_text("{% if %}")
    found = said(log, "-t", TOY, "--chat-template", "bad.jinja", "--chat-template", "worse.jinja")
    assert found["sure"]
    assert found["explanations"][0]["template"]["chat_template"] is None
