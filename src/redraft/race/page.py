"""The page of a race: the answer first, then what every contender came to on every budget, and how to repeat it."""

from collections.abc import Sequence
from typing import Any

from redraft.race.contenders import percent
from redraft.race.halving import Early, early, leaders
from redraft.race.rungs import Result, Rung
from redraft.race.speed import Cycles
from redraft.report.tables import NONE, interval, markdown

NO_DIFFERENCE = "no difference seen"
MOST_APART = 0.01
"""Share by which the tokens of two contenders may differ on one budget before the page says so."""


def answer(rungs: Sequence[Rung]) -> tuple[str, str, Early]:
    """The word, the sentence, and whether the first budget would have said the same."""
    last = rungs[-1]
    ranked = [result.contender.name for result in last.results]
    best = leaders(ranked, last.tied)
    budget = f"{percent(last.share)} % of the tokens"
    named = " and ".join(f"`{name}`" for name in best)
    said = early(leaders([each.contender.name for each in rungs[0].results], rungs[0].tied), best, _budget(rungs[0]))
    rest = [name for name in ranked if name not in best]
    next_ = f"; {_against(last, best[-1], rest[0])}" if rest else ""
    if len(best) > 1:
        told = f"**{NO_DIFFERENCE}** between {named} on {budget}: {_against(last, best[0], best[1])}{next_}."
        return NO_DIFFERENCE, told, said
    return best[0], f"**`{best[0]}`**, on {budget}: {_against(last, best[0], ranked[1])}.", said


def _budget(rung: Rung) -> str:
    return f"{percent(rung.share)} %"


def _against(rung: Rung, one: str, other: str) -> str:
    found = rung.ratio(one, other)
    what = "predicted tokens/s" if rung.by_speed else "accept length"
    return f"`{one}` has {found.value:.3f} ({found.low:.3f} to {found.high:.3f}) times the {what} of `{other}`"


def page(profile: str, race: str, rungs: Sequence[Rung], cycles: Cycles) -> str:
    """The text of `race/<profile>.md`."""
    _, told, said = answer(rungs)
    speeds = all(rung.by_speed for rung in rungs)
    pictures = f"![Accept length of every contender by tokens trained, with 95 % intervals]({profile}.svg)"
    if speeds:
        pictures += f" ![Predicted tokens/s of every contender by tokens trained]({profile}-speed.svg)"
    sections = [
        f"# Race: {profile}\n\n{told} {said.told}",
        "95 % intervals, over held-out chats, paired: both contenders answered the same ones. They tell what other "
        "chats would change, not what another seed would (`-S seed=0,1`).",
        f"## By budget\n\nWalked accept length, ± 95 %{', and predicted tokens/s' * speeds}; higher is better. "
        f"Every budget is a training of its own, with its whole learning rate schedule.\n\n{_table(rungs, speeds)}",
        pictures,
        f"## Against the best of each budget\n\n{_ratios(rungs)}",
        f"## Tokens/s\n\n{_speeds(rungs, cycles)}",
        *_cut(rungs),
        f"## Each run again\n\n{_commands(race, profile, rungs)}",
    ]
    return "\n\n".join(sections) + "\n"


def _names(rungs: Sequence[Rung]) -> list[str]:
    """Contenders, those that came furthest first."""
    every = [each.contender.name for rung in reversed(rungs) for each in rung.results]
    return list(dict.fromkeys([*every, *(name for rung in rungs for name in rung.failed)]))


def _find(rung: Rung, name: str) -> Result | None:
    return next((result for result in rung.results if result.contender.name == name), None)


def _length(measures: dict[str, Any]) -> str:
    return interval(measures.get("accept_length"), measures.get("accept_length_interval"), ".3f")


def _table(rungs: Sequence[Rung], speeds: bool) -> str:
    rows = []
    for name in _names(rungs):
        first, cells = _find(rungs[0], name), []
        for rung in rungs:
            result = _find(rung, name)
            if result is None:
                cells.append("failed" if name in rung.failed else NONE)
                continue
            speed = f"; {result.speed:.1f}/s" if speeds and result.speed else ""
            kept = "" if result.train["kept_step"] else ", untrained weights kept"
            cells.append(_length(result.train["heldout"]) + speed + kept)
        slots = f"{first.walk.slots:,}" if first else NONE
        rows.append((f"`{name}`", slots, _length(first.train["start"]) if first else NONE, *cells))
    return markdown(("", "slots", "untrained", *(f"{_budget(rung)}: {_tokens(rung)} tokens" for rung in rungs)), rows)


def _tokens(rung: Rung) -> str:
    counts = [result.train["tokens"] for result in rung.results]
    apart = max(counts) > (1 + MOST_APART) * min(counts)
    return f"{min(counts):,} to {max(counts):,}" if apart else f"{max(counts):,}"


def _ratios(rungs: Sequence[Rung]) -> str:
    rows = []
    for name in _names(rungs):
        cells = []
        for rung in rungs:
            best = rung.results[0].contender.name
            if _find(rung, name) is None:
                cells.append(NONE)
            elif name == best:
                cells.append("best")
            else:
                found = rung.ratio(name, best)
                tied = ", no difference seen" if found.tied else ""
                cells.append(f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f}){tied}")
        rows.append((f"`{name}`", *cells))
    return markdown(("", *map(_budget, rungs)), rows)


def _speeds(rungs: Sequence[Rung], cycles: Cycles) -> str:
    last = rungs[-1]
    if not cycles.measured:
        return f"Accept lengths alone were compared: {cycles.why_not}."
    if not last.by_speed:
        return (
            "Accept lengths alone were compared: the bench does not tell what a head of another size, or a chain of "
            "this length, costs."
        )
    each = {result.walk.slots: result for result in last.results}
    told = "; ".join(
        f"{result.cycle_ms:.2f} ms with {result.walk.spec_steps} drafts and {slots:,} slots"
        for slots, result in sorted(each.items())
    )
    return (
        f"Accept length over the cycle of `metrics/bench.json` (one that differs in slots is reckoned from the bench's "
        f"times of the head): {told}. What a cycle's own time may be off is in no interval; for contenders of one head "
        f"size it cancels."
    )


def _cut(rungs: Sequence[Rung]) -> list[str]:
    lines = []
    for rung in rungs:
        lost = [each.contender.name for each in rung.results if each.contender.name not in rung.kept]
        lines += [f"- `{name}` was cut after {_budget(rung)}: {_against(rung, name, rung.kept[0])}." for name in lost]
        lines += [
            f"- `{name}` failed on {_budget(rung)}:\n\n" + "".join(f"      {line}\n" for line in log)
            for name, log in rung.failed.items()
        ]
    return ["## Who was cut\n\n" + "\n".join(lines)] if lines else []


def _commands(race: str, profile: str, rungs: Sequence[Rung]) -> str:
    lines = [
        f"dvc exp run --temp -n again-{result.contender.name}-{percent(rung.share)} {_flags(result)} train"
        for rung in rungs
        for result in rung.results
    ]
    commands = "\n".join(lines)
    return (
        f"The experiments are `race-{race}-…` (`dvc exp list`; `dvc exp apply NAME` takes one into the workspace). "
        f"From the commit and workspace of the race:\n\n```bash\n{commands}\n```\n\n{mlflow(race, profile)}"
    )


def mlflow(race: str, profile: str) -> str:
    """Where the race is in MLflow."""
    return (
        f"MLflow: experiment `redraft/{profile}`, search `attributes.run_name LIKE 'race-{race}-%'`, select all, "
        f"Compare. A training that DVC had in its run cache made no run."
    )


def _flags(result: Result) -> str:
    return " ".join(f"-S '{key}={value}'" if ":" in key else f"-S {key}={value}" for key, value in result.settings)


def figures(profile: str, race: str, rungs: Sequence[Rung], cycles: Cycles) -> dict[str, Any]:
    """All numbers, for `race/<profile>.json`."""
    word, told, said = answer(rungs)
    return {
        "profile": profile,
        "race": race,
        "answer": word,
        "sentence": told,
        "first_budget_right": said.right,
        "first_budget": said.told,
        "tokens_per_second": "predicted" if cycles.measured else cycles.why_not,
        "rungs": [
            {
                "share": rung.share,
                "by": "tokens_per_second" if rung.by_speed else "accept_length",
                "kept": rung.kept,
                "failed": rung.failed,
                "results": [_row(rung, result) for result in rung.results],
            }
            for rung in rungs
        ],
    }


def _row(rung: Rung, result: Result) -> dict[str, Any]:
    best = rung.results[0].contender.name
    found = rung.ratio(result.contender.name, best) if result.contender.name != best else None
    heldout = result.train["heldout"]
    return {
        "contender": result.contender.name,
        "experiment": result.experiment,
        "settings": dict(result.settings),
        "tokens": result.train["tokens"],
        "steps": result.train["steps"],
        "kept_step": result.train["kept_step"],
        "slots": result.walk.slots,
        "spec_steps": result.walk.spec_steps,
        "accept_length": heldout.get("accept_length"),
        "accept_length_interval": heldout.get("accept_length_interval"),
        "accept_length_untrained": result.train["start"].get("accept_length"),
        "verify_steps": heldout.get("verify_steps"),
        "accuracy": heldout["accuracy_0"],
        "ceiling": heldout["ceiling_0"],
        "cycle_ms": result.cycle_ms and round(result.cycle_ms, 4),
        "tokens_per_second": result.speed and round(result.speed, 3),
        "against_best": None if found is None else _finite(found.value, found.low, found.high),
    }


def _finite(*values: float) -> list[float | None]:
    return [round(value, 5) if value == value else None for value in values]  # NaN is unlike itself
