"""Processes: start as many as the profile asks for, and stop in order when told to."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from redraft.frame.errors import RedraftError

_told: list[int] = []
SHUTDOWN_SECONDS = 600
"""What torchrun leaves its processes to finish a step and save, after SIGTERM."""


def is_main() -> bool:
    """Whether this process writes, prints and tracks: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def launch(processes: int, launcher: str) -> None:
    """Run this script again in `processes` processes and exit as they do, unless a launcher did that already.

    Args:
        processes: the world size wanted on this machine.
        launcher: `torchrun`, or the path of an Accelerate configuration file.

    Raises:
        RedraftError: the file is missing.
    """
    if processes == 1 or "RANK" in os.environ:
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    if launcher != "torchrun":
        if not Path(launcher).is_file():
            raise RedraftError("The launcher's file is missing.", where="train.launcher in the profile", found=launcher)
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", launcher]
        command += ["--num_processes", str(processes)]
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS), "OMP_NUM_THREADS": "1", **os.environ}
    with listening():
        child = subprocess.Popen([*command, *sys.argv], env=environment)

        def pass_on(number: int, frame: FrameType | None) -> None:
            _told.append(number)
            child.send_signal(number)

        signal.signal(signal.SIGTERM, pass_on)
        code = child.wait()
        sys.exit(128 + signal.SIGTERM if _told else code)


@contextmanager
def listening() -> Iterator[None]:
    """SIGTERM asks to stop, which `asked_to_stop` tells; a second one ends the process."""

    def note(number: int, frame: FrameType | None) -> None:
        _told.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = signal.signal(signal.SIGTERM, note)
    _told.clear()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def asked_to_stop() -> int:
    """1 if SIGTERM came."""
    return int(bool(_told))
