"""Commands that a document shows, for tests that type them."""

import re
from pathlib import Path


def commands_of(document: Path) -> list[str]:
    """The lines of all `sh` blocks of a Markdown document, in order."""
    blocks = re.findall(r"```sh\n(.*?)```", document.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]
