"""The `redraft` command."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from redraft import atomic
from redraft.errors import RedraftError


def _regenerate(arguments: argparse.Namespace) -> None:
    from redraft.params import load_profile
    from redraft.target.chat import load_tokenizer, read_chats
    from redraft.target.model import load_target
    from redraft.target.regenerate import regenerate
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
        limits = {"max_new_tokens": arguments.max_new_tokens, "batch": arguments.batch}
        lines = [json.dumps(chat, ensure_ascii=False) for chat in regenerate(target, tokenizer, chats, **limits)]
    atomic.write_text(arguments.output, "\n".join(lines) + "\n")
    print(f"{len(lines)} chats in {arguments.output}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="redraft", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    answer = commands.add_parser("regenerate", help="answer prompts with the target itself, greedily")
    answer.add_argument(
        "prompts", type=Path, help="JSONL of {id, messages}; answers that stand at the end are replaced"
    )
    answer.add_argument("--profile", required=True, help="a file in profiles/, without .yaml")
    answer.add_argument("--target", type=Path, help="a target folder that exists already (artifacts/target)")
    answer.add_argument("--output", type=Path, required=True, help="JSONL to write")
    answer.add_argument("--max-new-tokens", type=int, default=160, help="longest answer, tokens (default %(default)s)")
    answer.add_argument("--batch", type=int, default=40, help="prompts at once (default %(default)s)")
    answer.set_defaults(run=_regenerate)
    return parser


def main() -> None:
    """Run the command line; a RedraftError ends it with its message and exit code 1."""
    arguments = _parser().parse_args()
    try:
        arguments.run(arguments)
    except RedraftError as error:
        if os.environ.get("REDRAFT_DEBUG") == "1":
            raise
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
