"""A server of answers for tests, a process of its own: SGLang's interface or OpenAI's, and every way to fail.

What it answers depends on the ids of the prompt alone. Which requests it fails on, and how, is drawn by a seed.
"""

import argparse
import hashlib
import json
import random
import socket
import ssl
import struct
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

END = 2
TEXT = (
    "It has soft feathers and you will find it in the old barn Every day the owl turns its head to listen "
    "The lathe is a well known tool a heavy motor shapes table legs waits for fish to pass"
)
DATE = "Wed, 21 Oct 2015 07:28:00 GMT"
FAULTS = {  # status, more headers, body
    "500": (500, {}, "oops"),
    "502": (502, {}, "<html>\n<h1>Bad Gateway"),
    "503": (503, {}, '{"error": "loading"}'),
    "408": (408, {}, ""),
    "429": (429, {"Retry-After": "0.05"}, ""),
    "429, a date": (429, {"Retry-After": DATE}, "slow down"),
    "429, nonsense": (429, {"Retry-After": "nan soon"}, "slow down"),
    "504": (504, {"Retry-After": "-3"}, ""),
    "empty": (200, {}, ""),
    "html": (200, {}, "<!DOCTYPE html>\n<p>log in"),
    "a list": (200, {}, "[1, 2]"),
    "another shape": (200, {}, '{"object": "error", "message": "no"}'),
    "null": (200, {}, "null"),
}
SPOILT = ("another prompt", "no ids", "a text for ids", "ids that are none", "aborted", "not finished")
BROKEN = ("reset", "reset in the body", "closed", "hang", "half a JSON", "half a body")
WHOLE = ("in pieces", "slowly")
"""No faults: answers all the same."""


def answer_of(tokenizer: Tokenizer, prompt: list[int], most: int, seed: int | None) -> tuple[list[int], str]:
    """Ids and `stop` or `length`."""
    told = hashlib.sha256(json.dumps([prompt, seed]).encode()).digest()
    draw = random.Random(told)
    text = " ".join(draw.choices(TEXT.split(), k=draw.randint(2, 14)))
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, END]
    return ids[:most], "stop" if len(ids) <= most else "length"


def spoil(name: str, reply: dict[str, Any]) -> None:
    """Make an answer of either interface one that is none."""
    sglang = "meta_info" in reply
    told = reply["meta_info"] if sglang else reply["choices"][0]
    if name == "another prompt":
        (told if sglang else reply["usage"])["prompt_tokens"] += 1
    elif name == "aborted":
        told["finish_reason"] = {"type": "abort"} if sglang else "abort"
    elif name == "not finished":
        told["finish_reason"] = None
    else:
        bad = {"no ids": None, "a text for ids": "abc", "ids that are none": [-1]}[name]
        reply.update(output_ids=bad)
        told.update(token_ids=bad, text=7, message=None)


class Served(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", options.port), Handler)
        self.options = options
        self.tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
        self.lock = threading.Lock()
        self.draw = random.Random(options.seed)
        self.seen: dict[str, Any] = {"asked": 0, "at once": 0, "most at once": 0, "keys": [], "seeds": [], "faults": {}}
        self.answered = False

    def fault(self, *more: str) -> str:
        """How to fail on this request, of `more` too; the empty text is not at all."""
        with self.lock:
            if self.draw.random() >= self.options.faults:
                return ""
            name = self.draw.choice([*FAULTS, *SPOILT, *BROKEN, *WHOLE, *more])
            self.seen["faults"][name] = self.seen["faults"].get(name, 0) + 1
            return name

    def handle_error(self, *_: Any) -> None:
        """The client has gone: it is killed in tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Served

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, status: int, body: str | dict[str, Any], **headers: str) -> None:
        data = (json.dumps(body) if isinstance(body, dict) else body).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/seen":
            return self.send(200, self.server.seen)
        if self._keyless() or self._fails(self.server.fault(), {}):
            return None
        replies = getattr(self, f"_told_by_{self.server.options.kind}")()
        if self.path not in replies:
            return self.send(404, {"detail": "Not Found"})
        return self.send(200, replies[self.path])

    def _told_by_sglang(self) -> dict[str, Any]:
        return {"/server_info": {"version": "0.5.23", "model_path": "/models/tiny", "context_length": None}}

    def _told_by_vllm(self) -> dict[str, Any]:
        card = {"id": "tiny", "owned_by": "vllm", "max_model_len": self.server.options.context}
        return {"/v1/models": {"data": [card]}, "/version": {"version": "0.32.0"}}

    def _told_by_tensorrt(self) -> dict[str, Any]:
        return {"/v1/models": {"data": [{"id": "tiny", "owned_by": "tensorrt_llm"}]}, "/version": {"version": "1.2"}}

    def _told_by_ids(self) -> dict[str, Any]:
        return {"/v1/models": {"data": [{"id": "tiny"}]}}

    _told_by_text = _told_by_chat = _told_by_other = _told_by_ids

    def do_POST(self) -> None:
        served = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with served.lock:
            served.seen["asked"] += 1
            served.seen["at once"] += 1
            served.seen["most at once"] = max(served.seen["most at once"], served.seen["at once"])
            frozen = served.seen["asked"] > served.options.freeze
        try:
            time.sleep(60 if frozen else served.options.delay)
            if not self._keyless():
                self._answer(body)
        finally:
            with served.lock:
                served.seen["at once"] -= 1

    def _keyless(self) -> bool:
        given = self.headers["Authorization"]
        if given not in self.server.seen["keys"]:
            self.server.seen["keys"].append(given)
        wanted = self.server.options.key
        if not wanted or given == f"Bearer {wanted}":
            return False
        self.send(401, {"error": f"{given} is no key"})
        return True

    def _answer(self, body: dict[str, Any]) -> None:
        served, kind = self.server, self.server.options.kind
        prompt = self._prompt(body, kind)
        if prompt is None:
            return self.send(400, {"error": "this form is not known"})
        text = served.tokenizer.decode(prompt)
        for status in (400, 403, 500):
            if f"poison {status}" in text:
                return self.send(status, {"error": "poison"})
        sampling = body.get("sampling_params", body)
        seed = sampling.get("sampling_seed", sampling.get("seed"))
        with served.lock:
            served.seen["seeds"].append(seed)
        most = sampling.get("max_new_tokens", sampling.get("max_tokens"))
        ids, finish = answer_of(served.tokenizer, prompt, most, seed)
        reply = self._sglang(prompt, ids, finish) if kind == "sglang" else self._openai(prompt, ids, finish, body)
        name = served.fault(*(["404"] if served.answered else []))
        if name in SPOILT:
            spoil(name, reply)
        if not self._fails(name, reply):
            served.answered = True
            self.send(200, reply)
        return None

    def _prompt(self, body: dict[str, Any], kind: str) -> list[int] | None:
        known = {"sglang": "/generate", "chat": "/v1/chat/completions"}.get(kind, "/v1/completions")
        ours = {"return_token_ids", "detokenize", "top_k", "stop_token_ids"} & body.keys()
        strict = {"tensorrt": {"return_token_ids"}, "ids": ours, "text": ours}.get(kind, set())
        if self.path != known or strict & body.keys():
            return None
        if kind == "sglang":
            return body["input_ids"]
        if kind == "chat":
            parts = [f"<|start|>{each['role']}\n{each['content']}<|end|>\n" for each in body["messages"]]
            given = "".join(parts) + "<|start|>assistant\n"
        else:
            given = body["prompt"]
        if isinstance(given, str):
            return self.server.tokenizer.encode(given, add_special_tokens=False).ids
        return None if kind == "text" else given

    def _sglang(self, prompt: list[int], ids: list[int], finish: str) -> dict[str, Any]:
        reason = {"type": finish, **({"matched": END} if finish == "stop" else {"length": len(ids)})}
        meta = {"finish_reason": reason, "prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        text = self.server.tokenizer.decode(ids, skip_special_tokens=False)
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _openai(self, prompt: list[int], ids: list[int], finish: str, body: dict[str, Any]) -> dict[str, Any]:
        kind = self.server.options.kind
        text = self.server.tokenizer.decode([number + 1 for number in ids] if kind == "other" else ids)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "stop_reason": None, "text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        if body.get("detokenize") is False:
            choice |= {"token_ids": [number for number in ids if number != END], "text": ""}
        if kind == "chat":
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return {"choices": [choice], "usage": usage}

    def _fails(self, name: str, reply: dict[str, Any]) -> bool:
        """Fail in the way of that name, or answer in an unusual one; False if there is nothing to do."""
        data = json.dumps(reply).encode()
        if name in FAULTS:
            status, headers, body = FAULTS[name]
            self.send(status, body, **headers)
        elif name == "404":
            self.send(404, "404 page not found")
        elif name in BROKEN:
            self.close_connection = True
            if name == "hang":
                time.sleep(self.server.options.hang)
            if name in ("half a body", "reset in the body"):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + data[: len(data) // 2])
            if name == "half a JSON":
                self.send(200, data[: len(data) // 2].decode(errors="ignore"))
            if name.startswith("reset"):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
        elif name == "in pieces" and reply:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            for piece in (data[:9], data[9:], b""):
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        elif name == "slowly" and reply:
            self.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode())
            for place in range(0, len(data), 1 + len(data) // 4):
                self.wfile.write(data[place : place + 1 + len(data) // 4])
                time.sleep(0.1)
        else:
            return False
        return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--kind", default="sglang")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--faults", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--freeze", type=int, default=10**9, help="requests after which it hangs")
    parser.add_argument("--hang", type=float, default=2.0)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--key")
    parser.add_argument("--certificate")
    options = parser.parse_args()
    server = Served(options)
    if options.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    print(server.server_address[1], flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
