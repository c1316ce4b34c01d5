"""Store: where remote files are, in four operations, and the ways in which one can fail, in words for people.

Buckets are read by the drivers of fsspec: S3 (s3fs), Google Cloud Storage (gcsfs) and Azure (adlfs). Tried in
their place: obstore holds a file to its etag and outlasts dropped connections by itself, but it knows no profiles
of AWS, with which most users name their credentials.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from tito_audit.errors import StorageError

T = TypeVar("T")

TRIES = 5
"""How often a request that failed in passing is made, in all."""
PAUSE = 0.25
"""Seconds before the second try; twice as long before each further one."""
CONNECT_SECONDS = 10
READ_SECONDS = 30
"""How long a server may take to accept a connection, and to send the next bytes."""


@dataclass(frozen=True, slots=True)
class RemoteStatus:
    """What the store says of a file, under the names of `os.stat_result`."""

    st_size: int
    """Bytes."""
    st_mtime_ns: int = 0
    """When it was last written, in nanoseconds since 1970; 0 if the store does not say."""
    etag: str | None = None
    """Changes whenever the content does; None if the store does not say."""
    key: str = ""
    """How the store names exactly this version of the file."""
    ranges: bool = True
    """Whether the store sends parts of the file."""


class Refusal(Exception):
    """The store refuses, in words for people: what it says and what to do. Caught within this room."""


class Missing(Refusal):
    """There is no such file, folder, bucket or repository."""


class ChangedFile(Refusal):
    """The file is no longer what it was when the run began."""

    def __init__(self) -> None:
        super().__init__("the file was changed while it was read. Run again once nobody writes it.")


class Passing(Refusal):
    """A failure that may be over when the request is made again."""

    after: float = 0.0
    """Seconds that the server asks to wait."""


def dropped() -> Passing:
    """The failure of a connection that was closed in the middle of an answer."""
    return Passing("the connection was dropped again and again. Look at the network and run again.")


class Store:
    """The files of one service. `url` is exactly what was asked for, a folder without a slash at its end.

    Every operation raises Refused with a reason free of secrets, Passing where another try may help; or what its
    driver raises, of which `refusal` makes one.
    """

    advice: Advice

    def refusal(self, error: Exception, url: str) -> Refusal:
        """What an exception of the driver says of the store."""
        return refusal(error, self.advice)

    def status(self, url: str) -> RemoteStatus:
        """What the store says of a file; Missing if there is none."""
        raise NotImplementedError

    def is_folder(self, url: str) -> bool:
        """Whether files are below this URL; False where a service lists none."""
        return False

    def files(self, url: str) -> Iterator[tuple[str, RemoteStatus]]:
        """The URL and status of each file below a folder, at any depth."""
        return iter(())

    def entries(self, url: str) -> list[str]:
        """URLs of what is directly in a folder, the first thousand or so; for suggestions."""
        return []

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        """Bytes from `start` on, at most up to `stop`; fewer if the connection was dropped after some of them.

        Changed if the file is not the one that `status` describes.
        """
        raise NotImplementedError


def retried(operation: Callable[[], T]) -> T:
    """What the operation returns, tried again while it fails in passing; the last Passing after `TRIES` tries."""
    for tried in range(1, TRIES + 1):
        try:
            return operation()
        except Passing as failure:
            if tried == TRIES:
                raise
            wait(tried, failure)
    raise AssertionError


def wait(tried: int, failure: Passing) -> None:
    """Wait before the next try."""
    time.sleep(max(PAUSE * 2 ** (tried - 1), min(failure.after, READ_SECONDS)))


# The exceptions of drivers. Their own words may hold signed URLs and keys, so only codes and statuses are shown.


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about a store that refuses."""

    credentials: str
    """How to pass credentials."""
    place: str
    """What may be misspelt."""


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


def refusal(error: BaseException, advice: Advice) -> Refusal:
    """What a driver's exception says of the store, as a Refused of the right kind."""
    import ssl  # a scan of files needs none

    errors, codes = _chain(error), codes_of(error)
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
        ({"NoSuchBucket", "ContainerNotFound"}, Missing, f"there is no such bucket. {advice.place}"),
        (_BUSY, Passing, "the server is too busy or fails ({code}). Run again later."),
        (_SLOW, Passing, "the server does not answer in time. Look at the network and run again."),
        (_UNREACHABLE, Passing, "the server cannot be reached. Look at the address, the network and the proxy."),
        (_DROPPED, Passing, str(dropped())),
        (_MISSING, Missing, f"there is no such file. {advice.place}"),
    )
    for names, kind, words in kinds:
        if named := sorted(codes & names):
            return kind(words.format(code=named[0]))
    status = next((status for status in map(_status, errors) if status is not None), None)
    if status is not None:
        return of_status(status, advice)
    reason = getattr(error, "strerror", None)
    why = f": {reason}" if isinstance(reason, str) else ""
    return Refusal(f"the store fails ({type(error).__name__}{why}). {advice.place}")


def of_status(status: int, advice: Advice, after: float = 0.0) -> Refusal:
    """What an HTTP status says, as a Refused of the right kind."""
    if status in (412, 416):
        return ChangedFile()
    if status in (404, 410):
        return Missing(f"there is no such file ({status}). {advice.place}")
    if status in (401, 407):
        return Refusal(f"the store refuses these credentials, or wants some ({status}). {advice.credentials}")
    if status == 403:
        return Refusal(f"these credentials may not read it (403). {advice.credentials}")
    if status in (408, 425, 429) or status >= 500:
        busy = Passing(f"the server is too busy or fails ({status}). Run again later.")
        busy.after = after
        return busy
    return Refusal(f"the server answers with status {status}. {advice.place}")


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and those that led to it."""
    errors = [error]
    while (cause := errors[-1].__cause__ or errors[-1].__context__) is not None and cause not in errors:
        errors.append(cause)
    return errors


def codes_of(error: BaseException) -> set[str]:
    """What an exception and those that led to it are called: their classes, and the codes that a service gave."""
    codes: set[str] = set()
    for cause in _chain(error):
        codes.update(kind.__name__ for kind in type(cause).__mro__[:-3])
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):
            codes.add(str(response.get("Error", {}).get("Code", "")))
        code = getattr(cause, "error_code", None)
        if code is not None:
            codes.add(str(getattr(code, "value", code)))
    return codes


def _status(error: BaseException) -> int | None:
    """The HTTP status that an exception is about."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return response if isinstance(response, int) and response >= 400 else None
    for source in (response, error):
        for name in ("status_code", "status", "code"):
            status: Any = getattr(source, name, None)
            if isinstance(status, int) and 400 <= status < 600:
                return status
    return None


_FEW = 1000
"""How many entries of a folder are looked at for suggestions."""
_SETTINGS = ("AWS_", "FSSPEC_", "GOOGLE_", "GCS", "STORAGE_EMULATOR", "AZURE_", "HF_", "CLOUDSDK_")
"""How the environment variables begin that drivers read."""


class BucketStore(Store):
    """A service of buckets. A status's key is what the driver calls the file."""

    module = ""
    extra = ""

    def __init__(self) -> None:
        try:
            driver = importlib.import_module(self.module)
        except ImportError:
            raise StorageError(
                f"{self.extra}:// needs {self.module}, which is not installed. Install it: "
                f"pip install 'tito-audit[{self.extra}]'"
            ) from None
        try:
            self.filesystem = self.connect(driver)
        except Refusal:
            raise
        except Exception as error:  # drivers raise exceptions of many kinds
            raise refusal(error, self.advice) from None

    def connect(self, driver: Any) -> Any:
        """The filesystem of the driver's module."""
        raise NotImplementedError

    def status(self, url: str) -> RemoteStatus:
        about = self._about(url)
        if about.get("type") == "directory":
            raise Missing(f"this is a folder. {self.advice.place}")
        return self._status(about)

    def is_folder(self, url: str) -> bool:
        return bool(self._about(url).get("type") == "directory")

    def files(self, url: str) -> Iterator[tuple[str, RemoteStatus]]:
        """All files below, a thousand or more a request."""
        below = self.filesystem.find(_key(url), detail=True)
        for key, about in below.items():
            if about.get("type") == "file":
                yield self._url(url, key), self._status(about)

    def entries(self, url: str) -> list[str]:
        return [self._url(url, key) for key in islice(self.filesystem.ls(_key(url), detail=False), _FEW)]

    def read(self, url: str, start: int, stop: int, status: RemoteStatus) -> bytes:
        import fsspec

        data: bytes = fsspec.asyn.sync(self.filesystem.loop, self.read_version, start, stop, status)
        return data

    async def read_version(self, start: int, stop: int, status: RemoteStatus) -> bytes:
        """Bytes of the file, which must still have its etag."""
        raise NotImplementedError

    def _about(self, url: str) -> dict[str, Any]:
        about: dict[str, Any] = self.filesystem.info(_key(url))
        return about

    def _url(self, url: str, key: str) -> str:
        return f"{url.partition('://')[0]}://{key.lstrip('/')}"

    def _status(self, about: dict[str, Any]) -> RemoteStatus:
        return status_of(about)


class S3Store(BucketStore):
    """S3, and what speaks as it does."""

    module, extra = "s3fs", "s3"
    advice = Advice(
        credentials="Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; FSSPEC_S3_ANON=true for a "
        "public bucket.",
        place="Look at the name, at AWS_ENDPOINT_URL and at the region.",
    )

    def connect(self, driver: Any) -> Any:
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

    async def read_version(self, start: int, stop: int, status: RemoteStatus) -> bytes:
        bucket, _, key = status.key.partition("/")
        same = {"IfMatch": status.etag} if status.etag else {}
        answer = await self.filesystem._call_s3(
            "get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}", **same
        )
        if status.etag and answer.get("ETag") not in (None, status.etag):
            raise ChangedFile
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

    def connect(self, driver: Any) -> Any:
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
            data: bytes = self.filesystem.cat_file(status.key, start=start, end=stop, generation=status.etag)
        except Exception as error:
            refused = self.refusal(error, url)
            raise ChangedFile() if isinstance(refused, Missing) else refused from None
        return data


class AzureStore(BucketStore):
    """Azure Blob Storage."""

    module, extra = "adlfs", "az"
    advice = Advice(
        credentials="Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with "
        "AZURE_STORAGE_ACCOUNT_KEY or after `az login`; AZURE_STORAGE_ANON=true for a public container.",
        place="Look at the name: az://CONTAINER/PATH.",
    )

    def connect(self, driver: Any) -> Any:
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
