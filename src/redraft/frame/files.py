"""Read files that another program wrote; what cannot be read ends in one clear error, as `atomic` is for writing."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from redraft.frame.errors import RedraftError


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark.

    Raises:
        RedraftError: no such file, a folder, no permission, or bytes that are not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RedraftError("A file cannot be read.", where=path, found=error.strerror or error) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        wide = error.object.startswith((b"\xff\xfe", b"\xfe\xff"))
        raise RedraftError(
            "A file is not UTF-8.",
            where=f"{path}, line {line}",
            found="UTF-16, by its first bytes" if wide else f"{error.reason}: 0x{error.object[error.start]:02x}",
            fix=f"convert it, for example: iconv -f {'UTF-16' if wide else 'LATIN1'} -t UTF-8 {path}",
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        RedraftError: as `read_text`, or it is no JSON, or no object.
    """
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        raise RedraftError(
            "A file is no JSON.", where=path, found=error, cause="an incomplete download or a slip in an edit"
        ) from error
    if not isinstance(value, dict):
        raise RedraftError("A JSON file holds no object.", where=path, expected="{...}", found=type(value).__name__)
    return value


def spread(size: int, block: int, blocks: int) -> Iterator[tuple[int, int]]:
    """Start and length of `blocks` blocks, the first and the last of a file among them; all of a short file."""
    stride = max(block, (size - block) / (blocks - 1))
    return ((int(number * stride), block) for number in range(blocks))


@contextmanager
def open_tensors(path: Path, framework: str = "pt") -> Iterator[Any]:
    """An open safetensors file whose tensors are PyTorch's, or with `np` NumPy's.

    Raises:
        RedraftError: no such file, not safetensors, or cut short.
    """
    try:
        with safe_open(path, framework) as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise RedraftError(
            "A safetensors file cannot be read.",
            where=path,
            found=error,
            cause="an incomplete download or copy, or a file of another kind",
        ) from error
