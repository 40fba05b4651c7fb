"""The one exception family: an error says what, where, expected, found, the likely cause and what to do."""

import errno
from collections.abc import Sequence

_CAUSES = {
    errno.ENOSPC: ("the disk is full", "free some room, or move `.store` with REDRAFT_STORE"),
    errno.EDQUOT: ("the quota is used up", "free some room, or move `.store` with REDRAFT_STORE"),
    errno.EACCES: ("another user owns it", "check owner and permissions"),
    errno.EPERM: ("another user owns it", "check owner and permissions"),
    errno.EROFS: ("it lies on a file system that cannot be written", "choose another place"),
    errno.ENOENT: ("it was moved or never made", "check the path; `dvc repro` makes what stages need"),
    errno.EMFILE: ("this process may not open as many files", "ulimit -n 4096"),
    errno.EIO: ("a failing disk or network file system", "check the disk"),
}


class RedraftError(Exception):
    """Bad input or a broken invariant, told to the user without a traceback.

    Args:
        what: one sentence that names the fault.
        where: file, tensor, slot or parameter.
        expected: what should have been there.
        found: what was there.
        cause: the likely cause.
        fix: what to do next.
        tail: lines put below, for example the last ones of a log.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        found: object = None,
        cause: str | None = None,
        fix: str | None = None,
        tail: str = "",
    ) -> None:
        self.what, self.found = what, found
        details = {
            "where": where,
            "expected": expected,
            "found": found,
            "likely cause": cause,
            "what to do": fix,
        }
        lines = [f"  {name}: {value}" for name, value in details.items() if value is not None]
        super().__init__("\n".join([what, *lines]) + tail)


def explained(error: RedraftError | OSError) -> RedraftError:
    """`error` itself, or what the operating system refused as an error of this family."""
    if isinstance(error, RedraftError):
        return error
    cause, fix = _CAUSES.get(error.errno or 0, (None, "REDRAFT_DEBUG=1 shows where it happened"))
    return RedraftError(
        "The operating system refused this.",
        where=error.filename or type(error).__name__,
        found=error.strerror or error,
        cause=cause,
        fix=fix,
    )


def some(names: Sequence[object], most: int = 5) -> str:
    """The first of `names`, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
