"""One optimizer step: gradients over the micro batches of all processes, clipped, then AdamW."""

import contextlib
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from redraft.drafter.checkpoint import Checkpoint
from redraft.frame.device import resolve
from redraft.frame.launch import asked_to_stop
from redraft.frame.profile import FitParams
from redraft.hidden.rows import Batch
from redraft.target.ends import Ends
from redraft.train.laps import Laps
from redraft.train.measure import Tally
from redraft.train.processes import local, whole
from redraft.train.step import TTTModule


@dataclass
class Update:
    """The module that is trained, its optimizer, and how a step is made."""

    accelerator: Accelerator
    module: nn.Module
    """A `TTTModule`, wrapped for its processes."""
    optimizer: torch.optim.Optimizer
    params: FitParams
    anchors: list[Tensor]
    """The initial weights in the order of the trained ones, if there is a pull to them."""
    laps: Laps = field(default_factory=Laps)

    @classmethod
    def prepare(cls, accelerator: Accelerator, checkpoint: Checkpoint, ends: Ends, params: FitParams) -> "Update":
        """The module of a copy of `checkpoint.drafter`, on the device; parts that are frozen are so in both."""
        for name in params.loss.freeze:
            checkpoint.drafter.get_submodule(name).requires_grad_(False)
        # the state dict that is loaded at the end is the checkpoint's own; FSDP shards the copy
        drafter = deepcopy(checkpoint.drafter)
        precision = resolve(params.precision)
        module = TTTModule(drafter, checkpoint.mapping, ends.embed.float(), ends.head, params.ttt_steps, precision)
        module.to(accelerator.device)
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        fused = accelerator.device.type in ("cpu", "cuda")
        optimizer = torch.optim.AdamW(trained, lr=params.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        wrapped, optimizer = accelerator.prepare(module, optimizer)
        anchors = [w.detach().clone() for w in wrapped.parameters() if w.requires_grad] if params.loss.l2 else []
        return cls(accelerator, wrapped, optimizer, params, anchors)

    def gradients(self, micro: list[Batch], window: Tally) -> tuple[int, bool, Tensor]:
        """The clipped gradients of a step; `window` counts this process's micro batches.

        The loss is sum_k step_weight**k * sum of step k / its count, counted over all micro batches of all processes
        before the first forward; DDP's mean over processes is undone. Accelerate divides by nothing here: it does not
        know of the accumulation.

        Returns:
            Document tokens that all processes saw; whether one was told to stop; and the gradients' norm before
            clipping, the same on every process and not finite if a loss or a gradient of any is not.
        """
        loss, accelerator = self.params.loss, self.accelerator
        inner: TTTModule = accelerator.unwrap_model(self.module)
        micro = [batch.to(accelerator.device) for batch in micro]
        counts = torch.stack([inner.contributing(batch, loss.mask, loss.oov) for batch in micro]).sum(0)
        tokens = torch.stack([(batch.documents > 0).sum() for batch in micro]).sum()
        told = accelerator.reduce(torch.cat([counts, tokens[None], tokens.new_tensor([asked_to_stop()])]))
        counts, seen, stop = told[:-2], int(told[-2]), bool(told[-1])
        if loss.denominator == "tokens":
            counts = torch.full_like(counts, self.params.batch_tokens)
        weights = self.params.step_weight ** torch.arange(self.params.ttt_steps, device=counts.device)
        scale = accelerator.num_processes * weights / counts.clamp(min=1)
        self.laps("data")
        for number, batch in enumerate(micro):
            last = number + 1 == len(micro)
            with contextlib.nullcontext() if last else accelerator.no_sync(self.module):
                output = self.module(batch, loss.mask, self.laps)
                accelerator.backward((scale * (output.losses * output.contributing(loss.oov)).sum(1)).sum())
            window.add(output)
            del output  # its logits, before the next forward makes as many
            self.laps("backward")
        trained = self._trained
        for weight, anchor in zip(trained, self.anchors, strict=False):
            assert weight.grad is not None
            weight.grad.add_(weight.detach() - anchor, alpha=loss.l2)
        return seen, stop, whole(accelerator.clip_grad_norm_(trained, self.params.clip))

    def apply(self, rate: float) -> None:
        """AdamW with what `gradients` left, at the learning rate `rate`."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.laps("optimizer")

    def try_out(self, batch: Batch) -> None:
        """One forward and backward that change nothing, to see whether memory holds them."""
        output = self.module(batch.to(self.accelerator.device), self.params.loss.mask)
        self.accelerator.backward(output.losses.sum() * 0.0)
        self.optimizer.zero_grad()

    def fault(self, micro: list[Batch]) -> str | None:
        """What is wrong with the weights, if anything: they are not finite, or no step can follow on `micro`."""
        broken = [name for name, weight in self.module.named_parameters() if not local(weight).isfinite().all()]
        self.laps.begin(False)
        _, _, norm = self.gradients(micro, Tally())
        self.optimizer.zero_grad()
        if broken:
            return f"weights that are not finite: {', '.join(broken[:3])}"
        return None if norm.isfinite() else f"a gradient norm of {float(norm)} under the weights it left"

    @property
    def _trained(self) -> list[Tensor]:
        return [weight for weight in self.module.parameters() if weight.requires_grad]
