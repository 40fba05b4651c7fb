"""The report: one Markdown page over the committed metrics, with plots beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redraft.frame.params import Params
from redraft.report import bench, slots
from redraft.report.plots import bars, drift, lines, save_svg
from redraft.report.tables import figure, interval, markdown

STAGES = ("corpus", "donor", "vocab", "audit", "extract", "remap", "train", "probe", "bench")
PLOTTED = ("donor", "train", "heldout", "drift")
LEAST_GAIN = 0.005
"""Of held-out accuracy: training that brings less brought nothing."""
Metrics = dict[str, Any]


def draw(folder: Path, metrics: Metrics, curves: dict[str, list[dict[str, float]]]) -> None:
    """Write the plots of the page to `folder`."""
    remap = metrics["remap"]
    first = {option: row["loss"] for option, row in remap["first_step"].items()}
    trained = {name: curves[name] for name in ("donor", "train") if curves[name]}
    step = ("step", "optimizer step")
    plots = {
        "first_step": bars("Loss of the first step", "nats per position", first, ("ln N", remap["ln_n"])),
        "loss": lines("Training loss, first draft step", step, ("loss", "nats per position"), trained),
        "accuracy": lines("Training accuracy, first draft step", step, ("accuracy", "share of positions"), trained),
        "heldout": lines(
            "Held out, during training",
            step,
            ("joint", "drafts right in a row"),
            {"joint acceptance": curves["heldout"]},
        ),
        "drift": drift(curves["drift"]),
        "acceptance": bars("Drafts accepted, by position", "share of verify steps", _accepted(metrics["probe"])),
        **bench.plots(metrics["bench"]),
        **slots.plots(metrics),
    }
    for name, spec in plots.items():
        save_svg(folder / f"{name}.svg", spec)


def _accepted(probe: Metrics) -> dict[str, float]:
    return {name.removeprefix("accepted_at_"): probe[name] for name in probe if name.startswith("accepted_at_")}


def page(params: Params, metrics: Metrics) -> str:
    """The text of `report.md`."""
    sections = [
        _verdict(params, metrics),
        _audit(metrics["audit"], metrics["vocab"]),
        _first_step(params, metrics["remap"]),
        *_layers(params, metrics["remap"].get("layers")),
        _training(params, metrics["train"], metrics["donor"], metrics["probe"]),
        _probe(params, metrics["probe"], metrics["bench"]["engine"].get("dtype")),
        bench.section(metrics["bench"], _drawn, _engine(metrics["bench"]["engine"])),
        *slots.section(metrics, _drawn),
        _data(metrics),
    ]
    return "\n\n".join(sections) + "\n"


def _drawn(name: str, text: str) -> str:
    return f"![{text}](report/{name}.svg)"


def _verdict(params: Params, metrics: Metrics) -> str:
    measured, probe, train = metrics["bench"], metrics["probe"], metrics["train"]
    told, next_ = f"**{measured['verdict']}**", f"{bench.verdicts(measured, _no_gain(params, train))}\n\n"
    if _stale(metrics):
        told, next_ = "**stale: the bench measured another drafter than this one.** Next: `dvc repro` to its end.", ""
    return (
        f"{told}\n\nMeasured on {bench.machine(measured)}; {_engine(measured['engine'])}.\n\n{next_}"
        f"Profile `{params.profile}`, init `{params.init}`, lr {params.lr:g}, {params.epochs:g} epochs, "
        f"seed {params.seed}.\n\n"
        f"- {_lossless(probe)}\n"
        f"- Served accept length {probe['accept_length']:.2f} of at most {params.spec_steps + 1} "
        f"(bonus token included).\n"
        f"- Held-out accuracy of the first draft {figure(train['start']['accuracy_0'], '.1%')} before training, "
        f"{figure(train['heldout']['accuracy_0'], '.1%')} after; ceiling "
        f"{figure(train['heldout']['ceiling_0'], '.1%')}."
    )


def _stale(metrics: Metrics) -> bool:
    """Whether the bench is of another drafter than the stages before it, by the hash of the weights."""
    hashes = [metrics[stage].get("drafter") for stage in ("train", "probe") if metrics[stage].get("drafter")]
    return any(known != metrics["bench"].get("drafter") for known in hashes)


def _no_gain(params: Params, train: Metrics) -> str | None:
    """What to do first where training hardly moved the held-out accuracy, or made it worse."""
    before, after = train["start"]["accuracy_0"], train["heldout"]["accuracy_0"]
    if before is None or after is None:
        return None
    least, gained = max(LEAST_GAIN, train["heldout"].get("accuracy_0_interval") or 0.0), after - before
    if gained >= least:
        return None
    told = f"training moved held-out accuracy by {100 * gained:+.1f} points"
    if gained <= -least:
        return f"{told}: a lower lr than {params.lr:g}"
    return f"{told}, less than ± {100 * least:.1f} can tell: a higher lr than {params.lr:g}, or more epochs"


def _audit(audit: Metrics, vocab: Metrics) -> str:
    rows = [
        ("slots", f"{audit['donor_slots']:,}", f"{audit['new_slots']:,}"),
        ("order", audit["donor_order"], audit["new_order"]),
        ("ids only here", f"{audit['donor_only']:,}", f"{audit['new_only']:,}"),
    ]
    named = {"train": "training", "heldout": "held-out"}
    rows += [
        (f"coverage of {named[split]} tokens", figure(share["donor"], ".1%"), figure(share["new"], ".1%"))
        for split, share in audit["coverage"].items()
    ]
    rows += [
        (f"{kind} tokens, of {found['all']}", f"{found['donor']}", f"{found['new']}")
        for kind, found in audit["tokens"].items()
    ]
    heads = audit["heads"]
    return (
        f"## Audit of the mapping\n\n{audit['verdict']}\n\n"
        f"{markdown(('', 'donor', 'new'), rows)}\n\n"
        f"In both: {audit['shared']:,} ids, {audit['same_slot']:,} of them in the same slot, {audit['moved']:,} "
        f"moved (by {audit['drift_mean']:.1f} slots on average, {audit['drift_max']:,} at most). "
        f"Forced in: {vocab['forced']}; topped up with unseen ids: {vocab['padded']}.\n\n"
        f"The donor's head rows are {heads['norm_ratio']:.2f} times as long as the target's for the same ids, at a "
        f"mean cosine of {heads['cosine']:.2f}: how far the target's rows can stand in for missing ones.\n\n"
        f"{_by_source(vocab)}"
        f"{_drawn('drift', 'Slots by which a shared id moved, against its slot in the donor')}"
    )


def _by_source(vocab: Metrics) -> str:
    """The sources that the new vocabulary covers least, held out; nothing if the corpus names none."""
    told = vocab["coverage_by_source"]["heldout"]
    shares = sorted(((source, share) for source, share in told.items() if share is not None), key=lambda row: row[1])
    if len(shares) < 2:
        return ""
    rows = [(source, f"{share:.1%}") for source, share in shares[:4]]
    return f"{markdown(('least covered held-out sources', 'new vocabulary'), rows)}\n\n"


def _first_step(params: Params, remap: Metrics) -> str:
    rows = [
        (
            f"`{option}`",
            interval(row["loss"], row["loss_interval"], ".3f"),
            interval(row["accuracy"], row["accuracy_interval"], ".1%"),
            figure(row["joint"], ".1%"),
            figure(row["ceiling"], ".1%"),
        )
        for option, row in remap["first_step"].items()
    ]
    sources = ", ".join(f"{number:,} {name}" for name, number in remap["rows"].items() if number)
    positions = next(iter(remap["first_step"].values()))["positions"]
    return (
        f"## The first step of every option\n\n"
        f"Before any training, on {positions:,} held-out positions. Knowing nothing is ln N = {remap['ln_n']:.3f} "
        f"at an accuracy of {remap['chance']:.3%}; ± is a 95 % interval.\n\n"
        f"{markdown(('option', 'loss', 'accuracy', f'all {params.ttt_steps} drafts right', 'ceiling'), rows)}\n\n"
        f"Training started from `{remap['option']}`; its head rows: {sources}.\n\n"
        f"{_drawn('first_step', 'Loss of the first step of every option, with ln N')}"
    )


def _layers(params: Params, layers: Metrics | None) -> list[str]:
    """Which layers the donor was trained on; nothing where an older redraft measured."""
    if layers is None:
        return []

    def cells(row: Metrics, name: str, form: str) -> list[str]:
        kinds = (name, f"{name}_difference")
        return [interval(row.get(kind), row.get(f"{kind}_interval"), form) for kind in kinds]

    rows = [
        (
            f"inputs of {row['layers']}",
            *cells(row, "loss", ".3f"),
            *cells(row, "accuracy", ".1%"),
            *cells(row, "joint", ".3f"),
        )
        for row in layers["shifts"].values()
    ]
    header = (
        "donor, its own mapping, fed with",
        "loss",
        "change",
        "accuracy",
        "change",
        f"right in a row of {params.ttt_steps}",
        "change",
    )
    left = "".join(f" Shift {shift} was not measured: {why}." for shift, why in layers["left_out"].items())
    told = f"**{layers['verdict']}**" if layers["best"] else layers["verdict"]
    table = (
        f"\n\n{markdown(header, rows)}\n\nOn {layers['positions']:,} held-out positions of {layers['documents']:,} "
        f"documents; changes are to the aux layers of this run on the same positions; ± is a 95 % interval."
    )
    return [f"## Which layers was the donor trained on?\n\n{told}{left}{table * bool(rows)}"]


def _training(params: Params, train: Metrics, donor: Metrics, probe: Metrics) -> str:
    def row(name: str, measures: Metrics, step: int) -> Sequence[str]:
        shares = (figure(measures[f"{key}_{step}"], ".1%") for key in ("accuracy", "joint", "ceiling"))
        return (name, figure(measures[f"loss_{step}"], ".3f"), *shares)

    rows = [row(f"draft {step + 1}, before", train["start"], step) for step in range(params.ttt_steps)]
    rows += [row(f"draft {step + 1}, after", train["heldout"], step) for step in range(params.ttt_steps)]
    begun = f" The donor was trained here for {donor['steps']} steps." if donor["source"] == "train" else ""
    kept = f" The weights of step {train['kept_step']:,} were kept: the best joint acceptance on held-out documents."
    walked = (
        f"Walking the held-out answers as a server would predicts an accept length of "
        f"{figure(train['start'].get('accept_length'), '.3f')} before and "
        f"{figure(train['heldout'].get('accept_length'), '.3f')} after training "
        f"({figure(train['heldout'].get('verify_steps'), ',')} verify steps); "
        f"the probe measured {probe['accept_length']:.3f} on its own prompts."
    )
    if params.ttt_steps != params.spec_steps:
        walked += f" They differ in the drafts of a step: {params.ttt_steps} walked, {params.spec_steps} served."
    return (
        f"## Training\n\n{train['steps']:,} optimizer steps in {train['precision']}, {train['tokens']:,} tokens.{kept}"
        f"{begun} Held out:\n\n"
        f"{markdown(('', 'loss', 'accuracy', 'right so far', 'ceiling'), rows)}\n\n{walked}\n\n"
        f"{_drawn('loss', 'Training loss')} {_drawn('accuracy', 'Training accuracy')} "
        f"{_drawn('heldout', 'Joint acceptance on held-out documents')}"
    )


def _probe(params: Params, probe: Metrics, benched: str | None) -> str:
    """`benched` is the dtype of the bench."""
    outputs, dtype = probe["outputs"], probe["engine"].get("dtype")
    text = (
        f"## Probe\n\n{outputs['prompts']} held-out prompts, {params.spec_steps} drafted tokens a step, "
        f"{_engine(probe['engine'])}: accept length {probe['accept_length']:.3f}, accept rate "
        f"{probe['accept_rate']:.1%} over {probe['verify_steps']:,} verify steps. {_lossless(probe)}{_parity(probe)}"
    )
    if dtype == "float32" != benched:
        text += (
            f"\n\nThe probe serves in float32, where greedy outputs must be equal token for token, and the bench in "
            f"{benched}, as models are served for speed: their accept lengths differ by what rounding moves."
        )
    if "bf16" in probe:
        rounded = probe["bf16"]
        text += f"\n\nIn bf16 {rounded['equal']} of {rounded['prompts']} outputs are equal, "
        text += f"accept length {rounded['accept_length']:.3f}."
        if rounded["different"]:
            text += (
                f" Where two part, their tokens' logits are at most {rounded['largest_gap']:.3f} apart; the same "
                f"position computed in a forward of another size changes a logit by up to "
                f"{rounded['largest_shape_noise']:.3f}."
            )
    return f"{text}\n\n{_drawn('acceptance', 'Share of verify steps that accepted the draft at each position')}"


def _lossless(probe: Metrics) -> str:
    outputs = probe["outputs"]
    if probe["lossless"] is None:
        return "No server without speculation was there: whether the output is the target's own was not compared."
    if not probe["lossless"]:
        dtype = probe["engine"].get("dtype") or "a dtype that was not told"
        return (
            f"{outputs['equal']} of {outputs['prompts']} outputs with speculation equal the plain ones; in "
            f"{dtype} rounding decides the others (largest gap {outputs['largest_gap']:.3f})."
        )
    ties = f", {outputs['ties']} part at a near-tie" if outputs["ties"] else ""
    return (
        f"Greedy output with speculation equals the target's own, token for token: {outputs['equal']} of "
        f"{outputs['prompts']} outputs, {outputs['compared_tokens']:,} tokens{ties}."
    )


def _parity(probe: Metrics) -> str:
    """The other measurements of the accept length, where there are any."""
    parity = probe.get("parity")
    if not parity:
        return " It was held against no other measurement."
    names = {"torch": "the engine `torch` on the same prompts", "walked": "the walk of training"}
    told = " and ".join(f"{parity[key]:.3f} by {name}" for key, name in names.items() if key in parity)
    same = f"; {parity['agreeing']} prompts agree step for step" if "agreeing" in parity else ""
    return f"\n\nParity: {told} (apart by {parity['difference']:+.3f} ± {parity['interval']:.3f}{same})."


def _engine(engine: Metrics) -> str:
    """Who measured, on what."""
    version = engine.get("version") or engine.get("torch") or "of a version that was not told"
    device, dtype = (engine.get(name) or f"{name} untold" for name in ("device", "dtype"))
    threads = f", {engine['threads']} threads" if "threads" in engine else ""
    return f"{engine['engine']} {version}, {device}{threads}, {dtype}"


def _data(metrics: Metrics) -> str:
    counts = ("chats", "turns", "tokens", "supervised", "cut", "dropped")
    rows = [
        (split, *(f"{row[name]:,}" for name in counts))
        for split, row in metrics["corpus"].items()
        if split != "leaks" and row["chats"]
    ]
    leaks = {name: count for name, count in metrics["corpus"]["leaks"].items() if name.startswith("heldout_")}
    hidden = metrics["extract"]
    header = ("corpus", "chats", "answers", "tokens", "supervised", "cut answers", "dropped")
    return (
        f"## Data\n\n{markdown(header, rows)}\n\n"
        f"{sum(leaks.values()):,} held-out chats have a prompt that is also trained on.\n\n"
        f"Hidden states: {hidden['bytes_per_token']:,} bytes a token; "
        + (
            "no sample was extracted again."
            if hidden["recheck_difference"] is None
            else f"a sample extracted again alone differs by {hidden['recheck_difference']:.2%} at most."
        )
    )
