"""Open engines by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from redraft.drafter.checkpoint import Checkpoint, read_checkpoint
from redraft.drafter.lint import lint, require_clean
from redraft.hidden.store import store_root
from redraft.params import Config
from redraft.serve.engine import Engine
from redraft.serve.sglang import SGLangEngine, installed_version
from redraft.serve.torch_engine import TorchEngine
from redraft.target.chat import load_tokenizer, stop_ids
from redraft.target.model import Target, load_target, read_config


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
    described = read_config(target, config.profile.target.trust_remote_code)
    context = int(params.flags.get("context-length") or described.get_text_config().max_position_embeddings)
    if not joined:
        require_clean(lint(drafter, target, installed_version(params.python), context=context))
    stop, logs = _stop_ids(config, target), store_root() / "serve"
    engines: dict[int, Engine] = {}
    for steps in spec_steps:
        if not joined or (params.url if steps else params.baseline_url):
            draft = drafter if steps else None
            engines[steps] = SGLangEngine(params, target, draft, steps, stop, context, logs)
    return engines
