"""Answer files of chats into one file: to the row resumable, in the order of the input.

What is answered is appended at once to `.<output>.answered`, a line a row with its place; the output is written from it
at the end. Its first line says what was asked, of what and how, so that only the same run goes on from it.
"""

import fcntl
import gzip
import hashlib
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from redraft.corpus.chat import CUT
from redraft.corpus.rows import Refused, UnusableError, read_rows
from redraft.frame import atomic
from redraft.frame.errors import RedraftError, some
from redraft.frame.progress import counter
from redraft.regenerate.conversation import Asking, Conversation
from redraft.regenerate.server import Server

Numbered = tuple[int, Conversation]
Answering = Callable[[Iterator[Numbered]], Iterator[tuple[int, Conversation | UnusableError]]]
_SHOWN = 3


@dataclass
class Told:
    """What is told at the end."""

    rows: int = 0
    answers: int = 0
    cut: int = 0
    tokens: int = 0
    """Generated, of answers that came with ids."""
    without_ids: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Rows that were left out, by id, each with its reason."""
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


def conversations(paths: list[Path], asking: Asking) -> Iterator[tuple[int, Conversation | Refused]]:
    """Every row with its number, ready to be answered, or why it is not."""
    for number, chat in enumerate(read_rows(paths)):
        try:
            yield number, chat if isinstance(chat, Refused) else Conversation(chat, asking)
        except UnusableError as fault:
            yield number, Refused(chat.id, str(fault))


def answer_files(paths: list[Path], output: Path, asking: Asking, answering: Answering, max_dropped: float) -> Told:
    """Answer every chat of `paths`; `output` (plain, or packed by the name .gz) holds them in the same order.

    Args:
        paths: files of chats, see `redraft.corpus.rows`.
        output: file to write.
        asking: how.
        answering: takes numbered conversations, gives them back answered (in any order), or why they cannot be.
        max_dropped: largest share of rows that may be left out.

    Raises:
        RedraftError: too many rows cannot be asked; another run, or one with other settings, writes this output.
    """
    refused, count = _checked(paths, asking, max_dropped)
    identity = {"prompts": [_hash(path) for path in paths], "made": asking.made, "last_only": asking.last_only}
    with _journal(output, identity) as journal:
        told = Told(refused=dict(refused.values()))
        places = _answered(journal)

        def waiting() -> Iterator[Numbered]:
            for number, conversation in conversations(paths, asking):
                if number not in places and not isinstance(conversation, Refused):
                    yield number, conversation

        began, generated = time.monotonic(), 0
        with counter(count, "regenerate", "chat", initial=len(places) + len(refused)) as bar:
            for number, answered in answering(waiting()):
                bar.update()
                if isinstance(answered, UnusableError):
                    told.refused[f"row {number + 1}"] = str(answered)
                    continue
                row = answered.row()
                places[number] = _append(journal, number, row)
                generated += sum(len(answer.ids or ()) for answer in answered.answers)
                bar.set_postfix_str(f"{generated / (time.monotonic() - began):,.0f} tokens/s", refresh=False)
        _require_few(told.refused, count, max_dropped, "of the server" if refused else "")
        with atomic.opened(output) as file:
            packed: IO[bytes] = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if output.suffix == ".gz" else file  # type: ignore[assignment]
            for number in sorted(places):
                journal.seek(places[number])
                row = json.loads(journal.readline())["row"]
                told.count(row)
                packed.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
            if packed is not file:
                packed.close()
    _journal_path(output).unlink()
    return told


def _checked(paths: list[Path], asking: Asking, max_dropped: float) -> tuple[dict[int, tuple[str, str]], int]:
    """Every prompt is rendered before anything is generated: rows that cannot be asked (id, reason), and all rows.

    Raises:
        RedraftError: too many cannot be asked, or there is no row.
    """
    refused: dict[int, tuple[str, str]] = {}
    count = 0
    for number, conversation in conversations(paths, asking):
        count += 1
        if isinstance(conversation, Refused):
            refused[number] = (conversation.id, conversation.reason)
    _require_few(dict(refused.values()), count, max_dropped, some(paths))
    return refused, count


def _require_few(refused: dict[str, str], count: int, max_dropped: float, where: object) -> None:
    if count and len(refused) < count and len(refused) <= max_dropped * count:
        return
    raise RedraftError(
        "Too many chats cannot be answered." if count else "There are no chats.",
        where=where or None,
        expected=f"at most {max_dropped:.0%} (corpus.max_dropped in the profile)",
        found=f"{len(refused):,} of {count:,}: {_shown(refused)}" if refused else "no rows",
        fix="mend or remove them",
    )


def _shown(refused: dict[str, str]) -> str:
    return some([f"{name} ({reason})" for name, reason in refused.items()], _SHOWN)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _journal_path(output: Path) -> Path:
    return output.with_name(f".{output.name}.answered")


@contextmanager
def _journal(output: Path, identity: dict[str, Any]) -> Iterator[IO[bytes]]:
    """The journal of `output`, new or taken up, for this process alone.

    Raises:
        RedraftError: another process has it, or it is of a run that asked something else.
    """
    path = _journal_path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    first = json.dumps(identity, sort_keys=True).encode() + b"\n"
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RedraftError("Another process writes this output.", where=path, fix="wait for it") from error
        file.seek(0)
        found = file.readline()
        if not found.endswith(b"\n"):  # new, or killed at its first line
            file.truncate(0)
            file.write(first)
            file.flush()
        elif found != first:
            differing = _differing(found, identity)
            raise RedraftError(
                "A run that asked something else was broken off here.",
                where=path,
                expected=f"the same {', '.join(differing)}",
                fix="give the same options and prompts to go on; or remove the file to begin anew",
            )
        yield file


def _differing(line: bytes, identity: dict[str, Any]) -> list[str]:
    try:
        found = json.loads(line)
    except ValueError:
        return ["run"]
    before, now = ({**each, **each.pop("made", {})} for each in (dict(found), dict(identity)))
    return [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]


def _answered(journal: IO[bytes]) -> dict[int, int]:
    """Places in the journal by number of row; half a line at its end, of a run that was killed, is cut off."""
    places: dict[int, int] = {}
    start = journal.tell()
    for line in iter(journal.readline, b""):
        if not line.endswith(b"\n"):
            journal.truncate(start)
            break
        places[json.loads(line)["place"]] = start
        start += len(line)
    return places


def _append(journal: IO[bytes], number: int, row: dict[str, Any]) -> int:
    start = journal.seek(0, 2)
    journal.write(json.dumps({"place": number, "row": row}, ensure_ascii=False).encode() + b"\n")
    journal.flush()  # with the kernel: it survives this process
    return start


def answer_by(
    server: Server, waiting: Iterable[Numbered], concurrency: int
) -> Iterator[tuple[int, Conversation | UnusableError]]:
    """Answer conversations by a server, `concurrency` at a time.

    Its threads die with the process: an interrupt does not wait for a server that is thinking.
    """
    asked: queue.Queue[Numbered | None] = queue.Queue(2 * concurrency)
    found: queue.Queue[tuple[int, Conversation | UnusableError] | BaseException] = queue.Queue()

    def work() -> None:
        while (each := asked.get()) is not None:
            number, conversation = each
            try:
                while conversation.prompt is not None:
                    conversation.take(server.answer(conversation, number))
                found.put((number, conversation))
            except UnusableError as fault:
                found.put((number, fault))
            except BaseException as fault:
                found.put(fault)
                return

    for _ in range(concurrency):
        threading.Thread(target=work, daemon=True).start()
    running = 0
    try:
        for each in waiting:
            asked.put(each)
            running += 1
            while running >= 2 * concurrency or not found.empty():
                yield _result(found.get())
                running -= 1
        for _ in range(running):
            yield _result(found.get())
    finally:
        server.stopped.set()
        for _ in range(concurrency):
            asked.put_nowait(None) if not asked.full() else None


def _result(each: tuple[int, Conversation | UnusableError] | BaseException) -> tuple[int, Conversation | UnusableError]:
    if isinstance(each, BaseException):
        raise each
    return each
