"""Python code that a model's folder brings: the parts of it, which of them may run, and how a class of it is made."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from redraft.frame.errors import RedraftError, some
from redraft.frame.files import read_object

Trust = bool | Collection[str]
"""Parts whose own code may run, `target.trust_remote_code` of a profile; True for all."""

TOKENIZER_CONFIG = "tokenizer_config.json"
_MODELS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModel")
_NAMED = {
    "tokenizer": (TOKENIZER_CONFIG, ("AutoTokenizer",)),
    "configuration": ("config.json", ("AutoConfig",)),
    "model": ("config.json", _MODELS),
}
"""By part, the file whose `auto_map` names its class, and the keys there: the first one that is given counts."""
PARTS = tuple(_NAMED)


def allows(trust: Trust, part: str) -> bool:
    """Whether the code of `part` may run."""
    return trust if isinstance(trust, bool) else part in trust


def named_class(folder: Path, part: str) -> str | None:
    """`module.Class` that the folder names as its own class of `part`; None if it names none.

    Raises:
        RedraftError: a name of another form.
    """
    named = _given(folder, part)
    if named is None:
        return None
    match = re.fullmatch(r"(?:.+--)?(\w+)\.(\w+)", str(named))  # of ORG/NAME--module.Class the folder's own copy
    if match is None:
        file, keys = _NAMED[part]
        raise RedraftError(
            f"The name of the {part}'s class cannot be read.",
            where=f"{folder / file}, auto_map.{keys[0]}",
            expected="module.Class",
            found=named,
        )
    return f"{match[1]}.{match[2]}"


def _given(folder: Path, part: str) -> object:
    file, keys = folder / _NAMED[part][0], _NAMED[part][1]
    given = read_object(file).get("auto_map") if file.is_file() else None
    named = given
    if isinstance(given, dict):
        named = next((given[key] for key in keys if given.get(key)), None)
    elif part != "tokenizer":  # only a tokenizer's may be a plain list, the older form
        named = None
    if isinstance(named, list):  # [slow, fast], one of them null
        named = next((name for name in reversed(named) if name), None)
    return named


def own_class(folder: Path, trust: Trust, part: str = "tokenizer") -> str | None:
    """`module.Class` of the folder's own code for `part`, if it names one (`auto_map`).

    Raises:
        RedraftError: a name that cannot be read, code that is not in the folder, or that the profile does not let run.
    """
    named = named_class(folder, part)
    if named is None:
        return None
    code = folder / f"{named.partition('.')[0]}.py"
    if not code.is_file():
        raise missing_code(code, str(_given(folder, part)), part)
    if not allows(trust, part):
        raise RedraftError(
            f"The {part} is Python code of its own.",
            where=code,
            expected=f"{part} in target.trust_remote_code of the profile, or --trust-remote-code of a command",
            found=f"trust_remote_code: {'false' if isinstance(trust, bool) or not trust else list(trust)}",
            fix=f"read that code, then set the key: trust_remote_code: [{part}], or true for all parts",
        )
    return named


def make_class(folder: Path, named: str, part: str) -> Any:
    """The class `named` (`module.Class`) from the folder's own code, which runs.

    Raises:
        RedraftError: no such class in the module, or a module that it imports is not in the folder.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    module, name = named.split(".")
    try:
        return get_class_from_dynamic_module(named, folder)
    except AttributeError as error:
        if error.name != name:
            raise
        raise wrong_class(folder, f"the class {name} in {module}.py", "no such class", part) from error
    except FileNotFoundError as error:
        if not str(error.filename).endswith(".py"):  # of a file beside it
            raise
        raise missing_code(Path(error.filename), f"an import of {module}.py", part) from error


def missing_code(code: Path, asked: str, part: str) -> RedraftError:
    """For code that `asked` names and that the folder lacks."""
    return RedraftError(
        f"A file of the {part}'s own code is missing.",
        where=code,
        expected=f"the code that {asked} names",
        found=some(sorted(file.name for file in code.parent.glob("*.py"))) or "no .py file",
        fix="bring every .py file of the model's repository into the target's folder, and rerun the target stage",
    )


def wrong_class(folder: Path, expected: str, found: str, part: str) -> RedraftError:
    """For a class that is not the one which the folder's configuration names."""
    file = _NAMED[part][0]
    return RedraftError(
        f"The {part}'s class is not the one that the folder names.",
        where=folder / file,
        expected=expected,
        found=found,
        cause="auto_map and the code are of different revisions, or auto_map was lost when the folder was saved anew",
        fix=f"take {file} and the .py files from one revision of the model",
    )
