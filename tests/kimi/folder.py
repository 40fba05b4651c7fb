"""Writes a small tokenizer of Kimi's kind into a target's folder: Python around tiktoken, and no tokenizer.json."""

import base64
import json
import random
import re
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
VOCAB = 640
"""Ids: as many as the tiny target has rows."""
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
RANKS = VOCAB - 32
UNICODE = " héllo wörld naïve 世界 世間 你好世界 👍🏽 👩‍💻 🙂🙂 Ελλάδα привет def f(x):\n    return x + 1\n" * 20


def kimi_folder(out: Path, text: str = "", **fields: object) -> Path:
    """Lay the tokenizer into `out`, in place of another; the ranks are fitted to `text` (default: the tiny corpus).

    `fields` are added to tokenizer_config.json.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "special_tokens_map.json"):
        (out / name).unlink(missing_ok=True)
    ranks = _ranks(text or (HERE.parent.parent / "data/tiny/train.jsonl").read_text() + UNICODE)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (out / "tiktoken.model").write_text("".join(lines))
    for name in ("tokenization_small.py", "tool_words.py", "chat_template.jinja"):
        shutil.copy(HERE / name, out)
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
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": RANKS + 2, "max_length": 4096}))
    return out


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
