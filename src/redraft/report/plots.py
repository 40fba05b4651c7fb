"""Plots as SVG, drawn by Vega-Lite without a browser."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redraft.frame import atomic

_THEME = {
    "background": "white",
    "font": "Helvetica, Arial, sans-serif",
    "axis": {"labelFontSize": 12, "titleFontSize": 13, "titleFontWeight": "normal", "gridColor": "#e6e6e6"},
    "legend": {"labelFontSize": 12, "titleFontSize": 12, "orient": "top"},
    "title": {"fontSize": 15, "fontWeight": "normal", "anchor": "start"},
    "view": {"stroke": None},
    "range": {"category": ["#1f6feb", "#d1651a", "#2da44e", "#8250df", "#cf222e"]},
}
_SIZE = {"width": 460, "height": 240}


def save_svg(path: Path, spec: dict[str, Any]) -> None:
    """Draw a Vega-Lite specification to `path`."""
    import vl_convert

    full = {"config": _THEME, **_SIZE, **spec}
    atomic.write_text(path, vl_convert.vegalite_to_svg(full, vl_version="5.20"))


def _axis(field: str, title: str, **more: Any) -> dict[str, Any]:
    whole = {"axis": {"tickMinStep": 1, "format": "d"}} if field in ("spec_steps", "concurrency") else {}
    return {"field": field, "type": "quantitative", "title": title, **whole, **more}


def lines(
    title: str, x: tuple[str, str], y: tuple[str, str], series: Mapping[str, Sequence[dict[str, float]]]
) -> dict[str, Any]:
    """Lines of `series` by name; `x` and `y` are (field, axis title)."""
    rows = [{**row, "series": name} for name, curve in series.items() for row in curve if row.get(y[0]) is not None]
    color = {"field": "series", "type": "nominal", "title": None, "sort": list(series)}
    encoding = {"x": _axis(*x), "y": _axis(*y, scale={"zero": False}), "color": color}
    return {"title": title, "data": {"values": rows}, "mark": {"type": "line", "strokeWidth": 2}, "encoding": encoding}


def bars(
    title: str, y_title: str, values: Mapping[str, float | None], rule: tuple[str, float] | None = None
) -> dict[str, Any]:
    """One bar a name, labelled with its value, none for None; `rule` draws a dashed line with a label."""
    rows = [{"name": name, "value": value} for name, value in values.items() if value is not None]
    x = {"field": "name", "type": "nominal", "title": None, "sort": list(values), "axis": {"labelAngle": 0}}
    encoding = {"x": x, "y": _axis("value", y_title)}
    text = {"field": "value", "type": "quantitative", "format": ".2f"}
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "bar", "width": {"band": 0.6}}, "encoding": encoding},
        {"mark": {"type": "text", "dy": -7, "fontSize": 12}, "encoding": {**encoding, "text": text}},
    ]
    if rule:
        line = {"data": {"values": [{"value": rule[1]}]}, "encoding": {"y": _axis("value", y_title)}}
        layers += [
            {**line, "mark": {"type": "rule", "strokeDash": [5, 4], "color": "#cf222e"}},
            {
                **line,
                "mark": {"type": "text", "text": rule[0], "x": "width", "align": "right", "dy": -6, "color": "#cf222e"},
            },
        ]
    wide = max(_SIZE["width"], 92 * len(values))
    return {"title": title, "data": {"values": rows}, "layer": layers, "width": wide}


def curves_and_points(
    title: str,
    x: tuple[str, str],
    y: tuple[str, str],
    series: Mapping[str, Sequence[dict[str, float]]],
    points: Sequence[dict[str, float]],
    rule: tuple[str, float],
) -> dict[str, Any]:
    """Lines as in `lines`, measured `points` on them, and a dashed line with a label."""
    curve = lines(title, x, y, series)
    place = {"x": _axis(*x), "y": _axis(*y, scale={"zero": False})}
    mark = {"type": "point", "filled": True, "size": 80, "color": "#d1651a", "opacity": 1}
    text = {"type": "text", "text": rule[0], "x": "width", "align": "right", "dy": -6, "color": "#cf222e"}
    level = {"data": {"values": [{"value": rule[1]}]}, "encoding": {"y": _axis("value", y[1], scale={"zero": False})}}
    layers = [
        {name: curve[name] for name in ("data", "mark", "encoding")},
        {"data": {"values": list(points)}, "mark": mark, "encoding": place},
        {**level, "mark": {"type": "rule", "strokeDash": [5, 4], "color": "#cf222e"}},
        {**level, "mark": text},
    ]
    return {"title": title, "layer": layers}


def drift(curve: Sequence[dict[str, float]]) -> dict[str, Any]:
    """A curve of `redraft.vocab.audit.drift_curve`."""
    title, slot = "How far a shared id moved", ("slot", "slot in the donor")
    return lines(title, slot, ("moved", "slots, new minus donor"), {"shared ids": curve})
