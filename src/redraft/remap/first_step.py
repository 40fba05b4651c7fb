"""The loss of the first step of every option, before any training."""

from redraft.drafter.checkpoint import Checkpoint
from redraft.frame.device import compute_device
from redraft.frame.profile import FitParams
from redraft.frame.progress import progress
from redraft.hidden.rows import HiddenStates, PackedRows
from redraft.remap.fills import FILLS
from redraft.remap.remap import initial
from redraft.target.ends import Ends
from redraft.train.measure import evaluate
from redraft.train.step import TTTModule
from redraft.vocab.mapping import Mapping


def first_steps(
    donor: Checkpoint, mapping: Mapping, ends: Ends, heldout: HiddenStates, params: FitParams
) -> dict[str, dict[str, float]]:
    """What the first training step of every option would read, on held-out documents, in fp32.

    Returns:
        By option (`naive`, `keep_donor_vocab`, `remap_<fill>` for every fill, `scratch`): `positions`; of the first
        draft step `loss` and `accuracy`, each with `_interval`, and `ceiling`; `joint` over all steps. See `evaluate`.
    """
    options = {name: (name, "zero") for name in ("naive", "keep_donor_vocab")}
    options |= {f"remap_{fill}": ("remap", fill) for fill in FILLS}
    options["scratch"] = ("scratch", "zero")
    rows = PackedRows(heldout, params.row_tokens)
    embed = ends.embed.float()
    device = compute_device()
    table = {}
    for name, (init, fill) in progress(options.items(), "first step", "option"):
        start = initial(init, fill, donor, mapping, ends.head, params.seed)
        module = TTTModule(start.drafter, start.mapping, embed, ends.head, params.ttt_steps).to(device)
        found = evaluate(module, rows, params)
        table[name] = {
            "loss": found["loss_0"],
            "loss_interval": found["loss_0_interval"],
            "accuracy": found["accuracy_0"],
            "accuracy_interval": found["accuracy_0_interval"],
            "ceiling": found["ceiling_0"],
            "joint": found[f"joint_{params.ttt_steps - 1}"],
            "positions": found["positions"],
        }
    return table


def best_fill(table: dict[str, dict[str, float]]) -> str:
    """The fill with the lowest first-step loss in a table of `first_steps`: what `fill: auto` takes."""
    return min(FILLS, key=lambda fill: table[f"remap_{fill}"]["loss"])
