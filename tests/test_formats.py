"""States kept in fewer bytes: what is lost, and that nothing else is."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redraft.frame.errors import RedraftError
from redraft.hidden.formats import LARGEST, LEAST_SCALE, packed, scored_positions, unpacked
from redraft.hidden.reading import ShardFile
from redraft.hidden.shards import write_shard
from redraft.hidden.sizes import TOP, token_bytes
from redraft.train.step import counted_positions

KEPT, LAWS = ("bf16", "fp8"), ("states", "scored", "top64")
LAYERS, HIDDEN, VOCAB = 3, 8, 96
every = pytest.mark.parametrize(("kept", "law"), [(kept, law) for kept in KEPT for law in LAWS])


def states_of(tokens: int, seed: int = 0, scale: float = 1.0) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """States of a document, its target's head, and its loss mask."""
    torch.manual_seed(seed)
    head, final = torch.randn(VOCAB, HIDDEN), scale * torch.randn(tokens, HIDDEN)
    states = {"input_ids": torch.randint(VOCAB, (tokens,)).int(), "aux": scale * torch.randn(tokens, LAYERS * HIDDEN)}
    states |= {"final": final, "greedy": (final @ head.T).argmax(1).int()}
    return states, head, (torch.rand(tokens) < 0.6).byte()


def pack(states: dict[str, Tensor], kept: str, law: str, head: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return packed(states, kept, law, head, scored_positions(mask), LAYERS)


def bytes_of(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for name, tensor in tensors.items() if name not in ("input_ids", "greedy"))


def test_bytes_of_kimi() -> None:
    sizes = {(kept, law): token_bytes(7168, 3, kept, law) for kept in KEPT for law in ("states", "top64")}
    assert sizes["bf16", "states"] == 57_344
    assert sizes["fp8", "states"] <= 28_800
    assert sizes["fp8", "top64"] <= 22_000


@every
def test_bytes_are_those_of_the_tensors(kept: str, law: str) -> None:
    states, head, mask = states_of(40)
    share = float(scored_positions(mask).float().mean())
    written = bytes_of(pack(states, kept, law, head, mask))
    assert abs(written - 40 * token_bytes(HIDDEN, LAYERS, kept, law, share)) <= 40  # rounded up for each token


numbers = st.floats(-(2.0**127), 2.0**127, width=32) | st.floats(-2, 2, width=32) | st.sampled_from([0, 1e-44, 3.38e38])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(numbers, min_size=LAYERS * 2, max_size=LAYERS * 2), min_size=1, max_size=4))
def test_fp8_is_near_by_token_and_layer(rows: list[list[float]]) -> None:
    """e4m3 has 3 bits behind the leading one and steps of 2^-9 near 0; bf16 adds its own rounding."""
    aux = torch.tensor(rows)
    final = aux[:, :2]
    given_states = {"aux": aux, "final": final, "greedy": torch.zeros(len(rows), dtype=torch.int32)}
    found = unpacked(packed(given_states, "fp8", "states", layers=LAYERS))
    for name, layers in (("aux", LAYERS), ("final", 1)):
        one = given_states[name].double().unflatten(1, (layers, -1))
        two = found[name].double().unflatten(1, (layers, -1))
        assert bool(two.isfinite().all())
        scale = (one.abs().amax(2, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
        assert bool(((one - two).abs() <= one.abs() * (2**-4 + 2**-8) + scale * 2**-9).all())


@pytest.mark.parametrize("kept", KEPT)
def test_a_loud_layer_or_token_takes_nothing_from_another(kept: str) -> None:
    states, head, mask = states_of(6)
    quiet = unpacked(pack(states, kept, "states", head, mask))
    loud = {**states, "aux": states["aux"].clone()}
    loud["aux"][2] *= 1e6
    loud["aux"][:, :HIDDEN] *= 1e6
    found = unpacked(pack(loud, kept, "states", head, mask))["aux"]
    others = torch.arange(6) != 2
    assert torch.equal(found[others, HIDDEN:], quiet["aux"][others, HIDDEN:])


@every
def test_bf16_loses_nothing_and_what_is_no_state_stays(kept: str, law: str) -> None:
    states, head, mask = states_of(30)
    states = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in states.items()}
    states["greedy"] = (states["final"] @ head.bfloat16().T).argmax(1).int()
    found = unpacked(pack(states, kept, law, head, mask), mask)
    assert {name: len(tensor) for name, tensor in found.items()} == dict.fromkeys(found, 30)
    assert all(torch.equal(found[name], states[name]) for name in ("input_ids", "greedy"))
    if kept == "bf16":
        assert torch.equal(found["aux"], states["aux"])
        if law != "top64":
            kept_at = scored_positions(mask) if law == "scored" else torch.ones(30, dtype=torch.bool)
            assert torch.equal(found["final"][kept_at], states["final"][kept_at])
            assert not found["final"][~kept_at].any()


@every
def test_documents_are_cut_from_a_shard(kept: str, law: str, tmp_path: Path) -> None:
    documents = [states_of(tokens, seed) for seed, tokens in enumerate((1, 7, 12, 3))]
    head = documents[0][1]
    for states, _, _ in documents:
        states["greedy"] = (states["final"] @ head.T).argmax(1).int()
    packs = [pack(states, kept, law, head, mask) for states, _, mask in documents]
    shard = write_shard(tmp_path, "x", ["a", "b", "c", "d"], packs)
    file = ShardFile(shard.file(tmp_path))
    for place, (own, (_, _, mask)) in enumerate(zip(packs, documents, strict=True)):
        found, expected = file.read(place), unpacked(own, mask)
        assert found.keys() == own.keys()
        for name, tensor in unpacked(found, mask).items():
            assert torch.equal(tensor, expected[name]), name


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=16), st.integers(1, 6), st.sampled_from(["served", "input"]))
def test_every_law_that_any_training_asks_for_is_kept(flags: list[bool], steps: int, counting: str) -> None:
    mask = torch.tensor(flags).byte()
    counted = counted_positions(mask[None], torch.ones(1, len(mask), dtype=torch.int64), steps, counting)[:, 0]
    step, t = counted.nonzero().T
    assert bool(scored_positions(mask)[t + 1 + step].all())


def test_a_loss_mask_that_changed_is_refused() -> None:
    states, head, mask = states_of(12)
    mask[:] = 0
    mask[4:7] = 1
    tensors = pack(states, "bf16", "scored", head, mask)
    fewer, more = mask.clone(), mask.clone()
    fewer[6], more[9] = 0, 1
    unpacked(tensors, fewer)
    with pytest.raises(RedraftError, match="was not kept"):
        unpacked(tensors, more)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, TOP))
def test_the_law_over_ids_inside_the_top_is_that_of_the_full_logits(seed: int, count: int) -> None:
    states, head, mask = states_of(3, seed)
    found = unpacked(pack(states, "bf16", "top64", head, mask))
    assert found["top_ids"].shape == found["top_logits"].shape == (3, TOP)
    assert torch.equal(found["top_ids"][:, 0], states["greedy"])
    logits = states["final"] @ head.T
    chosen = torch.rand(3, TOP).argsort(1)[:, :count]
    ids = found["top_ids"].long().gather(1, chosen)
    law = found["top_logits"].float().gather(1, chosen).softmax(1)
    assert torch.allclose(law, logits.gather(1, ids).softmax(1), atol=0.02)  # bf16 keeps 8 bits of a logit


def test_an_engine_without_final_states_gives_the_same_law() -> None:
    states, head, mask = states_of(5)
    expected = pack(states, "fp8", "top64", head, mask)
    logits, ids = (states["final"] @ head.T).log_softmax(1).topk(TOP)  # a server tells logarithms of probabilities
    served = {"aux": states["aux"], "greedy": states["greedy"], "top_ids": ids, "top_logits": logits}
    found = packed(served, "fp8", "top64")
    assert torch.equal(found["top_ids"], expected["top_ids"])
    assert torch.allclose(found["top_logits"].float(), expected["top_logits"].float(), rtol=2**-7, atol=1e-6)
    with pytest.raises(RedraftError, match="cannot be had"):
        packed(served, "bf16", "states")
    with pytest.raises(RedraftError, match="not among its largest"):
        packed({**served, "greedy": torch.full((5,), VOCAB)}, "fp8", "top64")


@every
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(kept: str, law: str, value: float) -> None:
    states, head, mask = states_of(4)
    states["aux"][2, 5] = value
    with pytest.raises(RedraftError, match="not finite"):
        pack(states, kept, law, head, mask)
