"""A pipeline run: the stages that ran for one key, and how they stand together.

It runs while one of its stages runs, and between them. It has ended with the report; a stage that failed or was killed
ends it for as long as that stage is not run again. A partial run (`dvc repro train`) has no last stage: it counts as
finished when another pipeline run begins, or at `redraft publish`.
"""

from redraft.frame.journal import FINISHED, LAST_STAGE, RUNNING, State, first, journals, run_of, state


def pipeline_state(run: str, *, over: bool = False) -> State:
    """How the pipeline run with this id stands, by the journals of its stages.

    Args:
        run: see `redraft.frame.journal.run_of`.
        over: no further stage will come.
    """
    broken: dict[str, State] = {}
    last = State(RUNNING)
    for path in journals():
        begun = first(path)
        if begun is None or run_of(begun) != run:
            continue
        last = state(path)
        if last.status == RUNNING:
            return last
        broken.pop(begun["stage"], None)
        if last.status != FINISHED:
            broken[begun["stage"]] = last
        elif begun["stage"] == LAST_STAGE:
            over = True
            broken.clear()
    if broken:
        return list(broken.values())[-1]
    return last if over else State(RUNNING)
