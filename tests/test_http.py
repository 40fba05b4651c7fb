"""Whatever a server, a gateway or the network gives in place of a reply is one clear error (faults of kind 1.18)."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sglang import engine, left, mark

from redraft.acceptance import Steps
from redraft.engines.engine import serving
from redraft.engines.reply import read_answer
from redraft.engines.sglang import SGLangEngine
from redraft.frame.errors import RedraftError
from redraft.frame.http import Client, ReplyError, parsed

__all__ = ["mark"]  # a fixture
RESET = b"reset"
HANG = b"hang"
SILENT = b"keeps the connection busy"
INFO = {"version": "0.5.23", "dtype": "float32", "speculative_algorithm": None, "internal_states": [{}]}
DONE = b"data: [DONE]\n\n"


def http(body: bytes | str | dict[str, Any], status: str = "200 OK", kind: str = "application/json") -> bytes:
    data = json.dumps(body).encode() if isinstance(body, dict) else body.encode() if isinstance(body, str) else body
    return (
        f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )


def event(ids: Any, tokens: Any, **meta: Any) -> bytes:
    told = {"finish_reason": None, "completion_tokens": tokens, **meta}
    return f"data: {json.dumps({'output_ids': ids, 'meta_info': told})}\n\n".encode()


WHOLE = event([7], 1) + event([7, 8], 2, finish_reason={"type": "length"}) + DONE


@contextmanager
def gateway(replies: dict[str, bytes]) -> Iterator[str]:
    """A server that answers each path with these very bytes, and its URL."""
    known = {"/health_generate": http(""), "/server_info": http(INFO), "/flush_cache": http(""), **replies}
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=reply, args=[connection], daemon=True).start()

        def reply(connection: socket.socket) -> None:
            with connection:
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += connection.recv(65536)
                head, _, body = asked.partition(b"\r\n\r\n")
                size = next((int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"Content-Length:"), 0)
                while len(body) < size:
                    body += connection.recv(65536)
                answer = known[head.split()[1].decode()]
                if answer == HANG:
                    time.sleep(30)
                elif answer == SILENT:
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    with suppress(OSError):  # until the client has enough
                        while True:
                            connection.sendall(b": keep-alive\n\n")
                            time.sleep(0.1)
                elif answer == RESET:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def joined(folder: Path, url: str, **changes: Any) -> SGLangEngine:
    return engine(folder, baseline_url=url, **{"request_seconds": 1, "ready_seconds": 2, **changes})


ODDITIES = {
    "unauthorised": (http('{"error": "Unauthorized"}', "401 Unauthorized"), 'HTTP 401: {"error": "Unauthorized"}'),
    "forbidden": (http("", "403 Forbidden"), r"HTTP 403: \(no body\).*asks for a key"),
    "not found": (http("404 page not found\nmore", "404 Not Found"), "HTTP 404: 404 page not found$"),
    "a gateway": (http("<html>\n<body>Bad Gateway", "502 Bad Gateway", "text/html"), "HTTP 502: <html>$"),
    "a page of HTML": (http("<!DOCTYPE html>\n<p>log in", kind="text/html"), "not JSON.*<!DOCTYPE html>$"),
    "text": (http("ok"), "not JSON.*ok"),
    "not UTF-8": (http(b"\xff\xfe\x00"), "not JSON"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "SSH-2.0|BadStatusLine"),
    "nothing": (b"", "RemoteDisconnected"),
    "a reset": (RESET, "[Rr]eset"),
    "a hang": (HANG, "timed out|[Tt]imeout"),
    "half a body": (http("x" * 900)[:-800], "Broken|IncompleteRead|not JSON"),
}


@pytest.mark.parametrize("path", ["/server_info", "/generate", "/health_generate"])
@pytest.mark.parametrize("oddity", list(ODDITIES))
def test_what_is_no_reply_is_one_error(oddity: str, path: str, tmp_path: Path) -> None:
    reply, told = ODDITIES[oddity]
    replies = {path: reply, "/get_server_info": reply, "/health": reply}
    if path == "/health_generate" and b"HTTP/1.1 200 OK" in reply and "half" not in oddity:
        return  # it is up
    with (
        gateway(replies) as url,
        pytest.raises(RedraftError, match="(?sm)" + told),
        serving(joined(tmp_path, url)) as it,
    ):
        it.generate([5], 2)


EVENTS: dict[str, tuple[bytes, str]] = {
    "no event": (b"", r"ended before \[DONE\]"),
    "done alone": (DONE, "not a whole answer"),
    "cut off": (event([7], 1), r"ended before \[DONE\]"),
    "an error": (b'data: {"error": {"message": "too long"}}\n\n', "too long"),
    "no object": (b"data: [1]\n\n", "sent an error"),
    "meta_info of nothing": (b'data: {"meta_info": null}\n\n', "sent an error"),
    "ids that are text": (event("abc", 3, finish_reason={"type": "stop"}) + DONE, "not a whole answer"),
    "tokens in words": (event([7], "one", finish_reason={"type": "stop"}) + DONE, "not a whole answer"),
    "a finish in words": (event([7], 1, finish_reason="length") + DONE, "not a whole answer"),
    "no matched token": (event([7], 2, finish_reason={"type": "stop"}) + DONE, "not a whole answer"),
    "a matched word": (event([7], 2, finish_reason={"type": "stop", "matched": "</s>"}) + DONE, "not a whole answer"),
    "aborted": (event([7], 1, finish_reason={"type": "abort"}) + DONE, "not a whole answer"),
    "cached in words": (
        event([7], 1, finish_reason={"type": "length"}, cached_tokens="all") + DONE,
        "not a whole answer",
    ),
}


@pytest.mark.parametrize("oddity", EVENTS)
def test_a_stream_that_is_no_answer_is_one_error(oddity: str, tmp_path: Path) -> None:
    body, told = EVENTS[oddity]
    with (
        gateway({"/generate": http(body)}) as url,
        serving(joined(tmp_path, url)) as server,
        pytest.raises(RedraftError, match=told),
    ):
        server.generate([5], 2)


def test_signs_of_life_of_a_gateway_are_no_events(tmp_path: Path) -> None:
    body = b": keep-alive\n\nevent: message\nid: 4\ndata:\n\n" + WHOLE.replace(DONE, b": ping\nretry: 9\n\n" + DONE)
    with gateway({"/generate": http(body)}) as url, serving(joined(tmp_path, url)) as server:
        assert server.generate([5], 2).ids == [7, 8]


def test_signs_of_life_alone_are_no_answer(tmp_path: Path) -> None:
    """A gateway that lives although its server hangs: `request_seconds` is the longest wait for a piece."""
    with gateway({"/generate": SILENT}) as url, serving(joined(tmp_path, url)) as server:
        began = time.monotonic()
        with pytest.raises(RedraftError, match="timed out"):
            server.generate([5], 2)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("events", "ids", "decoded"),
    [
        (event([], 0, finish_reason={"type": "length"}), [], 0),
        (event([7], 1, finish_reason={"type": "length"}), [7], 0),
        (event([], 1, finish_reason={"type": "stop", "matched": 2}), [2], 0),
        (event([7], 1) + event([8], 2, finish_reason={"type": "length"}), [7, 8], 1),  # what is new alone
    ],
)
def test_answers_of_no_token_and_of_one(events: bytes, ids: list[int], decoded: int, tmp_path: Path) -> None:
    with gateway({"/generate": http(events + DONE)}) as url, serving(joined(tmp_path, url)) as server:
        found = server.generate([5], 2)
    assert (found.ids, found.decoded, found.steps, found.prompt_tokens) == (ids, decoded, Steps(), 1)
    assert 0 < found.first_token_seconds <= found.seconds


def test_a_flush_that_is_refused_for_good_is_not_tried_again(tmp_path: Path) -> None:
    """Only 400 says that the last answer is not put away yet."""
    with gateway({"/flush_cache": http("no", "404 Not Found")}) as url, serving(joined(tmp_path, url)) as server:
        began = time.monotonic()
        with pytest.raises(RedraftError, match="HTTP 404: no"):
            server.flush()
    assert time.monotonic() - began < 2


# --- /server_info


@pytest.mark.parametrize(
    "info",
    [
        {"speculative_algorithm": None},
        {**INFO, "internal_states": None},
        {**INFO, "internal_states": []},
        {**INFO, "internal_states": [None]},
        {**INFO, "internal_states": {"0": {}}},
        {**INFO, "effective_max_running_requests_per_dp": "8", "dp_size": "2", "memory_usage": {"weight": None}},
    ],
)
def test_settings_that_are_not_told_are_unknown(info: dict[str, Any], tmp_path: Path) -> None:
    with gateway({"/server_info": http(info)}) as url, serving(joined(tmp_path, url)) as server:
        assert server.describe()["joined"] == url
        assert server.describe().get("version") in (None, "0.5.23")
        assert server.memory_gib() is None
        assert server.fingerprint()


def test_a_gateway_does_not_pass_for_a_server_without_speculation(tmp_path: Path) -> None:
    with (
        gateway({"/server_info": http({"version": "0.5.23"})}) as url,
        pytest.raises(RedraftError, match="does not tell whether it speculates"),
    ):
        joined(tmp_path, url).start()


names = st.sampled_from(["version", "internal_states", "speculative_algorithm", "dp_size", "x"])
plain = st.none() | st.booleans() | st.integers() | st.text()


@settings(max_examples=40, deadline=None)
@given(st.recursive(plain, lambda part: st.lists(part) | st.dictionaries(names, part)))
def test_any_settings_are_read_or_one_error(tmp_path_factory: pytest.TempPathFactory, info: Any) -> None:
    with gateway({"/server_info": http(json.dumps(info))}) as url, suppress(RedraftError):
        server = joined(tmp_path_factory.mktemp("any"), url)
        server.start()
        assert server.describe()["joined"] == url


finishes = st.integers(0, 3) | st.text() | st.fixed_dictionaries({"type": st.sampled_from(["stop", "length", "x"])})
metas = st.dictionaries(st.sampled_from(["completion_tokens", "finish_reason", "cached_tokens"]), finishes)
events = st.dictionaries(
    st.sampled_from(["output_ids", "meta_info"]), st.none() | st.lists(st.integers()) | st.text() | metas
)


@given(st.lists(events, max_size=3))
def test_any_events_are_an_answer_or_no_whole_one(found: list[dict[str, Any]]) -> None:
    with suppress(ReplyError):
        answer, _ = read_answer(iter(found), lambda: 1.0)
        assert all(isinstance(token, int) for token in answer.ids)
        assert answer.finish in ("stop", "length")


@given(st.binary(max_size=60))
def test_any_body_is_json_or_an_error_of_one_line(body: bytes) -> None:
    told = "one line"
    try:
        parsed(body, "here")
    except ReplyError as error:
        told = error.found
    assert len(told.splitlines()) == 1


# --- waiting


def test_a_health_request_that_is_never_answered_ends_with_the_wait(tmp_path: Path) -> None:
    """Case C44: `ready_seconds` holds although one request may take 30 s."""
    with gateway({"/health_generate": HANG}) as url:
        began = time.monotonic()
        with pytest.raises(RedraftError, match="does not answer"):
            joined(tmp_path, url, ready_seconds=1).start()
        assert time.monotonic() - began < 5


def test_a_launched_server_that_never_answers_ends_with_the_wait(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", "mute")
    began = time.monotonic()
    with pytest.raises(RedraftError, match="did not become ready"):
        engine(tmp_path, ready_seconds=3).start()
    assert time.monotonic() - began < 20  # and not the 30 s of a health request
    assert left(mark) == []


@pytest.mark.parametrize(
    "base", ["127.0.0.1:9", "http://", "ftp://x", "http://[::1", "http://a..b:1", "http://x:99999"]
)
def test_an_address_that_is_none_is_one_error(base: str) -> None:
    with pytest.raises(ReplyError):
        Client(base, 1).get("/health")
