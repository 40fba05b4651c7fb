"""A section of a parameter file: typed strictly, read by the rules of YAML 1.2, refused with the nearest known name.

DVC rewrites `lr: 5.0e-5` as `lr: 5e-05`, which a YAML 1.1 reader takes for text: ruamel reads what DVC writes.
"""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from redraft.frame.errors import RedraftError


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# strict: true is no 1 and "10" no 10; but `-S steps=1e3` is written as 1000.0, which is whole
Whole = Annotated[int, Field(strict=True), BeforeValidator(_whole)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Positive = Annotated[Whole, Field(gt=0)]
Count = Annotated[Whole, Field(ge=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Above0 = Annotated[Number, Field(gt=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Precision = Literal["auto", "bf16", "fp32"]
Settings = dict[str, str | bool | int | float]
"""Flags or arguments by name."""


def distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """For `AfterValidator`: every value once."""
    if len(set(values)) < len(values):
        raise ValueError("every value once")
    return values


class Section(BaseModel):
    """A part of a file. What decides a result has no default here: a change of it must show in a diff and to DVC."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


_Model = TypeVar("_Model", bound=BaseModel)


def load_yaml(text: str) -> Any:
    """Parse `text` as DVC does, by YAML 1.2.

    Raises:
        YAMLError: not YAML, or a key that stands twice.
    """
    return YAML(typ="safe", pure=True).load(text)


def read_object(path: Path) -> dict[str, Any]:
    """The keys of a parameter file.

    Raises:
        RedraftError: file missing, not text, not YAML, or no keys in it.
    """
    if not path.is_file():
        raise _missing(path)
    try:
        found = load_yaml(path.read_text())
    except (YAMLError, OSError, ValueError) as error:
        raise RedraftError("A parameter file cannot be read as YAML.", where=path, found=error) from error
    if not isinstance(found, dict):
        raise RedraftError("A parameter file has no keys.", where=path, expected="`name: value` lines", found=found)
    return found


def _missing(path: Path) -> RedraftError:
    known = sorted(file.stem for file in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    near = get_close_matches(path.stem, known, 1)
    cause, fix = None, "run from the project's root, with the name of a file there"
    if (Path(os.environ.get("DVC_ROOT", ".")) / path).is_file():  # a queued or temporary run has a copy of git's files
        cause = "it is in the main workspace, but not in git: a queued or temporary run sees what git has"
        fix = f"git add {path} data/{path.stem} && git commit"
    elif near:
        fix = f"did you mean {near[0]}?"
    return RedraftError(
        "A parameter file is missing.",
        where=path,
        found=f"in its folder: {', '.join(known) or 'no YAML file'}",
        cause=cause,
        fix=fix,
    )


def validate(model: type[_Model], values: dict[str, Any], where: Path) -> _Model:
    """`values` as a `model`.

    Raises:
        RedraftError: unknown key (with the nearest known one), wrong type or value, not finite, or a key missing.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = [_fault(model, each) for each in error.errors()]
        raise RedraftError(
            f"{len(faults)} parameter(s) cannot be used.",
            where=where,
            found="; ".join(faults),
            fix="docs/parameters.md has every key with its type and unit",
        ) from error


def _fault(model: type[BaseModel], error: Any) -> str:
    """One fault: key, what is wrong, what was found, and for an unknown key the nearest known one."""
    place = [str(part) for part in error["loc"]]
    told = f"`{'.'.join(place) or '(file)'}`: {error['msg']}"
    if error["type"] == "missing":
        return told
    if error["type"] == "extra_forbidden":
        near = _nearest(place, _keys(model))
        told = f"`{'.'.join(place)}`: no such key" + (f", did you mean `{near}`?" if near else "")
    return f"{told}, found {error['input']!r}"[:300]


def _nearest(place: list[str], keys: list[str]) -> str | None:
    """The key that was meant: by its initials (`learning_rate` is `lr`), or the nearest in letters."""
    beside = [key for key in keys if key.split(".")[:-1] == place[:-1]]
    initials = ".".join([*place[:-1], "".join(word[:1] for word in place[-1].split("_"))])
    near = [*(key for key in beside if key == initials), *get_close_matches(".".join(place), keys, 1)]
    return next(iter([*near, *get_close_matches(".".join(place), beside, 1, cutoff=0.4)]), None)


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key of a model, dotted."""
    keys = []
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        keys += [f"{prefix}{name}", *(_keys(inner, f"{prefix}{name}.") if inner else [])]
    return keys


def section_of(annotation: Any) -> type[Section] | None:
    """The section that an annotation names, also `Section | None`; None for a plain value."""
    for each in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(each, type) and issubclass(each, Section):
            return each
    return None
