"""Processes that train together: as many as asked, they agree on what failed, and none outlives another.

A failure that all can agree on (`agreed`) stops all in order. Any other leaves the rest waiting in a collective, where
no signal is heard; so the one that fails leaves a note beside the state, and every process watches for it. The error is
told once: by the process that failed first.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed

from redraft.frame.device import compute_device
from redraft.frame.errors import RedraftError

WATCH_SECONDS = 0.5


def begin(seed: int, processes: int) -> Accelerator:
    """The processes of this run, which have to be as many as asked.

    Raises:
        RedraftError: another world size; on the main process, the others exit.
    """
    set_seed(seed)
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")  # Accelerate knows no other name for it yet
    accelerator = Accelerator(
        mixed_precision="no",  # see TTTModule.forward
        cpu=compute_device().type == "cpu",
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],  # the embedding: 4.7 GB a step
    )
    if accelerator.num_processes != processes:
        error = RedraftError(
            "The run has another number of processes than the profile asks for.",
            where="train.processes in the profile",
            expected=processes,
            found=accelerator.num_processes,
            cause="on a CPU `accelerate launch` starts one process: use torchrun",
        )
        raise _telling(error) if accelerator.is_main_process else SystemExit(1)
    return accelerator


def _telling(error: Exception) -> Exception:
    """`error`, of the process that tells it: the launcher asks it to stop as soon as a silent one has ended."""
    if "RANK" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return error


@contextmanager
def explained() -> Iterator[None]:
    """Memory that runs out and files that fail, as errors that say what to do.

    Raises:
        RedraftError: in place of torch's OutOfMemoryError and of OSError.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RedraftError(
            "The memory of the device ran out.",
            where="train.micro_tokens in the profile",
            found=str(error).splitlines()[0],
            fix="a smaller micro_tokens: it changes memory and speed, no figure",
        ) from error
    except OSError as error:
        raise RedraftError(
            "A file of the training cannot be read or written.",
            where=error.filename,
            found=error.strerror or error,
            fix="look at its folder's room and rights; the same command goes on from the state saved last",
        ) from error


def local(tensor: Any) -> torch.Tensor:
    """This process's part of a tensor that FSDP may have sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor that FSDP may have sharded, on every process."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Together:
    """The processes of one training."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        """`folder`: of the training's state, which all see; a process that fails leaves its note beside it."""
        self.accelerator, self.folder = accelerator, folder
        now = torch.tensor([time.time_ns() if self.main else 0], device=accelerator.device)
        self.note = self._notes(str(int(accelerator.reduce(now))))  # a name that no run before this one used

    def _notes(self, name: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.failed-{name}")

    def clear(self) -> None:
        """Remove the notes of runs before this one."""
        for old in self.folder.parent.glob(self._notes("*").name):
            old.unlink()

    @property
    def main(self) -> bool:
        """Whether this process writes, tells and asks the gate."""
        return bool(self.accelerator.is_main_process)

    def stop(self, error: RedraftError) -> NoReturn:
        """Stop for a reason that every process sees by itself."""
        raise _telling(error) if self.main else SystemExit(1)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """A block without collectives that all processes leave together; where it raises on one, all stop.

        The first process that failed raises its error, the others `SystemExit`.
        """
        caught: Exception | None = None
        try:
            yield
        except Exception as error:
            caught = error
        failed = torch.zeros(self.accelerator.num_processes, device=self.accelerator.device)
        failed[self.accelerator.process_index] = caught is not None
        ranks = self.accelerator.reduce(failed).nonzero().flatten().tolist()
        if ranks:
            mine = ranks[0] == self.accelerator.process_index
            raise _telling(caught) if caught and mine else SystemExit(1)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """What ends one process with an error ends all; `folder`'s parent is there."""
        if self.accelerator.num_processes == 1:
            yield
            return
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,), daemon=True)
        watch.start()
        try:
            yield
        except Exception as error:
            over.set()
            watch.join()  # not this process: it has something to tell
            if not self._first(error):
                raise SystemExit(1) from error
            _telling(error)
            if _of_a_peer(error):
                raise RedraftError(
                    "Another process of this training ended without a word.",
                    where=f"told by rank {self.accelerator.process_index}",
                    found=str(error).splitlines()[0],
                    cause="it was killed, for want of memory or by hand",
                    fix="look for its end in the launcher's lines; the same command goes on from the state saved last",
                ) from error
            raise
        finally:
            over.set()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(WATCH_SECONDS):
            if self.note.exists():
                os._exit(1)  # the main thread may wait for the one that failed, and would do so for minutes

    def _first(self, error: Exception) -> bool:
        """Leave the note, unless another process did."""
        try:
            with self.note.open("x") as file:
                file.write(f"rank {self.accelerator.process_index}: {error}\n")
        except FileExistsError:
            return False
        except OSError:
            return True  # told by several rather than by none
        return True


def _of_a_peer(error: Exception) -> bool:
    """Whether a collective failed: the backend's own error, or gloo's plain RuntimeError about its connection."""
    backend = getattr(torch.distributed, "DistBackendError", ())
    return isinstance(error, backend) or (isinstance(error, RuntimeError) and " peer" in str(error))
