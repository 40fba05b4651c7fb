"""The tokenizer of a target's folder: made by its own class, and what its ids are."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError, some
from redraft.frame.files import read_object
from redraft.target.hf import asking_transformers, offline_transformers

CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "tiktoken*")


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
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
    reference = own_class(folder, trust_remote_code)
    with asking_transformers("tokenizer", folder, trust_remote_code):
        tokenizer = _by_own_class(folder, reference) if reference else _by_library(folder, trust_remote_code)
    if not tokenizer.chat_template:
        raise RedraftError(
            "The target has no chat template.",
            where=folder,
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            fix="add the template that you serve with to the target's folder",
        )
    return tokenizer


def own_class(folder: Path, trust_remote_code: bool) -> str | None:
    """`module.Class` of the tokenizer's own code, if the folder's configuration names it (`auto_map`).

    Raises:
        RedraftError: no such name, code that is not in the folder, or that the profile does not let run.
    """
    given = _config(folder).get("auto_map")
    named = given.get("AutoTokenizer") if isinstance(given, dict) else given  # a plain list is the older form
    if isinstance(named, list):  # [slow, fast], one of them null
        named = next((name for name in reversed(named) if name), None)
    if named is None:
        return None
    match = re.fullmatch(r"(?:.+--)?(\w+)\.(\w+)", str(named))  # of ORG/NAME--module.Class the folder's own copy
    if match is None:
        raise RedraftError(
            "The name of the tokenizer's class cannot be read.",
            where=f"{folder / CONFIG}, auto_map.AutoTokenizer",
            expected="module.Class",
            found=named,
        )
    code = folder / f"{match[1]}.py"
    if not code.is_file():
        raise _missing_code(code, str(named))
    if not trust_remote_code:
        raise RedraftError(
            "The tokenizer is Python code of its own.",
            where=code,
            expected="target.trust_remote_code: true in the profile, or --trust-remote-code of a command",
            found="trust_remote_code: false",
            fix="read that code, then set the key",
        )
    return f"{match[1]}.{match[2]}"


def _config(folder: Path) -> dict[str, Any]:
    return read_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def _missing_code(code: Path, asked: str) -> RedraftError:
    return RedraftError(
        "A file of the tokenizer's own code is missing.",
        where=code,
        expected=f"the code that {asked} names",
        found=some(sorted(file.name for file in code.parent.glob("*.py"))) or "no .py file",
        fix="bring every .py file of the model's repository into the target's folder, and rerun the target stage",
    )


def _by_own_class(folder: Path, reference: str) -> Any:
    transformers = offline_transformers()
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    module, name = reference.split(".")
    try:
        own = get_class_from_dynamic_module(reference, folder)
    except AttributeError as error:
        if error.name != name:
            raise
        raise _wrong_class(folder, f"the class {name} in {module}.py", "no such class") from error
    except FileNotFoundError as error:
        if not str(error.filename).endswith(".py"):  # of a file beside it
            raise
        raise _missing_code(Path(error.filename), f"an import of {module}.py") from error
    is_tokenizer = isinstance(own, type) and issubclass(own, transformers.PreTrainedTokenizerBase)
    if not is_tokenizer:
        raise _wrong_class(folder, f"{reference}, a tokenizer class", "a class or function that is no tokenizer")
    tokenizer = own.from_pretrained(folder)
    if not isinstance(tokenizer, own):
        raise _wrong_class(folder, reference, type(tokenizer).__name__)
    return tokenizer


def _by_library(folder: Path, trust_remote_code: bool) -> Any:
    transformers = offline_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    named = str(_config(folder).get("tokenizer_class") or type(tokenizer).__name__)
    known = any(hasattr(transformers, name) for name in (named, named.removesuffix("Fast")))
    if not known and not (folder / "tokenizer.json").is_file():  # transformers makes do with a class of its own
        raise _wrong_class(folder, f"{named} (tokenizer_class)", f"{type(tokenizer).__name__} of transformers")
    return tokenizer


def _wrong_class(folder: Path, expected: str, found: str) -> RedraftError:
    return RedraftError(
        "The tokenizer's class is not the one that the folder names.",
        where=folder / CONFIG,
        expected=expected,
        found=found,
        cause="auto_map and the code are of different revisions, or auto_map was lost when the folder was saved anew",
        fix="take tokenizer_config.json and the .py files from one revision of the model",
    )


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
