"""Train a drafter with Accelerate: AdamW, warm-up and cosine decay counted in optimizer steps, clipped gradients."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader

from redraft.drafter.checkpoint import Checkpoint
from redraft.errors import RedraftError
from redraft.hidden.store import HiddenStates, PackedRows
from redraft.params import FitParams
from redraft.progress import counter
from redraft.target.model import Ends
from redraft.train.measure import Tally, evaluate
from redraft.train.step import StepOutput, TTTModule

CURVE_POINTS = 60


@dataclass
class Fitted:
    """What a training left behind."""

    heldout: dict[str, Any]
    """`Tally.metrics` on held-out documents after training."""
    start: dict[str, Any]
    """The same before training."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """One row now and then: step, lr, loss and accuracy of the first draft step over the rows since the last one."""
    steps: int = 0
    """Optimizer steps."""
    tokens: int = 0
    """Document tokens seen, padding not counted."""
    seconds: float = 0.0
    """Of the training loop."""


def lr_factor(step: int, total: int, warmup: float) -> float:
    """Share of the peak learning rate at optimizer step `step` (from 0) of `total`: linear rise, cosine fall to 0."""
    rise = max(1, round(total * warmup))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, total - rise)))


def fit(
    checkpoint: Checkpoint,
    ends: Ends,
    train: HiddenStates,
    heldout: HiddenStates,
    params: FitParams,
    *,
    processes: int = 1,
    title: str = "train",
) -> Fitted:
    """Train `checkpoint.drafter` in place.

    Args:
        checkpoint: the initial drafter and its mapping.
        ends: the target's embedding and head.
        train: documents to train on.
        heldout: documents to measure on.
        params: learning rate, passes, batch and precision.
        processes: the world size that must be there.
        title: of the progress bar.

    Raises:
        RedraftError: another world size than asked, or no supervised position.
    """
    set_seed(params.seed)
    accelerator = Accelerator(
        mixed_precision="bf16" if params.precision == "bf16" else "no", cpu=not torch.cuda.is_available()
    )
    if accelerator.num_processes != processes:
        raise RedraftError(
            "The run has another number of processes than the profile asks for.",
            where="train.processes in the profile",
            expected=processes,
            found=accelerator.num_processes,
            cause="on a CPU `accelerate launch` starts one process: use torchrun",
        )
    module = TTTModule(checkpoint.drafter, checkpoint.mapping, ends.embed.float(), ends.head, params.ttt_steps)
    module.to(accelerator.device)
    measured = PackedRows(heldout, params.row_tokens)
    batch_rows = params.batch_tokens // params.row_tokens
    fitted = Fitted(heldout={}, start=evaluate(module, measured, batch_rows))
    if not fitted.start["positions"]:
        raise RedraftError(
            "No held-out position can be measured.",
            where="heldout",
            cause="answers of fewer than two tokens, or a chat template whose answers are not supervised",
        )
    rows = PackedRows(train, params.row_tokens)
    loader = DataLoader(
        rows, batch_size=batch_rows, shuffle=True, generator=torch.Generator().manual_seed(params.seed), drop_last=False
    )
    optimizer = torch.optim.AdamW(
        checkpoint.drafter.parameters(), lr=params.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    wrapped, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    total = max(1, round(params.epochs * len(loader)))
    window, began = Tally(), time.perf_counter()
    with counter(round(params.epochs * train.tokens), title, "token") as bar:
        for step, batch in enumerate(_batches(loader, total)):
            rate = params.lr * lr_factor(step, total, params.warmup)
            for group in optimizer.param_groups:
                group["lr"] = rate
            output = wrapped(batch)
            _backward(accelerator, output, params)
            accelerator.clip_grad_norm_(checkpoint.drafter.parameters(), params.clip)
            optimizer.step()
            optimizer.zero_grad()
            window.add(output)
            seen = int((batch["documents"] > 0).sum()) * processes
            fitted.tokens += seen
            bar.update(seen)
            if (step + 1) % max(1, total // CURVE_POINTS) == 0 or step + 1 == total:
                now = window.metrics()
                fitted.curve.append(
                    {"step": step + 1, "lr": rate, "loss": now["loss_0"], "accuracy": now["accuracy_0"]}
                )
                bar.set_postfix(loss=f"{now['loss_0']:.3f}", accuracy=f"{now['accuracy_0']:.3f}", refresh=False)
                window = Tally()
    fitted.steps, fitted.seconds = total, time.perf_counter() - began
    accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)  # the forward without autocast: measured as at the start
    fitted.heldout = evaluate(module, measured, batch_rows)
    return fitted


def _batches(loader: DataLoader[dict[str, Tensor]], total: int) -> Iterator[dict[str, Tensor]]:
    """`total` batches, passing over `loader` again and again."""
    left = total
    while left:
        for batch in loader:
            yield batch
            left -= 1
            if not left:
                return


def _backward(accelerator: Accelerator, output: StepOutput, params: FitParams) -> None:
    """Backward of sum_k step_weight**k * mean loss of step k, the mean over the positions of all processes.

    Each process contributes its own sum over the global count; DDP averages gradients over processes, which is undone.
    """
    counts = accelerator.reduce(output.trained.sum(1), "sum")  # [K]
    weights = params.step_weight ** torch.arange(params.ttt_steps, device=counts.device)
    sums = (output.losses * output.trained).sum(1)
    accelerator.backward((weights * sums / counts.clamp(min=1)).sum() * accelerator.num_processes)
