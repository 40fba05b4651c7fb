"""Conversations answered by a server, many at a time."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator

from redraft.corpus.rows import Refused, UnusableError
from redraft.regenerate.answers import Numbered
from redraft.regenerate.conversation import Answer, Conversation
from redraft.regenerate.server import Server


def answer_by(
    server: Server, waiting: Iterable[Numbered], concurrency: int
) -> Iterator[tuple[int, Conversation | Refused]]:
    """Answer conversations by a server, `concurrency` at a time; twice as many are held.

    Threads wait for the server; templates and tokenizers, which not every thread may use, stay with this one. The
    threads die with the process: an interrupt does not wait for a server that is thinking.
    """
    asked: queue.SimpleQueue[tuple[Numbered, Callable[[], Answer]] | None] = queue.SimpleQueue()
    found: queue.SimpleQueue[tuple[Numbered, Answer | BaseException]] = queue.SimpleQueue()

    def work() -> None:
        while (each := asked.get()) is not None:
            numbered, request = each
            try:
                found.put((numbered, request()))
            except BaseException as fault:
                found.put((numbered, fault))

    def ask(numbered: Numbered) -> None:
        place, conversation = numbered
        asked.put((numbered, server.request(conversation, place)))

    def settle() -> tuple[int, Conversation | Refused] | None:
        """The chat whose answer is next; None if it goes on with another turn."""
        (place, conversation), answer = found.get()
        if isinstance(answer, Answer):
            conversation.take(answer)
        elif not isinstance(answer, UnusableError):
            raise answer
        elif conversation.answers:
            conversation.end("server")
        else:
            return place, Refused(conversation.chat.id, str(answer))
        if conversation.prompt is None:
            return place, conversation
        ask((place, conversation))
        return None

    for _ in range(concurrency):
        threading.Thread(target=work, daemon=True).start()
    running = 0
    try:
        for each in itertools.chain(waiting, itertools.repeat(None)):
            if each:
                ask(each)
                running += 1
            elif not running:
                return
            while running and (each is None or running >= 2 * concurrency or not found.empty()):
                if settled := settle():
                    running -= 1
                    yield settled
    finally:
        server.stopped.set()
        for _ in range(concurrency):
            asked.put(None)
