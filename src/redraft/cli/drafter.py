"""`redraft lint` and `redraft export`: a drafter's files, looked at and written for a server."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from redraft.cli.arguments import Commands, command, require_new
from redraft.frame.errors import RedraftError


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    look = command(
        commands,
        "lint",
        "what would SGLang make of a drafter's files? Starts no server",
        "redraft lint artifacts/drafter --target artifacts/target --version 0.5.23",
    )
    look.add_argument("checkpoint", help="a drafter's folder, for example artifacts/drafter")
    look.add_argument("--target", type=Path, required=True, help="the target's folder")
    look.add_argument("--engine", choices=["sglang"], default="sglang", help="the server (default %(default)s)")
    look.add_argument("--version", required=True, help="of the server, for example 0.5.23")
    look.add_argument("--tp-size", type=int, help="GPUs of tensor parallelism: can they divide the drafter's heads?")
    look.add_argument("--algorithm", default="EAGLE3", help="--speculative-algorithm (default %(default)s)")
    look.add_argument("--json", action="store_true", help="print JSON")
    look.set_defaults(run=_lint)
    export = command(
        commands,
        "export",
        "write a drafter for SGLang, or in the form of speculators and vLLM",
        "redraft export artifacts/drafter --target artifacts/target --for sglang==0.5.23 --output out",
    )
    export.add_argument("checkpoint", type=Path, help="a drafter's folder, for example artifacts/drafter")
    export.add_argument(
        "--target",
        required=True,
        help="the target's folder; for speculators its name does, too (written into config.json)",
    )
    export.add_argument(
        "--for", dest="engine", default="speculators", help="speculators, or sglang==0.5.23 (default %(default)s)"
    )
    export.add_argument("--output", type=Path, required=True, help="folder to write")
    export.add_argument(
        "--metrics", type=Path, default=Path("metrics"), help="for the model card (default %(default)s)"
    )
    for each in (look, export):
        each.add_argument("--aux-layers", type=int, nargs="+", help="inputs of layers, if redraft.json does not say")
        each.add_argument(
            "--context-length", type=int, help="tokens that the server is started for (default: the target's)"
        )
    export.set_defaults(run=_export)


def _lint(arguments: argparse.Namespace) -> None:
    from redraft.preflight.lint import describe, lint

    found = lint(
        arguments.checkpoint,
        arguments.target,
        arguments.version,
        context=arguments.context_length,
        algorithm=arguments.algorithm,
        trained=arguments.aux_layers,
        tp=arguments.tp_size,
    )
    print(json.dumps([asdict(each) for each in found], indent=2) if arguments.json else describe(found))
    if any(each.level == "error" for each in found):
        sys.exit(1)


def _export(arguments: argparse.Namespace) -> None:
    from redraft.preflight.export import export_for_speculators, export_sglang

    require_new(arguments.output)
    engine, _, version = arguments.engine.partition("==")
    if engine == "sglang" and version:
        notes = export_sglang(
            arguments.checkpoint,
            Path(arguments.target),
            version,
            arguments.output,
            context=arguments.context_length,
            aux_layers=arguments.aux_layers,
            metrics=arguments.metrics,
        )
        from redraft.preflight.lint import describe

        print(f"{describe(notes)}\n{arguments.output}: for SGLang {version}, with its model card in README.md")
        return
    if arguments.engine != "speculators":
        raise RedraftError(
            "A drafter is written for one engine.",
            where="--for",
            expected="speculators, or sglang==VERSION",
            found=arguments.engine,
        )
    layers = export_for_speculators(
        arguments.checkpoint, arguments.target, arguments.output, aux_layers=arguments.aux_layers
    )
    print(f"{arguments.output}: aux layers {list(layers)} as inputs of layers, every norm flag false")
