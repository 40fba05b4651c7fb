"""MLflow: one parent run for a pipeline run, one child for each executed stage, filled from journals.

A parent is found by the id of its pipeline run (`redraft.run`), a child by its journal. No run id passes through files
or params, so caching is untouched, and two people with the same commit and params share nothing. A child's tag
`redraft.sent_bytes` says how much of its journal it has, so that sending twice adds nothing.

Figures come before the status. The status of the parent is that of `redraft.frame.pipeline`, whichever journal is sent.
"""

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from redraft.frame.errors import RedraftError
from redraft.frame.journal import RUNNING, State, first, lines, run_of, state
from redraft.frame.mlflow_client import Refused, address, client, is_away, log, reason, tracking_uri
from redraft.frame.mlflow_names import LONGEST_PARAM, LONGEST_TAG, shortened, valid_name
from redraft.frame.pipeline import pipeline_state
from redraft.frame.store import home, workspace

PARENT_TAG = "pipeline.run"
RUN_TAG = "redraft.run"
WORKSPACE_TAG = "redraft.workspace"
JOURNAL_TAG = "redraft.journal"
SENT_TAG = "redraft.sent_bytes"
ERROR_TAG = "redraft.error"


def send(path: Path, patience: float = 120, refused: Refused | None = None) -> int:
    """Send the lines of a journal that MLflow does not have yet; how many these were.

    Args:
        path: of the journal.
        patience: seconds to wait for another process that sends, and for the server.
        refused: gets what the server does not take; it is not sent again.

    Raises:
        RedraftError: the experiment was deleted.
        Exception: the server is away; what was sent is not sent again.
    """
    header, refused = first(path), {} if refused is None else refused
    if header is None:
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # MLflow's own use of its libraries
        uri = tracking_uri()
        store = Path(uri.removeprefix("sqlite:///")).parent if uri.startswith("sqlite:///") else home()
        store.mkdir(parents=True, exist_ok=True)
        # processes that make one SQLite database at once break it
        with FileLock(store / "mlflow.lock", timeout=patience):
            server = client(patience)
            child, parent = _runs(server, header, path.stem, store, refused)
        if child.info.lifecycle_stage == "deleted":  # by someone who does not want it
            return 0
        count = _send_lines(server, path, child, parent, refused)
        stands = state(path)
        if parent and (count or child.info.status != stands.status):
            _settle(server, parent, pipeline_state(run_of(header), over="run" not in header))
        _settle(server, child, stands)
        return count


def close_partial_runs(profile: str) -> None:
    """End the parents of this workspace that wait for another stage; one of which a stage runs goes on."""
    server = client(patience=30)
    found = server.get_experiment_by_name(_experiment_name(profile))
    if found and found.lifecycle_stage != "deleted":
        _close_partial_runs(server, found.experiment_id)


def _close_partial_runs(server: Any, experiment: str) -> None:
    mine = f"tags.`{WORKSPACE_TAG}` = '{workspace()}' and attributes.status = '{RUNNING}'"
    for parent in server.search_runs([experiment], mine):
        _end_dead_stages(server, experiment, parent)
        _settle(server, parent, pipeline_state(parent.data.tags[RUN_TAG], over=True))


def _end_dead_stages(server: Any, experiment: str, parent: Any) -> None:
    """A process that was killed could not tell it."""
    left = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}' and attributes.status = '{RUNNING}'"
    for child in server.search_runs([experiment], left):
        path = home() / "journal" / f"{child.data.tags[JOURNAL_TAG]}.jsonl"
        if path.is_file():
            _settle(server, child, state(path))


def _send_lines(server: Any, path: Path, child: Any, parent: Any, refused: Refused) -> int:
    run, sent = child.info.run_id, int(child.data.tags.get(SENT_TAG, "0"))
    left = list(lines(path, sent)) if path.stat().st_size > sent else []
    for start in range(0, len(left), 100):
        part = [line for line, _ in left[start : start + 100]]
        if "params" in part[0]:
            log(server, run, _params(part[0], child), refused)
        if parent:
            headlines = [{"numbers": line["headline"], "time": line["time"]} for line in part if "headline" in line]
            log(server, parent.info.run_id, _metrics(headlines, refused), refused)
            _send_rest(server, parent.info.run_id, part, refused)
        log(server, run, _metrics(part, refused), refused)
        server.set_tag(run, SENT_TAG, str(left[: start + 100][-1][1]))
    return len(left)


def _send_rest(server: Any, run: str, part: list[dict[str, Any]], refused: Refused) -> None:
    """Tags, files and inputs of the pipeline run; a file that was sent before is replaced.

    Raises:
        Exception: the server is away.
    """
    for line in part:
        for name, value in line.get("tags", {}).items() if "headline" in line else ():
            server.set_tag(run, name, shortened(value, LONGEST_TAG))
        try:
            if "file" in line and Path(line["file"]).is_file():
                server.log_artifact(run, line["file"], line["to"] or None)
            if line.get("inputs"):
                server.log_inputs(run, datasets=[_dataset(each) for each in line["inputs"]])
        except Exception as error:
            if is_away(error):
                raise
            refused[Path(line["file"]).name if "file" in line else "inputs"] = reason(error)


def _dataset(told: dict[str, str]) -> Any:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = json.dumps({"uri": told["source"]})
    dataset = Dataset(name=told["name"], digest=told["digest"], source_type="local", source=source)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", told["context"])])


def _params(header: dict[str, Any], run: Any) -> list[Any]:
    """The params of a header that a run does not have: a param cannot change."""
    from mlflow.entities import Param

    named = {valid_name(key): shortened(str(value), LONGEST_PARAM) for key, value in header["params"].items()}
    return [Param(key, value) for key, value in named.items() if key not in run.data.params]


def _metrics(journal: list[dict[str, Any]], refused: Refused) -> list[Any]:
    from mlflow.entities import Metric

    metrics = []
    for line in journal:
        for name, value, step in _figures(line):
            try:
                metrics.append(Metric(valid_name(name), float(value), line["time"], int(step)))
            except (TypeError, ValueError, OverflowError) as error:
                refused[name] = str(error)
    return metrics


def _figures(line: dict[str, Any]) -> Iterator[tuple[str, Any, float]]:
    """Name, value and step of what a line of a journal tells."""
    for name, value in line.get("numbers", {}).items():
        yield name, value, 0
    row = line.get("row", {})
    for key, value in row.items():
        if key != "step":
            yield f"{line['curve']}/{key}", value, row["step"]


def _runs(server: Any, header: dict[str, Any], journal: str, store: Path, refused: Refused) -> tuple[Any, Any | None]:
    """The child run of a journal and its parent, made if they are not there; no parent if it was deleted."""
    from mlflow.entities import ViewType

    experiment = _experiment(server, _experiment_name(header["tags"]["profile"]), store)
    mine = f"tags.`{JOURNAL_TAG}` = '{journal}'"
    if found := server.search_runs([experiment], mine, run_view_type=ViewType.ALL):
        child = min(found, key=lambda run: run.info.lifecycle_stage)  # active before deleted
        number = child.data.tags["mlflow.parentRunId"]
        parents = server.search_runs([experiment], f"attributes.run_id = '{number}'")
        return child, parents[0] if parents else None
    parent, stage, tags = _parent(server, experiment, header), header["stage"], _tags(header)
    log(server, parent.info.run_id, _params(header, parent), refused)
    tags |= {"mlflow.parentRunId": parent.info.run_id, "mlflow.runName": stage, "stage": stage, JOURNAL_TAG: journal}
    return server.create_run(experiment, tags=tags, run_name=stage, start_time=header["time"]), parent


def _parent(server: Any, experiment: str, header: dict[str, Any]) -> Any:
    run, key = run_of(header), header["key"]
    if found := server.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run}'"):
        _end_dead_stages(server, experiment, found[0])
        return found[0]
    tags = {**_tags(header), PARENT_TAG: key, RUN_TAG: run, WORKSPACE_TAG: workspace()}
    parent = server.create_run(experiment, tags=tags, run_name=key, start_time=header["time"])
    _close_partial_runs(server, experiment)
    return parent


def _tags(header: dict[str, Any]) -> dict[str, str]:
    return {key: shortened(value, LONGEST_TAG) for key, value in header["tags"].items() if value}


def _experiment_name(profile: str) -> str:
    return f"redraft/{profile}"


def _experiment(server: Any, name: str, store: Path) -> str:
    found = server.get_experiment_by_name(name)
    if found is None:
        from mlflow.exceptions import MlflowException

        artifacts = None if os.environ.get("MLFLOW_TRACKING_URI") else (store / "mlartifacts").as_uri()
        try:
            number: str = server.create_experiment(name, artifact_location=artifacts)
            return number
        except MlflowException:  # another machine made it at this moment
            found = server.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        number = found.experiment_id
        raise RedraftError(
            f"The MLflow experiment `{name}` (id {number}) is deleted: it takes no runs.",
            where=address(),
            fix=f"bring it back with `mlflow experiments restore --experiment-id {number}`, or remove it for good with "
            f"`mlflow gc --experiment-ids {number}` (both with MLFLOW_TRACKING_URI set to that address); "
            "`redraft publish` then sends what is missing",
        )
    return str(found.experiment_id)


def _settle(server: Any, run: Any, stands: State) -> None:
    """Give a run the status, end and error that it has, where they are others."""
    number, error = run.info.run_id, run.data.tags.get(ERROR_TAG, "")
    if stands.status == RUNNING:
        if run.info.status != RUNNING:
            server.update_run(number, RUNNING)
    elif run.info.status != stands.status or (run.info.end_time or 0) < stands.time:
        server.set_terminated(number, stands.status, end_time=stands.time)
    if stands.error and stands.error != error:
        server.set_tag(number, ERROR_TAG, stands.error)
    elif error and not stands.error:
        server.delete_tag(number, ERROR_TAG)
