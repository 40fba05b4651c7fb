"""`redraft regenerate`."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.cli.arguments import Commands, command
from redraft.frame.errors import RedraftError, some
from redraft.frame.profile import Profile

if TYPE_CHECKING:
    from redraft.regenerate.answers import Answering, Numbered, Told
    from redraft.regenerate.conversation import Asking

MADE = Path("artifacts/target")
HERE = {"batch": 40, "precision": "auto"}
SERVED = {"concurrency": 64, "model": None, "key_env": "OPENAI_API_KEY", "timeout": 3600, "patience": 600}
"""Defaults of options that count in this process alone, and of those that count with `--url` alone."""
RANGES = {
    "max_new_tokens": (1, 2**31),
    "batch": (1, 2**20),
    "temperature": (0, 100),
    "concurrency": (1, 1024),
    "timeout": (0.1, 1e6),
    "patience": (0.1, 1e7),
}


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    answer = command(
        commands,
        "regenerate",
        "answer prompts with the target itself: every turn of an assistant anew, in order, as token ids",
        "redraft regenerate prompts.jsonl --profile mine --output data/mine/train.jsonl --url http://127.0.0.1:30000",
    )
    answer.add_argument("prompts", type=Path, nargs="+", help="JSONL (plain or .gz) or Parquet: messages, or ShareGPT")
    answer.add_argument("--profile", required=True, help="a file in profiles/, without .yaml")
    answer.add_argument("--output", type=Path, required=True, help="JSONL to write; packed if its name ends with .gz")
    answer.add_argument("--overwrite", action="store_true", help="replace an output that is there")
    answer.add_argument("--target", type=Path, help="a target folder that exists already (artifacts/target)")
    answer.add_argument(
        "--max-new-tokens", type=int, help="longest answer, tokens; without it the target's context is the limit"
    )
    answer.add_argument(
        "--last-only", action="store_true", help="answer the last turn alone; earlier answers are then not trained on"
    )
    answer.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    answer.add_argument("--seed", type=int, help="of answers that are drawn, with --temperature (default 0)")
    answer.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp32"),
        help="in this process; auto is bf16 where the machine multiplies it (default)",
    )
    answer.add_argument("--batch", type=int, help=f"in this process: prompts at once (default {HERE['batch']})")
    server = answer.add_argument_group("by a running server, SGLang or any with OpenAI's completions")
    server.add_argument("--url", help="its address, http(s)://HOST:PORT; without it the target runs in this process")
    for name, kind, told in (
        ("concurrency", int, "requests at once"),
        ("model", str, "name of the model there (default: the first that the server names)"),
        ("key-env", str, "environment variable of its key"),
        ("timeout", float, "longest wait for one answer, seconds"),
        ("patience", float, "longest time without any answer before it gives up, seconds"),
    ):
        default = SERVED[name.replace("-", "_")]
        server.add_argument(f"--{name}", type=kind, help=told + (f" (default {default})" if default else ""))
    answer.set_defaults(run=_regenerate)


def _regenerate(arguments: argparse.Namespace) -> None:
    _require_sound(arguments)
    from redraft.corpus.chat import template_record
    from redraft.corpus.tokenizer import load_tokenizer, stop_ids, tokenizer_hash
    from redraft.frame.profile import load_profile
    from redraft.regenerate.answers import answer_files
    from redraft.regenerate.conversation import Asking, Sampling
    from redraft.regenerate.local import context_of
    from redraft.target.config import read_config

    profile = load_profile(arguments.profile)
    how, trust = profile.target.template, profile.target.trust_remote_code
    with _target(profile, arguments) as folder:
        tokenizer = load_tokenizer(folder, trust)
        sampling = {"temperature": arguments.temperature, "max_new_tokens": arguments.max_new_tokens}
        made = {
            "tokenizer": tokenizer_hash(tokenizer),
            "template": template_record(tokenizer, how),
            "sampling": sampling | ({"seed": arguments.seed} if arguments.temperature else {}),
        }
        asking = Asking(
            tokenizer=tokenizer,
            stop=stop_ids(folder, tokenizer),
            context=context_of(read_config(folder, trust)),
            limit=arguments.max_new_tokens,
            how=how,
            last_only=arguments.last_only,
            made=made,
            sampling=Sampling(arguments.temperature, arguments.seed),
        )
        asking, answering = (_by_server if arguments.url else _here)(arguments, asking, folder, profile)
        told = answer_files(arguments.prompts, arguments.output, asking, answering, profile.corpus.max_dropped)
    _tell(told, arguments.output, asking)


def _require_sound(arguments: argparse.Namespace) -> None:
    """Refuse options that cannot be used or have no effect, files that are missing, and to overwrite."""
    idle = {
        **dict.fromkeys(HERE if arguments.url else SERVED, "with --url" if arguments.url else "without --url"),
        **({} if arguments.temperature else {"seed": "without --temperature"}),
    }
    for name, when in idle.items():
        if getattr(arguments, name) is not None:
            raise RedraftError(f"{_option(name)} has no effect {when}.", fix="leave it out")
    for name, default in {**HERE, **SERVED, "seed": 0}.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    for name, (least, most) in RANGES.items():
        given = getattr(arguments, name)
        if given is not None and not least <= given <= most:
            raise RedraftError(
                "An option cannot be used.", where=f"{_option(name)} {given}", expected=f"from {least} to {most}"
            )
    lacking = [path for path in arguments.prompts if not path.is_file()]
    if lacking:
        raise RedraftError("A file of prompts is missing.", where=some(lacking))
    output = arguments.output
    if output.is_dir() or output.name.endswith((".parquet", ".parquet.gz")):
        raise RedraftError("The output is one file of JSONL.", where=output, fix="name it .jsonl or .jsonl.gz")
    if output.exists() and not arguments.overwrite:
        raise RedraftError("The output is there already.", where=output, fix="--overwrite, or another --output")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@contextmanager
def _target(profile: Profile, arguments: argparse.Namespace) -> Iterator[Path]:
    """The target's folder: the one given, what the target stage made of the profile's source, the source, or made now.

    For a server nothing is fetched but what is beside the weights.

    Raises:
        RedraftError: the folder that is given was made of another source than the profile's.
    """
    from redraft.frame.files import read_object
    from redraft.target.checkout import DRAFTER_FILES, FITTED, checkout
    from redraft.target.folder import TARGET_RECORD
    from redraft.target.sources import make_target

    params, given = profile.target, arguments.target
    source = (params.source, params.revision or params.sha256)

    def made_of(folder: Path) -> Any:
        record = read_object(folder / TARGET_RECORD) if (folder / TARGET_RECORD).is_file() else {}
        return (record["source"], record.get("revision")) if "source" in record else None

    if given is not None and made_of(given) not in (None, source):
        raise RedraftError(
            "The target folder is another one than the profile's.",
            where=given,
            expected=source,
            found=made_of(given),
            fix="name the profile of that target, or leave --target out",
        )
    if given is not None or made_of(MADE) == source:
        yield given or MADE
    elif params.source.startswith("wheel:") or params.source in FITTED:
        with tempfile.TemporaryDirectory() as scratch:
            make_target(params, Path(scratch) / "target")
            yield Path(scratch) / "target"
    else:
        lock = Path(f"profiles/{arguments.profile}.lock")
        yield checkout(params.source, params.revision, () if arguments.url else DRAFTER_FILES[:1], lock=lock)


def _here(
    arguments: argparse.Namespace, asking: "Asking", folder: Path, profile: Profile
) -> "tuple[Asking, Answering]":
    """Answers in this process; the target is loaded when the prompts are found to be good."""
    from dataclasses import replace

    from redraft.frame.device import resolve
    from redraft.regenerate.local import answer_here
    from redraft.target.ends import target_hash
    from redraft.target.model import load_target

    dtype = resolve(arguments.precision)
    made = {
        "engine": "transformers",
        "release": version("transformers"),
        "dtype": dtype,
        "target": target_hash(folder),
    }

    def answering(waiting: "Iterator[Numbered]") -> "Iterator[Numbered]":
        target = load_target(folder, dtype=dtype, trust_remote_code=profile.target.trust_remote_code)
        yield from answer_here(target, waiting, arguments.batch)

    return replace(asking, made={**made, **asking.made}), answering


def _by_server(
    arguments: argparse.Namespace, asking: "Asking", folder: Path, profile: Profile
) -> "tuple[Asking, Answering]":
    """Answers by the server at `--url`, found out and tried."""
    from dataclasses import replace

    from redraft.corpus.rows import Refused
    from redraft.regenerate.answers import conversations
    from redraft.regenerate.server import Server
    from redraft.regenerate.threads import answer_by

    key = os.environ.get(arguments.key_env)
    server = Server(arguments.url, arguments.timeout, arguments.patience, key, arguments.model)
    ready = (each for _, each in conversations(arguments.prompts, asking) if not isinstance(each, Refused))
    if firsts := sorted(islice(ready, 32), key=lambda each: len(each.prompt or []))[:3]:
        server.connect(firsts)
        named = " ".join(filter(None, (server.engine, server.release)))
        print(f"{named} at {server.shown}, {server.model}: {server.form.told}", flush=True)
    for line in server.notes:
        print(f"note: {line}", flush=True)
    made = {"engine": server.engine, "release": server.release, "model": server.model, "form": server.form.told}
    context = min(asking.context, server.context or asking.context)
    return replace(asking, made={**made, **asking.made}, context=context), partial(
        answer_by, server, concurrency=arguments.concurrency
    )


def _tell(told: "Told", output: Path, asking: "Asking") -> None:
    from redraft.regenerate.answers import shown

    limit = f"of {asking.limit:,} tokens" if asking.limit else f"of the context, {asking.context:,} tokens"
    tokens = f" ({told.tokens:,} tokens)" if told.tokens else ""
    print(f"{_count(told.rows, 'chat')} with {_count(told.answers, 'answer')}{tokens} in {output}")
    if told.cut:
        print(f"{told.cut:,} of {_count(told.answers, 'answer')} reached the limit {limit}: no end is trained on there")
    if told.without_ids:
        print(
            f"{told.without_ids:,} of {_count(told.answers, 'answer')} without ids: "
            "the server gives text alone, which the corpus stage must prove"
        )
    for reason, number in told.ended.most_common():
        print(f"ended early: {_count(number, 'chat')}, {ENDED.get(reason, reason)}")
    if told.refused:
        print(f"left out: {_count(len(told.refused), 'chat')}: {shown(told.refused)}")


def _count(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


ENDED = {
    "cut": "an answer was cut, and nobody goes on from half an answer",
    "tool": "the next message answers a tool call that was not made here",
    "markers": "an answer holds markers (a tool call, channels), which no later prompt can be made of",
    "context": "the next prompt is beyond the target's context",
    "template": "the template refuses the next prompt",
    "server": "the server refuses the next prompt, or fails on it alone",
}
