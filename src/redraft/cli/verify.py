"""`redraft verify`: HEAD run again in a clone of its own, and compared with what is committed."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from redraft.cli.arguments import Commands, command
from redraft.frame.errors import RedraftError, some

OWN = ("DVC_", "MLFLOW_", "REDRAFT_STORE")
"""Settings that would tie the clone to caches and servers of this workspace."""
GRACE_SECONDS = 10
"""What is left to a stage that is told to stop."""


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
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="redraft-verify-", ignore_cleanup_errors=True) as folder:
        committed, again = Path(folder) / "committed", Path(folder) / "again"
        for clone in (committed, again):
            _run(["git", "clone", "--quiet", "--no-hardlinks", str(root), str(clone)], Path(folder))
        (again / "dvc.lock").unlink()  # what is in it in the end has run
        # a cache that the user's settings name knows the runs of this workspace
        (again / ".dvc/config.local").write_text("[cache]\n    dir = cache\n")
        _run([sys.executable, "-m", "dvc", "repro", "--force", *filter(None, [arguments.until])], again)
        found = compare(committed, again, arguments.until)
    print(markdown(("output", "stage", "compared"), [(each.path, each.stage, each.how) for each in found]))
    failed = [each for each in found if each.failed]
    print(f"\n{len(found)} outputs, {len(failed)} not as committed")
    if failed:
        sys.exit(1)


def _run(words: list[str], folder: Path) -> None:
    """Run a command that prints for itself, with the code of the clone; nothing of it outlives an interrupt."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    env |= {
        "PYTHONPATH": str(folder / "src"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    child = subprocess.Popen(words, cwd=folder, env=env, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = child.wait()
    except BaseException:
        _end(child)
        raise
    if code:
        raise RedraftError(
            "HEAD does not run.",
            where=" ".join(words[-3:]),
            found=f"exit status {code}; its lines are above",
            cause="files that git does not know, or an environment that is not the one of the run",
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, in whichever session."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(child.pid)
        family = [parent, *parent.children(recursive=True)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.terminate()
        for each in psutil.wait_procs(family, GRACE_SECONDS)[1]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    with suppress(ProcessLookupError, PermissionError):  # what was started meanwhile
        os.killpg(child.pid, signal.SIGKILL)


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.rstrip("\n")
    except (OSError, subprocess.CalledProcessError) as error:
        raise RedraftError(
            "This is no git repository with a commit.", where="redraft verify", found=getattr(error, "stderr", error)
        ) from error
