"""Building a draft vocabulary and auditing two (cases C01, C02, C03, C06)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_mapping import mappings

from redraft.frame.errors import RedraftError
from redraft.train.step import counted_positions
from redraft.vocab.audit import audit, drift_curve
from redraft.vocab.build import build, count_tokens, coverage, rank, read_vocab, write_vocab
from redraft.vocab.mapping import Mapping
from redraft.vocab.slots import by_slots, drafted, ladder


@given(
    st.lists(st.tuples(st.integers(0, 19), st.booleans()), max_size=200),
    st.integers(1, 20),
    st.sets(st.integers(0, 19)),
)
def test_the_most_frequent_ids_are_chosen_whatever_the_order(
    tokens: list[tuple[int, bool]], size: int, forced: set[int]
) -> None:
    if len(forced) > size:
        return
    ids, mask = np.array([t for t, _ in tokens], int), np.array([m for _, m in tokens], int)
    counts = count_tokens(ids, mask, 20)
    built = build(counts, size, forced=forced, decodable=range(20))
    shuffled = count_tokens(ids[::-1], mask[::-1], 20)
    assert build(shuffled, size, forced=forced, decodable=range(20)).mapping.hash == built.mapping.hash
    ranked = sorted((n for n in range(20) if n not in forced), key=lambda n: (-int(counts[n]), n))
    assert list(built.mapping.ids) == sorted([*forced, *ranked[: size - len(forced)]])
    assert built.padded == sum(counts[n] == 0 for n in ranked[: size - len(forced)])


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=20, max_size=20),
    st.sets(st.integers(0, 22)),
    st.sets(st.integers(0, 22)),
)
def test_every_size_covers_what_a_vocabulary_built_of_it_does(
    counted: list[tuple[int, int]], forced: set[int], decodable: set[int]
) -> None:
    train, heldout = (np.array(column) for column in zip(*counted, strict=True))
    order = rank(train, forced=forced, decodable=decodable)
    sizes = range(max(1, order.forced), len(order.ids) + 1)
    found = by_slots(order, train, heldout, heldout, sizes)
    for size in sizes:
        mapping = build(train, size, forced=forced, decodable=decodable).mapping
        row = found[str(size)]
        assert row["coverage_train"] == coverage(mapping, train)
        assert row["coverage_heldout"] == row["ceiling_heldout"] == coverage(mapping, heldout)
        total = max(1, int(heldout.sum()))
        assert row["seen_heldout"] == sum(heldout[number] for number in mapping.ids if train[number]) / total
    with pytest.raises(RedraftError):  # no vocabulary beyond the last
        build(train, len(order.ids) + 1, forced=forced, decodable=decodable)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=4))
def test_the_tokens_that_are_drafted_are_those_that_training_counts(masks: list[list[int]]) -> None:
    masks = [[0, *mask] for mask in masks]  # a prompt is before every answer
    offsets = np.cumsum([0, *map(len, masks)])
    documents = torch.repeat_interleave(torch.arange(len(masks)) + 1, torch.from_numpy(np.diff(offsets)))
    mask = np.array([flag for each in masks for flag in each], np.uint8)
    counted = counted_positions(torch.from_numpy(mask)[None], documents[None], 1)[0, 0]
    expected = np.zeros(len(mask), np.uint8)
    expected[counted.nonzero()[:, 0].numpy() + 2] = 1
    assert list(drafted(mask, offsets)) == list(expected)


@pytest.mark.parametrize(
    ("chosen", "least", "most", "sizes"),
    [
        (3072, 252, 49152, [1024, 2048, 3072, 4096, 8192, 16384, 32768, 49152]),
        (32000, 3000, 163840, [4096, 8192, 16384, 32000, 32768, 65536]),
        (400, 270, 600, [400, 600]),
        (400, 270, 400, [400]),
        (100_000, 1, 163840, [1024, 2048, 4096, 8192, 16384, 32768, 65536, 100_000]),
    ],
)
def test_the_sizes_that_are_looked_at(chosen: int, least: int, most: int, sizes: list[int]) -> None:
    assert ladder(chosen, least, most) == sizes


def test_a_token_seen_only_outside_answers_does_not_count() -> None:
    assert list(count_tokens(np.array([7, 7, 2]), np.array([0, 0, 1]), 8)) == [0, 0, 1, 0, 0, 0, 0, 0]


def test_a_small_corpus_is_topped_up_with_ids_that_decode() -> None:
    counts = np.zeros(64, np.int64)
    counts[[9, 11, 20, 30, 63]] = 1
    built = build(counts, 8, forced=[60], decodable=[n for n in range(60) if n not in (0, 1)])
    assert list(built.mapping.ids) == [2, 3, 9, 11, 20, 30, 60, 63]
    assert (built.forced, built.padded) == (1, 2)


@pytest.mark.parametrize("size", [0, -1, 65, 1])
def test_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(RedraftError, match=r"vocab\.slots"):
        build(np.ones(64, np.int64), size, forced=[60, 61], decodable=range(64))


def test_too_few_ids_to_choose_from_is_refused() -> None:
    with pytest.raises(RedraftError, match="at most 4"):
        build(np.zeros(64, np.int64), 8, decodable=range(4))


def test_an_id_beyond_the_target_is_refused() -> None:
    with pytest.raises(RedraftError, match="3 to 64"):
        count_tokens(np.array([3, 64]), np.array([1, 1]), 64)


def test_an_id_beyond_the_target_is_refused_outside_answers_too() -> None:
    with pytest.raises(RedraftError, match="3 to 64"):  # the target reads all of them
        count_tokens(np.array([3, 64]), np.array([1, 0]), 64)


@given(
    st.sets(st.integers(0, 29), min_size=1), st.sets(st.integers(0, 29)), st.sets(st.integers(0, 29)), st.integers(1, 9)
)
def test_tokens_without_a_row_are_left_out_and_named(
    known: set[int], special: set[int], single: set[int], size: int
) -> None:
    # A13: the tokenizer of gemma-3-1b-it has 262,145 ids, its embedding 262,144 rows
    rows, counts = 20, np.arange(20)
    within = {number for number in known | special if number < rows}
    forced = {number for number in special if number < rows}
    if len(forced) <= size:
        built = build(counts, size, forced=special, decodable=known)
        assert built.outside == tuple(sorted(number for number in known | special if number >= rows))
        assert (
            built.mapping.hash == build(counts, size, forced=forced, decodable=within - special | forced).mapping.hash
        )
    donor, new = Mapping(np.arange(5), rows), Mapping(np.arange(3, 9), rows)
    found = audit(donor, new, special={number: f"<{number}>" for number in special}, single_bytes=single)
    inside = audit(donor, new, special={n: f"<{n}>" for n in forced}, single_bytes={n for n in single if n < rows})
    assert found.verdict == inside.verdict
    assert all(
        each["all"] == len(ids & set(range(rows)))
        for each, ids in zip(
            (found.tokens[name] for name in ("special", "byte") if name in found.tokens),
            (ids for ids in (special, single) if ids),
            strict=True,
        )
    )
    assert {name for name, place in found.special.items() if place == "no row"} == {
        f"{number} <{number}>" for number in special - forced
    }


@pytest.mark.parametrize("name", ["vocab.json", "mapping.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]"])
def test_a_broken_vocabulary_is_told(name: str, content: bytes | None, tmp_path: Path) -> None:
    write_vocab(tmp_path / "vocab", build(np.arange(64), 8, decodable=range(64)), {}, {})
    (tmp_path / "vocab" / name).unlink()
    if content is not None:
        (tmp_path / "vocab" / name).write_bytes(content)
    with pytest.raises(RedraftError, match="vocab"):
        read_vocab(tmp_path / "vocab")


def test_a_vocabulary_is_read_as_it_was_written(tmp_path: Path) -> None:
    built = build(np.arange(64), 8, decodable=range(64))
    write_vocab(tmp_path / "vocab", built, {"train": np.arange(64)}, {"corpus": "x"})
    assert read_vocab(tmp_path / "vocab").hash == built.mapping.hash


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Mapping, Mapping]:
    one = draw(mappings())
    ids = draw(st.lists(st.integers(0, one.vocab_size - 1), min_size=1, unique=True))
    return one, Mapping(np.array(ids), one.vocab_size)


@given(pairs())
def test_the_audit_counts_what_sets_count(pair: tuple[Mapping, Mapping]) -> None:
    donor, new = pair
    counts = np.arange(donor.vocab_size)
    found = audit(donor, new, counts={"x": counts}, special={0: "zero"}, single_bytes={0})
    one, two = list(donor.ids), list(new.ids)
    assert found.shared == len(set(one) & set(two))
    assert found.same_slot == sum(a == b for a, b in zip(one, two, strict=False))
    assert found.moved == found.shared - found.same_slot
    assert (found.donor_only, found.new_only) == (len(set(one) - set(two)), len(set(two) - set(one)))
    divergence = next((slot for slot, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    if divergence is None and len(one) != len(two):
        divergence = min(len(one), len(two))
    assert found.first_divergence == divergence
    assert found.differing_slots + found.same_slot == len(two)
    assert found.coverage["x"]["donor"] == pytest.approx(coverage(donor, counts), abs=1e-6)
    assert found.special["0 zero"] == ("neither", "new", "donor", "both")[2 * (0 in one) + (0 in two)]
    assert found.tokens["byte"] == {"donor": 0 in one, "new": 0 in two, "neither": 0 not in one + two, "all": 1}
    assert ("lacks these special tokens" in found.verdict) == (0 not in one)
    moved = [two.index(number) - one.index(number) for number in set(one) & set(two)]
    assert found.drift_max == max(map(abs, moved), default=0)
    assert all(row["moved"] == two.index(one[int(row["slot"])]) - row["slot"] for row in drift_curve(donor, new))
    expected = "keep_donor_vocab" if one == two else "remap" if found.shared else "scratch"
    assert found.recommended_init == expected


def test_another_target_vocabulary_is_refused() -> None:
    with pytest.raises(RedraftError, match="another vocabulary"):
        audit(Mapping(np.arange(4), 8), Mapping(np.arange(4), 9))


def test_ids_that_mean_another_token_are_not_shared() -> None:
    donor = Mapping(np.array([10, 20, 30, 40]), 64)
    found = audit(donor, donor, foreign={20: ("old", "new")})
    assert (found.shared, found.same_slot, found.moved, found.kind) == (3, 3, 0, "drift")
    assert "20 ('old', now 'new')" in found.verdict


def test_one_id_lost_shifts_all_that_follow() -> None:
    donor, new = Mapping(np.array([10, 20, 30, 40]), 64), Mapping(np.array([10, 25, 30, 50]), 64)
    found = audit(donor, new)
    assert (found.same_slot, found.moved, found.donor_only, found.new_only) == (2, 0, 2, 2)
    found = audit(donor, Mapping(np.array([10, 20, 25, 30]), 64))
    assert (found.same_slot, found.moved, found.first_divergence) == (2, 1, 2)
    assert "nothing is scrambled" in found.verdict
