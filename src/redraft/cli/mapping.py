"""`redraft audit` and `redraft remap`: two mappings side by side, and a head carried from one to the other."""

import argparse
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from redraft.cli.arguments import PLACE, Commands, command, require_new
from redraft.frame.errors import RedraftError

if TYPE_CHECKING:
    from redraft.vocab.mapping import Mapping

WIDTH = 100
"""Columns of a note."""
FILLS = ("zero", "mean", "target", "scaled", "fitted", "auto")


def add_to(commands: Commands) -> None:
    """Add the commands of this module."""
    check = command(
        commands,
        "audit",
        "compare two draft vocabularies: do they agree, and what follows?",
        "redraft audit DONOR artifacts/vocab --target artifacts/target",
    )
    check.add_argument("a", metavar="A", help=f"the donor: {PLACE}")
    check.add_argument("b", metavar="B", nargs="?", help="the new vocabulary: likewise")
    check.add_argument("--target", type=Path, help="the target's folder: names its special tokens")
    check.add_argument(
        "--heads", action="store_true", help="compare A's head rows with the target's (reads both heads)"
    )
    check.add_argument("--corpus", type=Path, help="a tokenised corpus (artifacts/corpus/train.safetensors): coverage")
    _add_common(check)
    check.add_argument("--plot", type=Path, help="draw the drift of shared ids to this SVG")
    check.set_defaults(run=_audit)
    carry = command(
        commands,
        "remap",
        "carry a drafter's head to another draft vocabulary",
        "redraft remap DONOR --vocab artifacts/vocab --fill fitted --target artifacts/target --output out",
    )
    carry.add_argument("donor", metavar="DONOR", help="a checkpoint folder or ORG/NAME@COMMIT")
    carry.add_argument("--vocab", required=True, help=f"the new vocabulary: {PLACE}")
    carry.add_argument(
        "--fill",
        default="zero",
        choices=FILLS,
        help="rows that the donor lacks (default %(default)s; the pipeline's remap stage tries all and takes the best)",
    )
    carry.add_argument(
        "--target",
        type=Path,
        help="the target's folder: its head (for every fill but zero and mean), family and embedding",
    )
    carry.add_argument("--aux-layers", type=int, nargs="+", help="inputs of layers, if the donor does not name them")
    carry.add_argument("--output", type=Path, required=True, help="folder to write")
    _add_common(carry)
    carry.set_defaults(run=_remap)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--donor-tokenizer", type=Path, help="the donor's own target: ids with other tokens are not shared"
    )
    parser.add_argument(
        "--prefix-vocabulary",
        action="store_true",
        help="a d2t of zeros is meant so: slot i is id i; refused otherwise, since an empty table looks like this",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let a tokenizer's own code run")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _audit(arguments: argparse.Namespace) -> None:
    from redraft.cli.describe import describe, describe_one
    from redraft.drafter.mapping_of import read_mapping
    from redraft.vocab.audit import audit, drift_curve

    one = read_mapping(arguments.a, prefix=arguments.prefix_vocabulary)
    two = read_mapping(arguments.b, prefix=arguments.prefix_vocabulary) if arguments.b else one
    if arguments.target and not arguments.target.is_dir():
        raise RedraftError("The target is no folder.", where="--target", found=arguments.target)
    special: dict[int, str] = {}
    single_bytes: set[int] = set()
    counts = None
    foreign = _foreign(arguments)
    if arguments.target and any(arguments.target.glob("tokenizer*")):
        from redraft.corpus.tokenizer import byte_ids, load_tokenizer, special_tokens

        tokenizer = load_tokenizer(arguments.target, arguments.trust_remote_code)
        special, single_bytes = special_tokens(tokenizer), byte_ids(tokenizer)
    if arguments.corpus:
        from redraft.corpus.corpus import read_corpus
        from redraft.vocab.build import count_tokens

        corpus = read_corpus(arguments.corpus)
        ids, mask = corpus.input_ids.numpy(), corpus.loss_mask.numpy()
        counts = {arguments.corpus.stem: count_tokens(ids, mask, two.vocab_size)}
    found = audit(one, two, counts=counts, special=special, single_bytes=single_bytes, foreign=foreign)
    heads = _heads(arguments, one, two) if arguments.heads else {}
    if arguments.plot:
        from redraft.report.plots import drift, save_svg

        save_svg(arguments.plot, drift(drift_curve(one, two)))
    notes = [_odd_kind(name, source, mapping) for name, source, mapping in _sides(arguments, one, two)]
    notes.append(_uncompared(arguments))
    told = [note for note in notes if note]
    if arguments.json:
        compared = {"foreign_ids": len(foreign) if arguments.donor_tokenizer else None}
        both = {"a": arguments.a, "b": arguments.b, **found.metrics(), **compared, "heads": heads, "notes": told}
        print(json.dumps(both, indent=2))
        return
    print(describe(found, arguments.a, arguments.b) if arguments.b else describe_one(one, found, arguments.a))
    if heads:
        print(
            "\nA's head rows are {norm_ratio:.3f} times as long as the target's, mean cosine {cosine:.3f}".format(
                **heads
            )
        )
    print("".join("\n" + textwrap.fill(f"note: {note}", WIDTH) for note in told), end="\n" * bool(told))


def _sides(arguments: argparse.Namespace, one: "Mapping", two: "Mapping") -> list[tuple[str, str, "Mapping"]]:
    return [("A", arguments.a, one), *([("B", arguments.b, two)] if arguments.b else [])]


def _odd_kind(name: str, source: str, mapping: "Mapping") -> str | None:
    """A sentence on a vocabulary that is not a selection of ids: often not what was meant."""
    from redraft.drafter.mapping_of import whole_model

    if model := whole_model(source):
        return f"{name} is a whole model ({model}), no drafter: all of its {len(mapping):,} ids count as slots"
    if mapping.prefix:
        return f"{name} is a prefix vocabulary: slot i is id i, for the first {len(mapping):,} ids"
    return f"{name} is a full vocabulary: all {len(mapping):,} ids have a slot" if mapping.kind[0] == "f" else None


def _uncompared(arguments: argparse.Namespace) -> str | None:
    """A sentence on tokenizers that nobody compared, unless the donor was made for this target."""
    from redraft.drafter.files import VOCAB_RECORD, read_record
    from redraft.drafter.mapping_of import whole_model

    place = Path(arguments.a)
    folder = place if place.is_dir() else place.parent
    record = read_record(folder)
    known = record.get("source") == "train" or "foreign" in record or (folder / VOCAB_RECORD).is_file()
    if not arguments.b or arguments.donor_tokenizer or known or whole_model(arguments.a):
        return None
    return (
        "the donor's tokenizer was not compared with the target's, so ids in both count as the same token: "
        "--donor-tokenizer (donor.tokenizer in a profile)"
    )


def _foreign(arguments: argparse.Namespace) -> dict[int, tuple[str | None, str | None]]:
    """Ids that mean another token to the donor, if both tokenizers are given."""
    if not arguments.donor_tokenizer:
        return {}
    if not arguments.target:
        raise RedraftError("Two tokenizers are compared.", where="--donor-tokenizer", fix="give --target as well")
    from redraft.corpus.tokenizer import differing_ids, load_tokenizer

    trust = arguments.trust_remote_code
    return differing_ids(load_tokenizer(arguments.donor_tokenizer, trust), load_tokenizer(arguments.target, trust))


def _heads(arguments: argparse.Namespace, donor: "Mapping", new: "Mapping") -> dict[str, float]:
    """The donor's head rows against the target's, for the ids in both vocabularies."""
    from redraft.drafter.dialect import read_tensors
    from redraft.remap.heads import compare_heads
    from redraft.target.checkout import DRAFTER_FILES, checkout
    from redraft.target.ends import read_ends

    if not arguments.target:
        raise RedraftError("A comparison of heads needs the target.", where="--heads", fix="give --target as well")
    tensors = read_tensors(checkout(arguments.a, None, DRAFTER_FILES))
    if "lm_head.weight" not in tensors:
        raise RedraftError("A has no head to compare.", where=arguments.a, expected="lm_head.weight")
    shared = donor.ids[new.slots[donor.ids] >= 0]
    return compare_heads(tensors["lm_head.weight"][donor.slots[shared]], read_ends(arguments.target).head, shared)


def _remap(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch in huge pages: half the time of a head of 459 MB
    from redraft.drafter.mapping_of import read_mapping
    from redraft.remap.remap import remap_folder
    from redraft.target.checkout import DRAFTER_FILES, checkout

    require_new(arguments.output)
    if arguments.fill == "auto":
        raise RedraftError(
            "`auto` compares first-step losses, which need hidden states.",
            where="--fill",
            found="auto",
            fix="choose a fill, or let the pipeline's remap stage choose (fill: auto in params.yaml)",
        )
    donor = checkout(arguments.donor, None, DRAFTER_FILES)
    new = read_mapping(arguments.vocab, prefix=arguments.prefix_vocabulary)
    notes: list[str] = []
    rows = remap_folder(
        donor,
        new,
        arguments.fill,
        arguments.target,
        arguments.output,
        _foreign(arguments),
        aux_layers=arguments.aux_layers,
        prefix=arguments.prefix_vocabulary,
        tell=notes.append,
    )
    if odd := _odd_kind("the new vocabulary", arguments.vocab, new):
        notes.append(f"note: {odd}")
    if rows["zero"]:
        notes.append(
            f"note: {rows['zero']:,} rows that the donor lacks are zeros; the pipeline's remap stage takes the fill "
            "with the lowest first-step loss (fill: auto), usually --fill fitted --target TARGET"
        )
    if arguments.json:
        print("\n".join(notes), file=sys.stderr)
        print(json.dumps(rows, indent=2))
        return
    print(f"{len(new):,} head rows in {arguments.output}:")
    print("\n".join(f"  {number:>9,}  {name}" for name, number in rows.items() if number))
    print("".join(f"\n{textwrap.fill(note, WIDTH)}" for note in notes), end="\n" * bool(notes))
