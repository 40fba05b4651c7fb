"""A server as a child process in a group of its own: started, watched, explained when it dies, always ended."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from redraft.frame.errors import RedraftError
from redraft.frame.progress import counter

LAST_LINES = 50
GRACE_SECONDS = 2.0
"""From SIGTERM to SIGKILL; SGLang waits longer than this for nothing."""
GONE_SECONDS = 10.0
POLL_SECONDS = 0.25

# class, what its log says, what to do; the first class whose pattern is found names the death
DEATHS = (
    ("port in use", r"[Aa]ddress already in use|Errno 98", "end the other server, or give another engine.port"),
    (
        "context",
        r"greater than the derived context_length|longer than the (?:model's )?(?:derived )?context",
        "raise max_position_embeddings of the drafter (redraft export --context-length), or serve a shorter context",
    ),
    (
        "unknown model type",
        r"model type .{0,80} not recogni[sz]e|does not recogni[sz]e this architecture|Unrecognized model"
        r"|[Aa]rchitectures? .{0,120} not supported|[Uu]nknown (?:model|architecture)"
        r"|does not implement set_eagle3_layers_to_capture|has no attribute 'set_eagle3_layers_to_capture'",
        "a newer server, or another drafter architecture; redraft lint names what this version knows",
    ),
    (
        "backend",
        r"not supported in (?:decode )?attention backend|[Aa]ttention backend .{0,80}(?:not|un)\s?support"
        r"|No module named 'flashinfer|Invalid backend",
        "name another backend in engine.flags or engine.speculative (speculative-draft-attention-backend)",
    ),
    (
        "weights",
        r"Attempted to load weight|org_vocab_size|loaded_weight|safetensors?_?rust|SafetensorError|HeaderTooLarge"
        r"|has no attribute 'draft_vocab_size'|(?:No|no) .{0,40}(?:weights|safetensors|\.bin) .{0,40}found"
        r"|shapes? cannot be multiplied",
        "redraft lint CKPT --target T",
    ),
    (
        "vocabulary",
        r"index out of range in self|device-side assert|indexSelectSmallIndex",
        "a token id past the vocabulary: redraft lint CKPT --target T (d2t may hold ids in place of offsets)",
    ),
    (
        "no room for the cache",
        r"No available memory for the cache blocks|less than desired GPU memory utilization|available KV cache memory",
        "set gpu-memory-utilization or VLLM_CPU_KVCACHE_SPACE, or lower the number of requests in flight",
    ),
    (
        "out of memory",
        r"[Oo]ut of memory|OutOfMemory|CUDA OOM|Not enough memory|[Cc]annot allocate memory|can't allocate memory"
        r"|std::bad_alloc|MemoryError",
        "lower mem-fraction-static or max-running-requests in engine.flags",
    ),
    (
        "flags",
        r"error: (?:unrecognized arguments|argument|ambiguous option)|invalid choice",
        "see engine.flags in the profile; flags differ by version",
    ),
    ("a process of it died", r"^Fatal Python error|Worker proc \S+ died unexpectedly", None),
    ("not installed", r"No module named '?(?:sglang|vllm)'?\b", "engine.python in the profile: give its interpreter"),
)
GUARD = 'trap "" HUP INT TERM; read -r done || { kill -s TERM "$1"; sleep "$2"; kill -s KILL -- "-$1"; }'
"""A shell that waits for a word on a pipe; if this process dies without one, be it by SIGKILL, it ends the server."""
_ERROR_LINE = re.compile(
    r"^(?:\(\w+ pid=\d+\) ERROR [^\]]*\]|\[[^\]]*\])?\s*((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)): ?(.*)$"
)


def explain(log: str) -> tuple[str, str, str | None]:
    """Class, line and advice of a server's death from its log; the line is the cause, not the last one.

    The last lines of a log are those of processes that die because another one did, so the first match counts.
    """
    lines = [line for line in log.splitlines() if " WARNING " not in line]
    for name, pattern, advice in DEATHS:
        for line in lines:
            if re.search(pattern, line):
                return name, line.strip()[-300:], advice
    for line in lines:
        if found := _ERROR_LINE.match(line):
            return "other", f"{found[1]}: {found[2]}"[:300], None
    return "other", (lines[-1].strip()[:300] if lines else "it wrote nothing"), None


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_port(port: int) -> None:
    """Refuse a port of the loopback interface that is taken.

    Raises:
        RedraftError: something listens there.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise RedraftError(
                "The port is in use.",
                where=f"127.0.0.1:{port}",
                found=error.strerror,
                cause="another server, perhaps of a run that was killed",
                fix="end it, or give another engine.port in the profile (null takes a free one)",
            ) from error


class ServerProcess:
    """One server; `stop` ends it and every process that it started."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path, section: str = "engine") -> None:
        """`environment` is added to this process's own; `log` receives what the server prints.

        `section` of the profile says how it is started: errors advise on its keys.
        """
        self.command, self.log, self.section = list(command), log, section
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            try:
                self._child = subprocess.Popen(
                    self.command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise RedraftError(
                    "The server's interpreter cannot be run.",
                    where=f"{section}.python in the profile",
                    found=f"{command[0]}: {error.strerror}",
                    fix="give the interpreter in which the engine is installed; `make engines` builds one for tests",
                ) from error
        try:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "guard", str(self._child.pid), str(GRACE_SECONDS)],
                env={},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            self._kill()
            raise

    def wait(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return when `ready` says so.

        Raises:
            RedraftError: the server died, or was not ready after `seconds`; nothing of it is left then.
        """
        began = time.monotonic()
        with counter(int(seconds), "server", "s") as bar:
            while not ready():
                passed = time.monotonic() - began
                self.require_alive("before it was ready")
                if passed > seconds:
                    raise self._death("The server did not become ready.", f"{passed:.0f} s, of at most {seconds:g}")
                bar.update(int(passed) - bar.n)
                time.sleep(POLL_SECONDS)

    def require_alive(self, when: str) -> None:
        """Refuse a server that has ended.

        Raises:
            RedraftError: with exit code, class, cause and the last lines of its log.
        """
        code = self._child.poll()
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise self._death(f"The server died {when}.", how)

    def _death(self, what: str, how: str) -> RedraftError:
        self.stop()
        log = self.log.read_text(errors="replace")
        name, line, advice = explain(log)
        told = [line for line in log.splitlines() if "leaked" not in line]  # by bindings, at an abrupt end
        tail = "\n    | ".join(told[-LAST_LINES:])
        return RedraftError(
            what,
            where=self.log,
            found=f"{how}; {name}: {line}",
            fix=advice and advice.replace("engine.", f"{self.section}."),
            tail=f"\n  command: {' '.join(self.command)}\n  last lines of its log:\n    | {tail}",
        )

    def stop(self) -> None:
        """SIGTERM to the server, then SIGKILL to its group; returns when no process of it is left."""
        try:
            self._child.terminate()  # alone: SGLang takes a child that ends first for a crash, and waits
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(GRACE_SECONDS)
        finally:
            self._kill()
            self._await_end(GONE_SECONDS)
            with suppress(OSError, ValueError):  # it was let go already
                self._guard.communicate(b"done\n")

    def _kill(self) -> None:
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # PermissionError: only dead ones are left (macOS)
            return

    def _await_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._child.poll()
            if not any(_in_group(process, self._child.pid) for process in psutil.process_iter(["status"])):
                return
            time.sleep(0.02)


def _in_group(process: psutil.Process, group: int) -> bool:
    """Whether a process runs in `group`; one that is dead and only not yet reaped does not."""
    try:
        return os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError):
        return False
