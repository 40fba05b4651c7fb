"""`redraft compare` and `redraft publish`: runs side by side, and runs told to MLflow."""

import argparse
from pathlib import Path

from redraft.cli.arguments import Commands, command
from redraft.frame.errors import RedraftError


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    speeds = command(
        commands,
        "compare",
        "compare the speeds of two benches of one machine and engine",
        "redraft compare before.json metrics/bench.json",
    )
    speeds.add_argument("a", metavar="A", type=Path, help="metrics/bench.json of one run")
    speeds.add_argument("b", metavar="B", type=Path, help="and of another")
    speeds.set_defaults(run=_compare)
    publish = command(
        commands,
        "publish",
        "send to MLflow what a missing tracking server did not take",
        "MLFLOW_TRACKING_URI=http://tracking:5000 redraft publish",
    )
    publish.set_defaults(run=_publish)


def _compare(arguments: argparse.Namespace) -> None:
    from redraft.bench.machine import require_same
    from redraft.report.bench import read_bench
    from redraft.report.tables import figure, markdown

    one, two = (read_bench(path) for path in (arguments.a, arguments.b))
    where = f"{arguments.a}, {arguments.b}"
    require_same(one, two, where)
    rows = []
    for level in sorted(one["levels"].keys() & two["levels"].keys(), key=int):
        first, second = (each["levels"][level] for each in (one, two))
        if "invalid" in (first["word"], second["word"]):
            rows.append((level, "invalid", "", "", ""))
            continue
        for arm, row in first["rows"].items():
            speeds = [each["rows"][arm]["tokens_per_second"] for each in (first, second) if arm in each["rows"]]
            if len(speeds) == 2:
                ratio = speeds[1] / speeds[0] if all(speeds) else None
                rows.append((level, row["label"], *(figure(speed, ".1f") for speed in speeds), figure(ratio, ".2f")))
    if not rows:
        raise RedraftError(
            "The benches have no arm in common.",
            where=where,
            found=f"concurrency {', '.join(one['levels']) or 'none'} and {', '.join(two['levels']) or 'none'}",
        )
    print(markdown(("clients", "arm", "A, tokens/s", "B, tokens/s", "B / A"), rows))


def _publish(arguments: argparse.Namespace) -> None:
    from redraft.frame.journal import journals, read
    from redraft.frame.track import send, tracking_uri

    sent, failed = [], {}
    for path in journals():
        try:
            sent += [send(path)] if read(path) else []
        except Exception as error:  # whatever the tracking server says: the next journal may be taken
            failed[path.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"{len(sent)} journals, {sum(sent)} lines that {tracking_uri()} did not have")
    if failed:
        name, reason = next(iter(failed.items()))
        raise RedraftError(
            f"The tracking server did not take {len(failed)} journals.",
            where=tracking_uri(),
            found=f"{name}: {reason}",
            fix="start it, or set MLFLOW_TRACKING_URI; what was sent already is not sent again",
        )
