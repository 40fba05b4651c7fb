"""The final norm, applied outside the model: a server gives the last layer's output before it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from redraft.frame.errors import RedraftError
from redraft.target.code import Trust
from redraft.target.config import read_config
from redraft.target.facts import read_facts

PLAIN = {
    "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "glm4", "glm4_moe", "gpt_oss", "kimi_k2", "llama",
    "llama4_text", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
}  # fmt: skip
"""Model types (of the text part) whose final norm is known to be w * x / sqrt(mean(x**2) + eps), and whose embedding
enters the first layer as it stands. Gemma, Qwen3-Next and Qwen3.5 scale by 1 + w; Granite scales its embedding."""


@dataclass(frozen=True)
class FinalNorm:
    """RMSNorm, computed as Llama does: in fp32, rounded to the states' dtype before the weight."""

    weight: Tensor
    """[H]."""
    eps: float

    def __call__(self, states: Tensor) -> Tensor:
        """`states` [..., H] after the norm, in their dtype."""
        wide = states.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(states) * normed.to(states.dtype)


def require_plain_norm(folder: Path) -> None:
    """Refuse a target whose final norm is not known to be a plain RMSNorm (`PLAIN`), by its config.json alone.

    Raises:
        RedraftError: another kind of model.
    """
    kind = read_facts(folder).fields.get("model_type")
    if kind not in PLAIN:
        raise RedraftError(
            "The final norm of this target is not known.",
            where=folder / "config.json",
            expected=f"a model_type with a plain RMSNorm: {', '.join(sorted(PLAIN))}",
            found=kind,
            cause="another norm (Gemma's scales by 1 + w) would give a wrong law with no sign of it",
            fix="extract.engine: transformers runs the model's own",
        )


def final_norm(folder: Path, weight: Tensor, trust_remote_code: Trust = False) -> FinalNorm:
    """The final norm of the target in `folder`, with the `weight` [H] of `read_ends`.

    Raises:
        RedraftError: a model whose final norm is not known to be a plain RMSNorm (`PLAIN`), or no eps.
    """
    require_plain_norm(folder)
    fields = read_facts(folder).fields
    eps = fields.get("rms_norm_eps")
    if eps is None:
        eps = getattr(read_config(folder, trust_remote_code).get_text_config(), "rms_norm_eps", None)
    if not isinstance(eps, float) or not 0 <= eps < 1:
        raise RedraftError(
            "The eps of the target's final norm is not known.",
            where=folder / "config.json",
            expected="rms_norm_eps, a small number",
            found=eps,
        )
    return FinalNorm(weight, eps)
