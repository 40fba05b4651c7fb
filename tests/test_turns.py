"""Turns: which messages are asked, what a reply is, and answers in this process."""

import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi.folder import kimi_folder

from redraft.corpus.rows import Chat
from redraft.corpus.samples import given_turns
from redraft.corpus.tokenizer import load_tokenizer, stop_ids
from redraft.engines.torch import TorchEngine
from redraft.frame.http import ReplyError
from redraft.regenerate.answers import answer_files
from redraft.regenerate.conversation import Answer, Asking, Conversation, Sampling
from redraft.regenerate.forms import OPENAI, SGLANG, Form, read
from redraft.regenerate.local import answer_here, regenerate
from redraft.target.model import load_target

END = 2
Row = dict[str, Any]


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def reply(text: str) -> Row:
    return {"role": "assistant", "content": text}


def chats(count: int) -> list[Row]:
    """One to four turns, some with a system message, some of ShareGPT, some that end with a question."""
    rows = []
    for number in range(count):
        turns = [
            each for turn in range(1 + number % 4) for each in (user(f"What is {number}/{turn}?"), reply("It is."))
        ]
        row: Row = {"id": f"chat-{number}", "source": "test", "messages": turns}
        if number % 3 == 0:
            row["messages"] = [{"role": "system", "content": "Be brief."}, *turns[:-1]]
        if number % 5 == 0:
            row = {"id": row["id"], "conversations": [{"from": "human", "value": f"Say {number}."}], "score": number}
        rows.append(row)
    return rows


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def made(row: Row) -> list[Row]:
    """The messages that were answered."""
    return [message for message in row["messages"] if "finish" in message]


def asking(folder: Path, **changes: Any) -> Asking:
    tokenizer = load_tokenizer(folder)
    return Asking(tokenizer, stop_ids(folder, tokenizer), **{"context": 512, **changes})


def talking(text: str, how: Asking) -> Conversation:
    return Conversation(Chat("x", [user(text)]), how)


def talk(chat: list[Row], how: Asking, answers: list[str | Answer]) -> Conversation:
    """A conversation in which the target says `answers`; every prompt is asked for."""
    talked = Conversation(Chat("x", chat, row={"messages": chat}), how)
    for answer in answers:
        assert talked.prompt is not None
        text = answer if isinstance(answer, str) else ""
        ids = how.tokenizer(text, add_special_tokens=False)["input_ids"]
        talked.take(Answer([*ids, END], "stop") if isinstance(answer, str) else answer)
    assert talked.prompt is None
    return talked


@pytest.mark.parametrize(
    ("roles", "last_only", "answers", "found"),
    [
        ("ua", False, 1, "uA"),
        ("u", False, 1, "uA"),
        ("sua", False, 1, "suA"),
        ("uaua", False, 2, "uAuA"),
        ("uau", False, 2, "uAuA"),
        ("uuaa", False, 1, "uuA"),
        ("aua", False, 1, "auA"),
        ("uas", False, 1, "uA"),
        ("uasua", False, 2, "uAsuA"),
        ("sa", False, 1, "sA"),
        ("uata", False, 1, "uA"),
        ("uata", True, 1, "uatA"),
        ("uauaua", True, 1, "uauauA"),
        ("suaua", True, 1, "suauA"),
    ],
)
def test_which_messages_are_asked_and_which_answered(
    roles: str, last_only: bool, answers: int, found: str, tiny_folder: Path
) -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    chat = [{"role": names[role], "content": f"old {place}"} for place, role in enumerate(roles)]
    talked = talk(chat, asking(tiny_folder, last_only=last_only), ["new"] * answers)
    shown = "".join("A" if "finish" in each else each["role"][0] for each in talked.row()["messages"])
    assert shown == found
    assert [each["content"] for each in made(talked.row())] == ["new"] * answers


@pytest.mark.parametrize(
    ("answer", "after", "ended"),
    [
        (Answer([80, 81], "length"), "user", "cut"),
        ("It is <|start|>tool", "user", "markers"),
        (Answer(None, "stop", "", calls=[{"function": {"name": "f", "arguments": "{}"}}]), "user", "markers"),
        ("It is.", "tool", "tool"),
        ("word " * 600, "user", "context: a prompt of"),
    ],
)
def test_a_chat_ends_where_no_next_prompt_can_be_made(
    answer: str | Answer, after: str, ended: str, tiny_folder: Path
) -> None:
    chat = [user("a"), reply("b"), {"role": after, "content": "c"}, reply("d")]
    row = talk(chat, asking(tiny_folder), [answer]).row()
    assert str(row["ended"]).startswith(ended)
    assert [each["role"] for each in row["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize("chat", [[], [reply("b")]])
def test_a_chat_without_a_prompt_is_refused(chat: list[Row], tiny_folder: Path) -> None:
    with pytest.raises(Exception, match="no prompt: "):
        talk(chat, asking(tiny_folder), [])


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<think>\nfirst\n</think>\n\nthen", "then", "first"),
        ("then </think> that", "then </think> that", None),
        ("<think>never ends", "", "never ends"),
    ],
)
def test_reasoning_stands_by_itself(text: str, content: str, reasoning: str | None, tiny_folder: Path) -> None:
    (message,) = made(talk([user("a")], asking(tiny_folder), [text]).row())
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)


def test_a_tokenizer_of_python_and_ids_that_say_nothing(tmp_path: Path) -> None:
    """Kimi's kind raises on an id that only pads the head."""
    folder = kimi_folder(tmp_path / "target")
    tokenizer = load_tokenizer(folder, trust_remote_code=True)
    how = Asking(tokenizer, stop_ids(folder, tokenizer), 512)
    (end,) = how.stop - {tokenizer.eos_token_id}
    chat = [user("你好"), reply("x"), user("And?"), reply("y")]
    talked = Conversation(Chat("x", chat), how)
    for text in ("<think>so it is</think>世界 👩‍💻", "so</think>two"):
        talked.take(Answer([*tokenizer.encode(text), 10**6, end], "stop"))
    first, second = made(talked.row())
    assert (first["reasoning_content"], first["content"], second["content"]) == ("so it is", "世界 👩‍💻", "two")
    assert "世界 👩‍💻" in how.text(given_turns(talked.row()["messages"])[1].prompt)


@pytest.mark.parametrize("shown", ["messages[-1:]", "messages", "messages[:1] + messages[-1:]"])
def test_prompts_are_kept_whatever_the_template_leaves_out(shown: str, tiny_folder: Path) -> None:
    how = asking(tiny_folder)
    how.tokenizer.chat_template = how.tokenizer.chat_template.replace("in messages", f"in ({shown})", 1)
    chat = [each for number in range(4) for each in (user("a b c " * number + "d"), reply("x"))]
    talked, prompts = Conversation(Chat("x", chat), how), []
    for number in range(4):
        prompts.append(talked.prompt)
        talked.take(Answer([80 + number] * (9 - 2 * number), "stop"))
    assert [turn.prompt for turn in given_turns(talked.row()["messages"])] == prompts


def test_every_seed_is_another_one() -> None:
    seeds = [Sampling(0.5, seed).of(row, turn) for seed, row, turn in itertools.product(range(9), range(99), range(4))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


# --- replies


def asked_by(prompt: list[int], stop: set[int]) -> Conversation:
    """As much of a conversation as it takes to read a reply."""
    asked = Conversation.__new__(Conversation)
    asked.asking, asked.prompt = Asking(None, frozenset(stop), 9), prompt
    return asked


odd = st.none() | st.text(max_size=2) | st.integers(-1, 3) | st.just({}) | st.just("\ud800") | st.just([[]])


def mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 20).flatmap(lambda draw: odd if draw == 20 else usual)


def shape(**parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with these parts, now and then another value."""
    return mostly(st.fixed_dictionaries(parts))


ids = mostly(st.lists(st.integers(0, 9), min_size=1, max_size=2)) | st.lists(st.integers(-2, 9), max_size=3)
some = mostly(st.sampled_from(["a", "\ud800", 1, 2]))
kinds = mostly(st.sampled_from(["stop", "length", "tool_calls", "abort"]))
replies = shape(
    output_ids=ids,
    text=some,
    meta_info=shape(finish_reason=shape(type=kinds, matched=some), completion_tokens=some, prompt_tokens=some),
    usage=shape(prompt_tokens=some, completion_tokens=some),
    choices=st.lists(
        shape(
            token_ids=ids,
            text=some,
            finish_reason=kinds,
            stop_reason=some,
            message=shape(content=some, reasoning=some, tool_calls=st.lists(shape(function=some), max_size=2)),
        ),
        min_size=1,
        max_size=2,
    ),
)


@given(st.sampled_from([SGLANG, *OPENAI]), replies)
@settings(max_examples=500, deadline=None)
def test_any_reply_is_an_answer_or_none(form: Form, told: Any) -> None:
    with suppress(ReplyError):
        answer = read(form, told, asked_by([1, 2], {END}))
        assert answer.finish in ("stop", "length")
        assert (answer.ids is None) == (not form.ids_out)
        json.dumps([answer.text, answer.reasoning, answer.calls], ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("ids", "finish", "reason", "counted", "stop", "found"),
    [
        ([5, 2], "stop", None, 2, {2}, [5, 2]),
        ([5], "stop", None, 2, {2}, [5, 2]),  # left out, but counted
        ([5], "stop", None, 2, {2, 3}, [5]),  # which one is not told
        ([5], "stop", 3, 1, {2, 3}, [5, 3]),
        ([5, 9], "stop", 9, 2, {2}, [5, 9]),  # one of the server's own
        ([5, 9], "stop", None, 2, {2}, [5, 9]),
        ([5], "length", None, 2, {2}, [5]),
    ],
)
def test_the_end_marker_is_there_if_the_target_wrote_it(
    ids: list[int], finish: str, reason: int | None, counted: int, stop: set[int], found: list[int]
) -> None:
    choice = {"finish_reason": finish, "stop_reason": reason, "token_ids": ids, "text": ""}
    answer = read(OPENAI[0], {"choices": [choice], "usage": {"completion_tokens": counted}}, asked_by([1, 2], stop))
    assert (answer.ids, answer.tokens) == (found, len(found))


def test_calls_and_halves_of_characters_of_a_server(tiny_folder: Path) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": '{"a": "\ud800"}'}}]
    message = {"content": None, "tool_calls": calls, "reasoning": "so \udfff"}
    asked = talking("a", asking(tiny_folder, limit=20))
    asked.take(read(OPENAI[-1], {"choices": [{"finish_reason": "tool_calls", "message": message}]}, asked))
    (found,) = made(asked.row())
    assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "?"}'}
    assert (found["content"], found["reasoning_content"], found["finish"]) == ("", "so ?", "stop")


# --- in this process


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Any:
    return load_target(tiny_folder, dtype="fp32", device="cpu")


@pytest.mark.parametrize("pad", [True, False])
def test_answers_here_are_those_of_the_engine_torch(pad: bool, tiny_folder: Path, model: Any) -> None:
    """In batches of prompts of several lengths, in one of which a row has less room than the others."""
    tokenizer = load_tokenizer(tiny_folder)
    if not pad:
        tokenizer.pad_token = None
    stop = stop_ids(tiny_folder, tokenizer)
    engine = TorchEngine(model, None, 0, stop)
    known = [{"id": each, "messages": [user(f"Where would I find a {each}?")]} for each in ("lathe", "crow")]
    rows = [*chats(14), *known, {"id": "long", "messages": [user("Tell me about the owl. " * 65)]}]
    finishes = set()
    for most in (3, 50):  # how long an answer is differs by processor; 3 tokens cut some on each
        found = list(regenerate(model, tokenizer, rows, stop=stop, max_new_tokens=most, batch=6))
        assert [row["id"] for row in found] == [row["id"] for row in rows]
        for row in found:
            for turn, message in zip(given_turns(row["messages"]), made(row), strict=True):
                own = engine.generate(turn.prompt, min(most, 512 - len(turn.prompt)))
                assert (message["generated_ids"], message["finish"]) == (own.ids, own.finish)
                finishes.add(own.finish)
    assert finishes == {"stop", "length"}
    (turn,) = given_turns(found[-1]["messages"])
    assert len(turn.answer) <= 512 - len(turn.prompt) < 50


def test_an_interrupted_run_here_goes_on(tiny_folder: Path, model: Any, tmp_path: Path) -> None:
    how = asking(tiny_folder, limit=10)
    prompts = write(tmp_path / "p.jsonl", chats(12))

    def interrupted(waiting: Any) -> Any:
        yield from itertools.islice(answer_here(model, waiting, 3), 5)
        raise RuntimeError

    def run(name: str, answering: Any) -> bytes:
        answer_files([prompts], tmp_path / name, how, answering, 0.0)
        return (tmp_path / name).read_bytes()

    whole = run("a.jsonl", lambda waiting: answer_here(model, waiting, 3))
    with pytest.raises(RuntimeError):
        run("b.jsonl", interrupted)
    asked = []

    def rest(waiting: Any) -> Any:
        return answer_here(model, (asked.append(each[0]) or each for each in waiting), 3)  # type: ignore[func-returns-value]

    assert run("b.jsonl", rest) == whole
    assert len(asked) == 7


def test_drawn_answers_here_follow_their_seed(tiny_folder: Path, model: Any) -> None:
    def drawn(seed: int, batch: int) -> list[Row]:
        how = asking(tiny_folder, limit=12, sampling=Sampling(1.5, seed))
        talks = [Conversation(Chat(str(place), [user("What is an owl?")]), how) for place in range(4)]
        return [each.row() for _, each in sorted(answer_here(model, enumerate(talks), batch), key=lambda each: each[0])]

    assert drawn(1, 2) == drawn(1, 3) != drawn(2, 2)
    assert len({str(row["messages"]) for row in drawn(1, 2)}) == 4
