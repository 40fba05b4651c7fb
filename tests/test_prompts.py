"""Prompts that stand in two splits, or twice in one, in whatever spelling."""

import unicodedata
from typing import Any

import numpy as np
import pytest
from chats import answer, user
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.corpus.prompts import Prompts, prompt_keys, require_apart, spelled
from redraft.frame.errors import RedraftError


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("What is 7?", "  what IS  7 "),
        ("What is 7?", "What is 7?!"),
        ("What is\n7?", "What is 7?"),
        ("don't", "DON’T"),
        ("“Café”", '"cafe\u0301"'),
        ("ﬁne Straße", "FINE STRASSE"),
        ("e‑mail", "E-Mail"),
        ("a\u200bb\ufeff", "ab"),
        ("ｈｅｌｌｏ", "hello"),
        ("你好。", "你好"),
        ("7-5", "7 − 5"),
        ("hello,world", "Hello, world…"),
        ("- one\n- two", "one two"),
        ("❤\ufe0f", "❤"),
        ("", " "),
    ],
)
def test_a_prompt_is_the_same_in_whatever_spelling(one: str, two: str) -> None:
    assert spelled(one) == spelled(two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("What is C++?", "What is C?"), ("C#", "C"), ("7 + 5", "7 - 5"), ("-5", "5"), ("3.5", "35"), ("<b>", "b"),
        ("1,000", "1, 000"), ("50%", "50"), ("a/b", "ab"), ("@me", "me"), ("[1]", "1"), ("😀", "😃"), ("?", "!"),
        ("x^2", "x2"), ("a b", "ab"), ("Who are you?", "How are you?"), ("$5", "5"), ("don't", "dont"),
    ],
)  # fmt: skip
def test_signs_with_a_meaning_of_their_own_stay(one: str, two: str) -> None:
    assert spelled(one) != spelled(two)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_forms_of_unicode_and_case_are_one_spelling(text: str) -> None:
    found = spelled(text)
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert spelled(unicodedata.normalize(form, text)) == found
    assert spelled(text.casefold()) == found
    assert spelled(f"  {text}\t\n") == found


def keys(*chats: list[Any]) -> Prompts:
    listed = [prompt_keys(messages) for messages in chats]
    flat = [key for each in listed for key in each]
    owner = [chat for chat, each in enumerate(listed) for _ in each]
    return Prompts(np.array(flat, np.uint64), np.array(owner, np.int64), [f"c{chat}" for chat in range(len(chats))])


def numbered(count: int, word: str) -> list[Any]:
    return [[user(f"{word} {number}?"), answer("It is.")] for number in range(count)]


def test_every_answered_prompt_counts_and_no_other() -> None:
    two = [user("one"), answer("a"), user("two"), answer("b")]
    system = {"role": "system", "content": "Be short."}
    known = keys(two, [user("three"), answer("c")], [user("four")])
    held = keys(
        [system, user("ONE!"), answer("else")],  # the first turn of a longer chat
        [user("two"), answer("b")],  # said there, but after something else
        [user("one"), answer("z"), user("Two."), answer("b")],
        [user("four"), answer("d")],  # nobody answered it there
        [user("one two"), answer("b")],
    )
    assert held.also_in(known) == ["c0 is c0", "c2 is c0"]
    assert keys(*[[user("x"), answer(str(each))] for each in range(3)], two, two).repeated() == [
        "c1 is c0",
        "c2 is c0",
        "c4 is c3",
    ]
    assert keys().also_in(known) == known.also_in(keys()) == keys().repeated() == []


@pytest.mark.parametrize("split", ["donor", "train"])
def test_a_share_of_leaks_above_the_param_is_refused(split: str) -> None:
    told = {name: keys(*numbered(10, name)) for name in ("donor", "train", "heldout")}
    assert require_apart(told, 0, 0, "here") == {
        "repeated": {"donor": 0, "train": 0, "heldout": 0}, "heldout_donor": 0, "heldout_train": 0, "train_donor": 0,
    }  # fmt: skip
    told[split] = keys(*numbered(10, split), [user("HELDOUT 4"), answer("x")])
    with pytest.raises(RedraftError, match=r"held out and trained on(?s:.*)1 of 10: c4 is c10"):
        require_apart(told, 0.05, 0, "here")
    assert require_apart(told, 0.1, 0, "here")[f"heldout_{split}"] == 1
    told[split] = keys(*numbered(9, split), [user(f"{split.upper()}  3"), answer("x")])
    with pytest.raises(RedraftError, match=rf"more than once(?s:.*)here: {split}(?s:.*)1 of 10: c9 is c3"):
        require_apart(told, 0, 0.05, "here")
    assert require_apart(told, 0, 0.1, "here")["repeated"][split] == 1
