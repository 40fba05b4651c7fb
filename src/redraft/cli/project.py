"""`redraft init` and `redraft check`: a profile of one's own, and whether all that it names goes together."""

import argparse
from pathlib import Path

from redraft.cli.arguments import Commands, command, require_new
from redraft.frame import atomic
from redraft.frame.errors import RedraftError


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    begin = command(
        commands,
        "init",
        "write a profile for a target and a donor of your own",
        "redraft init mine --target ~/models/served --donor ~/models/drafter",
    )
    begin.add_argument("name", metavar="NAME", help="of the profile: profiles/NAME.yaml, data in data/NAME/")
    begin.add_argument("--target", required=True, help="the served model: a folder, or ORG/NAME@COMMIT")
    begin.add_argument(
        "--donor", required=True, help="the drafter to start from: a folder, ORG/NAME@COMMIT, or `train` (from nothing)"
    )
    begin.set_defaults(run=_init)
    look = command(
        commands,
        "check",
        "do parameters, data, target and donor go together? Seconds, before a run",
        "redraft check --profile mine",
    )
    look.add_argument("--profile", help="a file in profiles/, without .yaml (default: the one in params.yaml)")
    look.set_defaults(run=_check)


def _init(arguments: argparse.Namespace) -> None:
    from redraft.frame.gpus import gpus
    from redraft.frame.keys import profile_text
    from redraft.frame.profile import Profile
    from redraft.frame.section import load_yaml, validate
    from redraft.preflight.propose import propose

    name, path = arguments.name, Path("profiles") / f"{arguments.name}.yaml"
    if not name.replace("-", "").replace("_", "").isalnum():
        raise RedraftError(
            "A profile's name is one word.", where="NAME", expected="letters, digits, - and _", found=name
        )
    if not Path("params.yaml").is_file():
        raise RedraftError(
            "This is no redraft project.", where=Path.cwd(), expected="params.yaml", fix="cd to its root"
        )
    require_new(path)
    sources = [_named(source) for source in (arguments.target, arguments.donor)]
    values = propose(*sources[0], *sources[1], gpus())
    text = profile_text(values, f"Written by `redraft init {name}`: a beginning, to be read and changed.")
    validate(Profile, load_yaml(text), path)
    atomic.write_text(path, text)
    data = ("train", "heldout", *(["donor"] if arguments.donor == "train" else []))
    made = "\n".join(
        f"  redraft regenerate PROMPTS --profile {name} --output data/{name}/{split}.jsonl" for split in data
    )
    print(
        f"{path}: every key with what it is; read it, above all `vocab`, `knobs` and `engine`\n\n"
        f"Next, with prompts of your own (JSONL, some of them held out), answered by the target:\n{made}\n"
        f"  redraft check --profile {name}\n\n"
        f"Then write `profile: {name}` into params.yaml, give it to git (a queued run sees nothing else), and run:\n"
        f"  git add {path} data/{name} params.yaml && git commit -m 'Profile {name}'\n"
        f"  dvc repro"
    )


def _named(source: str) -> tuple[str, str | None]:
    """A folder as an absolute path, which a temporary run finds too; a hub id with its revision apart."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return str(folder.absolute()), None
    name, _, revision = source.partition("@")
    if source != "train" and (source.startswith(("/", ".", "~")) or not revision):
        raise RedraftError(
            "The source is neither a folder nor a hub id.",
            where=source,
            expected="an existing folder, or ORG/NAME@COMMIT",
        )
    return name, revision or None


def _check(arguments: argparse.Namespace) -> None:
    from redraft.frame.params import load_config
    from redraft.preflight.check import check, require_sound

    config = load_config(profile=arguments.profile)
    found = check(config, Path(), deep=True)
    print(f"profile: {config.params.profile}, {config.params.init}, lr {config.params.lr:g}")
    for line in [*found.lines, *(f"note: {note}" for note in found.notes)]:
        print(line)
    require_sound(found)
    print("nothing would stop a run here")
