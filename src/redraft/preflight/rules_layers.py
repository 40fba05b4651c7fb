"""Rules of the preflight on the layers that feed a drafter. docs/preflight.md has the table."""

from redraft.drafter.layers import family, last_layer
from redraft.preflight.facts import Facts, Findings, error, export, note


def layer_ids(facts: Facts) -> Findings:
    """How ids are written, and whether the server can capture them and feed `fc` with them."""
    if facts.part("eagle_config").get("use_aux_hidden_state") is False:
        yield error(
            "layers-off",
            found="use_aux_hidden_state false",
            effect="no aux layer is captured: garbage drafts, accept length near 1.00",
            fix='"use_aux_hidden_state": true',
        )
    top = facts.fields.get("eagle_aux_hidden_state_layer_ids")
    if facts.ids is None and isinstance(top, list):
        default = list(facts.captured.eager)
        same = top in (default, [layer - 1 for layer in default])
        yield (note if same else error)(
            "layers-top-level",
            found=f"ids {top} at top level only",
            effect=f"they do not choose what is captured: the default layers are, inputs of {default}",
            fix="move them into eagle_config",
        )
    elif facts.ids is None:
        yield note(
            "layers-absent",
            found="no eagle_aux_hidden_state_layer_ids",
            effect=f"the default layers are captured, inputs of {list(facts.captured.eager)}",
            fix="write them into eagle_config",
        )
    if not facts.ids_are_numbers:
        yield error("layers-range", found=f"ids {facts.ids}", effect="the default layers are captured", fix="numbers")
        return
    layers, depth = facts.captured.eager, facts.target.depth
    last = last_layer(depth, facts.target.architecture, facts.release)
    if len(set(layers)) < len(layers) or any(not 0 <= layer <= last for layer in layers):
        yield error(
            "layers-range",
            found=f"ids {facts.ids}, read as inputs of layers {list(layers)}; the target has {depth} layers",
            effect="fewer states than fc takes (the last layer's output is no layer's input): a matmul fails",
            fix=f"distinct layers from 0 to {last}",
        )


def layer_count(facts: Facts) -> Findings:
    """States captured, states that `fc` is built for, states that its file takes."""
    if not facts.ids_are_numbers or facts.fan_in % facts.aux_width:
        return
    taken, built, given = facts.fan_in // facts.aux_width, facts.states, len(facts.captured.eager)
    if not taken == built == given:
        yield error(
            "layers-count",
            found=f"fc takes {taken} states, is built for {built}, and {given} are captured",
            effect="AssertionError at load (Attempted to load weight ...), or a matmul fails at the first forward",
            fix="as many ids in eagle_config as fc takes states"
            + ("" if facts.release.many_layers else "; before 0.5.12 that is 3"),
        )
    elif taken == 1 and facts.aux_width == facts.number("hidden_size"):
        effect = "the state is as wide as the embedding, so fc is skipped: silent, accept length near 1.00"
        yield error("fc-skipped", found="one aux layer", effect=effect, fix="train with three aux layers")


def layer_meaning(facts: Facts) -> Findings:
    """Whether the captured layers are those of training, by release and family."""
    if not facts.ids_are_numbers:
        return
    eager, graphs = facts.captured.eager, facts.captured.graphs
    read = family(facts.target.architecture, facts.release)
    said = f"SGLang {facts.release} captures inputs of layers {list(eager)} (ids {facts.ids}; for this target {read})"
    said += f", in CUDA graphs {list(graphs)}" if graphs != eager else ""
    if facts.trained is None:
        yield note(
            "layers-untold",
            found=said,
            effect="whether it was trained on these cannot be told: nothing names its layers",
            fix="compare with its training; one off costs about 0.1 accept length, or all of it",
        )
    elif not eager == graphs == facts.trained:
        yield error(
            "layers-shifted",
            found=f"{said}; trained on inputs of {list(facts.trained)}",
            effect="silent: the drafter is fed other states than it was trained on",
            fix=export(facts) if eager != facts.trained else "serve with 0.5.11 or later, or without CUDA graphs",
        )


RULES = (layer_ids, layer_count, layer_meaning)
