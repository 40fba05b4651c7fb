"""Every key of the parameter files with its type and unit: as a page of the docs, and as comments of a new profile."""

import json
import re
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from redraft.frame.params import Params
from redraft.frame.profile import Profile
from redraft.frame.section import Section, section_of

_WIDTH = 40


def page() -> str:
    """The text of `docs/parameters.md`."""
    parts = [
        "# Parameters",
        "Made from the code (`python -m redraft.frame.keys > docs/parameters.md`; a test compares). Types are strict: "
        '`true` is no number and `"10"` no 10; numbers are finite. `null` stands for: not given.',
        "## `params.yaml`: the knobs people turn",
        "A knob that says `profile` takes the value in the profile's section `knobs`; a value in `params.yaml`, or one "
        "by `dvc exp run -S lr=1e-3`, overrides it.",
        _table(Params),
        "## `profiles/<profile>.yaml`: what describes a target",
        "`dvc exp run -S 'profiles/mine.yaml:vocab.slots=16000'` changes one for an experiment.",
    ]
    for name, field in Profile.model_fields.items():
        model = section_of(field.annotation)
        assert model is not None
        parts += [f"### `{name}`", (model.__doc__ or "").strip(), _table(model)]
    return "\n\n".join(parts) + "\n"


def _table(model: type[Section]) -> str:
    rows = ["| key | type | what it is |", "|---|---|---|"]
    rows += [
        f"| `{key}` | {_type(field)} | {_one_line(field).replace('|', chr(92) + '|')} |"
        for key, field in _leaves(model)
    ]
    return "\n".join(rows)


def _leaves(model: type[Section], prefix: str = "") -> list[tuple[str, FieldInfo]]:
    found = []
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        found += _leaves(inner, f"{prefix}{name}.") if inner else [(f"{prefix}{name}", field)]
    return found


def _type(field: FieldInfo) -> str:
    told = _kind(field.annotation, field.metadata)
    return told if field.is_required() else f"{told}; default {json.dumps(field.default)}"


_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its limits."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0], inner[1:])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin is tuple:
        return f"list of {_kind(inner[0])}" if inner[-1] is ... else f"{len(inner)} of {_kind(inner[0])}"
    if origin is dict:
        return f"{_kind(inner[1])} by {_kind(inner[0])}"
    if origin in (Union, UnionType):
        return ", or ".join(_kind(each) for each in inner)
    details = [each for part in metadata for each in getattr(part, "metadata", [part])]
    limits = [
        f"{word} {getattr(each, name):g}" for each in details for name, word in _LIMITS.items() if hasattr(each, name)
    ]
    return " ".join([_NAMES[annotation], *limits])


def _one_line(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def profile_text(values: dict[str, Any], title: str) -> str:
    """A profile as YAML, every key with what it is beside it; `values` by section, as `Profile` takes them."""
    lines = [f"# {title}"]
    for name, field in Profile.model_fields.items():
        model = section_of(field.annotation)
        assert model is not None
        if values.get(name) is None:
            continue
        lines += ["", f"{name}:", *_lines(model, values[name], "  ")]
    return "\n".join(lines) + "\n"


def _lines(model: type[Section], values: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, field in model.model_fields.items():
        if name not in values:
            continue
        inner = section_of(field.annotation)
        if inner and isinstance(values[name], dict):
            lines += [f"{indent}{name}:", *_lines(inner, values[name], indent + "  ")]
            continue
        text = f"{indent}{name}: {_scalar(values[name])}"
        lines.append(f"{text:<{_WIDTH}} # {_one_line(field)}".rstrip(" #"))
    return lines


def _scalar(value: Any) -> str:
    """YAML in one line: JSON, but plain words without quotes."""
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z_/~.][\w./~@+=:-]*[\w/]", value)
        and value not in ("null", "true", "false")
    ):
        return value
    return json.dumps(value)


if __name__ == "__main__":
    print(page(), end="")
