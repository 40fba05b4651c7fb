"""A target's logits must be states times the rows that its files hold: measured on the real model of every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import SHAPE, deepseek, llama, save_target
from torch import nn

from redraft.frame.errors import RedraftError
from redraft.target import model as target_model
from redraft.target.ends import Ends, read_ends
from redraft.target.head import require_plain_head
from redraft.target.model import load_target

MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
MIXTURE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def made(family: str, **fields: object) -> Any:
    """A tiny model of a family of transformers, with a bias where it has biases."""
    known: Any = transformers
    config = getattr(known, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim" or family != "Phi"}
    torch.manual_seed(0)
    model = getattr(known, f"{family}ForCausalLM")(config(**{**shape, **fields})).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight, std=0.01)
    return model


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("Granite", {"logits_scaling": 8.0}, "logits_scaling"),
        ("Granite", {"logits_scaling": 1.1}, "logits_scaling"),
        ("Cohere", {"logit_scale": 0.0625}, "logit_scale"),
        ("Gemma2", {"final_logit_softcapping": 30.0, "initializer_range": 0.02}, "final_logit_softcapping"),
        ("FalconH1", {"lm_head_multiplier": 0.04, **MAMBA}, "lm_head_multiplier"),
        ("Phi", {}, "a bias"),
    ],
)
def test_a_head_that_is_more_than_a_matrix_is_refused(
    family: str, fields: dict[str, object], named: str, dtype: str, tmp_path: Path
) -> None:
    save_target(made(family, **fields), tmp_path)
    with pytest.raises(RedraftError, match=f"(?s)more than a matrix.*{named}"):
        load_target(tmp_path, dtype=dtype, device="cpu")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        llama,
        deepseek,
        lambda: made("Qwen3Moe", **MIXTURE),
        lambda: made("Gemma3"),
        lambda: made("Granite", logits_scaling=1.0),
        lambda: made("Cohere", logit_scale=1.0),
        lambda: made("Gemma2", final_logit_softcapping=None),
    ],
    ids=["llama", "deepseek", "qwen3 moe", "gemma3", "granite", "cohere", "gemma2"],
)
def test_a_plain_head_passes(model: Any, dtype: str, tmp_path: Path) -> None:
    target = load_target(save_target(model(), tmp_path), dtype=dtype, device="cpu")
    assert not target.decoder._forward_hooks
    assert not target.decoder.norm._forward_hooks


class Odd(nn.Module):
    """The head of a family that nobody has met yet."""

    def __init__(self, model: Any, change: Any) -> None:
        super().__init__()
        self.model, self.change = model, change

    def get_decoder(self) -> Any:
        return self.model.get_decoder()

    def get_output_embeddings(self) -> Any:
        return self.model.get_output_embeddings()

    @property
    def config(self) -> Any:
        return self.model.config

    def forward(self, **given: Any) -> Any:
        output = self.model(**given)
        output.logits = self.change(output.logits)
        return output


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits * 1.05,
        lambda logits: 500 * torch.tanh(logits / 500),
        lambda logits: logits + 1e-3,
        lambda logits: logits - logits.mean(-1, keepdim=True),
        lambda logits: logits.masked_fill(torch.arange(logits.shape[-1]) > 90, float("-inf")),
        lambda logits: logits * float("nan"),
    ],
)
def test_whatever_is_done_to_the_logits_is_seen(change: Any) -> None:
    require_plain_head(Odd(llama(), lambda logits: logits))
    with pytest.raises(RedraftError, match="more than a matrix"):
        require_plain_head(Odd(llama(), change))


def test_a_decoder_of_another_build_is_refused(tmp_path: Path) -> None:
    save_target(made("FalconH1", lm_head_multiplier=1.0, **MAMBA), tmp_path)
    with pytest.raises(RedraftError, match=r"(?s)does not know.*final_layernorm"):
        load_target(tmp_path, device="cpu")


@pytest.mark.parametrize("part", ["embed", "head", "norm"])
def test_ends_that_are_not_the_models_are_refused(
    part: str, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(folder: Path) -> Ends:
        ends = read_ends(folder)
        setattr(ends, part, getattr(ends, part) * 1.5)
        return ends

    monkeypatch.setattr(target_model, "read_ends", other)
    with pytest.raises(RedraftError, match="not the one that training reads"):
        load_target(llama_folder, device="cpu")
