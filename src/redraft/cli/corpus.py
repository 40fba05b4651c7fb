"""`redraft regenerate`."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.cli.arguments import Commands, command
from redraft.frame.errors import RedraftError, some
from redraft.frame.profile import Profile

if TYPE_CHECKING:
    from redraft.regenerate.answers import Answering, Told
    from redraft.regenerate.conversation import Asking

MADE = Path("artifacts/target")


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
    answer.add_argument("--seed", type=int, default=0, help="of sampled answers (default %(default)s)")
    answer.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="in this process; auto is bf16 where the machine multiplies it (default)",
    )
    answer.add_argument("--batch", type=int, default=40, help="in this process: prompts at once (default %(default)s)")
    server = answer.add_argument_group("by a running server, SGLang or any with OpenAI's completions")
    server.add_argument("--url", help="its address, http(s)://HOST:PORT; without it the target runs in this process")
    server.add_argument("--concurrency", type=int, default=64, help="requests at once (default %(default)s)")
    server.add_argument("--model", help="name of the model there; the first that it tells without it")
    server.add_argument(
        "--key-env", default="OPENAI_API_KEY", help="environment variable of its key (default %(default)s)"
    )
    server.add_argument("--timeout", type=float, default=3600, help="longest wait for one answer, s (%(default)s)")
    server.add_argument("--patience", type=float, default=600, help="gives up after this long without any answer, s")
    answer.set_defaults(run=_regenerate)


def _regenerate(arguments: argparse.Namespace) -> None:
    _require_sound(arguments)
    from redraft.corpus.chat import template_record
    from redraft.corpus.tokenizer import load_tokenizer, stop_ids, tokenizer_hash
    from redraft.frame.profile import load_profile
    from redraft.regenerate.answers import answer_files
    from redraft.regenerate.conversation import Asking
    from redraft.regenerate.local import context_of
    from redraft.target.config import read_config

    profile = load_profile(arguments.profile)
    how, trust = profile.target.template, profile.target.trust_remote_code
    with _target(profile, arguments.target) as folder:
        tokenizer = load_tokenizer(folder, trust)
        context = context_of(read_config(folder, trust))
        made = {"tokenizer": tokenizer_hash(tokenizer), "template": template_record(tokenizer, how)}
        sampling = {"temperature": arguments.temperature, "max_new_tokens": arguments.max_new_tokens}
        made["sampling"] = sampling | ({"seed": arguments.seed} if arguments.temperature else {})
        asking = Asking(
            tokenizer, stop_ids(folder, tokenizer), context, arguments.max_new_tokens, how, arguments.last_only, made
        )
        prepare = _by_server if arguments.url else _here
        asking, answering = prepare(arguments, asking, folder, profile)
        told = answer_files(arguments.prompts, arguments.output, asking, answering, profile.corpus.max_dropped)
    _tell(told, arguments.output, asking)


def _require_sound(arguments: argparse.Namespace) -> None:
    lacking = [path for path in arguments.prompts if not path.is_file()]
    if lacking:
        raise RedraftError("A file of prompts is missing.", where=some(lacking))
    if arguments.output.exists() and not arguments.overwrite:
        raise RedraftError(
            "The output is there already.", where=arguments.output, fix="--overwrite, or another --output"
        )
    if arguments.output.name.endswith((".parquet", ".parquet.gz")):
        raise RedraftError("The output is JSONL.", where=arguments.output, fix="name it .jsonl or .jsonl.gz")
    least = {"max_new_tokens": 1, "batch": 1, "concurrency": 1, "temperature": 0}
    for name, value in least.items():
        given = getattr(arguments, name)
        if given is not None and not given >= value:
            raise RedraftError(
                "An option cannot be used.", where=f"--{name.replace('_', '-')} {given}", expected=f"at least {value}"
            )


@contextmanager
def _target(profile: Profile, given: Path | None) -> Iterator[Path]:
    """The target's folder: `given`, what the target stage made of the profile's source, the source, or made now.

    Raises:
        RedraftError: `given` was made of another source than the profile's.
    """
    from redraft.frame.files import read_object
    from redraft.target.folder import TARGET_RECORD
    from redraft.target.sources import make_target

    source = profile.target.source

    def made_of(folder: Path) -> Any:
        record = folder / TARGET_RECORD
        return read_object(record).get("source") if record.is_file() else None

    if given is not None and made_of(given) not in (None, source):
        raise RedraftError(
            "The target folder is another one than the profile's.",
            where=given,
            expected=source,
            found=made_of(given),
            fix="name the profile of that target, or leave --target out",
        )
    folder = given or (MADE if made_of(MADE) == source else Path(source).expanduser())
    if given is not None or folder.is_dir():
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        make_target(profile.target, Path(scratch) / "target")
        yield Path(scratch) / "target"


def _here(
    arguments: argparse.Namespace, asking: "Asking", folder: Path, profile: Profile
) -> "tuple[Asking, Answering]":
    """Answers in this process."""
    from dataclasses import replace

    from redraft.frame.device import resolve
    from redraft.regenerate.local import answer_here
    from redraft.target.ends import target_hash
    from redraft.target.model import load_target

    dtype = resolve(arguments.precision)
    target = load_target(folder, dtype=dtype, trust_remote_code=profile.target.trust_remote_code)
    made = {
        "engine": "transformers",
        "release": version("transformers"),
        "dtype": dtype,
        "target": target_hash(folder),
    }
    options = {"batch": arguments.batch, "temperature": arguments.temperature, "seed": arguments.seed}
    return replace(asking, made={**made, **asking.made}), partial(answer_here, target, **options)


def _by_server(
    arguments: argparse.Namespace, asking: "Asking", folder: Path, profile: Profile
) -> "tuple[Asking, Answering]":
    """Answers by the server at `--url`, found out and tried."""
    from dataclasses import replace

    from redraft.corpus.rows import Refused
    from redraft.regenerate.answers import answer_by, conversations
    from redraft.regenerate.server import Sampling, Server

    server = Server(
        arguments.url,
        Sampling(arguments.temperature, arguments.seed),
        arguments.timeout,
        arguments.patience,
        os.environ.get(arguments.key_env),
        arguments.model,
    )
    first = next((each for _, each in conversations(arguments.prompts, asking) if not isinstance(each, Refused)), None)
    if first is not None:
        server.connect(first)
    print(f"{server.engine} {server.release or ''} at {arguments.url}, {server.model}: {server.form.told}")
    made = {"engine": server.engine, "release": server.release, "model": server.model, "form": server.form.told}
    context = min(asking.context, server.context or asking.context)
    return replace(asking, made={**made, **asking.made}, context=context), partial(
        answer_by, server, concurrency=arguments.concurrency
    )


def _tell(told: "Told", output: Path, asking: "Asking") -> None:
    limit = f"of {asking.limit} tokens" if asking.limit else f"of the context, {asking.context:,} tokens"
    print(
        f"{told.rows:,} chat{'s' * (told.rows != 1)} with {told.answers:,} answers ({told.tokens:,} tokens) in {output}"
    )
    if told.cut:
        print(f"{told.cut:,} of {told.answers:,} answers reached the limit {limit}: no end marker is trained on there")
    if told.without_ids:
        print(
            f"{told.without_ids:,} answers have no ids: the server gives text alone, which the corpus stage must prove"
        )
    for reason, count in told.ended.most_common():
        print(f"{count:,} chats end early: {ENDED.get(reason, reason)}")
    if told.refused:
        shown = some([f"{name} ({reason})" for name, reason in told.refused.items()], 3)
        print(f"{len(told.refused):,} chats are left out: {shown}")


ENDED = {
    "cut": "an answer was cut, and nobody goes on from half an answer",
    "tool": "the next message answers a tool call that was not made here",
    "markers": "an answer holds markers (a tool call, channels), which no later prompt can be made of",
    "context": "the next prompt is beyond the target's context",
    "template": "the template refuses the next prompt",
}
