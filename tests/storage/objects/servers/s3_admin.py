"""A signed S3 client of the standard library alone, for what tests put into a server: buckets, and keys of any characters."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPResponse
from urllib.parse import quote, urlsplit


@dataclass(frozen=True)
class S3Admin:
    """Signs with AWS Signature Version 4."""

    endpoint: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"

    def make_bucket(self, bucket: str) -> None:
        self.send("PUT", f"/{bucket}")

    def make_bucket_if_missing(self, bucket: str) -> None:
        try:
            self.make_bucket(bucket)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 409:
                raise

    def put(self, bucket: str, key: str, data: bytes) -> str:
        """Returns: the object's etag."""
        return self.send("PUT", f"/{bucket}/{quote(key, safe='/')}", data).headers["ETag"]

    def delete(self, bucket: str, key: str) -> None:
        self.send("DELETE", f"/{bucket}/{quote(key, safe='/')}")

    def enable_versions(self, bucket: str) -> None:
        body = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        self.send("PUT", f"/{bucket}", body, query="versioning=")

    def send(self, method: str, path: str, data: bytes = b"", query: str = "") -> HTTPResponse:
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        digest = hashlib.sha256(data).hexdigest()
        host = urlsplit(self.endpoint).netloc
        headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": now}
        names = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{digest}"
        scope = f"{now[:8]}/{self.region}/s3/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        key = f"AWS4{self.secret_key}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        credential = f"AWS4-HMAC-SHA256 Credential={self.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        url = f"{self.endpoint}{path}{f'?{query}' if query else ''}"
        call = urllib.request.Request(
            url, data, {**headers, "Authorization": credential}, method=method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(call, timeout=500) as answer:
            answer.read()
            return answer  # type: ignore[no-any-return]
