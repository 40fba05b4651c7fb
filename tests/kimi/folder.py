"""Writes the small tokenizer of Kimi's kind into a target's folder; its ranks know more than one language."""

from pathlib import Path

from redraft.target.kimi_tiny import MARKERS, RANKS, VOCAB, WRITTEN, lay_tokenizer

__all__ = ["MARKERS", "RANKS", "VOCAB", "WRITTEN", "kimi_folder"]
UNICODE = " héllo wörld naïve 世界 世間 你好世界 👍🏽 👩‍💻 🙂🙂 Ελλάδα привет def f(x):\n    return x + 1\n" * 20


def kimi_folder(out: Path, text: str = "", **fields: object) -> Path:
    """Lay the tokenizer into `out`, fitted to `text` (default: the tiny corpus and `UNICODE`)."""
    tiny = Path(__file__).parent.parent.parent / "data/tiny/train.jsonl"
    return lay_tokenizer(out, text or tiny.read_text() + UNICODE, **fields)
