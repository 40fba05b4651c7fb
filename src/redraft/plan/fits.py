"""Does a budget fit this machine, and which setting helps where it does not?"""

from collections.abc import Iterator
from typing import Any

from redraft.frame.profile import FitParams
from redraft.plan.budget import Budget, Figures

USABLE = 0.95
"""Share of a GPU's memory that a training gets: the rest is the driver's, or in fragments."""


def verdicts(budget: Budget, told: Figures) -> list[dict[str, Any]]:
    """For disk, GPUs, their memory and RAM: what is needed, what is there, whether it `fits`, the `knob` that helps.

    `fits` is None where there is nothing to hold it against; `told` are the budget's figures.
    """
    gpus = budget.here.gpus
    of_gpus = [_memory(budget)] if not gpus else [_count(budget), _memory(budget)]
    return [_disk(budget, told), *of_gpus, _ram(budget, told)]


def _verdict(what: str, needed: int, there: int | None, knob: str) -> dict[str, Any]:
    fits = None if there is None else needed <= there
    return {"what": what, "needed": needed, "there": there, "fits": fits, "knob": knob if fits is False else None}


def _disk(budget: Budget, told: Figures) -> dict[str, Any]:
    needed, room, variants = told["disk"]["bytes"], told["disk"]["room"], told["variants"]
    knob = f"REDRAFT_STORE on a disk with {needed / 1e9:,.0f} GB free"
    largest = max((each for each in variants if each["fits"]), key=lambda each: each["bytes"], default=None)
    if largest:
        knob = f"extract.format: {largest['format']} with extract.law: {largest['law']}, or {knob}"
    else:
        a_token = min(each["bytes"] for each in variants) / budget.amount.tokens
        held = int(max(0, room - budget.state) / a_token)
        knob += f" (no variant fits: at most {held:,} tokens would)"
    return _verdict("disk at the store", needed, room, knob)


def _count(budget: Budget) -> dict[str, Any]:
    there = len(budget.here.gpus)
    return _verdict("GPUs", budget.processes, there, f"train.processes: {there}, or more machines")


def _memory(budget: Budget) -> dict[str, Any]:
    what, needed = "memory of one GPU", budget.gpu_bytes(budget.fit, budget.sharded)
    if not budget.here.gpus:
        return _verdict(what, needed, None, "")
    usable = int(USABLE * min(budget.here.gpus))
    knob = next((named for named, fit, sharded in _changes(budget) if budget.gpu_bytes(fit, sharded) <= usable), None)
    if knob is None:
        knob = "no micro_tokens, FSDP2 or ttt_steps is enough: a GPU with more memory, or shorter rows"
    elif budget.gpu_bytes(budget.fit, budget.sharded, budget.amount.supervised) <= usable:
        knob += " (the mean row fits as it is, one that is all answers does not)"
    return _verdict(what, needed, usable, knob)


def _changes(budget: Budget) -> Iterator[tuple[str, FitParams, bool]]:
    """Changes of a training with which it takes less memory, the mildest first."""
    fit, sharded, least = budget.fit, budget.sharded, budget.fit.row_tokens
    for micro in range(fit.micro_tokens - least, 0, -least):
        yield f"train.micro_tokens: {micro}", fit.model_copy(update={"micro_tokens": micro}), sharded
    fit, named = fit.model_copy(update={"micro_tokens": least}), f"train.micro_tokens: {least}"
    if not sharded and budget.processes > 1:
        sharded, named = True, f"{named} with train.launcher: accelerate/fsdp2.yaml"
        yield named, fit, sharded
    for steps in range(fit.ttt_steps - 1, 0, -1):
        yield f"{named} and ttt_steps: {steps}", fit.model_copy(update={"ttt_steps": steps}), sharded


def _ram(budget: Budget, told: Figures) -> dict[str, Any]:
    ram, there = told["ram"], budget.here.ram
    training, extraction = ram["training"], ram["extraction"]
    if not budget.here.gpus and budget.processes == 1:
        training += budget.gpu_bytes(budget.fit, False)  # trained on the processor
    fewer = next((n for n in range(budget.processes - 1, 0, -1) if budget.ram_of(n) <= there), None)
    knob = f"train.processes: {fewer}" if fewer else "a machine with more RAM"
    if extraction > training:
        knob = f"extract.shard_mib: {there // 2**22}"
    return _verdict("RAM", max(training, extraction), there, knob)
