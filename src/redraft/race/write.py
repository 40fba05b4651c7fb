"""What a race reads of the workspace before, and writes to it in the end."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from redraft.frame import atomic
from redraft.frame.errors import RedraftError
from redraft.race import pictures
from redraft.race.page import figures, page
from redraft.race.queue import git
from redraft.race.rungs import Rung
from redraft.race.speed import Cycles
from redraft.report.plots import save_svg


def require_visible(profile: str) -> None:
    """Refuse what a queued experiment would not see: it has what git knows, with changes, and nothing else.

    Raises:
        RedraftError: files of the profile, its data or the code that git does not know.
    """
    places = (f"profiles/{profile}.yaml", f"data/{profile}", "params.yaml", "dvc.yaml", "src", "stages")
    unknown = git("ls-files", "--others", "--exclude-standard", "--", *places).splitlines()
    if unknown:
        raise RedraftError(
            "A queued experiment sees only what git knows.",
            where=", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""),
            expected="files that are added to git",
            fix=f"git add profiles/{profile}.yaml data/{profile} params.yaml && git commit",
        )


def write(folder: Path, profile: str, race: str, rungs: Sequence[Rung], cycles: Cycles) -> Path:
    """Write page, pictures and numbers, all or none of them drawn before the first is replaced; the page's path."""
    text, numbers = page(profile, race, rungs, cycles), figures(profile, race, rungs, cycles)
    drawn = {profile: pictures.lengths(rungs)}
    if all(rung.by_speed for rung in rungs):
        drawn[f"{profile}-speed"] = pictures.speeds(rungs)
    with tempfile.TemporaryDirectory() as temporary:
        for name, spec in drawn.items():
            save_svg(Path(temporary) / f"{name}.svg", spec)
        for name in drawn:
            atomic.write_bytes(folder / f"{name}.svg", (Path(temporary) / f"{name}.svg").read_bytes())
    atomic.write_json(folder / f"{profile}.json", numbers)
    atomic.write_text(folder / f"{profile}.md", text)
    return folder / f"{profile}.md"
