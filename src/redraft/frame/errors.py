"""The one exception family: an error says what, where, expected, found, the likely cause and what to do."""

from collections.abc import Sequence


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
        self.what = what
        details = {
            "where": where,
            "expected": expected,
            "found": found,
            "likely cause": cause,
            "what to do": fix,
        }
        lines = [f"  {name}: {value}" for name, value in details.items() if value is not None]
        super().__init__("\n".join([what, *lines]) + tail)


def some(names: Sequence[object], most: int = 5) -> str:
    """The first of `names`, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
