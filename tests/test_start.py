"""The start of a run: what is kept of a tokenizer from one run to the next, and what is not imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from functools import cache as once
from pathlib import Path

import numpy as np
import pytest

from tests.tiers import examples, some
from tests.world import ROOT, TOY
from tito_audit.errors import TokenizerError
from tito_audit.record.message import as_messages
from tito_audit.render.renderer import make_renderer
from tito_audit.run.scan import scan_rollouts
from tito_audit.settings.model import Settings
from tito_audit.tokens import cache
from tito_audit.tokens.cache import StoredTokenizer, Tables, cache_folder, open_store
from tito_audit.tokens.load import load_tokenizer
from tito_audit.tokens.vocab import Entries

LOADS_ANEW = True

TOYS = ROOT / "fixtures" / "tokenizers"
LOGS = sorted((ROOT / "fixtures" / "formats").glob("*.jsonl"))
GENERIC = next(log for log in LOGS if log.stem == "generic")
SHARED = Path(
    os.environ.get("TITO_AUDIT_TOKENIZERS") or Path(__file__).resolve().parents[2] / "shared" / "tokenizers"
)
ROLLOUTS = SHARED.parent / "rollouts"
REAL = sorted(path.parent.name for path in SHARED.glob("*/tokenizer.json"))
SAMPLED = sorted(path.name for path in ROLLOUTS.glob("*") if path.is_dir())
TEXTS = ["Skinny <|im_start|>user\nHello there<|im_end|>\n", "über 中文 🎉\n\n", "", "a\ud83db", "x" * 300]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache of a test's own."""
    place = tmp_path / "cache"
    monkeypatch.setenv("TITO_AUDIT_CACHE", str(place))
    return place


def warmed(texts=TEXTS, tokenizer=TOY) -> list[list[int]]:
    """The ids of texts, which are in the cache afterwards."""
    loaded = load_tokenizer(str(tokenizer))
    ids = [ids.tolist() for ids in loaded.encode_batch(texts)]
    loaded.save()
    return ids


def needed_the_library(tokenizer) -> bool:
    """Whether the library's tokenizer was loaded."""
    return "_backend" in vars(tokenizer.backend)


def results_of(logs, tokenizer, **choices) -> list[object]:
    """All that a scan says."""
    run = scan_rollouts(logs, Settings(tokenizer=str(tokenizer), **choices))
    results = [(result.place, result.findings, result.skips, result.counts) for result in run]
    return [results, run.summary.notices, run.summary.encoder, run.summary.tokens]


def held(folder: Path) -> dict[str, bytes]:
    """The files of a cache by kind."""
    return {file.suffix: file.read_bytes() for file in folder.iterdir()}


def test_what_is_known_of_a_tokenizer_needs_no_library_and_encoding_does(folder):
    warmed()
    again = load_tokenizer(str(TOY))
    assert again.vocabulary.piece(again.eos_ids[0]) == "<|im_end|>"
    assert not needed_the_library(again)
    assert again.encode("something that is new").tolist() == again.backend.encode("something that is new").ids
    assert needed_the_library(again)


@pytest.mark.parametrize("name", ["toy_bpe", "toy_metaspace"])
def test_a_tokenizer_out_of_the_cache_is_the_one_that_was_put_in(name, folder):
    fresh = load_tokenizer(str(TOYS / name))
    fresh.save()
    assert_same(load_tokenizer(str(TOYS / name)), fresh)


@pytest.mark.shared
@pytest.mark.skipif(not REAL, reason=f"no tokenizer folders at {SHARED}")
@pytest.mark.parametrize("name", some(REAL[::-1], 1))
def test_a_real_tokenizer_out_of_the_cache_is_the_one_that_was_put_in(name, folder):
    fresh = load_tokenizer(str(SHARED / name))
    fresh.save()
    assert_same(load_tokenizer(str(SHARED / name)), fresh)


def assert_same(cached, fresh) -> None:
    for field in Entries.__slots__:
        ours, theirs = getattr(cached.vocabulary.entries, field), getattr(fresh.vocabulary.entries, field)
        assert np.array_equal(ours, theirs), field
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype
    assert cached.control_tokens.tokens == fresh.control_tokens.tokens
    assert cached.normal_form == fresh.normal_form
    assert (cached.eos_ids, cached.bos_id) == (fresh.eos_ids, fresh.bos_id)
    assert (cached.special_tokens, cached.chat_templates) == (fresh.special_tokens, fresh.chat_templates)
    assert not needed_the_library(cached)


@pytest.mark.parametrize("log", some(LOGS, 6), ids=lambda log: log.stem)
def test_a_scan_says_the_same_without_with_an_empty_and_with_a_full_cache(log, folder, monkeypatch):
    empty = results_of(log, TOY)
    full = results_of(log, TOY)
    monkeypatch.setenv("TITO_AUDIT_CACHE", "off")
    assert empty == full == results_of(log, TOY)


@pytest.mark.shared
@pytest.mark.skipif(not SAMPLED, reason=f"no rollouts at {ROLLOUTS}")
@pytest.mark.parametrize("name", some(SAMPLED[::-1], 1))
def test_a_scan_of_real_rollouts_says_the_same_whatever_the_cache(name, folder, monkeypatch):
    logs, tokenizer = sorted((ROLLOUTS / name).glob("*.jsonl.gz")), SHARED / name
    empty = results_of(logs, tokenizer, limit=examples(15, 40))
    assert results_of(logs, tokenizer, limit=examples(15, 40)) == empty
    for file in folder.iterdir():
        damage(file, file.stat().st_size // 2)
    assert results_of(logs, tokenizer, limit=examples(15, 40)) == empty
    monkeypatch.setenv("TITO_AUDIT_CACHE", "off")
    assert results_of(logs, tokenizer, limit=examples(15, 40)) == empty


def damage(file: Path, at: int) -> None:
    """Another byte at that place."""
    content = bytearray(file.read_bytes())
    content[at] ^= 0x41
    file.write_bytes(content)


@pytest.mark.parametrize("content", [b"", b"{}", b"tito-audit cache 1\n", b"PK\x03\x04", b"\x80\x04K\x01."])
def test_a_file_of_something_else_is_replaced(content, folder):
    ids = warmed()
    before = held(folder)
    next(folder.glob("*.tables")).write_bytes(content)
    assert warmed() == ids
    assert held(folder) == before


def test_a_file_that_is_cut_off_is_worthless_wherever_it_ends(folder):
    ids = warmed()
    (file,) = folder.glob("*.tables")
    content = file.read_bytes()
    for end in range(0, len(content), max(1, len(content) // examples(10, 40))):
        file.write_bytes(content[:end])
        assert warmed() == ids
        assert file.read_bytes() == content


def test_a_whole_file_under_the_name_of_another_tokenizer_is_not_taken_for_its_own(folder):
    warmed()
    (tables,) = folder.glob("*.tables")
    other = load_tokenizer(str(TOYS / "toy_metaspace"))
    other.save()
    (theirs,) = set(folder.glob("*.tables")) - {tables}
    tables.write_bytes(theirs.read_bytes())
    assert load_tokenizer(str(TOY)).vocabulary.size != other.vocabulary.size


def test_a_byte_of_the_notes_that_is_not_as_it_was_written_makes_them_worthless(folder):
    empty = results_of(GENERIC, TOY)
    assert results_of(GENERIC, TOY) == empty  # stores the merges too
    before = held(folder)
    (file,) = folder.glob("*.notes")
    for at in range(0, len(before[".notes"]), examples(485, 97)):
        damage(file, at)
        assert results_of(GENERIC, TOY) == empty
        assert held(folder) == before  # made anew


def test_values_that_make_no_tables_are_worthless_even_where_the_checksum_is_right(folder):
    ids = warmed()
    store = open_store_of(TOY)
    before = held(folder)
    for values, parts in [({}, {}), ({"prefix": "never"}, {"lengths": b"123"}), ({"prefix": 7}, {})]:
        store._write("tables", values, parts)
        store._write("notes", values, parts)
        assert warmed() == ids
        assert held(folder)[".tables"] == before[".tables"]


def open_store_of(tokenizer: Path) -> StoredTokenizer:
    store = load_tokenizer(str(tokenizer)).store
    assert store is not None
    return store


@pytest.mark.parametrize("name", ["a-file/below", "a-file"])
def test_a_folder_that_cannot_be_written_is_gone_without(name, tmp_path, monkeypatch):
    (tmp_path / "a-file").write_text("nobody's folder")
    ids = warmed()
    monkeypatch.setenv("TITO_AUDIT_CACHE", str(tmp_path / name))
    assert warmed() == ids == warmed()
    assert (tmp_path / "a-file").read_text() == "nobody's folder"


def test_notes_are_kept_by_name_and_those_of_the_last_runs_longest(folder):
    tables = load_tokenizer(str(TOY))

    def run(*names: int) -> list[str]:
        store = StoredTokenizer(folder, "0" * 32)
        for name in names:
            if store.note(f"{name}") is None:
                store.add_note(f"{name}", {"value": name})
        store.save(lambda: Tables(tables.vocabulary.entries, tables.control_tokens.tokens, None, (), None))
        again = StoredTokenizer(folder, "0" * 32)
        assert all(again.note(f"{name}") == {"value": name} for name in names[: cache.MAX_NOTES])
        return list(StoredTokenizer(folder, "0" * 32)._notes)

    assert run(*range(cache.MAX_NOTES)) == [f"{name}" for name in range(cache.MAX_NOTES)]
    noted = run(5, 100)
    assert noted[:3] == ["5", "100", "0"]
    assert len(noted) == cache.MAX_NOTES
    assert f"{cache.MAX_NOTES - 1}" not in noted


def test_what_is_no_json_is_not_noted(folder):
    store = StoredTokenizer(folder, "0" * 32)
    for value in ({"text": "\ud800"}, {"number": 1 << 70}, {"object": object()}):
        store.add_note("mine", value)
        assert store.note("mine") is None
    store.add_note("mine", {"text": "ä", "names": ("a", "b")})
    assert store.note("mine") == {"text": "ä", "names": ["a", "b"]}


def test_a_folder_in_the_place_of_a_file_is_gone_around(folder):
    ids = warmed()
    for file in list(folder.iterdir()):
        file.unlink()
        file.mkdir()
    assert warmed() == ids == warmed()


def test_the_cache_lies_where_it_is_wanted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value, place in [
        ("off", None),
        ("OFF", None),
        ("", tmp_path / "tito-audit"),
        (str(tmp_path / "mine"), tmp_path / "mine"),
        ("~/mine", tmp_path / "home" / "mine"),
    ]:
        monkeypatch.setenv("TITO_AUDIT_CACHE", value)
        assert cache_folder() == place
    monkeypatch.delenv("TITO_AUDIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder() == tmp_path / "home" / ".cache" / "tito-audit"


def test_without_a_cache_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("TITO_AUDIT_CACHE", "off")
    assert load_tokenizer(str(TOY)).store is None


def test_another_version_of_the_library_finds_nothing(folder):
    files = [("tokenizer.json", b"{}")]
    store, other = open_store("0.22.1", files), open_store("0.22.2", files)
    store.add_note("template", {"begins": "<s>"})
    store._write("notes", {"notes": store._current_notes}, {})
    assert open_store("0.22.1", files).note("template") == {"begins": "<s>"}
    assert other.note("template") is None


def test_other_files_of_a_tokenizer_are_another_tokenizer(folder, tmp_path):
    copy = tmp_path / "toy"
    copy.mkdir()
    for file in TOY.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    warmed(tokenizer=TOY)
    assert not needed_the_library(load_tokenizer(str(copy)))  # the same files in another place
    (copy / "generation_config.json").write_text('{"eos_token_id": [2000]}')
    again = load_tokenizer(str(copy))
    assert again.eos_ids == (2002, 2000)
    again.save()
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": "<|new|>"}))
    more = load_tokenizer(str(copy))
    assert more.vocabulary.size == again.vocabulary.size + 1
    assert len(list(folder.glob("*.tables"))) == 2


def test_a_file_that_changes_while_it_is_in_use_is_refused(folder, tmp_path):
    copy = tmp_path / "toy"
    copy.mkdir()
    for file in TOY.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    warmed(tokenizer=copy)
    tokenizer = load_tokenizer(str(copy))
    (copy / "tokenizer.json").write_bytes((TOYS / "toy_metaspace" / "tokenizer.json").read_bytes())
    with pytest.raises(TokenizerError, match="changed while it was in use"):
        tokenizer.encode(TEXTS[0])


def test_old_files_are_let_go_and_nobody_elses(folder, monkeypatch):
    folder.mkdir()
    other = folder / "tokenizer-notes.tables"
    other.write_bytes(b"x" * 5000)
    old = folder / f"tokenizer-{'a' * 32}.tables"
    left = folder / f"tokenizer-{'b' * 32}.tables.7.8.part"
    young = folder / f"tokenizer-{'c' * 32}.tables.7.8.part"
    for file in (old, left, young):
        file.write_bytes(b"x" * 5000)
    for file in (old, left):
        os.utime(file, (1, 1))
    monkeypatch.setattr(cache, "FOLDER_BYTES", 100_000)
    warmed()
    assert old.exists()
    assert not left.exists()
    assert young.exists()
    before = set(folder.iterdir())
    warmed(tokenizer=TOYS / "toy_metaspace")
    (fresh,) = set(folder.iterdir()) - before
    counted = sum(file.stat().st_size for file in folder.glob("*.tables") if file != other)
    fresh.unlink()
    monkeypatch.setattr(cache, "FOLDER_BYTES", counted - 2500)
    warmed(tokenizer=TOYS / "toy_metaspace")
    assert not old.exists()
    assert other.exists()
    assert not needed_the_library(load_tokenizer(str(TOY)))


@pytest.mark.skipif(os.name != "posix", reason="modes of files are of POSIX")
def test_what_is_kept_is_for_the_user_alone(folder):
    warmed()
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system forks no processes")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_that_was_forked_writes_nothing(folder):
    tokenizer = load_tokenizer(str(TOY))
    child = os.fork()
    if not child:
        tokenizer.encode("new")
        tokenizer.store.add_note("mine", {})
        tokenizer.save()
        os._exit(0)
    os.waitpid(child, 0)
    assert not folder.exists()
    tokenizer.save()
    assert held(folder).keys() == {".tables"}


def test_many_that_write_at_once_leave_whole_files(folder):
    texts = [f"text number {n} <|im_end|>" for n in range(12)]
    tokenizers = [load_tokenizer(str(TOY)) for _ in texts]
    for tokenizer, text in zip(tokenizers, texts, strict=True):
        tokenizer.encode(text)
    threads = [threading.Thread(target=tokenizer.save) for tokenizer in tokenizers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(held(folder)) == [".tables"]
    assert load_tokenizer(str(TOY)).store.tables is not None


def test_no_text_of_a_log_is_kept(folder):
    results_of(GENERIC, TOY)
    assert held(folder).keys() == {".tables", ".notes"}
    data = b"".join(file.read_bytes() for file in folder.iterdir())
    rows = [json.loads(line) for line in GENERIC.read_text().splitlines()]
    texts = {message["content"] for row in rows for message in row.get("messages") or [] if message.get("content")}
    assert len(texts) > 5
    assert not any(text.encode() in data for text in texts if len(text) > 12)


def modules_after(*arguments: str) -> set[str]:
    """What a command imported."""
    code = (
        "import atexit, sys; from tito_audit.cli import main; "
        "atexit.register(lambda: print(' '.join(sys.modules), file=sys.stderr)); "
        f"sys.argv = ['tito-audit', *{arguments!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr
    return set(done.stderr.split())


@once
def modules_of_a_scan() -> set[str]:
    """What a small scan imports, for all that is asked of it."""
    return modules_after("scan", str(GENERIC), "-t", str(TOY))


def test_a_small_scan_imports_nothing_that_it_does_not_need():
    heavy = {"transformers", "huggingface_hub", "fastokens", "pyarrow", "torch", "requests", "multiprocessing"}
    assert not heavy & modules_of_a_scan()
    assert not {*heavy, "numpy", "rich"} & modules_after("--help")


def test_a_small_scan_of_a_file_imports_nothing_for_other_files_and_other_commands():
    web = {"ssl", "socket", "http.client", "email", "urllib.request", "tito_audit.storage._store_web"}
    rare = {"logging", "concurrent.futures", "importlib.metadata", "filecmp"}
    loaded = modules_of_a_scan()
    assert not {*web, *rare} & loaded
    assert {name for name in loaded if re.fullmatch(r"tito_audit\.cli\.[a-z]\w*", name)} == {"tito_audit.cli.scan"}


def test_a_small_scan_collects_no_garbage(folder):
    code = (
        "import gc, sys; seen = []; from tito_audit.__main__ import main; "
        "gc.callbacks.append(lambda phase, about: seen.append(gc.get_count()) if phase == 'start' else None); "
        "import atexit; atexit.register(lambda: print(len(seen), gc.get_freeze_count() > 9_999, file=sys.stderr));"
        f" sys.argv = ['tito-audit', 'scan', {str(GENERIC)!r}, '-t', {str(TOY)!r}];"
        " gc.collect(); seen.clear(); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.split() == ["0", "True"]


def test_a_scan_imports_nothing_of_the_live_side():
    live = ("provider", "providers", "parser", "parsers", "sessions", "serve", "rescore")
    loaded = modules_of_a_scan()
    assert not {"torch", "aiohttp", "openai", "prometheus_client"} & loaded
    assert not {name for name in loaded if name.removeprefix("tito_audit.").split(".")[0] in live}


def test_a_second_scan_of_a_small_clean_log_imports_no_jinja(folder, monkeypatch):
    log = folder.parent / "log.jsonl"
    with monkeypatch.context() as patch:
        patch.setenv("TITO_AUDIT_CACHE", "off")
        tokenizer = load_tokenizer(str(TOY))
        rows = []
        for text in TEXTS[:2]:
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Hello."}]
            rendered = make_renderer(tokenizer).render(as_messages(messages, "m"), add_generation_prompt=False)
            rows.append({"messages": messages, "token_ids": tokenizer.encode(rendered).tolist()})
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    scan = ("scan", str(log), "-t", str(TOY), "--quiet", "--report", f"json={folder.parent / 'report'}")
    slow = {"jinja2", "rich", "tito_audit.render.sandbox", "tito_audit.render.fast.static_check"}
    first, second = modules_after(*scan), modules_after(*scan)
    assert first & slow == slow - {"rich"}
    assert not second & slow
    assert "minijinja" in second


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system does not list threads")
def test_the_command_line_starts_no_threads_for_linear_algebra():
    code = (
        "import atexit, os, sys; from tito_audit.cli import main; "
        "threads = lambda: len(os.listdir('/proc/self/task')); "
        "atexit.register(lambda: print(threads(), 'numpy' in sys.modules, file=sys.stderr)); "
        "sys.argv = ['tito-audit', 'list', 'rules']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr.split() == ["1", "True"]
