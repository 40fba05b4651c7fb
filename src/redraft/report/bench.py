"""The bench on the page: verdict and table per concurrency, predictions beside measurements, and their plots."""

import re
from collections.abc import Mapping
from typing import Any

from redraft.report.plots import bars, curves_and_points, lines
from redraft.report.tables import markdown

Metrics = Mapping[str, Any]
PLAIN = "plain"
_DRAFTED = "drafted tokens a step"
_HEADER = (
    "", "tokens/s", "ratio (95 %)", "accept length", "break-even", "ms a cycle", "of it drafting",
    "first token, ms (p95)", "ms a token (p95)",
)  # fmt: skip


_MEMORY = {"torch": "the whole process, all arms in it", "sglang": "weights and cache, one GPU"}


def name(arm: str) -> str:
    """An arm in words."""
    if arm == PLAIN:
        return "plain"
    if re.fullmatch(r"\d+x\d+x\d+", arm):
        steps, topk, tokens = arm.split("x")
        return f"tree of {tokens} ({steps} steps, topk {topk})"
    return f"{arm} drafted"


def plots(bench: Metrics) -> dict[str, dict[str, Any]]:
    """Vega-Lite specifications by name."""
    levels = bench["levels"]
    found = {"throughput": _throughput(levels)}
    one = levels.get("1", {})
    if one.get("curve"):
        plain, rows = one["rows"][PLAIN], one["rows"]
        measured = [
            {"spec_steps": int(arm), "tokens_per_second": 1000 / row["step_ms"]}
            for arm, row in rows.items()
            if arm.isdigit()
        ]
        found["predicted"] = curves_and_points(
            "Predicted (line) and measured (points), one client",
            ("spec_steps", _DRAFTED),
            ("tokens_per_second", "decoded tokens/s"),
            {"predicted": one["curve"]},
            measured,
            ("plain", 1000 / plain["step_ms"]),
        )
        needed = [{**row, "accept_length": row["cycle_ms"] / plain["step_ms"]} for row in one["curve"]]
        found["break_even"] = lines(
            "It pays where the accept length is above break-even",
            ("spec_steps", _DRAFTED),
            ("accept_length", "tokens a cycle"),
            {"accept length": one["curve"], "break-even": needed},
        )
    return found


def _throughput(levels: Metrics) -> dict[str, Any]:
    if len(levels) == 1:
        (only,) = levels.values()
        rates = {name(arm): row["tokens_per_second"] for arm, row in only["rows"].items()}
        rule = ("plain", rates["plain"]) if PLAIN in only["rows"] else None
        return bars("Output tokens per second", "tokens/s", rates, rule)
    arms = dict.fromkeys(arm for level in levels.values() for arm in level["rows"])
    series = {
        name(arm): [
            {"concurrency": int(level), "tokens_per_second": told["rows"][arm]["tokens_per_second"]}
            for level, told in levels.items()
        ]
        for arm in arms
    }
    return lines("Output tokens per second", ("concurrency", "clients"), ("tokens_per_second", "tokens/s"), series)


def verdicts(bench: Metrics) -> str:
    """One line a concurrency: the word, and what to do next."""
    rows = [
        f"- Concurrency {level}: **{told['word']}**. Next: {told['action']}." for level, told in bench["levels"].items()
    ]
    return "\n".join(
        [*rows, *(f"- Concurrency {level} was not measured: {why}." for level, why in bench["skipped"].items())]
    )


def section(bench: Metrics, figure: Any, where: str) -> str:
    """The section; `figure` gives the Markdown of a plot, `where` says who measured."""
    parts = [
        f"## Bench\n\nThe same prompts for every arm, on {where}; {_machine(bench['machine'])}. A cycle is one "
        "draft and verify round; break-even is the accept length at which it costs what plain decoding of as many "
        "tokens costs."
    ]
    if bench["memory_gib"]:
        held = ", ".join(f"{name(arm)} {gib:.1f}" for arm, gib in bench["memory_gib"].items())
        parts.append(f"Memory, GiB ({_MEMORY.get(bench['engine']['engine'], 'as the engine tells it')}): {held}.")
    parts += [_level(level, told) for level, told in bench["levels"].items()]
    parts.append(figure("throughput", "Output tokens per second"))
    one = bench["levels"].get("1", {})
    if one.get("predictions"):
        parts.append(_predictions(one["predictions"]))
    if one.get("curve"):
        parts.append(
            f"{figure('predicted', 'Predicted and measured tokens per second by drafted tokens')} "
            f"{figure('break_even', 'Accept length and break-even by drafted tokens')}"
        )
    return "\n\n".join(parts)


def _machine(machine: Metrics) -> str:
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {gpus}"


def _level(level: str, told: Metrics) -> str:
    table = markdown(_HEADER, [_row(arm, row) for arm, row in told["rows"].items()])
    text = f"**Concurrency {level}: {told['word']}.** {told['reason'][:1].upper()}{told['reason'][1:]}."
    best = told["rows"].get(told["best"], {})
    if "needed_cycle_ms" in best:
        verify = f", its verify {best['needed_verify_ms']:.1f} ms" if "needed_verify_ms" in best else ""
        text += f" At this acceptance a cycle may take {best['needed_cycle_ms']:.1f} ms{verify}, to break even."
    if told["drift"] is not None:
        text += f" The plain arm was measured twice; the second run was {told['drift']:+.1%}."
    return f"{text}\n\n{table}"


def _row(arm: str, row: Metrics) -> tuple[str, ...]:
    interval = f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})" if "ratio" in row else ""
    spoken = (interval or "1", "", "", "", "")
    if "cycle_ms" in row:
        fit = f" (fit {row['cycle_fit_ms']:.1f})" if row["cycle_fit_ms"] else ""
        share = f"{row['draft_share']:.0%}" if row["draft_share"] else ""
        need = f"{row['break_even']:.2f}" if "break_even" in row else ""
        spoken = (interval, f"{row['accept_length']:.2f}", need, f"{row['cycle_ms']:.1f}{fit}", share)
    first, token = (
        f"{row[key]:.{digits}f} ({row[key + '_p95']:.{digits}f})"
        for key, digits in (("first_token_ms", 0), ("token_ms", 1))
    )
    return (name(arm), f"{row['tokens_per_second']:.1f}", *spoken, first, token)


def _predictions(found: Metrics) -> str:
    rows = [
        (steps, f"{row['predicted']:.1f}", f"{row['measured']:.1f}", f"{row['difference']:+.1%}")
        for steps, row in found.items()
    ]
    header = (_DRAFTED, "predicted, decoded tokens/s", "measured", "difference")
    return (
        "Each number of drafts predicted from the others (acceptance by position, and a line through their cycle "
        f"times), then measured:\n\n{markdown(header, rows)}"
    )
