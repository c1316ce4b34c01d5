"""Stores of remote files: what they can be asked, and what their failures mean, in words for people.

Buckets are read by the drivers of fsspec: S3 (s3fs), Google Cloud Storage (gcsfs) and Azure (adlfs). Tried
instead: obstore pins a file to its etag and survives dropped connections by itself, but it does not know the
profiles of AWS, by which most users name their credentials.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tito_audit.errors import StorageError

T = TypeVar("T")

TRIES = 5
"""How often a request is made, in all, if it fails transiently."""
PAUSE = 0.25
"""Seconds before the second try; twice as long before each further one."""
CONNECT_SECONDS = 10
READ_SECONDS = 30
"""How long a server may take to accept a connection, and to send the next bytes."""


@dataclass(frozen=True, slots=True)
class RemoteStatus:
    """What a store says of a file, under the names of `os.stat_result`."""

    st_size: int
    """Bytes."""
    st_mtime_ns: int = 0
    """When it was last written, in nanoseconds since 1970; 0 if the store does not say."""
    etag: str | None = None
    """A token that changes with the content; None if the store has none."""
    key: str = ""
    """What the store calls exactly this version of the file."""
    serves_ranges: bool = True
    """Whether the store can send a part of the file."""


class Refusal(Exception):
    """A store refuses; the message says why and what to do. Caught within this room."""

    def about_writing(self) -> Refusal:
        """The same refusal, of a file that was to be written."""
        words = str(self).replace("may not read it", "may not write it").replace("may read it", "may write to it")
        self.args = (words,)
        return self


class Missing(Refusal):
    """There is no such file, folder, bucket or repository."""


class ChangedFile(Refusal):
    """The file has changed since the run began."""

    def __init__(self) -> None:
        super().__init__("the file was changed while it was read. Run again once nobody writes it.")


class NameTaken(Refusal):
    """There is a file of this name already."""


class Transient(Refusal):
    """A failure after which the same request may succeed."""

    retry_after: float = 0.0
    """Seconds that the server asks to wait before the next try."""


def dropped_connection() -> Transient:
    """The failure of a connection that is closed in the middle of a response."""
    return Transient("the connection was dropped again and again. Look at the network and run again.")


class Store:
    """The files of one service. A URL has its secrets, and a folder's has no slash at its end.

    Every operation raises a Refusal free of secrets, a Transient where another try may help; or what its
    driver raises, from which `refusal` makes one.
    """

    advice: Advice

    def refusal(self, error: Exception, url: str) -> Refusal:
        """What an exception of the driver means."""
        return refusal_from_error(error, self.advice)

    def status(self, url: str) -> RemoteStatus:
        """The status of a file; Missing if there is none."""
        raise NotImplementedError

    def is_folder(self, url: str) -> bool:
        """Whether there are files below a URL; False where a service lists none."""
        return False

    def files(self, url: str) -> Iterator[tuple[str, RemoteStatus]]:
        """The URL and status of each file below a folder, at any depth."""
        return iter(())

    def entries(self, url: str) -> list[str]:
        """The URLs of what is directly in a folder, the first thousand or so: for suggestions."""
        return []

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        """The bytes `[start, stop)`, or fewer if the connection drops; ChangedFile if the etag is another."""
        raise NotImplementedError

    def upload(self, file: Path, url: str, *, overwrite: bool) -> None:
        """Send a whole file; NameTaken if there is one of its name that must not be overwritten."""
        raise NotImplementedError


def with_retries(operation: Callable[[], T]) -> T:
    """What the operation returns; it is tried `TRIES` times while it raises Transient."""
    for tries in range(1, TRIES + 1):
        try:
            return operation()
        except Transient as failure:
            if tries == TRIES:
                raise
            wait_before_retry(tries, failure)
    raise AssertionError


def wait_before_retry(tries: int, failure: Transient) -> None:
    """Wait longer after each try, and at least as long as the server asks."""
    time.sleep(max(PAUSE * 2 ** (tries - 1), min(failure.retry_after, READ_SECONDS)))


# What drivers raise. Their messages may hold signed URLs and keys, so only codes and statuses are shown.


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do when a store refuses."""

    credentials: str
    """How to set credentials."""
    check: str
    """What to check for a file that is not there."""


_UNTRUSTED = {"SSLCertVerificationError", "ClientConnectorCertificateError"}
_NO_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"),
    *("DefaultCredentialsError", "CredentialUnavailableError", "RefreshError", "SSOTokenLoadError"),
    *("UnauthorizedSSOTokenError", "TokenRetrievalError"),
}
_WRONG_CREDENTIALS = {
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
    *("AuthenticationFailed", "ClientAuthenticationError", "InvalidSecurity", "AuthorizationHeaderMalformed"),
    *("RequestTimeTooSkewed", "InvalidAuthenticationInfo", "InvalidClientTokenId"),
}
_FORBIDDEN = {"AccessDenied", "AuthorizationPermissionMismatch", "AllAccessDisabled"}
_MISSING = {
    *("NoSuchKey", "NoSuchBucket", "BlobNotFound", "ContainerNotFound", "ResourceNotFoundError"),
    *("FileNotFoundError", "NoSuchVersion"),
}
_UNREACHABLE = {
    *("EndpointConnectionError", "ClientConnectorError", "ClientConnectorDNSError", "ConnectError", "gaierror"),
    *("ConnectionRefusedError", "ServiceRequestError", "ProxyError", "ProxyConnectionError", "NewConnectionError"),
    *("TransportError", "ClientProxyConnectionError"),
}
_DROPPED = {
    *("ClientPayloadError", "IncompleteRead", "IncompleteReadError", "ServerDisconnectedError", "ReadError"),
    *("ConnectionClosedError", "ConnectionResetError", "BrokenPipeError", "RemoteProtocolError"),
    *("ChunkedEncodingError", "ResponseStreamingError", "HTTPClientError", "ClientOSError", "ConnectionError"),
    *("ServiceResponseError", "RemoteDisconnected", "ProtocolError", "HttpProcessingError", "BadStatusLine"),
}
_SLOW = {
    *("ReadTimeoutError", "ConnectTimeoutError", "TimeoutError", "FSTimeoutError", "ReadTimeout"),
    *("ConnectTimeout", "ServerTimeoutError", "SocketTimeoutError", "ConnectionTimeoutError", "PoolTimeout"),
}
_BUSY = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "ServerBusy", "InternalError"}
_CHANGED = {"PreconditionFailed", "ConditionNotMet", "FileExpired"}
_STORE_FULL = {"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull", "EntityTooLarge"}


def refusal_from_error(error: BaseException, advice: Advice) -> Refusal:
    """What a driver's exception means, judged by the names and codes of it and its causes."""
    import ssl  # a scan of files needs none

    errors, codes = _causes(error), error_codes(error)
    if codes & _UNTRUSTED:
        return Refusal("the server's certificate cannot be verified. Look at SSL_CERT_FILE and the proxy.")
    if any(isinstance(error, ssl.SSLError) for error in errors):
        return Refusal("no secure connection can be made. Look at the address, https or http, and the proxy.")
    if codes & _CHANGED:
        return ChangedFile()
    profile = "AWS_PROFILE names a profile that is not in AWS's configuration files."
    kinds: tuple[tuple[set[str], type[Refusal], str], ...] = (
        ({"ProfileNotFound"}, Refusal, profile),
        (_NO_CREDENTIALS, Refusal, f"no credentials were found. {advice.credentials}"),
        (_WRONG_CREDENTIALS, Refusal, f"the store refuses these credentials ({{code}}). {advice.credentials}"),
        (_FORBIDDEN, Refusal, f"these credentials may not read it ({{code}}). {advice.credentials}"),
        ({"NoSuchBucket", "ContainerNotFound"}, Missing, f"there is no such bucket. {advice.check}"),
        (_BUSY, Transient, "the server is too busy or fails ({code}). Run again later."),
        (_SLOW, Transient, "the server does not answer in time. Look at the network and run again."),
        (_UNREACHABLE, Transient, "the server cannot be reached. Look at the address, the network and the proxy."),
        (_DROPPED, Transient, str(dropped_connection())),
        (_MISSING, Missing, f"there is no such file. {advice.check}"),
    )
    for names, kind, words in kinds:
        if named := sorted(codes & names):
            return kind(words.format(code=named[0]))
    for cause in errors:  # the first that carries an HTTP status
        response: Any = getattr(cause, "response", None)
        statuses: Iterable[Any] = (
            getattr(at, name, None) for at in (response, cause) for name in ("status_code", "status", "code")
        )
        if isinstance(response, dict):
            statuses = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")]
        for status in statuses:
            if isinstance(status, int) and 400 <= status < 600:
                return refusal_from_status(status, advice)
    reason = getattr(error, "strerror", None)
    why = f": {reason}" if isinstance(reason, str) else ""
    return Refusal(f"the store fails ({type(error).__name__}{why}). {advice.check}")


def refusal_from_status(status: int, advice: Advice, retry_after: float = 0.0) -> Refusal:
    """What an HTTP status of 400 or more means."""
    if status in (412, 416):
        return ChangedFile()
    if status in (404, 410):
        return Missing(f"there is no such file ({status}). {advice.check}")
    if status in (401, 407):
        return Refusal(f"the store refuses these credentials, or wants some ({status}). {advice.credentials}")
    if status == 403:
        return Refusal(f"these credentials may not read it (403). {advice.credentials}")
    if status in (408, 425, 429) or status >= 500:
        busy = Transient(f"the server is too busy or fails ({status}). Run again later.")
        busy.retry_after = retry_after
        return busy
    return Refusal(f"the server answers with status {status}. {advice.check}")


def _causes(error: BaseException) -> list[BaseException]:
    errors = [error]
    while (cause := errors[-1].__cause__ or errors[-1].__context__) is not None and cause not in errors:
        errors.append(cause)
    return errors


def error_codes(error: BaseException) -> set[str]:
    """The names of the classes of an exception and its causes, and the error codes of the service."""
    codes: set[str] = set()
    for cause in _causes(error):
        codes.update(kind.__name__ for kind in type(cause).__mro__[:-3])
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):
            codes.add(str(response.get("Error", {}).get("Code", "")))
        code = getattr(cause, "error_code", None)
        if code is not None:
            codes.add(str(getattr(code, "value", code)))
    return codes


_MOST_ENTRIES = 1000
"""Entries of a folder that are listed at most for suggestions."""
_DRIVER_VARIABLES = ("AWS_", "FSSPEC_", "GOOGLE_", "GCS", "STORAGE_EMULATOR", "AZURE_", "HF_", "CLOUDSDK_")
"""Prefixes of the environment variables that drivers read."""
_PART_BYTES = 16 << 20
"""Bytes of a part of a large upload; Google wants a multiple of 256 KiB."""
_PARALLEL_PARTS = 4
"""Parts that are sent at once."""
_CONTENT_TYPES = {".html": "text/html; charset=utf-8", ".json": "application/json"}
"""Content types by suffix, of files that browsers show; the store chooses those of others."""


class BucketStore(Store):
    """A service of buckets; the key of a status is `BUCKET/PATH`."""

    module = ""
    extra = ""
    upload_options: ClassVar[dict[str, Any]] = {}
    content_type_option: str | None = None

    def __init__(self) -> None:
        try:
            driver = importlib.import_module(self.module)
        except ImportError:
            raise StorageError(
                f"{self.extra}:// needs {self.module}, which is not installed. Install it: "
                f"pip install 'tito-audit[{self.extra}]'"
            ) from None
        try:
            self.filesystem = self.connect_driver(driver)
        except Refusal:
            raise
        except Exception as error:  # drivers raise exceptions of many kinds
            raise refusal_from_error(error, self.advice) from None

    def connect_driver(self, driver: Any) -> Any:
        """The fsspec filesystem of the driver's module."""
        raise NotImplementedError

    def status(self, url: str) -> RemoteStatus:
        details = self._details(url)
        if details.get("type") == "directory":
            raise Missing(f"this is a folder. {self.advice.check}")
        return status_from_info(details)

    def is_folder(self, url: str) -> bool:
        return bool(self._details(url).get("type") == "directory")

    def files(self, url: str) -> Iterator[tuple[str, RemoteStatus]]:
        below = self.filesystem.find(bucket_path(url), detail=True)
        for key, details in below.items():
            if details.get("type") == "file":
                yield self._url(url, key), status_from_info(details)

    def entries(self, url: str) -> list[str]:
        keys = self.filesystem.ls(bucket_path(url), detail=False)
        return [self._url(url, key) for key in islice(keys, _MOST_ENTRIES)]

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        import fsspec

        data: bytes = fsspec.asyn.sync(self.filesystem.loop, self.read_version, start, stop, status)
        return data

    async def read_version(self, start: int, stop: int, status: RemoteStatus) -> bytes:
        """`read`, on the event loop of the driver."""
        raise NotImplementedError

    def upload(self, file: Path, url: str, *, overwrite: bool) -> None:
        key, options = bucket_path(url), dict(self.upload_options)
        content = _CONTENT_TYPES.get(Path(key).suffix.lower())
        if content is not None and self.content_type_option is not None:
            options[self.content_type_option] = content
        mode = "overwrite" if overwrite else "create"
        try:
            self.filesystem.put_file(os.fspath(file), key, mode=mode, **options)
        except FileExistsError:
            raise NameTaken from None
        except Exception as error:  # drivers raise exceptions of many kinds
            codes = error_codes(error)
            if not overwrite and codes & {"NotImplemented", "501"}:
                # The server cannot create only new files; the name was free a moment ago.
                return self.upload(file, url, overwrite=True)
            refused = refusal_from_error(error, self.advice)
            if codes & _STORE_FULL:
                refused = Refusal("the store has no room for it. Free some, or write elsewhere.")
            elif codes & {"ConditionalRequestConflict", "OperationAborted", "409"}:
                refused = Transient("somebody else writes this file. Run again once nobody does.")
            elif isinstance(refused, ChangedFile):
                refused = Transient("the store lost the upload. Run again.") if overwrite else NameTaken()
            else:
                refused = refused.about_writing()
            raise refused from None

    def _details(self, url: str) -> dict[str, Any]:
        details: dict[str, Any] = self.filesystem.info(bucket_path(url))
        return details

    def _url(self, url: str, key: str) -> str:
        return f"{url.partition('://')[0]}://{key.lstrip('/')}"


class S3Store(BucketStore):
    """S3, and services with the same API."""

    module, extra, content_type_option = "s3fs", "s3", "ContentType"
    upload_options: ClassVar[dict[str, Any]] = {"chunksize": _PART_BYTES, "max_concurrency": _PARALLEL_PARTS}
    advice = Advice(
        credentials="Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; FSSPEC_S3_ANON=true for a "
        "public bucket.",
        check="Look at the name, at AWS_ENDPOINT_URL and at the region.",
    )

    def connect_driver(self, driver: Any) -> Any:
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if not (os.environ.get(name) or "http://").startswith(("http://", "https://")):
                raise Refusal(f"{name} is not an address. Begin it with https:// or http://.")
        filesystem = driver.S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": READ_SECONDS,
                "retries": {"mode": "standard", "total_max_attempts": 2},
            },
        )
        filesystem.retries = 1  # `with_retries` and `RangedFile` try again
        return filesystem

    def _details(self, url: str) -> dict[str, Any]:
        try:
            return super()._details(url)
        except PermissionError:
            bucket, _, key = bucket_path(url).partition("/")
            # It made a HEAD request, whose response has no body that says why; these have one.
            if key:
                self.filesystem.call_s3("get_object", Bucket=bucket, Key=key, Range="bytes=0-0")
            self.filesystem.call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)
            raise

    async def read_version(self, start: int, stop: int, status: RemoteStatus) -> bytes:
        bucket, _, key = status.key.partition("/")
        match = {"IfMatch": status.etag} if status.etag else {}
        answer = await self.filesystem._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **match
        )
        if status.etag and answer.get("ETag") not in (None, status.etag):
            raise ChangedFile
        parts: list[bytes] = []
        body = answer["Body"]
        try:
            while block := await body.read(1 << 20):
                parts.append(block)
        except Exception:  # dropped; the next request goes on from there
            if not parts:
                raise
        finally:
            body.close()
        return b"".join(parts)

    def entries(self, url: str) -> list[str]:
        bucket, _, key = bucket_path(url).partition("/")
        prefix = f"{key}/" if key else ""
        listing = self.filesystem.call_s3(
            "list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", MaxKeys=_MOST_ENTRIES
        )
        names = [entry["Key"] for entry in listing.get("Contents", ())]
        names += [entry["Prefix"].rstrip("/") for entry in listing.get("CommonPrefixes", ())]
        return [self._url(url, f"{bucket}/{name}") for name in names]


class GoogleStore(BucketStore):
    """Google Cloud Storage."""

    module, extra, content_type_option = "gcsfs", "gs", "content_type"
    upload_options: ClassVar[dict[str, Any]] = {"chunksize": _PART_BYTES}
    advice = Advice(
        credentials="Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; "
        "FSSPEC_GCS_TOKEN=anon for a public bucket.",
        check="Look at the name.",
    )

    def connect_driver(self, driver: Any) -> Any:
        # Not `gcsfs.GCSFileSystem`: its gRPC does not survive a fork.
        return driver.core.GCSFileSystem(
            skip_instance_cache=True, use_listings_cache=False, timeout=READ_SECONDS, check_connection=False
        )

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        """Bytes of one generation of the object; if that is gone, the object was overwritten."""
        try:
            data: bytes = self.filesystem.cat_file(status.key, start=start, end=stop, generation=status.etag)
        except Exception as error:
            refused = self.refusal(error, url)
            raise ChangedFile() if isinstance(refused, Missing) else refused from None
        return data


class AzureStore(BucketStore):
    """Azure Blob Storage."""

    module, extra = "adlfs", "az"
    upload_options: ClassVar[dict[str, Any]] = {"max_concurrency": _PARALLEL_PARTS}
    advice = Advice(
        credentials="Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with "
        "AZURE_STORAGE_ACCOUNT_KEY or after `az login`; AZURE_STORAGE_ANON=true for a public container.",
        check="Look at the name: az://CONTAINER/PATH.",
    )

    def connect_driver(self, driver: Any) -> Any:
        named = ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME", "FSSPEC_ABFS")
        if not any(name.startswith(named) for name in os.environ):
            raise Refusal(f"no storage account is named. {self.advice.credentials}")
        return driver.AzureBlobFileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            connection_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
        )

    async def read_version(self, start: int, stop: int, status: RemoteStatus) -> bytes:
        azure: Any = importlib.import_module("azure.core")
        container, _, blob = status.key.partition("/")
        match: dict[str, Any] = {"etag": status.etag, "match_condition": azure.MatchConditions.IfNotModified}
        async with self.filesystem.service_client.get_blob_client(container=container, blob=blob) as client:
            stream = await client.download_blob(
                offset=start, length=stop - start, **(match if status.etag else {})
            )
            data: bytes = await stream.readall()
        return data


def status_from_info(details: dict[str, Any]) -> RemoteStatus:
    """The status of a file from what fsspec's `info` says of it."""
    tags = ("generation", "ETag", "etag", "md5Hash", "content_md5")  # Google's generations tell versions apart
    etag = next((details[name] for name in tags if details.get(name)), None)
    when: Any = details.get("LastModified") or details.get("last_modified") or details.get("mtime")
    if hasattr(when, "timestamp"):
        when = when.timestamp()
    written = int(when * 1_000_000_000) if isinstance(when, int | float) else 0
    size, key = int(details.get("size") or 0), str(details.get("name", "")).lstrip("/")
    return RemoteStatus(size, written, str(etag) if etag is not None else None, key)


def driver_settings() -> tuple[tuple[str, str], ...]:
    """The environment variables that drivers read, by which the stores of a process are told apart."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(_DRIVER_VARIABLES)))


def bucket_path(url: str) -> str:
    """`BUCKET/PATH` of a URL."""
    return url.partition("://")[2].strip("/")
