"""Tokenizers of the hub by name and revision: from a server on this machine, from the cache, or refused."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import run, written
from tests.remote.model_hub import ModelHub
from tests.tiers import DEEP
from tito_audit import Settings
from tito_audit.errors import TokenizerError
from tito_audit.ray import AuditBatches
from tito_audit.record.message import as_messages
from tito_audit.run.auditor import load_renderer
from tito_audit.run.log_groups import RowFlow
from tito_audit.settings.file import read_config
from tito_audit.tokens.hub import HubName, cached_revisions, cached_tokenizer
from tito_audit.tokens.load import load_tokenizer

LOADS_ANEW = True

ROOT = Path(__file__).parents[1]
TOY = ROOT / "fixtures" / "tokenizers" / "toy_bpe"
LOG = ROOT / "fixtures" / "formats" / "nemo_gym.jsonl"
CHANGED = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHub]:
    """A hub with `org/toy`: v1 and main as in the fixtures, v2 with another template."""
    with ModelHub(tmp_path_factory.mktemp("hub")) as server:
        files = {file.name: file.read_bytes() for file in sorted(TOY.iterdir()) if file.is_file()}
        settings = {**json.loads(files["tokenizer_config.json"]), "chat_template": CHANGED}
        files.pop("chat_template.jinja", None)
        original = json.loads((TOY / "tokenizer_config.json").read_bytes()).get("chat_template")
        template = {} if original else {"chat_template.jinja": (TOY / "chat_template.jinja").read_bytes()}
        server.commit("org/toy", {**files, **template}, "v1")
        server.commit("org/toy", {**files, **template, "README.md": b"newer"}, "main")
        server.commit("org/toy", {**files, "tokenizer_config.json": json.dumps(settings).encode()}, "v2")
        server.commit("org/gated", files)
        server.commit("org/empty", {"README.md": b"no tokenizer"})
        yield server


@pytest.fixture
def client(hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub client of this process asks the server, with an empty cache; returns the cache."""
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    pattern = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", pattern)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return cache


def commit_of(hub: ModelHub, branch: str) -> str:
    """The hash that a branch of `org/toy` has now."""
    return hub.head("org/toy", branch)


def refused(name: str) -> str:
    """The message of a tokenizer that cannot be had."""
    with pytest.raises(TokenizerError) as raised:
        load_tokenizer(name)
    return str(raised.value)


def test_a_name_has_a_repository_and_perhaps_a_revision() -> None:
    assert HubName.parse("org/toy") == HubName("org/toy")
    assert HubName.parse("gpt2@main") == HubName("gpt2", "main")
    assert HubName.parse("hf://org/toy@refs%2Fpr%2F3") == HubName("org/toy", "refs/pr/3")
    for name in ("org/toy@", "org/toy@/etc", "org/toy@a/../../b", "../toy", "a/b/c", "-t", "a\x1b[2Jb", "@v1"):
        assert HubName.parse(name) is None


def test_each_revision_brings_its_own_template(hub: ModelHub, client: Path) -> None:
    old, new = load_renderer("org/toy@v1"), load_renderer("hf://org/toy@v2")
    conversation = json.loads('[{"role": "user", "content": "Hi"}]')
    texts = [
        renderer.render(as_messages(conversation, "test"), add_generation_prompt=False) for renderer in (old, new)
    ]
    assert texts[1] == "<|im_start|>user: Hi<|im_end|>"
    assert texts[0] == load_renderer(str(TOY)).render(
        as_messages(conversation, "test"), add_generation_prompt=False
    )
    for name, branch in (("org/toy@v1", "v1"), ("hf://org/toy@v2", "v2"), ("org/toy", "main")):
        loaded = load_tokenizer(name)
        assert (loaded.name, loaded.commit) == (name, commit_of(hub, branch))


def test_reports_name_the_revision_and_its_commit_and_findings_stay_the_same(hub: ModelHub, client: Path) -> None:
    local = json.loads(run("scan", LOG, "-t", TOY, "-f", "json", "--quiet")[1])
    code, out, _ = run("scan", LOG, "-t", "org/toy@v1", "-f", "json", "--quiet")
    report = json.loads(
        out.replace("org/toy@v1`", f"{TOY}`")
    )  # a message names the command to run on the template
    assert report["findings"] == local["findings"]
    assert report["summary"]["tokenizer"] == "org/toy@v1"
    assert report["summary"]["tokenizer_commits"] == {"org/toy@v1": commit_of(hub, "v1")}
    assert local["summary"]["tokenizer_commits"] == {}
    _, page, _ = run("scan", LOG, "-t", "org/toy")
    assert f"tokenizer org/toy (commit {commit_of(hub, 'main')[:12]})" in " ".join(page.split())
    whole = f"org/toy@{commit_of(hub, 'v1')}"
    _, page, _ = run("scan", LOG, "-t", whole)
    assert f"tokenizer {whole} ·" in " ".join(page.split()), "a commit is named once"
    assert code == 1


def test_a_settings_file_holds_the_revision_for_one_log_and_for_all(
    hub: ModelHub, client: Path, tmp_path: Path
) -> None:
    config = tmp_path / "tito-audit.toml"
    config.write_text(
        'tokenizer = "org/toy@v2"\n[[overrides]]\npaths = ["*old*.jsonl"]\ntokenizer = "org/toy@v1"\n',
        encoding="utf-8",
    )
    assert read_config(config).values["tokenizer"] == "org/toy@v2"
    rows = [json.loads(line) for line in LOG.read_text().splitlines()]
    old, new = written(tmp_path / "old.jsonl", rows), written(tmp_path / "new.jsonl", rows)
    _, out, _ = run("scan", old, new, "--config", config, "-f", "json", "--quiet")
    summary = json.loads(out)["summary"]
    assert summary["tokenizer_commits"] == {"org/toy@v1": commit_of(hub, "v1"), "org/toy@v2": commit_of(hub, "v2")}


def test_a_folder_of_that_name_comes_first(
    hub: ModelHub, client: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.forget()
    shutil.copytree(TOY, tmp_path / "org" / "toy@v2")
    loaded = load_tokenizer("org/toy@v2")
    assert (loaded.commit, hub.requests()) == (None, [])


def test_the_cache_is_enough_without_a_network(
    hub: ModelHub, client: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {name: load_tokenizer(name) for name in ("org/toy@v1", "org/toy@v2")}
    hub.forget()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    by_commit = f"org/toy@{commit_of(hub, 'v2')}"
    for name in (*first, by_commit):
        again = load_tokenizer(name)
        assert again.commit == first.get(name, first["org/toy@v2"]).commit
        assert again.chat_templates == first.get(name, first["org/toy@v2"]).chat_templates
    assert hub.requests() == []
    # A server that is gone is as no network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert load_tokenizer("org/toy@v1").commit == commit_of(hub, "v1")
    assert cached_revisions("org/toy") == ["v1", "v2"]
    cached = cached_tokenizer("org/toy@v2")
    assert cached is not None
    assert (cached.name, cached.folder.name) == ("org/toy@v2", commit_of(hub, "v2"))
    assert cached_tokenizer("org/toy@v3") is None
    message = refused("org/toy@v3")
    assert "the hub cannot be reached; the cache has org/toy at v1, v2; download it" in message
    assert "\n" not in message


def test_what_cannot_be_had_is_refused_in_one_line(
    hub: ModelHub, client: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = commit_of(hub, "v2")[:7]
    for name, says in {
        "org/toy@v22": r"org/toy has no revision 'v22'; did you mean v2",
        f"org/toy@{short}": rf"the hash of a commit is given whole: {commit_of(hub, 'v2')}\.",
        "org/toy@zzz": r"org/toy has no revision 'zzz'; it has v1, main, v2, and commits by whole hash",
        "org/absent": r"the hub has no repository org/absent, or it is private",
        "org/gated": r"the repository is gated and this login has no access.*hf auth login",
    }.items():
        message = refused(name)
        assert re.search(says, message), message
        assert message.startswith(f"{name}: ")
        assert "\n" not in message
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refused("org/toy@v9")
    assert "HF_HUB_OFFLINE is set" in message
    assert "`hf download org/toy --revision v9`" in message
    assert "\n" not in message
    assert "no tokenizer.json here" in refused_online("org/empty", monkeypatch)


def refused_online(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """As `refused`, with a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return refused(name)


def test_work_that_is_sent_holds_the_commit_that_a_branch_had_here(
    hub: ModelHub, client: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A branch that moves while workers start changes nothing for them; nor does a folder of that name there."""
    files = {file.name: file.read_bytes() for file in sorted(TOY.iterdir()) if file.is_file()}
    hub.commit("org/moving", files)
    flow = RowFlow([LOG], Settings(tokenizer="org/moving"))
    here = AuditBatches(Settings(tokenizer="hf://org/moving@main"))
    packed, loaded = pickle.dumps(flow), hub.head("org/moving")
    hub.commit("org/moving", {**files, "chat_template.jinja": CHANGED.encode()})
    shutil.copytree(TOY, tmp_path / "org" / "moving")
    assert hub.head("org/moving") != loaded
    monkeypatch.chdir(tmp_path)
    there = pickle.loads(packed)
    of_rows = AuditBatches(Settings(tokenizer="hf://org/moving@main"), commits=here.commits)
    assert there.loader.commits == flow.loader.commits == {"org/moving": loaded}
    assert there.tokenizers[0].chat_templates == flow.tokenizers[0].chat_templates
    assert of_rows.commits == here.commits == {"hf://org/moving@main": loaded}
    monkeypatch.setattr("tito_audit.tokens.load.download_snapshot", None)
    assert pickle.loads(pickle.dumps(RowFlow([LOG], Settings(tokenizer=str(TOY))))).loader.commits == {}


@pytest.mark.skipif(not DEEP, reason="two processes: make deep")
def test_a_command_takes_the_hub_and_its_cache_from_the_environment(hub: ModelHub, tmp_path: Path) -> None:
    env = {**os.environ, **{name: value for name, value in hub.env.items() if value is not None}}
    env |= {"HF_HOME": str(tmp_path / "home"), "TITO_AUDIT_CACHE": "off"}
    words = [sys.executable, "-m", "tito_audit", "template", "org/toy@v2", "-f", "json"]
    first = subprocess.run(words, env=env, capture_output=True, text=True, cwd=ROOT)
    assert first.returncode in (0, 1), first.stderr
    hub.forget()
    again = subprocess.run(words, env={**env, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, cwd=ROOT)
    assert (again.returncode, again.stdout, hub.requests()) == (first.returncode, first.stdout, [])
