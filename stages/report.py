"""report: one page with the verdict."""

import json
from pathlib import Path

from redraft import atomic
from redraft.curves import read_curve
from redraft.params import Config
from redraft.report.page import PLOTTED, STAGES, draw, page
from redraft.stage import Result, run


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
