"""Figures under the names by which MLflow takes them: valid, and two different ones never become one."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

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


def flat(values: dict[str, Any], *, lists: bool = False) -> dict[str, Any]:
    """The leaves of nested dictionaries, and of `lists` by index, under dotted names.

    Where a key's own dots would make two names one, that key is put into quotes.
    """
    leaves = dict(_leaves(values, (), lists))
    plain = {path: ".".join(_quoted(part, '"') for part in path) for path in leaves}
    times = Counter(plain.values())
    return {
        name if times[name] == 1 else ".".join(_quoted(part, '".') for part in path): leaves[path]
        for path, name in plain.items()
    }


def figures(values: dict[str, Any]) -> dict[str, float]:
    """Every number in nested dictionaries and lists; true is 1. Text and what is undefined (null) are no figures."""
    return {name: value for name, value in flat(values, lists=True).items() if isinstance(value, int | float)}


def _quoted(part: str, special: str) -> str:
    return json.dumps(part, ensure_ascii=False) if set(special) & set(part) else part


def _leaves(value: object, path: tuple[str, ...], lists: bool) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, dict):
        inner = [(str(key), each) for key, each in value.items()]
    elif lists and isinstance(value, list | tuple):
        inner = [(str(index), each) for index, each in enumerate(value)]
    else:
        yield path, value
        return
    for key, each in inner:
        yield from _leaves(each, (*path, key), lists)
