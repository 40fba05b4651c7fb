"""MLflow: one parent run for a pipeline run, one child for each executed stage. It only watches.

The parent is found by the tag `pipeline.run`: the DVC experiment's name, else the commit and a digest of the params.
No run id passes through files or params, so caching is untouched. A tracking server that is missing costs one warning.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redraft.params import Config

PARENT_TAG = "pipeline.run"
Row = dict[str, float]


def tracking_uri() -> str:
    """`$MLFLOW_TRACKING_URI`, else SQLite in the `.store` folder of the main workspace."""
    root = Path(os.environ.get("DVC_ROOT", ".")).resolve()
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / '.store' / 'mlflow.db'}"


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def pipeline_key(params: dict[str, Any]) -> str:
    """The name of this pipeline run: the same for all its stages, without a file that passes it on."""
    digest = hashlib.sha256(repr(sorted(params.items())).encode()).hexdigest()[:8]
    return os.environ.get("DVC_EXP_NAME") or f"{_git('rev-parse', '--short', 'HEAD') or 'no-commit'}-{digest}"


@dataclass
class StageRun:
    """What a stage has to tell once it is done."""

    name: str
    params: dict[str, Any]
    profile: str
    numbers: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[Row]] = field(default_factory=dict)
    headline: dict[str, float] = field(default_factory=dict)

    def publish(
        self, metrics: dict[str, Any], timing: dict[str, float], curves: dict[str, list[Row]], headline: Row
    ) -> None:
        """Hand over what is to be tracked when the stage ends."""
        values = {**flatten(metrics), **{f"timing.{name}": value for name, value in timing.items()}}
        self.numbers = {f"{self.name}/{key}": float(value) for key, value in values.items() if _is_number(value)}
        self.curves, self.headline = curves, headline


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


@contextmanager
def stage_run(name: str, config: Config) -> Iterator[StageRun]:
    """Track one stage; what `publish` was given is sent when the block ends, FAILED if it raised."""
    profile = flatten(config.profile.model_dump(mode="json"))
    params = {**config.params.model_dump(mode="json"), **{f"profile.{key}": value for key, value in profile.items()}}
    tracked = StageRun(name, params, config.params.profile)
    status = "FAILED"
    try:
        yield tracked
        status = "FINISHED"
    finally:
        if os.environ.get("RANK", "0") == "0":
            try:
                _send(tracked, status)
            except Exception as error:  # tracking must never stop a run
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                print(f"warning: MLflow at {tracking_uri()} did not take this stage: {reason}", file=sys.stderr)


def _client() -> Any:
    """An MLflow client; the SQLite database is made under a lock, for stages that start at the same time."""
    for name, value in {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(name, value)
    import logging

    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri())


def _send(tracked: StageRun, status: str) -> None:
    from filelock import FileLock

    uri = tracking_uri()
    store = Path(uri.removeprefix("sqlite:///")).parent if uri.startswith("sqlite:///") else Path(".store")
    store.mkdir(parents=True, exist_ok=True)
    with FileLock(store / "mlflow.lock", timeout=120):
        client = _client()
        parent = _parent(client, tracked, store)
    from mlflow.entities import Metric

    tags = {"mlflow.parentRunId": parent, "mlflow.runName": tracked.name, "stage": tracked.name}
    experiment = client.get_run(parent).info.experiment_id
    child = client.create_run(experiment, tags=tags, run_name=tracked.name).info.run_id
    now = int(client.get_run(child).info.start_time)
    points = [Metric(key, value, now, 0) for key, value in tracked.numbers.items()]
    for curve, rows in tracked.curves.items():
        for row in rows:
            step = int(row["step"])
            points += [Metric(f"{curve}/{key}", value, now, step) for key, value in row.items() if key != "step"]
    _batch(client, child, points, tracked.params)
    client.set_terminated(child, status)
    _batch(client, parent, [Metric(key, float(value), now, 0) for key, value in tracked.headline.items()], {})
    client.set_terminated(parent, status)


def _batch(client: Any, run: str, metrics: list[Any], params: dict[str, Any]) -> None:
    from mlflow.entities import Param

    entries = [Param(key, str(value)[:6000]) for key, value in params.items()]
    for start in range(0, max(1, len(entries)), 100):
        client.log_batch(run, params=entries[start : start + 100])
    for start in range(0, len(metrics), 1000):
        client.log_batch(run, metrics=metrics[start : start + 1000])


def _parent(client: Any, tracked: StageRun, store: Path) -> str:
    """The parent's run id; whichever stage comes first makes it, with all params."""
    name = f"redraft/{tracked.profile}"
    found = client.get_experiment_by_name(name)
    artifacts = None if os.environ.get("MLFLOW_TRACKING_URI") else (store / "mlartifacts").as_uri()
    experiment = found.experiment_id if found else client.create_experiment(name, artifact_location=artifacts)
    key = pipeline_key(tracked.params)
    # a stage that already has a child began a run anew: the same commit and params, run once more
    for run in client.search_runs([experiment], f"tags.`{PARENT_TAG}` = '{key}'", max_results=1):
        mine = f"tags.`mlflow.parentRunId` = '{run.info.run_id}' and tags.stage = '{tracked.name}'"
        if not any(child.info.status == "FINISHED" for child in client.search_runs([experiment], mine)):
            return run.info.run_id
    tags = {
        PARENT_TAG: key,
        "git.commit": _git("rev-parse", "HEAD"),
        "git.dirty": str(bool(_git("status", "--porcelain"))).lower(),
        "dvc.exp.baseline": os.environ.get("DVC_EXP_BASELINE_REV", ""),
        "profile": tracked.profile,
    }
    parent = client.create_run(experiment, tags=tags, run_name=key).info.run_id
    _batch(client, parent, [], tracked.params)
    return parent
