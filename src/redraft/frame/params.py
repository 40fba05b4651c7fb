"""Typed parameters: `params.yaml` (the knobs people turn) and `profiles/<name>.yaml` (what describes a target).

The only reader of both files. DVC rewrites `lr: 5.0e-5` as `lr: 5e-05`, which a YAML 1.1 reader takes for text, so the
loader follows the YAML 1.2 core schema; pydantic then refuses unknown keys and wrong types.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from redraft.frame.errors import RedraftError

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Precision = Literal["auto", "bf16", "fp32"]


class _Yaml12(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2: `5e-05` is a number; `on` and `2026-01-01` are text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Yaml12.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Yaml12.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})$"), _first)


def _construct_int(loader: _Yaml12, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 0) if text.lstrip("+-").startswith(("0x", "0o")) else int(text, 10)


_Yaml12.add_constructor("tag:yaml.org,2002:int", _construct_int)


def load_yaml(text: str) -> Any:
    """Parse `text` by the YAML 1.2 core schema; a key that stands twice is an error."""
    return yaml.load(text, Loader=_Yaml12)


class _Section(BaseModel):
    """A part of a file. What decides a result has no default here: a change of it must show in a diff and to DVC."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class TargetParams(_Section):
    """The model that is served."""

    source: str
    """`wheel:NAME==VERSION` (holds a GGUF file), `fit:tiny` (fitted here), a folder, or a hub id `ORG/NAME`."""
    sha256: str | None = None
    """Of the wheel; required for `wheel:`."""
    revision: str | None = None
    """Commit of a hub id; required for a hub id."""
    trust_remote_code: bool = False
    """Let the hub repository's own Python code run."""
    aux_layers: tuple[int, int, int] | None = None
    """Aux layers, as inputs of 0-based decoder layers; default (2, L//2, L-3)."""


class CorpusParams(_Section):
    """Tokenisation of `data/<profile>/{donor,train,heldout}.jsonl`."""

    max_length: Positive
    """Tokens; a longer sample is cut."""
    max_dropped: Fraction
    """Largest share of samples without a supervised token before the stage fails."""
    max_samples: Positive | None = None
    """Of each file, evenly spread over it; all of them without this."""


class VocabParams(_Section):
    """The draft vocabulary."""

    slots: Positive
    """N; not `size`, since the run cache of DVC does not look at a key of that name."""
    force_special: bool
    """Special and added tokens are always in."""
    force_bytes: bool
    """Single-byte tokens are always in."""


class ExtractParams(_Section):
    """Hidden states of the target."""

    batch_tokens: Positive
    """Padded tokens in one forward."""
    shard_mib: Positive
    """Largest size of one shard, MiB."""
    recheck: Annotated[int, Field(ge=0)]
    """Samples extracted again alone, to catch states of another sample (C15)."""
    tolerance: float
    """Largest relative difference (norm of the difference over norm) of a rechecked sample."""
    diagnostic_positions: Positive
    """Held-out positions of the diagnostic shard, at least."""


class DrafterShape(_Section):
    """Shape of a drafter that is made from nothing; hidden size and vocabulary come from the target."""

    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    rope_theta: float
    max_position_embeddings: Positive
    """Tokens; at least the served context."""


def _require_rows(params: "FitParams | TrainParams") -> None:
    for name in ("batch_tokens", "micro_tokens"):
        if getattr(params, name) % params.row_tokens:
            raise ValueError(f"{name} {getattr(params, name)} must be a multiple of row_tokens {params.row_tokens}")


class LossParams(_Section):
    """What is trained; see docs/training.md for when to change these."""

    mask: Literal["served", "input"]
    """Positions that count: `served` is what serving drafts, `input` is SpecForge's `loss_mask[t+k]`."""
    oov: Literal["drop", "train"]
    """Positions whose target argmax has no slot: left out of the loss, or trained towards the rest of the law."""
    denominator: Literal["trained", "tokens"]
    """Sums are divided by the positions that contribute, or by all tokens of the batch (SpecForge, DeepSpec)."""
    l2: Annotated[float, Field(ge=0)]
    """Strength of the pull to the initial weights: l2 / 2 * |w - w0|**2 is added to the loss."""
    freeze: tuple[Literal["fc", "midlayer", "norm", "lm_head"], ...]
    """Parts that are not trained."""


class FitParams(_Section):
    """One training of a drafter."""

    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate of AdamW."""
    epochs: Annotated[float, Field(gt=0)]
    """Passes over the corpus; a fraction stops within a pass."""
    seed: int
    """Of the order of batches and of fresh weights."""
    ttt_steps: Positive
    """Unrolled draft steps K."""
    step_weight: Annotated[float, Field(gt=0)]
    """Weight of step k is step_weight**k."""
    batch_tokens: Positive
    """Tokens per optimizer step over all processes, padding included."""
    micro_tokens: Positive
    """Tokens of one forward on one process: what memory allows; the rest of a step is accumulated."""
    row_tokens: Positive
    """Tokens of one packed row; a document is never split, so at least `corpus.max_length`."""
    warmup: Fraction
    """Share of the optimizer steps with a rising learning rate."""
    clip: Annotated[float, Field(gt=0)]
    """Largest gradient norm."""
    precision: Precision
    """bf16: autocast over fp32 weights; `auto` is the faster one of the machine."""
    loss: LossParams
    """What is trained, and towards what."""
    evals: Positive
    """Times that held-out documents are measured, evenly over the training; the best one's weights are kept."""
    patience: Positive
    """Measurements without a better joint acceptance after which training stops."""
    save_steps: Positive
    """Optimizer steps between saved states."""

    @model_validator(mode="after")
    def _rows_fit(self) -> "FitParams":
        _require_rows(self)
        return self


class DonorParams(_Section):
    """The drafter we start from."""

    source: str
    """`train` (fitted here on the donor corpus), a checkpoint folder, or a hub id."""
    revision: str | None = None
    """Commit of a hub id."""
    head: Literal["own", "target"] = "own"
    """`target`: a donor without a head of its own borrows the target's rows; without this it is refused."""
    train: FitParams | None = None
    """Required by `source: train`."""
    shape: DrafterShape | None = None
    """Required by `source: train`."""
    slots: Positive | None = None
    """Slots of the donor's own mapping, with `source: train`."""
    tokenizer: str | None = None
    """The donor's own target (a folder or ORG/NAME@COMMIT), if its ids may mean other tokens than the target's."""

    @model_validator(mode="after")
    def _complete(self) -> "DonorParams":
        missing = [name for name in ("train", "shape", "slots") if getattr(self, name) is None]
        if self.source == "train" and missing:
            raise ValueError(f"source: train needs {', '.join(missing)}")
        return self


class TrainParams(_Section):
    """What the target's size decides about training; the knobs are in params.yaml."""

    batch_tokens: Positive
    """Tokens per optimizer step over all processes."""
    micro_tokens: Positive
    """Tokens of one forward on one process."""
    row_tokens: Positive
    """Tokens of one packed row."""
    precision: Precision
    """bf16: autocast over fp32 weights; `auto` is the faster one of the machine."""
    save_steps: Positive
    """Optimizer steps between saved states."""
    processes: Positive
    """World size that the run must have."""
    launcher: str
    """What starts more than one process on this machine: `torchrun`, or an Accelerate configuration file."""

    @model_validator(mode="after")
    def _rows_fit(self) -> "TrainParams":
        _require_rows(self)
        return self


class ProbeParams(_Section):
    """The probe: is the drafter served as it was trained?"""

    prompts: Positive
    """Held-out prompts."""
    max_new_tokens: Positive
    """Tokens of each answer."""
    bf16_prompts: Annotated[int, Field(ge=0)]
    """Of these prompts, how many are compared in bf16 as well."""
    min_accept_length: float
    """Below this the drafter accepts nothing and the probe fails."""
    parity: Literal["torch", "walk"]
    """What served acceptance is held against: `torch`, the same prompts in this process, with the cause of a gap;
    `walk`, only what training predicted, for a target that this process cannot hold."""


Flags = dict[str, str | int | float | bool]


class EngineParams(_Section):
    """A server engine; `torch` needs none of it."""

    python: str
    """Interpreter of the environment that has the engine; launched servers run in it."""
    url: str | None = None
    """Join this server with speculation instead of launching one."""
    baseline_url: str | None = None
    """Join this server without speculation; with one of the two only, no ratio is given."""
    port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    """Of launched servers; any free one without it."""
    max_running: Positive
    """Requests served at once, the same with and without speculation."""
    topk: Positive
    """Branches of the draft tree at each step; 1 is a chain."""
    draft_tokens: Positive | None = None
    """Tokens of one verify step; spec_steps + 1 without it, and always for a chain."""
    ready_seconds: Positive
    """Longest wait for a launched server."""
    request_seconds: Positive
    """Longest wait for the next piece of an answer."""
    flags: Flags
    """Further flags of both servers, for example `tp-size: 8`."""
    speculative: Flags
    """Further flags of the server with speculation."""
    env: dict[str, str]
    """Environment of launched servers."""

    @model_validator(mode="after")
    def _plain_names(self) -> "EngineParams":
        dashed = [flag for flag in (*self.flags, *self.speculative) if flag.startswith("-")]
        if dashed:
            raise ValueError(f"flags are written without dashes: {', '.join(dashed)}")
        return self


class BenchParams(_Section):
    """The bench: is it faster?"""

    prompts: Positive
    """Held-out prompts, other than the probe's where there are enough."""
    max_new_tokens: Positive
    """Tokens of each answer."""
    concurrency: tuple[Positive, ...]
    """Numbers of clients to measure with; `torch` answers one at a time."""
    spec_steps: tuple[Positive, ...]
    """Numbers of drafted tokens to try, as a chain."""
    trees: tuple[tuple[Positive, Positive, Positive], ...]
    """Draft trees to try as well, on a server: steps, topk, draft tokens."""
    compare: tuple[str, ...]
    """Folders of other drafters to measure beside this one: `artifacts/donor`, `artifacts/initial`, or any other."""
    min_ratio: dict[Positive, float]
    """By concurrency, the ratio over plain decoding below which the stage fails once its figures are written."""


class Profile(_Section):
    """`profiles/<name>.yaml`: what describes a target."""

    target: TargetParams
    corpus: CorpusParams
    donor: DonorParams
    vocab: VocabParams
    extract: ExtractParams
    train: TrainParams
    engine: EngineParams
    probe: ProbeParams
    bench: BenchParams

    @model_validator(mode="after")
    def _rows_hold_documents(self) -> "Profile":
        rows = {"train.row_tokens": self.train.row_tokens}
        if self.donor.train is not None:
            rows["donor.train.row_tokens"] = self.donor.train.row_tokens
        for name, tokens in rows.items():
            if tokens < self.corpus.max_length:
                raise ValueError(f"{name} {tokens} must be at least corpus.max_length {self.corpus.max_length}")
        return self


class Params(_Section):
    """`params.yaml`: the knobs people turn, all at top level so that `dvc exp run -S lr=5e-5` works."""

    profile: str
    """Name of a file in `profiles/`."""
    init: Literal["remap", "keep_donor_vocab", "naive", "scratch"]
    """What training starts from; `naive` exists to show the fault."""
    fill: Literal["zero", "mean", "target", "scaled", "fitted", "auto"]
    """Head rows that the donor lacks, see `redraft.remap.fills`; `auto` takes the lowest first-step loss."""
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate of AdamW."""
    epochs: Annotated[float, Field(gt=0)]
    """Passes over the corpus."""
    seed: int
    """Of the order of batches and of fresh weights."""
    ttt_steps: Positive
    """Draft steps unrolled in training."""
    step_weight: Annotated[float, Field(gt=0)]
    """Weight of draft step k in the loss is step_weight**k."""
    warmup: Fraction
    """Share of the optimizer steps with a rising learning rate."""
    clip: Annotated[float, Field(gt=0)]
    """Largest gradient norm."""
    loss: LossParams
    """What is trained, and towards what."""
    evals: Positive
    """Times that held-out documents are measured during training; the best one's weights are kept."""
    patience: Positive
    """Measurements without a better joint acceptance after which training stops."""
    gate: Literal["stop", "warn", "off"]
    """What follows when the numbers before the first step cannot be right."""
    resume: Literal["auto", "never", "must"]
    """Whether a killed training goes on from its saved state."""
    engine: Literal["torch", "sglang"]
    """What probe and bench serve with."""
    spec_steps: Positive
    """Tokens drafted per verify step in the probe."""


class Config(_Section):
    """Both files together."""

    params: Params
    profile: Profile

    def fit(self) -> FitParams:
        """The training that the `train` stage runs: the knobs plus what the profile decides."""
        shared = FitParams.model_fields.keys()
        knobs = self.params.model_dump(include=set(shared))
        sized = self.profile.train.model_dump(include=set(shared))
        return FitParams(**knobs, **sized)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


_Model = TypeVar("_Model", bound=BaseModel)


def _parse(model: type[_Model], path: Path) -> _Model:
    if not path.is_file():
        known = sorted(file.stem for file in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise RedraftError(
            "A parameter file is missing.",
            where=path,
            found=f"in its folder: {', '.join(known) or 'no YAML file'}",
            fix="run from the project's root, or set `profile` to one of those names",
        )
    try:
        return model.model_validate(load_yaml(path.read_text()))
    except yaml.YAMLError as error:
        raise RedraftError("A parameter file is not valid YAML.", where=path, found=error) from error
    except ValidationError as error:
        faults = [
            f"`{'.'.join(map(str, e['loc'])) or '(file)'}`: {e['msg']}, found {e['input']!r}" for e in error.errors()
        ]
        raise RedraftError(
            f"{len(faults)} parameter(s) cannot be used.",
            where=path,
            found="; ".join(fault[:300] for fault in faults),
            fix=f"see the fields and their units in {model.__name__} of redraft/params.py",
        ) from error


def load_profile(name: str, root: Path | str = ".") -> Profile:
    """Read `profiles/<name>.yaml` under `root`.

    Raises:
        RedraftError: file missing, not YAML, unknown key, wrong type or value.
    """
    return _parse(Profile, Path(root) / "profiles" / f"{name}.yaml")


def load_config(root: Path | str = ".") -> Config:
    """Read `params.yaml` under `root` and the profile that it names.

    Raises:
        RedraftError: as `load_profile`.
    """
    params = _parse(Params, Path(root) / "params.yaml")
    return Config(params=params, profile=load_profile(params.profile, root))
