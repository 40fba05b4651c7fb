"""The engine `sglang`: a real SGLang server, started here or joined, over its own HTTP interface."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

from redraft.acceptance import Acceptance
from redraft.engines.alike import SETTINGS
from redraft.engines.command import command_line, draft_tokens, require_free_flags
from redraft.engines.engine import Generation, Margin
from redraft.engines.reply import read_answer, read_counters
from redraft.frame.errors import RedraftError
from redraft.frame.http import Client, ReplyError, parsed
from redraft.frame.process import ServerProcess, free_port, require_port
from redraft.frame.profile import EngineParams

SPECULATIVE_SETTINGS = (
    "speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens",
    "speculative_attention_mode", "speculative_draft_attention_backend", "speculative_draft_model_path",
    "speculative_accept_threshold_single", "speculative_accept_threshold_acc",
)  # fmt: skip
"""Effective settings that are recorded of a server with speculation besides."""
FLUSH_SECONDS = 10.0
ONE_TOKEN = {"temperature": 0, "max_new_tokens": 1}
HEALTH_SECONDS = 30.0
"""Of one readiness request, which generates a token."""
DEATH_SECONDS = 1.0
"""A connection breaks a little before its process is gone."""


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
    _info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.spec_steps > 0) == (self.drafter is not None)
        require_free_flags(self.params)
        self.draft_tokens = draft_tokens(self.params, self.spec_steps)
        self._counted, self._lock = Acceptance(self.spec_steps), Lock()
        self._client = Client(self.url or "", self.params.request_seconds)
        self._unready = ReplyError("", "not asked")

    @property
    def url(self) -> str | None:
        """The server to join, if any."""
        return self.params.url if self.spec_steps else self.params.baseline_url

    @property
    def _base(self) -> str:
        """Its own URL."""
        return self._client.base

    def command(self, port: int) -> list[str]:
        """The command line of the server."""
        return command_line(self.params, self.target, self.drafter, self.spec_steps, self.context, port)

    def start(self) -> None:
        """Launch or join the server, wait until it generates, and check what it says of itself."""
        shape = f"{self.spec_steps}x{self.params.topk}x{self.draft_tokens}"
        name = f"sglang-{self.drafter.name}-{shape}" if self.drafter else "sglang-baseline"
        if self.url:
            if not self.ready(self.params.ready_seconds):
                told, fix = self._unready, "give the URL of a running server"
                self._fail("The server does not answer.", f"{told.what} {told.found}", cause=_cause(told), fix=fix)
        else:
            port = self.params.port or free_port()
            require_port(port)
            self._client = Client(f"http://127.0.0.1:{port}", self.params.request_seconds)
            self._process = ServerProcess(self.command(port), dict(self.params.env), self.logs / f"{name}.log")
            end = time.monotonic() + self.params.ready_seconds
            self._process.wait(lambda: self.ready(end - time.monotonic()), self.params.ready_seconds)
        self._info = self._read_info()
        self._check_info()

    def ready(self, seconds: float = HEALTH_SECONDS) -> bool:
        """Whether the server generates a token, within `seconds`."""
        for path in ("/health_generate", "/health"):
            try:
                self._client.get(path, max(0.1, min(seconds, HEALTH_SECONDS)))
                return True
            except ReplyError as fault:
                self._unready = fault
                if fault.status != 404:
                    return False
        return False

    def _read_info(self) -> dict[str, Any]:
        """Effective settings; the scheduler's own win over the arguments that it was given."""
        with self._asking():
            try:
                body = self._client.get("/server_info")
            except ReplyError as fault:
                if fault.status != 404:
                    raise
                body = self._client.get("/get_server_info")  # before 0.5.6
            info = parsed(body, "/server_info")
            if not isinstance(info, dict):
                raise ReplyError("The server does not tell its settings.", f"/server_info: {info}")
            states = info.get("internal_states")
            own = states[0] if isinstance(states, list) and states else {}
            return {**info, **(own if isinstance(own, dict) else {})}

    def _check_info(self) -> None:
        """The server must do what was asked: SGLang corrects some settings silently, and a joined one has its own."""
        if "speculative_algorithm" not in self._info:
            told = f"/server_info without speculative_algorithm: {', '.join(sorted(self._info))[:200] or 'nothing'}"
            fix = "give the URL of the server itself, not of a gateway before it"
            self._fail("The server does not tell whether it speculates.", told, fix=fix)
        wanted: dict[str, Any] = {"speculative_algorithm": None}
        if self.spec_steps:
            wanted = {
                "speculative_algorithm": "EAGLE3",
                "speculative_num_steps": self.spec_steps,
                "speculative_eagle_topk": self.params.topk,
                "speculative_num_draft_tokens": self.draft_tokens,
            }
        found = {name: self._info.get(name) for name in wanted}
        running, copies = (self._info.get(name) for name in ("effective_max_running_requests_per_dp", "dp_size"))
        most = running * (copies if isinstance(copies, int) else 1) if isinstance(running, int) else None
        if most is not None and not self.url and most < self.params.max_running:
            wanted["max_running"], found["max_running"] = self.params.max_running, running
        if found != wanted:
            cause = "SGLang changed a setting, or the server that was joined has others"
            if self.spec_steps and found["speculative_algorithm"] == "EAGLE":
                cause = "EAGLE is not EAGLE3: without aux layers the drafter's fc is skipped and nothing is accepted"
            self._fail("The server runs with other settings than asked.", str(found), expected=str(wanted), cause=cause)

    def describe(self) -> dict[str, Any]:
        """Engine, version, effective settings (what the server does not tell is left out), how it was started."""
        names = (*SETTINGS, *(SPECULATIVE_SETTINGS if self.spec_steps else ()))
        settings = {name: self._info[name] for name in names if name in self._info}
        command = self._process.command if self._process else []
        started = {"joined": self._base} if self.url else {"command": command}
        return {"engine": "sglang", "spec_steps": self.spec_steps, **settings, **started}

    def acceptance(self) -> Acceptance:
        """Counters over every `generate`."""
        return self._counted

    def stop(self) -> None:
        """End a server that was started here; a joined one goes on."""
        if self._process is not None:
            self._process.stop()
        self._client.close()

    def generate(self, prompt: list[int], max_new_tokens: int) -> Generation:
        """Answer `prompt` greedily, streamed."""
        sampling = {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "stop_token_ids": sorted(self.stop_ids),
            "no_stop_trim": True,
        }
        began = time.perf_counter()
        with self._asking():
            events = self._client.events(
                "/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": True}
            )
            answer, meta = read_answer(events, lambda: time.perf_counter() - began)
        if self.spec_steps and (len(answer.ids) > 1 or meta.get("spec_verify_ct")):  # the first token is no step's
            where = f"{self._base}/generate, SGLang {self._info.get('version')}"
            answer = replace(answer, steps=read_counters(meta, self.spec_steps, where))
            with self._lock:  # several clients
                self._counted.add(answer.steps)
        return replace(answer, prompt_tokens=len(prompt))

    def margin(self, prefix: list[int], first: int, second: int, width: int) -> Margin:
        """Compare two tokens after `prefix`: on top of cached states, and with the whole prefix in one forward."""
        with self._asking():
            self._client.post("/generate", {"input_ids": prefix[:-1], "sampling_params": ONE_TOKEN})
        near = self._gap(prefix, first, second)
        self.flush()
        return Margin(near, abs(near - self._gap(prefix, first, second)))

    def _gap(self, prefix: list[int], first: int, second: int) -> float:
        body = {
            "input_ids": prefix,
            "sampling_params": ONE_TOKEN,
            "return_logprob": True,
            "token_ids_logprob": [first, second],
        }
        with self._asking():
            reply = parsed(self._client.post("/generate", body), "/generate")
            try:
                rows = {row[1]: float(row[0]) for row in reply["meta_info"]["output_token_ids_logprobs"][0]}
                return rows[first] - rows[second]
            except (KeyError, IndexError, TypeError, ValueError) as error:
                told = f"{type(error).__name__}: {error}"
                raise ReplyError("The server does not give log probabilities.", told) from error

    def fingerprint(self) -> str:
        """Settings and start of the server, read anew."""
        info = self._read_info()
        names = (*SETTINGS, *SPECULATIVE_SETTINGS, "startup_time", "launch_command")
        return json.dumps({name: info.get(name) for name in names}, sort_keys=True)

    def memory_gib(self) -> float | None:
        """Weights and cache of one GPU, as the server tells it; asked when it started."""
        told = self._info.get("memory_usage")
        found = [told.get(name) for name in ("weight", "kvcache")] if isinstance(told, dict) else []
        parts = [part for part in found if isinstance(part, int | float)]
        return abs(sum(parts)) if parts else None

    def flush(self) -> None:
        """Drop the states of prompts answered before; refused (400) until the last answer was put away."""
        end, pause = time.monotonic() + FLUSH_SECONDS, 0.01
        with self._asking():
            while True:
                try:
                    self._client.post("/flush_cache")
                    return
                except ReplyError as fault:
                    if fault.status != 400 or time.monotonic() > end:
                        raise
                time.sleep(pause)
                pause = min(1.0, 2 * pause)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """A fault of HTTP is told as one of this server."""
        try:
            yield
        except ReplyError as fault:
            self._fail(fault.what, fault.found, cause=_cause(fault))

    def _fail(
        self, what: str, found: str, *, expected: str | None = None, cause: str | None = None, fix: str | None = None
    ) -> NoReturn:
        """One error; if the server that was started here has died, its own cause instead."""
        if self._process is not None:
            time.sleep(DEATH_SECONDS)
            self._process.require_alive("while it served")
        where = f"{self._base} ({'joined' if self.url else self._process and self._process.log})"
        raise RedraftError(what, where=where, expected=expected, found=found, cause=cause, fix=fix)


def _cause(fault: ReplyError) -> str | None:
    return "the server, or a gateway before it, asks for a key" if fault.status in (401, 403) else None
