"""Rules of the preflight on the drafter's `config.json`. docs/preflight.md has the table."""

from functools import partial

from redraft.drafter.config import window
from redraft.drafter.names import ARCHITECTURE
from redraft.preflight.facts import SHAPE, Facts, Findings, error, export, note, object_or_reason
from redraft.preflight.rope import used_theta

_MLA = "Eagle3DeepseekV2ForCausalLM"
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
        yield say(effect="refuses to start: a drafter in the form of speculators", fix=export(facts))
    elif found != [ARCHITECTURE]:
        effect = "refuses to start, or fails later with an AttributeError on hot_token_id"
        yield say(effect=effect, fix=f'"architectures": ["{ARCHITECTURE}"]')


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
    absent += [] if facts.real("rms_norm_eps") else ["rms_norm_eps"]
    if not absent and not facts.shaped:
        absent = ["sizes of which tensors can be made"]
    if absent:
        yield error(
            "config-field",
            found=f"absent, or no number that can be: {', '.join(absent)}",
            effect="transformers fills in sizes of a Llama 7B: an AssertionError at load; rms_norm_eps silently 1e-6",
            fix=export(facts),
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


def edited(facts: Facts) -> Findings:
    """`config.json` against what `redraft.json` remembers of training."""
    now, shape = {**facts.fields, "rope_theta": used_theta(facts.fields, facts.release)}, facts.remembered("shape")
    changed = [name for name in _UNSEEN if name in shape and now.get(name) not in (None, shape[name])]
    if changed:
        yield error(
            "config-edited",
            found=", ".join(f"{name} {now[name]}, trained with {shape[name]}" for name in changed),
            effect="silent: it computes otherwise than it was trained, accept length falls",
            fix="write the values of training back",
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


def quantised(facts: Facts) -> Findings:
    """Configurations that make the server build quantised layers."""
    said = [name for name in ("quantization_config", "compression_config") if facts.fields.get(name) is not None]
    path = facts.folder / "hf_quant_config.json"
    side = object_or_reason(path) if path.is_file() else {}
    inner = side.get("quantization", side) if isinstance(side, dict) else {}
    if isinstance(side, str):
        said.append(f"{path.name}, which cannot be read ({side})")
    elif isinstance(inner, dict) and inner.get("quant_algo"):
        said.append(f"{path.name}, quant_algo {inner['quant_algo']}")
    kinds = sorted({entry.dtype for name, entry in facts.named.items() if name in facts.wanted})
    if said:
        yield error(
            "draft-quantised",
            found=f"{', '.join(said)} beside tensors of {', '.join(kinds) or 'no dtype'}",
            effect="the server builds quantised layers for them: refuses to start, or garbage drafts",
            fix=f"take it out, it is another model's: {export(facts)}",
        )


def windowed(facts: Facts) -> Findings:
    """A sliding window: no release reads it from here."""
    found = window(facts.fields)
    if found is None:
        return
    size = next((facts.number(name) for name in ("sliding_window", "sliding_window_size", "window_size")), None)
    flag = f"--speculative-draft-window-size {size or 'TOKENS'}"
    yield (note if facts.release.window_flag or facts.record else error)(
        "draft-window",
        found=found,
        effect="ignored: the drafter attends to everything, so accept length changes with the context",
        fix="take it out: redraft trains full attention"
        if facts.record
        else flag + ("" if facts.release.window_flag else ", from 0.5.12 on"),
    )


def dtype(facts: Facts) -> Findings:
    """What `--dtype auto` makes of the two configurations."""
    own = facts.fields.get("dtype") or facts.fields.get("torch_dtype")
    mine, its = ("bfloat16" if kind == "bfloat16" else "float16" for kind in (own, facts.target.dtype))
    if mine != its:
        yield note(
            "dtype-config",
            found=f"dtype {own} in the drafter's config.json, {facts.target.dtype} in the target's",
            effect="--dtype auto keeps bfloat16 and makes float16 of everything else: the drafter runs in "
            f"{mine}, the target in {its}",
            fix="give --dtype bfloat16",
        )


RULES = (architecture, kind, sizes, other_width, dtype, quantised, windowed, edited, norms)
