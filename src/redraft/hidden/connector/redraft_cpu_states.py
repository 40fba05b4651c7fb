"""vLLM's hidden-state connector for a server without a GPU; on GPUs the stock one is used.

The stock connector copies through pinned memory on a CUDA stream, which ends a CPU engine at the first request. Here
the states lie in RAM already: they are written before the request is done. Loaded by the server, whose environment does
not have redraft: `kv_connector_module_path: redraft_cpu_states`, with this folder on PYTHONPATH. Written for vLLM 0.32.
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Done:
    """In place of the CUDA event that tells whether a copy is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes the states of a finished request in the engine's own thread, then lets the lock go."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (torch.arange(self._block_size)[None] + blocks[:, None] * self._block_size).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone().contiguous()
        lock = self._lock_fds.pop(pending.req_id, None)
        try:
            Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
            save_file({"hidden_states": states, "token_ids": pending.token_ids.clone()}, pending.filename)
        except Exception as error:  # the client finds the lock free and no file; the engine must live
            print(f"hidden states of {pending.req_id} were not written: {error!r}", flush=True)
        finally:
            if lock is not None:
                os.close(lock)
        self._req_copy_events[pending.req_id] = _Done()
