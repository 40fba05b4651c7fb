"""Open engines by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from redraft.corpus.tokenizer import load_tokenizer, stop_ids
from redraft.drafter.checkpoint import Checkpoint, read_checkpoint
from redraft.drafter.files import RECORD
from redraft.drafter.layers import numbers
from redraft.engines.alike import require_alike
from redraft.engines.arm import PLAIN, Arm, chain
from redraft.engines.command import TENSOR_PARALLEL, flag_number, installed_version
from redraft.engines.engine import Engine
from redraft.engines.sglang import SGLangEngine
from redraft.engines.torch import TorchEngine
from redraft.frame.errors import RedraftError
from redraft.frame.params import Config
from redraft.frame.profile import EngineParams
from redraft.frame.store import store_root
from redraft.preflight.export import for_release
from redraft.preflight.lint import lint, require_clean
from redraft.preflight.releases import NEWEST
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
    params, draft = config.profile.target, read_checkpoint(drafter)
    layers = _layers_of(draft) or params.aux_layers
    loaded = load_target(target, dtype=dtype, aux_layers=layers, trust_remote_code=params.trust_remote_code)
    return Models(loaded, draft, _stop_ids(config, target))


def _layers_of(draft: Checkpoint) -> tuple[int, ...] | None:
    """The aux layers that a drafter was trained on, as inputs of layers, where `redraft.json` names them."""
    layers = numbers(draft.record.get("aux_layers"), f"aux_layers in {RECORD}")
    return tuple(layers) if layers else None


def _stop_ids(config: Config, target: Path) -> frozenset[int]:
    return stop_ids(target, load_tokenizer(target, config.profile.target.trust_remote_code))


def open_servers(config: Config, target: Path, drafter: Path, spec_steps: Sequence[int]) -> dict[int, Engine]:
    """Servers by number of drafted tokens, not started, after the drafter's files were linted for their version.

    With one of `engine.url` and `engine.baseline_url` only the servers that are there are given.

    Raises:
        RedraftError: no SGLang, files that it would not serve as they were meant, or two joined servers not alike.
    """
    params = config.profile.engine
    joined = params.url or params.baseline_url
    wanted = [steps for steps in spec_steps if not joined or (params.url if steps else params.baseline_url)]
    servers = {steps: _server(config, target, drafter, steps, params) for steps in wanted}
    for steps, server in servers.items() if joined and 0 in servers else ():
        if steps:
            require_alike(servers[0].describe(), server.describe())
    return dict(servers)


def _server(config: Config, target: Path, drafter: Path, steps: int, params: EngineParams) -> SGLangEngine:
    """One server, not started; with a drafter its files are linted first, for the release that will read them."""
    described = read_config(target, config.profile.target.trust_remote_code).get_text_config()
    context = flag_number(params, ["context-length"], getattr(described, "max_position_embeddings", None))
    if context is None:
        raise RedraftError(
            "The target does not say how long a context it takes.",
            where=target / "config.json",
            expected="max_position_embeddings",
            fix="context-length in engine.flags of the profile",
        )
    draft = drafter if steps else None
    if draft and not params.url:
        draft = for_release(draft, target, installed_version(params.python), store_root() / "serve" / "drafters")
    engine = SGLangEngine(params, target, draft, steps, _stop_ids(config, target), context, store_root() / "serve")
    if engine.url:
        engine.start()  # only asks the server what it is
    if draft:
        _lint(engine, draft)
    return engine


def _lint(engine: SGLangEngine, drafter: Path) -> None:
    """Refuse files that the release would not serve as they were meant; a joined server is asked which it is."""
    params = engine.params
    if params.url:
        told = engine.describe()
        version, (context, parallel) = (
            told.get("version"),
            (_number(told, key) for key in ("context_length", "tp_size")),
        )
        if version is None:
            print("warning: the server does not tell its version; the drafter's files are read as the newest one would")
    else:
        version, context = installed_version(params.python), engine.context
        parallel = flag_number(params, TENSOR_PARALLEL, 1)
    found = lint(drafter, engine.target, str(version or NEWEST), context=context, tp=parallel or 1)
    require_clean(found, drafter)


def _number(told: Mapping[str, Any], name: str) -> int | None:
    """What a server tells of itself, where it is a number: of a context that was not set it tells none."""
    return told[name] if isinstance(told.get(name), int) else None


def arms_of(config: Config) -> list[Arm]:
    """What a bench of this profile measures, where it opens the engines itself."""
    bench = config.profile.bench
    trees = [Arm(None, *tree) for tree in bench.trees]
    probed = shape_of_probe(config)
    others = [replace(probed, drafter=Path(folder)) for folder in bench.compare]
    return list(dict.fromkeys([PLAIN, *map(chain, bench.spec_steps), *trees, *others]))


def shape_of_probe(config: Config) -> Arm:
    """The arm of the drafter under test with the probe's number of drafts, and the profile's tree on a server."""
    steps, engine = config.params.spec_steps, config.profile.engine
    if config.params.engine == "torch" or engine.topk == 1:
        return chain(steps)
    return Arm(None, steps, engine.topk, engine.draft_tokens or steps + 1)


def open_arms(config: Config, target: Path, drafter: Path) -> tuple[dict[Arm, Engine], bool]:
    """Engines of a bench by arm, not started, and whether all can live at once.

    A joined server gives only what it serves.

    Raises:
        RedraftError: trees on the engine `torch`; see `open_servers`.
    """
    bench, params = config.profile.bench, config.profile.engine
    if config.params.engine == "torch":
        if bench.trees:
            raise RedraftError("The engine torch drafts chains only.", where="bench.trees", fix="engine: sglang")
        models = load_models(config, target, drafter, "bf16")
        return {arm: _in_process(models, arm) for arm in arms_of(config)}, True
    if params.url or params.baseline_url:  # what is served there cannot be changed
        steps = config.params.spec_steps
        served = open_servers(config, target, drafter, (0, steps))
        return {shape_of_probe(config) if number else PLAIN: each for number, each in served.items()}, True
    if max(bench.concurrency) > params.max_running:
        raise RedraftError(
            "The servers run fewer requests at once than the bench asks for.",
            where="engine.max_running, bench.concurrency in the profile",
            expected=f"at least {max(bench.concurrency)}",
            found=params.max_running,
            cause="the rest would wait in a queue, and be reported as that concurrency",
        )
    arms: dict[Arm, Engine] = {}
    for arm in arms_of(config):
        shaped = params.model_copy(update={"topk": arm.topk, "draft_tokens": arm.tokens if arm.steps else None})
        arms[arm] = _server(config, target, arm.drafter or drafter, arm.steps, shaped)
    return arms, False


def _in_process(models: Models, arm: Arm) -> Engine:
    if arm.drafter:
        draft = read_checkpoint(arm.drafter)
        fed = replace(models.target, aux_layers=_layers_of(draft) or models.target.aux_layers)
        models = replace(models, target=fed, draft=draft)
    return models.engines([arm.steps])[arm.steps]
