"""The transformers library as this project uses it: no hub, no bars, no advice; imported when first needed."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError


def offline_transformers() -> Any:
    """Import transformers for local folders only, without its progress bars and warnings."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", "")  # it keeps rank files by path, and would read an older target's
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextmanager
def asking_transformers(what: str, folder: Path, trusted: bool) -> Iterator[None]:
    """Turn whatever transformers, or code in `folder`, raises while it makes `what` into one error.

    Raises:
        RedraftError: a package is missing, an import moved, or any other exception; with the modules in the folder.
    """
    try:
        yield
    except RedraftError:
        raise
    except Exception as error:  # many kinds, from many versions and from code of others; one answer
        own = sorted(file.name for file in folder.glob("*.py"))
        told = f"transformers cannot make the {what}."
        fix = "another revision of the model, or another release of transformers"
        if missing := _missing_packages(error):
            told = f"Packages that the {what} needs are not installed: {', '.join(missing)}."
            names = ["'redraft[kimi]'" if name == "tiktoken" else name for name in missing]
            fix = f"pip install {' '.join(names)} (or the package that has this module)"
        elif isinstance(error, ImportError) and error.name:
            told = f"Code of the {what} imports from {error.name} what is not there: it moved, or never was."
            fix = f"another revision of the model, or another release of {error.name.partition('.')[0]}"
        elif isinstance(error, ImportError):
            fix = f"install what is missing, or take {fix}"
        elif own and not trusted:
            fix = "target.trust_remote_code in the profile lets the folder's own code run"
        message = " ".join(str(error).split())
        raise RedraftError(
            told,
            where=f"{folder}, with its own {', '.join(own)}" if own else folder,
            found=f"{type(error).__name__}: {message[:400]}",
            fix=fix,
        ) from error


def _missing_packages(error: Exception) -> list[str]:
    """The packages whose lack `error` tells of: of an import, or those that transformers lists for a whole file."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        name = error.name.partition(".")[0]
        return [] if find_spec(name) else [name]
    listed = re.search(r"packages that were not found in your environment: ([\w, ]+)", str(error))
    return listed[1].split(", ") if isinstance(error, ImportError) and listed else []
