"""A quiet MLflow client that gives up within seconds, and batches of which the server may refuse a part."""

import logging
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from redraft.frame.mlflow_names import LONGEST_TAG, shortened
from redraft.frame.store import home

REFUSED_TAG = "redraft.refused"
Refused = dict[str, str]
"""By name of figure or param, why the server did not take it."""


def tracking_uri() -> str:
    """`$MLFLOW_TRACKING_URI`, else SQLite in the `.store` folder of the main workspace."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home() / 'mlflow.db'}"


def address() -> str:
    """The tracking URI as it may be shown: without user and password."""
    return _without_password(tracking_uri())


def load() -> None:
    """Import MLflow, which takes a second or two, without its log lines, its telemetry and its patience of minutes."""
    for name, value in {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }.items():
        os.environ.setdefault(name, value)
    os.environ.pop("MLFLOW_RUN_ID", None)  # a stage is a run of its own
    import mlflow

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        logging.getLogger(mlflow.__name__).setLevel(logging.ERROR)  # after the import, which sets it


def client(patience: float) -> Any:
    """An MLflow client that begins no request after `patience` seconds."""
    load()
    from mlflow import MlflowClient

    return _Patient(MlflowClient(tracking_uri()), time.monotonic() + patience)


class _Patient:
    """A client whose time is limited: every method of it raises TimeoutError afterwards."""

    def __init__(self, client: Any, until: float) -> None:
        self._client, self._until = client, until

    def __getattr__(self, name: str) -> Any:
        if time.monotonic() > self._until:
            raise TimeoutError("it answers too slowly")
        return getattr(self._client, name)


def is_away(error: Exception) -> bool:
    """Whether the server could not be asked or cannot answer now; else it said no to what it was asked."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException, RetryError

    cause = error.__cause__ or error.__context__
    if isinstance(cause, RetryError):
        return "too many 500" not in str(cause)
    if isinstance(error, TimeoutError) or isinstance(cause, RequestException):
        return True
    return isinstance(error, MlflowException) and error.get_http_status_code() in (401, 403, 404, 429, 499, 503, 504)


def log(client: Any, run: str, entries: Sequence[Any], refused: Refused) -> None:
    """Send metrics and params within MLflow's limits; what the server refuses goes to `refused`, the rest is sent.

    Raises:
        Exception: the server is away, or takes nothing at all.
    """
    from mlflow.entities import Metric, Param

    for kind, most in ((Param, 100), (Metric, 900)):
        alike = [entry for entry in entries if isinstance(entry, kind)]
        for start in range(0, len(alike), most):
            _log_batch(client, run, alike[start : start + most], refused)


def _log_batch(client: Any, run: str, batch: list[Any], refused: Refused) -> None:
    from mlflow.entities import Param

    try:
        client.log_batch(run, **{"params" if isinstance(batch[0], Param) else "metrics": batch})
    except Exception as error:
        if is_away(error):
            raise
        if len(batch) == 1:
            names = ", ".join([*refused, batch[0].key])
            client.set_tag(run, REFUSED_TAG, shortened(names, LONGEST_TAG))  # raises where the fault is not the entry's
            refused[batch[0].key] = reason(error)
            return
        half = len(batch) // 2
        for part in (batch[:half], batch[half:]):
            _log_batch(client, run, part, refused)


def reason(error: BaseException) -> str:
    """The first line of an error, or its kind."""
    return _without_password((str(error).strip().splitlines() or [type(error).__name__])[0][:500])


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)
