"""The real SGLang serves what the engine `torch` computes, and every planted fault is named (cases C16, C18, C20)."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, make_project
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config

from redraft.corpus.build import tokenize_file
from redraft.corpus.corpus import read_corpus, write_corpus
from redraft.corpus.tokenizer import load_tokenizer
from redraft.drafter.checkpoint import read_checkpoint, write_checkpoint
from redraft.engines.engine import Generation, serving
from redraft.engines.open import Models, load_models
from redraft.engines.sglang import SGLangEngine
from redraft.frame.errors import RedraftError
from redraft.frame.params import load_config
from redraft.frame.process import ServerProcess, free_port
from redraft.preflight.lint import lint
from redraft.probe.parity import hold_against_models
from redraft.probe.probe import Comparison, answer, compare
from redraft.target.sources import make_target
from redraft.target.tiny import VOCAB
from redraft.train.donor import train_donor
from redraft.vocab.mapping import Mapping

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
PYTHON = ROOT / ".engines/sglang/bin/python"
STEPS, TOKENS = 3, 40
DEEPSEEK = {
    "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0,
    "ep_size": 1, "seq_aux": True,
}  # fmt: skip
"""What SGLang reads of a DeepSeek configuration and transformers does not write."""


def deepseek_config() -> DeepseekV3Config:
    """The family of Kimi-K2 in small: MLA, experts; YaRN, which SGLang asks for on a CPU."""
    return DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32,
        qk_rope_head_dim=16, v_head_dim=32, max_position_embeddings=512, bos_token_id=None, eos_token_id=2,
        pad_token_id=0, tie_word_embeddings=False, initializer_range=0.1,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 256,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    )  # fmt: skip


class Served:
    """A project, its models in this process, and what the real server answers without speculation."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, load_config(folder)
        self.target, self.drafter = folder / "artifacts/target", folder / "artifacts/drafter"
        self.models: Models = load_models(self.config, self.target, self.drafter, "fp32")
        heldout = read_corpus(folder / "artifacts/corpus/heldout.safetensors")
        self.prompts = [heldout.prompt(index) for index in range(len(heldout))]
        self.plain = self.answers(self.engine(0))

    def engine(self, steps: int, drafter: Path | None = None, **changes: Any) -> SGLangEngine:
        params = self.config.profile.engine.model_copy(update={"ready_seconds": 600, **changes})
        draft = (drafter or self.drafter) if steps else None
        return SGLangEngine(params, self.target, draft, steps, self.models.stop_ids, 512, self.folder / "logs")

    def answers(self, engine: SGLangEngine) -> list[Generation]:
        with serving(engine):
            return answer(engine, self.prompts, TOKENS, "served")

    def compared(self, answers: list[Generation]) -> Comparison:
        def never(prefix: list[int], first: int, second: int) -> Any:
            raise AssertionError(f"outputs part after {prefix}: {first}, {second}")

        return compare(self.prompts, self.plain, answers, never)

    def held(self, answers: list[Generation], donor: Mapping | None = None) -> dict[str, Any] | None:
        mapping = donor or self.models.draft.mapping
        return hold_against_models(self.compared(answers), STEPS, self.models, mapping, here=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(make_project(tmp_path_factory.mktemp("llama"), python=str(PYTHON)))


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(make_project(tmp_path_factory.mktemp("deepseek"), deepseek_config(), str(PYTHON), **DEEPSEEK))


@pytest.fixture(scope="module")
def deepseek_high(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A drafter of the layers one higher than usual, which its files name by the ids of this family (A12)."""
    folder = tmp_path_factory.mktemp("deepseek")
    return Served(make_project(folder, deepseek_config(), str(PYTHON), (3, 5, 6), **DEEPSEEK))


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """SmolLM2-135M with a drafter that saw little of it; the default pipeline's own is probed by its users."""
    folder = tmp_path_factory.mktemp("smollm")
    text = (ROOT / "profiles/smollm.yaml").read_text().replace("epochs: 2", "epochs: 6")
    text = text.replace("max_samples: 180 ", "max_samples: 32 ").replace(".engines/", f"{ROOT}/.engines/")
    (folder / "profiles").mkdir()
    (folder / "profiles/smollm.yaml").write_text(text)
    (folder / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    config = load_config(folder)
    target = folder / "artifacts/target"
    make_target(config.profile.target, target)
    corpora = {
        split: tokenize_file(ROOT / f"data/smollm/{split}.jsonl", load_tokenizer(target), config.profile.corpus)[0]
        for split in ("train", "heldout")
    }
    write_corpus(folder / "artifacts/corpus/heldout.safetensors", corpora["heldout"].part(range(4)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDRAFT_STORE", str(folder / ".store"))
        drafter, _ = train_donor(target, corpora["train"], config.profile)
    write_checkpoint(folder / "artifacts/drafter", drafter, (2, 15, 27))
    return Served(folder)


@pytest.mark.parametrize("family", ["llama", "deepseek", "smollm", "deepseek_high"])
def test_a_chain_is_served_as_it_is_computed(family: str, request: pytest.FixtureRequest) -> None:
    """In float32 the same verify steps and accepted drafts, prompt by prompt, and the target's own output."""
    served: Served = request.getfixturevalue(family)
    assert [each for each in lint(served.drafter, served.target, "0.5.23") if each.level == "error"] == []
    engine = served.engine(STEPS)
    answers = served.answers(engine)
    assert served.compared(answers).equal == len(served.prompts)
    own = answer(served.models.engines([STEPS])[STEPS], served.prompts, TOKENS, "torch")
    assert [given.ids for given in answers] == [given.ids for given in own]
    assert [(g.steps.verify, g.steps.right) for g in answers] == [(g.steps.verify, g.steps.right) for g in own]
    assert [given.steps.histogram for given in answers] == [given.steps.histogram for given in own]
    found = engine.acceptance().metrics()
    assert 1.05 < found["accept_length"] < 4
    parity = served.held(answers)
    assert parity is not None
    assert (parity["difference"], parity["agreeing"]) == (0, len(served.prompts))
    print(f"\n{family}: {found['accept_length']} over {found['verify_steps']} verify steps")


def test_a_tree_is_lossless_and_accepts_no_less(llama: Served) -> None:
    chain = answer(llama.models.engines([STEPS])[STEPS], llama.prompts, TOKENS, "torch")
    engine = llama.engine(STEPS, topk=4, draft_tokens=8)
    answers = llama.answers(engine)
    assert llama.compared(answers).equal == len(llama.prompts)
    assert engine.describe()["speculative_num_draft_tokens"] == 8
    least = 1 + sum(given.steps.right for given in chain) / sum(given.steps.verify for given in chain)
    assert engine.acceptance().metrics()["accept_length"] >= least


# --- faults: the files of the drafter that is served, changed as if another tool had written them


def faulty(served: Served, folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> Path:
    """A copy of the drafter, changed; what redraft remembers in files of its own is gone."""
    shutil.copytree(served.drafter, folder)
    (folder / "redraft.json").unlink()
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    fields = json.loads((folder / "config.json").read_text())
    change(tensors, fields)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def other_mapping(mapping: Mapping) -> Mapping:
    rest = np.setdiff1d(np.arange(mapping.vocab_size), mapping.ids)
    ids = np.sort(np.concatenate([mapping.ids[: -len(mapping) // 4], rest[: len(mapping) - len(mapping) * 3 // 4]]))
    return Mapping(ids[: len(mapping)], mapping.vocab_size)


def layers(by: int) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    def change(_: dict[str, Any], fields: dict[str, Any]) -> None:
        ids = fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [number + by for number in ids]

    return change


def prefixed(tensors: dict[str, Any], _: dict[str, Any]) -> None:
    for name in [name for name in tensors if name not in ("d2t", "t2d")]:
        tensors[f"draft_model.{name}"] = tensors.pop(name)


def retold(tensors: dict[str, Any], _: dict[str, Any]) -> None:
    other = other_mapping(Mapping.from_offsets(tensors["d2t"].numpy(), None, VOCAB))
    tensors["d2t"], tensors["t2d"] = torch.from_numpy(other.d2t), torch.from_numpy(other.t2d)


SEEN_IN_FILES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str, str]] = {
    "missing lm_head": (lambda t, f: t.pop("lm_head.weight"), "lm-head-missing", "lm_head is missing"),
    "unknown prefix": (prefixed, "name-prefix", "lm_head is missing"),
    "zeros": (lambda t, f: t["d2t"].zero_(), "d2t-zeros", "slots are taken for ids"),
    "post-norm": (lambda t, f: f.update(norm_output=True), "norm-output", "norm_output"),
}
NOT_SEEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = {
    "layers one up": (layers(1), "the aux layers are captured one too late"),
    "layers one down": (layers(-1), "the aux layers are captured one too early"),
    "another drafter's mapping": (retold, "another drafter's"),
    "rope theta lost": (lambda t, f: f.update(rope_theta=10000.0), "rope_theta is lost: 10000, not 50"),
}


@pytest.mark.parametrize("fault", [*SEEN_IN_FILES, *NOT_SEEN])
def test_a_fault_that_is_served_is_named(fault: str, llama: Served, tmp_path: Path) -> None:
    """The server comes up healthy; the probe says which fault it is, and so does the preflight where files show it."""
    change, named = (SEEN_IN_FILES[fault][0], SEEN_IN_FILES[fault][2]) if fault in SEEN_IN_FILES else NOT_SEEN[fault]
    folder = faulty(llama, tmp_path / "drafter", change)
    rules = {finding.rule for finding in lint(folder, llama.target, "0.5.23")}
    assert fault not in SEEN_IN_FILES or SEEN_IN_FILES[fault][1] in rules
    answers = llama.answers(llama.engine(STEPS, folder))
    models = llama.models
    if (
        fault == "rope theta lost"
    ):  # trained with 10000, what SGLang takes anyway; so another is taken for the right one
        drafter = read_checkpoint(llama.drafter).drafter
        drafter.config = replace(drafter.config, rope_theta=50.0)
        models = replace(models, draft=replace(models.draft, drafter=drafter))
    donor = other_mapping(models.draft.mapping)
    outputs = llama.compared(answers)  # no fault of a drafter ever changes the output
    assert outputs.equal == len(llama.prompts)
    with pytest.raises(RedraftError, match="not served as it is computed here") as caught:
        hold_against_models(outputs, STEPS, models, donor, here=False)
    cause = next(line for line in str(caught.value).splitlines() if "likely cause" in line)
    assert named in cause
    print(f"\n{fault}: {cause.strip()}")


def test_ids_in_place_of_offsets_end_the_server_or_are_named(llama: Served, tmp_path: Path) -> None:
    ids = torch.from_numpy(llama.models.draft.mapping.ids)
    folder = faulty(llama, tmp_path / "drafter", lambda t, f: t.update(d2t=ids))
    assert "d2t-absolute" in {finding.rule for finding in lint(folder, llama.target, "0.5.23")}
    with pytest.raises(RedraftError, match=r"vocabulary: .*index out of range|d2t holds ids") as caught:
        llama.held(llama.answers(llama.engine(STEPS, folder)))
    print(str(caught.value)[:400])


def test_eagle_in_place_of_eagle3_is_read_back(llama: Served) -> None:
    engine = llama.engine(STEPS)
    port = free_port()
    command = ["EAGLE" if word == "EAGLE3" else word for word in engine.command(port)]
    server = ServerProcess(command, dict(engine.params.env), llama.folder / "logs/eagle.log")
    joined = llama.engine(STEPS, url=f"http://127.0.0.1:{port}")
    try:
        server.wait(joined.ready, 300)
        with pytest.raises(RedraftError, match="EAGLE is not EAGLE3"):
            joined.start()
    finally:
        server.stop()
        joined.stop()


def test_short_positions_are_explained(llama: Served, tmp_path: Path) -> None:
    folder = faulty(llama, tmp_path / "drafter", lambda t, f: f.update(max_position_embeddings=256))
    assert "positions" in {finding.rule for finding in lint(folder, llama.target, "0.5.23", context=512)}
    with pytest.raises(RedraftError, match=r"(?s)died before it was ready.*context: "):
        llama.answers(llama.engine(STEPS, folder))
