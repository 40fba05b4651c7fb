"""The sizes that a plan is made of: of the target and of the drafter, by whatever says them here."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redraft.drafter.names import flat_config
from redraft.frame.errors import RedraftError
from redraft.frame.files import read_object
from redraft.frame.params import Config
from redraft.frame.profile import PlanParams
from redraft.frame.section import validate
from redraft.plan.made import made_for
from redraft.target.checkout import expanded
from redraft.target.facts import SIZES, read_facts
from redraft.target.folder import TARGET_RECORD

AUX = 3
"""Aux layers of an EAGLE-3 drafter."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and its drafter."""

    hidden: int
    """H."""
    vocab: int
    """V."""
    depth: int
    """Decoder layers of the target."""
    slots: int
    """N."""
    intermediate: int
    """Width of the drafter's MLP."""
    heads: int
    """Query heads of the drafter."""
    kv_heads: int
    head_dim: int

    @property
    def parts(self) -> dict[str, int]:
        """Weights of the drafter by the parts that `train.loss.freeze` names, as `redraft.drafter.model` has them."""
        hidden, heads = self.hidden, self.heads * self.head_dim
        attention = 2 * hidden * (heads + 2 * self.kv_heads * self.head_dim) + heads * hidden
        return {
            "fc": AUX * hidden * hidden,
            "midlayer": attention + 3 * hidden * self.intermediate + 3 * hidden,
            "norm": hidden,
            "lm_head": self.slots * hidden,
        }

    @property
    def weights(self) -> int:
        """Of the drafter; the embedding is the target's and none of them."""
        return sum(self.parts.values())

    @property
    def matrices(self) -> int:
        """Weights that are multiplied in bf16: all but those of the four norms."""
        return self.weights - 4 * self.hidden

    @property
    def file_bytes(self) -> int:
        """Of a drafter on disk: bf16, with `d2t` int64 [N] and `t2d` bool [V]."""
        return 2 * self.weights + 8 * self.slots + self.vocab


def read_shape(config: Config, root: Path) -> tuple[Shape, str]:
    """The sizes, and what says them: the target's and the donor's config.json, else `plan` in the profile.

    Raises:
        RedraftError: nothing here says them, config.json says others than `plan`, or the donor is of another target.
    """
    told = config.profile.plan
    found: dict[str, Any] = {}
    places = []
    for part, (fields, place) in {"target": _target(config, root), "donor": _drafter(config, root)}.items():
        if not fields and told is None:
            raise RedraftError(
                f"The sizes of the {part} are not known here.",
                where=f"{part}.source in the profile: {getattr(config.profile, part).source}",
                expected=f"a config.json in artifacts/{part} or in a local folder, or a section `plan` in the profile",
                fix=f"dvc repro {part}, or write `plan:` with {', '.join(PlanParams.model_fields)}",
            )
        for name, value in fields.items():
            if name in found and found[name] != value:
                raise RedraftError(
                    "The donor was made for another target.",
                    where=f"{place}: {name}",
                    expected=found[name],
                    found=value,
                    fix="choose a donor of the target's family",
                )
            if told is not None and getattr(told, name) != value:
                raise RedraftError(
                    "The profile's `plan` says another size than the files.",
                    where=f"{place}: {name}",
                    expected=value,
                    found=f"plan.{name}: {getattr(told, name)}",
                    fix="correct `plan`, or take it out of the profile",
                )
        found |= fields
        places.append(place)
    values = {**(told.model_dump() if told else {}), **found}
    sizes = validate(PlanParams, values, Path(places[0]))
    shape = Shape(
        hidden=sizes.hidden_size,
        vocab=sizes.vocab_size,
        depth=sizes.num_hidden_layers,
        slots=config.profile.vocab.slots,
        intermediate=sizes.intermediate_size,
        heads=sizes.num_attention_heads,
        kv_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
    )
    if shape.slots > shape.vocab:
        raise RedraftError(
            "The draft vocabulary is larger than the target's.",
            where="vocab.slots in the profile",
            expected=f"at most {shape.vocab}",
            found=shape.slots,
        )
    return shape, ", ".join(dict.fromkeys(places))


def _folder(source: str, stage: str, config: Config, root: Path) -> Path | None:
    """The folder whose config.json speaks for `source`: itself, or the artefact of a stage that ran for the profile."""
    own, artefact = root / expanded(source), root / "artifacts" / stage
    if (own / "config.json").is_file():
        return own
    if not (artefact / "config.json").is_file() or not made_for(stage, config, root):
        return None
    record = artefact / TARGET_RECORD
    meant = not record.is_file() or read_object(record).get("source") == source
    return artefact if meant else None


def _target(config: Config, root: Path) -> tuple[dict[str, int], str]:
    folder = _folder(config.profile.target.source, "target", config, root)
    if folder is None:
        return {}, "plan in the profile"
    fields = read_facts(folder).fields
    return {name: fields[name] for name in SIZES}, str(folder / "config.json")


def _drafter(config: Config, root: Path) -> tuple[dict[str, Any], str]:
    names = PlanParams.model_fields.keys() - set(SIZES)
    shape = config.profile.donor.shape
    if config.profile.donor.source == "train" and shape is not None:
        return {name: getattr(shape, name) for name in names}, "donor.shape in the profile"
    folder = _folder(config.profile.donor.source, "donor", config, root)
    if folder is None:
        return {}, "plan in the profile"
    path = folder / "config.json"
    fields = flat_config(read_object(path))
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = heads
    if fields.get("head_dim") is None and type(hidden) is int and type(heads) is int and heads > 0:
        fields["head_dim"] = hidden // heads
    wanted = names | {"hidden_size", "vocab_size"}
    return {name: fields[name] for name in wanted if fields.get(name) is not None}, str(path)


def as_dict(shape: Shape) -> dict[str, int]:
    """For JSON."""
    return {**asdict(shape), "drafter_weights": shape.weights}
