"""Handlers of small HTTP servers that imitate a service."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler


class JsonHandler(BaseHTTPRequestHandler):
    """Answers GET requests with JSON, and logs none."""

    def answer(self) -> object:
        """What to answer."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Send the answer."""
        body = json.dumps(self.answer()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing."""
