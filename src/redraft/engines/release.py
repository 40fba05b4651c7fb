"""Which engine, in which release, would serve: an upgrade changes every figure of serving, so it is an artefact."""

from importlib.metadata import version
from typing import Any

from redraft.frame.errors import RedraftError
from redraft.frame.profile import EngineParams

ASK_SECONDS = 3
"""Longest wait for what a joined server says of itself."""


def release(engine: str, params: EngineParams) -> dict[str, Any]:
    """The engine's name and versions; a version is None where the engine is not there (yet).

    `torch`: the libraries of this environment. `sglang`: what `engine.python` has installed, or what the servers at
    `engine.url` and `engine.baseline_url` report.
    """
    if engine == "torch":
        return {"engine": engine, "version": version("torch"), "transformers": version("transformers")}
    joined = {name: url for name in ("url", "baseline_url") if (url := getattr(params, name))}
    if joined:
        return {"engine": engine, **joined, "version": {name: _reported(url) for name, url in joined.items()}}
    from redraft.engines.command import installed_version

    try:
        return {"engine": engine, "version": installed_version(params.python)}
    except RedraftError:
        return {"engine": engine, "version": None}


def _reported(url: str) -> str | None:
    import requests

    for path in ("server_info", "get_server_info"):  # the second is the older name
        try:
            found = requests.get(f"{url.rstrip('/')}/{path}", timeout=ASK_SECONDS).json()
        except (requests.RequestException, ValueError):
            continue
        if isinstance(found, dict) and found.get("version"):
            return str(found["version"])
    return None


def absent(found: dict[str, Any]) -> list[str]:
    """What of a `release` is not there, in words."""
    versions = found["version"]
    if isinstance(versions, dict):
        return [f"the server at engine.{name} ({found[name]})" for name, each in versions.items() if each is None]
    return ["SGLang in the interpreter engine.python"] if versions is None else []
