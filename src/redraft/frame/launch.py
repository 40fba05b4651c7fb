"""Processes: start as many as the profile asks for, and stop in order when told to.

Run as a module, `python -m redraft.frame.launch LAUNCHER ARGUMENTS`, it runs a launcher's module and leaves out the
traceback and table with which torchrun ends: the process that failed has told its error.
"""

import os
import runpy
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
"""What torchrun leaves its processes to finish a step and save, when it is told to stop.

Where one of them fails, the others end within seconds, see `redraft.train.processes`; at the latest torchrun's 30.
"""


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
    command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    if launcher != "torchrun":
        if not Path(launcher).is_file():
            raise RedraftError("The launcher's file is missing.", where="train.launcher in the profile", found=launcher)
        command = ["accelerate.commands.launch", "--config_file", launcher, "--num_processes", str(processes)]
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS), "OMP_NUM_THREADS": "1", **os.environ}
    children: list[subprocess.Popen[bytes]] = []
    told: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        told.append(number)
        for child in children:
            child.send_signal(number)

    for stop in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(stop) is not signal.SIG_IGN:
            signal.signal(stop, pass_on)
    # in a session of its own: of a signal to the whole group it would hear twice, and end before the state is saved
    command = [sys.executable, "-m", "redraft.frame.launch", *command, *sys.argv]
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    children.append(child)
    for number in told:
        child.send_signal(number)
    code = child.wait()
    sys.exit(128 + told[0] if told else code)


def _run_launcher(module: str, *arguments: str) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SignalException as error:
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could tell nothing
            name = signal.Signals(-failure.exitcode).name
            sys.exit(f"rank {rank} was ended by {name}; SIGKILL comes from the kernel when memory runs out")
        sys.exit(1)


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
        if signal.getsignal(signal.SIGTERM) in (note, signal.SIG_DFL):  # else it was told to be deaf
            signal.signal(signal.SIGTERM, before)


def asked_to_stop() -> int:
    """1 if SIGTERM came."""
    return int(bool(_told))


if __name__ == "__main__":
    _run_launcher(*sys.argv[1:])
