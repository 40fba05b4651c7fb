"""machine: check what was asked for before it costs anything, and say which machine and engine will measure."""

from pathlib import Path

from redraft.bench.machine import machine
from redraft.engines.release import absent, release
from redraft.frame import atomic
from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.preflight.check import check, require_sound


def main(config: Config) -> Result:
    checked = check(config, Path())
    engine = release(config.params.engine, config.profile.engine)
    for note in [
        *checked.notes,
        *(f"{name} is not there yet: probe and bench will need it" for name in absent(engine)),
    ]:
        print(f"note: {note}")
    require_sound(checked)
    atomic.write_json("artifacts/machine.json", {**machine(), "engine": engine})
    atomic.write_json("artifacts/checked.json", {"check": "passed"})
    return Result()


if __name__ == "__main__":
    run("machine", main, recorded=False)
