"""How many slots? Coverage by the size of the draft vocabulary, and the speed that each size is predicted to give."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from redraft.bench.slots import NEAR, Predicted, head_cost, knee, predict_slots
from redraft.report.plots import lines
from redraft.report.tables import NONE, figure, markdown

Metrics = Mapping[str, Any]
_X = ("slots", "slots")
_LIMITS = (
    "What this leaves out: ids that come in with a larger N are rarer and harder to draft than those that are in, so "
    "that more slots bring less than this, and fewer cost less; ids that training never shows count as never right, "
    "though a donor's row may know them; shares are those of held-out tokens; and another N has to be trained first."
)


@dataclass(frozen=True)
class Basis:
    """What a prediction starts from."""

    level: str
    """Concurrency."""
    row: Metrics
    """Of the chain that is surely fastest there."""


def plots(metrics: Mapping[str, Metrics]) -> dict[str, dict[str, Any]]:
    """The Vega-Lite specification of the picture, by name; none for a single size, or figures of an older redraft."""
    sizes = metrics["vocab"].get("by_slots", {})
    if len(sizes) < 2:
        return {}
    found = _predict(metrics)
    if isinstance(found, str):
        names = {"coverage_train": "training tokens", "coverage_heldout": "held-out tokens"}
        series = {
            text: [{"slots": float(size), "coverage": row[name]} for size, row in sizes.items()]
            for name, text in names.items()
        }
        spec = lines("Coverage by number of slots", _X, ("coverage", "share of supervised tokens"), series)
        return {"slots": _powers(spec)}
    return {"slots": _curve(found[1], _marks(metrics, found[1]))}


def _marks(metrics: Mapping[str, Metrics], predicted: list[Predicted]) -> dict[int, str]:
    """Words for the chosen size, and for the knee of what is predicted."""
    marks = {metrics["vocab"]["slots"]: "chosen"}
    if predicted:
        best = knee(predicted).slots
        marks[best] = "chosen, knee" if best in marks else "knee"
    return marks


def _powers(spec: dict[str, Any]) -> dict[str, Any]:
    spec["encoding"]["x"] |= {"scale": {"type": "log", "base": 2, "nice": False}, "axis": {"format": ",d"}}
    return spec


def _curve(predicted: list[Predicted], marks: Mapping[int, str]) -> dict[str, Any]:
    """The rates as a line, with points at the sizes that have a mark."""
    y = ("tokens_per_second", "tokens/s of one stream")
    rows = [{"slots": float(each.slots), y[0]: each.tokens_per_second} for each in predicted]
    curve = _powers(lines("Predicted tokens per second by number of slots", _X, y, {"predicted": rows}))
    points = {"values": [{**row, "mark": marks[int(row["slots"])]} for row in rows if row["slots"] in marks]}
    place = {name: curve["encoding"][name] for name in ("x", "y")}
    label = {**place, "text": {"field": "mark", "type": "nominal"}}
    layers = [
        {name: curve[name] for name in ("data", "mark", "encoding")},
        {"data": points, "mark": {"type": "point", "filled": True, "size": 80, "color": "#d1651a", "opacity": 1}}
        | {"encoding": place},
        {"data": points, "mark": {"type": "text", "dy": -11, "color": "#d1651a"}, "encoding": label},
    ]
    return {"title": curve["title"], "layer": layers}


def section(metrics: Mapping[str, Metrics], drawn: Callable[[str, str], str]) -> list[str]:
    """The section, where the vocabulary's figures tell of other sizes; `drawn` gives the Markdown of a plot."""
    sizes = metrics["vocab"].get("by_slots")
    if not sizes:
        return []
    found = _predict(metrics)
    if isinstance(found, str):
        table = _table(sizes, _marks(metrics, []), [])
        text = f"Coverage alone, without the speed that each size would give: {found}.\n\n{table}"
    else:
        basis, predicted = found
        table = _table(sizes, _marks(metrics, predicted), predicted)
        told = (_advice(metrics["bench"], basis, predicted), _model(metrics["bench"], basis), table, _LIMITS)
        text = "\n\n".join(told)
    picture = f"\n\n{drawn('slots', 'Draft vocabularies by number of slots')}" if plots(metrics) else ""
    return [f"## How many slots?\n\n{text}{picture}"]


def _predict(metrics: Mapping[str, Metrics]) -> tuple[Basis, list[Predicted]] | str:
    """What the bench predicts of every size, or why it cannot."""
    vocab, bench = metrics["vocab"], metrics["bench"]
    if metrics["remap"]["option"] == "keep_donor_vocab":
        return "the drafter that was benched keeps the donor's vocabulary, which none of these is"
    if bench.get("slots") != vocab["slots"]:
        return "the bench does not tell the cost of a head, or is of a drafter with another number of slots"
    if not bench["head_ms"]:
        return "the cost of a head was not measured: the server's device is not known, or not at hand"
    basis = _basis(bench["levels"])
    if basis is None:
        return "no concurrency of the bench has a valid chain of drafts whose acceptance by position is known"
    shares = {int(size): row["seen_heldout"] for size, row in vocab["by_slots"].items()}
    if not shares[vocab["slots"]]:
        return "no held-out token that is drafted has a slot and is seen in training"
    own = basis.row["steps"] * head_cost(bench["head_ms"], vocab["slots"])
    if own >= basis.row["cycle_ms"]:
        return (
            f"the heads, measured alone, take {own:.2f} ms, more than a whole cycle of {basis.row['cycle_ms']:.2f} ms"
        )
    return basis, predict_slots(basis.row, bench["head_ms"], vocab["slots"], shares)


def _basis(levels: Metrics) -> Basis | None:
    """The lowest concurrency that is valid and has a chain of the drafter's own, and the best one there."""
    for level, told in sorted(levels.items(), key=lambda each: int(each[0])):
        rows = [
            row
            for row in told["rows"].values()
            if row["steps"] and row["topk"] == 1 and row["drafter"] is None
            and "ratio_low" in row and row.get("accepted_at")
        ]  # fmt: skip
        if rows and told["word"] != "invalid":
            return Basis(level, max(rows, key=lambda row: row["ratio_low"]))
    return None


def _model(bench: Metrics, basis: Basis) -> str:
    row, steps = basis.row, basis.row["steps"]
    own = steps * head_cost(bench["head_ms"], bench["slots"])
    heads = "its head" if steps == 1 else f"its {steps} heads"
    return (
        f"Predicted for vocabularies by the same rule, from the arm “{row['label']}” at concurrency {basis.level}. A "
        f"draft whose id has a slot and is seen in training is taken to be right as often as measured, so that the "
        f"chance of each next draft goes with the share of such tokens; a cycle changes by as much as the time of "
        f"{heads}: at {bench['slots']:,} slots {own:.2f} ms of {row['cycle_ms']:.1f} ms ({own / row['cycle_ms']:.1%}). "
        f"The knee is the smallest N within {NEAR:.0%} of the fastest."
    )


def _table(sizes: Metrics, marks: Mapping[int, str], predicted: list[Predicted]) -> str:
    """A row a size; without predictions the columns that count tokens."""
    by_size = {str(each.slots): each for each in predicted}
    counted = ("coverage_train", "coverage_heldout", "ceiling_heldout", "seen_heldout")
    header = ["slots", "training tokens", "held-out tokens", "of drafts (ceiling)", "and seen in training"]
    header += ["a head, ms", "ms a cycle", "accept length", "tokens/s"] if predicted else []
    rows = []
    for size, row in sizes.items():
        name, mark = f"{int(size):,}", marks.get(int(size))
        cells = [f"**{name}** ({mark})" if mark else name]
        cells += [figure(row[each], ".1%") for each in counted]
        if predicted:
            cells += _predicted(by_size.get(size))
        rows.append(cells)
    return markdown(header, rows)


def _predicted(each: Predicted | None) -> list[str]:
    if each is None:
        return [NONE] * 4
    return [
        f"{each.head_ms:.3f}", f"{each.cycle_ms:.2f}", f"{each.accept_length:.2f}", f"{each.tokens_per_second:.1f}",
    ]  # fmt: skip


def _advice(bench: Metrics, basis: Basis, predicted: list[Predicted]) -> str:
    """Another size, where the gain is more than the bench's interval of the ratio can tell."""
    best, row = knee(predicted), basis.row
    own = next(each for each in predicted if each.slots == bench["slots"])
    gain, told = best.tokens_per_second / own.tokens_per_second - 1, row["ratio_high"] / row["ratio"] - 1
    if gain > told:
        return (
            f"**Try `vocab.slots: {best.slots}` in the profile: {gain:+.1%} tokens/s predicted, more than the bench's "
            f"interval ({told:+.1%}).**"
        )
    return f"No other size is predicted to be faster by more than the bench's interval can tell ({told:+.1%})."
