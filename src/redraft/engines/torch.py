"""The engine `torch`: greedy chain speculation in this process, on CPU or GPU. The embedded default and the oracle.

One verify round at K = 3, tokens x[0..n] known, key/value caches of target and drafter filled up to position n - 1:
the drafter, fed the target's real states, drafts d1 at position n - 1 and d2, d3 from its own states; one forward of
the target over [x[n], d1, d2, d3] gives its own choice after each; the right prefix is accepted and the next choice is
the bonus. Then the caches are cut to what was accepted and the drafter is re-fed with the target's states.
"""

import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from redraft.acceptance import Acceptance, Steps
from redraft.drafter.checkpoint import Checkpoint
from redraft.engines.engine import Generation, Margin
from redraft.target.hf import offline_transformers
from redraft.target.model import Target

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in which `getrusage` counts memory."""


@dataclass
class DraftCache:
    """Keys and values of the drafter, [1, g, S, d] each."""

    key: Tensor | None = None
    value: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append `key` and `value`, then causal attention of the newest positions over all."""
        if self.key is not None and self.value is not None:
            key, value = torch.cat([self.key, key], dim=2), torch.cat([self.value, value], dim=2)
        self.key, self.value = key, value
        new, size = query.shape[2], key.shape[2]
        visible = torch.ones(new, size, dtype=torch.bool, device=query.device).tril(size - new)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)

    def crop(self, size: int) -> None:
        """Keep the first `size` positions."""
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[:, :, :size], self.value[:, :, :size]


@dataclass
class TorchEngine:
    """Greedy decoding of `target`, with `draft` guessing `spec_steps` tokens ahead (0: plain decoding)."""

    target: Target
    draft: Checkpoint | None
    spec_steps: int
    stop_ids: frozenset[int]
    """Ids that end an answer."""
    _counted: Acceptance = field(init=False)

    def __post_init__(self) -> None:
        assert (self.spec_steps > 0) == (self.draft is not None)
        self._counted = Acceptance(self.spec_steps)
        if self.draft is not None:
            self._slots_to_ids = torch.from_numpy(self.draft.mapping.ids).to(self.target.head.device)
            self.draft.drafter.to(self.target.head)

    def start(self) -> None:
        """Nothing to start: the models are loaded."""

    def ready(self) -> bool:
        """Always."""
        return True

    def acceptance(self) -> Acceptance:
        """Counters over every `generate`."""
        return self._counted

    def describe(self) -> dict[str, Any]:
        """Name, versions, device, dtype, threads."""
        device = self.target.head.device
        return {
            "engine": "torch",
            "torch": torch.__version__.split("+")[0],
            "transformers": offline_transformers().__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "dtype": str(self.target.head.dtype).removeprefix("torch."),
            "spec_steps": self.spec_steps,
        }

    def memory_gib(self) -> float:
        """The most that this process held so far, on the GPU if there is one: for all engines in it."""
        device = self.target.head.device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / 2**30

    def stop(self) -> None:
        """Nothing to stop."""

    def flush(self) -> None:
        """Nothing is kept from one answer to the next."""

    def fingerprint(self) -> str:
        """The model in this process cannot change."""
        return "torch"

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int) -> Generation:
        """Answer `prompt` greedily."""
        began = time.perf_counter()
        cache = offline_transformers().DynamicCache(config=self.target.config)
        whole: list[int] = []
        cut: int | None = None
        drafting = 0.0
        with self.target.capture(self.target.aux_layers if self.draft else ()) as captured:
            known = [*prompt, int(self._forward(prompt, cache, 1)[0])]
            first = time.perf_counter() - began
            if self.draft is not None:
                cache.activate_past_recording()  # layers with a sliding window keep what a rejected draft pushed out
            drafts, memory, seen = [], DraftCache(), 0
            end = len(prompt) + max_new_tokens
            while len(known) < end and known[-1] not in self.stop_ids:
                if self.draft is not None:
                    fed = known[seen + 1 :]
                    before = time.perf_counter()
                    drafts = self._draft(self.target.aux(captured)[:, : len(fed)], fed, seen, memory)
                    drafting += time.perf_counter() - before
                    seen += len(fed)
                chosen = self._forward([known[-1], *drafts], cache, 1 + len(drafts)).tolist()
                right = 0
                while right < len(drafts) and drafts[right] == chosen[right]:
                    right += 1
                if drafts:
                    cache.crop(right - len(drafts))
                new = chosen[: right + 1]
                stop = next((place + 1 for place, token in enumerate(new) if token in self.stop_ids), len(new))
                fits = min(stop, end - len(known))
                known += new[:fits]
                if fits == len(new):
                    whole.append(right)
                else:
                    cut = right
        finish = "stop" if known[-1] in self.stop_ids else "length"
        seconds = time.perf_counter() - began
        steps = Steps.in_turn(whole, self.spec_steps, cut) if self.draft is not None else Steps()
        self._counted.add(steps)
        return Generation(known[len(prompt) :], seconds, first, finish, steps, len(prompt), draft_seconds=drafting)

    @torch.inference_mode()
    def margin(self, prefix: list[int], first: int, second: int, width: int) -> Margin:
        """Compare the tokens `first` and `second` after `prefix`, in forwards of 1 and of `width` tokens."""
        rows = []
        for size in (1, min(width, len(prefix) - 1)):
            cache = offline_transformers().DynamicCache(config=self.target.config)
            self.logits(prefix[:-size], cache, 1)
            rows.append(self.logits(prefix[-size:], cache, 1)[0].float())
        return Margin(float(rows[0][first] - rows[0][second]), float((rows[0] - rows[1]).abs().max()))

    def _forward(self, tokens: list[int], cache: Any, last: int) -> Tensor:
        """The target's choice after each of the `last` newest positions, int64 [last]."""
        return self.logits(tokens, cache, last).argmax(-1)

    def logits(self, tokens: list[int], cache: Any, last: int) -> Tensor:
        """Run `tokens` on top of `cache`; logits [last, V] at the newest positions."""
        ids = torch.tensor([tokens], device=self.target.head.device)
        states = self.target.decoder(input_ids=ids, cache=cache, use_cache=True).last_hidden_state
        return states[0, -last:] @ self.target.head.T

    def _draft(self, states: Tensor, fed: list[int], start: int, memory: DraftCache) -> list[int]:
        """Feed the target's states, then draft.

        Args:
            states: aux states [1, S, 3H] of positions `start` to `start + S - 1`.
            fed: the S tokens one ahead of those positions.
            start: first position that the drafter has not seen with real states.
            memory: the drafter's cache; on return it holds positions up to `start + S - 1` only.

        Returns:
            `spec_steps` drafted target ids.
        """
        assert self.draft is not None
        drafter = self.draft.drafter
        device = states.device
        memory.crop(start)
        tokens = torch.tensor([fed], device=device)
        positions = torch.arange(start, start + len(fed), device=device)[None]
        hidden = drafter.fc(states)
        drafts: list[int] = []
        while True:
            embeds = F.embedding(tokens, self.target.embed)
            hidden = drafter.step(hidden, embeds, positions, memory.attend)[:, -1:]
            slot = drafter.logits(hidden[0, -1]).argmax()
            drafts.append(int(self._slots_to_ids[slot]))
            if len(drafts) == self.spec_steps:
                break
            tokens = torch.tensor([[drafts[-1]]], device=device)
            positions = positions[:, -1:] + 1
        memory.crop(start + len(fed))
        return drafts
