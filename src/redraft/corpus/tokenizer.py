"""The tokenizer of a target's folder: made by its own class, and what its ids are."""

import hashlib
import json
from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError, some
from redraft.frame.files import read_object
from redraft.target.code import TOKENIZER_CONFIG, Trust, allows, make_class, own_class, wrong_class
from redraft.target.hf import asking_transformers, offline_transformers

TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "tiktoken*")


def load_tokenizer(folder: Path, trust_remote_code: Trust = False) -> Any:
    """The tokenizer of a target folder, by the class that the folder names: its own code, or one of transformers.

    Raises:
        RedraftError: no tokenizer files, a tokenizer that cannot be made (one error a reason), no chat template.
    """
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise RedraftError(
            "The target's folder has no tokenizer.",
            where=folder,
            expected="tokenizer.json, or the files of the tokenizer's own class",
            found=some(sorted(file.name for file in folder.glob("*"))) or "no files",
            fix="bring the tokenizer's files into the folder that target.source names, and rerun the target stage",
        )
    named = own_class(folder, trust_remote_code)
    with asking_transformers("tokenizer", folder, allows(trust_remote_code, "tokenizer")):
        tokenizer = _by_own_class(folder, named) if named else _by_library(folder)
    if not tokenizer.chat_template:
        raise RedraftError(
            "The target has no chat template.",
            where=folder,
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            fix="add the template that you serve with to the target's folder",
        )
    return tokenizer


def _by_own_class(folder: Path, named: str) -> Any:
    transformers = offline_transformers()
    own = make_class(folder, named, "tokenizer")
    is_tokenizer = isinstance(own, type) and issubclass(own, transformers.PreTrainedTokenizerBase)
    if not is_tokenizer:
        found = "a class or function that is no tokenizer"
        raise wrong_class(folder, f"{named}, a tokenizer class", found, "tokenizer")
    tokenizer = own.from_pretrained(folder)
    if not isinstance(tokenizer, own):
        raise wrong_class(folder, named, type(tokenizer).__name__, "tokenizer")
    return tokenizer


def _by_library(folder: Path) -> Any:
    transformers = offline_transformers()
    # without trust: it names no code of its own, and a configuration's would run only to be asked for its type
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    config = read_object(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
    named = str(config.get("tokenizer_class") or type(tokenizer).__name__)
    known = any(hasattr(transformers, name) for name in (named, named.removesuffix("Fast")))
    if not known and not (folder / "tokenizer.json").is_file():  # transformers makes do with a class of its own
        found = f"{type(tokenizer).__name__} of transformers"
        raise wrong_class(folder, f"{named} (tokenizer_class)", found, "tokenizer")
    return tokenizer


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


def byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes single bytes (GPT-2's bytes_to_unicode), each with its byte."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def byte_ids(tokenizer: Any) -> set[int]:
    """Ids of tokens that are one byte: the byte-level alphabet, or `<0x00>` to `<0xFF>`."""
    names = byte_alphabet().keys() | {f"<0x{byte:02X}>" for byte in range(256)}
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
                cause="another tokenizer class than the target's own, or its own code is not trusted",
            )


def differing_ids(donor: Any, target: Any) -> dict[int, tuple[str | None, str | None]]:
    """Ids whose token strings differ between two tokenizers: id to (donor's, target's), None where one has none."""
    one, two = ({number: token for token, number in each.get_vocab().items()} for each in (donor, target))
    return {
        number: (one.get(number), two.get(number))
        for number in one.keys() | two.keys()
        if one.get(number) != two.get(number)
    }
