"""`redraft diff`: what moved between two revisions, for the terminal and for a pull request."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from redraft.cli.arguments import Commands, command


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    diff = command(
        commands,
        "diff",
        "what moved between two revisions, and whether it matters, as Markdown",
        "redraft diff main",
    )
    diff.add_argument("base", metavar="BASE", nargs="?", help="commit, branch or experiment (where HEAD left main)")
    diff.add_argument("head", metavar="HEAD", nargs="?", help="another one (the workspace)")
    diff.add_argument("--gate", action="store_true", help="exit 1 if a figure fell by more than `gates` allows")
    diff.add_argument("--link", metavar="URL/", default="", help="what stands before the paths of pictures")
    diff.add_argument("--json", action="store_true", help="print JSON")
    diff.set_defaults(run=_diff)


def _diff(arguments: argparse.Namespace) -> None:
    from redraft.diff.changes import judge, params, pictures
    from redraft.diff.figures import Side, figures
    from redraft.diff.page import page
    from redraft.diff.revision import WORKSPACE, Revision, base_of, revision
    from redraft.frame.errors import RedraftError
    from redraft.frame.params import Gates
    from redraft.frame.section import validate

    head = revision(arguments.head) if arguments.head else Revision(WORKSPACE, None)
    base = revision(arguments.base) if arguments.base else base_of(head)
    sides = Side.read(base), Side.read(head)
    if not any(side.params for side in sides):
        raise RedraftError(
            "There is no project here.", where=Path.cwd(), expected="params.yaml, as at the root of a project"
        )
    found, changed, drawn = figures(*sides), params(*sides), pictures(base, head)
    gates = validate(Gates, sides[1].params.get("gates") or {}, Path(f"{head.name}: params.yaml")).model_dump()
    judged = judge(found, gates) if arguments.gate else []
    names = (base.name if base else "nothing", head.name)
    if arguments.json:
        told: dict[str, Any] = {
            "base": base and {"name": base.name, "commit": base.commit},
            "head": {"name": head.name, "commit": head.commit},
            "figures": {each.name: {"base": each.base, "head": each.head, "state": each.state, "why": each.why or None}
                        for each in found},
            "params": {name: {"base": one, "head": two} for name, (one, two) in changed.items()},
            "pictures": drawn,
            "gates": {each.name: {"failed": each.failed, "told": each.told} for each in judged},
        }  # fmt: skip
        print(json.dumps(told, indent=2, default=str))
    else:
        print(page(names, found, changed, drawn, judged, arguments.link))
    if any(each.failed for each in judged):
        sys.exit(1)
