"""HTTP to a server: JSON replies and streams of events. Whatever else comes back is a `ReplyError`."""

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import requests
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError

MOST_CLIENTS = 1024
CONNECT_SECONDS = 5.0
PIECE = 1 << 16
ALIVE_SECONDS = 60
_BROKEN = (requests.RequestException, HTTPError, OSError, ValueError)  # ValueError: an address that is none


class ReplyError(Exception):
    """What came back in place of a reply."""

    def __init__(self, what: str, found: object, status: int | None = None, retry_after: float | None = None) -> None:
        """`what` names the fault, `found` what was there; `status` is that of HTTP, if it is no success.

        `retry_after`: seconds that the server asks to wait.
        """
        super().__init__(what, found)
        self.what, self.found, self.status, self.retry_after = what, str(found)[:300], status, retry_after


class Client:
    """Requests to one server, from any number of threads."""

    def __init__(self, base: str, seconds: float, key: str | None = None, environment: bool = False) -> None:
        """`base` is its URL; `seconds` the longest wait for the next piece of a reply; `key` is sent as a bearer.

        With `environment` its proxies and certificates count, of a server on this machine the certificates alone.
        """
        self.base, self.seconds = base.rstrip("/"), seconds
        self._session = requests.Session()
        here = re.match(r"https?://([^/@]*@)?(localhost|127\.0\.0\.1|\[::1\])([:/]|$)", self.base) is not None
        self._session.trust_env = environment and not here
        if environment and here:
            bundle = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
            self._session.verify = bundle or True
        if key:
            self._session.auth = _Bearer(key)  # no header: one of ~/.netrc would replace it
        self._session.headers["Accept-Encoding"] = "identity"  # a gateway that compresses also holds events back
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, _Adapter(pool_maxsize=MOST_CLIENTS))

    def get(self, path: str, seconds: float | None = None) -> bytes:
        """The body of a reply, waited for `seconds` at most."""
        return self._ask("GET", path, None, seconds or self.seconds).content

    def post(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The body of the reply to `body`."""
        return self._ask("POST", path, body, self.seconds).content

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed reply, each with `meta_info`, up to `[DONE]`."""
        whole, last, text = False, time.monotonic(), ""
        reply = self._ask("POST", path, body, self.seconds, stream=True)
        try:
            for line in _lines(reply):
                text = line.decode(errors="replace").strip().removeprefix("data:").strip()
                if not text or text.startswith((":", "event:", "id:", "retry:")):  # a sign of life is no piece
                    if time.monotonic() - last > self.seconds:
                        raise ReplyError("The server broke off an answer.", f"timed out: no event, {text!r}")
                    continue
                last, whole = time.monotonic(), whole or text == "[DONE]"
                if not whole:
                    yield _event(text)
        except _BROKEN as error:
            raise ReplyError("The server broke off an answer.", _reason(error)) from error
        finally:
            reply.close()
        if not whole:
            raise ReplyError(
                "The server broke off an answer.", f"the stream ended before [DONE]{text and ', with '}{text}"
            )

    def close(self) -> None:
        """Close the connections; a later request opens one again."""
        self._session.close()

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, stream: bool = False
    ) -> requests.Response:
        timeout = (min(CONNECT_SECONDS, seconds), seconds)
        try:
            reply = self._session.request(method, self.base + path, json=body, timeout=timeout, stream=stream)
            status = reply.status_code
            told = "" if 200 <= status < 300 else first_line(reply.content)
        except _BROKEN as error:
            raise ReplyError("The server did not answer.", f"{path}: {_reason(error)}") from error
        if told:
            pause = _seconds(reply.headers.get("Retry-After"))
            raise ReplyError("The server refused a request.", f"{path}: HTTP {status}: {told}", status, pause)
        return reply


class _Adapter(requests.adapters.HTTPAdapter):
    """Connections that are seen to be alive: a gateway forgets one that is still for minutes, and tells nobody."""

    def init_poolmanager(self, *given: Any, **named: Any) -> Any:
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        for name, value in {"TCP_KEEPIDLE": ALIVE_SECONDS, "TCP_KEEPINTVL": ALIVE_SECONDS, "TCP_KEEPCNT": 4}.items():
            options += [(socket.IPPROTO_TCP, getattr(socket, name), value)] if hasattr(socket, name) else []
        options += HTTPConnection.default_socket_options
        return super().init_poolmanager(*given, **named, socket_options=options)


class _Bearer(requests.auth.AuthBase):
    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._key}"
        return request


def _reason(error: BaseException) -> str:
    """What is behind an error: libraries put it into one of their own, and that into another."""
    behind = [each for each in (getattr(error, "reason", None), *error.args) if isinstance(each, BaseException)]
    return _reason(behind[0]) if behind else f"{type(error).__name__}: {error}"


def _seconds(told: str | None) -> float | None:
    """What `Retry-After` says, if it is a number; a date is not waited for."""
    try:
        return max(0.0, float(told)) if told else None
    except ValueError:
        return None


def _lines(reply: requests.Response) -> Iterator[bytes]:
    """Lines as they arrive, chunked or not; `iter_lines` of requests holds back a reply that is not."""
    left = b""
    while part := reply.raw.read1(PIECE):
        *lines, left = (left + part).split(b"\n")
        yield from lines
    yield left


def first_line(body: bytes) -> str:
    """The first line of a body that is not empty."""
    return next(iter(body.decode(errors="replace").strip().splitlines()), "") or "(no body)"


def parsed(body: bytes | str, where: str) -> Any:
    """The JSON in a body.

    Raises:
        ReplyError: it is none.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raw = body.encode() if isinstance(body, str) else body
        raise ReplyError("The server sent what is not JSON.", f"{where}: {first_line(raw)}") from error


def _event(text: str) -> dict[str, Any]:
    event = parsed(text, "an event")
    if not isinstance(event, dict) or not isinstance(event.get("meta_info"), dict):
        raise ReplyError("The server sent an error.", text)
    return event
