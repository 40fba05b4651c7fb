"""A loaded target held against its two ends: its logits must be states times rows, its ends those of the files.

Everything that is trained on or served in this process computes the target's law as softmax(states @ head.T) with the
rows of `read_ends`. Families scale, cap or shift their logits under many names, so this is measured, not looked up.
"""

from typing import Any

import torch
from torch import Tensor, nn

from redraft.frame.errors import RedraftError, some
from redraft.target.ends import Ends, same

STRETCH = (0.0, *(1.0,) * 10, *(1024.0,) * 5)
"""Factors of the states of 16 tokens: 0 shows a bias, 1 a factor, 1024 a cap, which leaves small logits alone."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2}
"""Largest relative difference of the logits of a token; the same product in the same dtype, so rounding alone."""


def weight_of(module: Any) -> Tensor:
    """The weight of a module, also of one that a spread target brings to a device only while it computes."""
    weight = module.weight
    return weight if weight.device.type != "meta" else module._hf_hook.weights_map["weight"]


def first_device(model: Any) -> torch.device:
    """Where a model wants its ids: one that is spread computes its embedding elsewhere than it lies."""
    if not getattr(model, "hf_device_map", None):
        return model.get_output_embeddings().weight.device
    embedding = model.get_input_embeddings()
    return torch.device(embedding._hf_hook.execution_device)


@torch.inference_mode()
def require_plain_head(model: Any) -> None:
    """One forward of 16 tokens: logits against states times rows, and the last state against the final norm's output.

    Raises:
        RedraftError: they differ, or the model has no decoder with `layers` and `norm`.
    """
    decoder, head = model.get_decoder(), weight_of(model.get_output_embeddings())
    stretch = torch.tensor(STRETCH, dtype=head.dtype)[:, None]
    seen: dict[str, Tensor] = {}

    def at_norm(_: nn.Module, args: Any, output: Tensor) -> None:
        seen["normed"] = output

    def at_end(_: nn.Module, args: Any, output: Any) -> Any:
        seen["final"] = output.last_hidden_state
        output.last_hidden_state = seen["stretched"] = seen["final"] * stretch.to(seen["final"].device)
        return output

    handles = [decoder.register_forward_hook(at_end)]
    if norm := getattr(decoder, "norm", None):
        handles.append(norm.register_forward_hook(at_norm))
    try:
        ids = torch.arange(len(STRETCH), device=first_device(model))[None] % len(head)
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    expected = seen["stretched"].to(head.device) @ head.T
    apart = (logits.to(head.device) - expected).float().norm(dim=-1) / (expected.float().norm(dim=-1) + 1e-30)
    if not bool((apart <= TOLERANCE[head.dtype]).all()):
        fields = model.config.get_text_config().to_dict()
        told = [f"{name} {value}" for name, value in fields.items() if "logit" in name or "lm_head" in name]
        raise RedraftError(
            "The target's head is more than a matrix.",
            where=type(model).__name__,
            expected="logits = states @ rows, as training and the engine torch compute them",
            found=(
                "logits that are not zero for a state of zero: a bias"
                if apart[0, 0] > 0
                else f"logits of 16 tokens that differ by {float(apart.max()):.3g} of their size"
            )
            + (f"; the configuration has {some(told)}" if told else ""),
            cause="a model family whose logits are scaled, capped or shifted: redraft does not compute that yet",
        )
    if not hasattr(decoder, "layers") or "normed" not in seen or not torch.equal(seen["normed"], seen["final"]):
        raise RedraftError(
            "The target is built in a way that redraft does not know.",
            where=type(decoder).__name__,
            expected="a decoder with `layers`, whose last state is the output of its `norm`",
            found=", ".join(name for name, _ in decoder.named_children()),
        )


def require_ends(embed: Tensor, head: Tensor, norm: Tensor, ends: Ends) -> None:
    """Refuse a model whose ends are not those that the files hold by `read_ends`.

    Raises:
        RedraftError: naming them.
    """
    pairs = {"embedding": (embed, ends.embed), "head": (head, ends.head), "final norm": (norm, ends.norm)}
    differing = [name for name, (one, other) in pairs.items() if not same(one, other)]
    if differing:
        raise RedraftError(
            "The model in this process is not the one that training reads from the files.",
            where=", ".join(differing),
            expected="embedding, head and final norm of the files",
            found="other numbers",
            cause="transformers ties, converts or names weights in a way that redraft does not know",
        )
