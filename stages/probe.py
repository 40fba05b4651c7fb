"""probe: serve the drafter, and compare what it gives with what the target gives alone and with what was predicted."""

from pathlib import Path
from typing import Any

from redraft.corpus.corpus import read_corpus
from redraft.corpus.tokenizer import load_tokenizer
from redraft.drafter.checkpoint import read_parts, weights_sha256
from redraft.engines.open import load_models, open_servers
from redraft.engines.prompts import held_out, require_drafts
from redraft.frame import atomic
from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.probe.parity import hold_against_models, hold_against_training
from redraft.probe.probe import require_acceptance, require_lossless, samples_text, serve_both, trained_length

TARGET, DRAFTER, DONOR = Path("artifacts/target"), Path("artifacts/drafter"), Path("artifacts/donor")


def main(config: Config) -> Result:
    params, steps, here = config.profile.probe, config.params.spec_steps, config.params.engine == "torch"
    require_drafts(params.max_new_tokens, "probe")
    prompts = held_out(read_corpus(Path("artifacts/corpus/heldout.safetensors")), params.prompts, "probe")
    models = load_models(config, TARGET, DRAFTER, "fp32") if here else None
    engines = models.engines((0, steps)) if models else open_servers(config, TARGET, DRAFTER, (0, steps))
    outputs = serve_both(engines, prompts, params.max_new_tokens, f"probe {config.params.engine}")
    described, parts = engines[steps].describe(), read_parts(DRAFTER, finite=False)
    exact = described.get("dtype") == "float32"
    if exact:  # in fewer bits a forward of several tokens may choose otherwise than one of one token
        require_lossless(outputs)
    served = engines[steps].acceptance().metrics()
    lossless = not outputs.different if 0 in engines else None
    metrics: dict[str, Any] = {"lossless": lossless, **served, "outputs": outputs.metrics()}
    if here or config.profile.engine.topk == 1:  # a tree accepts more than any chain that is computed here
        if params.parity == "walk":
            metrics["parity"] = hold_against_training(outputs, steps, parts.record)
        else:
            models = models or load_models(config, TARGET, DRAFTER, "fp32")
            donor = read_parts(DONOR, finite=False).mapping
            metrics["parity"] = hold_against_models(outputs, steps, models, donor, here=here, exact=exact)
    require_acceptance(served["accept_length"], params.min_accept_length)
    metrics |= {
        "asked": {"prompts": params.prompts, "max_new_tokens": params.max_new_tokens},
        "engine": described,
        "mapping": parts.mapping.hash,
        "drafter": weights_sha256(DRAFTER),
        **trained_length(outputs, parts.record),
    }
    if here and params.bf16_prompts:
        rounded = load_models(config, TARGET, DRAFTER, "bf16").engines((0, steps))
        fast = serve_both(rounded, prompts[: params.bf16_prompts], params.max_new_tokens, "probe bf16")
        metrics["bf16"] = {**fast.metrics(), **rounded[steps].acceptance().metrics()}
    tokenizer = load_tokenizer(TARGET, config.profile.target.trust_remote_code)
    atomic.write_text("artifacts/samples.txt", samples_text(tokenizer, outputs.answers))
    return Result(metrics, headline={"probe/accept_length": served["accept_length"]})


if __name__ == "__main__":
    run("probe", main)
