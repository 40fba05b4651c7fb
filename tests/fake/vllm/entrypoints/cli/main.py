"""`python -m vllm.entrypoints.cli.main serve WEIGHTS ...`: states that are made up, handed over as the real one does.

`FAKE` names the fault of requests `FAKE_FROM` (0; request 0 is the probe) and after, at most `FAKE_TIMES` times.
"""

import argparse
import fcntl
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from made_states import made, normed
from safetensors import safe_open
from safetensors.torch import save

TOP = 64


class Served(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__((options.host, options.port), Handler)
        self.options = options
        speculation, transfer = json.loads(options.speculative_config), json.loads(options.kv_transfer_config)
        self.layers = speculation["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        self.folder = Path(transfer["kv_connector_extra_config"]["shared_storage_path"])
        self.config = json.loads((options.weights / "config.json").read_text())
        with safe_open(options.weights / "model.safetensors", "pt") as file:
            self.norm, self.head = file.get_tensor("model.norm.weight"), file.get_tensor("lm_head.weight")
        self.lock, self.asked, self.faults, self.most = threading.Lock(), 0, 0, 0

    def fault(self) -> tuple[int, str]:
        """The number of this request, and how it fails."""
        with self.lock:
            number, self.asked = self.asked, self.asked + 1
            if number < int(os.environ.get("FAKE_FROM", "0")) or self.faults >= int(
                os.environ.get("FAKE_TIMES", "999")
            ):
                return number, ""
            self.faults += 1
            return number, os.environ.get("FAKE", "")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Served

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        options = self.server.options
        card = {"id": "served", "root": str(options.weights), "max_model_len": options.max_model_len}
        replies = {
            "/health": {},
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [card]},
            "/seen": {"asked": self.server.asked, "most": self.server.most, "command": sys.argv},
        }
        self.send(replies.get(self.path, {}), 200 if self.path in replies else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number, fault = self.server.fault()
        if fault == "die":
            print("RuntimeError: the worker is gone", flush=True)
            os._exit(3)
        if fault in ("400", "500"):
            return self.send({"error": "told to"}, int(fault))
        if body.get("prompt_logprobs", 0) > self.server.options.max_logprobs:
            return self.send({"error": "Requested prompt logprobs of 64, greater than max allowed"}, 400)
        path = self.server.folder / f"cmpl-{os.getpid()}-{number}.safetensors"
        reply = self._answer(body, fault, path)
        return self.send(reply)

    def _answer(self, body: dict[str, Any], fault: str, path: Path) -> dict[str, Any]:
        served, ids = self.server, body["prompt"]
        layers, hidden = served.layers, served.config["hidden_size"]
        states = made(ids, layers, hidden)
        final = normed(states[:, -1], served.norm, served.config["rms_norm_eps"])
        logits = final @ served.head.T
        token = int(logits[-1].argmax())
        if fault == "another document":
            states = made(ids, layers, hidden, seed=1)
        if fault == "a layer less":
            states = states[:, :-1]
        if fault == "prefix cached":
            states = states[3:]
        if fault == "half precision":
            states = states.half()
        if fault == "nan":
            states[len(ids) // 2, 1, 0] = float("nan")
        told = [number + 1 for number in ids] if fault == "other tokens" else ids
        tensors = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(told)}
        self._write(path, save(tensors), fault)
        choice: dict[str, Any] = {"index": 0, "text": "", "token_ids": [token], "prompt_token_ids": ids}
        if "prompt_logprobs" in body:
            laws = [row.log_softmax(-1).topk(TOP) for row in logits]
            rows = [dict(zip(law.indices.tolist(), law.values.tolist(), strict=True)) for law in laws]
            told_rows = [{str(each): {"logprob": value} for each, value in row.items()} for row in rows]
            for row, following in zip(told_rows, ids[1:], strict=False):
                row.setdefault(str(following), {"logprob": -30.0})
            choice["prompt_logprobs"] = [None, *told_rows[:-1]]
            choice["logprobs"] = {"top_logprobs": [{f"token_id:{each}": value for each, value in rows[-1].items()}]}
        place = None if fault == "no states" else {"hidden_states_path": str(path)}
        return {"choices": [choice], "kv_transfer_params": place}

    def _write(self, path: Path, data: bytes, fault: str) -> None:
        """The lock is held before the reply and let go when the file is whole."""
        served = self.server
        if fault == "unlocked":
            path.write_bytes(data)
            return
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            if fault == "late":
                time.sleep(0.3)
                path.write_bytes(data[: len(data) // 2])
                time.sleep(0.2)
            if fault != "no file":
                path.write_bytes(data[: len(data) // 2] if fault == "half a file" else data)
            with served.lock:
                served.most = max(served.most, len(list(served.folder.glob("*.safetensors"))))
            os.close(lock)

        threading.Thread(target=write).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("weights", type=Path)
    for name in ("host", "speculative-config", "kv-transfer-config", "dtype"):
        parser.add_argument(f"--{name}")
    for name in ("port", "max-model-len", "max-logprobs", "max-num-seqs", "max-num-batched-tokens"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("no-enable-prefix-caching", "no-enable-chunked-prefill"):
        parser.add_argument(f"--{name}", action="store_true", required=True)
    served = Served(parser.parse_args())
    if os.environ.get("FAKE") == "never ready":
        raise ValueError("architecture LlamaForCausalLM is not supported")
    served.serve_forever()


if __name__ == "__main__":
    main()
