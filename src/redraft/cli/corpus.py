"""`redraft regenerate`."""

import argparse
import json
import tempfile
from pathlib import Path

from redraft.cli.arguments import Commands, command
from redraft.frame import atomic


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    answer = command(
        commands,
        "regenerate",
        "answer prompts with the target itself, greedily",
        "redraft regenerate prompts.jsonl --profile mine --output data/mine/train.jsonl",
    )
    answer.add_argument(
        "prompts", type=Path, help="JSONL of {id, messages}; answers that stand at the end are replaced"
    )
    answer.add_argument("--profile", required=True, help="a file in profiles/, without .yaml")
    answer.add_argument("--target", type=Path, help="a target folder that exists already (artifacts/target)")
    answer.add_argument("--output", type=Path, required=True, help="JSONL to write")
    answer.add_argument("--max-new-tokens", type=int, default=160, help="longest answer, tokens (default %(default)s)")
    answer.add_argument("--batch", type=int, default=40, help="prompts at once (default %(default)s)")
    answer.set_defaults(run=_regenerate)


def _regenerate(arguments: argparse.Namespace) -> None:
    from redraft.corpus.jsonl import read_chats
    from redraft.corpus.regenerate import regenerate
    from redraft.corpus.tokenizer import load_tokenizer, stop_ids
    from redraft.frame.profile import load_profile
    from redraft.target.model import load_target
    from redraft.target.sources import make_target

    profile = load_profile(arguments.profile)
    chats = read_chats(arguments.prompts)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.target
        if folder is None:
            folder = Path(scratch) / "target"
            make_target(profile.target, folder)
        trust = profile.target.trust_remote_code
        target = load_target(folder, dtype="bf16", trust_remote_code=trust)
        tokenizer = load_tokenizer(folder, trust)
        answered = regenerate(
            target,
            tokenizer,
            chats,
            stop=stop_ids(folder, tokenizer),
            max_new_tokens=arguments.max_new_tokens,
            batch=arguments.batch,
        )
        lines = [json.dumps(chat, ensure_ascii=False) for chat in answered]
    atomic.write_text(arguments.output, "\n".join(lines) + "\n")
    print(f"{len(lines)} chat{'s' * (len(lines) != 1)} in {arguments.output}")
