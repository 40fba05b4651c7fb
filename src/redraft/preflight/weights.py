"""The files of a drafter's weights by their headers: read leniently, so that everything wrong with them can be told."""

from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from redraft.drafter.files import check_header, indexed, written_hash
from redraft.frame.errors import RedraftError


@dataclass(frozen=True)
class Entry:
    """A tensor by the header of its file."""

    file: Path
    name: str
    shape: list[int]
    dtype: str
    """As safetensors writes it: `BF16`, `I64`, ..."""

    def read(self) -> Tensor:
        """The tensor itself, mapped."""
        with safe_open(self.file, "pt") as file:
            return file.get_tensor(self.name)


@dataclass
class Weights:
    """The files of a drafter as far as they can be read."""

    entries: list[Entry] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    pickles: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """Shards that the index names."""
    broken: dict[str, str] = field(default_factory=dict)
    """File to what is wrong with it."""
    hashes: list[str] = field(default_factory=list)
    """Of the mapping, from the metadata that redraft writes."""

    @property
    def whole(self) -> bool:
        """Whether what is not among the entries is not there."""
        return bool(self.files) and not self.absent and not self.broken


def read_weights(folder: Path) -> Weights:
    """The headers of the safetensors files that SGLang would load, and what it would not."""
    weights = Weights(pickles=sorted(path.name for path in folder.glob("pytorch_model*.bin")))
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = indexed(index)
        except RedraftError as error:
            weights.broken[index.name] = reason(error)
    for name in names:
        path = folder / name
        if not path.is_file():
            weights.absent.append(name)
            continue
        weights.files.append(name)
        try:
            check_header(path)
            with safe_open(path, "pt") as file:
                parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                own = written_hash(file.metadata())
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            weights.broken[name] = f"{type(error).__name__}: {error}"
            continue
        weights.entries += [Entry(path, key, list(p.get_shape()), str(p.get_dtype())) for key, p in parts.items()]
        weights.hashes += [own] if own else []
    return weights


def reason(error: Exception) -> str:
    """An error in one line."""
    return "; ".join(line.strip() for line in str(error).splitlines())
