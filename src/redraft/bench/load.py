"""Load: the same prompts for every arm of a bench, in blocks, by a fixed number of clients that wait for each answer.

Where all arms can live at once they take turns block by block; servers that need the machine for themselves run one
after the other, the plain one again at the end (A-B-A), so that a drift of the machine shows.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from redraft.engines.arm import AGAIN, PLAIN, Arm
from redraft.engines.engine import Engine, Generation, serving
from redraft.engines.prompts import require_drafts
from redraft.frame.errors import RedraftError
from redraft.frame.progress import counter

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


Series = dict[Arm, list[Block]]
"""Blocks of every arm, the same prompts at the same place."""
_Run = Callable[[Arm, Engine, int, Sequence[list[int]]], None]
"""Measures one block of an arm at a concurrency."""


@dataclass(frozen=True)
class Plan:
    """What every arm is asked."""

    blocks: dict[int, list[Sequence[list[int]]]]
    """By concurrency, prompts in blocks."""
    max_new_tokens: int
    """Of each answer."""

    @classmethod
    def of(cls, prompts: Sequence[list[int]], max_new_tokens: int, levels: Sequence[int]) -> "Plan":
        """The same prompts at every concurrency of `levels`.

        Raises:
            RedraftError: too few prompts, or answers too short to measure anything.
        """
        require_drafts(max_new_tokens, "bench")
        return cls({level: blocks_of(prompts, level) for level in levels}, max_new_tokens)


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


def warm_up(engine: Engine, parts: Sequence[Sequence[list[int]]], concurrency: int) -> None:
    """Pay the costs of a first use at this concurrency, unscored: two short answers a client."""
    prompts = [prompt for part in parts for prompt in part]
    run_block(engine, [prompts[at % len(prompts)] for at in range(2 * concurrency)], WARM_UP_TOKENS, concurrency)


def measure(
    arms: Mapping[Arm, Engine], plan: Plan, *, together: bool, told: Callable[[str], None] = print
) -> dict[int, Series]:
    """Measure every arm at every concurrency.

    Args:
        arms: engines, not started, `PLAIN` first if it is there.
        plan: what they are asked.
        together: all arms can live at once.
        told: is told the cost beforehand, and the time that it will take once the first block was answered.

    Returns:
        Blocks by concurrency and arm; apart and with `PLAIN`, also its second run as `AGAIN`.

    Raises:
        RedraftError: an engine that dies, or answers nothing at all.
    """
    order = [*arms, *([AGAIN] if PLAIN in arms and not together else [])]
    found: dict[int, Series] = {level: {arm: [] for arm in order} for level in plan.blocks}
    answers = len(order) * sum(len(part) for parts in plan.blocks.values() for part in parts)
    told(
        f"bench: {len(arms)} arms{', the plain one twice' if AGAIN in order else ''}, concurrency "
        f"{', '.join(map(str, plan.blocks))}: {answers} answers of at most {plan.max_new_tokens} tokens"
    )
    with counter(answers, "bench", "answer") as bar:

        def run(arm: Arm, engine: Engine, level: int, part: Sequence[list[int]]) -> None:
            block = run_block(engine, part, plan.max_new_tokens, level)
            if not bar.n:
                left = (answers - len(part)) / len(part) * block.seconds
                starts = f", and the start of {len(order) - 1} servers" if not together else ""
                told(f"bench: at the pace of the first answers about {duration(left)} more{starts}")
            found[level][arm].append(block)
            bar.update(len(part))

        (_together if together else _apart)(arms, plan, run)
    _require_answers(found)
    return found


def duration(seconds: float) -> str:
    """In the unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _apart(arms: Mapping[Arm, Engine], plan: Plan, run: _Run) -> None:
    """One engine after the other, the plain one again at the end."""
    for arm in [*arms, *([AGAIN] if PLAIN in arms else [])]:
        with serving(arms[PLAIN if arm == AGAIN else arm]) as engine:
            for level, parts in plan.blocks.items():
                warm_up(engine, parts, level)
                for part in parts:
                    run(arm, engine, level, part)


def _together(arms: Mapping[Arm, Engine], plan: Plan, run: _Run) -> None:
    """Block by block, the arms in rotated order."""
    order = list(arms)
    with ExitStack() as stack:
        for engine in arms.values():
            stack.enter_context(serving(engine))
        for level, parts in plan.blocks.items():
            for engine in arms.values():
                warm_up(engine, parts, level)
            for number, part in enumerate(parts):
                turn = number % len(order)
                for arm in order[turn:] + order[:turn]:
                    run(arm, arms[arm], level, part)


def _require_answers(found: Mapping[int, Series]) -> None:
    for level, series in found.items():
        for arm, blocks in series.items():
            if not any(block.answers for block in blocks):
                errors = {error for block in blocks for error in block.errors}
                raise RedraftError(
                    "An arm gave no answer.", where=f"{arm.label}, concurrency {level}", found=", ".join(errors)
                )
