"""Makes SGLang 0.5.23 run on any CPU: what has to happen before SGLang looks at the machine.

The ops themselves are in the sibling package `sgl_kernel`, under the name by which SGLang imports them.
"""

import importlib.abc
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType


class _TorchvisionOps(importlib.abc.MetaPathFinder):
    """Defines the schemas of two torchvision ops just before torchvision is imported.

    torchvision registers fake versions of them at import, and its own library with the schemas does not load beside a
    torch without CUDA. They are never called.
    """

    def __init__(self) -> None:
        self.asked = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and not self.asked:
            self.asked = True
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")  # kept: it takes its ops with it
            for name in ("nms", "qnms"):
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


@cache  # a virtual environment may read its .pth file twice, as lib and as lib64
def boot() -> None:
    """Turns SGLang's CPU engine on. Run at every start of the kit's Python, by a .pth file."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # `is_cpu()` reads it
    sys.meta_path.insert(0, _TorchvisionOps())


def plugin() -> None:
    """Keeps the attention backend `intel_amx`, which SGLang replaces by `torch_native` on a CPU without AMX.

    It is the only one on a CPU that can draft. SGLang calls this before it resolves its arguments. Its layers ask
    `cpu_has_amx_support()` instead and keep their plain torch code.
    """
    from sglang.srt.runtime_context import override_platform

    override_platform(has_amx=True).install()
