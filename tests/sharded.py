"""What the test of FSDP2 runs under torchrun, two processes on CPUs: a sharded module does what a whole one does."""

from copy import deepcopy

import torch
import torch.distributed as dist
from test_step import EMBED, HEAD, STEPS, batch_of, some_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from redraft.train.measure import as_written
from redraft.train.processes import local, whole
from redraft.train.step import StepOutput, TTTModule


def main() -> None:
    dist.init_process_group("gloo")
    checkpoint, batch = some_checkpoint(1, scale=1.0), batch_of(1, [[9, 6, 4], [5, 13], [19]])
    with torch.no_grad():
        checkpoint.drafter.fc.weight.mul_(1.003)  # no bf16 values any more
    plain = TTTModule(checkpoint.drafter, checkpoint.mapping, EMBED, HEAD, STEPS)
    sharded = deepcopy(plain)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    modules = {"sharded": sharded, "plain": plain}

    def both(exact: bool = False) -> torch.Tensor:
        found: dict[str, StepOutput] = {name: module(batch, exact=exact) for name, module in modules.items()}
        torch.testing.assert_close(found["sharded"].losses, found["plain"].losses, atol=1e-5, rtol=1e-5)
        if not exact:
            for output in found.values():
                (output.losses * output.contributing()).sum().backward()
        return found["sharded"].losses.detach()

    before = both()
    norms = [whole(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)) for module in modules.values()]
    torch.testing.assert_close(*norms)
    for _ in range(2):  # a measurement leaves whole weights behind, which the next one must not take for its own
        with as_written(sharded), as_written(plain), torch.no_grad():
            rounded = both(exact=True)
        assert not torch.allclose(rounded, before, atol=1e-6, rtol=0)
        with torch.no_grad():
            torch.testing.assert_close(both(exact=True), before, atol=1e-6, rtol=0)
    assert dist.get_world_size() == 2
    assert all(local(weight).isfinite().all() for weight in sharded.parameters())
    print(f"rank {dist.get_rank()}: the same", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
