"""report: one page with the verdict."""

import json
from pathlib import Path

from redraft.frame import atomic
from redraft.frame.curves import read_curve
from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.report.page import PLOTTED, STAGES, draw, page


def main(config: Config) -> Result:
    metrics = {stage: json.loads(Path(f"metrics/{stage}.json").read_text()) for stage in STAGES}
    curves = {name: read_curve(Path(f"plots/{name}.csv")) for name in PLOTTED}
    with atomic.folder("report") as folder:
        draw(folder, metrics, curves)
    atomic.write_text("report.md", page(config.params, metrics))
    print(f"{metrics['bench']['verdict']}\nreport: {Path('report.md').resolve()}")
    return Result()


if __name__ == "__main__":
    run("report", main)
