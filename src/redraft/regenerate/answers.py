"""Answer files of chats into one file: to the row resumable, in the order of the input."""

import gzip
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from redraft.corpus.chat import CUT
from redraft.corpus.files import count_rows
from redraft.corpus.rows import Refused, UnusableError, read_rows
from redraft.frame import atomic
from redraft.frame.errors import RedraftError, some
from redraft.frame.progress import counter
from redraft.regenerate.answered import Answered, answered
from redraft.regenerate.conversation import Asking, Conversation

Numbered = tuple[int, Conversation]
Answering = Callable[[Iterator[Numbered]], Iterator[tuple[int, Conversation | Refused]]]
_SHOWN = 3
_LONG = 2000
"""Rows whose prompts take long enough to check that it is shown."""


@dataclass
class Told:
    """What is told at the end."""

    rows: int = 0
    answers: int = 0
    cut: int = 0
    tokens: int = 0
    """Generated, of answers that came with ids."""
    without_ids: int = 0
    refused: list[Refused] = field(default_factory=list)
    """Rows that were left out."""
    ended: Counter[str] = field(default_factory=Counter)
    """Chats whose later turns were not answered, by why."""

    def count(self, row: dict[str, Any]) -> None:
        """Count a row that was answered."""
        self.rows += 1
        made = [message for message in row["messages"] if "finish" in message]
        self.answers += len(made)
        self.cut += sum(message["finish"] == CUT for message in made)
        self.tokens += sum(len(message.get("generated_ids", ())) for message in made)
        self.without_ids += sum("generated_ids" not in message for message in made)
        if "ended" in row:
            self.ended[row["ended"].split(":")[0]] += 1


def conversations(
    paths: list[Path], asking: Asking, without: Container[int] = ()
) -> Iterator[tuple[int, Conversation | Refused]]:
    """Every row with its place, ready to be answered, or why it is not; those at places in `without` are left out."""
    for place, chat in enumerate(read_rows(paths)):
        if place in without:
            continue
        try:
            yield place, chat if isinstance(chat, Refused) else Conversation(chat, asking)
        except UnusableError as fault:
            yield place, Refused(chat.id, str(fault))


def answer_files(paths: list[Path], output: Path, asking: Asking, answering: Answering, max_dropped: float) -> Told:
    """Answer every chat of `paths`; `output` (plain, or packed by the name .gz) holds them in the same order.

    Every prompt is rendered before anything is generated.

    Args:
        paths: files of chats, see `redraft.corpus.rows`.
        output: file to write.
        asking: how.
        answering: takes conversations with their places, gives them back answered (in any order), or refused.
        max_dropped: largest share of rows that may be left out.

    Raises:
        RedraftError: too many rows cannot be answered; another run, or one with other settings, writes this output.
    """
    count = sum(map(count_rows, paths))
    run = {"prompts_sha256": " ".join(map(_hash, paths)), "last_only": asking.last_only, "made": asking.made}
    with answered(output, run) as done:
        try:
            told = _answer(paths, done, asking, answering, count, max_dropped)
        except KeyboardInterrupt:
            kept = f"{len(done):,} of {count:,} chats are kept: the same command goes on from there"
            print(f"\n{kept}" if len(done) else "", file=sys.stderr)
            raise
        _write(done, output, told)
    return told


def _answer(
    paths: list[Path], done: Answered, asking: Asking, answering: Answering, count: int, max_dropped: float
) -> Told:
    refused: dict[int, Refused] = {}
    with counter(count, "check the prompts", "chat", initial=len(done), shown=count > _LONG) as bar:
        for place, each in conversations(paths, asking, done):
            bar.update()
            if isinstance(each, Refused):
                refused[place] = each
    _require_few(refused, count, max_dropped, paths)

    def waiting() -> Iterator[Numbered]:
        for place, each in conversations(paths, asking, done):
            if isinstance(each, Conversation):
                yield place, each

    began, generated = time.monotonic(), 0
    with counter(count, "regenerate", "chat", initial=len(done) + len(refused)) as bar:
        for place, each in answering(waiting()):
            bar.update()
            if isinstance(each, Refused):
                refused[place] = each
                _require_few(refused, count, max_dropped, paths)
                continue
            done.add(place, each.row())
            generated += sum(answer.tokens for answer in each.answers)
            bar.set_postfix_str(f"{generated / (time.monotonic() - began):,.0f} tokens/s", refresh=False)
    return Told(refused=[refused[place] for place in sorted(refused)])


def _write(done: Answered, output: Path, told: Told) -> None:
    with atomic.opened(output) as file:
        packed: IO[bytes] = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if output.suffix == ".gz" else file  # type: ignore[assignment]
        for row in done.rows():
            told.count(row)
            packed.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if packed is not file:
            packed.close()


def _require_few(refused: dict[int, Refused], count: int, max_dropped: float, paths: list[Path]) -> None:
    if count and len(refused) < count and len(refused) <= max_dropped * count:
        return
    told = shown([refused[place] for place in sorted(refused)])
    raise RedraftError(
        "Too many chats cannot be answered." if count else "There are no chats.",
        where=some(paths),
        expected=f"at most {max_dropped:.0%} (corpus.max_dropped in the profile)" if count else None,
        found=f"{len(refused):,} of {count:,}: {told}" if count else "no rows",
        fix="mend or remove them" if count else None,
    )


def shown(refused: list[Refused]) -> str:
    """The first ones, with their reasons."""
    return some([f"{each.id} ({each.reason})" for each in refused], _SHOWN)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
