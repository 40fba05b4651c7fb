"""A revision of the project: a commit, a branch, an experiment of DVC, or the workspace; read from git alone."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from redraft.frame.errors import RedraftError

DEFAULTS = ("origin/HEAD", "origin/main", "origin/master", "main", "master")
"""Where work is merged to, the first that is there."""
WORKSPACE = "workspace"


@dataclass(frozen=True)
class Revision:
    """Where files are read; of the project in the current folder."""

    name: str
    commit: str | None
    """None: the files as they lie there."""

    def read(self, path: str) -> bytes | None:
        """The bytes of a file; None without one."""
        if self.commit is None:
            return Path(path).read_bytes() if Path(path).is_file() else None
        return _git("show", f"{self.commit}:./{path}")

    def files(self, folder: str, ending: str) -> list[str]:
        """Paths of the files of a folder, sorted."""
        if self.commit is None:
            found = [str(path) for path in Path(folder).glob(f"*{ending}")]
        else:
            found = (_git("ls-tree", "--name-only", self.commit, f"./{folder}/") or b"").decode().splitlines()
        return sorted(path for path in found if path.endswith(ending))

    def mapping(self, path: str) -> dict[str, Any]:
        """What a JSON or YAML file holds; nothing without one.

        Raises:
            RedraftError: it does not hold names with values.
        """
        data = self.read(path)
        if data is None:
            return {}
        try:
            # YAML 1.2, as DVC: for a reader of 1.1 `4e-3` is text
            found = json.loads(data) if path.endswith(".json") else YAML(typ="safe").load(data)
            reason = f"a {type(found).__name__}"
        except (ValueError, YAMLError) as error:
            found, reason = None, str(error).splitlines()[0]
        if not isinstance(found, dict):
            raise RedraftError(
                "A file of the revision cannot be read.",
                where=f"{self.name}: {path}",
                expected="names with values",
                found=reason,
                cause="a merge that was not finished, or an edit by hand",
            )
        return found


def revision(name: str) -> Revision:
    """A commit, branch, tag or experiment by its name.

    Raises:
        RedraftError: there is none.
    """
    commit = _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", "--") or _experiment(name)
    if commit is None:
        if _git("rev-parse", "--git-dir") is None:
            raise RedraftError("This is no git repository.", where=str(Path.cwd()), expected="a project in git")
        raise _unknown("There is no such revision.", name)
    found = commit.split()[0].decode()
    return Revision(found[:12] if name == found else name, found)


def _shallow() -> bool:
    return (_git("rev-parse", "--is-shallow-repository") or b"").strip() == b"true"


def _unknown(what: str, name: str) -> RedraftError:
    return RedraftError(
        what,
        where="redraft diff",
        expected="a commit, branch, tag, or an experiment of `dvc exp list --all-commits`",
        found=name,
        cause="this clone is shallow" if _shallow() else None,
        fix="git fetch --unshallow, in CI fetch-depth: 0 for the checkout" if _shallow() else "git fetch",
    )


def _experiment(name: str) -> bytes | None:
    """The commit of DVC's experiment `name`, of the newest if several commits have one of that name."""
    pattern = f"refs/exps/*/*/{name}"
    return _git("for-each-ref", "--sort=-committerdate", "--count=1", "--format=%(objectname)", pattern) or None


def base_of(head: Revision) -> Revision | None:
    """What `head` is compared with where nobody says: where it left the branch that work is merged to.

    On that branch it is the commit before, and of a workspace with edits the last commit. None: there is none.

    Raises:
        RedraftError: this is no git repository, or a shallow clone that does not reach back to where `head` left.
    """
    tip = revision(head.commit or "HEAD").commit
    edited = head.commit is None and bool(_git("status", "--porcelain", "--untracked-files=no"))
    for name in DEFAULTS:
        fork = _git("merge-base", name, str(tip))
        if fork and (commit := fork.strip().decode()) != tip:
            return Revision(name, commit)
        if fork:
            break
    else:
        if _shallow():  # the commit before is a guess: there may be more of them
            raise _unknown("This clone does not reach back to where the revision left the default branch.", head.name)
    if edited:
        return Revision("HEAD", tip)
    before = _git("rev-parse", "--verify", "--quiet", f"{tip}~1^{{commit}}")
    if before is None and _shallow():
        revision(f"{head.commit or 'HEAD'}~1")  # says so
    return Revision(f"{head.commit or 'HEAD'}~1"[:14], before.strip().decode()) if before else None


def _git(*arguments: str) -> bytes | None:
    """What git prints; None where it fails."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, check=False)
    except OSError as error:
        raise RedraftError("git does not run.", where="redraft diff", found=str(error.strerror)) from error
    return None if done.returncode else done.stdout
