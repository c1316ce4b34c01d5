"""Remote files are paths: shown as their URLs, joined and pickled like any path, and read by ranges."""

import pickle

import pytest

from tito_audit.storage._store import status_from_info
from tito_audit.storage.remote import RemoteFile
from tito_audit.storage.watch import path_from_name


@pytest.mark.parametrize("url", ["s3://bucket/run/a.parquet", "hf://datasets/org/name@v1/data/a.jsonl"])
def test_a_remote_file_is_a_path_that_is_shown_as_its_url(url):
    path = path_from_name(url)
    assert isinstance(path, RemoteFile)
    assert str(path) == url
    assert str(path.parent / path.name) == url
    assert pickle.loads(pickle.dumps(path)) == path
    assert path.suffix == url[url.rindex(".") :]


def test_what_stores_say_of_a_file_has_one_form():
    assert status_from_info({"size": 3, "ETag": "x", "mtime": 2.5}).etag == "x"
    assert status_from_info({"size": 3, "mtime": 2.5}).st_mtime_ns == 2_500_000_000
    assert status_from_info({"size": None}).st_size == 0
