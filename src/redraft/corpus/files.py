"""Files of chats: JSONL, plain or .gz, and Parquet, row by row."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from redraft.frame.errors import RedraftError, some

KINDS = (".jsonl", ".jsonl.gz", ".parquet")
Raw: TypeAlias = "bytes | dict[str, Any] | Exception"
"""A row as it stands: a line, a row of a table, or why the table does not give it."""
_BATCH = 1024


def files_of(folder: Path, split: str) -> list[Path]:
    """The files of a split: `train.jsonl`, `train.jsonl.gz` or `train.parquet`, or several of a kind, `train-*`.

    Raises:
        RedraftError: files of two kinds, so that it is not told which one counts.
    """
    found = {kind: sorted([*folder.glob(f"{split}{kind}"), *folder.glob(f"{split}-*{kind}")]) for kind in KINDS}
    there = {kind: paths for kind, paths in found.items() if paths}
    if len(there) > 1:
        raise RedraftError(
            "A split of the corpus has files of several kinds.",
            where=folder,
            expected=f"{split} as one of {', '.join(KINDS)}",
            found=some([path.name for paths in there.values() for path in paths]),
            fix="remove what is not meant",
        )
    return next(iter(there.values()), [])


def require_files(folder: Path, split: str) -> list[Path]:
    """`files_of`, and at least one.

    Raises:
        RedraftError: none.
    """
    found = files_of(folder, split)
    if not found:
        raise RedraftError(
            "A corpus file is missing.",
            where=folder / f"{split}.jsonl",
            fix="make it with `redraft regenerate PROMPTS`",
        )
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file, or an unpacked stream.

    Raises:
        RedraftError: no such file, no permission, or a damaged archive, also while it is read.
    """
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        cause = "it is cut short" if isinstance(error, EOFError) else "it is damaged, or no .gz"
        raise RedraftError("A packed file cannot be read.", where=path, found=error, cause=cause) from error
    except OSError as error:
        raise RedraftError("A file cannot be read.", where=path, found=error.strerror or error) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number, its bytes) of lines that are not blank; a byte order mark is no part of the first."""
    with _opened(path) as file:
        head = file.read(4)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise RedraftError(
                "A file is not UTF-8.",
                where=path,
                found="UTF-16, by its first bytes",
                fix=f"convert it, for example: iconv -f UTF-16 -t UTF-8 {path}",
            )
        file.seek(3 if head.startswith(b"\xef\xbb\xbf") else 0)
        # not splitlines: a line separator of Unicode may stand inside a JSON string
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _table(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise RedraftError("A Parquet file cannot be read.", where=path, found=error) from error


def _table_rows(path: Path) -> Iterator[tuple[int, Raw]]:
    import pyarrow

    number = 0
    try:
        for batch in _table(path).iter_batches(_BATCH):
            for row in _listed(batch):
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise RedraftError(
            "A Parquet file cannot be read.", where=f"{path}, after row {number}", found=error
        ) from error


def _listed(batch: Any) -> list[Raw]:
    """Rows of a part of a table; each for itself if one is no Python value: bytes that are no text, odd times."""
    try:
        return batch.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, OverflowError, KeyError) as error:
        if batch.num_rows == 1:
            return [error]
        return [row for at in range(batch.num_rows) for row in _listed(batch.slice(at, 1))]


def raw_rows(path: Path) -> Iterator[tuple[int, Raw]]:
    """(number from 1, row as it stands) of a file of one of `KINDS`; blank lines are none.

    Raises:
        RedraftError: the file cannot be read.
    """
    yield from _table_rows(path) if path.suffix == ".parquet" else _lines(path)


def count_rows(path: Path) -> int:
    """Rows of a file; see `raw_rows`."""
    return _table(path).metadata.num_rows if path.suffix == ".parquet" else sum(1 for _ in _lines(path))


def name_of(path: Path, number: int) -> str:
    """The id of a row that has none."""
    return f"{path.name.split('.')[0]}-{number}"
