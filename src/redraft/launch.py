"""Processes: start as many as the profile asks for, and stop in order when told to."""

import os
import signal
import sys
from types import FrameType

from redraft.errors import RedraftError

_told: list[int] = []


def is_main() -> bool:
    """Whether this process writes, prints and tracks: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def launch(processes: int, launcher: str) -> None:
    """Become `processes` processes that run this script again, unless a launcher did that already.

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
        if not os.path.isfile(launcher):  # noqa: PTH113
            raise RedraftError("The launcher's file is missing.", where="train.launcher in the profile", found=launcher)
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", launcher]
        command += ["--num_processes", str(processes)]
    sys.stdout.flush()
    os.execv(sys.executable, [*command, *sys.argv])


def listen() -> None:
    """From now on SIGTERM asks to stop, which `asked_to_stop` tells; a second one ends the process."""

    def note(number: int, frame: FrameType | None) -> None:
        _told.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, note)


def asked_to_stop() -> int:
    """1 if SIGTERM came."""
    return int(bool(_told))
