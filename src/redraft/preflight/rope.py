"""Rotary positions as a release builds them from a `config.json`, and the positions that it derives from them.

Sources: `get_context_length` and `LlamaDecoderLayer` of SGLang; `standardize_rope_params` of transformers 5.
"""

from typing import Any

from redraft.drafter.config import part
from redraft.preflight.facts import Facts, Findings, error, note, positive
from redraft.preflight.releases import Release

_POSITIONS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
"""In SGLang's order."""
_ORIGINAL = ("llama3", "yarn", "longrope")
"""Kinds for which transformers 5 writes down the positions before scaling."""
DEFAULT_THETA = 10_000.0


def _kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def used(fields: dict[str, Any], release: Release) -> dict[str, Any]:
    """The table of scaling that a release reads: `rope_scaling`, else, on transformers 5, `rope_parameters`."""
    scaling, modern = part(fields, "rope_scaling"), part(fields, "rope_parameters")
    return scaling or (modern if release.rope_parameters else {})


def used_theta(fields: dict[str, Any], release: Release) -> float:
    """The base of the rotary positions that a release takes."""
    inner = positive(used(fields, release).get("rope_theta")) if release.rope_parameters else None
    return inner or positive(fields.get("rope_theta")) or DEFAULT_THETA


def served_positions(fields: dict[str, Any], release: Release) -> int | None:
    """Tokens that a release takes a model for; None if its configuration names none.

    A factor of scaling multiplies them, unless the positions before scaling are named as well.
    """
    rope = used(fields, release)
    named = "original_max_position_embeddings" in rope or _kind(rope) == "llama3"
    named = named or (release.rope_parameters and _kind(rope) in _ORIGINAL)
    factor = 1.0 if named else positive(rope.get("factor")) or 1.0
    values = [value for value in map(positive, map(fields.get, _POSITIONS)) if value]
    return int(factor * values[0]) if values else None


def rope(facts: Facts) -> Findings:
    """What is there, what wins, and forms that redraft does not train."""
    fields, modern, scaling = facts.fields, facts.part("rope_parameters"), facts.part("rope_scaling")
    outer = positive(fields.get("rope_theta"))
    inner = positive(modern.get("rope_theta")) or positive(scaling.get("rope_theta"))
    theta = used_theta(fields, facts.release)
    if inner is None and outer is None:
        yield error(
            "rope-theta",
            found="no number in rope_theta, nor in rope_parameters.rope_theta",
            effect="silent: 10000 is used; unless that is the drafter's, accept length falls with position",
            fix="write the rope_theta that it was trained with",
        )
    elif outer is None and not facts.release.rope_parameters and inner != theta:
        yield error(
            "rope-theta",
            found=f"rope_theta {inner} in rope_parameters alone",
            effect=f"silent: this release looks at the top level and takes {theta}",
            fix="write rope_theta at top level as well",
        )
    elif outer is None:
        yield note(
            "rope-theta",
            found=f"rope_theta {inner} in rope_parameters alone",
            effect="releases before 0.5.10 look at the top level and silently take 10000",
            fix="write rope_theta at top level as well",
        )
    elif len({outer, *(positive(each.get("rope_theta")) or outer for each in (modern, scaling))}) > 1:
        yield error(
            "rope-conflict",
            found=f"rope_theta {outer}, rope_parameters.rope_theta {inner}",
            effect=f"silent: this release takes {theta}; one of the two is not what it was trained with",
            fix="write the same twice",
        )
    yield from _form(facts)


def _form(facts: Facts) -> Findings:
    """Scaling, and which part of a head turns how."""
    modern, scaling = facts.part("rope_parameters"), facts.part("rope_scaling")
    kinds = [(_kind(each), each.get("factor")) for each in (modern, scaling) if each]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        yield error(
            "rope-conflict",
            found=f"rope_parameters {kinds[0][0]} {kinds[0][1] or ''}, rope_scaling {kinds[1][0]} {kinds[1][1] or ''}",
            effect="silent: rope_scaling wins; one of the two is not what it was trained with",
            fix="write the same twice, or one of them",
        )
    ignored = _kind(modern) != "default" and not scaling and not facts.release.rope_parameters
    rope = used(facts.fields, facts.release)
    form: dict[str, Any] = {"rope_type": _kind(modern if ignored else rope)}
    form |= {name: facts.fields.get(name, modern.get(name)) for name in ("partial_rotary_factor", "rope_is_neox_style")}
    usual = {"rope_type": ("default",), "partial_rotary_factor": (None, 1), "rope_is_neox_style": (None, True)}
    odd = ", ".join(f"{name} {value}" for name, value in form.items() if value not in usual[name])
    if odd:
        yield (error if facts.record or ignored else note)(
            "rope-scaled",
            found=odd,
            effect="silent: this release does not read rope_parameters, so positions are not scaled"
            if ignored
            else "the server turns positions like this; redraft trains plain, whole, NeoX-style ones",
            fix="leave it out for a drafter of redraft; for another compare with its training",
        )


RULES = (rope,)
