"""A stage's run, told to its journal and from there to MLflow, which only watches.

MLflow is told when the stage begins, so that its run and the pipeline's are seen as RUNNING, then every half minute,
and when it ends. A server that is away costs a stage one warning, a hundredth of its time, and seconds at both ends.
"""

import getpass
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redraft.frame import mlflow_client
from redraft.frame.attachments import attach, inputs
from redraft.frame.errors import RedraftError
from redraft.frame.journal import FAILED, FINISHED, KILLED, NOT_DECISIVE, Journal, Row
from redraft.frame.launch import is_main
from redraft.frame.load import sampled
from redraft.frame.mlflow_client import Refused, address, reason
from redraft.frame.mlflow_names import figures
from redraft.frame.mlflow_runs import send
from redraft.frame.params import Config, flatten
from redraft.frame.store import files_fingerprint

SEND_SECONDS = 30.0
"""Between two batches of rows while a stage runs, at least."""
SHARE = 0.01
"""Of the time of a stage that sending may take while it runs."""
LIVE_PATIENCE, LAST_PATIENCE = 10.0, 120.0
"""Seconds for one attempt while a stage runs, and at its end."""


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def pipeline_key(params: dict[str, Any]) -> str:
    """The name of this pipeline run: the same for all its stages, without a file that passes it on."""
    decisive = {name: value for name, value in params.items() if name not in NOT_DECISIVE}
    digest = hashlib.sha256(repr(sorted(decisive.items())).encode()).hexdigest()[:8]
    return os.environ.get("DVC_EXP_NAME") or f"{_git('rev-parse', '--short', 'HEAD') or 'no-commit'}-{digest}"


def decisive_files() -> str:
    """A fingerprint of what decides a stage's figures besides its params: the code as it is on disk, and its inputs."""
    package = Path(__file__).parents[1]
    torch = importlib.metadata.version("torch")
    return f"{files_fingerprint([package, Path('src'), Path('stages'), Path('artifacts')])}-torch-{torch}"


def _user() -> str:
    try:
        return os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"


def _tags(profile: str) -> dict[str, str]:
    """Those that MLflow's own clients set (`mlflow.tracking.context`), and ours."""
    commit = _git("rev-parse", "HEAD")
    return {
        "mlflow.user": _user(),
        "mlflow.source.name": sys.argv[0] or "<console>",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": commit,
        "git.commit": commit,
        "git.dirty": str(bool(_git("status", "--porcelain"))).lower(),
        "dvc.exp.baseline": os.environ.get("DVC_EXP_BASELINE_REV", ""),
        "profile": profile,
    }


class StageRun:
    """One run of a stage, told to its journal and from there to MLflow; on other ranks than 0 it does nothing."""

    def __init__(self, name: str, config: Config) -> None:
        self.name, self.warned, self.next, self.began = name, False, 0.0, time.time()
        self.attached = False
        self.refused: Refused = {}
        self.journal: Journal | None = None
        if is_main():
            params = flatten(config.params.model_dump(mode="json"))
            params |= flatten({"profile": config.profile.model_dump(mode="json")})
            header = {"stage": name, "key": pipeline_key(params), "params": params, "tags": _tags(params["profile"])}
            self.profile = params["profile"]
            self.journal = Journal.start({**header, "fingerprint": decisive_files()})
            self._send(LIVE_PATIENCE)

    def log(self, curve: str, row: Row) -> None:
        """A row of a curve, as soon as it is known; MLflow has it within half a minute, if it is there."""
        if self.journal:
            self.journal.row(curve, row)
            if time.monotonic() > self.next:
                self._send(LIVE_PATIENCE)

    def publish(
        self,
        metrics: dict[str, Any],
        timing: dict[str, Any],
        curves: dict[str, list[Row]],
        headline: Mapping[str, float],
        tags: Mapping[str, str],
    ) -> None:
        """What is known when the stage ends: every number in `metrics` and `timing`, lists by index; and its files.

        `headline` and `tags` are of the whole pipeline run.
        """
        if not self.journal:
            return
        for curve, rows in curves.items():
            for row in rows:
                self.journal.row(curve, row)
        numbers = figures({**metrics, "timing": timing})
        self.journal.write({"numbers": {f"{self.name}/{key}": value for key, value in numbers.items()}})
        self.journal.write({"headline": {key: float(value) for key, value in headline.items()}, "tags": {**tags}})
        self._attach(self.journal)
        if self.name == "train":
            self.journal.write({"inputs": inputs(self.profile)})

    def _attach(self, journal: Journal, *, failed: bool = False) -> None:
        self.attached = True
        try:
            for line in attach(self.name, journal.path.with_suffix(""), self.began, failed=failed):
                journal.write(line)
        except OSError as error:  # a full disk, a file of another user: the figures are there
            self.refused["files"] = reason(error)

    def end(self, status: str, error: str = "") -> None:
        """Close the journal and send what is left; `error` is the reason of a failure."""
        if not self.journal:
            return
        try:
            if not self.attached:
                self._attach(self.journal, failed=True)
            self.journal.write({"status": status, **({"error": error} if error else {})})
            if not self._send(LAST_PATIENCE):
                time.sleep(1)
                self._send(LAST_PATIENCE)
            if self.refused:
                print(f"warning: {refusal(self.refused)}", file=sys.stderr)
        finally:
            self.journal.lock.release()

    def _send(self, patience: float) -> bool:
        """Whether MLflow has the journal as it is now; the next attempt is put off for long enough."""
        began = time.monotonic()
        try:
            mlflow_client.load()
            began = time.monotonic()  # the import is paid once, whatever the server does
            send(self.journal.path, patience, self.refused)  # type: ignore[union-attr]
        except Exception as error:  # tracking must never stop a run
            self._warn(error)
            return False
        finally:
            now = time.monotonic()
            self.next = now + max(SEND_SECONDS, (now - began) / SHARE)
        return True

    def _warn(self, error: Exception) -> None:
        if not self.warned:
            text = error if isinstance(error, RedraftError) else reason(error)
            print(
                f"warning: MLflow at {address()} did not take this stage: {text}\n"
                "  the run goes on and tries again; `redraft publish` sends what is missing at its end",
                file=sys.stderr,
            )
        self.warned = True


def refusal(refused: Refused) -> str:
    """What a tracking server refused, by name."""
    names = "\n".join(f"  {name}: {why}" for name, why in refused.items())
    return f"MLflow at {address()} refused {len(refused)} of the entries, and has all others:\n{names}"


@contextmanager
def stage_run(name: str, config: Config) -> Iterator[StageRun]:
    """Track one stage: FINISHED, KILLED if it was told to stop, FAILED with the reason if it raised."""
    tracked = StageRun(name, config)
    status, error = FAILED, ""
    try:
        with sampled(tracked.journal.row if tracked.journal else None):
            yield tracked
        status = FINISHED
    except (SystemExit, KeyboardInterrupt):
        status = KILLED
        raise
    except BaseException as failure:
        error = reason(failure) if isinstance(failure, RedraftError) else f"{type(failure).__name__}: {reason(failure)}"
        raise
    finally:
        tracked.end(status, error)
