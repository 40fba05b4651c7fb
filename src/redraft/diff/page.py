"""The text of `redraft diff`: at most 25 lines of Markdown."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from redraft.diff.changes import Judged
from redraft.diff.figures import Figure, State
from redraft.report.tables import NONE, markdown

MOST_LINES = 25
MOST_PARAMS, MOST_PICTURES, MOST_ROWS, LONGEST = 8, 12, 12, 40
SHARES = ("accuracy", "ceiling", "coverage")
FORMS = {"ratio": ".2f", "ratio_low": ".2f", "trained_tokens": ",.0f"}
LABELS = {
    "ratio": "tokens/s, times plain",
    "ratio_low": "… low end of its interval",
    "served_accept_length": "accept length, served",
    "predicted_accept_length": "accept length, predicted",
    "accuracy": "held-out accuracy",
    "ceiling": "… its ceiling",
    "coverage": "coverage of the draft vocabulary",
    "first_loss": "loss of the first step",
    "first_loss_naive": "… of naive",
    "trained_tokens": "tokens trained on",
}


def page(
    names: tuple[str, str],
    figures: Sequence[Figure],
    params: Mapping[str, tuple[Any, Any]],
    pictures: Sequence[str],
    gates: Sequence[Judged],
    link: str,
) -> str:
    """The whole text.

    Args:
        names: of both revisions.
        figures: of both summaries.
        params: both values of each that differs.
        pictures: paths of those that changed.
        gates: what they say; none if they were not asked.
        link: what stands before a picture's path in its link.
    """
    verdict = next((figure for figure in figures if figure.name == "verdict"), None)
    rows = [figure for figure in figures if figure.name != "verdict"][:MOST_ROWS]
    parts = [_headline(names, verdict)]
    if rows:
        parts.append(markdown(("", _code(names[0]), _code(names[1]), "change", ""), [_row(figure) for figure in rows]))
    tail = [
        _line(
            "Not comparable", [f"{LABELS.get(each.name, each.name)} ({_short(each.why)})" for each in _apart(figures)]
        ),
        _line(
            "Params", [f"`{_short(name)}` {_value(a)} → {_value(b)}" for name, (a, b) in params.items()], MOST_PARAMS
        ),
        _line("Pictures", [f"[{path}]({link}{path})" for path in pictures], MOST_PICTURES),
        _line("Gates", [f"`{each.name}` {each.told}" for each in gates]),
    ]
    return "\n\n".join([*parts, *filter(None, tail)])


def _headline(names: tuple[str, str], verdict: Figure | None) -> str:
    if verdict is None or verdict.head is None:
        return f"**No verdict** in {_code(names[1])}: `metrics/summary.json` is not there (`dvc repro` writes it)."
    before = "" if verdict.base is None else f"{_short(verdict.base)} → "
    after = f"{before}{_short(verdict.head)}" if before and verdict.base != verdict.head else _short(verdict.head)
    how = {State.NEW: "new", State.SAME: "as before"}.get(verdict.state)
    if verdict.state is State.APART:
        how = "not comparable"
    return f"**{after}**{f' ({how})' if how else ''}, {_code(names[0])} → {_code(names[1])}"


def _row(figure: Figure) -> tuple[str, ...]:
    form = _form(figure.name)
    change = figure.change if figure.state is not State.APART else None
    moved = NONE if not change else _points(change) if figure.name in SHARES else format(change, f"+{form}")
    word = f"**{figure.state}**" if figure.state in (State.BETTER, State.WORSE, State.GONE) else str(figure.state)
    return (
        LABELS.get(figure.name, _short(figure.name)),
        _number(figure.base, form),
        _number(figure.head, form),
        moved,
        word,
    )


def _apart(figures: Sequence[Figure]) -> list[Figure]:
    """One figure a reason: the first that it keeps apart."""
    first: dict[str, Figure] = {}
    for figure in figures:
        if figure.state is State.APART and figure.name != "verdict":
            first.setdefault(figure.why, figure)
    return list(first.values())


def _form(name: str) -> str:
    return FORMS.get(name, ".1%" if name in SHARES else ".3f")


def _points(change: float) -> str:
    return f"{100 * change:+.1f} points"


def _number(value: Any, form: str) -> str:
    if isinstance(value, str):
        return _short(value)
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return NONE
    return format(value, form)


def _line(title: str, items: Sequence[str], most: int = 4) -> str:
    if not items:
        return ""
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return f"{title}: {', '.join(items[:most])}{more}"


def _value(value: Any) -> str:
    return "not set" if value is None else f"`{_short(value)}`"


def _code(name: str) -> str:
    return f"`{_short(name)}`"


def _short(value: Any) -> str:
    """On one line, without what Markdown would take for its own, and not longer than a cell may be."""
    text = re.sub(r"[\s|`*<>\[\]]+", " ", str(value)).strip()
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
