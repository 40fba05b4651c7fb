"""Open engines by name."""

from collections.abc import Sequence
from pathlib import Path

from redraft.drafter.checkpoint import read_checkpoint
from redraft.params import Config
from redraft.serve.engine import Engine
from redraft.serve.torch_engine import TorchEngine
from redraft.target.chat import load_tokenizer, stop_ids
from redraft.target.model import load_target


def open_engines(
    config: Config, target: Path, drafter: Path, spec_steps: Sequence[int], dtype: str
) -> dict[int, Engine]:
    """Started engines by number of drafted tokens; 0 serves the target alone.

    Args:
        config: names the engine.
        target: target folder.
        drafter: drafter folder.
        spec_steps: the numbers wanted.
        dtype: `bf16` or `fp32`.
    """
    params = config.profile.target
    loaded = load_target(target, dtype=dtype, aux_layers=params.aux_layers, trust_remote_code=params.trust_remote_code)
    draft = read_checkpoint(drafter)
    stop = stop_ids(target, load_tokenizer(target, params.trust_remote_code))
    engines: dict[int, Engine] = {
        steps: TorchEngine(loaded, draft if steps else None, steps, stop) for steps in spec_steps
    }
    for engine in engines.values():
        engine.start()
    return engines
