"""Chats to token ids and loss mask, by the target's own tokenizer and template.

Only assistant answers are supervised: the content and the end-of-turn token, not the header before it.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError, some
from redraft.frame.files import read_object
from redraft.target.hf import asking_transformers, offline_transformers

Message = dict[str, str]
TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "tiktoken*")


class RenderError(RedraftError):
    """A chat that the chat template does not render."""

    def __init__(self, error: Exception) -> None:
        self.reason = " ".join(str(error).split())[:200] or type(error).__name__
        super().__init__(
            "The chat template does not render a chat.",
            found=f"{type(error).__name__}: {self.reason}",
            cause="roles that do not alternate, a content that is no text, or a chat without a prompt",
        )


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a target folder.

    Raises:
        RedraftError: no tokenizer files, a tokenizer that cannot be made, no chat template.
    """
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise RedraftError(
            "The target's folder has no tokenizer.",
            where=folder,
            expected="tokenizer.json, or the files of the tokenizer's own class",
            found=some(sorted(file.name for file in folder.glob("*"))) or "no files",
            fix="bring the tokenizer's files into the folder that target.source names, and rerun the target stage",
        )
    with asking_transformers("tokenizer", folder, trust_remote_code):
        tokenizer = offline_transformers().AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        raise RedraftError(
            "The target has no chat template.",
            where=folder,
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            fix="add the template that you serve with to the target's folder",
        )
    chat_template(tokenizer)
    return tokenizer


def chat_template(tokenizer: Any) -> tuple[str | None, str]:
    """Name and text of the chat template that is used: of several `default`; None if there is one without a name.

    Raises:
        RedraftError: several, none of which is called `default`.
    """
    given = tokenizer.chat_template
    if not isinstance(given, dict):
        return None, given
    if "default" not in given:
        raise RedraftError(
            "The target has several chat templates, and none is the default.",
            where="chat_template of the tokenizer",
            expected="one that is called default",
            found=some(sorted(given)),
            fix="name the one that you serve with default, or leave it alone in the target's folder",
        )
    return "default", given["default"]


def template_hash(tokenizer: Any) -> str:
    """SHA-256 of the chat template's text."""
    return hashlib.sha256(chat_template(tokenizer)[1].encode()).hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of the vocabulary (token strings and ids) and of the special tokens."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps([vocabulary, sorted(special_ids(tokenizer))]).encode()).hexdigest()


def special_ids(tokenizer: Any) -> set[int]:
    """Ids of special and added tokens: end of turn, chat and tool markers."""
    return set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Special and added tokens by id."""
    return {number: tokenizer.convert_ids_to_tokens(number) for number in sorted(special_ids(tokenizer))}


def stop_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's end of sequence and those of `generation_config.json` in `folder`."""
    path = folder / "generation_config.json"
    named = read_object(path).get("eos_token_id") if path.is_file() else None
    return frozenset([tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]) - {None}


def _byte_alphabet() -> set[str]:
    """The 256 characters by which byte-level BPE writes single bytes (GPT-2's bytes_to_unicode)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    return {chr(byte) for byte in printable} | {chr(256 + rank) for rank in range(256 - len(printable))}


def byte_ids(tokenizer: Any) -> set[int]:
    """Ids of tokens that are one byte: the byte-level alphabet, or `<0x00>` to `<0xFF>`."""
    names = _byte_alphabet() | {f"<0x{byte:02X}>" for byte in range(256)}
    return {number for token, number in tokenizer.get_vocab().items() if token in names}


def forced_ids(tokenizer: Any, *, special: bool, single_bytes: bool) -> set[int]:
    """Ids that a draft vocabulary always holds."""
    return (special_ids(tokenizer) if special else set()) | (byte_ids(tokenizer) if single_bytes else set())


def decodable_ids(tokenizer: Any) -> set[int]:
    """Ids that the tokenizer knows; the embedding may have more rows, as padding."""
    return set(tokenizer.get_vocab().values())


def require_markers(tokenizer: Any) -> None:
    """Refuse a tokenizer whose special tokens do not encode to their own id: chats would be cut into other tokens.

    Raises:
        RedraftError: naming the token, the id in the tokenizer's configuration and the ids that it gives.
    """
    for number, text in special_tokens(tokenizer).items():
        given = tokenizer(text, add_special_tokens=False)["input_ids"]
        if given != [number]:
            raise RedraftError(
                "A special token does not encode to its own id.",
                where=f"tokenizer: {text}",
                expected=[number],
                found=given,
                cause="another tokenizer class than the target's own, or trust_remote_code is off",
            )


def differing_ids(donor: Any, target: Any) -> dict[int, tuple[str | None, str | None]]:
    """Ids whose token strings differ between two tokenizers: id to (donor's, target's), None where one has none."""
    one, two = ({number: token for token, number in each.get_vocab().items()} for each in (donor, target))
    return {
        number: (one.get(number), two.get(number))
        for number in one.keys() | two.keys()
        if one.get(number) != two.get(number)
    }


def render(tokenizer: Any, messages: list[Message], *, header: bool) -> str:
    """`messages` as text by the chat template; with `header` up to where the answer begins.

    Raises:
        RenderError: the template, which is a program of others, raises on them.
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=header)
    except Exception as error:
        raise RenderError(error) from error


def prompt_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Ids of `messages` with the header of the answer that is to be generated; see `render`."""
    return tokenizer(render(tokenizer, messages, header=True), add_special_tokens=False)["input_ids"]


@dataclass
class Sample:
    """One tokenised chat."""

    ids: list[int]
    mask: list[int]
    """1 where the token belongs to an answer, else 0; as long as `ids`."""
    dropped: str | None = None
    """Why nothing is supervised: `no answer`, `boundary` (a token crosses it), `truncated` or `template: ` and why."""
    source: str = ""
    """Where the chat came from, as the corpus file says."""


def tokenize(tokenizer: Any, messages: list[Message], max_length: int) -> Sample:
    """Tokenise one chat of `role` and `content`, cut to `max_length` tokens.

    An answer is what `messages[:i + 1]` adds to `messages[:i]` with its generation prompt, without trailing white
    space. Where the ids of that prefix are not a prefix of the ids of the whole, a token crosses the boundary and
    the sample is dropped rather than shifted by one; so it is where the template refuses a prefix.
    """
    try:
        return _tokenize(tokenizer, messages, max_length)
    except RenderError as refusal:
        return Sample([], [], f"template: {refusal.reason}")


def _tokenize(tokenizer: Any, messages: list[Message], max_length: int) -> Sample:
    ids = tokenizer(render(tokenizer, messages, header=False), add_special_tokens=False)["input_ids"]
    mask = [0] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = prompt_ids(tokenizer, messages[:turn])
        answered = render(tokenizer, messages[: turn + 1], header=False).rstrip()
        end = tokenizer(answered, add_special_tokens=False)["input_ids"]
        if ids[: len(start)] != start or ids[: len(end)] != end:
            return Sample(ids[:max_length], [0] * min(len(ids), max_length), "boundary")
        mask[len(start) : len(end)] = [1] * (len(end) - len(start))
    reason = None if any(mask) else "no answer"
    if reason is None and not any(mask[:max_length]):
        reason = "truncated"
    return Sample(ids[:max_length], mask[:max_length], reason)


def show_sample(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    """A tokenised chat as text, one line a token: `+` where it is supervised, id, and the token in quotes."""
    pairs = zip(ids, mask, strict=True)
    return "".join(f"{'+' if flag else ' '} {number:>7} {tokenizer.decode([number])!r}\n" for number, flag in pairs)
