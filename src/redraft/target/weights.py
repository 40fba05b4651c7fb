"""Which files of a folder hold a target's weights: one answer for every reader of ours, and for the server."""

from collections.abc import Iterable
from pathlib import Path

from redraft.frame.errors import RedraftError, some
from redraft.frame.files import open_tensors, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(weights: Path, coming: Iterable[str] = ()) -> list[Path]:
    """The safetensors files that every reader takes, by name; `coming` are names of files that will lie there too.

    transformers takes `model.safetensors`, else what the index names. Servers take what the index names, else every
    safetensors file of the folder. So either an index names all files, or `model.safetensors` lies alone. What else
    lies beside an index nobody reads (Mistral's `consolidated.safetensors`), nor pickles beside safetensors, nor
    subfolders.

    Raises:
        RedraftError: no such files, or readers would take different ones.
    """
    found = sorted({*coming, *(file.name for file in weights.glob("*.safetensors") if file.is_file())})
    index = weights / INDEX
    wanted = _indexed(index) if index.is_file() else [SINGLE]
    absent = [name for name in wanted if name not in found and not (weights / name).is_file()]
    if absent:
        raise _incomplete(weights, found, absent)
    taken = {*wanted, SINGLE} if index.is_file() else set(found)
    other = sorted(taken.intersection(found) - set(wanted)) + _elsewhere(weights)
    if other:
        raise RedraftError(
            "The folder holds two sets of weights, and readers differ in which they take.",
            where=weights,
            expected=f"{INDEX} and the files that it names" if index.is_file() else f"{SINGLE} alone",
            found=f"also {some(other)}",
            cause="a model saved over another, a second format, or an adapter that was not merged",
            fix="keep one set in this folder: move the other files away; without an index, merge or write one",
        )
    return [weights / name for name in wanted]


def tensor_files(weights: Path) -> dict[str, Path]:
    """The file of every tensor, by the headers of the files.

    Raises:
        RedraftError: see `weight_files`; a tensor stands in two files, or the index names one that is in none.
    """
    places: dict[str, Path] = {}
    for path in weight_files(weights):
        with open_tensors(path) as file:
            keys = list(file.keys())
        twice = [key for key in keys if key in places]
        if twice:
            raise RedraftError(
                "Tensors of the target stand in two files, and readers differ in which they take.",
                where=weights,
                found=f"{some(twice)}: in {places[twice[0]].name} and in {path.name}",
                cause="files of two savings under one index",
                fix="save the model again into an empty folder",
            )
        places |= dict.fromkeys(keys, path)
    index = weights / INDEX
    lost = sorted(read_object(index)["weight_map"].keys() - places.keys()) if index.is_file() else []
    if lost:
        raise RedraftError(
            "The index names tensors of the target that no file holds.",
            where=index,
            found=some(lost),
            cause="the index of another saving; their places would be left to chance",
            fix="save the model again into an empty folder",
        )
    return places


def _indexed(index: Path) -> list[str]:
    """The files that an index names, sorted."""
    table = read_object(index).get("weight_map")
    names = list(table.values()) if isinstance(table, dict) else []
    if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise RedraftError(
            "The index of the target's weights cannot be used.",
            where=index,
            expected='{"weight_map": {"tensor": "file in this folder", ...}}',
            found=names[:3] or "no such table",
        )
    return sorted(set(names))


def _elsewhere(weights: Path) -> list[str]:
    """Files by which transformers alone takes other weights."""
    config = weights / "config.json"
    named = read_object(config).get("transformers_weights") if config.is_file() else None
    adapter = [name for name in ("adapter_config.json",) if (weights / name).is_file()]
    return adapter + ([f"{named}, which config.json names as transformers_weights"] if named else [])


def _incomplete(weights: Path, found: list[str], absent: list[str]) -> RedraftError:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in weights.glob(pattern))
    if (weights / INDEX).is_file():
        cause, fix = f"an incomplete copy, or the {INDEX} of another saving", "bring the missing files"
    elif found:
        cause, fix = f"no {INDEX} beside them", f"bring it, or name a single file {SINGLE}"
    elif pickles:
        cause, fix = "another format", "save the model as safetensors: save_pretrained of transformers does"
    else:
        cause, fix = "a folder of configuration and tokenizer alone", "give the folder that holds the weights"
    return RedraftError(
        "Files of the target's weights are missing." if found else "The target has no safetensors weights.",
        where=weights,
        expected=some(absent),
        found=some(found or pickles) or "no weights",
        cause=cause,
        fix=fix,
    )
