"""Rules of the preflight on release, server and target. docs/preflight.md has the table."""

from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError
from redraft.preflight.facts import Facts, Findings, error, note
from redraft.preflight.releases import HOOKS
from redraft.preflight.rope import served_positions
from redraft.preflight.weights import reason
from redraft.target.ends import target_hash

ABSENT = 2048
"""Positions of a configuration that names none."""


def server(facts: Facts) -> Findings:
    """Release, algorithm and target."""
    release, target = facts.release, facts.target
    if facts.algorithm.upper() != "EAGLE3":
        yield error(
            "algorithm",
            found=f"--speculative-algorithm {facts.algorithm}",
            effect="no aux layer is captured, fc is skipped and the target's head is used: garbage drafts, no message",
            fix="--speculative-algorithm EAGLE3",
        )
    if release.note:
        yield note(
            "release-unread", found=f"SGLang {release}", effect=release.note, fix="compare accept length with 1.00"
        )
    least = HOOKS.get(target.architecture)
    if least is not None and release < least:
        yield error(
            "target-hooks",
            found=f"{target.architecture} with SGLang {release}",
            effect="refuses to start: the target does not implement set_eagle3_layers_to_capture (AttributeError), "
            "or is not known at all",
            fix=f"serve with {least} or later",
        )
    if least is None:
        yield note(
            "target-unread",
            found=f"target {target.architecture or 'without a name'}",
            effect="whether it captures aux layers, and how it reads ids, is not known; it is taken for a Llama",
            fix="look for set_eagle3_layers_to_capture in its model file",
        )
    if target.quantised:
        yield note(
            "target-quantised",
            found="the target has a quantization_config",
            effect="with --quantization given, the drafter inherits it",
            fix="--speculative-draft-model-quantization unquant",
        )
    if release.partial_sums and facts.tp != 1:
        fix = "--enforce-disable-flashinfer-allreduce-fusion (0.5.10.post1 and later), or 0.5.14 and later"
        effect = "with --tp-size above 1 and a fused all-reduce the captured states are partial sums: silent"
        yield note("tp-capture", found=f"SGLang {release}", effect=effect, fix=fix)


def positions(facts: Facts) -> Findings:
    """Positions against the served context, and what training saw."""
    context = facts.context or served_positions(facts.target.fields, facts.release)
    own = served_positions(facts.fields, facts.release)
    if context is not None and (own or ABSENT) < context:
        own_text = f"max_position_embeddings {own}" if own else f"no max_position_embeddings, which means {ABSENT}"
        own = own or ABSENT
        yield error(
            "positions",
            found=f"{own_text}, served context {context}"
            + ("" if facts.context else " (the target's positions, times the factor of its rotary ones if it has one)"),
            effect=f"refuses to start: ValueError, Target model's context_length ({context}) is greater than the "
            f"derived context_length ({own})",
            fix=f"start with --context-length {own}, or redraft export --for sglang=={facts.release} "
            f"--context-length {context}",
        )
    training = facts.remembered("training")
    longest = training.get("max_length") or training.get("row_tokens")
    if context is not None and type(longest) is int and longest < context:
        yield note(
            "trained-length",
            found=f"trained on documents of at most {longest} tokens, served context {context}",
            effect="accept length past that is not known, and was seen to fall (SGLang issue 6783)",
            fix="probe with prompts as long as those of service",
        )


def tensor_parallel(facts: Facts) -> Findings:
    """What tensor parallelism has to divide."""
    tp, heads, inner = facts.tp, facts.number("num_attention_heads"), facts.number("intermediate_size")
    if tp is None or heads is None:
        return
    shared = facts.number("num_key_value_heads") or heads
    odd = [f"{heads} heads"] if heads % tp else []
    odd += [f"{shared} key and value heads"] if (shared % tp if shared >= tp else tp % shared) else []
    odd += [f"intermediate_size {inner}"] if inner and inner % tp else []
    if odd:
        yield error(
            "tp-heads",
            found=f"{', '.join(odd)} over {tp} GPUs",
            effect="refuses to start: AssertionError in the drafter's attention or MLP, after the target was loaded",
            fix="another --tp-size, or a drafter whose heads it divides",
        )


def target_of_training(record: dict[str, Any], target: Path) -> bool | str:
    """Whether `target` is the one that `redraft.json` names, or why that cannot be told; True if it names none."""
    trained = record.get("target")
    if not isinstance(trained, str):
        return True
    try:
        return trained == target_hash(target)
    except (RedraftError, OSError, ValueError, KeyError, TypeError) as fault:
        return reason(fault)


def other_target(facts: Facts) -> Findings:
    """The target of training against the one that is served."""
    same = target_of_training(facts.record, facts.target.folder)
    if isinstance(same, str):
        yield note(
            "target-untold",
            found=f"whether this is the target of training was not compared: {same}",
            effect="none if it is; else states and embedding are another model's",
            fix="give the folder with the weights that are served",
        )
    elif not same:
        yield error(
            "other-target",
            found="redraft.json names another target than this folder",
            effect="silent: states and embedding are another model's, accept length falls",
            fix="serve the target that it was trained for, or train it for this one",
        )


RULES = (server, positions, tensor_parallel, other_target)
