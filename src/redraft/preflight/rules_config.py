"""Rules of the preflight on `config.json`, the layers, the target and the server. docs/preflight.md has the table."""

from collections.abc import Callable, Iterator
from functools import partial

from redraft.drafter.names import ARCHITECTURE
from redraft.preflight.facts import SHAPE, Facts, Finding
from redraft.preflight.releases import DEEPSEEK, KIMI, NEWEST, OLDEST
from redraft.target.ends import target_hash
from redraft.target.folder import TARGET_RECORD

error, note = partial(Finding, level="error"), partial(Finding, level="note")
Findings = Iterator[Finding]
Rule = Callable[[Facts], Findings]

EXPORT = "redraft export --for sglang=={release} writes it anew"
_MLA = "Eagle3DeepseekV2ForCausalLM"
_READ = ("Llama", "Qwen", "GptOss", "Glm4", "MiniMaxM2")
"""Beginnings of architectures whose models are known to capture aux layers."""
_UNSEEN = ("rope_theta", "rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim")
"""What can change without a shape that no longer fits."""
_REPLACED = "the server replaces the drafter's embedding by the target's"


def foreign(facts: Facts) -> bool:
    """Whether it is a drafter of another class, to which these rules do not apply."""
    return facts.fields.get("architectures") == [_MLA] or "transformer_layer_config" in facts.fields


def architecture(facts: Facts) -> Findings:
    """The class that is built."""
    found = facts.fields.get("architectures")
    say = partial(error, "architecture", found=f"architectures {found}")
    if found == [_MLA] and facts.release.many_layers:
        yield note(
            "architecture",
            found=f"architectures {found}",
            effect="an MLA drafter: SGLang serves it, but names, shapes and mapping are not checked here",
            fix="compare accept length after the start with 1.00",
        )
    elif found == [_MLA]:
        yield say(effect="refuses to start: the class came with 0.5.12", fix="serve with 0.5.12 or later")
    elif foreign(facts):
        yield say(effect="refuses to start: a drafter in the form of speculators", fix=_export(facts))
    elif found != [ARCHITECTURE]:
        effect = "refuses to start, or fails later with an AttributeError on hot_token_id"
        yield say(effect=effect, fix=f'"architectures": ["{ARCHITECTURE}"]')


def _export(facts: Facts) -> str:
    return EXPORT.format(release=facts.release)


def kind(facts: Facts) -> Findings:
    """Fields that choose code rather than sizes."""
    if facts.fields.get("model_type") != "llama":
        yield error(
            "model-type",
            found=f"model_type {facts.fields.get('model_type')!r}",
            effect="refuses to start (ValueError: Unrecognized model), or reads the fields as another model's",
            fix='"model_type": "llama"',
        )
    if facts.fields.get("hidden_act") not in (None, "silu"):
        yield error(
            "hidden-act",
            found=f"hidden_act {facts.fields['hidden_act']!r}",
            effect="refuses to start: ValueError, unsupported activation",
            fix="choose another donor",
        )
    layers = facts.fields.get("num_hidden_layers", 32)
    further = any(name.startswith(("layers.1.", "model.layers.1.")) for name in (e.name for e in facts.weights.entries))
    if layers != 1 and not (facts.release.many_layers and further and not facts.record):
        effect = "its other layers get no weights: silent, accept length near 1.00"
        yield error(
            "num-layers",
            found=f"num_hidden_layers {facts.fields.get('num_hidden_layers', 'absent, which means 32')}",
            effect=effect if facts.release.many_layers else "refuses to start: EAGLE3 currently only supports 1 layer",
            fix='"num_hidden_layers": 1' if not further else "serve with 0.5.12 or later",
        )


def sizes(facts: Facts) -> Findings:
    """Sizes that have to be there, and have to be the target's."""
    absent = [name for name in SHAPE if facts.number(name) is None]
    absent += [] if facts.fields.get("rms_norm_eps") else ["rms_norm_eps"]
    if absent:
        yield error(
            "config-field",
            found=f"absent, or no number: {', '.join(absent)}",
            effect="transformers fills in sizes of a Llama 7B: an AssertionError at load; rms_norm_eps silently 1e-6",
            fix=_export(facts),
        )
    vocab, hidden, target = facts.number("vocab_size"), facts.number("hidden_size"), facts.target
    if vocab not in (None, target.vocab):
        yield error(
            "vocab-size",
            found=f"vocab_size {vocab}, the target has {target.vocab}",
            effect=f"{_REPLACED}, of another V: ids mean other tokens",
            fix="the drafter belongs to another target: redraft remap",
        )
    if hidden is not None and "target_hidden_size" not in facts.fields and hidden != target.hidden:
        yield error(
            "hidden-size",
            found=f"hidden_size {hidden}, the target has {target.hidden}",
            effect="a matmul fails at the first forward or graph capture",
            fix="the drafter belongs to another target",
        )


def other_width(facts: Facts) -> Findings:
    """`target_hidden_size`: its presence decides whose embedding is used."""
    if "target_hidden_size" not in facts.fields:
        return
    value, hidden = facts.fields["target_hidden_size"], facts.number("hidden_size")
    say = partial(error, "target-hidden-size", found=f"target_hidden_size {value}")
    if value is None:
        yield say(effect="null counts as another width: no shared embedding, or a TypeError", fix="leave the key out")
    elif value != facts.target.hidden:
        yield say(effect=f"the target's states are {facts.target.hidden} wide: a matmul fails", fix="correct it")
    elif value == hidden:
        fix = "leave the key out"
        yield note("target-hidden-size", found=f"target_hidden_size {value}", effect="none: it is equal", fix=fix)
    elif "embed_tokens.weight" not in facts.named:
        effect = "the drafter's own embedding is used, and there is none: silent, accept length 1.00"
        yield say(effect=effect, fix="add embed_tokens.weight")


def positions(facts: Facts) -> Findings:
    """Positions against the served context, and what training saw."""
    context = facts.context or facts.target.positions
    own = facts.number("max_position_embeddings") or 2048
    if context is not None and own < context:
        yield error(
            "positions",
            found=f"max_position_embeddings {own}"
            + ("" if "max_position_embeddings" in facts.fields else " (absent, the default)")
            + f", served context {context}",
            effect=f"refuses to start: ValueError, Target model's context_length ({context}) is greater than the "
            f"derived context_length ({own})",
            fix=f"start with --context-length {own}, or redraft export --for sglang=={facts.release} "
            f"--context-length {context}",
        )
    training = facts.record.get("training") or {}
    longest = training.get("max_length") or training.get("row_tokens")
    if context is not None and longest is not None and longest < context:
        yield note(
            "trained-length",
            found=f"trained on documents of at most {longest} tokens, served context {context}",
            effect="accept length past that is not known, and was seen to fall (SGLang issue 6783)",
            fix="probe with prompts as long as those of service",
        )


def rope(facts: Facts) -> Findings:
    """Rotary positions: what is there, what wins, and forms that redraft does not train."""
    modern, scaling = facts.part("rope_parameters"), facts.part("rope_scaling")
    inner, outer = modern.get("rope_theta"), facts.fields.get("rope_theta")
    if inner is None and outer is None:
        yield error(
            "rope-theta",
            found="neither rope_theta nor rope_parameters.rope_theta",
            effect="silent: 10000 is used; unless that is the drafter's, accept length falls with position",
            fix="write the rope_theta that it was trained with",
        )
    elif outer is None:
        yield note(
            "rope-theta",
            found=f"rope_theta {inner} in rope_parameters alone",
            effect="releases that run on transformers 4 look at the top level and silently take 10000",
            fix="write rope_theta at top level as well",
        )
    elif inner not in (None, outer):
        yield error(
            "rope-conflict",
            found=f"rope_theta {outer}, rope_parameters.rope_theta {inner}",
            effect="silent: rope_parameters wins; one of the two is not what it was trained with",
            fix="write the same twice",
        )
    form = {"rope_type": modern.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"}
    form |= {name: facts.fields.get(name, modern.get(name)) for name in ("partial_rotary_factor", "rope_is_neox_style")}
    usual = {"rope_type": ("default",), "partial_rotary_factor": (None, 1), "rope_is_neox_style": (None, True)}
    odd = ", ".join(f"{name} {value}" for name, value in form.items() if value not in usual[name])
    if odd:
        yield (error if facts.record else note)(
            "rope-scaled",
            found=odd,
            effect="the server turns positions like this; redraft trains plain, whole, NeoX-style ones",
            fix="leave it out for a drafter of redraft; for another compare with its training",
        )


def edited(facts: Facts) -> Findings:
    """`config.json` against what `redraft.json` remembers of training."""
    rope = facts.part("rope_parameters").get("rope_theta", facts.fields.get("rope_theta"))
    now = {**facts.fields, "rope_theta": rope}
    shape = facts.record.get("shape") or {}
    changed = [name for name in _UNSEEN if name in shape and now.get(name) not in (None, shape[name])]
    if changed:
        yield error(
            "config-edited",
            found=", ".join(f"{name} {now[name]}, trained with {shape[name]}" for name in changed),
            effect="silent: it computes otherwise than it was trained, accept length falls",
            fix="write the values of training back",
        )


def other_target(facts: Facts) -> Findings:
    """The target of training against the one that is served."""
    trained = facts.record.get("target")
    if trained and (facts.target.folder / TARGET_RECORD).is_file() and trained != target_hash(facts.target.folder):
        yield error(
            "other-target",
            found="redraft.json names another target than this folder",
            effect="silent: states and embedding are another model's, accept length falls",
            fix="serve the target that it was trained for, or train it for this one",
        )


def norms(facts: Facts) -> Findings:
    """Switches around the norms: what trainers write, releases compute otherwise or not at all."""
    if facts.flag("norm_output"):
        harmful = facts.record and facts.release.many_layers
        yield (error if harmful else note)(
            "norm-output",
            found="norm_output true",
            effect="from 0.5.12 the normed state is fed to the next draft step, before that the flag is ignored; "
            "SpecForge means something else by it",
            fix="leave the key out, unless it was trained with post-norm feedback (EAGLE 3.1)",
        )
    if facts.flag("norm_before_residual"):
        yield (note if facts.record else error)(
            "norm-before-residual",
            found="norm_before_residual true",
            effect="ignored: the residual is the un-normed state, so a drafter trained with it accepts little",
            fix="serve it with vLLM, or choose another donor",
        )
    for flag in ("norm_before_fc", "fc_norm", "use_aux_norm"):
        known = facts.release.norm_before_fc if flag == "norm_before_fc" else facts.release.many_layers
        if facts.flag(flag) and (facts.record or not known):
            yield error(
                "norm-flag",
                found=f"{flag} true",
                effect="a norm that this drafter has no weights for" if known else "ignored silently by this release",
                fix="leave the key out for a drafter of redraft; else serve with 0.5.23 or later",
            )
    for flag, name in (("bias", "fc.bias"), ("attention_bias", "midlayer.self_attn.o_proj.bias")):
        if facts.flag(flag) and name not in facts.named:
            yield error(
                "bias",
                found=f"{flag} true, no {name}",
                effect="silent: a bias without data is added",
                fix=f'"{flag}": false',
            )


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
    if len(set(layers)) < len(layers) or any(layer not in range(depth) for layer in layers):
        yield error(
            "layers-range",
            found=f"inputs of layers {list(layers)}, the target has {depth} layers",
            effect="fewer states than fc takes (the last layer's output is no layer's input): a matmul fails",
            fix=f"distinct layers from 0 to {depth - 1}",
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
    family = "DeepSeek" if facts.target.deepseek else "other than DeepSeek's"
    said = f"SGLang {facts.release} captures inputs of layers {list(eager)} (ids {facts.ids}, family {family})"
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
            fix=_export(facts) if eager != facts.trained else "serve with 0.5.11 or later, or without CUDA graphs",
        )


def server(facts: Facts) -> Findings:
    """Release, algorithm and target."""
    release, target = facts.release, facts.target
    if facts.algorithm.upper() != "EAGLE3":
        yield error(
            "algorithm",
            found=f"--speculative-algorithm {facts.algorithm}",
            effect="no aux layer is captured, fc is skipped and the target's head is used: garbage drafts, no message",
            fix="--speculative-algorithm EAGLE3",
        )
    if not OLDEST <= release[:3] <= NEWEST:
        read = f"0.5.5 to {'.'.join(map(str, NEWEST))} were read"
        effect = f"{read}: it is taken for the nearest"
        yield note("release-unread", found=f"SGLang {release}", effect=effect, fix="compare accept length with 1.00")
    least = {KIMI: (0, 5, 10, 1), **dict.fromkeys(DEEPSEEK, (0, 5, 5, 0))}.get(target.architecture, (0, 0, 0, 0))
    if release < least:
        yield error(
            "target-hooks",
            found=f"{target.architecture} with SGLang {release}",
            effect="refuses to start: the target does not implement set_eagle3_layers_to_capture (AttributeError)",
            fix=f"serve with {type(release)(*least)} or later",
        )
    if not target.deepseek and not target.architecture.startswith(_READ):
        yield note(
            "target-unread",
            found=f"target {target.architecture or 'without a name'}",
            effect="whether it captures aux layers, and how it reads ids, is not known; it is taken for a Llama",
            fix="look for set_eagle3_layers_to_capture in its model file",
        )
    if target.quantised:
        yield note(
            "target-quantised",
            found="the target has a quantization_config",
            effect="with --quantization given, the drafter inherits it",
            fix="--speculative-draft-model-quantization unquant",
        )
    if release.partial_sums:
        fix = "--enforce-disable-flashinfer-allreduce-fusion (0.5.10.post1 and later), or 0.5.14 and later"
        effect = "with --tp-size above 1 and a fused all-reduce the captured states are partial sums: silent"
        yield note("tp-capture", found=f"SGLang {release}", effect=effect, fix=fix)


def dtype(facts: Facts) -> Findings:
    """What `--dtype auto` makes of the two configurations."""
    own = facts.fields.get("dtype") or facts.fields.get("torch_dtype")
    mine, its = ("bfloat16" if kind == "bfloat16" else "float16" for kind in (own, facts.target.dtype))
    if mine != its:
        yield note(
            "dtype-config",
            found=f"dtype {own} in the drafter's config.json, {facts.target.dtype} in the target's",
            effect=f"--dtype auto runs the drafter in {mine} beside a target in {its}",
            fix="give --dtype bfloat16",
        )


RULES = (
    server, architecture, kind, sizes, other_width, dtype, positions, rope, edited, other_target, norms,
    layer_ids, layer_count, layer_meaning,
)  # fmt: skip
