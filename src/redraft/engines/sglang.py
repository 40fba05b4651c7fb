"""The engine `sglang`: a real SGLang server, started here or joined, over its own HTTP interface.

Its counters and settings have other names from release to release (0.5.5 to 0.5.23): all of that is known here alone.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

import requests

from redraft.acceptance import Acceptance
from redraft.engines.engine import Generation, Margin
from redraft.engines.process import ServerProcess, free_port, require_port
from redraft.frame.errors import RedraftError
from redraft.frame.profile import EngineParams
from redraft.target.folder import weights_folder

OWN_FLAGS = {
    "model-path", "host", "port", "max-running-requests", "speculative-algorithm", "speculative-draft-model-path",
    "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens",
}  # fmt: skip
"""Flags that the engine decides; elsewhere in the profile they have names of their own."""
SHARED_SETTINGS = (
    "version", "model_path", "dtype", "quantization", "context_length", "max_running_requests", "tp_size", "dp_size",
    "pp_size", "attention_backend", "page_size", "disable_radix_cache", "chunked_prefill_size", "device",
)  # fmt: skip
"""Effective settings that are recorded of every server; `redraft.bench.machine.ALIKE` has those that must agree."""
SPECULATIVE_SETTINGS = (
    "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
    "speculative_attention_mode", "speculative_draft_attention_backend", "speculative_draft_model_path",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc", "mem_fraction_static",
)  # fmt: skip
MOST_CLIENTS = 1024
FLUSH_SECONDS = 10.0
ONE_TOKEN = {"temperature": 0, "max_new_tokens": 1}
CONNECT_SECONDS = 5.0
HEALTH_SECONDS = 30.0
"""Of one readiness request, which generates a token."""
DEATH_SECONDS = 1.0
"""A connection breaks a little before its process is gone."""


def installed_version(python: str) -> str:
    """The version of SGLang in the interpreter `python`.

    Raises:
        RedraftError: no such interpreter, or no SGLang in it.
    """
    command = [_interpreter(python), "-c", "from importlib.metadata import version; print(version('sglang'))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        reason = (done.stderr.strip().splitlines() or [""])[-1]
    except OSError as error:
        done, reason = None, str(error.strerror)
    if done is None or done.returncode:
        raise RedraftError(
            "There is no SGLang in the interpreter.",
            where=f"engine.python in the profile: {python}",
            found=reason,
            fix="give the interpreter of an environment that has it, or join a server by engine.url",
        )
    return done.stdout.strip()


def _interpreter(python: str) -> str:
    """Relative to the project, so that a change of directory does not matter; a bare name is looked up on PATH."""
    path = Path(python).expanduser()
    return str(path.absolute()) if "/" in python else python


def read_counters(meta: dict[str, Any], spec_steps: int, where: str) -> tuple[int, int, list[int] | None]:
    """Verify steps, right drafts and their histogram [K + 1] (None if untold) from a reply's `meta_info`.

    Names by release: docs/serving.md. Every verify step is counted in full, one that the answer's end cut included.

    Raises:
        RedraftError: counters missing, older than 0.5.5, or contradicting each other.
    """

    def first(*names: str) -> Any:
        return next((meta[name] for name in names if meta.get(name) is not None), None)

    steps = first("spec_verify_ct")
    right = first("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
    histogram = first("spec_correct_drafts_histogram", "spec_accept_histogram")
    if right is None and steps and (rate := first("spec_accept_rate")) is not None:
        right = round(rate * steps * spec_steps)  # 0.5.5
    if not isinstance(steps, int) or not isinstance(right, int):
        raise RedraftError(
            "The reply of a speculating server has no counters.",
            where=where,
            expected="spec_verify_ct and spec_num_correct_drafts, or their names in releases from 0.5.5 on",
            found=sorted(name for name in meta if name.startswith("spec_")) or "none",
            cause="the server does not speculate, or is older than 0.5.5; its accept length cannot be told",
        )
    told = None
    if histogram is not None:
        told = [*histogram, *[0] * (spec_steps + 1 - len(histogram))]
        sums = sum(told), sum(count * number for number, count in enumerate(told))
        if len(told) > spec_steps + 1 or sums != (steps, right):
            raise RedraftError(
                "The counters of the server contradict each other.",
                where=where,
                expected=f"{steps} verify steps, {right} right drafts, at most {spec_steps} a step",
                found=f"histogram {histogram}",
            )
    return steps, right, told


@dataclass
class SGLangEngine:
    """One SGLang server for `target`, with `drafter` guessing `spec_steps` tokens ahead (0: plain decoding)."""

    params: EngineParams
    target: Path
    """Target folder."""
    drafter: Path | None
    spec_steps: int
    stop_ids: frozenset[int]
    context: int
    """Tokens of the target's context, served unless `params.flags` says otherwise."""
    logs: Path
    """Folder for the server's log."""
    _process: ServerProcess | None = None
    _base: str = ""
    _info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.spec_steps > 0) == (self.drafter is not None)
        self._counted, self._base = Acceptance(self.spec_steps), (self.url or "").rstrip("/")
        self._session = requests.Session()
        self._session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=MOST_CLIENTS))
        self._lock = Lock()
        self._session.trust_env = False  # a proxy of the environment is not for a server on this machine
        taken = OWN_FLAGS & {*self.params.flags, *self.params.speculative}
        if taken:
            raise RedraftError(
                "The profile sets a flag that the engine decides.",
                where="engine.flags or engine.speculative in the profile",
                found=", ".join(sorted(taken)),
                fix="engine.port, engine.max_running, engine.topk, engine.draft_tokens and spec_steps set them",
            )
        self.draft_tokens = self._draft_tokens()

    def _draft_tokens(self) -> int:
        """Tokens of one verify forward; refused here, since SGLang corrects some values with a warning only."""
        steps, topk = self.spec_steps, self.params.topk
        tokens = self.params.draft_tokens or steps + 1
        most = steps + 1 if topk == 1 else sum(topk**2 for _ in range(steps - 1)) + topk + 1
        if steps and (tokens != most if topk == 1 else not 2 <= tokens <= most):
            raise RedraftError(
                "The speculative settings do not fit each other.",
                where="engine.topk, engine.draft_tokens and spec_steps",
                expected=f"{most} draft tokens (spec_steps + 1)" if topk == 1 else f"2 to {most} draft tokens",
                found=f"{steps} steps, topk {topk}, {tokens} draft tokens",
                cause="SGLang would serve other numbers than these with no more than a warning",
                fix="engine.draft_tokens: null takes spec_steps + 1",
            )
        return tokens

    @property
    def url(self) -> str | None:
        """The server to join, if any."""
        return self.params.url if self.spec_steps else self.params.baseline_url

    def command(self, port: int) -> list[str]:
        """The command line of the server."""
        flags: dict[str, Any] = {
            "model-path": weights_folder(self.target).absolute(),
            "host": "127.0.0.1",
            "port": port,
            "context-length": self.context,
            "max-running-requests": self.params.max_running,
            **self.params.flags,
        }
        if self.drafter is not None:
            flags |= {
                "speculative-algorithm": "EAGLE3",
                "speculative-draft-model-path": self.drafter.absolute(),
                "speculative-num-steps": self.spec_steps,
                "speculative-eagle-topk": self.params.topk,
                "speculative-num-draft-tokens": self.draft_tokens,
                **self.params.speculative,
            }
        given = [(f"--{name}", value) for name, value in flags.items() if value is not False]
        words = [[name] if value is True else [name, str(value)] for name, value in given]
        return [
            _interpreter(self.params.python),
            "-m",
            "sglang.launch_server",
            *(word for each in words for word in each),
        ]

    def start(self) -> None:
        """Launch or join the server, wait until it generates, and check what it says of itself."""
        shape = f"{self.spec_steps}x{self.params.topk}x{self.draft_tokens}"
        name = f"sglang-{self.drafter.name}-{shape}" if self.drafter else "sglang-baseline"
        if self.url:
            if not self.ready():
                self._fail("The server does not answer.", "no 200 from /health_generate; give the URL of a running one")
        else:
            port = self.params.port or free_port()
            require_port(port)
            self._base = f"http://127.0.0.1:{port}"
            self._process = ServerProcess(self.command(port), dict(self.params.env), self.logs / f"{name}.log")
            self._process.wait(self.ready, self.params.ready_seconds)
        self._info = self._read_info()
        self._check_info()

    def ready(self) -> bool:
        """Whether the server generates a token."""
        for path in ("/health_generate", "/health"):
            try:
                status = self._session.get(self._base + path, timeout=(CONNECT_SECONDS, HEALTH_SECONDS)).status_code
            except requests.RequestException:
                return False
            if status != 404:
                return status == 200
        return False

    def _read_info(self) -> dict[str, Any]:
        """Effective settings; the scheduler's own win over the arguments that it was given."""
        timeout = (CONNECT_SECONDS, self.params.request_seconds)
        try:
            reply = self._session.get(self._base + "/server_info", timeout=timeout)
            if reply.status_code == 404:  # before 0.5.6
                reply = self._session.get(self._base + "/get_server_info", timeout=timeout)
            info = reply.json()
            return {**info, **(info.get("internal_states") or [{}])[0]}
        except (requests.RequestException, ValueError, AttributeError, IndexError, TypeError) as error:
            self._fail("The server does not tell its settings.", f"/server_info: {type(error).__name__}: {error}"[:300])

    def _check_info(self) -> None:
        """The server must do what was asked: SGLang corrects some settings silently, and a joined one has its own."""
        wanted: dict[str, Any] = {"speculative_algorithm": None}
        if self.spec_steps:
            wanted = {
                "speculative_algorithm": "EAGLE3",
                "speculative_num_steps": self.spec_steps,
                "speculative_eagle_topk": self.params.topk,
                "speculative_num_draft_tokens": self.draft_tokens,
            }
        found = {name: self._info.get(name) for name in wanted}
        running = self._info.get("effective_max_running_requests_per_dp")
        if (
            running is not None
            and not self.url
            and running * (self._info.get("dp_size") or 1) < self.params.max_running
        ):
            wanted["max_running"], found["max_running"] = self.params.max_running, running
        if found != wanted:
            cause = "SGLang changed a setting, or the server that was joined has others"
            if self.spec_steps and found["speculative_algorithm"] == "EAGLE":
                cause = "EAGLE is not EAGLE3: without aux layers the drafter's fc is skipped and nothing is accepted"
            self._fail("The server runs with other settings than asked.", str(found), expected=str(wanted), cause=cause)

    def describe(self) -> dict[str, Any]:
        """Engine, version, effective settings, and how it was started."""
        names = (*SHARED_SETTINGS, *(SPECULATIVE_SETTINGS if self.spec_steps else ()))
        settings = {name: self._info[name] for name in names if name in self._info}
        started = {"joined": self._base} if self.url else {"command": self._process.command if self._process else []}
        return {"engine": "sglang", "spec_steps": self.spec_steps, **settings, **started}

    def acceptance(self) -> Acceptance:
        """Counters over every `generate`."""
        return self._counted

    def stop(self) -> None:
        """End a server that was started here; a joined one goes on."""
        if self._process is not None:
            self._process.stop()
        self._session.close()

    def generate(self, prompt: list[int], max_new_tokens: int) -> Generation:
        """Answer `prompt` greedily, streamed."""
        sampling = {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": sorted(self.stop_ids),
            "no_stop_trim": True,
        }
        began = time.perf_counter()
        first, ids = 0.0, list[int]()
        meta: dict[str, Any] = {}
        for event in self._stream({"input_ids": prompt, "sampling_params": sampling, "stream": True}):
            seconds = time.perf_counter() - began
            new, meta = event.get("output_ids") or [], event["meta_info"]
            ids = new if meta.get("completion_tokens") == len(new) else ids + new  # all so far, or what is new
            first = first or (seconds if ids else 0.0)
        finish = meta.get("finish_reason") or {}
        if meta.get("completion_tokens") == len(ids) + 1 and finish.get("type") == "stop":
            ids = [*ids, finish["matched"]]
        if finish.get("type") not in ("stop", "length") or meta.get("completion_tokens") != len(ids):
            told = f"finish_reason {finish}, completion_tokens {meta.get('completion_tokens')}, {len(ids)} output_ids"
            self._fail("The reply of the server is not a whole answer.", told)
        cached = int(meta.get("cached_tokens") or 0)
        answer = Generation(ids, seconds, first, finish["type"], prompt_tokens=len(prompt), cached_tokens=cached)
        if self.spec_steps and (len(ids) > 1 or meta.get("spec_verify_ct")):  # the first token comes from the prefill
            self._count(answer, meta)
        return answer

    def _count(self, answer: Generation, meta: dict[str, Any]) -> None:
        where = f"{self._base}/generate, SGLang {self._info.get('version')}"
        answer.verify_steps, answer.right, histogram = read_counters(meta, self.spec_steps, where)
        if histogram is not None:
            answer.accepted = [number for number, count in enumerate(histogram) for _ in range(count)]
        with self._lock:  # several clients
            if histogram is None:
                self._counted.add_untold(answer.verify_steps, answer.right)
            else:
                self._counted.add(answer.accepted)

    def margin(self, prefix: list[int], first: int, second: int, width: int) -> Margin:
        """Compare two tokens after `prefix`: on top of cached states, and with the whole prefix in one forward."""
        self._post("/generate", {"input_ids": prefix[:-1], "sampling_params": ONE_TOKEN})
        near = self._gap(prefix, first, second)
        self.flush()
        return Margin(near, abs(near - self._gap(prefix, first, second)))

    def fingerprint(self) -> str:
        """Settings and start of the server, read anew."""
        info = self._read_info()
        names = (*SHARED_SETTINGS, *SPECULATIVE_SETTINGS, "startup_time", "launch_command")
        return json.dumps({name: info.get(name) for name in names}, sort_keys=True)

    def memory_gib(self) -> float | None:
        """Weights and cache of one GPU, as the server tells it; asked when it started."""
        told = self._info.get("memory_usage")
        parts = [float(told[name]) for name in ("weight", "kvcache") if name in told] if isinstance(told, dict) else []
        return abs(sum(parts)) if parts else None

    def flush(self) -> None:
        """Drop the states of prompts answered before; refused until the scheduler has put the last answer away."""
        end = time.monotonic() + FLUSH_SECONDS
        while True:
            try:
                return self._post("/flush_cache", None)
            except RedraftError:
                if time.monotonic() > end:
                    raise

    def _gap(self, prefix: list[int], first: int, second: int) -> float:
        asked = {"temperature": 0, "max_new_tokens": 1}
        body = {
            "input_ids": prefix,
            "sampling_params": asked,
            "return_logprob": True,
            "token_ids_logprob": [first, second],
        }
        reply = self._post("/generate", body)
        try:
            rows = {row[1]: float(row[0]) for row in reply["meta_info"]["output_token_ids_logprobs"][0]}
            return rows[first] - rows[second]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self._fail("The server does not give log probabilities.", f"{type(error).__name__}: {error}")

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed reply, each with `meta_info`."""
        timeout, text, whole = (CONNECT_SECONDS, self.params.request_seconds), "", False
        try:
            with self._session.post(f"{self._base}/generate", json=body, timeout=timeout, stream=True) as reply:
                if reply.status_code != 200:
                    self._fail("The server refused a request.", f"HTTP {reply.status_code}: {reply.text[:300]}")
                for line in reply.iter_lines(chunk_size=None):  # type: ignore[call-overload]  # as they arrive
                    text = line.decode(errors="replace").removeprefix("data:").strip()
                    whole = whole or text == "[DONE]"
                    if text and not whole:
                        event = json.loads(text)
                        if not isinstance(event, dict) or "meta_info" not in event:
                            self._fail("The server sent an error.", text[:300])
                        yield event
        except requests.RequestException as error:
            self._fail("The server broke off an answer.", f"{type(error).__name__}: {error}"[:300])
        except ValueError:
            self._fail("The server sent what is not JSON.", text[:200])
        if not whole:
            self._fail("The server broke off an answer.", "the stream ended before [DONE]")

    def _post(self, path: str, body: dict[str, Any] | None) -> Any:
        timeout = (CONNECT_SECONDS, self.params.request_seconds)
        try:
            reply = self._session.post(self._base + path, json=body, timeout=timeout)
        except requests.RequestException as error:
            self._fail("The server did not answer.", f"{path}: {type(error).__name__}: {error}"[:300])
        if reply.status_code != 200:
            self._fail("The server refused a request.", f"{path}: HTTP {reply.status_code}: {reply.text[:300]}")
        try:
            return reply.json() if path == "/generate" else None
        except ValueError:
            self._fail("The server sent what is not JSON.", reply.text[:200])

    def _fail(self, what: str, found: str, *, expected: str | None = None, cause: str | None = None) -> NoReturn:
        """One error; if the server that was started here has died, its own cause instead."""
        if self._process is not None:
            time.sleep(DEATH_SECONDS)
            self._process.require_alive("while it served")
        where = f"{self._base} ({'joined' if self.url else self._process and self._process.log})"
        raise RedraftError(what, where=where, expected=expected, found=found, cause=cause)
