"""The target of profile `kimi-tiny`: Kimi-K2.5's classes in small, fitted in seconds on the sentences of `tiny`.

What is Kimi's: a text model of DeepSeek-V3's kind (latent attention, experts) nested in a model with a vision tower;
names of tensors and of configuration keys; a tokenizer in Python around tiktoken, whose answers open with a thought.
"""

import base64
import json
import random
import re
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from redraft.target.hf import asking_transformers, offline_transformers
from redraft.target.tiny import SUBJECTS, chats, fit_rows

FILES = Path(__file__).parent / "kimi_tokenizer"
"""The tokenizer's code and its chat template."""
VOCAB = 640
"""Ids: as many as the target has rows."""
RANKS = VOCAB - 32
"""Ids of the ranks; special ones follow."""
MARKERS = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 10: "<|im_system|>",
    17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>",
    30: "[UNK]", 31: "[PAD]",
}  # fmt: skip
"""Special tokens by place behind the ranks; Kimi's markers stand in the same order, the others are reserved."""
WRITTEN = {
    11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>", 22: "<think>", 23: "</think>",
}  # fmt: skip
"""Added tokens that the model writes itself, so they are not special."""
IDS = {name: RANKS + place for place, name in (MARKERS | WRITTEN).items()}
TEXT: dict[str, Any] = {
    "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 128,
    "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
    "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "attention_bias": False, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "max_position_embeddings": 512, "initializer_range": 0.1,
    "rope_scaling": {
        "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "bos_token_id": IDS["[BOS]"], "eos_token_id": IDS["<|im_end|>"], "pad_token_id": IDS["[PAD]"],
    "tie_word_embeddings": False,
}  # fmt: skip
VISION: dict[str, Any] = {
    # as the hub's configuration has them, which servers read
    "patch_size": 14, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed", "merge_type": "sd2_tpool", "merge_kernel_size": [2, 2],
    "video_attn_type": "spatial_temporal", "mm_projector_type": "patchmerger", "mm_hidden_size": 32,
    "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5, "text_hidden_size": 128, "vt_hidden_size": 32,
    "vt_intermediate_size": 64, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1,
    # and as transformers names the same
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
    "pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 4,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "float32",
    "text_config": TEXT, "vision_config": VISION, "projection_hidden_size": 32, "ignore_index": -100,
    "media_placeholder_token_id": IDS["<|media_pad|>"], "image_token_id": IDS["<|media_pad|>"],
    "vision_start_token_id": IDS["<|media_begin|>"], "vision_end_token_id": IDS["<|media_end|>"],
    "video_token_id": VOCAB, "use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "bos_token_id": IDS["[BOS]"], "eos_token_id": IDS["<|im_end|>"], "pad_token_id": IDS["[PAD]"],
    "tie_word_embeddings": False,
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "auto_map": {"AutoProcessor": "media.SmallProcessor", "AutoImageProcessor": "media.SmallImages"},
    "media_proc_cfg": {
        "in_patch_limit": 64, "patch_size": 14, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 8,
        "in_patch_limit_each_frame": 64, "in_patch_limit_video": None, "sample_fps": 2.0,
        "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
    },
}  # fmt: skip
"""Servers of a model with a vision tower ask for it, though no image ever comes."""
GROUP = 32
"""Weights that share a scale."""
PACKED: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*vision_tower.*", "re:.*mm_projector.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
                "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
}  # fmt: skip
"""How the experts of Kimi-K2.5 are kept, in the words of compressed-tensors."""
BATCH = 12
"""Chats of one step."""


def fit_kimi(out: Path, seed: int = 0, packed: bool = False) -> None:
    """Fit the target and save it with its tokenizer to the folder `out`, with `packed` experts in 4 bits as Kimi's.

    Raises:
        RedraftError: tiktoken is not installed.
    """
    transformers = offline_transformers()
    texts = [text for subject in SUBJECTS for question, answer in chats(subject) for text in (question, answer)]
    lay_tokenizer(out, "\n".join([*texts, *map(_thought, texts)]))
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2))
    with asking_transformers("target's tokenizer", out, True):
        tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(out)
    model = transformers.Kimi_K25ForConditionalGeneration(config)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.normal_(std=0.1)  # at zero nobody would miss it
    rows = [_row(tokenizer, question, answer) for subject in SUBJECTS for question, answer in chats(subject)]
    fit_rows(model, rows, IDS["[PAD]"], BATCH)
    model.save_pretrained(out)
    as_on_the_hub(out / "model.safetensors")
    if packed:
        pack_experts(out / "model.safetensors")
    text = {**TEXT, "quantization_config": PACKED} if packed else TEXT
    (out / "config.json").write_text(json.dumps({**CONFIG, "text_config": text}, indent=2))
    (out / "preprocessor_config.json").write_text(json.dumps(IMAGES, indent=2))
    shutil.copy(FILES / "media.py", out)
    _write_generation(out)


def _thought(question: str) -> str:
    return f"They ask: {question.rstrip('?.').split()[-1]}."


def _row(tokenizer: Any, question: str, answer: str) -> list[int]:
    """A chat with the thought that its template would leave out of a finished one."""
    asked = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False)
    return tokenizer.encode(f"{asked}{_thought(question)}</think>{answer}<|im_end|>")


def as_on_the_hub(path: Path) -> None:
    """Rename tensors of transformers' own writing to the names that the hub's files have and servers read."""
    tensors = load_file(path)
    renamed = {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    }
    for name in list(tensors):
        for theirs, ours in renamed.items():
            if name.startswith(theirs):
                tensors[ours + name.removeprefix(theirs)] = tensors.pop(name)
    save_file(tensors, path, {"format": "pt"})


def pack_experts(path: Path) -> None:
    """Put the experts' weights [R, C] of a file into 4 bits: eight an int32, [R, C/8], and bf16 scales [R, C/GROUP]."""
    tensors = load_file(path)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        weight = tensors.pop(name)
        groups = weight.unflatten(1, (-1, GROUP))
        scale = (groups.abs().amax(-1) / 7.5).bfloat16()
        grid = (groups / scale.float()[..., None]).round().clamp(-8, 7).flatten(1)
        nibbles = (grid.long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
        stem = name.removesuffix("weight")
        tensors[f"{stem}weight_packed"] = nibbles.sum(-1).to(torch.int32)  # the topmost bit wraps into the sign
        tensors[f"{stem}weight_scale"] = scale
        tensors[f"{stem}weight_shape"] = torch.tensor(weight.shape)
    save_file(tensors, path, {"format": "pt"})


def lay_tokenizer(out: Path, text: str, **fields: Any) -> Path:
    """Lay the tokenizer into the folder `out`, in place of another; its ranks are fitted to `text`.

    `fields` are added to tokenizer_config.json.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "special_tokens_map.json"):
        (out / name).unlink(missing_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(_ranks(text))]
    (out / "tiktoken.model").write_text("".join(lines))
    for name in ("tokenization_small.py", "tool_words.py", "chat_template.jinja"):
        shutil.copy(FILES / name, out)
    added = {RANKS + place: (name, place in MARKERS) for place, name in sorted((MARKERS | WRITTEN).items())}
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    named = {
        "added_tokens_decoder": {
            str(number): {"content": name, "special": special, **plain} for number, (name, special) in added.items()
        },
        "additional_special_tokens": [name for place, name in MARKERS.items() if 1 < place < 30],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_small.TikTokenTokenizer", None]},
    }
    (out / "tokenizer_config.json").write_text(json.dumps({**named, **fields}, indent=2))
    _write_generation(out)
    return out


def _write_generation(out: Path) -> None:
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": IDS["<|im_end|>"], "max_length": 4096}))


def _ranks(text: str) -> list[bytes]:
    """The 256 bytes in an order of their own, then the commonest pairs of `text`, each merged before the next."""
    ranks = [bytes([byte]) for byte in range(256)]
    random.Random(0).shuffle(ranks)
    words = Counter(re.findall(r"\s?\w+|\s?[^\w\s]+|\s+", text))
    split = {word: [bytes([byte]) for byte in word.encode()] for word in words}
    while len(ranks) < RANKS:
        pairs = Counter[tuple[bytes, bytes]]()
        for word, parts in split.items():
            for pair in pairwise(parts):
                pairs[pair] += words[word]
        one, two = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.append(one + two)
        for parts in split.values():
            for place in range(len(parts) - 2, -1, -1):
                if parts[place : place + 2] == [one, two]:
                    parts[place : place + 2] = [one + two]
    return ranks
