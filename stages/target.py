"""target: bring the served model to one local folder."""

from pathlib import Path

from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.preflight.look import look
from redraft.target.sources import make_target


def main(config: Config) -> Result:
    def tell(folder: Path, coming: dict[str, int]) -> None:
        for line in look(folder, coming, config):
            print(f"note: {line}", flush=True)

    lock = Path(f"profiles/{config.params.profile}.lock")
    record = make_target(config.profile.target, Path("artifacts/target"), lock=lock, look=tell)
    if record.get("commit"):
        print(f"note: commit {record['commit']}" + (f", kept in {lock}: git add {lock}" if lock.is_file() else ""))
    return Result()


if __name__ == "__main__":
    run("target", main)
