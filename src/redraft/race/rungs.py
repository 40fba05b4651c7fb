"""The race itself: rung by rung, all who are left on one budget, then the better half goes on."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redraft.frame.errors import RedraftError
from redraft.race.compare import Ratio, Walk, ratio
from redraft.race.contenders import SCRATCH, Contender, Settings, percent
from redraft.race.halving import go_on
from redraft.race.queue import Queue, git, read, read_cached
from redraft.race.speed import Cycles

PAGES = "race"
"""The folder of pages: no part of what decides a race."""


@dataclass(frozen=True)
class Result:
    """What one training came to."""

    contender: Contender
    experiment: str
    settings: Settings
    """All that `-S` was given."""
    train: Mapping[str, Any]
    """`metrics/train.json`."""
    walk: Walk
    cycle_ms: float | None
    """Of a server with its head, ms; None where no bench tells."""

    @property
    def speed(self) -> float | None:
        """Predicted tokens/s."""
        return 1000 * self.walk.length / self.cycle_ms if self.cycle_ms else None


@dataclass
class Rung:
    """One budget."""

    share: float
    results: list[Result]
    """Best first."""
    failed: dict[str, list[str]]
    """By contender, the last lines of its log."""
    kept: list[str] = field(default_factory=list)
    """Contenders that went on; of the last rung all."""

    def of(self, name: str) -> Result:
        """The result of a contender."""
        return next(result for result in self.results if result.contender.name == name)

    @property
    def by_speed(self) -> bool:
        """Whether tokens/s are compared, and not accept lengths alone."""
        return all(result.speed is not None for result in self.results)

    def ratio(self, one: str, other: str) -> Ratio:
        """Predicted tokens/s of one over those of the other, or accept lengths."""
        first, second = self.of(one), self.of(other)
        factor = second.cycle_ms / first.cycle_ms if self.by_speed and first.cycle_ms and second.cycle_ms else 1.0
        return ratio(first.walk, second.walk, factor)

    def tied(self, one: str, other: str) -> bool:
        """Whether no difference is seen."""
        return self.ratio(one, other).tied


def race_id() -> str:
    """Names what a race begins from: the commit and what the workspace changes of it, pages of races aside."""
    changes = git("diff", "HEAD", "--binary", "--", ".", f":!{PAGES}")
    return hashlib.sha256(f"{git('rev-parse', 'HEAD')} {changes}".encode()).hexdigest()[:6]


@dataclass
class Race:
    """What a race needs to run."""

    queue: Queue
    contenders: Sequence[Contender]
    shares: Sequence[float]
    epochs: float
    """Passes of the whole budget."""
    fixed: Settings
    """Set for all: that nobody's patience ends before the budget does."""
    cycles: Cycles
    keep_all: bool
    tell: Callable[[str], None]
    waited: float = 0.0
    """Seconds since the race began that something ran."""
    work: float = 0.0
    """Shares of the whole budget, and a constant for each, that were run in them."""

    def run(self) -> list[Rung]:
        """All rungs.

        Raises:
            RedraftError: fewer than two contenders are left, or documents differ.
        """
        left, rungs = list(self.contenders), []
        for number, share in enumerate(self.shares):
            rung = self._rung(left, number)
            rungs.append(rung)
            if len(rung.results) < 2:
                raise RedraftError(
                    "Fewer than two contenders came through: nothing can be compared.",
                    where=f"{percent(share)} % of the tokens",
                    found=", ".join(f"{name} failed" for name in rung.failed),
                    tail="".join(f"\n  {name}: {line}" for name, log in rung.failed.items() for line in log),
                )
            ranked = [result.contender.name for result in rung.results]
            last = number == len(self.shares) - 1
            scratch = [result.contender.name for result in rung.results if result.contender.init == SCRATCH]
            rung.kept = ranked if last or self.keep_all else go_on(ranked, scratch, rung.tied)
            for name in ranked if not last else ():
                if name not in rung.kept:
                    self.tell(f"{name} is cut after {percent(share)} %")
            left = [contender for contender in left if contender.name in rung.kept]
        return rungs

    def _rung(self, left: Sequence[Contender], number: int) -> Rung:
        share, began = self.shares[number], time.monotonic()
        named = {f"{self.queue.prefix}{each.name}-{percent(share)}": each for each in left}
        settings = (("epochs", f"{share * self.epochs:.10g}"), *self.fixed)
        there = self.queue.done()
        fresh = [name for name in named if name not in there]
        for name in fresh:
            self.queue.put(name, (*named[name].settings, *settings))
        if fresh:
            self.queue.start()
        results: list[Result] = []
        failed: dict[str, list[str]] = {}
        for name in (name for name in named if name in there):
            results.append(self._result(named[name], name, there[name], settings))
            self._told(results[-1], "was there already", number, left, len(results) + len(failed))
        for name, commit in self.queue.ended(fresh):
            now = time.monotonic()
            self.waited, self.work, began = self.waited + now - began, self.work + _cost(share), now
            if commit is None:
                failed[named[name].name] = log = self.queue.log(name)
                self.tell("\n    | ".join([f"{name} failed; the others go on", *log]))
                continue
            results.append(self._result(named[name], name, commit, settings))
            self._told(results[-1], "", number, left, len(results) + len(failed))
        return _ranked(share, results, failed)

    def _result(self, contender: Contender, name: str, commit: str, settings: Settings) -> Result:
        train, walk = read(commit, "metrics/train.json"), Walk.read(read_cached(commit, "artifacts/walks.json"))
        cycle = self.cycles.at(walk.spec_steps, walk.slots)
        return Result(contender, name, (*contender.settings, *settings), train, walk, cycle)

    def _told(self, result: Result, how: str, number: int, left: Sequence[Contender], ended: int) -> None:
        speed = f", {result.speed:.1f} tokens/s predicted" if result.speed else ""
        seconds = self._seconds_left(number, len(left), ended)
        until = f"; at most {seconds / 60:.0f} min left" if seconds and seconds >= 60 else ""
        again = f" ({how})" if how else ""
        self.tell(f"{result.experiment}: accept length {result.walk.length:.3f}{speed}{again}{until}")

    def _seconds_left(self, number: int, width: int, ended: int) -> float | None:
        """Seconds for what is left of this rung and of those to come, were nobody cut that may stay."""
        if not self.work:
            return None
        work = (width - ended) * _cost(self.shares[number])
        for share in self.shares[number + 1 :]:
            width = width if self.keep_all else min(width, max(2, -(-width // 2)) + 1)
            work += width * _cost(share)
        return self.waited / self.work * work


def _cost(share: float) -> float:
    """Relative time of a training: that of its tokens, and what every experiment takes once."""
    return share + 0.25


def _ranked(share: float, results: list[Result], failed: dict[str, list[str]]) -> Rung:
    rung = Rung(share, results, failed)
    by_speed = rung.by_speed
    if not by_speed and len({result.walk.spec_steps for result in results}) > 1:
        raise RedraftError(
            "Accept lengths with different numbers of drafts cannot be compared without a bench.",
            where="ttt_steps",
            expected="one number for all contenders, or a bench of this machine, engine and target",
        )
    results.sort(key=lambda each: each.speed if by_speed and each.speed else each.walk.length, reverse=True)
    return rung
