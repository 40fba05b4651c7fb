"""What smaller states cost: `python benchmarks/states.py FOLDER [--seeds 3]`, in a project whose pipeline ran.

Of every way to keep states (`extract.format`, `extract.law`) it prints bytes a token, the first-step loss, and, of
drafters trained from them by the function of `train` with the project's params, figures on held-out documents, all
measured on the same bf16 states of every position; and the accept length on the target's own answers to all held-out
prompts. The states are the pipeline's, packed and unpacked in memory: of a target that computes in bf16 the very
tensors that extraction would write. Drafters and answers are kept in FOLDER, so a run that was stopped goes on.

Intervals are 95 %, of documents and of seeds: differences to bf16, states are paired by both.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from redraft.corpus.corpus import read_corpus
from redraft.drafter.checkpoint import Checkpoint, read_checkpoint, weights_sha256, write_checkpoint
from redraft.engines.open import load_models
from redraft.engines.prompts import held_out
from redraft.frame.params import load_config
from redraft.frame.progress import progress
from redraft.hidden.formats import packed, scored_positions, unpacked
from redraft.hidden.rows import Batch, HiddenStates, read_manifest
from redraft.hidden.sizes import token_bytes
from redraft.probe.parity import counts
from redraft.probe.replay import Replay
from redraft.target.ends import Ends, read_ends
from redraft.train.loop import fit
from redraft.train.measure import Tally
from redraft.train.step import TTTModule
from redraft.train.walk import walk

ARTIFACTS = Path("artifacts")
TARGET = ARTIFACTS / "target"
WAYS = [("bf16", "states"), ("bf16", "scored"), ("bf16", "top64"), ("fp8", "states"), ("fp8", "top64")]
BASE = WAYS[0]
KIMI_HIDDEN = 7168
FIGURES = ("loss", "accuracy", "joint", "predicted", "served")


class Kept:
    """`HiddenStates` whose documents were kept in another way; in memory."""

    def __init__(self, states: HiddenStates, way: tuple[str, str], head: torch.Tensor) -> None:
        self.fingerprint = f"{states.fingerprint}-{'-'.join(way)}"
        self.tokens, self.length, self.sample, self.mask = states.tokens, states.length, states.sample, states.mask
        self.bytes, self.scored, self._read = 0, 0, []
        for index in progress(range(len(states)), " ".join(way), "document"):
            document = states.read(index)
            asked, mask = scored_positions(document["loss_mask"]), document.pop("loss_mask")
            tensors = packed(document, *way, head, asked)
            self.bytes += sum(t.nbytes for name, t in tensors.items() if name not in ("input_ids", "greedy"))
            self.scored += int(asked.sum())
            self._read.append({**unpacked(tensors, mask), "loss_mask": mask})

    def __len__(self) -> int:
        return len(self._read)

    def read(self, index: int) -> dict[str, torch.Tensor]:
        """As `HiddenStates.read`."""
        return self._read[index]


@torch.no_grad()
def by_document(draft: Checkpoint, ends: Ends, states: Kept, steps: int) -> dict[str, np.ndarray]:
    """Sums of every document: name -> [D, 2, terms], what is counted and what it is divided by."""
    module = TTTModule(draft.drafter, draft.mapping, ends.embed.float(), ends.head, steps)
    rows: dict[str, list[list[list[float]]]] = {"loss": [], "accuracy": [], "joint": [], "predicted": []}
    for index in range(len(states)):
        batch = Batch.row([states.read(index)])
        output, tally = module(batch, exact=True), Tally()
        tally.add(output)
        sums = {name: value.tolist() for name, value in tally.sums.items()}
        rounds = walk(output, batch.input_ids, batch.loss_mask, batch.documents).tolist()
        rows["loss"].append([sums["loss"][:1], sums["trained"][:1]])
        rows["accuracy"].append([sums["correct"][:1], sums["counted"][:1]])
        rows["joint"].append([sums["prefix"], sums["whole"]])
        rows["predicted"].append(of_rounds(rounds))
    return {name: np.array(values) for name, values in rows.items()}


def of_rounds(rounds: list[int]) -> list[list[float]]:
    """Tokens and verify steps of a histogram by accepted drafts."""
    return [[sum(count * (1 + accepted) for accepted, count in enumerate(rounds))], [sum(rounds)]]


def estimate(sums: np.ndarray) -> tuple[float, np.ndarray]:
    """The sum over terms of pooled ratios, and each document's share in its error (Cochran 1977, 6.11)."""
    above, below = sums[:, 0], sums[:, 1]
    ratios = above.sum(0) / below.sum(0)
    return float(ratios.sum()), ((above - ratios * below) / below.sum(0)).sum(1)


def interval(found: list[tuple[float, np.ndarray]], base: list[tuple[float, np.ndarray]] | None) -> tuple[float, float]:
    """Mean over seeds and the half width of its interval; with `base`, of the difference to it, paired."""
    values = np.array([value for value, _ in found])
    shares = np.array([share for _, share in found])
    if base:
        values, shares = values - [value for value, _ in base], shares - [share for _, share in base]
    between = values.var(ddof=1) / len(values) if len(values) > 1 else 0.0
    return float(values.mean()), float(1.96 * np.sqrt(np.square(shares.mean(0)).sum() + between))


class Bench:
    """The project's artefacts, and what was trained of them."""

    def __init__(self, folder: Path, seeds: int) -> None:
        self.folder, self.seeds, self.config = folder, seeds, load_config()
        self.ends, self.steps = read_ends(TARGET), self.config.fit().ttt_steps
        manifest = read_manifest(ARTIFACTS / "hidden/manifest.json")
        if (manifest["kept"], manifest["law"]) != BASE:
            raise SystemExit("extract.format and extract.law of the project must be bf16 and states")
        self.layers: list[int] = manifest["aux_layers"]
        corpora = {split: read_corpus(ARTIFACTS / f"corpus/{split}.safetensors") for split in ("train", "heldout")}
        self.states = {split: HiddenStates(manifest, split, corpus) for split, corpus in corpora.items()}
        self.whole = self.keep("heldout", BASE)

    def keep(self, split: str, way: tuple[str, str]) -> Kept:
        """A split, kept in one way."""
        return Kept(self.states[split], way, self.ends.head)

    def drafter(self, way: tuple[str, str], seed: int) -> Path:
        """Where it lies: `scored` gives the very weights of `states`, which the first seed shows."""
        return self.folder / "-".join([way[0], "states" if way[1] == "scored" and seed else way[1], str(seed)])

    def train(self, way: tuple[str, str]) -> dict[str, float]:
        """Train what is not there yet; sizes and the first step of the way."""
        kept = {split: self.keep(split, way) for split in self.states}
        for seed in range(self.seeds):
            path = self.drafter(way, seed)
            if path.exists():
                continue
            draft = read_checkpoint(ARTIFACTS / "initial")
            params = self.config.fit().model_copy(update={"seed": seed})
            fitted = fit(draft, self.ends, *kept.values(), params, title=f"states-{path.name}", resume="never")
            fitted.state.discard()
            draft.record["heldout"] = fitted.heldout.metrics()
            write_checkpoint(path, draft, tuple(self.layers), TARGET)
        share, tokens = sum(each.scored for each in kept.values()), sum(each.tokens for each in kept.values())
        start = read_checkpoint(ARTIFACTS / "initial")
        return {
            "bytes": sum(each.bytes for each in kept.values()) / tokens,
            "kimi": token_bytes(KIMI_HIDDEN, len(self.layers), *way, share / tokens),
            "scored": share / tokens,
            "first": estimate(by_document(start, self.ends, kept["heldout"], self.steps)["loss"]),
        }

    def measure(self) -> dict[str, dict[str, list[tuple[float, np.ndarray]]]]:
        """By way and figure, what every seed gave."""
        replay = self.answers()
        found = {}
        for way in WAYS:
            rows = found[" ".join(way)] = {name: [] for name in FIGURES}
            for seed in range(self.seeds):
                draft = read_checkpoint(self.drafter(way, seed))
                for name, sums in by_document(draft, self.ends, self.whole, self.steps).items():
                    rows[name].append(estimate(sums))
                served = replay.counts(draft.drafter)
                rows["served"].append(estimate(np.array([of_rounds(row.tolist()) for row in served])))
        return found

    def answers(self) -> Replay:
        """The engine `torch`, fp32, answers every held-out prompt with the first drafter, which changes no answer.

        The replay counts what any drafter would have accepted on the way; for the first it is held against the engine.
        """
        probe, drafts = self.config.profile.probe, self.config.params.spec_steps
        models = load_models(self.config, TARGET, self.drafter(BASE, 0), "fp32")
        corpus, path = self.states["heldout"].corpus, self.folder / "answers.json"
        prompts = held_out(corpus, len(corpus), "states")
        if not path.exists():
            engine = models.engines([drafts])[drafts]
            served = [engine.generate(prompt, probe.max_new_tokens) for prompt in progress(prompts, "serve", "prompt")]
            told = {"ids": [each.ids for each in served], "counts": counts(served, drafts, every=False).tolist()}
            path.write_text(json.dumps(told))
        told = json.loads(path.read_text())
        documents = [([*prompt, *ids], len(prompt)) for prompt, ids in zip(prompts, told["ids"], strict=True)]
        replay = Replay(models.target, models.draft, drafts, documents)
        same = (replay.counts() == np.array(told["counts"])).all(1)
        print(f"replayed as served: {same.sum()} of {len(same)} prompts, {np.array(told['counts']).sum()} verify steps")
        return replay


def main() -> None:
    """Train, measure, and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where drafters and answers are kept")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each way")
    given = parser.parse_args()
    bench = Bench(given.folder, given.seeds)
    sizes = {" ".join(way): bench.train(way) for way in WAYS}
    same = weights_sha256(bench.drafter(WAYS[1], 0)) == weights_sha256(bench.drafter(BASE, 0))
    print(f"bf16 scored gives the very weights of bf16 states: {same}; scored {sizes['bf16 scored']['scored']:.3f}")
    found, base = bench.measure(), " ".join(BASE)
    print("\n| format, law | bytes a token | of Kimi-K2.5 | first-step loss | " + " | ".join(FIGURES) + " |")
    print("|---|" + "---:|" * (3 + len(FIGURES)))
    for difference in (False, True):
        for name, rows in found.items():
            if difference and name == base:
                continue
            told = [interval([sizes[name]["first"]], [sizes[base]["first"]] if difference else None)]
            told += [interval(rows[figure], found[base][figure] if difference else None) for figure in FIGURES]
            head = (
                f"{name} − {base} | |"
                if difference
                else f"{name} | {sizes[name]['bytes']:,.0f} | {sizes[name]['kimi']:,}"
            )
            shown = " | ".join(f"{value:{'+' if difference else ''}.4f} ± {half:.4f}" for value, half in told)
            print(f"| {head} | {shown} |")


if __name__ == "__main__":
    main()
