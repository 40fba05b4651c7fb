"""The walked prediction against the torch engine: in fp32 the same rounds, accepted drafts and all."""

import torch
from conftest import some_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.engines.torch import TorchEngine
from redraft.hidden.in_process import forward
from redraft.hidden.rows import Batch
from redraft.target.model import Target
from redraft.train.step import StepOutput, TTTModule
from redraft.train.walk import walk

STEPS = 3


def test_the_walk_is_what_the_engine_serves(target: Target) -> None:
    checkpoint = some_checkpoint(2, slots=64, scale=2.0)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(1, 96, (length,), generator=generator).tolist() for length in (3, 5, 8, 4, 9, 6, 7, 12)]
    plain = TorchEngine(target, None, 0, frozenset({0}))
    answers = [plain.generate(prompt, 24).ids for prompt in prompts]
    documents = []
    for prompt, answer in zip(prompts, answers, strict=True):
        mask = torch.tensor([0] * len(prompt) + [1] * len(answer))
        documents.append((torch.tensor(prompt + answer, dtype=torch.int32), mask.to(torch.uint8)))
    states = forward(target, [ids for ids, _ in documents], target.aux_layers)
    tensors = [
        {"input_ids": ids, "loss_mask": mask, "final": each["final"], "greedy": each["greedy"]}
        | {"aux": torch.cat([each[f"layer_{layer}"] for layer in target.aux_layers], -1)}
        for (ids, mask), each in zip(documents, states, strict=True)
    ]
    row = Batch.row(tensors)  # all documents in one packed row
    module = TTTModule(checkpoint.drafter, checkpoint.mapping, target.embed, target.head, STEPS)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(60):  # until it is right now and then
        output = module(row)
        (output.losses * output.contributing()).sum().div(output.contributing().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = TorchEngine(target, checkpoint, STEPS, frozenset({0}))
    assert [engine.generate(prompt, 24).ids for prompt in prompts] == answers
    with torch.no_grad():
        found = walk(module(row), row.input_ids, row.loss_mask, row.documents)
    assert found.sum((0, 1)).tolist() == engine.acceptance().histogram
    assert min(found.sum((0, 1)).tolist()) > 0  # every number of accepted drafts occurs
    for number, prompt in enumerate(prompts):  # and of each document its own
        alone = TorchEngine(target, checkpoint, STEPS, frozenset({0}))
        alone.generate(prompt, 24)
        assert found[0, number].tolist() == alone.acceptance().histogram


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=STEPS, max_size=STEPS), min_size=3, max_size=20),
    st.integers(1, 3),
)
def test_a_walk_round_by_round(right: list[list[bool]], prompt: int) -> None:
    """Against the rule written out for one answer: `right[t][k]`, were draft k at position t compared with a token."""
    size = prompt + len(right)
    ids = torch.arange(100, 100 + size)[None]
    mask = torch.tensor([[0] * prompt + [1] * len(right)])
    first = prompt - 1  # the last prompt position
    places = torch.arange(first, size - 2)
    counted = torch.stack([places + 2 + step < size for step in range(STEPS)])
    wanted = (places + 2 + torch.arange(STEPS)[:, None]).clamp(max=size - 1)
    flags = torch.tensor(right)[: len(places)].T
    drafted = torch.where(flags, ids[0][wanted], torch.zeros_like(wanted))
    nothing = torch.zeros(STEPS, len(places))
    output = StepOutput(places, counted, counted, counted, drafted, drafted, nothing, nothing[..., None])
    expected = [0] * (STEPS + 1)
    at = first
    while at < size - 2:
        accepted = 0
        while accepted < STEPS and at + 2 + accepted < size and right[at - first][accepted]:
            accepted += 1
        if at + 2 + accepted >= size:
            break
        expected[accepted] += 1
        at += accepted + 1
    assert walk(output, ids, mask, torch.ones_like(ids)).tolist() == [[expected]]
