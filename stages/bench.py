"""bench: is it faster? Baseline and speculation on the same prompts, interleaved."""

from pathlib import Path

from redraft.hidden.corpus import read_corpus
from redraft.params import Config
from redraft.serve.load import in_turn, interleave, summarize
from redraft.serve.open import load_models, open_servers
from redraft.stage import Result, run

TARGET, DRAFTER = Path("artifacts/target"), Path("artifacts/drafter")


def main(config: Config) -> Result:
    params = config.profile.bench
    heldout = read_corpus(Path("artifacts/corpus/heldout.safetensors"))
    first = config.profile.probe.prompts  # other prompts than the probe's, where there are enough
    prompts = [heldout.prompt((first + number) % len(heldout)) for number in range(params.prompts)]
    numbers = (0, *params.spec_steps)
    if config.params.engine == "torch":
        engines = load_models(config, TARGET, DRAFTER, "bf16").engines(numbers)
        answers = interleave(engines, prompts, params.max_new_tokens)
    else:
        engines = open_servers(config, TARGET, DRAFTER, numbers)
        answers = in_turn(engines, prompts, params.max_new_tokens)
    metrics = summarize(answers)
    print(metrics["verdict"])
    headline = {"bench/ratio": metrics["ratio"], "bench/tokens_per_second": metrics["baseline"]["tokens_per_second"]}
    return Result({**metrics, "engine": engines[0].describe()}, headline=headline)


if __name__ == "__main__":
    run("bench", main)
