"""Files in buckets, by the drivers of fsspec: S3 (s3fs), Google Cloud Storage (gcsfs) and Azure (adlfs).

Tried in their place: obstore holds a file to its etag and outlasts dropped connections by itself, but it knows no
profiles of AWS, with which most users name their credentials.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from tito_audit.errors import StorageError
from tito_audit.storage._store import (
    CONNECT_SECONDS,
    READ_SECONDS,
    Advice,
    Changed,
    Missing,
    Refused,
    RemoteStatus,
    Store,
    refusal,
)

_FEW = 1000
"""How many entries of a folder are looked at for suggestions."""
_SETTINGS = ("AWS_", "FSSPEC_", "GOOGLE_", "GCS", "STORAGE_EMULATOR", "AZURE_", "HF_", "CLOUDSDK_")
"""How the environment variables begin that drivers read."""


class BucketStore(Store):
    """A service of buckets. A status's key is what the driver calls the file."""

    module = ""
    extra = ""
    advice = Advice("", "")

    def __init__(self) -> None:
        try:
            driver = importlib.import_module(self.module)
        except ImportError:
            raise StorageError(
                f"{self.extra}:// needs {self.module}, which is not installed. Install it: "
                f"pip install 'tito-audit[{self.extra}]'"
            ) from None
        with self._refusals():
            self.filesystem = self._connect(driver)

    def _connect(self, driver: Any) -> Any:
        """The filesystem of the driver's module."""
        raise NotImplementedError

    def status(self, url: str) -> RemoteStatus:
        """What the driver says of a file."""
        with self._refusals():
            about = self._about(url)
        if about.get("type") == "directory":
            raise Missing(f"this is a folder. {self.advice.place}")
        return self._status(about)

    def is_folder(self, url: str) -> bool:
        """Whether any key begins with this one and a slash."""
        try:
            with self._refusals():
                return bool(self._about(url).get("type") == "directory")
        except Missing:
            return False

    def files(self, url: str) -> Iterator[tuple[str, RemoteStatus]]:
        """All files below, a thousand or more a request."""
        with self._refusals():
            below = self.filesystem.find(_key(url), detail=True)
        for key, about in below.items():
            if about.get("type") == "file":
                yield self._url(url, key), self._status(about)

    def entries(self, url: str) -> list[str]:
        """What is in a folder."""
        with self._refusals():
            return [self._url(url, key) for key in islice(self.filesystem.ls(_key(url), detail=False), _FEW)]

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        """Bytes of the file."""
        with self._refusals():
            data: bytes = self.filesystem.cat_file(status.key, start=start, end=stop)
        return data

    def _about(self, url: str) -> dict[str, Any]:
        about: dict[str, Any] = self.filesystem.info(_key(url))
        return about

    def _url(self, url: str, key: str) -> str:
        return f"{url.partition('://')[0]}://{key.lstrip('/')}"

    def _status(self, about: dict[str, Any]) -> RemoteStatus:
        return status_of(about)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Exceptions of the driver as Refused."""
        try:
            yield
        except (StorageError, Refused, KeyboardInterrupt):
            raise
        except Exception as error:  # drivers raise exceptions of many kinds
            raise refusal(error, self.advice) from None


class S3Store(BucketStore):
    """S3, and what speaks as it does."""

    module, extra = "s3fs", "s3"
    advice = Advice(
        credentials="Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; FSSPEC_S3_ANON=true for a "
        "public bucket.",
        place="Look at the name, at AWS_ENDPOINT_URL and at the region.",
    )

    def _connect(self, driver: Any) -> Any:
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if not (os.environ.get(name) or "http://").startswith(("http://", "https://")):
                raise Refused(f"{name} is not an address. Begin it with https:// or http://.")
        filesystem = driver.S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": READ_SECONDS,
                "retries": {"mode": "standard", "total_max_attempts": 2},
            },
        )
        filesystem.retries = 1  # what fails is tried again here, file by file and range by range
        return filesystem

    def _about(self, url: str) -> dict[str, Any]:
        try:
            return super()._about(url)
        except PermissionError:
            bucket, _, key = _key(url).partition("/")
            # The answer to a HEAD has no body that says why.
            if key:
                self.filesystem.call_s3("get_object", Bucket=bucket, Key=key, Range="bytes=0-0")
            self.filesystem.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
            raise

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        """Bytes of the object, which must still have its etag."""
        import fsspec

        with self._refusals():
            data: bytes = fsspec.asyn.sync(self.filesystem.loop, self._read, start, stop, status)
        return data

    async def _read(self, start: int, stop: int, status: RemoteStatus) -> bytes:
        bucket, _, key = status.key.partition("/")
        same = {"IfMatch": status.etag} if status.etag else {}
        answer = await self.filesystem._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **same
        )
        if status.etag and answer.get("ETag") not in (None, status.etag):
            raise Changed
        parts: list[bytes] = []
        body = answer["Body"]
        try:
            while block := await body.read(1 << 20):
                parts.append(block)
        except Exception:
            if not parts:
                raise
        finally:
            body.close()
        return b"".join(parts)

    def entries(self, url: str) -> list[str]:
        """What is in a folder, in one request."""
        bucket, _, key = _key(url).partition("/")
        prefix = f"{key}/" if key else ""
        with self._refusals():
            listing = self.filesystem.call_s3(
                "list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", MaxKeys=_FEW
            )
        names = [entry["Key"] for entry in listing.get("Contents", ())]
        names += [entry["Prefix"].rstrip("/") for entry in listing.get("CommonPrefixes", ())]
        return [self._url(url, f"{bucket}/{name}") for name in names]


class GoogleStore(BucketStore):
    """Google Cloud Storage."""

    module, extra = "gcsfs", "gs"
    advice = Advice(
        credentials="Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; "
        "FSSPEC_GCS_TOKEN=anon for a public bucket.",
        place="Look at the name.",
    )

    def _connect(self, driver: Any) -> Any:
        # Not the class of the same name in `gcsfs` itself: its gRPC does not survive a fork.
        return driver.core.GCSFileSystem(
            skip_instance_cache=True, use_listings_cache=False, timeout=READ_SECONDS, check_connection=False
        )

    def _status(self, about: dict[str, Any]) -> RemoteStatus:
        status = status_of(about)
        generation = about.get("generation")
        return RemoteStatus(status.st_size, status.st_mtime_ns, str(generation or status.etag), status.key)

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        """Bytes of the object in its generation; a generation that is gone was overwritten."""
        try:
            with self._refusals():
                data: bytes = self.filesystem.cat_file(status.key, start=start, end=stop, generation=status.etag)
        except Missing:
            raise Changed from None
        return data


class AzureStore(BucketStore):
    """Azure Blob Storage."""

    module, extra = "adlfs", "az"
    advice = Advice(
        credentials="Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with "
        "AZURE_STORAGE_ACCOUNT_KEY or after `az login`; AZURE_STORAGE_ANON=true for a public container.",
        place="Look at the name: az://CONTAINER/PATH.",
    )

    def _connect(self, driver: Any) -> Any:
        named = ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME", "FSSPEC_ABFS")
        if not any(name.startswith(named) for name in os.environ):
            raise Refused(f"no storage account is named. {self.advice.credentials}")
        return driver.AzureBlobFileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            connection_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
        )

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        """Bytes of the blob, which must still have its etag."""
        import fsspec

        with self._refusals():
            data: bytes = fsspec.asyn.sync(self.filesystem.loop, self._read, start, stop, status)
        return data

    async def _read(self, start: int, stop: int, status: RemoteStatus) -> bytes:
        azure: Any = importlib.import_module("azure.core")
        container, _, blob = status.key.partition("/")
        same = {"etag": status.etag, "match_condition": azure.MatchConditions.IfNotModified} if status.etag else {}
        async with self.filesystem.service_client.get_blob_client(container=container, blob=blob) as client:
            stream = await client.download_blob(offset=start, length=stop - start, **same)
            data: bytes = await stream.readall()
        return data


def status_of(about: dict[str, Any]) -> RemoteStatus:
    """What the `info` of an fsspec filesystem says of a file."""
    etag = next((about[name] for name in ("ETag", "etag", "md5Hash", "content_md5") if about.get(name)), None)
    when: Any = next((about[name] for name in ("LastModified", "last_modified", "mtime") if about.get(name)), None)
    if hasattr(when, "timestamp"):
        when = when.timestamp()
    written = int(when * 1_000_000_000) if isinstance(when, int | float) else 0
    size, key = int(about.get("size") or 0), str(about.get("name", "")).lstrip("/")
    return RemoteStatus(size, written, str(etag) if etag is not None else None, key)


def settings_of_drivers() -> tuple[tuple[str, str], ...]:
    """The environment variables that drivers read: with others, other filesystems are made."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS)))


def _key(url: str) -> str:
    return url.partition("://")[2].strip("/")
