"""MLflow's model registry, told on request: a version is a link to a drafter's folder, and the run that made it."""

import warnings
from collections.abc import Mapping
from typing import Any

from redraft.frame.errors import RedraftError
from redraft.frame.mlflow_client import address, client, is_away, reason

DRAFTER_TAG = "drafter"
"""Of a pipeline run, the SHA-256 of the weights that it made."""


def register(name: str, drafter: str, source: str, tags: Mapping[str, str]) -> tuple[str, str]:
    """Register a drafter as the next version of `name`; the version and the name of its run.

    Args:
        name: of the registered model, made if it is new.
        drafter: SHA-256 of its weights, by which its run is found.
        source: where its folder is; kept as the tag `folder`, since a server takes only artifacts of a run as source.
        tags: more of them; verdict and the summary's figures of the run are added.

    Raises:
        RedraftError: no run made this drafter, the name is not valid, or the server is away.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # MLflow's own use of its libraries
            server = client(patience=60)
            return _register(server, name, drafter, source, tags)
    except RedraftError:
        raise
    except Exception as error:  # whatever the server says
        raise RedraftError(
            "MLflow did not register the drafter.",
            where=address(),
            found=reason(error),
            fix="start it, or set MLFLOW_TRACKING_URI" if is_away(error) else None,
        ) from error


def _register(server: Any, name: str, drafter: str, source: str, tags: Mapping[str, str]) -> tuple[str, str]:
    from mlflow.exceptions import MlflowException

    experiments = [each.experiment_id for each in server.search_experiments()]
    made = server.search_runs(experiments, f"tags.`{DRAFTER_TAG}` = '{drafter}'", max_results=1)
    if not made:
        raise RedraftError(
            "No run in MLflow made this drafter.",
            where=address(),
            expected=f"a pipeline run that has ended with its report, with the tag {DRAFTER_TAG} {drafter[:12]}…",
            cause="the run was sent to another server, or is not there yet",
            fix="redraft publish",
        )
    run = made[0]
    try:
        server.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    figures = {key.removeprefix("summary/"): str(value) for key, value in run.data.metrics.items() if "summary/" in key}
    version = server.create_model_version(
        name,
        source=f"runs:/{run.info.run_id}/drafter",
        run_id=run.info.run_id,
        tags={**tags, **figures, "verdict": run.data.tags.get("verdict", ""), "folder": source},
        description=f"Weights: {source}",
    )
    return str(version.version), str(run.info.run_name)
