"""Requests to a gateway and its answers as they are on the wire, over several calls of a session.

`tests/transcripts/gateway/*.txt` hold scenes. A scene has a title, `# …`, and these lines:

    ~ says TEXT         what the upstream samples for a next call
    ~ reads hermes      answers are parsed for tool calls and reasoning, or by `openai`
    ~ forces template   the server takes grammars, in the syntax of the template, or `json`
    ~ fails after 3     from now on streams break after so many pieces
    ~ forgets           sessions leave memory
    > POST /path BODY   a request; headers may stand before the body, as `Name=value`
    > log               the lines of the log since it was shown, and what a scan of it finds
    > asked             what the provider was asked for last

Beneath a request stand its status, the headers that name a session and a fork, and its answer without nulls and
times; a stream is one event a line. Names that were made up are `$1`, `$2` … in the order in which they came, in
requests too; ids of tokens stand as their texts, and `$SEEN` for those of the last line of the log.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests import serving
from tests.serving import CALL, codes_of, fetched, hermes, logged, make_gateway, plain, served
from tests.test_transcripts import indented, scenes
from tests.toy import toy_tokenizer
from tests.world import ROOT
from tito_audit.parser import Reads
from tito_audit.parsers import parser_named

TEXTS = {
    **vars(serving),
    "CALLED": CALL.replace("<|im_end|>", f"\n{CALL}"),
    "SKY": CALL.replace("weather", "sky__weather"),
}
PLAYS = sorted((ROOT / "tests" / "transcripts" / "gateway").glob("*.txt"))
PARSERS = parser_named("qwen3", Reads.REASONING), parser_named("hermes", Reads.TOOLS)
MADE_UP = re.compile(r"\b(?:[a-z]+[-_])?[0-9a-f]{16,}\b")
TIMES = {"created", "created_at", "completed_at", "closed", "used"}
SHOWN = ("call_id", "choice", "session_id", "thread_id", "branch", "fork", "parent", "kept", "endpoint", "status")
SHOWN += ("closed", "reward", "forced", "messages", "response_message", "prompt_token_ids", "completion_token_ids")


class Scene:
    """A gateway that is served, and the names that it made up."""

    def __init__(self, log: Path, script: list[str]) -> None:
        says = [line.removeprefix("~ says ") for line in script if line.startswith("~ says ")]
        readers = {"~ reads hermes": hermes, "~ reads openai": parser_named("openai", Reads.TOOLS).start}
        parser = next((readers[line] for line in script if line in readers), plain)
        self.log, self.shown, self.names = log, 0, dict[str, str]()
        self.gateway, self.provider = make_gateway(
            log, [text.format_map(TEXTS) for text in says], start_parser=parser
        )

        for line in script:
            if line.startswith("~ forces "):
                self.provider.forcing = lambda tag: {"structural_tag": tag}  # type: ignore[attr-defined]
                self.gateway.parsers = PARSERS if line.endswith("template") else (None, None)

    def text(self, text: str) -> str:
        """The text with made-up names as they are numbered."""
        return MADE_UP.sub(lambda name: self.names.setdefault(name[0], f"${len(self.names) + 1}"), text)

    def simple(self, value: Any, name: str = "") -> Any:
        """A value of JSON without nulls and times; ids of tokens as texts."""
        if isinstance(value, dict):
            pairs = {key: self.simple(item, key) for key, item in value.items() if key not in TIMES}
            return {key: item for key, item in pairs.items() if item is not None}
        if isinstance(value, list) and name.endswith("token_ids"):
            vocabulary = toy_tokenizer().vocabulary
            return "|".join(vocabulary.piece(token) for token in value)
        if isinstance(value, list) and name == "loss_mask":
            return "".join(map(str, value))
        return [self.simple(item) for item in value] if isinstance(value, list) else value

    def written(self, value: Any) -> str:
        return self.text(json.dumps(self.simple(value), ensure_ascii=False))

    def answer(self, address: str, method: str, path: str, *rest: str) -> list[str]:
        """The answer to a request, line by line."""
        words = " ".join(rest)
        headers, body = re.match(r"((?:[\w-]+=\S+ ?)*)(.*)", words, re.DOTALL).groups()  # type: ignore[union-attr]
        for name, number in self.names.items():
            path, body = (re.sub(rf"\{number}\b", name, text) for text in (path, body))
        if "$SEEN" in body:
            last = logged(self.log)[-1]
            body = body.replace("$SEEN", json.dumps(last["prompt_token_ids"] + last["completion_token_ids"]))
        body = re.sub(r"\$([A-Z]+)", lambda name: json.dumps(getattr(serving, name[1])), body)
        sent = dict(header.split("=", 1) for header in headers.split())
        status, got, data = fetched(address, path, body.encode() or None, method, **sent)
        own = (f"{name}: {got[name]}" for name in ("X-Session-ID", "X-Tito-Branch", "X-Tito-Fork") if got[name])
        lines = [self.text(" · ".join((str(status), *own)))]
        if got.get_content_type() == "application/json":
            return [*lines, self.written(json.loads(data))]
        names = re.findall(r"^event: (.*)\ndata: .*\"type\":\"\1\"", data.decode(), re.M)
        assert len(names) == data.count(b"event: "), "an event is named by its type"
        events = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
        return [*lines, *(self.written(json.loads(event)) if event[0] == "{" else event for event in events)]

    def log_lines(self) -> list[str]:
        rows = logged(self.log)
        new, self.shown = rows[self.shown :], len(rows)
        lines = [self.written({name: row[name] for name in SHOWN if name in row}) for row in new]
        return [*lines, f"scan: {', '.join(codes_of(self.log)) or 'clean'}"]

    def performed(self, line: str, address: str) -> list[str]:
        """What stands beneath a line."""
        mark, word, *rest = line.split(" ")
        if mark == "~" and word == "fails":
            self.provider.fails_after = int(rest[-1])
        if mark == "~" and word == "forgets":
            self.gateway.conversations.drop_idle(self.gateway.clock() + 1)
        if mark == "~":
            return []
        if word == "log":
            return self.log_lines()
        if word == "asked":
            return [self.written(asdict(self.provider.asked[-1]))]
        return self.answer(address, word, *rest)


CASES = [(play, scene) for play in PLAYS for scene in scenes(play)]


@pytest.mark.parametrize(
    ("play", "scene"), CASES, ids=lambda value: getattr(value, "stem", "") or value.partition("\n")[0][2:]
)
def test_a_scene_goes_as_it_is_written(play: Path, scene: str, tmp_path: Path) -> None:
    script = [line for line in scene.splitlines() if line[:2] in ("# ", "~ ", "> ")]
    stage, today = Scene(tmp_path / "log.jsonl", script), list[str]()
    with served(stage.gateway) as address:
        for line in script:
            beneath = [] if line.startswith("# ") else stage.performed(line, address)
            today += [line, *(part for text in beneath for part in indented(text))]
    if os.environ.get("UPDATE_GOLDENS"):
        text = play.read_text(encoding="utf-8")
        play.write_text(text.replace(scene.rstrip("\n"), "\n".join(today), 1), encoding="utf-8")
        return
    assert today == scene.rstrip("\n").splitlines(), (
        "UPDATE_GOLDENS=1 pytest tests/test_gateway_scenes.py renews it"
    )
