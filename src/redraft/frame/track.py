"""MLflow: one parent run for a pipeline run, one child for each executed stage. It only watches.

The parent is found by the tag `pipeline.run`: the DVC experiment's name, else the commit and a digest of the params.
No run id passes through files or params, so caching is untouched. MLflow is filled from journals
(`redraft.frame.journal`); a child's tag `redraft.sent` says how many lines it has, so that sending twice adds
nothing. A tracking server that is missing costs one warning.
"""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from redraft.frame.journal import KILLED, NOT_DECISIVE, Journal, Row, read
from redraft.frame.launch import is_main
from redraft.frame.params import Config, flatten
from redraft.frame.store import home

PARENT_TAG = "pipeline.run"
JOURNAL_TAG = "redraft.journal"
SENT_TAG = "redraft.sent"
SEND_SECONDS = 30.0
"""Between two batches of rows while a stage runs."""


def tracking_uri() -> str:
    """`$MLFLOW_TRACKING_URI`, else SQLite in the `.store` folder of the main workspace."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def pipeline_key(params: dict[str, Any]) -> str:
    """The name of this pipeline run: the same for all its stages, without a file that passes it on."""
    decisive = {name: value for name, value in params.items() if name not in NOT_DECISIVE}
    digest = hashlib.sha256(repr(sorted(decisive.items())).encode()).hexdigest()[:8]
    return os.environ.get("DVC_EXP_NAME") or f"{_git('rev-parse', '--short', 'HEAD') or 'no-commit'}-{digest}"


class StageRun:
    """One run of a stage, told to its journal and from there to MLflow; on other ranks than 0 it does nothing."""

    def __init__(self, name: str, config: Config) -> None:
        profile = flatten(config.profile.model_dump(mode="json"))
        params = {
            **flatten(config.params.model_dump(mode="json")),
            **{f"profile.{key}": value for key, value in profile.items()},
        }
        self.name, self.reachable, self.sent_at = name, True, time.monotonic()
        self.journal: Journal | None = None
        if is_main():
            tags = {
                "git.commit": _git("rev-parse", "HEAD"),
                "git.dirty": str(bool(_git("status", "--porcelain"))).lower(),
                "dvc.exp.baseline": os.environ.get("DVC_EXP_BASELINE_REV", ""),
                "profile": config.params.profile,
            }
            header = {"stage": name, "key": pipeline_key(params), "params": params, "tags": tags}
            self.journal = Journal.start(header)

    def log(self, curve: str, row: Row) -> None:
        """A row of a curve, as soon as it is known; MLflow has it within half a minute."""
        if self.journal:
            self.journal.row(curve, row)
            if time.monotonic() - self.sent_at > SEND_SECONDS:
                self._send(patience=5)

    def publish(
        self, metrics: dict[str, Any], timing: dict[str, Any], curves: dict[str, list[Row]], headline: Row
    ) -> None:
        """The figures that are known when the stage ends."""
        if not self.journal:
            return
        values = flatten({**metrics, "timing": timing})
        for curve, rows in curves.items():
            for row in rows:
                self.journal.row(curve, row)
        numbers = {f"{self.name}/{key}": float(value) for key, value in values.items() if _is_number(value)}
        self.journal.write({"numbers": numbers})
        self.journal.write({"headline": {key: float(value) for key, value in headline.items()}})

    def end(self, status: str) -> None:
        """Close the journal and send what is left."""
        if self.journal:
            self.journal.write({"status": status})
            self._send()
            self.journal.lock.release()

    def _send(self, patience: float = 120) -> None:
        self.sent_at = time.monotonic()
        if not self.reachable or not self.journal:
            return
        try:
            send(self.journal.path, patience)
        except Exception as error:  # tracking must never stop a run
            self.reachable = False
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(
                f"warning: MLflow at {tracking_uri()} did not take this stage: {reason}\n"
                "  nothing is lost: `redraft publish` sends it when the server is back",
                file=sys.stderr,
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


@contextmanager
def stage_run(name: str, config: Config) -> Iterator[StageRun]:
    """Track one stage: FINISHED, KILLED if it was told to stop, FAILED if it raised."""
    tracked = StageRun(name, config)
    status = "FAILED"
    try:
        yield tracked
        status = "FINISHED"
    except (SystemExit, KeyboardInterrupt):
        status = KILLED
        raise
    finally:
        tracked.end(status)


def _client() -> Any:
    """An MLflow client that gives up within 5 seconds."""
    for name, value in {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(name, value)
    os.environ.pop("MLFLOW_RUN_ID", None)  # a stage is a run of its own
    import logging

    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri())


def send(path: Path, patience: float = 120) -> int:
    """Send the lines of a journal that MLflow does not have yet; how many these were.

    `patience`: seconds to wait for another process that sends.
    """
    lines = read(path)
    uri = tracking_uri()
    store = Path(uri.removeprefix("sqlite:///")).parent if uri.startswith("sqlite:///") else home()
    store.mkdir(parents=True, exist_ok=True)
    with FileLock(store / "mlflow.lock", timeout=patience):  # processes that make one SQLite database at once break it
        client = _client()
        child, parent = _runs(client, lines[0], path.stem, store)
    tags = child.data.tags
    sent = int(tags.get(SENT_TAG, "0"))
    run = child.info.run_id
    if sent == 0:
        _log(client, run, params=lines[0]["params"])
    left = lines[max(1, sent) :]
    for line in left:  # before the count moves on: both may be told twice
        if "headline" in line:
            _log(client, parent, metrics=[(key, value, line["time"], 0) for key, value in line["headline"].items()])
        if "status" in line:
            for number in (run, parent):
                client.set_terminated(number, line["status"], end_time=line["time"])
    for start in range(0, len(left), 100):
        part = left[start : start + 100]
        _log(client, run, metrics=_points(part), tags={SENT_TAG: str(max(1, sent) + start + len(part))})
    return len(left)


def _points(lines: list[dict[str, Any]]) -> list[tuple[str, float, int, int]]:
    points = []
    for line in lines:
        points += [(key, value, line["time"], 0) for key, value in line.get("numbers", {}).items()]
        row = line.get("row", {})
        points += [
            (f"{line['curve']}/{key}", value, line["time"], int(row["step"]))
            for key, value in row.items()
            if key != "step"
        ]
    return points


def _log(
    client: Any, run: str, params: dict[str, Any] | None = None, metrics: Any = (), tags: dict[str, str] | None = None
) -> None:
    """One batch or more, within MLflow's limits: 100 params, 1000 entries; tags come with the last."""
    from mlflow.entities import Metric, Param, RunTag

    entries = [Param(key, str(value)[:6000]) for key, value in (params or {}).items()]
    for start in range(0, len(entries), 100):
        client.log_batch(run, params=entries[start : start + 100])
    points = [Metric(*point) for point in metrics]
    marks = [RunTag(key, value) for key, value in (tags or {}).items()]
    for start in range(0, max(1, len(points)), 900):
        last = start + 900 >= len(points)
        client.log_batch(run, metrics=points[start : start + 900], tags=marks if last else [])


def _runs(client: Any, header: dict[str, Any], journal: str, store: Path) -> tuple[Any, str]:
    """The child run of a journal and its parent's id, made if they are not there; the parent has all params."""
    name = f"redraft/{header['tags']['profile']}"
    found = client.get_experiment_by_name(name)
    artifacts = None if os.environ.get("MLFLOW_TRACKING_URI") else (store / "mlartifacts").as_uri()
    experiment = found.experiment_id if found else client.create_experiment(name, artifact_location=artifacts)
    for child in client.search_runs([experiment], f"tags.`{JOURNAL_TAG}` = '{journal}'", max_results=1):
        return child, child.data.tags["mlflow.parentRunId"]
    stage = header["stage"]
    parent = _parent(client, experiment, header)
    tags = {"mlflow.parentRunId": parent, "mlflow.runName": stage, "stage": stage, JOURNAL_TAG: journal}
    return client.create_run(experiment, tags=tags, run_name=stage, start_time=header["time"]), parent


def _parent(client: Any, experiment: str, header: dict[str, Any]) -> str:
    key = header["key"]
    # a stage that already has a child began a run anew: the same commit and params, run once more
    for run in client.search_runs([experiment], f"tags.`{PARENT_TAG}` = '{key}'"):
        mine = f"tags.`mlflow.parentRunId` = '{run.info.run_id}' and tags.stage = '{header['stage']}'"
        if not any(child.info.status == "FINISHED" for child in client.search_runs([experiment], mine)):
            return run.info.run_id
    tags = {PARENT_TAG: key, **header["tags"]}
    parent = client.create_run(experiment, tags=tags, run_name=key, start_time=header["time"]).info.run_id
    _log(client, parent, params=header["params"])
    return parent
