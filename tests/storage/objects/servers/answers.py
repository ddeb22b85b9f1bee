"""Handlers of small HTTP servers that imitate a service."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from http.server import BaseHTTPRequestHandler


class JsonHandler(BaseHTTPRequestHandler, ABC):
    """Answers GET requests with JSON, and logs none."""

    @abstractmethod
    def answer(self) -> object:
        """What to answer."""

    def do_GET(self) -> None:
        """Send the answer."""
        body = json.dumps(self.answer()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing."""
