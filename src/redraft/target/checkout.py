"""The local folder of a model or a drafter: a folder, or a snapshot of a hub id."""

from pathlib import Path

from redraft.frame.errors import RedraftError
from redraft.frame.profile import TargetParams

FITTED = ("fit:tiny", "fit:kimi-tiny", "fit:kimi-int4")
"""Targets that are made here."""
DRAFTER_FILES = ("*.safetensors", "*.bin")
NOT_WEIGHTS = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt", "*.py", "tiktoken*")
_UNREAD = ("*/*.safetensors", "*/*.bin", "consolidated*")
"""Weights in formats of their own (`original/`, Mistral's), which no reader takes."""


def checkout(source: str, revision: str | None, weights: tuple[str, ...] = ("*.safetensors",)) -> Path:
    """The local folder of `source`: itself if it exists, else a snapshot of the hub id at `revision`.

    `ORG/NAME@COMMIT` names both at once; `weights` are the patterns of weight files to fetch.

    Raises:
        RedraftError: see `locate`; or the hub cannot be reached.
    """
    place = locate(source, revision)
    return place if isinstance(place, Path) else _snapshot(*place, weights)


def locate(source: str, revision: str | None) -> Path | tuple[str, str]:
    """The folder that `source` is, else the name and the commit of a hub id; nothing is fetched.

    Raises:
        RedraftError: neither a folder nor a hub id, a revision of a folder, or a hub id without one.
    """
    folder = _expanded(source)
    if folder.is_dir():
        if revision is not None:
            raise RedraftError(
                "A revision has no effect beside a folder.",
                where=f"revision: {revision}, beside {source}",
                fix="remove it from the profile, or name the hub id",
            )
        return folder
    name, _, commit = source.partition("@")
    if folder.is_absolute() or source.startswith(".") or name.count("/") != 1 or folder.exists():
        raise RedraftError(
            "The source is neither a folder nor a hub id.",
            where=source,
            expected="an existing folder, or ORG/NAME of the hub",
            found=f"{folder.absolute()} is {'a file' if folder.exists() else 'not there'}",
            fix="check the path; with `dvc exp run --temp` give an absolute one",
        )
    if revision is not None and commit not in ("", revision):
        raise RedraftError("Two revisions are named.", where=source, expected=commit, found=f"revision: {revision}")
    if not (revision or commit):
        raise RedraftError(
            "A hub id needs a revision, so that a rerun gets the same bytes.",
            where=source,
            expected="a commit hash: `revision:` beside the source in the profile, ORG/NAME@COMMIT on a command line",
            found="none",
            fix=f"if a folder was meant: {folder.absolute()} is not there",
        )
    return name, str(revision or commit)


def _expanded(source: str) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:  # ~name of a user who is not there
        return Path(source)


def _snapshot(name: str, revision: str, weights: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = [*weights, *NOT_WEIGHTS]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=list(_UNREAD)))
    except Exception as error:  # many kinds of failure (offline, gated, missing), one answer
        raise RedraftError(
            "The hub did not give the checkpoint.",
            where=f"{name}@{revision}",
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            fix="check the name, the network and HF_TOKEN, or give a local folder instead",
        ) from error


def require_used(params: TargetParams) -> None:
    """Refuse keys that this kind of source does not look at: whoever wrote them counts on them.

    Raises:
        RedraftError: naming the key.
    """
    wheel = params.source.startswith("wheel:")
    idle = {
        "sha256": params.sha256 and not wheel,
        "revision": params.revision and (wheel or params.source in FITTED),
    }
    for name in (name for name, given in idle.items() if given):
        raise RedraftError(
            f"{name} has no effect beside this target.",
            where=f"target.{name} in the profile",
            found=f"{getattr(params, name)}, beside source: {params.source}",
            fix="remove it" + (", or name a wheel" if name == "sha256" else ", or name a hub id"),
        )
