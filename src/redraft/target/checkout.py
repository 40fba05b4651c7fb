"""The local folder of a model or a drafter: a folder, or a snapshot of a hub id."""

from collections.abc import Callable
from pathlib import Path

from redraft.frame.errors import RedraftError
from redraft.frame.profile import TargetParams
from redraft.target.hub import fetch, require_unmoved, resolve, wanted

FITTED = ("fit:tiny", "fit:kimi-tiny", "fit:kimi-int4")
"""Targets that are made here."""
DRAFTER_FILES = ("*.safetensors", "*.bin")
NOT_WEIGHTS = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model", "*.txt", "*.py", "tiktoken*")
Look = Callable[[Path, dict[str, int]], None]
"""Asked before weights are fetched: the folder of what is beside them, and the bytes of each file still to come."""


def checkout(
    source: str,
    revision: str | None,
    weights: tuple[str, ...] = ("*.safetensors",),
    *,
    lock: Path | None = None,
    look: Look | None = None,
) -> Path:
    """The local folder of `source`: itself if it exists, else a snapshot of the hub id at `revision`.

    Args:
        source: a folder, a hub id, or `ORG/NAME@REVISION`, which names both at once.
        revision: commit, branch or tag of a hub id.
        weights: patterns of the weight files to fetch.
        lock: keeps the commit of a branch or tag, and refuses another one later.
        look: called when what is beside the weights is there, and before they are fetched; may refuse.

    Raises:
        RedraftError: see `locate`, `resolve`, `fetch` and `require_unmoved`; or what `look` raises.
    """
    place = locate(source, revision)
    if isinstance(place, Path):
        if look is not None:
            look(place, {})
        return place
    listed = resolve(*place)
    if lock is not None:
        require_unmoved(lock, listed, place[1])
    if look is not None:
        folder = fetch(listed, NOT_WEIGHTS)
        coming = wanted(listed, weights)
        look(folder, {name: size for name, size in coming.items() if not (folder / name).is_file()})
    return fetch(listed, [*weights, *NOT_WEIGHTS])


def locate(source: str, revision: str | None) -> Path | tuple[str, str]:
    """The folder that `source` is, else the name and the revision of a hub id; nothing is fetched.

    Raises:
        RedraftError: neither a folder nor a hub id, a revision of a folder, or a hub id without one.
    """
    folder = expanded(source)
    if folder.is_dir():
        if revision is not None:
            raise RedraftError(
                "A revision has no effect beside a folder.",
                where=f"revision: {revision}, beside {source}",
                fix="remove it from the profile, or name the hub id",
            )
        return folder
    name, _, named = source.partition("@")
    if folder.is_absolute() or source.startswith(".") or name.count("/") != 1 or folder.exists():
        raise RedraftError(
            "The source is neither a folder nor a hub id.",
            where=source,
            expected="an existing folder, or ORG/NAME of the hub",
            found=f"{folder.absolute()} is {'a file' if folder.exists() else 'not there'}",
            fix="check the path; with `dvc exp run --temp` give an absolute one",
        )
    if revision is not None and named not in ("", revision):
        raise RedraftError("Two revisions are named.", where=source, expected=named, found=f"revision: {revision}")
    if not (revision or named):
        raise RedraftError(
            "A hub id needs a revision, so that a rerun gets the same bytes.",
            where=source,
            expected="a commit: `revision:` beside the source in the profile, ORG/NAME@COMMIT on a command line",
            found="none",
            fix=f"if a folder was meant: {folder.absolute()} is not there",
        )
    return name, str(revision or named)


def expanded(source: str) -> Path:
    """`source` as a path, with ~ as its folder where there is one."""
    try:
        return Path(source).expanduser()
    except RuntimeError:  # ~name of a user who is not there
        return Path(source)


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
