"""The EAGLE-3 drafter, as SGLang's `LlamaForCausalLMEagle3` computes it.

Legend of shapes: B batch, S tokens, H hidden size, N draft slots, h heads, g key/value heads, d head size.

One draft step at position t (SGLang 0.5.23 `llama_eagle3.py`; no `norm_before_residual`, no `norm_output`):
    e = input_layernorm(embed(x[t+1]));  n = hidden_norm(state)
    state' = state + attention([e ; n]);  state'' = state' + mlp(post_attention_layernorm(state'))
    logits = lm_head(norm(state''));  state'' itself, un-normed, is the state of the next step
The first state is fc(aux). The residual is the un-normed state. Parameter names are the names on disk.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query [B,h,R,d], key [B,g,S,d], value [B,g,S,d]) to the attended values [B,h,R,d]."""
Rows = Tensor | slice
"""Positions of dimension S whose next state is wanted; keys and values are made of all."""
ALL = slice(None)


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter; field names are those of its `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """V of the target."""
    draft_vocab_size: int
    """N."""
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    """Tokens."""
    num_aux_layers: int = 3

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding (NeoX halves), fp32 [..., d], for integer `positions` [...]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary tables [B, S, d] to states [B, heads, S, d]; the result has the states' dtype."""
    low, high = states.float().chunk(2, dim=-1)
    turned = torch.cat([-high, low], dim=-1)
    return (states.float() * cos[:, None] + turned * sin[:, None]).to(states.dtype)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its weight: float32 over the bf16 states of autocast, as the kernel wants it."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Projections of the drafter's attention; what is attended to is the caller's `attend`."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        width, d = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, config.hidden_size, bias=False)

    def forward(self, inputs: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, rows: Rows) -> Tensor:
        """[B, S, 2H] to the attended positions `rows` [B, R, H]."""

        def heads(states: Tensor) -> Tensor:
            return states.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

        query = _rotate(heads(self.q_proj(inputs[:, rows])), rope[0][:, rows], rope[1][:, rows])
        key = _rotate(heads(self.k_proj(inputs)), *rope)
        attended = attend(query, key, heads(self.v_proj(inputs)))
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        return self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))


class Layer(nn.Module):
    """The drafter's one decoder layer, on [embedding ; hidden]."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, states: Tensor, embeds: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, rows: Rows
    ) -> Tensor:
        """States and embeddings [B, S, H] to the next states [B, R, H] of the positions `rows`."""
        inputs = torch.cat([self.input_layernorm(embeds), self.hidden_norm(states)], dim=-1)
        states = states[:, rows] + self.self_attn(inputs, rope, attend, rows)
        return states + self.mlp(self.post_attention_layernorm(states))


class Drafter(nn.Module):
    """An EAGLE-3 drafter without the embedding, which is the target's and is handed in."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(config.num_aux_layers * hidden, hidden, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)

    @classmethod
    def fresh(cls, config: DrafterConfig, seed: int) -> "Drafter":
        """A drafter with normal(0, 0.02) weights and unit norms, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        drafter = cls(config)
        with torch.no_grad():
            for module in drafter.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0.0, 0.02, generator=generator)
        return drafter

    def step(self, states: Tensor, embeds: Tensor, positions: Tensor, attend: Attend, rows: Rows = ALL) -> Tensor:
        """One draft step.

        Args:
            states: [B, S, H], fc(aux) at the first step, else what the step before returned.
            embeds: [B, S, H], the target's embeddings of the tokens one ahead of the states.
            positions: int64 [B, S], rotary positions.
            attend: the attention over whatever keys the caller keeps.
            rows: the R positions whose next state is wanted: what depends on the others alone is not computed.

        Returns:
            The un-normed next states, [B, R, H].
        """
        rope = rope_tables(positions, self.config.head_dim, self.config.rope_theta)
        return self.midlayer(states, embeds, rope, attend, rows)

    def logits(self, states: Tensor) -> Tensor:
        """Un-normed states [..., H] to logits over slots [..., N]."""
        return self.lm_head(self.norm(states))
