"""Load: the same prompts for every arm of a bench, in blocks, by a fixed number of clients that wait for each answer.

An arm is an engine: the target alone (`plain`), or with a drafter and a number of drafts. Where all arms can live at
once they take turns block by block; servers that need the machine for themselves run one after the other, the plain one
again at the end (A-B-A), so that a drift of the machine shows.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from redraft.engines.arm import PLAIN
from redraft.engines.engine import Engine, Generation, serving
from redraft.frame.errors import RedraftError
from redraft.frame.progress import counter

AGAIN = "plain again"
WARM_UP_TOKENS = 8
LEAST_BLOCKS, GOOD_BLOCKS = 3, 8


@dataclass
class Block:
    """What one arm answered to one block of prompts."""

    answers: list[Generation]
    seconds: float
    """From the first request to the last answer."""
    errors: list[str] = field(default_factory=list)
    """What was told in place of an answer."""
    server: str = ""
    """What tells the server from another; see `Engine.fingerprint`."""


Series = dict[str, list[Block]]
"""Blocks of every arm, the same prompts at the same place."""


def blocks_of(prompts: Sequence[list[int]], concurrency: int) -> list[Sequence[list[int]]]:
    """Prompts in blocks of 4 a client (one client: of one), fewer where that gives fewer than `GOOD_BLOCKS` blocks.

    Raises:
        RedraftError: too few prompts to keep that many clients busy.
    """
    size = 1 if concurrency == 1 else max(concurrency, min(4 * concurrency, len(prompts) // GOOD_BLOCKS))
    if len(prompts) < LEAST_BLOCKS * size:
        raise RedraftError(
            "There are too few prompts for this concurrency.",
            where="bench.prompts in the profile, and the held-out samples",
            expected=f"at least {LEAST_BLOCKS * concurrency} for concurrency {concurrency}",
            found=len(prompts),
        )
    return [prompts[at : at + size] for at in range(0, len(prompts) - size + 1, size)]


def run_block(engine: Engine, prompts: Sequence[list[int]], max_new_tokens: int, concurrency: int) -> Block:
    """Answer `prompts` with `concurrency` clients; an error in place of an answer is kept.

    Raises:
        RedraftError: no prompt was answered, and the engine cannot generate any more.
    """
    errors: list[RedraftError] = []
    try:
        engine.flush()
    except RedraftError as error:
        errors.append(error)

    def client(prompt: list[int]) -> Generation | None:
        try:
            return engine.generate(prompt, max_new_tokens)
        except RedraftError as error:
            errors.append(error)
            return None

    began = time.perf_counter()
    if concurrency == 1:
        given = [client(prompt) for prompt in prompts]
    else:
        pool = ThreadPoolExecutor(concurrency)
        try:
            given = list(pool.map(client, prompts))
        except BaseException:  # an interrupt must not wait for the answers that are under way
            pool.shutdown(wait=False, cancel_futures=True)
            engine.stop()
            raise
        pool.shutdown()
    seconds = time.perf_counter() - began
    answers = [answer for answer in given if answer is not None]
    if not answers and not engine.ready():
        raise errors[0]
    return Block(answers, seconds, [error.what for error in errors], engine.fingerprint())


def warm_up(engine: Engine, prompts: Sequence[list[int]], concurrency: int) -> None:
    """Pay the costs of a first use at this concurrency, unscored: two short answers a client."""
    run_block(engine, [prompts[at % len(prompts)] for at in range(2 * concurrency)], WARM_UP_TOKENS, concurrency)


def measure(
    arms: Mapping[str, Engine],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    levels: Sequence[int],
    *,
    together: bool,
    told: Callable[[str], None] = print,
) -> dict[int, Series]:
    """Measure every arm at every concurrency.

    Args:
        arms: engines by name, not started, `PLAIN` first if it is there.
        prompts: token ids.
        max_new_tokens: of each answer.
        levels: concurrencies.
        together: all arms can live at once.
        told: is told the cost beforehand.

    Returns:
        Blocks by concurrency and arm; apart and with `PLAIN`, also its second run as `AGAIN`.

    Raises:
        RedraftError: an engine that dies, or answers nothing at all.
    """
    parts = {level: blocks_of(prompts, level) for level in levels}
    order = list(arms)
    if not together and PLAIN in arms:
        order.append(AGAIN)
    answers = len(order) * sum(len(block) for level in levels for block in parts[level])
    told(
        f"bench: {len(arms)} arms{', the plain one twice' if AGAIN in order else ''}, concurrency "
        f"{', '.join(map(str, levels))}: {answers} answers of at most {max_new_tokens} tokens"
    )
    found: dict[int, Series] = {level: {name: [] for name in order} for level in levels}
    with counter(answers, "bench", "answer") as bar:
        if together:
            _in_turn(arms, parts, max_new_tokens, found, bar.update)
        for name in order if not together else ():
            with serving(arms[PLAIN if name == AGAIN else name]) as engine:
                for level in levels:
                    warm_up(engine, prompts, level)
                    for part in parts[level]:
                        found[level][name].append(run_block(engine, part, max_new_tokens, level))
                        bar.update(len(part))
    for level, series in found.items():
        for name, blocks in series.items():
            if not any(block.answers for block in blocks):
                errors = {error for block in blocks for error in block.errors}
                raise RedraftError(
                    "An arm gave no answer.", where=f"{name}, concurrency {level}", found=", ".join(errors)
                )
    return found


def _in_turn(
    arms: Mapping[str, Engine],
    parts: Mapping[int, Sequence[Sequence[list[int]]]],
    max_new_tokens: int,
    found: dict[int, Series],
    done: Callable[[int], object],
) -> None:
    """Block by block, the arms in rotated order."""
    order = list(arms)
    with ExitStack() as stack:
        for engine in arms.values():
            stack.enter_context(serving(engine))
        for level, blocks in parts.items():
            for engine in arms.values():
                warm_up(engine, blocks[0], level)
            for number, part in enumerate(blocks):
                turn = number % len(order)
                for name in order[turn:] + order[:turn]:
                    found[level][name].append(run_block(arms[name], part, max_new_tokens, level))
                    done(len(part))
