"""`params.yaml`, the knobs people turn, together with the profile that it names; and nothing else reads them."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from redraft.frame.errors import RedraftError
from redraft.frame.profile import FitKnobs, FitParams, Profile, load_profile
from redraft.frame.section import NotNegative, Positive, Section, read_object, validate

FROM_PROFILE = "profile"
"""Value of a knob that is not set on purpose: the profile's own is taken."""


class Gates(Section):
    """How far a figure of `metrics/summary.json` may fall before `redraft diff --gate` fails."""

    accept_length: NotNegative = 0.1
    """Of served accept length, in tokens."""
    ratio_low: NotNegative = 0.1
    """Of the low end of tokens/s against the plain target's."""
    coverage: NotNegative = 0.01
    """Of the held-out coverage of the draft vocabulary, a share."""


class Params(FitKnobs):
    """`params.yaml`: the knobs people turn, all at top level so that `dvc exp run -S lr=1e-3` works."""

    profile: str
    """Name of a file in `profiles/`."""
    init: Literal["remap", "keep_donor_vocab", "naive", "scratch"]
    """What training starts from; `naive` exists to show the fault."""
    fill: Literal["zero", "mean", "target", "scaled", "fitted", "auto"]
    """Head rows that the donor lacks, see `redraft.remap.fills`; `auto` takes the lowest first-step loss."""
    gate: Literal["stop", "warn", "off"]
    """What follows when the numbers before the first step cannot be right."""
    resume: Literal["auto", "never", "must"]
    """Whether a killed training goes on from its saved state."""
    engine: Literal["torch", "sglang"]
    """What probe and bench serve with."""
    spec_steps: Positive
    """Tokens drafted per verify step in the probe."""
    gates: Gates = Gates()


class Config(Section):
    """Both files together."""

    params: Params
    profile: Profile

    def fit(self) -> FitParams:
        """The training that the `train` stage runs: the knobs plus what the profile decides."""
        shared = FitParams.model_fields.keys()
        knobs = self.params.model_dump(include=set(shared))
        sized = self.profile.train.model_dump(include=set(shared))
        return FitParams(**knobs, **sized)


def flatten(values: dict[str, Any], *, lists: bool = False) -> dict[str, Any]:
    """The leaves of nested dictionaries, and of `lists` by index, under dotted names.

    Where a key's own dots would make two names one, that key is put into quotes.
    """
    leaves = dict(_leaves(values, (), lists))
    plain = {path: ".".join(_quoted(part, '"') for part in path) for path in leaves}
    times = Counter(plain.values())
    return {
        name if times[name] == 1 else ".".join(_quoted(part, '".') for part in path): leaves[path]
        for path, name in plain.items()
    }


def _quoted(part: str, special: str) -> str:
    return json.dumps(part, ensure_ascii=False) if set(special) & set(part) else part


def _leaves(value: object, path: tuple[str, ...], lists: bool) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, dict):
        inner = [(str(key), each) for key, each in value.items()]
    elif lists and isinstance(value, list | tuple):
        inner = [(str(index), each) for index, each in enumerate(value)]
    else:
        yield path, value
        return
    for key, each in inner:
        yield from _leaves(each, (*path, key), lists)


def load_config(root: Path | str = ".", profile: str | None = None) -> Config:
    """Read `params.yaml` under `root` and the profile that it names, or another `profile`.

    Raises:
        RedraftError: as `load_profile`.
    """
    path = Path(root) / "params.yaml"
    values = read_object(path) | ({"profile": profile} if profile else {})
    name = values.get("profile")
    if not isinstance(name, str):
        raise RedraftError(
            "The profile has no name.", where=f"{path}: profile", expected="a file in profiles/", found=name
        )
    described = load_profile(name, root)
    brought = described.knobs.model_dump(mode="json")
    resolved = {
        knob: brought[knob] if value == FROM_PROFILE and knob in brought else value for knob, value in values.items()
    }
    return Config(params=validate(Params, resolved, path), profile=described)
