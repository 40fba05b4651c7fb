"""For gpu.sh: the TTT step on a GPU against the CPU; or, given two metrics files, whether two trainings agree."""

import json
import sys
from pathlib import Path

import torch
from test_step import EMBED, HEAD, STEPS, batch_of, some_checkpoint

from redraft.train.step import TTTModule


def losses(device: str, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [K, P] and the gradient of fc, on the CPU."""
    checkpoint, batch = some_checkpoint(1), batch_of(1, [[9, 6, 4], [5, 13], [19]])
    module = TTTModule(checkpoint.drafter, checkpoint.mapping, EMBED, HEAD, STEPS, precision).to(device)
    output = module(batch.to(device))
    (output.losses * output.contributing()).sum().backward()
    gradient = checkpoint.drafter.fc.weight.grad
    assert gradient is not None
    return output.losses.detach().cpu(), gradient.cpu()


def on_gpu() -> None:
    """The step in fp32 and under bf16 autocast."""
    assert torch.cuda.is_available(), "no GPU here"
    print(torch.__version__, torch.cuda.get_device_name(), torch.cuda.device_count(), "GPU(s)")
    loss, slope = losses("cpu", "fp32")
    for precision, close in (("fp32", 1e-3), ("bf16", 0.2)):
        other, its = losses("cuda", precision)
        gap, turn = float((other - loss).abs().max()), float((its - slope).norm() / slope.norm())
        assert precision == "fp32" or min(gap, turn) > 1e-4, "bf16 was not computed in bf16"
        print(f"{precision}: largest difference of a loss {gap:.2e} nats, of the gradient {turn:.2e} of its norm")
        assert max(gap, turn) < close


def agree(one: str, two: str) -> None:
    """Whether two trainings ended at the same held-out loss."""
    first, second = (json.loads(Path(name).read_text())["heldout"]["loss_0"] for name in (one, two))
    print(f"held-out loss {first} and {second}")
    assert abs(first - second) < 0.05


if __name__ == "__main__":
    agree(*sys.argv[1:]) if len(sys.argv) > 1 else on_gpu()
