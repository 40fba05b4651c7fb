"""Rows that bring ids: of the target's own answers, or of another tool."""

import json
from typing import Any

import pytest
from chats import answer, fast, user
from test_render import rows

from redraft.corpus.chat import CUT, template_record
from redraft.corpus.tokenizer import tokenizer_hash


def generated(**more: Any) -> dict[str, Any]:
    return {**answer("four"), "prompt_ids": [1, 2], "generated_ids": [3], **more}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([generated(generated_ids=[3.0])], "ids"),
        ([generated(generated_ids=[True])], "ids"),
        ([generated(generated_ids=[-1])], "ids"),
        ([generated(generated_ids=[1 << 40])], "ids"),
        ([generated(generated_ids="3")], "ids"),
        ([generated(generated_ids=None)], "ids"),
        ([generated(prompt_ids=None)], "ids"),
        ([generated(keeps=1)], "ids"),
        ([generated(keeps="x")], "ids"),
        ([generated(), generated(keeps=4)], "ids"),
        ([generated(), generated(keeps=-1)], "ids"),
        ([generated(content="")], "empty answer"),
        ([generated(generated_ids=[])], "empty answer"),
        ([generated(generated_ids=[400])], "ids: id 400, and the target has 400"),
        ([generated(prompt_ids=[400])], "ids: id 400, and the target has 400"),
    ],
)
def test_ids_that_cannot_be_are_told(messages: list[Any], reason: str) -> None:
    part = rows(fast("plain"), {"messages": [user("a"), *messages]}, rows=400)
    assert list(part.told.dropped) == [reason.split(":")[0]]
    assert reason in next(iter(part.told.examples.values()))[0]


def test_a_turn_of_one_end_marker_is_kept_beside_others_as_it_was_generated() -> None:
    end = fast("plain").eos_token_id
    messages = [user("a"), generated(content="", generated_ids=[end]), user("b"), generated(keeps=3, prompt_ids=[9])]
    part = rows(fast("plain"), {"messages": messages})
    assert part.arrays["input_ids"].tolist() == [1, 2, end, 9, 3]
    assert part.arrays["loss_mask"].tolist() == [0, 0, 1, 0, 1]


def test_cut_answers_are_left_out_by_a_param_and_the_rest_of_the_chat_is_not() -> None:
    tokenizer = fast("plain")
    whole, cut = answer("four"), answer("four", finish=CUT)
    given = [[user("a"), whole, user("b"), cut], [user("a"), cut], [user("a"), generated(finish=CUT)]]
    listed = [{"messages": messages} for messages in given]
    kept, dropped = (rows(tokenizer, *listed, params={"cut": cut}) for cut in ("keep", "drop"))
    assert (kept.told.cut, kept.told.turns, kept.told.dropped) == (3, 4, {})
    assert (dropped.told.cut, dropped.told.turns, dropped.told.dropped) == (0, 1, {"cut": 2})
    assert (dropped.names, dropped.told.left_out) == (["row-0"], {"cut": 1})


def test_answers_made_for_another_tokenizer_or_template_are_told() -> None:
    tokenizer = fast("plain")
    own = {"tokenizer": tokenizer_hash(tokenizer), "template": template_record(tokenizer), "target": "t"}
    text, ids = [user("a"), answer("b")], [user("a"), generated()]
    other = {**own, "template": {"sha256": "x", "arguments": {"thinking": False}}}
    part = rows(
        tokenizer,
        *(
            {"messages": messages, "made": made}
            for messages in (text, ids)
            for made in (own, other, {"target": "z"}, 3)
        ),
        {"messages": ids, "made": {**own, "tokenizer": "x"}},
        {"messages": text, "made": {**own, "tokenizer": "x"}},
        {"input_ids": [1, 2], "loss_mask": [0, 1], "made": json.dumps({**own, "tokenizer": "x"})},
        target="t",
    )
    assert part.told.dropped == {"other template": 2, "other tokenizer": 2}
    assert '{"thinking": false}' in part.told.examples["other template"][0]
    assert (part.told.other_target, part.told.generated) == (2, 3)


@pytest.mark.parametrize(
    ("row", "reason", "turns"),
    [
        ({"loss_mask": [0, 1, 1, 0, 1, 0]}, None, 2),
        ({"loss_mask": [False, True, True, False, False, False]}, None, 1),
        ({"loss_mask": [0, 0, 0, 0, 0, 0]}, "no answer: loss_mask is 0 everywhere", 0),
        ({"loss_mask": [0, 0, 0, 0, 0, 1]}, "truncated: the answer begins after 5 tokens", 0),
        ({"loss_mask": [0, 1]}, "ids", 0),
        ({"loss_mask": [0, 1, 2, 0, 0, 0]}, "ids", 0),
        ({"loss_mask": [[0, 1, 1, 0, 1, 0]]}, "ids", 0),
        ({"input_ids": [], "loss_mask": []}, "no answer", 0),
        ({"input_ids": [0, 0, 0, 0, 400, 0], "loss_mask": [0, 1, 1, 1, 1, 1]}, "ids: id 400", 0),
    ],
)
def test_rows_of_other_tools_are_taken_as_they_are(row: dict[str, Any], reason: str | None, turns: int) -> None:
    given = {"input_ids": [5, 6, 7, 8, 9, 10], **row}
    part = rows(fast("plain"), given, params={"max_length": 5}, rows=400)
    assert part.told.turns == turns
    if reason is None:
        assert part.arrays["input_ids"].tolist() == [5, 6, 7, 8, 9]
        assert part.arrays["loss_mask"].tolist() == [int(each) for each in row["loss_mask"][:5]]
    else:
        assert reason in next(iter(part.told.examples.values()))[0]


def test_ids_beside_messages_are_not_read_and_that_is_told() -> None:
    row = {"messages": [user("a"), answer("b", weight=0)], "input_ids": [1], "loss_mask": [1], "lang": "en"}
    part = rows(fast("plain"), row)
    assert dict(part.told.unknown) == {"input_ids": 1, "loss_mask": 1, "lang": 1, "messages.weight": 1}
