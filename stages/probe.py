"""probe: serve the drafter, and compare what it gives with what the target gives alone."""

from pathlib import Path

from redraft import atomic
from redraft.hidden.corpus import read_corpus
from redraft.params import Config
from redraft.serve.open import open_engines
from redraft.serve.probe import compare, require_acceptance, require_lossless, samples_text
from redraft.stage import Result, run
from redraft.target.chat import load_tokenizer

TARGET, DRAFTER = Path("artifacts/target"), Path("artifacts/drafter")


def main(config: Config) -> Result:
    params, steps = config.profile.probe, config.params.spec_steps
    heldout = read_corpus(Path("artifacts/corpus/heldout.safetensors"))
    prompts = [heldout.prompt(index) for index in range(min(params.prompts, len(heldout)))]
    exact = open_engines(config, TARGET, DRAFTER, (0, steps), "fp32")
    outputs = compare(exact[0], exact[steps], prompts, params.max_new_tokens, "probe fp32")
    require_lossless(outputs)
    served = exact[steps].acceptance().metrics()
    require_acceptance(served["accept_length"], params.min_accept_length)
    metrics = {"lossless": True, **served, "fp32": outputs.metrics(), "engine": exact[steps].describe()}
    if params.bf16_prompts:
        rounded = open_engines(config, TARGET, DRAFTER, (0, steps), "bf16")
        fast = compare(rounded[0], rounded[steps], prompts[: params.bf16_prompts], params.max_new_tokens, "probe bf16")
        metrics["bf16"] = {**fast.metrics(), **rounded[steps].acceptance().metrics()}
    tokenizer = load_tokenizer(TARGET, config.profile.target.trust_remote_code)
    atomic.write_text("artifacts/samples.txt", samples_text(tokenizer, outputs.answers))
    return Result(metrics, headline={"probe/accept_length": served["accept_length"]})


if __name__ == "__main__":
    run("probe", main)
