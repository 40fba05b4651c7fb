"""The bench on the page: verdict and table per concurrency, predictions beside measurements, and their plots."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from redraft.frame.errors import RedraftError
from redraft.report.plots import bars, curves_and_points, lines
from redraft.report.tables import NONE, figure, markdown

Metrics = Mapping[str, Any]
_PARTS = ("levels", "machine", "engine", "asked")
_ARM: dict[str, type | UnionType] = {
    "label": str, "drafter": str | None, "steps": int, "topk": int, "tokens": int, "tokens_per_second": int | float,
}  # fmt: skip
_DRAFTED = "drafted tokens a step"
_HEADER = (
    "", "tokens/s", "ratio (95 %)", "accept length", "break-even", "ms a cycle", "of it drafting",
    "first token, ms (p95)", "ms a token (p95)",
)  # fmt: skip


_MEMORY = {"torch": "the whole process, all arms in it", "sglang": "weights and cache, one GPU"}


def read_bench(path: Path) -> dict[str, Any]:
    """The metrics of a bench.

    Raises:
        RedraftError: no such file, or not of this form.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RedraftError("The bench cannot be read.", where=path, found=error) from error
    absent = _absent(found)
    if absent:
        raise RedraftError(
            "This is no bench, or one that an older redraft wrote.",
            where=path,
            expected=f"metrics/bench.json with {', '.join(_PARTS)}",
            found=f"no {absent}",
            fix="`dvc repro bench` measures anew; benches of two releases are not compared",
        )
    return dict(found)


def _absent(found: Any) -> str | None:
    """The first thing that a bench must have and this has not."""
    for part in _PARTS:
        if not isinstance(found, dict) or not isinstance(found.get(part), dict):
            return part
    for level, told in found["levels"].items():
        if not level.isdecimal() or not isinstance(told, dict) or not isinstance(told.get("rows"), dict):
            return f"levels.{level}.rows"
        if not isinstance(told.get("word"), str):
            return f"levels.{level}.word"
        for arm, row in told["rows"].items():
            for name, kind in _ARM.items():
                if not isinstance(row, dict) or name not in row or not isinstance(row[name], kind):
                    return f"levels.{level}.rows.{arm}.{name}"
    return None


def plain(rows: Metrics) -> Metrics | None:
    """The row of the target alone, if it was measured."""
    return next((row for row in rows.values() if not row["steps"]), None)


def plots(bench: Metrics) -> dict[str, dict[str, Any]]:
    """Vega-Lite specifications by name."""
    levels = bench["levels"]
    found = {"throughput": _throughput(levels)} if levels else {}
    one = levels.get("1", {})
    alone = plain(one.get("rows", {}))
    if one.get("curve") and alone:
        measured = [
            {"spec_steps": row["steps"], "tokens_per_second": 1000 / row["step_ms"]}
            for row in one["rows"].values()
            if row["steps"] and row["topk"] == 1 and row["drafter"] is None
        ]
        found["predicted"] = curves_and_points(
            "Predicted (line) and measured (points), one client",
            ("spec_steps", _DRAFTED),
            ("tokens_per_second", "decoded tokens/s"),
            {"predicted": one["curve"]},
            measured,
            ("plain", 1000 / alone["step_ms"]),
        )
        needed = [{**row, "accept_length": row["cycle_ms"] / alone["step_ms"]} for row in one["curve"]]
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
        rates = {row["label"]: row["tokens_per_second"] for row in only["rows"].values()}
        alone = plain(only["rows"])
        rule = (alone["label"], alone["tokens_per_second"]) if alone else None
        return bars("Output tokens per second", "tokens/s", rates, rule)
    series: dict[str, list[dict[str, float]]] = {}
    for level, told in levels.items():
        for row in told["rows"].values():
            point = {"concurrency": int(level), "tokens_per_second": row["tokens_per_second"]}
            series.setdefault(row["label"], []).append(point)
    return lines("Output tokens per second", ("concurrency", "clients"), ("tokens_per_second", "tokens/s"), series)


def verdicts(bench: Metrics, first: str | None = None) -> str:
    """One line a concurrency: the word, and what to do next; where the answer is no, `first`, if there is such."""
    rows = [
        f"- Concurrency {level}: **{told['word']}**. "
        f"Next: {first if first and told['word'].startswith('no') else told['action']}."
        for level, told in bench["levels"].items()
    ]
    return "\n".join(
        [*rows, *(f"- Concurrency {level} was not measured: {why}." for level, why in bench["skipped"].items())]
    )


def section(bench: Metrics, drawn: Any, where: str) -> str:
    """The section; `drawn` gives the Markdown of a plot, `where` says who measured."""
    parts = [
        f"## Bench\n\n{bench['prompts']} prompts, the same for every arm, on {where}; {machine(bench)}. A cycle is one "
        "draft and verify round; break-even is the accept length at which it costs what plain decoding of as many "
        "tokens costs."
    ]
    if bench["memory_gib"]:
        labels = {arm: row["label"] for told in bench["levels"].values() for arm, row in told["rows"].items()}
        held = ", ".join(f"{labels.get(arm, arm)} {gib:.1f}" for arm, gib in bench["memory_gib"].items())
        parts.append(f"Memory, GiB ({_MEMORY.get(bench['engine']['engine'], 'as the engine tells it')}): {held}.")
    parts += [_level(level, told) for level, told in bench["levels"].items()]
    if bench["levels"]:
        parts.append(drawn("throughput", "Output tokens per second"))
    one = bench["levels"].get("1", {})
    if one.get("predictions"):
        parts.append(_predictions(one["predictions"]))
    if one.get("curve"):
        parts.append(
            f"{drawn('predicted', 'Predicted and measured tokens per second by drafted tokens')} "
            f"{drawn('break_even', 'Accept length and break-even by drafted tokens')}"
        )
    return "\n\n".join(parts)


def machine(bench: Metrics) -> str:
    """The machine that measured, in words; of a joined server only where it is."""
    told = bench["machine"]
    gpus = ", ".join(told["gpus"]) or "no GPU"
    text = f"{told['processor']}, {told['cores']} cores, {told['memory_gib']} GiB, {gpus} (host {told['host']})"
    joined = bench["engine"].get("joined")
    return f"the server at {joined}, whose machine is not known, asked from {text}" if joined else text


def _level(level: str, told: Metrics) -> str:
    table = markdown(_HEADER, [_row(row) for row in told["rows"].values()])
    text = f"**Concurrency {level}: {told['word']}.** {told['reason'][:1].upper()}{told['reason'][1:]}."
    best = told["rows"].get(told["best"], {})
    if "needed_cycle_ms" in best:
        verify = f", its verify {best['needed_verify_ms']:.1f} ms" if "needed_verify_ms" in best else ""
        text += f" At this acceptance a cycle may take {best['needed_cycle_ms']:.1f} ms{verify}, to break even."
    if told["drift"] is not None:
        text += f" The plain arm was measured twice; the second run was {told['drift']:+.1%}."
    return f"{text}\n\n{table}"


def _row(row: Metrics) -> tuple[str, ...]:
    ratio = "1" if not row["steps"] else NONE
    if "ratio" in row:
        ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"
    fit = f" (fit {row['cycle_fit_ms']:.1f})" if row.get("cycle_fit_ms") else ""
    figures = (
        figure(row.get("accept_length"), ".2f"),
        figure(row.get("break_even"), ".2f"),
        figure(row.get("cycle_ms"), ".1f") + fit,
        figure(row.get("draft_share"), ".0%"),
    )
    times = (
        f"{figure(row[key], form)} ({figure(row[key + '_p95'], form)})" if row[key] is not None else NONE
        for key, form in (("first_token_ms", ".0f"), ("token_ms", ".1f"))
    )
    return (row["label"], f"{row['tokens_per_second']:.1f}", ratio, *figures, *times)


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
