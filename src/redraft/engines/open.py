"""Open engines by name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from redraft.corpus.chat import load_tokenizer, stop_ids
from redraft.drafter.checkpoint import Checkpoint, read_checkpoint
from redraft.engines.arm import PLAIN
from redraft.engines.engine import Engine
from redraft.engines.sglang import SGLangEngine, installed_version
from redraft.engines.torch import TorchEngine
from redraft.frame.errors import RedraftError
from redraft.frame.params import Config
from redraft.frame.profile import EngineParams
from redraft.frame.store import store_root
from redraft.preflight.lint import lint, require_clean
from redraft.target.config import read_config
from redraft.target.model import Target, load_target


@dataclass
class Models:
    """Target and drafter in this process."""

    target: Target
    draft: Checkpoint
    stop_ids: frozenset[int]

    def engines(self, spec_steps: Sequence[int]) -> dict[int, Engine]:
        """Engines `torch` by number of drafted tokens; 0 serves the target alone."""
        return {
            steps: TorchEngine(self.target, self.draft if steps else None, steps, self.stop_ids) for steps in spec_steps
        }


def load_models(config: Config, target: Path, drafter: Path, dtype: str) -> Models:
    """Load target (`bf16` or `fp32`) and drafter."""
    params = config.profile.target
    loaded = load_target(target, dtype=dtype, aux_layers=params.aux_layers, trust_remote_code=params.trust_remote_code)
    return Models(loaded, read_checkpoint(drafter), _stop_ids(config, target))


def _stop_ids(config: Config, target: Path) -> frozenset[int]:
    return stop_ids(target, load_tokenizer(target, config.profile.target.trust_remote_code))


def open_servers(config: Config, target: Path, drafter: Path, spec_steps: Sequence[int]) -> dict[int, Engine]:
    """Servers by number of drafted tokens, not started, after the drafter's files were linted for their version.

    With one of `engine.url` and `engine.baseline_url` only the servers that are there are given.

    Raises:
        RedraftError: no SGLang, or files that it would not serve as they were meant.
    """
    params = config.profile.engine
    joined = params.url or params.baseline_url
    wanted = [steps for steps in spec_steps if not joined or (params.url if steps else params.baseline_url)]
    return {steps: _server(config, target, drafter, steps, params) for steps in wanted}


def _server(config: Config, target: Path, drafter: Path, steps: int, params: EngineParams) -> SGLangEngine:
    """One server, not started; with a drafter its files are linted first, for the release that will read them."""
    described = read_config(target, config.profile.target.trust_remote_code)
    context = int(params.flags.get("context-length") or described.get_text_config().max_position_embeddings)
    draft = drafter if steps else None
    engine = SGLangEngine(params, target, draft, steps, _stop_ids(config, target), context, store_root() / "serve")
    if steps:
        if params.url:
            engine.start()  # only asks the server what it is
        version = str(engine.describe()["version"]) if params.url else installed_version(params.python)
        require_clean(lint(drafter, target, version, context=None if params.url else context), drafter)
    return engine


def open_arms(config: Config, target: Path, drafter: Path) -> tuple[dict[str, Engine], bool]:
    """Engines of a bench by the name of their arm, not started, and whether all can live at once.

    Names: `plain`; `3` for a chain of 3 drafts; `3x4x8` for a tree of 3 steps, topk 4, 8 draft tokens; another
    drafter's folder and the probe's number of drafts, `artifacts/initial 3`. A joined server gives only what it serves.

    Raises:
        RedraftError: trees on the engine `torch`; see `open_servers`.
    """
    bench, params = config.profile.bench, config.profile.engine
    steps = config.params.spec_steps
    others = {f"{folder} {steps}": Path(folder) for folder in bench.compare}
    if config.params.engine == "torch":
        if bench.trees:
            raise RedraftError("The engine torch drafts chains only.", where="bench.trees", fix="engine: sglang")
        models = load_models(config, target, drafter, "bf16")
        arms = {
            PLAIN if not number else str(number): each
            for number, each in models.engines((0, *bench.spec_steps)).items()
        }
        for name, folder in others.items():
            arms[name] = replace(models, draft=read_checkpoint(folder)).engines([steps])[steps]
        return arms, True
    if params.url or params.baseline_url:  # what is served there cannot be changed
        served = open_servers(config, target, drafter, (0, steps))
        return {PLAIN if not number else str(number): each for number, each in served.items()}, True
    if max(bench.concurrency) > params.max_running:
        raise RedraftError(
            "The servers run fewer requests at once than the bench asks for.",
            where="engine.max_running, bench.concurrency in the profile",
            expected=f"at least {max(bench.concurrency)}",
            found=params.max_running,
            cause="the rest would wait in a queue, and be reported as that concurrency",
        )
    launched = open_servers(config, target, drafter, (0, *bench.spec_steps))
    arms = {PLAIN if not number else str(number): each for number, each in launched.items()}
    for depth, topk, tokens in bench.trees:
        shaped = params.model_copy(update={"topk": topk, "draft_tokens": tokens})
        arms[f"{depth}x{topk}x{tokens}"] = _server(config, target, drafter, depth, shaped)
    for name, folder in others.items():
        arms[name] = _server(config, target, folder, steps, params)
    return arms, False
