"""A server that answers as SGLang 0.5.23 does, or fails as FAKE says: what the tests of faults start instead of it.

Answers count up from the last prompt token; a speculating server accepts 1 draft in every verify step.
"""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAKE = os.environ.get("FAKE", "")
WORDS = [*sys.argv[1:], "--"]
FLAGS: dict[str, Any] = {
    word.removeprefix("--").replace("-", "_"): True
    if value.startswith("--")
    else int(value)
    if value.isdecimal()
    else value
    for word, value in itertools.pairwise(WORDS)
    if word.startswith("--")
}
STEPS = FLAGS.get("speculative_num_steps", 0)
DEATHS = {
    "unknown model": "ValueError: The checkpoint you are trying to load has model type `odd` but Transformers does not "
    "recognize this architecture.\nTraceback (most recent call last):\nRuntimeError: a child process died",
    "backend": "ValueError: EAGLE is not supported in attention backend torch_native\nRuntimeError: died",
    "memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\nKilled",
    "weights": "AssertionError: Attempted to load weight (torch.Size([8, 8])) into parameter (torch.Size([8, 4]))\nbye",
    "context": "ValueError: Warning: Target model's context_length (8192) is greater than the derived context_length "
    "(2048).\nbye",
}
TOKEN_SECONDS = float(os.environ.get("FAKE_TOKEN_SECONDS", "0"))
"""Of plain decoding; a cycle of 2 tokens takes FAKE_CYCLE of it, and a seen prompt a fifth, if FAKE says cache."""
CYCLE = float(os.environ.get("FAKE_CYCLE", "1"))
served = 0
busy: set[int] = set()
known: set[str] = set()
refused: list[int] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an event leaves when it is written

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path.startswith("/health"):
            if FAKE == "mute":
                time.sleep(3600)
            return self.reply(503 if FAKE == "never ready" else 200, b"")
        if self.path != "/server_info":
            return self.reply(404, b"")
        info: dict[str, Any] = {
            "version": "0.5.23",
            "dtype": "float32",
            "device": "cpu",
            **FLAGS,
        }
        info["dtype"] = os.environ.get("FAKE_DTYPE", info["dtype"])
        info.setdefault("speculative_algorithm", None)
        if FAKE == "corrected" and STEPS:
            info["speculative_num_steps"] = 2
        if FAKE == "restarts":
            info["startup_time"] = served
        if FAKE == "eagle" and STEPS:
            info["speculative_algorithm"] = "EAGLE"
        return self.reply(200, info)

    def do_POST(self) -> None:
        global served
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if self.path == "/flush_cache":
            refused.append(served)
            if FAKE == "busy" and refused.count(served) < 3:  # the last answer is not put away yet
                return self.reply(400, b"Flush cache failed.\n")
            if FAKE != "cache":  # one that cannot be emptied
                known.clear()
            return self.reply(200, b"Cache flushed.\n")
        served += 1
        if served > 2 and FAKE in ("dies", "hangs", "500", "malformed", "dropped", "sometimes 500"):
            if FAKE == "dies":
                print("Scheduler hit an exception: RuntimeError: CUDA error: illegal memory access\nbye", flush=True)
                os._exit(17)
            if FAKE == "hangs":
                print("hanging", flush=True)
                time.sleep(3600)
            if FAKE == "500":
                return self.reply(500, {"error": {"message": "internal"}})
            if FAKE == "sometimes 500" and served % 5 == 0:
                return self.reply(500, {"error": {"message": "internal"}})
            if FAKE == "malformed":
                return self.reply(200, b'data: {"meta_info": \n\n')
        if not body.get("stream"):
            pair = body.get("token_ids_logprob", [])
            rows = [[-0.5 - 0.25 * place, token, None] for place, token in enumerate(pair)]
            return self.reply(200, {"output_ids": [1], "meta_info": {"output_token_ids_logprobs": [rows]}})
        return self.answer(body["input_ids"], body["sampling_params"]["max_new_tokens"])

    def answer(self, prompt: list[int], tokens: int) -> None:
        tokens = min(tokens, 3) if FAKE == "short" else tokens
        ids = [prompt[-1] + 1 + place for place in range(tokens)]
        meta: dict[str, Any] = {"finish_reason": {"type": "length", "length": tokens}, "completion_tokens": tokens}
        seen = str(prompt) in known
        meta["cached_tokens"] = len(prompt) if seen else 0
        if FAKE == "cache":
            known.add(str(prompt))
        if FAKE == "changes the output" and STEPS and served > 2:
            ids[3] += 1
        rounds = tokens // 2
        if STEPS and not (FAKE == "no counters" and served > 2):
            histogram = [0, rounds] + [0] * (STEPS - 1) if FAKE != "accepts nothing" else [rounds, 0]
            meta |= {"spec_verify_ct": rounds, "spec_num_correct_drafts": histogram[1]}
            meta |= {"spec_correct_drafts_histogram": histogram}
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.start_late()
        self.chunk(json.dumps({"output_ids": ids[:1], "meta_info": {"finish_reason": None, "completion_tokens": 1}}))
        seconds = TOKEN_SECONDS * ((tokens - 1) / 2 * CYCLE if STEPS else tokens - 1)
        time.sleep(seconds / (5 if seen and FAKE == "cache" else 1))
        if FAKE == "dropped" and served > 2:
            self.close_connection = True  # without the end of the stream
            return
        self.chunk(json.dumps({"output_ids": ids, "meta_info": meta}))
        self.chunk("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, data: str) -> None:
        """One event of the stream."""
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))

    def start_late(self) -> None:
        """The first answer of so many clients at once takes 1.2 s more, if FAKE says slow first."""
        me = threading.get_ident()
        running.add(me)
        time.sleep(0.02)  # the other clients arrive
        if FAKE == "slow first" and len(running) not in busy:
            busy.add(len(running))
            time.sleep(1.2)
        running.discard(me)


running: set[int] = set()


def main() -> None:
    print("loading", flush=True)
    if FAKE in DEATHS:
        print(DEATHS[FAKE], flush=True)
        sys.exit(1)
    # a server has children that outlive it if only it is ended
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", str(FLAGS["port"])])
    ThreadingHTTPServer((FLAGS["host"], FLAGS["port"]), Handler).serve_forever()


if __name__ == "__main__":
    main()
