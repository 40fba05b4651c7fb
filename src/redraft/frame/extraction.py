"""The section `extract` of a profile: hidden states, and what they come from."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from redraft.frame.section import Above0, Count, Positive, Section, Settings, distinct


class StateServerParams(Section):
    """vLLM servers that give hidden states."""

    urls: Annotated[tuple[str, ...], AfterValidator(distinct)] = ()
    """Join these servers, all of this target, instead of launching any; docs/hidden.md has the command."""
    layers: Annotated[tuple[Count, ...], AfterValidator(distinct)] | None = None
    """States that the servers give, as inputs of layers, the depth for what leaves the last one: what joined ones were
    launched with (eagle_aux_hidden_state_layer_ids). Launched ones give what is needed without this."""
    python: str | None = None
    """Interpreter of the environment that has vLLM; launched servers run in it."""
    servers: Positive = 1
    """Servers that are launched."""
    devices: Annotated[tuple[str, ...], AfterValidator(distinct)] = ()
    """CUDA_VISIBLE_DEVICES of each launched server, for example `["0,1,2,3", "4,5,6,7"]`."""
    dtype: Literal["bf16", "fp32"]
    """What the servers compute in, and the states with it."""
    concurrency: Positive
    """Requests in flight at each server, so files of states that can lie in transfer."""
    folder: str | None = None
    """Where states are handed over; launched servers take shared memory or the store without it. Of joined servers, the
    folder that they write to as this process sees it, where it has another path here."""
    ready_seconds: Positive
    """Longest wait for launched servers."""
    request_seconds: Positive
    """Longest wait for a reply, and for the states behind it."""
    retries: Count
    """Times that a document is asked for again after a request that failed."""
    flags: Settings = {}  # noqa: RUF012 (pydantic copies it)
    """Further flags of launched servers, for example `tensor-parallel-size: 8`."""
    env: dict[str, str] = {}  # noqa: RUF012
    """Environment of launched servers."""

    @model_validator(mode="after")
    def _launched_or_joined(self) -> "StateServerParams":
        if bool(self.urls) == bool(self.python):
            raise ValueError("either python, to launch servers, or urls, to join them")
        if self.urls and self.layers is None:
            raise ValueError("urls need layers: what the servers were launched with cannot be asked of them")
        if self.devices and len(self.devices) != self.servers:
            raise ValueError(f"devices for {self.servers} servers, not {len(self.devices)}")
        dashed = [flag for flag in self.flags if flag.startswith("-")]
        if dashed:
            raise ValueError(f"flags are written without dashes: {', '.join(dashed)}")
        return self


def _ascending(layers: tuple[int, ...]) -> tuple[int, ...]:
    if list(layers) != sorted(set(layers)):
        raise ValueError("ascending, every layer once")
    return layers


class DumpParams(Section):
    """Hidden states that another tool wrote; its files do not say which they are."""

    folder: str
    """With SpecForge's `*.ckpt` or `*.ckpt.gz`, or `*.safetensors` or `data_*.pt` of speculators, at any depth."""
    layers: Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(_ascending)]
    """States in a file, low to high, as inputs of layers, without the last one. SGLang, SpecForge and speculators'
    `data_*.pt` name outputs of layers, which is one lower: their 1, 29, 57 is 2, 30, 58 here."""
    final: Literal["normed", "unnormed"]
    """The last state: after the target's final norm (SpecForge) or before (speculators, vLLM)."""
    release: str
    """What made them, for example `SpecForge 0.2, SGLang 0.5.9`; part of their identity."""
    dtype: Literal["bf16", "fp16", "fp32"]
    """Of the states in the files."""


class ExtractParams(Section):
    """Hidden states of the target."""

    engine: Literal["transformers", "vllm", "import"] = "transformers"
    """What they come from: `transformers` in this process, `vllm` servers, `import` dumps that another tool wrote."""
    format: Literal["bf16", "fp8"] = "bf16"
    """How states are kept: two bytes a value, or one with a scale per token and layer."""
    law: Literal["states", "scored", "top64"] = "states"
    """What is kept of the target's law: the final state of every position, only of those where a target is scored, or
    the 64 largest logits of the full vocabulary with their ids."""
    batch_tokens: Positive
    """Padded tokens in one forward."""
    shard_mib: Positive
    """Largest size of one shard, MiB."""
    recheck: Count
    """Samples extracted again alone, to catch states of another sample (C15)."""
    tolerance: Above0
    """Largest relative difference of a rechecked sample: of all its states, and of the median token of each."""
    diagnostic_positions: Positive
    """Held-out positions of the diagnostic shard, at least."""
    server: StateServerParams | None = None
    """Required by `engine: vllm`."""
    dumps: DumpParams | None = None
    """Required by `engine: import`."""

    @model_validator(mode="after")
    def _servers_named(self) -> "ExtractParams":
        if self.engine == "import" and self.dumps is None:
            raise ValueError("engine: import needs the section dumps")
        if self.engine == "vllm" and self.server is None:
            raise ValueError("engine: vllm needs the section server")
        return self
