"""`redraft verify`: HEAD run again in a clone of its own, and compared with what is committed."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from redraft.cli.arguments import Commands, command
from redraft.frame.errors import RedraftError, some

OWN = ("DVC_", "MLFLOW_", "REDRAFT_STORE")
"""Settings that would tie the clone to caches and servers of this workspace."""


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    verify = command(
        commands,
        "verify",
        "run HEAD again in a temporary clone and compare what comes out with what is committed",
        "redraft verify --until vocab",
    )
    verify.add_argument("--until", metavar="STAGE", help="run this stage and what it needs (all)")
    verify.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> None:
    from redraft.report.tables import markdown
    from redraft.verify.compare import compare

    root = Path(_git("rev-parse", "--show-toplevel"))
    if not _git("ls-tree", "--name-only", "HEAD", "dvc.lock"):
        raise RedraftError(
            "HEAD has no dvc.lock to compare with.", where="redraft verify", fix="dvc repro, then commit what it wrote"
        )
    if edited := _git("status", "--porcelain").splitlines():
        names = some([line[3:] for line in edited])
        print(f"not in HEAD, and so not verified: {names}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="redraft-verify-", ignore_cleanup_errors=True) as folder:
        committed, again = Path(folder) / "committed", Path(folder) / "again"
        for clone in (committed, again):
            _run(["git", "clone", "--quiet", "--no-hardlinks", str(root), str(clone)], Path(folder))
        (again / "dvc.lock").unlink()  # so that everything runs, and what is in it in the end has run
        _run([sys.executable, "-m", "dvc", "repro", *filter(None, [arguments.until])], again)
        found = compare(committed, again, arguments.until)
    print(markdown(("output", "stage", "compared"), [(each.path, each.stage, each.how) for each in found]))
    failed = [each for each in found if each.failed]
    print(f"\n{len(found)} outputs, {len(failed)} not as committed")
    if failed:
        sys.exit(1)


def _run(words: list[str], folder: Path) -> None:
    """Run a command that prints for itself, with the code of the clone."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    env |= {
        "PYTHONPATH": str(folder / "src"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    done = subprocess.run(words, cwd=folder, env=env, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RedraftError(
            "HEAD does not run.",
            where=" ".join(words[-3:]),
            found=f"exit status {done.returncode}; its lines are above",
            cause="files that git does not know, or an environment that is not the one of the run",
        )


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.rstrip("\n")
    except (OSError, subprocess.CalledProcessError) as error:
        raise RedraftError(
            "This is no git repository with a commit.", where="redraft verify", found=getattr(error, "stderr", error)
        ) from error
