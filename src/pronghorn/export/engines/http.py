"""Requests to a server that speaks JSON, with every failure as an error that says what to do."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pronghorn.errors import ConfigError, ServerError
from pronghorn.export.engine import NotServed, Refused
from pronghorn.text import clip

MOST_BYTES = 2**28
"""Of an answer; log-probabilities of a long text take some megabytes."""


class _NoRedirects(HTTPRedirectHandler):
    """Follow no redirect: it would hand the key to another server."""

    def redirect_request(self, *arguments: Any) -> None:
        """Return no request, which makes the redirect an error."""


class Server:
    """An address, and the key for it, which no error and no repr shows."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 60.0) -> None:
        """Take an address with or without /v1 at its end.

        Raises:
            ConfigError: no address of a server.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            valid = False
        if not valid or parts.username:
            raise ConfigError(f"{url!r} is not an address of a server", "give e.g. http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self.timeout = timeout
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opener = build_opener(_NoRedirects)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the JSON of a path, got or, with a body, posted.

        Raises:
            NotServed: the server doesn't know the path.
            Refused: the server refuses the body (400, 422), with its own words.
            ServerError: anything else that went wrong.
        """
        with self._open(path, body) as response:
            data = response.read(MOST_BYTES + 1)
            kind = response.headers.get_content_type()
        if len(data) > MOST_BYTES:
            raise ServerError(
                f"{self.url}{path} answers with more than {MOST_BYTES:,} bytes", "is it the right server?"
            )
        return self._parsed(path, data.decode("utf-8", "replace"), kind)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """Send JSON and yield the events of the answer, each JSON; the whole answer where it is not a stream.

        Raises:
            ServerError: the stream ended without saying so; Python's client doesn't tell a connection that was cut.
        """
        with self._open(path, {**body, "stream": True}) as response:
            if (kind := response.headers.get_content_type()) != "text/event-stream":
                yield self._parsed(path, response.read(MOST_BYTES).decode("utf-8", "replace"), kind)
                return
            for line in response:
                data = line.decode("utf-8", "replace").strip()
                if data.startswith("data:") and data.removeprefix("data:").strip() == "[DONE]":
                    return
                if data.startswith("data:"):
                    yield self._parsed(path, data.removeprefix("data:"), "")
        raise ServerError(f"{self.url}{path} ended in the middle of an answer", "look at the server's log")

    def _parsed(self, path: str, text: str, kind: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerError(
                f"{self.url}{path} is not JSON but {kind or 'text'} ({clip(text.strip(), 60)!r})",
                "give the address of an OpenAI-compatible server, e.g. http://127.0.0.1:8000",
            ) from error

    @contextmanager
    def _open(self, path: str, body: dict[str, Any] | None) -> Iterator[Any]:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data=data, headers=self._headers)
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                yield response
        except HTTPError as error:
            with error:
                raise self._failed(path, error.code, _message(error)) from None
        except (TimeoutError, URLError, HTTPException, OSError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, TimeoutError):
                raise ServerError(
                    f"{self.url}{path} gave no answer within {self.timeout:g} s",
                    "look at the server's log, or give it more time (--timeout)",
                ) from None
            if isinstance(reason, socket.gaierror):
                raise ServerError(f"{self.url}: there is no such host", "fix the address") from None
            what = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise ServerError(
                f"nothing answers at {self.url} ({what})", "start the server, or fix the address and its port"
            ) from None

    def _failed(self, path: str, status: int, message: str) -> Exception:
        """Return the error of a status."""
        at = f"{self.url}{path}"
        said = f": {message}" if message else ""
        if status in (404, 405, 501):
            return NotServed(f"the server has no {path} ({status}{said})", "use a server that has it")
        if status in (400, 413, 422):
            return Refused(f"the server refuses ({status}{said})", "look at the server's log")
        if status in (401, 403):
            return ServerError(f"{at} denies access ({status})", "give its key in the environment: PRONGHORN_API_KEY")
        if 300 <= status < 400:
            return ServerError(f"{at} leads elsewhere ({status})", "give the server's own address, with http or https")
        if status == 429:
            return ServerError(f"{at} has too many requests ({status})", "wait, and run the command again")
        return ServerError(f"{at} fails ({status}{said})", "look at the server's log")


def _message(error: HTTPError) -> str:
    """Return what a failed request's body says, shortened."""
    try:
        text = error.read(10_000).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return ""
    try:
        table = json.loads(text)
        inner = table.get("error", table.get("message", table.get("detail", text)))
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        pass
    return clip(" ".join(text.split()), 200)
