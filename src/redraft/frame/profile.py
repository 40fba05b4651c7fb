"""`profiles/<name>.yaml`: what describes a target, and what follows from its size."""

import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from redraft.frame.extraction import ExtractParams
from redraft.frame.section import (
    Above0,
    Count,
    Flag,
    Fraction,
    NotNegative,
    Number,
    Positive,
    Precision,
    Section,
    Settings,
    Whole,
    distinct,
    read_object,
    validate,
)  # fmt: skip

Answer = Annotated[Whole, Field(gt=1)]
"""Tokens: the first one comes from the prompt, so an answer of one has no verify step."""


Part = Literal["tokenizer", "configuration", "model"]


def _parts(value: Any) -> Any:
    return (get_args(Part) if value else ()) if isinstance(value, bool) else value


def _day(value: Any) -> str:
    return datetime.date.fromisoformat(str(value)).isoformat()  # YAML reads a bare date as one


class TemplateParams(Section):
    """How chats are rendered: as the server renders them, for the corpus and for what the target is asked."""

    name: str | None = None
    """Of several templates the one that is served; without it `default`, and `tool_use` for chats with tools."""
    arguments: Settings = {}  # noqa: RUF012 (pydantic copies it)
    """Arguments of the template, for example `{thinking: false}` or `{reasoning_effort: low}`."""
    date: Annotated[str, BeforeValidator(_day)] | None = None
    """Day (YYYY-MM-DD) that a template prints as today; one that prints it is refused without this."""


class TargetParams(Section):
    """The model that is served."""

    source: str
    """`wheel:NAME==VERSION` (holds a GGUF file), `fit:tiny`, `fit:kimi-tiny` or `fit:kimi-int4` (fitted here), a
    folder, or a hub id `ORG/NAME`."""
    sha256: str | None = None
    """Of the wheel; required for `wheel:`."""
    revision: str | None = None
    """Commit of a hub id, or a branch or tag: the first commit that it names is kept, and a later one refused."""
    trust_remote_code: Annotated[tuple[Part, ...], BeforeValidator(_parts), AfterValidator(distinct)] = ()
    """Parts of the model's own Python code that may run; `true` is all of them, `false` none. A part that transformers
    has itself never runs."""
    aux_layers: tuple[Count, Count, Count] | None = None
    """Aux layers, as inputs of 0-based decoder layers; default (2, L//2, L-3)."""
    template: TemplateParams = TemplateParams()
    """How chats are rendered."""


class CorpusParams(Section):
    """Tokenisation of `data/<profile>/{donor,train,heldout}`, as JSONL (plain or .gz) or Parquet."""

    max_length: Positive
    """Tokens; a longer sample is cut."""
    max_dropped: Fraction
    """Largest share of chats without a supervised token before the stage fails."""
    max_samples: Positive | None = None
    """Chats of each split, evenly spread over its files; all of them without this."""
    cut: Literal["keep", "drop"] = "keep"
    """Answers that were cut by a token limit: kept, without an end marker, or left out."""
    max_leaks: Fraction = 0.0
    """Largest share of held-out chats with a prompt that is also trained on, before the stage fails."""
    max_repeated: Fraction = 0.1
    """Largest share of the chats of a file with a prompt of an earlier one, before the stage fails."""


class VocabParams(Section):
    """The draft vocabulary."""

    slots: Positive
    """N; not `size`, since the run cache of DVC does not look at a key of that name."""
    force_special: Flag
    """Special and added tokens are always in."""
    force_bytes: Flag
    """Single-byte tokens are always in."""


class DrafterShape(Section):
    """Shape of a drafter that is made from nothing; hidden size and vocabulary come from the target."""

    intermediate_size: Positive
    """Width of the MLP."""
    num_attention_heads: Positive
    """Query heads."""
    num_key_value_heads: Positive
    """Key and value heads; divides the query heads."""
    head_dim: Annotated[Positive, Field(multiple_of=2)]
    """Features of a head, even."""
    rope_theta: Above0
    """Base of the rotary positions."""
    max_position_embeddings: Positive
    """Tokens; at least the served context."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "DrafterShape":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_key_value_heads must divide num_attention_heads")
        return self


class LossParams(Section):
    """What is trained; see docs/training.md for when to change these."""

    mask: Literal["served", "input"]
    """Positions that count: `served` is what serving drafts, `input` is SpecForge's `loss_mask[t+k]`."""
    oov: Literal["drop", "train"]
    """Positions whose target argmax has no slot: left out of the loss, or trained towards the rest of the law."""
    denominator: Literal["trained", "tokens"]
    """Sums are divided by the positions that contribute, or by all tokens of the batch (SpecForge, DeepSpec)."""
    l2: NotNegative
    """Strength of the pull to the initial weights: l2 / 2 * |w - w0|**2 is added to the loss."""
    freeze: tuple[Literal["fc", "midlayer", "norm", "lm_head"], ...]
    """Parts that are not trained."""


class FitKnobs(Section):
    """How a drafter is trained."""

    lr: Above0
    """Peak learning rate of AdamW."""
    epochs: Above0
    """Passes over the corpus; a fraction stops within a pass."""
    seed: Whole
    """Of the order of batches and of fresh weights."""
    ttt_steps: Positive
    """Unrolled draft steps K."""
    step_weight: Above0
    """Weight of draft step k in the loss is step_weight**k."""
    warmup: Fraction
    """Share of the optimizer steps with a rising learning rate."""
    clip: Above0
    """Largest gradient norm."""
    loss: LossParams
    """What is trained, and towards what."""
    evals: Positive
    """Times that held-out documents are measured, evenly over the training; the best one's weights are kept."""
    patience: Positive
    """Measurements without a better joint acceptance after which training stops."""


class FitSizes(Section):
    """What the target's size decides about a training."""

    batch_tokens: Positive
    """Tokens per optimizer step over all processes, padding included."""
    micro_tokens: Positive
    """Tokens of one forward on one process: what memory allows; the rest of a step is accumulated."""
    row_tokens: Positive
    """Tokens of one packed row; a document is never split, so at least `corpus.max_length`."""
    precision: Precision
    """bf16: autocast over fp32 weights; `auto` is the faster one of the machine."""
    save_steps: Positive
    """Optimizer steps between saved states."""

    @model_validator(mode="after")
    def _rows_fit(self) -> "FitSizes":
        for name in ("batch_tokens", "micro_tokens"):
            if getattr(self, name) % self.row_tokens:
                raise ValueError(f"{name} {getattr(self, name)} must be a multiple of row_tokens {self.row_tokens}")
        return self


class FitParams(FitKnobs, FitSizes):
    """One training of a drafter."""


class DonorParams(Section):
    """The drafter we start from."""

    source: str
    """`train` (fitted here on the donor corpus), a checkpoint folder, or a hub id."""
    revision: str | None = None
    """Commit, branch or tag of a hub id, as `target.revision`."""
    head: Literal["own", "target"] = "own"
    """`target`: a donor without a head of its own borrows the target's rows; without this it is refused."""
    train: FitParams | None = None
    """Required by `source: train`."""
    shape: DrafterShape | None = None
    """Required by `source: train`."""
    slots: Positive | None = None
    """Slots of the donor's own mapping, with `source: train`."""
    embedding: Literal["own", "target"] = "own"
    """`own` refuses a donor whose embedding is not the target's; `target` takes the target's all the same."""
    prefix_vocabulary: Flag = False
    """Take a mapping of zero offsets at its word: slot i is id i. Without this a foreign donor with one is refused."""
    tokenizer: str | None = None
    """The donor's own target (a folder or ORG/NAME@COMMIT), if its ids may mean other tokens than the target's."""

    @model_validator(mode="after")
    def _complete(self) -> "DonorParams":
        missing = [name for name in ("train", "shape", "slots") if getattr(self, name) is None]
        if self.source == "train" and missing:
            raise ValueError(f"source: train needs {', '.join(missing)}")
        return self


class TrainParams(FitSizes):
    """What the target's size decides about training, and who runs it; the knobs are in params.yaml."""

    processes: Positive
    """World size that the run must have."""
    launcher: str
    """What starts more than one process on this machine: `torchrun`, or an Accelerate configuration file."""


class Knobs(Section):
    """What the knobs in params.yaml are for this target, where they say `profile`."""

    lr: Above0
    """Peak learning rate of AdamW: about 2e-5 to 5e-5 for a published donor, more for a small one trained here."""
    epochs: Above0
    """Passes over the corpus."""
    ttt_steps: Positive
    """Draft steps unrolled in training."""
    evals: Positive
    """Held-out measurements during training."""
    patience: Positive
    """Measurements without a better one after which training stops."""
    engine: Literal["torch", "sglang"]
    """What probe and bench serve with; `torch` holds the whole target in this process."""
    spec_steps: Positive
    """Tokens drafted per verify step in the probe."""


class ProbeParams(Section):
    """The probe: is the drafter served as it was trained?"""

    prompts: Positive
    """Held-out prompts."""
    max_new_tokens: Answer
    """Tokens of each answer."""
    bf16_prompts: Count
    """Of these prompts, how many are compared in bf16 as well."""
    min_accept_length: Annotated[Number, Field(ge=1)]
    """Below this the drafter accepts nothing and the probe fails."""
    parity: Literal["torch", "walk"]
    """What served acceptance is held against: `torch`, the same prompts in this process, with the cause of a gap;
    `walk`, only what training predicted, for a target that this process cannot hold."""


class EngineParams(Section):
    """A server engine; `torch` needs none of it."""

    python: str
    """Interpreter of the environment that has the engine; launched servers run in it."""
    url: str | None = None
    """Join this server with speculation instead of launching one."""
    baseline_url: str | None = None
    """Join this server without speculation; with one of the two only, no ratio is given."""
    port: Annotated[Whole, Field(gt=0, lt=65536)] | None = None
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
    flags: Settings
    """Further flags of both servers, for example `tp-size: 8`."""
    speculative: Settings
    """Further flags of the server with speculation."""
    env: dict[str, str]
    """Environment of launched servers."""

    @model_validator(mode="after")
    def _plain_names(self) -> "EngineParams":
        dashed = [flag for flag in (*self.flags, *self.speculative) if flag.startswith("-")]
        if dashed:
            raise ValueError(f"flags are written without dashes: {', '.join(dashed)}")
        return self


class BenchParams(Section):
    """The bench: is it faster?"""

    prompts: Positive
    """Held-out prompts, other than the probe's where there are enough."""
    max_new_tokens: Answer
    """Tokens of each answer."""
    concurrency: Annotated[tuple[Positive, ...], Field(min_length=1), AfterValidator(distinct)]
    """Numbers of clients to measure with; `torch` answers one at a time."""
    spec_steps: Annotated[tuple[Positive, ...], Field(min_length=1), AfterValidator(distinct)]
    """Numbers of drafted tokens to try, as a chain."""
    trees: Annotated[tuple[tuple[Positive, Positive, Positive], ...], AfterValidator(distinct)]
    """Draft trees to try as well, on a server: steps, topk, draft tokens."""
    compare: Annotated[tuple[str, ...], AfterValidator(distinct)]
    """Folders of other drafters to measure beside this one: `artifacts/donor`, `artifacts/initial`, or any other."""
    min_ratio: dict[Positive, Above0]
    """By concurrency, the ratio over plain decoding below which the stage fails once its figures are written."""


class PlanParams(Section):
    """Optional. Sizes for `redraft plan` where no config.json of target and donor is at hand; where one is, they have
    to be the same."""

    hidden_size: Positive
    """H of the target."""
    vocab_size: Positive
    """V of the target."""
    num_hidden_layers: Positive
    """Decoder layers of the target."""
    intermediate_size: Positive
    """Width of the drafter's MLP."""
    num_attention_heads: Positive
    """Query heads of the drafter."""
    num_key_value_heads: Positive
    """Key and value heads of the drafter."""
    head_dim: Positive
    """Features of a head of the drafter."""


class Profile(Section):
    """`profiles/<name>.yaml`: what describes a target."""

    target: TargetParams
    corpus: CorpusParams
    donor: DonorParams
    vocab: VocabParams
    extract: ExtractParams
    knobs: Knobs
    train: TrainParams
    engine: EngineParams
    probe: ProbeParams
    bench: BenchParams
    plan: PlanParams | None = None

    @model_validator(mode="after")
    def _rows_hold_documents(self) -> "Profile":
        rows = {"train.row_tokens": self.train.row_tokens}
        if self.donor.train is not None:
            rows["donor.train.row_tokens"] = self.donor.train.row_tokens
        for name, tokens in rows.items():
            if tokens < self.corpus.max_length:
                raise ValueError(f"{name} {tokens} must be at least corpus.max_length {self.corpus.max_length}")
        return self


def load_profile(name: str, root: Path | str = ".") -> Profile:
    """Read `profiles/<name>.yaml` under `root`.

    Raises:
        RedraftError: file missing, not YAML, unknown key, wrong type or value.
    """
    path = Path(root) / "profiles" / f"{name}.yaml"
    return validate(Profile, read_object(path), path)
