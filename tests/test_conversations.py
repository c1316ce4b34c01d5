"""Sessions: the next prompt is what was sampled and what the template adds, or a fork that says why."""

from __future__ import annotations

import os
import random
from pathlib import Path

import orjson
import pytest
import tokenizers

from tests.session_agents import STYLES, Agent
from tests.tiers import DEEP, examples
from tests.toy import TOKENIZERS, toy_tokenizer
from tito_audit import Settings, scan_rollouts
from tito_audit.render.renderer import make_renderer
from tito_audit.sessions.engine import Conversations
from tito_audit.tokens.load import load_tokenizer

TOY = TOKENIZERS / "toy_bpe"
CODES = ("SEQ", "TOK", "REC")


def agent(name: str, seed: int, **choices) -> Agent:
    """An agent on a session of its own, over a random template."""
    tokenizer, style = toy_tokenizer(), STYLES[name]
    renderer = make_renderer(tokenizer, chat_template=style.source)
    session = Conversations(tokenizer, renderer).open("s")
    library = tokenizers.Tokenizer.from_file(str(TOY / "tokenizer.json"))
    return Agent(random.Random(seed), session, style.source, style, library, tokenizer.eos_ids[0], **choices)


@pytest.mark.parametrize("name", STYLES)
def test_a_prompt_is_what_was_sampled_and_what_the_template_adds(name, tmp_path):
    rows, counts = [], {}
    for seed in range(examples(2, 60)):
        client = agent(name, seed, prefix=f"s{seed}")
        client.talk(examples(10, 14))
        rows += client.rows
        counts = {key: counts.get(key, 0) + value for key, value in client.counts.items()} | {
            key: value for key, value in counts.items() if key not in client.counts
        }
    assert counts.get("continues", 0) > 5, counts
    # `make deep` also looks whether a log seems to be written with something else.
    findings = scanned(tmp_path, rows, STYLES[name].source, TOY, **({} if DEEP else {"select": CODES}))
    assert findings == [], findings[:3]


def scanned(folder: Path, rows, template: str, tokenizer: Path, **more) -> list[object]:
    """The errors that a scan of the rows finds, of breaks and of tokens."""
    log, source = folder / "log.jsonl", folder / "chat.jinja"
    log.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    source.write_text(template, encoding="utf-8")
    settings = Settings(tokenizer=str(tokenizer), chat_template=str(source), **more)
    results = list(scan_rollouts([log], settings))
    assert len(results) > 0
    return [
        (result.place, finding)
        for result in results
        for finding in result.findings
        if finding.code[:3] in CODES and finding.severity.word == "error"
    ]


SHARED = Path(
    os.environ.get("TITO_AUDIT_TOKENIZERS") or Path(__file__).resolve().parents[2] / "shared" / "tokenizers"
)
REAL = sorted(
    file.parent.name
    for file in SHARED.glob("*/tokenizer_config.json")
    if "chat_template" in orjson.loads(file.read_bytes())
)


QUICK = ("qwen3",)


@pytest.mark.parametrize("name", ["toy_bpe", "toy_metaspace"])
def test_a_prompt_of_a_toy_template_is_what_was_sampled_and_what_it_adds(name, tmp_path):
    check_folder(TOKENIZERS / name, tmp_path, tools=name == "toy_bpe")


@pytest.mark.shared
@pytest.mark.skipif(not REAL, reason=f"no tokenizer folders at {SHARED}")
@pytest.mark.parametrize("name", [name for name in REAL if DEEP or name in QUICK])
def test_a_prompt_of_a_real_template_is_what_was_sampled_and_what_it_adds(name, tmp_path):
    check_folder(SHARED / name, tmp_path, tools=name.startswith("qwen"), systems=name != "gemma-3")


def check_folder(folder: Path, tmp_path: Path, **choices: bool) -> None:
    """Talk to sessions of a tokenizer with its own template, and scan what they were given."""
    tokenizer = load_tokenizer(str(folder))
    renderer = make_renderer(tokenizer)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    source = tokenizer.chat_templates["default"]
    rows, counts = [], {}
    for seed in range(examples(2, 20)):
        client = Agent(
            random.Random(seed),
            Conversations(tokenizer, renderer).open("s"),
            source,
            None,
            library,
            tokenizer.eos_ids[0],
            variables=dict(tokenizer.special_tokens),
            with_tools=choices.get("tools", False),
            systems=choices.get("systems", True),
            reasons=bool(seed % 2),
            prefix=f"s{seed}",
        )
        client.talk(10)
        rows += client.rows
        counts = {key: counts.get(key, 0) + client.counts.get(key, 0) for key in {*counts, *client.counts}}
    assert counts.get("continues", 0) > 5, counts
    findings = scanned(tmp_path, rows, source, folder)
    assert findings == [], findings[:3]
