"""The transformers library as this project uses it: no hub, no bars, no advice; imported when first needed."""

import os
from typing import Any


def offline_transformers() -> Any:
    """Import transformers for local folders only, without its progress bars and warnings."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
