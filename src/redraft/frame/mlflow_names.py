"""Figures under the names by which MLflow takes them: valid, and two different ones never become one."""

import hashlib
import re
from typing import Any

from redraft.frame.params import flatten

LONGEST_NAME = 250
LONGEST_PARAM = 6000
LONGEST_TAG = 5000
"""Characters that MLflow 2 and 3 store."""

_FORBIDDEN = re.compile(r"[^/\w.\- :]+")
_MARKED = re.compile(r"-[0-9a-f]{8}\Z")


def valid_name(name: str) -> str:
    """`name` itself if MLflow takes it, else what it leaves of it and eight digits of the hash of the whole.

    MLflow's rule, `mlflow/utils/validation.py`: letters, digits and `/_.-: `, at most 250 characters, a relative path
    that `posixpath.normpath` leaves alone. A name that ends as a marked one does is marked too, so that the names of
    two figures are never equal.
    """
    tame = _FORBIDDEN.sub("_", name.replace('"', ""))
    tame = "/".join("_" if part in ("", ".", "..") else part for part in tame.split("/"))
    tame = re.sub(r"^\.\.", "_", tame)
    if tame == name and len(name) <= LONGEST_NAME and not _MARKED.search(name):
        return name
    return _marked(tame, name, LONGEST_NAME)


def shortened(text: str, limit: int) -> str:
    """`text` itself, or as much of it as fits and eight digits of the hash of the whole."""
    return text if len(text) <= limit else _marked(text, text, limit)


def _marked(text: str, whole: str, limit: int) -> str:
    digest = hashlib.sha256(whole.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{text[: limit - 9]}-{digest}"


def figures(values: dict[str, Any]) -> dict[str, float]:
    """Every number in nested dictionaries and lists; true is 1. Text and what is undefined (null) are no figures."""
    return {name: value for name, value in flatten(values, lists=True).items() if isinstance(value, int | float)}
