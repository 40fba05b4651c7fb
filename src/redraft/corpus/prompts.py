"""Prompts that stand twice: what is measured on a prompt that was trained on is memory."""

import hashlib
import re
import unicodedata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.corpus.rows import Message
from redraft.frame.errors import RedraftError, some

Keys = NDArray[np.uint64]
_SHOWN = 3
_SAME = str.maketrans({**dict.fromkeys("‘’ʼ`", "'"), **dict.fromkeys("‐‑‒–—−", "-")})
_UNSEEN = re.compile("[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]+")
"""Joiners, byte order marks and other hints for writing."""
_WORD = re.compile(r"-(?=\s*\d)|\w+(?:(?:[.']|-(?!\d)|(?<=\d),(?=\d))\w+)*|[^\s-]")
"""A dash is a sign before a number, and joins words; elsewhere it is a mark."""
_MEANING = "-#%&*/@\\[]{}"
"""Punctuation that is no mark of a sentence."""


def spelled(text: str) -> str:
    """`text` without what spelling may change: case, Unicode forms, white space, quotes and the marks of sentences.

    Signs with a meaning of their own stay (C++ is not C, and -1 not 1); of a text of such marks alone everything stays.
    """
    plain = _UNSEEN.sub("", text)
    for _ in range(2):  # the lower case of some characters has another form again
        plain = unicodedata.normalize("NFKC", plain).casefold()
    plain = plain.translate(_SAME)
    return " ".join(each for each in _WORD.findall(plain) if not _mark(each)) or "".join(plain.split())


def _mark(word: str) -> bool:
    return len(word) == 1 and unicodedata.category(word)[0] == "P" and word not in _MEANING


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def prompt_keys(messages: list[Message]) -> list[int]:
    """64-bit hashes of the prompts that are answered: for every answer, what users and tools said before it."""
    said: list[str] = []
    keys: list[int] = []
    for message in messages:
        if message["role"] == "assistant":
            keys += [_key("\0".join(said))] if said else []
        elif message["role"] in ("user", "tool"):
            said.append(spelled(message["content"]))
    return sorted(set(keys))


def tokens_key(ids: list[int], mask: list[int]) -> int:
    """Likewise of a chat that is known by its ids alone."""
    return _key(str(ids[: mask.index(1)] if 1 in mask else ids))


class Prompts:
    """The answered prompts of a split."""

    def __init__(self, keys: Keys, chats: NDArray[np.int64], names: list[str]) -> None:
        """`keys` uint64 [K], of the chats `chats` int64 [K] (rising indices in `names`, their ids)."""
        self.keys, self.chats, self.names = keys, chats, names

    def repeated(self) -> list[str]:
        """Chats with a prompt of an earlier chat, each as `later is earlier`."""
        _, first, back = np.unique(self.keys, return_index=True, return_inverse=True)
        earlier = self.chats[first][back]
        return self._told(earlier != self.chats, earlier, self.names)

    def also_in(self, other: "Prompts") -> list[str]:
        """Chats with a prompt of `other`, each as `this is that`."""
        known, first = np.unique(other.keys, return_index=True)
        place = np.minimum(np.searchsorted(known, self.keys), max(0, len(known) - 1))
        found = known[place] == self.keys if len(known) else np.zeros(len(self.keys), bool)
        there = other.chats[first][place] if len(known) else self.chats
        return self._told(found, there, other.names)

    def _told(self, found: NDArray[np.bool_], there: NDArray[np.int64], names: list[str]) -> list[str]:
        chats, at = np.unique(self.chats[found], return_index=True)
        return [f"{self.names[chat]} is {names[that]}" for chat, that in zip(chats, there[found][at], strict=True)]


def require_apart(told: dict[str, Prompts], max_leaks: float, max_repeated: float, where: object) -> dict[str, Any]:
    """Prompts that stand in two splits or twice in one; `told` by split, those that are trained on and `heldout`.

    Returns counts: `repeated` by split, `heldout_<split>` of held-out chats and `<split>_<split>` of others.

    Raises:
        RedraftError: more of the held-out chats than `max_leaks` are trained on, or more than `max_repeated` of the
            chats of a split repeat a prompt, naming chats.
    """
    repeated = {split: prompts.repeated() for split, prompts in told.items()}
    for split, names in repeated.items():
        if len(names) > max_repeated * len(told[split].names):
            raise RedraftError(
                "Prompts stand more than once in a split.",
                where=f"{where}: {split}",
                expected=f"at most {max_repeated:.0%} of the chats (corpus.max_repeated in the profile)",
                found=f"{len(names):,} of {len(told[split].names):,}: {some(names, _SHOWN)}",
                fix="remove them, or raise the parameter if they are meant",
            )
    others = [split for split in told if split != "heldout"]
    pairs = [("heldout", split) for split in others] + ([(others[1], others[0])] if len(others) == 2 else [])
    leaks = {pair: told[pair[0]].also_in(told[pair[1]]) for pair in pairs}
    for (one, other), names in leaks.items():
        if one == "heldout" and len(names) > max_leaks * len(told[one].names):
            raise RedraftError(
                "The same prompt is held out and trained on.",
                where=f"{where}: {one} and {other}",
                expected=f"at most {max_leaks:.0%} of the held-out chats (corpus.max_leaks in the profile)",
                found=f"{len(names):,} of {len(told[one].names):,}: {some(names, _SHOWN)}",
                fix="remove them from one of the two: figures of held-out chats must be of new ones",
            )
    for what, names in [*((f"twice in {split}", each) for split, each in repeated.items()), *_pairs(leaks)]:
        if names:
            print(f"note: {len(names):,} prompts stand {what}: {some(names, _SHOWN)}")
    return {
        "repeated": {split: len(names) for split, names in repeated.items()},
        **{f"{one}_{other}": len(names) for (one, other), names in leaks.items()},
    }


def _pairs(leaks: dict[tuple[str, str], list[str]]) -> list[tuple[str, list[str]]]:
    return [(f"in {one} and {other}", names) for (one, other), names in leaks.items()]
