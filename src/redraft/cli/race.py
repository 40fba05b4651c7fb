"""`redraft race`: which start wins on equal budgets?"""

import argparse
import signal
import sys
from pathlib import Path

from redraft.cli.arguments import Commands, command
from redraft.frame.errors import RedraftError


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    race = command(
        commands,
        "race",
        "train remap, keep_donor_vocab and scratch on equal budgets, the better half of them on: which pays?",
        "redraft race --lr 1e-3,2e-3",
    )
    race.add_argument("--init", default="remap,keep_donor_vocab,scratch", help="what to start from (%(default)s)")
    race.add_argument("--fill", help="fills of remap, for example zero,fitted")
    race.add_argument("--slots", help="sizes of the draft vocabulary, for example 2000,4000")
    race.add_argument("--lr", help="learning rates, for example 1e-3,2e-3")
    race.add_argument(
        "-S",
        dest="settings",
        metavar="KEY=V1,V2",
        action="append",
        default=[],
        help="any other setting, as dvc takes it",
    )
    race.add_argument("--shares", default="0.1,0.3,1", help="budgets, shares of `epochs` (%(default)s)")
    race.add_argument("--all", action="store_true", help="cut nobody")
    race.add_argument("--jobs", type=int, default=1, help="trainings at a time (%(default)s)")
    race.set_defaults(run=_race)


def _race(arguments: argparse.Namespace) -> None:
    from redraft.frame.params import load_config
    from redraft.race.contenders import contenders, parse
    from redraft.race.page import answer, mlflow
    from redraft.race.queue import Queue
    from redraft.race.rungs import Race, race_id
    from redraft.race.speed import cycles_here
    from redraft.race.write import require_visible, write

    config = load_config()
    profile, params = config.params.profile, config.params
    named = {"fill": arguments.fill, "slots": arguments.slots, "lr": arguments.lr}
    grid = parse([*(f"{key}={values}" for key, values in named.items() if values), *arguments.settings])
    who = contenders(arguments.init.split(","), grid, profile)
    shares = _shares(arguments.shares)
    if arguments.jobs < 1:
        raise RedraftError("At least one training runs at a time.", where="--jobs", found=arguments.jobs)
    require_visible(profile)
    race = race_id()
    queue, cycles = Queue(f"race-{race}-", arguments.jobs), cycles_here(params.engine)
    queue.require_free()
    queue.drop_queued()
    fixed = (("patience", str(params.evals)),) if params.patience < params.evals else ()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"race {race}: {', '.join(each.name for each in who)}", flush=True)
    try:
        rungs = Race(queue, who, shares, params.epochs, fixed, cycles, arguments.all, _tell).run()
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        queue.stop()
        print("the race was stopped; started again it takes up what has finished", file=sys.stderr)
        raise
    queue.forget()
    _, told, said = answer(rungs)
    written = write(Path("race"), profile, race, rungs, cycles)
    print(f"\n{told.replace('**', '')} {said.told}\n\n{written}\n{mlflow(race, profile)}")


def _tell(line: str) -> None:
    print(line, flush=True)


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or sorted(set(shares)) != shares or not 0 < shares[0] <= shares[-1] <= 1:
        raise RedraftError("The budgets are rising shares.", where="--shares", expected="as 0.1,0.3,1", found=text)
    return shares
