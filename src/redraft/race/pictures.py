"""Curves of a race with intervals and direct labels, as Vega-Lite."""

from collections.abc import Sequence
from typing import Any

from redraft.race.rungs import Result, Rung

COLORS = ("#1f6feb", "#d1651a", "#2da44e", "#8250df", "#cf222e", "#57606a", "#bf8700", "#1b7c83")


def lengths(rungs: Sequence[Rung]) -> dict[str, Any]:
    """Accept length by tokens trained, from before training on."""
    rows = [_point(result, 0, result.train["start"], 1.0) for result in rungs[0].results]
    rows += [_point(each, each.train["tokens"], each.train["heldout"], 1.0) for rung in rungs for each in rung.results]
    return _curves("Walked accept length on equal budgets", "accept length (higher is better)", rows)


def speeds(rungs: Sequence[Rung]) -> dict[str, Any]:
    """Predicted tokens/s by tokens trained; every result has a cycle."""
    rows = []
    for number, rung in enumerate(rungs):
        for each in rung.results:
            assert each.cycle_ms is not None
            per_token = 1000 / each.cycle_ms
            if number == 0:
                rows.append(_point(each, 0, each.train["start"], per_token))
            rows.append(_point(each, each.train["tokens"], each.train["heldout"], per_token))
    return _curves("Predicted tokens/s on equal budgets", "tokens/s (higher is better)", rows)


def _point(result: Result, tokens: int, measures: dict[str, Any], factor: float) -> dict[str, Any]:
    length, half = measures.get("accept_length"), measures.get("accept_length_interval") or 0.0
    if length is None:
        return {"contender": result.contender.name, "tokens": tokens}
    low, high = factor * (length - half), factor * (length + half)
    return {"contender": result.contender.name, "tokens": tokens, "y": factor * length, "low": low, "high": high}


def _curves(title: str, y_title: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    known = [row for row in rows if "y" in row]
    names = list(dict.fromkeys(row["contender"] for row in known))
    ends = {row["contender"]: row for row in known}  # the last one of each
    x = {"field": "tokens", "type": "quantitative", "title": "tokens trained", "axis": {"format": "~s", "tickCount": 6}}
    y = {"field": "y", "type": "quantitative", "title": y_title, "scale": {"zero": False}}
    scale = {"domain": names, "range": [COLORS[number % len(COLORS)] for number in range(len(names))]}
    color = {"field": "contender", "type": "nominal", "legend": None, "scale": scale}
    place = {"x": x, "y": y, "color": color}
    apart = _spread(
        [ends[name]["y"] for name in names], 0.06 * _span([v for r in known for v in (r["low"], r["high"])])
    )
    labels = [{**ends[name], "y": at} for name, at in zip(names, apart, strict=True)]
    text = {"type": "text", "align": "left", "dx": 8, "fontSize": 12}
    return {
        "title": title,
        "layer": [
            {"data": {"values": known}, "mark": {"type": "line", "strokeWidth": 2}, "encoding": place},
            {"data": {"values": known}, "mark": {"type": "point", "filled": True, "size": 50}, "encoding": place},
            {
                "data": {"values": known},
                "mark": {"type": "rule", "strokeWidth": 1.5},
                "encoding": {**place, "y": {**y, "field": "low"}, "y2": {"field": "high"}},
            },
            {
                "data": {"values": labels},
                "mark": text,
                "encoding": {**place, "text": {"field": "contender", "type": "nominal"}},
            },
        ],
    }


def _span(values: Sequence[float]) -> float:
    return max(values, default=1.0) - min(values, default=0.0)


def _spread(values: Sequence[float], least: float) -> list[float]:
    """`values` moved up where two are closer than `least`, so that labels do not lie on each other."""
    moved = list(values)
    below: float | None = None
    for index in sorted(range(len(values)), key=lambda index: values[index]):
        if below is not None:
            moved[index] = max(moved[index], below + least)
        below = moved[index]
    return moved
