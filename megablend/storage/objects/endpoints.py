"""Find mistakes in the setting of an endpoint, after a request to it found nothing. The endpoint
may contain the bucket, or be the address of a web console."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.parse import urlsplit

from megablend.storage.objects.address import Address

_PAGE_BYTES = 1 << 10
"""The number of bytes at the start of a response that are searched for tags of a web page."""
_PAGE = re.compile(r"<!doctype html|<html", re.IGNORECASE)


def find_bucket_in(endpoint: str, address: Address, *, path_style: bool) -> str | None:
    """Return the endpoint without the bucket at its beginning or end; None if the bucket is in
    neither place."""
    url = urlsplit(endpoint)
    path = url.path.rstrip("/")
    if path.endswith(f"/{address.bucket}"):
        return f"{url.scheme}://{url.netloc}{path[: -len(address.bucket) - 1]}"
    if url.netloc.startswith(f"{address.bucket}."):
        style = "" if path_style else " and `path_style: false`"
        return f"{url.scheme}://{url.netloc[len(address.bucket) + 1 :]}{path}{style}"
    return None


async def is_page(server: Any, key: str, seconds: float) -> bool:
    """Return whether a server responds with a web page, as the web consoles of stores do. Such
    consoles have a port of their own.

    Args:
        server: obstore's store of the endpoint as a web server.
        key: the key that is requested.
        seconds: the time to wait for a response.
    """
    try:
        return await asyncio.wait_for(_is_page(server, key), seconds)
    except Exception as error:  # raised by the client; the message ends with the server's response
        return _PAGE.search(str(error)) is not None


async def _is_page(server: Any, key: str) -> bool:
    import obstore

    response = await obstore.get_async(server, key)
    if str(response.attributes.get("Content-Type", "")).startswith("text/html"):
        return True
    async for part in response.stream(min_chunk_size=_PAGE_BYTES):
        return _PAGE.search(bytes(part[:_PAGE_BYTES]).decode("latin-1")) is not None
    return False
