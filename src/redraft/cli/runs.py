"""`redraft compare` and `redraft publish`: runs side by side, and runs told to MLflow."""

import argparse
import os
import sys
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
    from redraft.frame.journal import first, journals
    from redraft.frame.mlflow_client import address, is_away, reason
    from redraft.frame.mlflow_runs import close_partial_runs, send
    from redraft.frame.track import refusal

    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")  # seconds; no training waits here
    sent: list[int] = []
    refused: dict[str, str] = {}
    failed: dict[str, Exception] = {}
    profiles = set()
    for path in journals():
        try:
            if header := first(path):
                sent.append(send(path, refused=refused))
                profiles.add(header["tags"]["profile"])
        except Exception as error:  # whatever the tracking server says: the next journal may be taken
            failed[path.name] = error
            if is_away(error):
                break
    try:
        for profile in () if failed else profiles:
            close_partial_runs(profile)
    except Exception as error:
        failed["runs left open"] = error
    print(f"{len(sent)} journals, {sum(sent)} lines that {address()} did not have")
    if refused:
        print(f"warning: {refusal(refused)}", file=sys.stderr)
    for fault in failed.values():
        if isinstance(fault, RedraftError):
            raise fault
    if failed:
        name, fault = next(iter(failed.items()))
        raise RedraftError(
            f"The tracking server did not take {len(failed)} of the journals.",
            where=address(),
            found=f"{name}: {type(fault).__name__}: {reason(fault)}",
            fix="start it, or set MLFLOW_TRACKING_URI; what was sent already is not sent again",
        )
