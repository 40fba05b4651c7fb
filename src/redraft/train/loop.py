"""Train a drafter with Accelerate: AdamW, warm-up and cosine decay counted in optimizer steps, clipped gradients."""

import contextlib
import math
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from torch import Tensor, nn

from redraft.drafter import model as drafter_model
from redraft.drafter.checkpoint import Checkpoint
from redraft.frame.device import compute_device, resolve
from redraft.frame.errors import RedraftError
from redraft.frame.launch import asked_to_stop, listening
from redraft.frame.profile import FitParams
from redraft.frame.progress import counter
from redraft.hidden.rows import HiddenStates, PackedRows
from redraft.target.ends import Ends
from redraft.train import attention, batches, measure
from redraft.train import step as train_step
from redraft.train.batches import Batch, Batches, ahead
from redraft.train.laps import Laps
from redraft.train.measure import Tally, evaluate, joint_acceptance
from redraft.train.state import Progress, State, Weights, load, weights_hash
from redraft.train.step import TTTModule

CURVE_POINTS = 60
Row = dict[str, float]


@dataclass
class Fitted:
    """What a training left behind."""

    heldout: dict[str, Any]
    """`evaluate` on held-out documents, of the weights that were kept."""
    start: dict[str, Any]
    """The same before training."""
    steps: int
    """Optimizer steps done."""
    kept: int
    """The step whose weights were kept."""
    tokens: int
    """Document tokens seen, padding not counted."""
    seconds: float
    """Of the training loop, held-out measurements not counted."""
    curve: list[Row]
    """One row now and then: step, lr, loss and accuracy of the first draft step over the rows since the last one."""
    evaluations: list[Row]
    """One row for each held-out measurement: step, loss, accuracy, joint acceptance, predicted accept length."""
    parts: dict[str, float]
    """Milliseconds of an optimizer step by part, the median over the curve's rows."""
    precision: str
    """`bf16` or `fp32`."""
    state: State


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
    resume: str = "auto",
    gate: Callable[[dict[str, Any]], None] = lambda start: None,
    log: Callable[[str, Row], None] = lambda curve, row: None,
) -> Fitted:
    """Train `checkpoint.drafter` in place; the weights with the best joint acceptance on held-out documents stay.

    Args:
        checkpoint: the initial drafter and its mapping.
        ends: the target's embedding and head.
        train: documents to train on.
        heldout: documents to measure on.
        params: learning rate, passes, batch and precision.
        processes: the world size that must be there.
        title: of the progress bar, and of the saved state.
        resume: `auto`, `never` or `must`, see `State.find`.
        gate: told the measurement before the first step on the main process; raises to stop.
        log: told of every row of the curves as it comes, on the main process.

    Raises:
        RedraftError: another world size than asked, no supervised position, or what `gate` raises.
        SystemExit: 143 after SIGTERM, with the state saved.
    """
    accelerator = _accelerator(params, processes)
    state = State(title, _identity(accelerator, checkpoint, train, params))
    with state.alone(accelerator.is_main_process), listening():
        run = _Run.prepare(accelerator, checkpoint, ends, train, heldout, params, state, resume)
        run.begin(gate, log)
        run.train(title, log)
    progress = run.progress
    start = progress.evaluations[0]
    if run.best is not None and accelerator.is_main_process:
        checkpoint.drafter.load_state_dict(run.best)
    chosen = progress.evaluations[progress.best]
    return Fitted(
        heldout={name: value for name, value in chosen.items() if name != "step"},
        start={name: value for name, value in start.items() if name != "step"},
        steps=progress.step,
        kept=chosen["step"],
        tokens=progress.tokens,
        seconds=progress.seconds,
        curve=progress.curve,
        evaluations=list(map(heldout_row, progress.evaluations)),
        parts=run.laps.medians(),
        precision=resolve(params.precision),
        state=state,
    )


def heldout_row(measured: dict[str, Any]) -> Row:
    """One row of the held-out curve."""
    row = {"step": measured["step"], "loss": measured["loss_0"], "accuracy": measured["accuracy_0"]}
    return {**row, "joint": joint_acceptance(measured), "accept_length": measured.get("accept_length", 1.0)}


def _accelerator(params: FitParams, processes: int) -> Accelerator:
    set_seed(params.seed)
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")  # Accelerate knows no other name for it yet
    accelerator = Accelerator(
        mixed_precision="no",  # see TTTModule.forward
        cpu=compute_device().type == "cpu",
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],  # the embedding: 4.7 GB a step
    )
    if accelerator.num_processes != processes:
        raise RedraftError(
            "The run has another number of processes than the profile asks for.",
            where="train.processes in the profile",
            expected=processes,
            found=accelerator.num_processes,
            cause="on a CPU `accelerate launch` starts one process: use torchrun",
        )
    return accelerator


def _identity(
    accelerator: Accelerator, checkpoint: Checkpoint, train: HiddenStates, params: FitParams
) -> dict[str, Any]:
    """Everything that decides the weights: two trainings that agree in it may share a state."""
    decisive = params.model_dump(exclude={"save_steps"})
    code = [Path(str(module.__file__)) for module in (attention, batches, measure, train_step, drafter_model)] + [
        Path(__file__)
    ]
    return {
        "params": {**decisive, "precision": resolve(params.precision)},
        "mapping": checkpoint.mapping.hash,
        "initial": weights_hash(checkpoint.drafter.state_dict()),
        "hidden": train.manifest["fingerprint"],
        "processes": accelerator.num_processes,
        "distributed": str(accelerator.distributed_type.value),
        "device": accelerator.device.type,
        "torch": torch.__version__,
        "code": weights_hash(
            {path.name: torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in code}
        ),
    }


def _require_finite(row: Row) -> None:
    if not math.isfinite(row["loss"]):
        raise RedraftError(
            "The loss is not a number any more.",
            where=f"optimizer step {row['step']:,.0f}",
            found=row["loss"],
            cause="the learning rate is too high",
            fix="a smaller lr, or a longer warmup",
        )


@dataclass
class _Run:
    """One training on one process."""

    accelerator: Accelerator
    module: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    heldout: PackedRows
    params: FitParams
    state: State
    progress: Progress
    best: Weights | None
    """None: the initial ones."""
    anchors: list[Tensor]
    """The initial weights, if there is a pull to them."""
    laps: Laps = field(default_factory=Laps)

    @classmethod
    def prepare(
        cls,
        accelerator: Accelerator,
        checkpoint: Checkpoint,
        ends: Ends,
        train: HiddenStates,
        heldout: HiddenStates,
        params: FitParams,
        state: State,
        resume: str,
    ) -> "_Run":
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
        rows = PackedRows(train, params.row_tokens)
        dealt = Batches(rows, params, accelerator.process_index, accelerator.num_processes)
        found, why = state.find(resume)
        if why:
            accelerator.print(f"{state.title}: {why}")
        progress, best = load(found) if found else (Progress(), None)
        if found:
            accelerator.load_state(str(found))
            accelerator.print(f"{state.title}: goes on after step {progress.step:,} of {dealt.total:,}")
        return cls(
            accelerator,
            wrapped,
            optimizer,
            dealt,
            PackedRows(heldout, params.row_tokens),
            params,
            state,
            progress,
            best,
            anchors,
        )

    def begin(self, gate: Callable[[dict[str, Any]], None], log: Callable[[str, Row], None]) -> None:
        """Measure before the first step and ask the gate; or tell of what a resumed training did before."""
        progress, main = self.progress, self.accelerator.is_main_process
        if progress.evaluations:
            for curve, rows in (("train", progress.curve), ("heldout", list(map(heldout_row, progress.evaluations)))):
                for row in rows if main else ():
                    log(curve, row)
            return
        start = evaluate(self.module, self.heldout, self.params, self.accelerator)
        if not start["positions"]:
            raise RedraftError(
                "No held-out position can be measured.",
                where="heldout",
                cause="answers of fewer than two tokens, or a chat template whose answers are not supervised",
            )
        progress.evaluations.append({**start, "step": 0})  # nothing worse than the start is kept
        self.try_fullest()
        stopped: RedraftError | None = None
        if main:
            try:
                gate(start)
                log("heldout", heldout_row(progress.evaluations[0]))
            except RedraftError as error:
                stopped = error
        if int(self.accelerator.reduce(torch.tensor(int(stopped is not None), device=self.accelerator.device))):
            raise stopped or SystemExit(1)  # all processes stop, none waits for another

    def try_fullest(self) -> None:
        """One forward and backward of the fullest rows, so that memory runs out now rather than in the night."""
        rows = self.batches.rows
        size = self.params.micro_tokens // self.params.row_tokens
        fullest = sorted(range(len(rows)), key=lambda number: -rows.filled(number))[:size]
        batch = torch.utils.data.default_collate([rows[number] for number in fullest])
        output = self.module(self._here(batch), self.params.loss.mask)
        self.accelerator.backward(output.losses.sum() * 0.0)
        self.optimizer.zero_grad()

    def train(self, title: str, log: Callable[[str, Row], None]) -> None:
        """Run the steps that are left."""
        progress, total, main = self.progress, self.batches.total, self.accelerator.is_main_process
        every = max(1, total // CURVE_POINTS)
        measured = {round(total * (number + 1) / self.params.evals) for number in range(self.params.evals)}
        window = Tally.of(progress.window) if main else Tally()  # saved sums are those of all processes
        whole = round(self.params.epochs * self.batches.rows.states.tokens)
        bar = counter(whole, title, "token", initial=progress.tokens, shown=main)
        saved = progress.step
        coming = ahead(map(self.batches.read, range(progress.step, total)))
        with bar:
            for step in range(progress.step, total) if not self._worn_out() else ():
                began = time.perf_counter()
                timed = (step + 1) % every == 0
                self.laps.begin(timed)
                rate = self.params.lr * lr_factor(step, total, self.params.warmup)
                seen, stop = self._step(next(coming), rate, window)
                self.laps.end()
                progress.step, progress.tokens = step + 1, progress.tokens + seen
                progress.seconds += time.perf_counter() - began
                if timed or step + 1 == total:
                    window.reduce(self.accelerator)
                    now, window = window.metrics(), Tally()
                    row = {"step": step + 1, "lr": rate, "loss": now["loss_0"], "accuracy": now["accuracy_0"]}
                    _require_finite(row)
                    progress.curve.append(row)
                    if main:
                        log("train", row)
                    accept = progress.evaluations[-1].get("accept_length", 1.0)
                    figures = {"loss": f"{row['loss']:.3f}", "accuracy": f"{row['accuracy']:.3f}"}
                    bar.set_postfix({**figures, "accept": f"{accept:.2f}"}, refresh=False)
                bar.update(seen)
                if step + 1 in measured:
                    self._measure(log)
                worn_out = self._worn_out()
                if stop or (progress.step - saved >= self.params.save_steps and step + 1 < total and not worn_out):
                    self._save(window)
                    saved = progress.step
                if stop:
                    raise SystemExit(143)
                if worn_out:
                    break

    def _here(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.accelerator.device, non_blocking=True) for name, tensor in batch.items()}

    def _step(self, micro: list[Batch], rate: float, window: Tally) -> tuple[int, bool]:
        """One optimizer step; document tokens that all processes saw, and whether one was told to stop.

        The loss is sum_k step_weight**k * sum of step k / its count, counted over all micro batches of all processes
        before the first forward; DDP's mean over processes is undone. Accelerate divides by nothing here: it does not
        know of the accumulation.
        """
        loss = self.params.loss
        inner: TTTModule = self.accelerator.unwrap_model(self.module)
        micro = [self._here(batch) for batch in micro]
        counts = torch.stack([inner.contributing(batch, loss.mask, loss.oov) for batch in micro]).sum(0)
        tokens = torch.stack([(batch["documents"] > 0).sum() for batch in micro]).sum()
        told = self.accelerator.reduce(torch.cat([counts, tokens[None], tokens.new_tensor([asked_to_stop()])]))
        counts, seen, stop = told[:-2], int(told[-2]), bool(told[-1])
        if loss.denominator == "tokens":
            counts = torch.full_like(counts, self.params.batch_tokens)
        weights = self.params.step_weight ** torch.arange(self.params.ttt_steps, device=counts.device)
        scale = self.accelerator.num_processes * weights / counts.clamp(min=1)
        self.laps("data")
        for number, batch in enumerate(micro):
            last = number + 1 == len(micro)
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.module):
                output = self.module(batch, loss.mask, self.laps)
                self.accelerator.backward((scale * (output.losses * output.contributing(loss.oov)).sum(1)).sum())
            window.add(output)
            del output  # its logits, before the next forward makes as many
            self.laps("backward")
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        trained = [weight for weight in self.module.parameters() if weight.requires_grad]
        for weight, anchor in zip(trained, self.anchors, strict=False):
            assert weight.grad is not None
            weight.grad.add_(weight.detach() - anchor, alpha=loss.l2)
        self.accelerator.clip_grad_norm_(trained, self.params.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.laps("optimizer")
        return seen, stop

    def _measure(self, log: Callable[[str, Row], None]) -> None:
        progress = self.progress
        found = evaluate(self.module, self.heldout, self.params, self.accelerator)
        progress.evaluations.append({**found, "step": progress.step})
        if self.accelerator.is_main_process:
            log("heldout", heldout_row(progress.evaluations[-1]))
        scores = [joint_acceptance(row) for row in progress.evaluations]
        if scores[-1] > scores[progress.best]:
            progress.best = len(scores) - 1
            weights = self.accelerator.get_state_dict(self.module)
            prefix = "drafter."
            self.best = {
                name.removeprefix(prefix): tensor.detach().to("cpu", copy=True).contiguous()
                for name, tensor in weights.items()
            }

    def _worn_out(self) -> bool:
        """Whether the last `patience` measurements brought nothing better."""
        return len(self.progress.evaluations) - 1 - self.progress.best >= self.params.patience

    def _save(self, window: Tally) -> None:
        accelerator = self.accelerator
        everyone = Tally(dict(window.sums))
        everyone.reduce(accelerator)
        self.progress.window = {name: sums.tolist() for name, sums in everyone.sums.items()}
        self.state.save(
            self.progress,
            self.best,
            lambda folder: accelerator.save_state(str(folder)),
            accelerator.is_main_process,
            accelerator.wait_for_everyone,
        )
