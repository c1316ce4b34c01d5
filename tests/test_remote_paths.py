"""Remote files are paths: shown as their URLs, joined and pickled like any path, and read by ranges."""

import pickle
import random
from pathlib import Path

import fsspec
import pytest

from tito_audit.storage.find import find_logs
from tito_audit.storage.remote import RemoteFile, status_of
from tito_audit.storage.standard_input import path_of


@pytest.mark.parametrize("url", ["s3://bucket/run/a.parquet", "hf://datasets/org/name@v1/data/a.jsonl"])
def test_a_remote_file_is_a_path_that_is_shown_as_its_url(url):
    path = path_of(url)
    assert isinstance(path, RemoteFile)
    assert str(path) == url
    assert str(path.parent / path.name) == url
    assert pickle.loads(pickle.dumps(path)) == path
    assert path.suffix == url[url.rindex(".") :]


def test_any_range_of_a_remote_file_is_what_was_stored():
    data = random.Random(0).randbytes(300_000)
    with fsspec.filesystem("memory").open("/ranges", "wb") as file:
        file.write(data)
    path = RemoteFile("memory://ranges")
    assert path.stat().st_size == len(data)
    for buffering in (-1, 0):
        with path.open("rb", buffering) as file:
            for at, size in ((0, 10), (299_990, 100), (70_000, 140_000), (5, 0), (300_000, 5)):
                file.seek(at)
                assert file.read(size) == data[at : at + size]


def test_a_remote_log_is_scanned_like_the_same_file_on_disk():
    import tito_audit

    data = Path("fixtures/formats/nemo_gym.jsonl").read_bytes()
    with fsspec.filesystem("memory").open("/nemo_gym.jsonl", "wb") as file:
        file.write(data)
    local, remote = (
        [(finding.place.row, finding.code, finding.hit) for result in scan for finding in result.findings]
        for scan in map(tito_audit.scan_rollouts, ["fixtures/formats/nemo_gym.jsonl", "memory://nemo_gym.jsonl"])
    )
    assert local
    assert local == remote
    assert find_logs(["memory://nemo_gym.jsonl"]) == [RemoteFile("memory://nemo_gym.jsonl")]


def test_what_stores_say_of_a_file_has_one_form():
    assert status_of({"size": 3, "ETag": "x", "mtime": 2.5}).etag == "x"
    assert status_of({"size": 3, "mtime": 2.5}).st_mtime_ns == 2_500_000_000
    assert status_of({"size": None}).st_size == 0
