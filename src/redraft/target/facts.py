"""A target by its `config.json` alone: no weights, and transformers only for what the file leaves to a default."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.target.code import TOKENIZER_CONFIG
from redraft.target.config import read_config

SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")
_MOST = 1 << 31
_OF_SERVERS = (TOKENIZER_CONFIG, "processor_config.json", "preprocessor_config.json")
"""What else a server reads that can name code (`auto_map`)."""


@dataclass(frozen=True)
class TargetFacts:
    """A target by its `config.json`."""

    folder: Path
    top: dict[str, Any]
    """`config.json` as it stands."""
    fields: dict[str, Any]
    """Likewise with the text part laid flat."""

    @property
    def architecture(self) -> str:
        """The class that a server builds; empty if the file names none."""
        named = self.top.get("architectures") or self.fields.get("architectures")
        return str(named[0]) if named and isinstance(named, list) else ""

    @property
    def hidden(self) -> int:
        """H."""
        return self.fields["hidden_size"]

    @property
    def vocab(self) -> int:
        """V."""
        return self.fields["vocab_size"]

    @property
    def depth(self) -> int:
        """L."""
        return self.fields["num_hidden_layers"]

    @property
    def dtype(self) -> str | None:
        """As `config.json` names it."""
        return self.fields.get("dtype") or self.fields.get("torch_dtype")

    @property
    def quantised(self) -> bool:
        """Whether it is served in fewer bits by its configuration."""
        return bool(self.top.get("quantization_config") or self.fields.get("quantization_config"))

    @property
    def remote_code(self) -> bool:
        """Whether it brings Python code of its own, be it the tokenizer's alone: servers ask for permission."""
        files = [self.folder / name for name in _OF_SERVERS]
        return any(
            "auto_map" in fields for fields in [self.top, *(read_object(file) for file in files if file.is_file())]
        )


def read_facts(folder: Path) -> TargetFacts:
    """The facts of a target folder.

    Raises:
        RedraftError: no config.json that can be read, or one that does not say the sizes.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise RedraftError("The target has no readable config.json.", where=path, fix="give the target's folder")
    top = read_object(path)
    text = top.get("text_config")
    fields = {**top, **(text if isinstance(text, dict) else {})}
    if not all(name in fields for name in SIZES):
        try:
            fields = {**read_config(folder).get_text_config().to_dict(), **fields}
        except Exception as error:  # transformers refuses an odd configuration in many ways
            raise RedraftError(
                "The target's config.json does not say its sizes, and transformers does not know it.",
                where=path,
                expected=", ".join(SIZES),
                found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                cause="a drafter's or another folder in place of the target's, or a model of its own code",
            ) from error
    odd = {name: fields.get(name) for name in SIZES if not _size(fields.get(name))}
    if odd:
        raise RedraftError(
            "The target's config.json holds no number that can be.",
            where=path,
            expected="positive whole numbers",
            found=", ".join(f"{name} {value!r:.80}" for name, value in odd.items()),
        )
    return TargetFacts(folder, top, fields)


def _size(value: object) -> bool:
    return type(value) is int and 0 < value < _MOST
