"""target: bring the served model to one local folder."""

from pathlib import Path

from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.target.sources import make_target


def main(config: Config) -> Result:
    make_target(config.profile.target, Path("artifacts/target"))
    return Result()


if __name__ == "__main__":
    run("target", main)
