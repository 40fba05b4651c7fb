"""Train a drafter with Accelerate: AdamW, warm-up and cosine decay counted in optimizer steps, clipped gradients."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from redraft.drafter.checkpoint import Checkpoint
from redraft.frame.device import resolve
from redraft.frame.errors import RedraftError
from redraft.frame.launch import listening
from redraft.frame.profile import FitParams
from redraft.frame.progress import counter
from redraft.hidden.rows import Batch, HiddenStates, PackedRows
from redraft.target.ends import Ends
from redraft.train.batches import Batches, ahead, require_share
from redraft.train.measure import Heldout, Tally, as_written, evaluate
from redraft.train.processes import Together, begin, explained
from redraft.train.state import Progress, State, Weights, check_whole, identity, load
from redraft.train.update import Update

CURVE_POINTS = 60
SHOWN_SAMPLES = 8
Row = dict[str, float]


@dataclass
class Fitted:
    """What a training left behind."""

    heldout: Heldout
    """On held-out documents, of the weights that were kept, rounded as they are written."""
    start: Heldout
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
    gate: Callable[[Heldout], None] = lambda start: None,
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
        RedraftError: another world size than asked, no supervised position, numbers that are none, a state that is
            damaged or cannot be saved, or what `gate` raises; told by one process, the others raise SystemExit.
        SystemExit: 143 after SIGTERM, with the state saved.
    """
    accelerator = begin(params.seed, processes)
    state = State(title, identity(accelerator, checkpoint, train, params))
    together = Together(accelerator, state.folder)
    with contextlib.ExitStack() as held:
        with together.agreed():
            require_share(params, processes)
            if together.main:
                held.enter_context(state.alone())
                together.clear()
        held.enter_context(together.ending())
        held.enter_context(explained())
        held.enter_context(listening())
        update = Update.prepare(accelerator, checkpoint, ends, params)
        rows, measured = (PackedRows(states, params.row_tokens) for states in (train, heldout))
        dealt = Batches(rows, params, accelerator.process_index, accelerator.num_processes)
        run = _Run(together, update, dealt, measured, params, state)
        run.take_up(resume)
        run.begin(gate, log)
        run.train(title, log)
    if run.best is not None and together.main:
        checkpoint.drafter.load_state_dict(run.best)
    return run.fitted()


@dataclass
class _Run:
    """One training on one process."""

    together: Together
    update: Update
    batches: Batches
    heldout: PackedRows
    params: FitParams
    state: State
    progress: Progress = field(default_factory=Progress)
    best: Weights | None = None
    """As they are written, rounded to bf16; None: the initial ones."""

    def fitted(self) -> Fitted:
        """What is left behind."""
        progress = self.progress
        return Fitted(
            heldout=progress.kept,
            start=progress.evaluations[0],
            steps=progress.step,
            kept=progress.kept.step,
            tokens=progress.tokens,
            seconds=progress.seconds,
            curve=progress.curve,
            evaluations=[measured.row() for measured in progress.evaluations],
            parts=self.update.laps.medians(),
            precision=resolve(self.params.precision),
            state=self.state,
        )

    def take_up(self, resume: str) -> None:
        """Go on from the saved state, if `resume` wants it and there is one."""
        tell = self.together.accelerator.print
        with self.together.agreed():
            found, why = self.state.find(resume)
            if found and self.together.main:
                check_whole(found)
            self.progress, self.best = load(found) if found else (Progress(), None)
        if why:
            tell(f"{self.state.title}: {why}")
        if found:
            self.together.accelerator.load_state(str(found))
            tell(f"{self.state.title}: goes on after step {self.progress.step:,} of {self.batches.total:,}")

    def begin(self, gate: Callable[[Heldout], None], log: Callable[[str, Row], None]) -> None:
        """Measure before the first step and ask the gate; or tell of what a resumed training did before."""
        progress, main = self.progress, self.together.main
        if progress.evaluations:
            for curve, rows in (("train", progress.curve), ("heldout", [each.row() for each in progress.evaluations])):
                for row in rows if main else ():
                    log(curve, row)
            return
        with as_written(self.update.module):
            start = evaluate(self.update.module, self.heldout, self.params, self.together.accelerator)
        if not start.positions:
            self.together.stop(
                RedraftError(
                    "No held-out position can be measured.",
                    where="heldout",
                    cause="answers of fewer than two tokens, or a chat template whose answers are not supervised",
                )
            )
        if not start.finite:
            self.together.stop(self._diverged(f"held-out losses {start.loss}", 0))
        progress.evaluations.append(start)  # nothing worse than the start is kept
        with self.together.agreed():
            fullest = self.batches.fullest()
        for numbers in fullest:  # so that memory runs out now rather than in the night
            self.update.try_out(Batch.stack([self.batches.rows[number] for number in numbers]))
        with self.together.agreed():
            if main:
                gate(start)
                log("heldout", start.row())

    def train(self, title: str, log: Callable[[str, Row], None]) -> None:
        """Run the steps that are left."""
        progress, total, main = self.progress, self.batches.total, self.together.main
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
                self.update.laps.begin(timed)
                seen, stop, norm = self.update.gradients(next(coming), window)
                if not norm.isfinite():
                    self.together.stop(self._diverged(f"gradient norm {float(norm)}", step + 1))
                self.update.apply(self._rate(step))
                self.update.laps.end()
                progress.step, progress.tokens = step + 1, progress.tokens + seen
                progress.seconds += time.perf_counter() - began
                if timed or step + 1 == total:
                    row, window = self._row(window), Tally()
                    progress.curve.append(row)
                    if main:
                        log("train", row)
                    figures = {"loss": row.get("loss"), "accuracy": row.get("accuracy")}
                    figures["accept"] = progress.evaluations[-1].accept_length
                    told = {name: "–" if value is None else f"{value:.3f}" for name, value in figures.items()}
                    bar.set_postfix(told, refresh=False)
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

    def _rate(self, step: int) -> float:
        """Learning rate of optimizer step `step`, from 0."""
        return self.params.lr * lr_factor(step, self.batches.total, self.params.warmup)

    def _row(self, window: Tally) -> Row:
        """The curve's row of what all processes saw since the last one, without what is undefined."""
        window.reduce(self.together.accelerator)
        step = self.progress.step
        row = {"step": step, "lr": self._rate(step - 1), "loss": window.loss[0], "accuracy": window.accuracy[0]}
        return {name: value for name, value in row.items() if value is not None}

    def _diverged(self, found: str, step: int) -> RedraftError:
        """The error of numbers that are none any more at optimizer step `step`, from 1; 0 is before the first."""
        if not step:
            return RedraftError(
                "The numbers before the first step are not numbers.",
                where="held-out documents",
                expected="finite losses",
                found=found,
                cause="weights of the initial drafter, or hidden states, too large to compute with",
                fix="look at artifacts/initial and artifacts/hidden: the stages that wrote them",
            )
        samples = self.batches.samples(step - 1)
        more = f" and {len(samples) - SHOWN_SAMPLES} more" if len(samples) > SHOWN_SAMPLES else ""
        return RedraftError(
            "The training diverged: its numbers are not numbers any more.",
            where=f"optimizer step {step:,} of {self.batches.total:,}, "
            f"samples {', '.join(samples[:SHOWN_SAMPLES])}{more}",
            expected="finite losses, gradients and weights",
            found=f"{found}, at lr {self._rate(step - 1):g}",
            cause="the learning rate is too high, or these samples are unlike all others",
            fix=f"a smaller lr than {self.params.lr:g}, a longer warmup or a smaller clip: it starts anew with these",
        )

    def _measure(self, log: Callable[[str, Row], None]) -> None:
        progress, accelerator = self.progress, self.together.accelerator
        with as_written(self.update.module):
            found = evaluate(self.update.module, self.heldout, self.params, accelerator)
            found.step = progress.step
            if not found.finite:
                self.together.stop(self._diverged(f"held-out losses {found.loss}", progress.step))
            progress.evaluations.append(found)
            if self.together.main:
                log("heldout", found.row())
            if found.joint_acceptance > progress.kept.joint_acceptance:
                progress.best = len(progress.evaluations) - 1
                prefix = "drafter."
                self.best = {
                    name.removeprefix(prefix): tensor.detach().to("cpu", copy=True).contiguous()
                    for name, tensor in accelerator.get_state_dict(self.update.module).items()
                }

    def _worn_out(self) -> bool:
        """Whether the last `patience` measurements brought nothing better."""
        return len(self.progress.evaluations) - 1 - self.progress.best >= self.params.patience

    def _save(self, window: Tally) -> None:
        accelerator, step = self.together.accelerator, self.progress.step
        fault = self.update.fault(self.batches.read(step - 1)[-1:])
        with self.together.agreed():  # nothing that a training cannot go on from replaces an older state
            if fault:
                raise self._diverged(fault, step)
        everyone = Tally(dict(window.sums))
        everyone.reduce(accelerator)
        self.progress.window = {name: sums.tolist() for name, sums in everyone.sums.items()}
        self.state.save(
            self.progress,
            self.best,
            lambda folder: accelerator.save_state(str(folder)),
            self.together.main,
            self.together.agreed,
        )
