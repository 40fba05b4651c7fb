"""Python code that a target brings: part by part, where transformers has none, and never more."""

import json
from pathlib import Path

import pytest
import torch
from conftest import deepseek, llama, save_target
from kimi.folder import kimi_folder
from test_target import kimi

from redraft.corpus.tokenizer import load_tokenizer
from redraft.frame.errors import RedraftError
from redraft.frame.profile import TargetParams
from redraft.frame.section import validate
from redraft.target.config import library_class, read_config
from redraft.target.ends import target_hash
from redraft.target.facts import read_facts
from redraft.target.model import load_target
from redraft.target.sources import make_target

NEVER = "raise RuntimeError('code that nobody allowed')\n"
OWN = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}
CONFIGURATION = """
from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODEL = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def edit(folder: Path, **fields: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def own_llama(folder: Path, **fields: object) -> Path:
    """A Llama under a type that transformers does not know, with its code."""
    save_target(llama(), folder)
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODEL)
    return edit(folder, **{"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": OWN, **fields})


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        (True, ("tokenizer", "configuration", "model")),
        (False, ()),
        (["tokenizer"], ("tokenizer",)),
        ([], ()),
    ],
)
def test_the_key_takes_a_list_of_parts_or_all_or_none(given: object, parts: tuple[str, ...]) -> None:
    read = validate(TargetParams, {"source": "x", "trust_remote_code": given}, Path("p.yaml"))
    assert read.trust_remote_code == parts


@pytest.mark.parametrize("given", [["weights"], ["model", "model"], "tokenizer", 1, None])
def test_other_values_of_the_key_are_refused(given: object) -> None:
    with pytest.raises(RedraftError, match="trust_remote_code"):
        validate(TargetParams, {"source": "x", "trust_remote_code": given}, Path("p.yaml"))


@pytest.mark.parametrize("trust", [["tokenizer"], ["tokenizer", "configuration", "model"], True])
def test_what_transformers_has_never_runs_from_the_folder(trust: object, tmp_path: Path) -> None:
    """As Kimi-K2.5 on the hub: a name of its own for the class, and code for everything."""
    folder = save_target(kimi(), tmp_path)
    kimi_folder(folder)
    for name in ("configuration_own.py", "modeling_own.py"):
        (folder / name).write_text(NEVER)
    edit(folder, architectures=["KimiK25ForConditionalGeneration"], auto_map=OWN)
    assert library_class(folder) == "Kimi_K25ForConditionalGeneration"
    loaded = load_target(folder, dtype="fp32", device="cpu", trust_remote_code=trust)  # type: ignore[arg-type]
    assert type(loaded.model).__module__.startswith("transformers.")
    assert type(load_tokenizer(folder, trust)).__module__.startswith("transformers_modules.")  # type: ignore[arg-type]
    with pytest.raises(RedraftError, match=r"tokenizer is Python code(?s:.*)tokenizer in target\.trust_remote_code"):
        load_tokenizer(folder, ["configuration", "model"])


def test_code_runs_where_transformers_has_none_and_each_part_is_asked_for(tmp_path: Path) -> None:
    folder = own_llama(tmp_path)
    plain = save_target(llama(), tmp_path / "plain")
    for trust, part in (((), "configuration"), (["tokenizer", "model"], "configuration")):
        with pytest.raises(RedraftError, match=rf"{part} is Python code(?s:.*){part} in target\.trust_remote_code"):
            read_config(folder, trust)
    assert read_config(folder, ["configuration"]).model_type == "own_llama"
    with pytest.raises(RedraftError, match=r"model is Python code(?s:.*)model in target\.trust_remote_code"):
        load_target(folder, dtype="fp32", device="cpu", trust_remote_code=["configuration"])
    for trust in (["configuration", "model"], True):
        loaded = load_target(folder, dtype="fp32", device="cpu", trust_remote_code=trust)
        assert type(loaded.model).__name__.startswith("OwnForCausalLM")
        assert torch.equal(loaded.head, load_target(plain, dtype="fp32", device="cpu").head)


def test_another_class_of_a_known_type_is_not_taken_for_the_known_one(tmp_path: Path) -> None:
    """A model that builds on Llama and keeps its type: transformers would load it, and compute something else."""
    folder = own_llama(tmp_path, model_type="llama")
    assert library_class(folder) is None
    with pytest.raises(RedraftError, match="configuration is Python code"):
        load_target(folder, device="cpu")
    with pytest.raises(RedraftError, match="model is Python code"):
        load_target(folder, device="cpu", trust_remote_code=["configuration"])
    edit(folder, architectures=["LlamaForCausalLM"])
    assert type(load_target(folder, device="cpu").model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"model_type": "llama", "architectures": None}, "LlamaForCausalLM"),
        ({"model_type": "llama", "architectures": ["Nobody"]}, None),
        ({"model_type": "llava", "architectures": []}, "LlavaForConditionalGeneration"),
        ({"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"]},
         "Kimi_K25ForConditionalGeneration"),
        ({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}, None),
        ({"model_type": "nobody_knows", "architectures": ["Nobody"]}, None),
    ],
)  # fmt: skip
def test_classes_are_found_by_type(fields: dict[str, object], known: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert library_class(tmp_path) == known


@pytest.mark.parametrize(
    ("auto_map", "told"),
    [
        ({"AutoConfig": "nothing"}, "module.Class"),
        ({"AutoConfig": "absent.OwnConfig"}, "own code is missing"),
        ({"AutoConfig": "configuration_own.Absent"}, "no such class"),
        ({"AutoConfig": "ORG/NAME--configuration_own.OwnConfig"}, None),  # the folder's own copy
        ({}, "own_llama"),
        (["a.B"], "own_llama"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_error(auto_map: object, told: str | None, tmp_path: Path) -> None:
    folder = own_llama(tmp_path, auto_map=auto_map)
    if told is None:
        assert read_config(folder, True).model_type == "own_llama"
        return
    with pytest.raises(RedraftError, match=told):
        read_config(folder, True)


def test_code_that_may_run_is_part_of_what_a_target_is(tmp_path: Path) -> None:
    folder, out = own_llama(tmp_path / "source"), tmp_path / "target"

    def known(*parts: str) -> str:
        make_target(TargetParams(source=str(folder), trust_remote_code=parts), out)  # type: ignore[arg-type]
        return target_hash(out)

    before, unheard = known("configuration", "model"), known("tokenizer")
    (folder / "modeling_own.py").write_text(MODEL + "\n# another forward\n")
    assert known("configuration", "model") != before
    assert known("tokenizer") == unheard


def test_servers_are_told_of_code_of_the_tokenizer_alone(tmp_path: Path) -> None:
    folder = save_target(deepseek(), tmp_path)
    assert not read_facts(folder).remote_code
    kimi_folder(folder)
    assert read_facts(folder).remote_code
