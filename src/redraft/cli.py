"""The `redraft` command."""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft import atomic
from redraft.errors import RedraftError

if TYPE_CHECKING:
    from redraft.vocab.mapping import Mapping


def _regenerate(arguments: argparse.Namespace) -> None:
    from redraft.params import load_profile
    from redraft.target.chat import load_tokenizer, read_chats, stop_ids
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
    print(f"{len(lines)} chats in {arguments.output}")


def _audit(arguments: argparse.Namespace) -> None:
    from redraft.vocab.audit import audit, drift_curve
    from redraft.vocab.describe import describe, describe_one
    from redraft.vocab.read import read_mapping

    one = read_mapping(arguments.a)
    two = read_mapping(arguments.b) if arguments.b else one
    if arguments.target and not arguments.target.is_dir():
        raise RedraftError("The target is no folder.", where="--target", found=arguments.target)
    special: dict[int, str] = {}
    single_bytes: set[int] = set()
    counts = None
    foreign = _foreign(arguments)
    if arguments.target and any(arguments.target.glob("tokenizer*")):
        from redraft.target.chat import byte_ids, load_tokenizer, special_tokens

        tokenizer = load_tokenizer(arguments.target, arguments.trust_remote_code)
        special, single_bytes = special_tokens(tokenizer), byte_ids(tokenizer)
    if arguments.corpus:
        from redraft.hidden.corpus import read_corpus
        from redraft.vocab.build import count_tokens

        corpus = read_corpus(arguments.corpus)
        ids, mask = corpus.input_ids.numpy(), corpus.loss_mask.numpy()
        counts = {arguments.corpus.stem: count_tokens(ids, mask, two.vocab_size)}
    found = audit(one, two, counts=counts, special=special, single_bytes=single_bytes, foreign=foreign)
    heads = _heads(arguments, one, two) if arguments.heads else {}
    if arguments.plot:
        from redraft.report.plots import drift, save_svg

        save_svg(arguments.plot, drift(drift_curve(one, two)))
    if arguments.json:
        print(json.dumps({"a": arguments.a, "b": arguments.b, **found.metrics(), "heads": heads}, indent=2))
        return
    print(describe(found, arguments.a, arguments.b) if arguments.b else describe_one(one, found, arguments.a))
    if heads:
        print(
            "\nA's head rows are {norm_ratio:.3f} times as long as the target's, mean cosine {cosine:.3f}".format(
                **heads
            )
        )


def _foreign(arguments: argparse.Namespace) -> dict[int, tuple[str | None, str | None]]:
    """Ids that mean another token to the donor, if both tokenizers are given."""
    if not arguments.donor_tokenizer:
        return {}
    if not arguments.target:
        raise RedraftError("Two tokenizers are compared.", where="--donor-tokenizer", fix="give --target as well")
    from redraft.target.chat import differing_ids, load_tokenizer

    trust = arguments.trust_remote_code
    return differing_ids(load_tokenizer(arguments.donor_tokenizer, trust), load_tokenizer(arguments.target, trust))


def _heads(arguments: argparse.Namespace, donor: "Mapping", new: "Mapping") -> dict[str, float]:
    """The donor's head rows against the target's, for the ids in both vocabularies."""
    from redraft.drafter.dialect import read_tensors
    from redraft.drafter.heads import compare_heads
    from redraft.target.model import read_ends
    from redraft.target.sources import DRAFTER_FILES, checkout

    if not arguments.target:
        raise RedraftError("A comparison of heads needs the target.", where="--heads", fix="give --target as well")
    tensors = read_tensors(checkout(arguments.a, None, DRAFTER_FILES))
    if "lm_head.weight" not in tensors:
        raise RedraftError("A has no head to compare.", where=arguments.a, expected="lm_head.weight")
    shared = donor.ids[new.slots[donor.ids] >= 0]
    return compare_heads(tensors["lm_head.weight"][donor.slots[shared]], read_ends(arguments.target).head, shared)


def _remap(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch in huge pages: half the time of a head of 459 MB
    from redraft.drafter.remap import remap_folder
    from redraft.target.sources import DRAFTER_FILES, checkout
    from redraft.vocab.read import read_mapping

    _require_new(arguments.output)
    if arguments.fill == "auto":
        raise RedraftError(
            "`auto` compares first-step losses, which need hidden states.",
            where="--fill",
            found="auto",
            fix="choose a fill, or let the pipeline's remap stage choose (fill: auto in params.yaml)",
        )
    donor, new = checkout(arguments.donor, None, DRAFTER_FILES), read_mapping(arguments.vocab)
    rows = remap_folder(donor, new, arguments.fill, arguments.target, arguments.output, _foreign(arguments))
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{len(new):,} head rows in {arguments.output}:")
    print("\n".join(f"  {number:>9,}  {name}" for name, number in rows.items() if number))


def _require_new(output: Path) -> None:
    if output.exists():
        raise RedraftError("The output is there already.", where=output, fix="remove it, or give another --output")


def _export(arguments: argparse.Namespace) -> None:
    from redraft.drafter.card import export_sglang, require_layers

    _require_new(arguments.output)
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
        from redraft.drafter.lint import describe

        print(f"{describe(notes)}\n{arguments.output}: for SGLang {version}, with its model card in README.md")
        return
    if arguments.engine != "speculators":
        raise RedraftError(
            "A drafter is written for one engine.",
            where="--for",
            expected="speculators, or sglang==VERSION",
            found=arguments.engine,
        )
    from redraft.drafter.checkpoint import export_speculators, read_checkpoint

    checkpoint = read_checkpoint(arguments.checkpoint)
    layers = require_layers(checkpoint.record, arguments.aux_layers, arguments.checkpoint)
    export_speculators(arguments.output, checkpoint, layers, arguments.target)
    print(f"{arguments.output}: aux layers {list(layers)} as inputs of layers, every norm flag false")


def _lint(arguments: argparse.Namespace) -> None:
    from redraft.drafter.lint import describe, lint

    found = lint(
        arguments.checkpoint,
        arguments.target,
        arguments.version,
        context=arguments.context_length,
        algorithm=arguments.algorithm,
        trained=arguments.aux_layers,
    )
    print(json.dumps([asdict(each) for each in found], indent=2) if arguments.json else describe(found))
    if any(each.level == "error" for each in found):
        sys.exit(1)


def _compare(arguments: argparse.Namespace) -> None:
    from redraft.report.bench import name
    from redraft.report.tables import markdown
    from redraft.serve.machine import require_same

    one, two = (read_bench(path) for path in (arguments.a, arguments.b))
    require_same(one, two, f"{arguments.a}, {arguments.b}")
    rows = []
    for level in sorted(one["levels"].keys() & two["levels"].keys(), key=int):
        first, second = (each["levels"][level] for each in (one, two))
        if "invalid" in (first["word"], second["word"]):
            rows.append((level, "invalid", "", "", ""))
            continue
        for arm in [arm for arm in first["rows"] if arm in second["rows"]]:
            speeds = [each["rows"][arm]["tokens_per_second"] for each in (first, second)]
            rows.append((level, name(arm), *(f"{speed:.1f}" for speed in speeds), f"{speeds[1] / speeds[0]:.2f}"))
    print(markdown(("clients", "arm", "A, tokens/s", "B, tokens/s", "B / A"), rows))


def read_bench(path: Path) -> dict[str, Any]:
    """The metrics of a bench.

    Raises:
        RedraftError: no such file, or not of this form.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RedraftError("The bench cannot be read.", where=path, found=error) from error
    if not isinstance(found, dict) or not {"levels", "machine", "engine"} <= found.keys():
        raise RedraftError("This is no bench.", where=path, expected="metrics/bench.json with levels, machine, engine")
    return found


def _publish(arguments: argparse.Namespace) -> None:
    from redraft.journal import journals, read
    from redraft.track import send, tracking_uri

    sent, failed = [], {}
    for path in journals():
        try:
            sent += [send(path)] if read(path) else []
        except Exception as error:  # whatever the tracking server says: the next journal may be taken
            failed[path.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"{len(sent)} journals, {sum(sent)} lines that {tracking_uri()} did not have")
    if failed:
        name, reason = next(iter(failed.items()))
        raise RedraftError(
            f"The tracking server did not take {len(failed)} journals.",
            where=tracking_uri(),
            found=f"{name}: {reason}",
            fix="start it, or set MLFLOW_TRACKING_URI; what was sent already is not sent again",
        )


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--donor-tokenizer", type=Path, help="the donor's own target: ids with other tokens are not shared"
    )
    command.add_argument("--trust-remote-code", action="store_true", help="let a tokenizer's own code run")
    command.add_argument("--json", action="store_true", help="print JSON")


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
    check = commands.add_parser("audit", help="compare two draft vocabularies: do they agree, and what follows?")
    place = "a checkpoint folder, a safetensors file, ORG/NAME@COMMIT, or artifacts/vocab"
    check.add_argument("a", metavar="A", help=f"the donor: {place}")
    check.add_argument("b", metavar="B", nargs="?", help="the new vocabulary: likewise")
    check.add_argument("--target", type=Path, help="the target's folder: names its special tokens")
    check.add_argument(
        "--heads", action="store_true", help="compare A's head rows with the target's (reads both heads)"
    )
    check.add_argument("--corpus", type=Path, help="a tokenised corpus (artifacts/corpus/train.safetensors): coverage")
    _add_common(check)
    check.add_argument("--plot", type=Path, help="draw the drift of shared ids to this SVG")
    check.set_defaults(run=_audit)
    carry = commands.add_parser("remap", help="carry a drafter's head to another draft vocabulary")
    carry.add_argument("donor", metavar="DONOR", help="a checkpoint folder or ORG/NAME@COMMIT")
    carry.add_argument("--vocab", required=True, help=f"the new vocabulary: {place}")
    fills = ("zero", "mean", "target", "scaled", "fitted", "auto")
    carry.add_argument("--fill", default="zero", choices=fills, help="rows that the donor lacks (default %(default)s)")
    carry.add_argument("--target", type=Path, help="the target's folder; every fill but zero and mean reads its head")
    carry.add_argument("--output", type=Path, required=True, help="folder to write")
    _add_common(carry)
    carry.set_defaults(run=_remap)
    look = commands.add_parser("lint", help="what would SGLang make of a drafter's files? Starts no server")
    look.add_argument("checkpoint", help="a drafter's folder, for example artifacts/drafter")
    look.add_argument("--target", type=Path, required=True, help="the target's folder")
    look.add_argument("--engine", choices=["sglang"], default="sglang", help="the server (default %(default)s)")
    look.add_argument("--version", required=True, help="of the server, for example 0.5.23")
    look.add_argument("--algorithm", default="EAGLE3", help="--speculative-algorithm (default %(default)s)")
    look.add_argument("--json", action="store_true", help="print JSON")
    look.set_defaults(run=_lint)
    export = commands.add_parser("export", help="write a drafter for SGLang, or in the form of speculators and vLLM")
    export.add_argument("checkpoint", type=Path, help="a drafter's folder, for example artifacts/drafter")
    export.add_argument(
        "--target", required=True, help="speculators: name or path, written into config.json; sglang: its folder"
    )
    export.add_argument(
        "--for", dest="engine", default="speculators", help="speculators, or sglang==0.5.23 (default %(default)s)"
    )
    export.add_argument("--output", type=Path, required=True, help="folder to write")
    export.add_argument(
        "--metrics", type=Path, default=Path("metrics"), help="for the model card (default %(default)s)"
    )
    for command in (look, export):
        command.add_argument(
            "--aux-layers",
            type=int,
            nargs="+",
            help="inputs of layers, if redraft.json does not say",
        )
        command.add_argument(
            "--context-length", type=int, help="tokens that the server is started for (default: the target's)"
        )
    export.set_defaults(run=_export)
    speeds = commands.add_parser("compare", help="compare the speeds of two benches of one machine and engine")
    speeds.add_argument("a", metavar="A", type=Path, help="metrics/bench.json of one run")
    speeds.add_argument("b", metavar="B", type=Path, help="and of another")
    speeds.set_defaults(run=_compare)
    publish = commands.add_parser("publish", help="send to MLflow what a missing tracking server did not take")
    publish.set_defaults(run=_publish)
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
