"""The mapping type: d2t and t2d in and out, and every refusal (cases C02, C05, C10)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redraft.frame.errors import RedraftError
from redraft.vocab.mapping import Mapping


@st.composite
def mappings(draw: st.DrawFn) -> Mapping:
    vocab = draw(st.integers(1, 80))
    ids = draw(st.lists(st.integers(0, vocab - 1), min_size=1, unique=True))
    return Mapping(np.array(ids), vocab)


@given(mappings())
def test_offsets_and_mask_come_back_as_the_same_mapping(mapping: Mapping) -> None:
    again = Mapping.from_offsets(mapping.d2t, mapping.t2d, mapping.vocab_size)
    assert again.hash == mapping.hash
    assert [slot + offset for slot, offset in enumerate(mapping.d2t)] == list(mapping.ids)
    assert sorted(mapping.ids) == list(np.flatnonzero(mapping.t2d))


@given(mappings())
def test_slots_invert_ids(mapping: Mapping) -> None:
    expected = {int(number): slot for slot, number in enumerate(mapping.ids)}
    assert [int(slot) for slot in mapping.slots] == [expected.get(number, -1) for number in range(mapping.vocab_size)]


@given(mappings(), mappings())
def test_the_hash_tells_mappings_apart(one: Mapping, two: Mapping) -> None:
    same = one.vocab_size == two.vocab_size and list(one.ids) == list(two.ids)
    assert (one.hash == two.hash) == same


def test_int32_offsets_and_a_mask_of_bytes_are_read() -> None:
    mapping = Mapping(np.array([3, 5, 8]), 10)
    again = Mapping.from_offsets(mapping.d2t.astype(np.int32), mapping.t2d.astype(np.uint8), 10)
    assert list(again.ids) == [3, 5, 8]


IDS = np.array([3, 5, 8, 13, 21, 34, 55, 60])
MASK = np.isin(np.arange(64), IDS)


@pytest.mark.parametrize(
    ("d2t", "t2d", "named"),
    [
        (IDS - np.arange(8), MASK[:60], r"\[60\]"),
        (IDS - np.arange(8), np.isin(np.arange(64), IDS[:7]), "found: 7"),
        (IDS - np.arange(8), np.isin(np.arange(64), [*IDS, 1]), "found: 9"),
        (IDS - np.arange(8), np.isin(np.arange(64), [*IDS[:7], 1]), "slot 7: 60"),
        (np.array([5, 4, 3, 2, 1, 0, -1, -2]), None, "two slots"),
        (np.array([64, 0, 0, 0, 0, 0, 0, 0]), None, "slot 0: 64"),
        (np.array([-1, 0, 0, 0, 0, 0, 0, 0]), None, "slot 0: -1"),
        (IDS, MASK, "out of range|different ids"),
        ((IDS - np.arange(8)).astype(float), MASK, "float64"),
        (IDS - np.arange(8), MASK.astype(np.uint8) * 2, "uint8"),
        (IDS - np.arange(8), MASK.astype(float), "float64"),
        (IDS, None, "ids rather than offsets"),
        (IDS - np.arange(8), (MASK.astype(np.uint8) * 255).view(bool), "bool"),
        (np.zeros(0, np.int64), None, "impossible size"),
        (np.arange(65) * 0, None, "impossible size"),
    ],
)
def test_what_is_no_mapping_is_refused_with_the_slot(d2t: np.ndarray, t2d: np.ndarray | None, named: str) -> None:
    with pytest.raises(RedraftError, match=named):
        Mapping.from_offsets(d2t, t2d, 64)


def test_a_frequency_ordered_mapping_is_read_but_not_ascending() -> None:
    ids = np.array([8, 3, 5])
    mapping = Mapping.from_offsets(ids - np.arange(3), np.isin(np.arange(10), ids), 10)
    assert list(mapping.ids) == [8, 3, 5]
    assert mapping.order == "other"
    assert Mapping(np.sort(ids), 10).order == "ascending"
