"""What is answered so far, in `.<output>.answered` beside the output: it outlives this process, to the row.

The first line says what was asked, of what and how, so that only the same run goes on from it; every other one is a row
with its place among the prompts.
"""

import fcntl
import json
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from redraft.frame.errors import RedraftError, some

_SHOWN = 40


class Answered:
    """Rows by their place, in a file; memory holds 8 bytes a row."""

    def __init__(self, file: IO[bytes], start: int) -> None:
        """Read what `file` holds from `start` on; half a line at its end, of a run that was killed, is cut off."""
        self._file, self._count = file, 0
        self._starts = array("q")
        file.seek(start)
        for line in iter(file.readline, b""):
            if not line.endswith(b"\n"):
                file.truncate(start)
                break
            with suppress(ValueError, KeyError, TypeError):  # left by a machine that lost its power: answered again
                self._keep(json.loads(line)["place"], start)
            start += len(line)

    def _keep(self, place: int, start: int) -> None:
        self._starts.extend([-1] * (place + 1 - len(self._starts)))
        self._count += self._starts[place] < 0
        self._starts[place] = start

    def __len__(self) -> int:
        return self._count

    def __contains__(self, place: object) -> bool:
        return isinstance(place, int) and place < len(self._starts) and self._starts[place] >= 0

    def add(self, place: int, row: dict[str, Any]) -> None:
        """Keep a row; it is with the kernel when this returns."""
        line = json.dumps({"place": place, "row": row}, ensure_ascii=False, default=str).encode() + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        self._file.write(line)
        self._file.flush()
        self._keep(place, start)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row, in order."""
        for start in self._starts:
            if start >= 0:
                self._file.seek(start)
                yield json.loads(self._file.readline())["row"]


@contextmanager
def answered(output: Path, run: dict[str, Any]) -> Iterator[Answered]:
    """What is answered of `output`, for this process alone; gone when the block ends without an error.

    Args:
        output: file that will be written.
        run: what names the run; only the same one goes on.

    Raises:
        RedraftError: another process has it, or it is of another run.
    """
    path = output.with_name(f".{output.name}.answered")
    path.parent.mkdir(parents=True, exist_ok=True)
    first = json.dumps(run, sort_keys=True, default=str).encode() + b"\n"
    with path.open("a+b") as file:
        _lock(file, path)
        file.seek(0)
        found = file.readline()
        if not found.endswith(b"\n"):  # new, or killed at its first line
            file.truncate(0)
            file.write(first)
            file.flush()
        elif found != first:
            raise RedraftError(
                "The answers that are kept here are of another run.",
                where=path,
                found=_differing(found, run),
                fix="give the same prompts and options to go on; or remove the file to begin anew",
            )
        kept, whole = Answered(file, len(first)), False
        try:
            yield kept
            whole = True
        finally:
            if whole or not len(kept):
                path.unlink()


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return
    except OSError:  # locked, or gone: the other process has just ended
        pass
    raise RedraftError("Another process writes this output.", where=path, fix="wait for it, or end it")


def _differing(line: bytes, run: dict[str, Any]) -> str:
    """What sets the run of a first line apart from `run`."""
    try:
        before, now = _flat(json.loads(line)), _flat(json.loads(json.dumps(run, default=str)))
    except (ValueError, AttributeError):
        return "a first line that says nothing"
    told = [
        f"{name} {str(before.get(name))[:_SHOWN]} (now {str(now.get(name))[:_SHOWN]})"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return some(told)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for key, each in values.items()
        for name, value in (_flat(each).items() if isinstance(each, dict) else [(key, each)])
    }
