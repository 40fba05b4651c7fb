"""`redraft register`: a drafter in MLflow's model registry, by a link: its weights stay where they are."""

import argparse
from pathlib import Path

from redraft.cli.arguments import Commands, command
from redraft.frame.errors import RedraftError


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    register = command(
        commands,
        "register",
        "add a drafter to MLflow's model registry, with a link to its folder",
        "redraft register --name kimi-k25-eagle3 --source s3://drafters/kimi-k25/1",
    )
    register.add_argument(
        "folder", metavar="FOLDER", nargs="?", type=Path, default=Path("artifacts/drafter"), help="(%(default)s)"
    )
    register.add_argument("--name", required=True, help="of the registered model; a further one is its next version")
    register.add_argument("--source", help="where others find the folder (its path on this machine)")
    register.set_defaults(run=_register)


def _register(arguments: argparse.Namespace) -> None:
    from redraft.drafter.checkpoint import weights_sha256
    from redraft.frame.files import read_object
    from redraft.frame.mlflow_client import address
    from redraft.frame.registry import register

    record = arguments.folder / "redraft.json"
    if not record.is_file():
        raise RedraftError(
            "This is no drafter that redraft trained.", where=arguments.folder, expected="redraft.json in it"
        )
    told = read_object(record)
    source = arguments.source or arguments.folder.resolve().as_uri()
    tags = {"target": str(told.get("target", ""))[:64], "mapping": str(told.get("mapping", ""))[:64]}
    version, run = register(arguments.name, weights_sha256(arguments.folder), source, tags)
    print(f"{arguments.name}, version {version}, of run {run}: {source}\n{address()}")
