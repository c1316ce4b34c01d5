"""An S3-compatible store (moto) in a process of its own, which can check signatures."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.remote.server import Server

_POLICY = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}],
}


class S3Server(Server):
    """A store with one empty bucket, `logs`.

    `env` names it and holds credentials; with `strict`, any others are refused.
    """

    bucket = "logs"

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__("tests.remote.s3:application")
        self.env: Mapping[str, str] = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }
        self.client.create_bucket(Bucket=self.bucket)
        if strict:
            self._check_signatures()

    @cached_property
    def client(self) -> Any:
        """A boto client with the credentials of `env`."""
        return self._client("s3")

    def put(self, key: str, data: bytes) -> str:
        """Store an object in the bucket; returns its URL."""
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)
        return f"s3://{self.bucket}/{key}"

    def upload(self, folder: Path, below: str = "") -> str:
        """Store all files below a folder; returns the URL of the folder."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.put("/".join(filter(None, (below, file.relative_to(folder).as_posix()))), file.read_bytes())
        return f"s3://{self.bucket}/{below}".rstrip("/")

    def keys(self) -> list[str]:
        """The keys of all objects in the bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def get(self, key: str) -> bytes:
        """The bytes of an object."""
        data: bytes = self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return data

    def close(self) -> None:
        """End the process."""
        self.client.close()
        super().close()

    def _check_signatures(self) -> None:
        users = self._client("iam")
        users.create_user(UserName="auditor")
        key = users.create_access_key(UserName="auditor")["AccessKey"]
        users.put_user_policy(UserName="auditor", PolicyName="all", PolicyDocument=json.dumps(_POLICY))
        self.env = {
            **self.env,
            "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        }
        users.close()
        self.__dict__.pop("client").close()
        kind = {"Content-Type": "text/plain"}
        ask = urllib.request.Request(f"{self.url}/moto-api/reset-auth", data=b"0", headers=kind)
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(ask, timeout=60).close()
        self.forget()

    def _client(self, service: str) -> Any:
        import boto3

        return boto3.client(
            service,
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
        )


def application() -> Callable[..., Iterable[bytes]]:
    """The WSGI application."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    app: Callable[..., Iterable[bytes]] = DomainDispatcherApplication(create_backend_app)
    return app
