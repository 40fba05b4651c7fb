"""The transformers library as this project uses it: no hub, no bars, no advice; imported when first needed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError


def offline_transformers() -> Any:
    """Import transformers for local folders only, without its progress bars and warnings."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextmanager
def asking_transformers(what: str, folder: Path, trust_remote_code: bool) -> Iterator[None]:
    """Turn whatever transformers, or code in `folder`, raises while it makes `what` into one error.

    Raises:
        RedraftError: with the exception, the modules in the folder and what to do.
    """
    try:
        yield
    except RedraftError:
        raise
    except Exception as error:  # many kinds, from many versions and from code of others; one answer
        own = sorted(file.name for file in folder.glob("*.py"))
        fix = "another revision of the model, or another release of transformers"
        lacks = isinstance(error, ModuleNotFoundError) or (isinstance(error, ImportError) and error.name is None)
        if lacks:  # transformers lists the packages that code asks for in an ImportError of no module
            fix = "install what is missing, or take " + fix
        if own and not trust_remote_code:
            fix = "target.trust_remote_code: true in the profile lets the folder's own code run"
        message = " ".join(str(error).split())
        raise RedraftError(
            f"transformers cannot make the {what}.",
            where=f"{folder}, with its own {', '.join(own)}" if own else folder,
            found=f"{type(error).__name__}: {message[:400]}",
            fix=fix,
        ) from error
