"""`redraft plan`: what a run will need, before it costs an hour."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from redraft.cli.arguments import Commands, command

Figures = dict[str, Any]
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def add_to(commands: Commands) -> None:
    """Add the command of this module."""
    plan = command(
        commands,
        "plan",
        "bytes, hours, FLOPs and memory of a run, held against this machine, before it costs an hour",
        "redraft plan --profile kimi-k25 --tokens 37000000",
    )
    rate = _number(0)
    plan.add_argument("--profile", help="a file in profiles/, without .yaml (default: the one in params.yaml)")
    plan.add_argument(
        "--tokens",
        type=_number(1, 1e15, whole=True),
        metavar="N",
        help="of the corpus (default: artifacts/corpus)",
    )
    plan.add_argument(
        "--supervised", type=_number(0, 1), metavar="SHARE", help="of the tokens (default: the corpus', else 0.6)"
    )
    plan.add_argument("--extract-rate", type=rate, metavar="TOKENS/S", help="of extraction (default: the last run's)")
    plan.add_argument(
        "--flops", type=rate, help="FLOP/s that training reaches on one GPU (default: the last run's rate, else 4e14)"
    )
    plan.add_argument("--disk-rate", type=rate, metavar="GB/S", help="of the store's disk (default: 1)")
    plan.add_argument("--network-rate", type=rate, metavar="GB/S", help="of the network (default: 1.25, 10 Gbit/s)")
    plan.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, tokens/s")
    plan.set_defaults(run=_plan)


def _number(least: float, most: float = math.inf, *, whole: bool = False) -> Callable[[str], float]:
    """Reads a finite number above 0, from `least` to `most`."""
    kind = ("a whole number" if whole else "a number") + " above 0" + (f", at most {most:g}" if most < math.inf else "")

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0 and least <= value <= most) or (whole and not value.is_integer()):
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind}")
        return int(value) if whole else value

    return read


def _plan(arguments: argparse.Namespace) -> None:
    from redraft.frame.params import load_config
    from redraft.plan.budget import Budget, Rates
    from redraft.plan.fits import verdicts
    from redraft.plan.here import here
    from redraft.plan.made import amount
    from redraft.plan.shape import read_shape

    config, root = load_config(profile=arguments.profile), Path()
    shape, place = read_shape(config, root)
    tokens = amount(config, root, arguments.tokens, arguments.supervised)
    disk, network = (rate and rate * 1e9 for rate in (arguments.disk_rate, arguments.network_rate))
    budget = Budget(config, root, shape, tokens, Rates(arguments.extract_rate, arguments.flops, disk, network), here())
    told = budget.figures()
    told = {**told, "sizes_of": place, "verdicts": verdicts(budget, told)}
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(json.dumps(told, indent=1) if arguments.json else text(told, coloured))


def text(told: Figures, coloured: bool = False) -> str:
    """A budget as text for a terminal, where what does not fit is red if `coloured`, or for a ticket."""
    parts = [_head(told), _states(told), _training(told), _memory(told["memory"]), _variants(told["variants"])]
    return "\n\n".join([*parts, _verdicts(told["verdicts"], coloured)])


def _head(told: Figures) -> str:
    shape, tokens = told["shape"], told["tokens"]
    heads = f"{shape['heads']}/{shape['kv_heads']} heads x {shape['head_dim']}"
    return _aligned(
        [
            (f"plan for {told['profile']}", f"{tokens['tokens']:,} tokens ({tokens['told']})"),
            ("target", f"hidden {shape['hidden']:,}, V {shape['vocab']:,}, {shape['depth']} layers"),
            (
                "drafter",
                f"{shape['drafter_weights']:,} weights: intermediate {shape['intermediate']:,}, {heads}, "
                f"N {shape['slots']:,}",
            ),
            ("sizes said by", told["sizes_of"]),
        ]
    )


def _states(told: Figures) -> str:
    states, extraction, dvc = told["states"], told["extraction"], told["dvc"]
    rates = {
        name: f"{_bytes(states[f'{name}_rate'])}/s" + f", assumed: --{name}-rate" * (name in states["assumed"])
        for name in ("disk", "network")
    }
    hours = f"not known: give --extract-rate (at 1,000 tokens/s {_time(told['tokens']['tokens'] / 1000)})"
    if rate := extraction["tokens_per_second"]:
        hours = f"{_time(extraction['seconds'])} at {rate:,.0f} tokens/s, {extraction['rate']}"
    return _aligned(
        [
            ("hidden states", f"{states['format']}, law {states['law']}"),
            ("  a token", f"{states['bytes_per_token']:,} B"),
            ("  in all", _bytes(states["bytes"])),
            ("  extraction", hours),
            ("  disk", f"{_time(states['disk_seconds'])} to write at {rates['disk']}"),
            ("  network", f"{_time(states['network_seconds'])} to send at {rates['network']}"),
            ("  checksums", f"{_time(states['checksum_seconds'])} on first use, by one core of this machine"),
            ("DVC hashing", f"{_time(dvc['seconds'])} for {_bytes(dvc['bytes'])} of artefacts; states are not DVC's"),
        ]
    )


def _training(told: Figures) -> str:
    training = told["training"]
    rate = f"{training['tokens_per_second']:,.0f} tokens/s, measured by the last run"
    if training["rate"] != "measured":
        assumed = ", assumed: --flops" * (training["rate"] == "assumed")
        speed = f"{training['flops_per_second'] / 1e12:,.4g} TFLOP/s a GPU{assumed}"
        rate = f"{training['tokens_per_second']:,.0f} tokens/s ({speed})"
    disk = _bytes(told["states"]["disk_rate"])
    passes, processes = f"{training['epochs']:g} passes", f"{training['processes']} process(es)"
    return _aligned(
        [
            ("training", f"K {training['ttt_steps']}, {passes}, {processes}"),
            ("  FLOPs", f"{training['flops']:.3g}, {training['flops_per_token'] / 1e9:,.4g} GFLOP a token"),
            (
                "  optimizer steps",
                f"{training['steps']:,} of {training['batch_tokens']:,} tokens, or more where rows are not full",
            ),
            ("  time", f"{_time(training['seconds'])} at {rate}"),
            ("  GPU hours", f"{training['gpu_seconds'] / 3600:,.3g}"),
            ("  reading states", f"{_time(training['read_seconds'])} at {disk}/s, beside it: the longer one decides"),
            ("  saved on disk", f"{_bytes(told['disk']['training_state'])} while one state replaces another"),
        ]
    )


def _memory(memory: Figures) -> str:
    columns = memory["columns"]
    unit, worth = _unit(max(each["bytes"] for each in columns))
    heads = [f"{each['way']} {each['supervised']:.0%}" for each in columns]
    rows: list[tuple[str, ...]] = [(f"memory of one GPU, {unit}, {memory['micro_tokens']:,} tokens", *heads)]
    for name in columns[0]["parts"]:
        if any(each["parts"][name] for each in columns):
            rows.append((f"  {name}", *(_share(each["parts"][name], worth) for each in columns)))
    for steps in dict.fromkeys(each["ttt_steps"] for each in memory["by_steps"]):
        found = [each["bytes"] for each in memory["by_steps"] if each["ttt_steps"] == steps]
        rows.append((f"  together at K {steps}", *(_share(size, worth) for size in found)))
    return _aligned(rows, right=True)


def _variants(variants: Sequence[Figures]) -> str:
    rows: list[tuple[str, ...]] = [("variants: format, law", "B a token", "in all", "disk", "network", "at the store")]
    for each in variants:
        times = (_time(each[f"{name}_seconds"]) for name in ("disk", "network"))
        size = (f"{each['bytes_per_token']:,}", _bytes(each["bytes"]))
        rows.append((f"  {each['format']}, {each['law']}", *size, *times, "fits" if each["fits"] else "does not fit"))
    return _aligned(rows, right=True)


def _verdicts(verdicts: Sequence[Figures], coloured: bool) -> str:
    rows: list[tuple[str, ...]] = [("this machine", "needed", "there", "")]
    for each in verdicts:
        form = str if each["what"] == "GPUs" else _bytes
        figures = ("none" if value is None else form(value) for value in (each["needed"], each["there"]))
        word = {None: "not judged: no GPU here", True: "fits", False: f"DOES NOT FIT: {each['knob']}"}[each["fits"]]
        rows.append((f"  {each['what']}", *figures, word))
    lines = _aligned([row[:-1] for row in rows], right=True).splitlines()
    lines = [f"{line}  {row[-1]}".rstrip() for line, row in zip(lines, rows, strict=True)]
    red = [False, *(coloured and each["fits"] is False for each in verdicts)]
    return "\n".join(f"\033[31m{line}\033[0m" if bad else line for line, bad in zip(lines, red, strict=True))


def _aligned(rows: Sequence[tuple[str, ...]], *, right: bool = False) -> str:
    """Columns of equal width, the first one to the left, the others to the `right` if asked."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        fitted = (cell.rjust(width) if right else cell for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *fitted]).rstrip())
    return "\n".join(lines)


def _unit(size: float) -> tuple[str, float]:
    return next(((unit, worth) for unit, worth in _UNITS if size >= 0.9995 * worth), ("B", 1.0))


def _bytes(size: float) -> str:
    """Three figures and a decimal unit."""
    unit, worth = _unit(size)
    if worth == 1:
        return f"{size:.0f} B"
    figures = max(0, 2 - math.floor(math.log10(max(1.0, size / worth))))
    return f"{size / worth:,.{figures}f} {unit}"


def _share(size: int, worth: float) -> str:
    return f"{size / worth:,.1f}" if size else "-"


def _time(seconds: float) -> str:
    for unit, worth in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * worth:
            return f"{seconds / worth:,.1f} {unit}"
    return f"{seconds:,.1f} s"
