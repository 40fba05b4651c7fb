"""Texts to ids, many at once: what stands between markers is encoded once, however many texts hold it.

The prompts of a chat are beginnings of one another. A fast tokenizer cuts a text at its added tokens before anything
else, so that the ids of a text are those of its pieces, and the pieces of all prompts are encoded once.
"""

import json
import re
import unicodedata
from typing import Any

from redraft.corpus.rows import UnusableError
from redraft.corpus.tokenizer import byte_alphabet

_TRIED = 64
"""Texts that are encoded whole as well."""


def whole(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of each text; no marker is added at its ends: the template writes them.

    Raises:
        UnusableError: the tokenizer, which may be a program of others, raises on them.
    """
    try:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]
    except Exception as error:
        raise UnusableError("encode", str(error) or type(error).__name__) from error


class Encoder:
    """Ids of texts, as `tokenizer(text, add_special_tokens=False)` gives them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._cut = _pattern(tokenizer)
        self._number = tokenizer.get_vocab() if self._cut else {}
        self._tried = 0
        self._bytes, self._form = _bytes(tokenizer)

    def keeps(self, text: str) -> bool:
        """Whether the ids of `text` are known to hold all of it: its bytes are tokens, and nothing is normalised."""
        normal = self._form is None or unicodedata.is_normalized(self._form, text)
        return normal and not text.encode().translate(None, self._bytes)

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text; see `whole`."""
        if not texts:
            return []
        if self._cut is None:
            return whole(self.tokenizer, texts)
        cut = [self._cut.split(text) for text in texts]  # pieces and, at odd places, markers
        known: dict[str, list[int]] = {piece: [] for pieces in cut for piece in pieces[::2] if piece}
        try:
            encoded = self.tokenizer.backend_tokenizer.encode_batch_fast(list(known), add_special_tokens=False)
        except Exception as error:
            raise UnusableError("encode", str(error)) from error
        for piece, encoding in zip(known, encoded, strict=True):
            known[piece] = encoding.ids
        known[""] = []
        found = [self._joined(pieces, known) for pieces in cut]
        if self._tried < _TRIED:
            first = texts[: _TRIED - self._tried]
            self._tried += len(first)
            if whole(self.tokenizer, first) != found[: len(first)]:  # no tokenizer is known that comes here
                self._cut = None
                return whole(self.tokenizer, texts)
        return found

    def _joined(self, pieces: list[str], known: dict[str, list[int]]) -> list[int]:
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(self._number[piece])
            else:
                ids += known[piece]
        return ids


def _bytes(tokenizer: Any) -> tuple[bytes, Any]:
    """Bytes that are tokens of a byte-level tokenizer, and the Unicode form that it brings texts into, if any."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return b"", None
    parts = json.loads(backend.to_str())
    kind = (parts.get("normalizer") or {}).get("type")
    byte_level = parts["model"]["type"] == "BPE" and '"ByteLevel"' in json.dumps(parts.get("pre_tokenizer"))
    if not byte_level or kind not in (None, "NFC"):
        return b"", None
    known = tokenizer.get_vocab()
    return bytes(byte for name, byte in byte_alphabet().items() if name in known), kind


def _pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """The added tokens at which a text may be cut; None where the ids of pieces need not be those of the whole."""
    from transformers import PreTrainedTokenizerFast

    kind, backend = type(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    own = [getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) for name in ("__call__", "_encode_plus")]
    first_differs = '"prepend_scheme":"first"' in json.dumps(json.loads(backend.to_str()), separators=(",", ":"))
    if any(own) or first_differs or backend.truncation or backend.padding or tokenizer.split_special_tokens:
        return None
    tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.content]
    if any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in tokens) or not tokens:
        return None
    longest_first = sorted((token.content for token in tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")
