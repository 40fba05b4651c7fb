"""Read the documents of a shard by memory map."""

import itertools
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from redraft.frame.files import open_tensors


class ShardFile:
    """An open shard."""

    def __init__(self, path: Path) -> None:
        """Open the file at `path`.

        Raises:
            RedraftError: no safetensors file.
        """
        self._open = ExitStack()
        self._file = self._open.enter_context(open_tensors(path))
        self._names = list(self._file.keys())
        own = {name: self._file.get_tensor(name).tolist() for name in self._names if name.endswith("offsets")}
        states = [name for name in self._names if name not in own]
        self._bounds = {name: own.get(f"{name}_offsets", own["offsets"]) for name in states}
        self.lengths = [end - start for start, end in itertools.pairwise(own["offsets"])]
        """Tokens of each document."""

    def read(self, place: int) -> dict[str, Tensor]:
        """The tensors of one document, as they are kept."""
        return {
            name: self._file.get_slice(name)[bounds[place] : bounds[place + 1]] for name, bounds in self._bounds.items()
        }

    def read_all(self) -> dict[str, Tensor]:
        """The tensors of all documents, one after another, with `offsets`."""
        return {name: self._file.get_tensor(name) for name in self._names}
