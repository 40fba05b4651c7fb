"""The figures that decide, in one flat file: `metrics/summary.json`, which DVC's tables and `redraft diff` show."""

from collections.abc import Mapping
from typing import Any

Metrics = Mapping[str, Any]
Summary = dict[str, float | str | None]


def summary(metrics: Mapping[str, Metrics]) -> Summary:
    """The summary of a run, from the metrics of its stages by name; None is what was not measured.

    The bench's figures are those of its lowest valid concurrency; its verdict is that level's word, without figures.
    Figures of probe and bench that are of another drafter than the one trained last are none, the verdict is `stale`.
    """
    remap, train, probe, bench = (metrics[stage] for stage in ("remap", "train", "probe", "bench"))
    first, heldout, drafter = remap["first_step"], train["heldout"], train["drafter"]
    word, ratio, low = _bench(bench) if bench["drafter"] == drafter else ("stale", None, None)
    return {
        "verdict": word,
        "ratio": ratio,
        "ratio_low": low,
        "served_accept_length": probe["accept_length"] if probe["drafter"] == drafter else None,
        "predicted_accept_length": heldout.get("accept_length"),
        "accuracy": heldout["accuracy_0"],
        "ceiling": heldout["ceiling_0"],
        "coverage": metrics["vocab"]["coverage_heldout"],
        "first_loss": first[remap["option"]]["loss"],
        "first_loss_naive": first.get("naive", {}).get("loss"),
        "trained_tokens": train["tokens"],
    }


def _bench(bench: Metrics) -> tuple[str, float | None, float | None]:
    for _, level in sorted(bench["levels"].items(), key=lambda each: int(each[0])):
        row = level["rows"].get(level["best"], {})
        if level["word"] != "invalid" and "ratio" in row:
            return level["word"].partition(":")[0], row["ratio"], row["ratio_low"]
    words = [level["word"].partition(":")[0] for level in bench["levels"].values()]
    return words[0] if words else "not measured", None, None
