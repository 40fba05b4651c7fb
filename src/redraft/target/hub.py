"""The hub: which commit a revision is, what lies there, and fetching it; its cache where the hub cannot be asked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object

_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{7,64})$")
"""The end of a path in the hub's cache."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SECONDS = 30
_UNREAD = ("*/*.safetensors", "*/*.bin", "consolidated*")
"""Weights in formats of their own (`original/`, Mistral's), which no reader takes."""


@dataclass(frozen=True)
class Listed:
    """A model of the hub at one commit."""

    name: str
    commit: str
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes by file; empty if the hub could not be asked, so that the commit is what its cache has."""


def snapshot_of(folder: Path) -> tuple[str, str] | None:
    """The name and the commit of a folder in the hub's cache; None for any other folder."""
    found = _SNAPSHOT.search(folder.resolve().as_posix())
    return (f"{found[1]}/{found[2]}", found[3]) if found else None


def resolve(name: str, revision: str) -> Listed:
    """The commit that `revision` (commit, branch or tag) is now, and its files; of the cache where the hub is silent.

    Raises:
        RedraftError: no such model or revision, a model behind terms, or no hub and nothing in the cache.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=_SECONDS)
    except Exception as error:  # offline, gated, a server's fault: the library has many
        known = None if isinstance(error, RevisionNotFoundError) else _cached(name, revision)
        if known is None:
            raise _refused(error, name, revision) from error
        return Listed(name, known)
    sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or []}
    return Listed(name, str(info.sha), sizes)


def wanted(listed: Listed, patterns: Sequence[str]) -> dict[str, int]:
    """The files that `fetch` would bring for `patterns`, with their bytes."""
    from huggingface_hub.utils import filter_repo_objects

    names = filter_repo_objects(listed.sizes, allow_patterns=list(patterns), ignore_patterns=list(_UNREAD))
    return {name: listed.sizes[name] for name in names}


def fetch(listed: Listed, patterns: Sequence[str]) -> Path:
    """The snapshot in the hub's cache, with the files of `patterns`.

    Raises:
        RedraftError: a model behind terms, a connection that broke, or a cache that lacks files.
    """
    from huggingface_hub import snapshot_download

    given = {"allow_patterns": list(patterns), "ignore_patterns": list(_UNREAD)}
    try:
        return Path(snapshot_download(listed.name, revision=listed.commit, **given))
    except Exception as error:  # as above
        raise _refused(error, listed.name, listed.commit) from error


def require_unmoved(lock: Path, listed: Listed, revision: str) -> None:
    """Hold a branch or tag to the commit that it was when it was first resolved, which `lock` keeps: a file for git.

    Raises:
        RedraftError: it is another commit now.
    """
    if revision == listed.commit:
        return
    known, key = read_object(lock) if lock.is_file() else {}, f"{listed.name}@{revision}"
    if known.get(key, listed.commit) != listed.commit:
        raise RedraftError(
            "A revision of the hub moved since this project first took it.",
            where=f"{key}, in {lock}",
            expected=f"{known[key]}, the commit that it was",
            found=listed.commit,
            fix=f"write a commit as revision in the profile: {known[key]} to stay, {listed.commit} to take the new one",
        )
    if key not in known:
        atomic.write_json(lock, {**known, key: listed.commit})


def _cached(name: str, revision: str) -> str | None:
    """The commit that the cache has for `revision`."""
    from huggingface_hub import constants

    storage = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    ref = storage / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    return commit if _COMMIT.fullmatch(commit) and (storage / "snapshots" / commit).is_dir() else None


def _refused(error: Exception, name: str, revision: str) -> RedraftError:
    from huggingface_hub import errors

    kinds = (  # the narrower first: a gated model is one that is not found
        (errors.GatedRepoError, "The hub gives this model only to those who accepted its terms.",
         f"accept them on the page of {name}, then log in: hf auth login, or HF_TOKEN"),
        (errors.RepositoryNotFoundError, "The hub has no such model, or does not show it to you.",
         "check the name; for a private model log in: hf auth login, or HF_TOKEN"),
        (errors.RevisionNotFoundError, "The hub's model has no such revision.",
         "check the revision: a commit, branch or tag on the model's page"),
    )  # fmt: skip
    other = (
        "The hub did not give the checkpoint.",
        "check the network and HF_ENDPOINT, or give a local folder instead",
    )
    what, fix = next(((what, fix) for kind, what, fix in kinds if isinstance(error, kind)), other)
    message = str(error).strip().splitlines()
    return RedraftError(
        what, where=f"{name}@{revision}", found=f"{type(error).__name__}: {message[0] if message else ''}", fix=fix
    )
