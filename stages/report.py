"""report: one page with the verdict."""

import json
import os
from pathlib import Path

from redraft.frame import atomic
from redraft.frame.curves import read_curve
from redraft.frame.params import Config
from redraft.frame.stage import Result, run
from redraft.report.bench import read_bench
from redraft.report.page import PLOTTED, STAGES, draw, page
from redraft.report.summary import summary


def main(config: Config) -> Result:
    metrics = {stage: json.loads(Path(f"metrics/{stage}.json").read_text()) for stage in STAGES}
    metrics["bench"] = read_bench(Path("metrics/bench.json"))
    curves = {name: read_curve(Path(f"plots/{name}.csv")) for name in PLOTTED}
    with atomic.folder("report") as folder:
        draw(folder, metrics, curves)
    text = page(config.params, metrics)
    atomic.write_text("report.md", text)
    figures = summary(metrics)
    atomic.write_json(Path("metrics/summary.json"), figures)
    here = Path(os.environ.get("DVC_ROOT", ".")).resolve() == Path.cwd()  # else a temporary run: the file will be gone
    print(f"{text.splitlines()[0].strip('*')}\nreport: report.md{'' if here else ', once the experiment is applied'}")
    numbers = {f"summary/{name}": value for name, value in figures.items() if isinstance(value, int | float)}
    return Result(headline=numbers, tags={"verdict": str(figures["verdict"]), "drafter": metrics["train"]["drafter"]})


if __name__ == "__main__":
    run("report", main)
