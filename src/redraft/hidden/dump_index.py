"""Which file of a dump holds a document: sorted by token ids, so that those that begin with it lie side by side.

The target is causal: of a file that goes on behind the document (SpecForge pads to the longest of a batch, and another
tool may cut later) the first states are the document's own.
"""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from redraft.frame.errors import RedraftError, some
from redraft.frame.progress import note, progress
from redraft.hidden.dump_files import read_dump

_MOST = 2
"""Files that are told of a document: more are not looked at."""


class DumpIndex:
    """Token ids of all files of a dump, 4 bytes a token."""

    def __init__(self, folder: Path, files: Sequence[Path], vocab: int) -> None:
        """Read the ids of every file.

        Raises:
            RedraftError: files that cannot be used; told of the first, with their number.
        """
        self.folder, self.vocab = folder, vocab
        faults: list[RedraftError] = []
        entries: list[tuple[bytes, Path]] = []
        self.largest = 0
        for path in progress(files, "ids of the dump", "file", len(files)):
            try:
                ids = read_dump(path).ids
            except RedraftError as error:
                faults.append(error)
                continue
            self.largest = max(self.largest, int(ids.max()))
            entries.append((_key(ids), path))
        if len(faults) > 1:
            note(f"{len(faults):,} of {len(files):,} files of the dump cannot be used; this is the first:")
        if faults:
            raise faults[0]
        entries.sort()
        self.keys = [key for key, _ in entries]
        self.files = [path for _, path in entries]

    def find(self, ids: Tensor) -> list[Path]:
        """The files whose ids begin with `ids` [T], the shortest first; the first two of them."""
        key = _key(ids)
        first = bisect_left(self.keys, key)
        return [
            file
            for file, each in zip(self.files[first : first + _MOST], self.keys[first : first + _MOST], strict=True)
            if each.startswith(key)
        ]

    def find_all(self, documents: Sequence[Tensor]) -> list[list[Path]]:
        """`find` of every document.

        Raises:
            RedraftError: the dump lacks some.
        """
        found = [self.find(ids) for ids in documents]
        missing = [ids for ids, files in zip(documents, found, strict=True) if not files]
        if missing:
            raise self._missing(missing, len(documents))
        return found

    def _nearest(self, ids: Tensor) -> tuple[int, int, Path]:
        """Of the file that agrees with a document the longest: the tokens that agree, its tokens, and the file."""
        key = _key(ids)
        place = bisect_left(self.keys, key)
        beside = [each for each in (place - 1, place) if 0 <= each < len(self.keys)]
        common = {each: _common(key, self.keys[each]) for each in beside}
        best = max(beside, key=lambda each: common[each])
        return common[best], len(self.keys[best]) // 4, self.files[best]

    def _missing(self, missing: Sequence[Tensor], wanted: int) -> RedraftError:
        nearest = [self._nearest(ids) for ids in missing]
        cuts = [agree for agree, length, _ in nearest if agree == length]
        agree, length, file = nearest[0]
        longest = max(len(key) // 4 for key in self.keys)
        how = "and ends there" if agree == length else f"then goes on with other ones ({length:,} in all)"
        foreign = self.largest >= self.vocab
        if cuts and max(cuts) == longest:
            cause = f"the dump was made with a limit of {longest:,} tokens, the corpus with a higher one"
            fix = f"corpus.max_length: {longest}"
        else:
            cause = (
                f"other tokens: the dump has ids up to {self.largest:,}, the target {self.vocab:,} in all"
                if foreign
                else "other chats, or another chat template, tokenizer or system prompt than the corpus was made with"
            )
            fix = "dump the corpus' own ids, or leave the chats out that were not dumped; or use another extract.engine"
        return RedraftError(
            "The dump lacks documents of the corpus.",
            where=self.folder,
            expected=f"{wanted:,} documents, found by their token ids among {len(self.keys):,} files",
            found=f"{len(missing):,} are missing, {len(cuts):,} of them cut short in the dump; the first has "
            f"{len(missing[0]):,} tokens ({some(missing[0].tolist())}): {file} has its first {agree:,}, {how}",
            cause=cause,
            fix=fix,
        )


def _key(ids: Tensor) -> bytes:
    """Ids as bytes that sort as they do; a beginning of one is a beginning of the other."""
    return ids.numpy().astype(">i4").tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Tokens that agree from the first on."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[: 4 * middle] == other[: 4 * middle] else (low, middle - 1)
    return low
