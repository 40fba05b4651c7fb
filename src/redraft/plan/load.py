"""One forward and backward of a training step on one GPU: its FLOPs, and the memory it needs part by part.

Follows `redraft.train.step` on a GPU, where attention is `TTTAttention._joined` and a norm is one kernel. B rows of S
tokens (T = B S, no padding), P = B Q positions asked, K steps; h query heads, g key and value heads of d features; m
bytes of a value that is multiplied: 2 under autocast, else 4. docs/plan.md has the formulas in one table.
"""

from dataclasses import dataclass, replace

from redraft.frame.profile import FitParams
from redraft.hidden.sizes import TOP
from redraft.plan.shape import AUX, Shape


@dataclass(frozen=True)
class Load:
    """A micro batch."""

    shape: Shape
    steps: int
    """K."""
    rows: int
    """B."""
    row_tokens: int
    """S."""
    width: int
    """Q, positions asked in a row."""
    bf16: bool
    """Whether products run under autocast."""
    law: str
    """`extract.law`."""

    @classmethod
    def of(cls, shape: Shape, fit: FitParams, law: str, supervised: float) -> "Load":
        """A micro batch of full rows of which a share is supervised, each one answer."""
        width = max(1, round(supervised * fit.row_tokens))
        rows = fit.micro_tokens // fit.row_tokens
        return cls(shape, fit.ttt_steps, rows, fit.row_tokens, width, fit.precision != "fp32", law)

    def at(self, steps: int) -> "Load":
        """The same with another K."""
        return replace(self, steps=steps)

    @property
    def tokens(self) -> int:
        """T."""
        return self.rows * self.row_tokens

    @property
    def asked(self) -> int:
        """P."""
        return self.rows * self.width

    @property
    def seen(self) -> list[int]:
        """Keys in a row at each step: those of the row, and of every later step so far those of the positions asked."""
        return [self.row_tokens + step * self.width for step in range(self.steps)]

    def flops(self) -> int:
        """Of forward and backward: of a product of n weights 2 a row forward, 2 for its weights, 2 for its input.

        Attention by the memory-efficient kernel: 2 products forward, and 5 backward, since it computes the scores anew.
        """
        s, asked, tokens = self.shape, self.asked, self.tokens
        heads, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        of_asked = 2 * s.hidden * heads + heads * s.hidden + 3 * s.hidden * s.intermediate + s.hidden * s.slots
        of_keys = 2 * s.hidden * 2 * kv
        products = 6 * (self.steps * asked * of_asked + (tokens + (self.steps - 1) * asked) * of_keys)
        fc = 4 * tokens * AUX * s.hidden * s.hidden  # its input has no gradient
        attention = (2 + 5) * sum(2 * asked * keys * heads for keys in self.seen)
        # the target's law where it is read: behind the positions of every step, once each
        places = min(tokens, asked + self.rows * (self.steps - 1))
        law = 0 if self.law == "top64" else 2 * places * s.hidden * s.slots
        return products + fc + attention + law

    def activations(self) -> int:
        """Bytes that autograd keeps for the backward, the loss not counted."""
        s, asked, tokens = self.shape, self.asked, self.tokens
        m = 2 if self.bf16 else 4
        heads = s.heads * s.head_dim
        kept = m * tokens * AUX * s.hidden  # input of fc
        for step, keys in enumerate(self.seen):
            inner = asked if step else tokens
            norms = 4 * (s.hidden + 1) * (2 * inner + asked)  # fp32 inputs, and one number a row
            if self.bf16:  # the input of every product is cast anew
                inputs = m * 2 * s.hidden * (asked + 2 * inner) + m * 2 * asked * s.hidden
            else:
                inputs = m * 2 * s.hidden * (inner if step else inner + asked) + m * asked * s.hidden
            rotary = 8 * s.head_dim * (inner if step else inner + asked)
            attention = m * asked * (2 * heads + keys) + m * 2 * self.rows * keys * heads + 4 * asked * s.heads
            mlp = m * asked * (heads + 4 * s.intermediate)  # the input of o_proj, and four of the MLP
            kept += norms + inputs + rotary + attention + mlp
        rows = self.steps * asked
        return kept + 4 * rows * (s.hidden + 1) + (2 * rows * s.hidden if self.bf16 else 4 * rows * s.hidden)

    def logits(self) -> int:
        """Bytes of the loss: the logits in fp32 and their gradient, and what it keeps of the two laws."""
        rows = self.steps * self.asked
        kept = TOP * (4 + 8) if self.law == "top64" else 8 * self.shape.slots
        return rows * (8 * self.shape.slots + kept)

    def batch(self, micro: int) -> int:
        """Bytes of the `micro` batches of a step, all on the GPU at once, and of one of them in fp32."""
        hidden = self.shape.hidden
        law = TOP * (4 + 2) if self.law == "top64" else 2 * hidden
        a_token = 2 * AUX * hidden + law + 4 + 1 + 4 + 8 + 8  # ids, mask, greedy, documents, positions
        cast = 4 * hidden * (AUX + (not self.bf16 and self.law != "top64"))
        return self.tokens * (micro * a_token + cast)


def memory(load: Load, fit: FitParams, processes: int, sharded: bool) -> dict[str, int]:
    """Bytes of one GPU by part, 0 where there is none of it; not all are there at once: the sum is an upper bound.

    Args:
        load: a micro batch.
        fit: the training.
        processes: of the whole training.
        sharded: by FSDP2, which gathers weights whole for a micro batch and shards their gradients after it.
    """
    shape = load.shape
    trained = sum(count for name, count in shape.parts.items() if name not in fit.loss.freeze)
    share = processes if sharded else 1
    micro = -(-fit.batch_tokens // (processes * fit.micro_tokens))
    return {
        "weights, fp32": 4 * shape.weights // share,
        "gradients, fp32": 4 * trained // share,
        "AdamW, fp32": 8 * trained // share,
        "initial weights (loss.l2)": 4 * trained // share if fit.loss.l2 else 0,
        "DDP buckets": 4 * trained if processes > 1 and not sharded else 0,
        "FSDP2, gathered": 4 * (shape.weights + trained) if sharded else 0,
        "bf16 copies": 2 * shape.matrices if load.bf16 else 0,
        "embedding, fp32": 4 * shape.vocab * shape.hidden,
        "draft head, bf16": 2 * shape.slots * shape.hidden + 8 * shape.slots,
        "batch": load.batch(micro),
        "saved activations": load.activations(),
        "logits": load.logits(),
    }
