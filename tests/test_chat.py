"""From a chat to what is trained on, for tokenizers and templates of every kind (cases C51 to C55)."""

import itertools
import json
import re
from typing import Any

import pytest
from chats import FAMILIES, TOKENIZERS, WAYS, Family, answer, fast, user
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st

from redraft.corpus.chat import CUT, prompt_ids, render
from redraft.corpus.encode import whole
from redraft.corpus.rows import Chat, read_row
from redraft.corpus.samples import Sample, tokenize
from redraft.frame.profile import TemplateParams
from redraft.regenerate.conversation import Answer, Asking, Conversation

LONG = 100_000
MATRIX = [
    (kind, name, way)
    for kind in TOKENIZERS
    for name, way in WAYS
    if (kind, name) != ("pieces", "r1")  # its markers hold the sign that stands for a space in pieces
]
ALL = pytest.mark.parametrize(("kind", "name", "way"), MATRIX, ids=lambda value: str(value))
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def spans(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """Every run of supervised ids behind the ids before it."""
    found = []
    for ids, mask in sample.documents:
        assert len(ids) == len(mask)
        assert set(mask) <= {0, 1}
        for flag, run in itertools.groupby(range(len(ids)), mask.__getitem__):
            places = [*run]
            if flag:
                found.append((ids[: places[0]], ids[places[0] : places[-1] + 1]))
    return found


def trained(tokenizer: Any, sample: Sample) -> list[str]:
    """The supervised texts."""
    return [tokenizer.decode(ids, skip_special_tokens=False) for _, ids in spans(sample)]


def answered(
    tokenizer: Any, row: dict[str, Any], answers: list[list[int]], how: TemplateParams, *, last_only: bool = False
) -> Any:
    """The row that regenerate writes of `answers`, the prompts, and what was answered."""
    chat = read_row(json.dumps(row).encode(), "x")
    assert isinstance(chat, Chat)
    stop = frozenset([tokenizer.eos_token_id])
    conversation = Conversation(chat, Asking(tokenizer, stop, LONG, how=how, last_only=last_only))
    prompts, given = [], []
    for ids in answers:
        if conversation.prompt is None:
            break
        prompts.append(conversation.prompt)
        given.append(ids)
        conversation.take(Answer(ids, "stop" if ids[-1] in stop else CUT))
    return json.loads(json.dumps(conversation.row())), prompts, given


def own_way(family: Family, how: TemplateParams, content: str = "four") -> dict[str, Any]:
    """An answer as the template writes it when it is served in this way, if there is any."""
    thinks = bool(how.arguments.get("thinking", how.arguments.get("enable_thinking", family.forgets)))
    return answer(content, "two and two" if thinks else "")


# C51, C52, C53, C54: text


@ALL
def test_text_is_trained_on_as_the_template_serves_it_or_not_at_all(kind: str, name: str, way: int) -> None:
    family, tokenizer = FAMILIES[name], TOKENIZERS[kind](name)
    how, end = family.how[way], family.markers[0]
    messages = [user("2+2?"), own_way(family, how)]
    sample = tokenize(tokenizer, messages, LONG, how=how)
    if name == "r1" or (name == "kimi" and messages[1].get("reasoning_content")):
        assert sample.dropped is not None
        assert sample.dropped.startswith("rewritten: the template ")
        return
    (text,) = trained(tokenizer, sample)
    assert re.fullmatch(rf"(\s|<think>|.*two and two.*)*four{re.escape(end)}", text, re.DOTALL), text
    # two turns: both, each behind its own prompt, whatever the template makes of the first in the second's
    more = [*messages, user("3+3?"), own_way(family, how, "six")]
    twice = tokenize(tokenizer, more, LONG, how=how)
    assert trained(tokenizer, twice) == [text, text.replace("four", "six")]
    served = [prompt_ids(tokenizer, more[:turn], how=how) for turn in (1, 3)]
    assert [prompt for prompt, _ in spans(twice)] == served
    assert (twice.turns, twice.cut, twice.left_out) == (2, 0, [])


@ALL
def test_an_answer_that_was_cut_has_no_end_marker(kind: str, name: str, way: int) -> None:
    family, tokenizer = FAMILIES[name], TOKENIZERS[kind](name)
    how = family.how[way]
    whole = [user("2+2?"), own_way(family, how)]
    cut = [user("2+2?"), {**own_way(family, how), "finish": CUT}]
    one, two = (tokenize(tokenizer, messages, LONG, how=how) for messages in (whole, cut))
    assert one.dropped == two.dropped
    if one.dropped is None:
        assert trained(tokenizer, two) == [text.removesuffix(family.markers[0]) for text in trained(tokenizer, one)]
        assert (one.cut, two.cut) == (0, 1)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("finish", ["stop", CUT])
def test_reasoning_that_was_cut_is_not_closed(kind: str, finish: str) -> None:
    tokenizer, family = TOKENIZERS[kind]("qwen3"), FAMILIES["qwen3"]
    message = answer("", "two and", finish=finish)
    sample = tokenize(tokenizer, [user("2+2?"), message], LONG, how=family.how[0])
    closed = "" if finish == CUT else "\n</think>\n\n<|im_end|>"
    assert trained(tokenizer, sample) == ["<think>\ntwo and" + closed]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("way", "message", "expected"),
    [
        (0, answer("two and two</think>four"), "writes '</think>' before the answer"),
        (0, answer("four", "two and two"), "leaves out the reasoning: '</think>four<|im_end|>'"),
        (0, answer("four"), "writes '</think>' before the answer"),
        (2, answer("four"), None),
        (2, answer("four", "two and two"), "leaves out the reasoning"),
        (2, answer("two and two</think>four"), None),
    ],
)
def test_kimi_never_closes_reasoning_twice(kind: str, way: int, message: Any, expected: str | None) -> None:
    family, tokenizer = FAMILIES["kimi"], TOKENIZERS[kind]("kimi")
    sample = tokenize(tokenizer, [user("2+2?"), message], LONG, how=family.how[way])
    if expected is None:
        assert trained(tokenizer, sample) == [message["content"] + "<|im_end|>"]
    else:
        assert sample.dropped is not None
        assert expected in sample.dropped


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_last_turn_is_trained_on_where_only_the_earlier_one_is_rewritten(kind: str) -> None:
    family, tokenizer = FAMILIES["qwen3"], TOKENIZERS[kind]("qwen3")
    messages = [user("2+2?"), answer("four"), user("3+3?"), answer("six", "b")]
    sample = tokenize(tokenizer, messages, LONG, how=family.how[0])
    assert trained(tokenizer, sample) == ["<think>\nb\n</think>\n\nsix<|im_end|>"]
    assert sample.left_out == [r"rewritten: the template writes '<think>\n\n</think>\n\n' before the answer"]


SPLIT_THINK = (  # the tags stand in the content
    "{%- set ns = namespace(last=0) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}<|im_start|>{{ m.role }}|"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and loop.index0 < ns.last else m.content }}<|im_end|>"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant|{%- endif -%}"
)


def test_turns_whose_reasoning_the_template_takes_away_are_documents_of_their_own() -> None:
    tokenizer = with_template("qwen3", SPLIT_THINK)
    one, two = answer("<think>a</think>four"), answer("<think>b</think>six")
    first = tokenize(tokenizer, [user("2+2?"), one], LONG)
    assert trained(tokenizer, first) == ["<think>a</think>four<|im_end|>"]
    both = tokenize(tokenizer, [user("2+2?"), one, user("3+3?"), two], LONG)
    assert trained(tokenizer, both) == ["<think>a</think>four<|im_end|>", "<think>b</think>six<|im_end|>"]
    assert len(both.documents) == 2


def with_template(name: str, template: str) -> Any:
    """The fast tokenizer of a family with another template."""
    tokenizer = TOKENIZERS["fast"].__wrapped__(name)  # type: ignore[attr-defined]
    tokenizer.chat_template = template
    return tokenizer


# C51, C52, C53: ids


@ALL
def test_generated_ids_are_taken_as_they_are(kind: str, name: str, way: int) -> None:
    family, tokenizer = FAMILIES[name], TOKENIZERS[kind](name)
    how = family.how[way]
    thinks = bool(family.opens) and how.arguments.get("thinking", True)
    texts = ["two and two</think>four" if thinks else "four", "six"]
    answers = [[*ids, tokenizer.eos_token_id] for ids in whole(tokenizer, texts)]
    row = {"messages": [user("2+2?"), answer("FOREIGN"), user("3+3?"), answer("FOREIGN")]}
    made, prompts, given = answered(tokenizer, row, answers, how)
    assert given == answers
    assert made["messages"][1]["content"] == "four"
    sample = tokenize(tokenizer, made["messages"], LONG, how=how)
    assert spans(sample) == [*zip(prompts, answers, strict=True)]
    assert not any("FOREIGN" in tokenizer.decode(ids) for ids, _ in sample.documents)
    assert prompts[1] == prompt_ids(tokenizer, [user("2+2?"), answer("four"), user("3+3?")], how=how) or family.forgets


def fragments(family: Family) -> st.SearchStrategy[str]:
    """Texts that look like anything but a plain answer."""
    pieces = [
        "four", "2+2?", " ", "\n", "\r\n", "\t", "  ", "é", "e\u0301", "😀", "ﬁ", "▁", "\x00", "\u2028", "\ufeff",
        "{{ 1 }}", "{% raw %}", "<think>", "</think>", "think", "assistant", "user", "<b>", "[INST]", "Ġ", "<0x0A>",
        "<unk>", "final",
        *family.markers,
    ]  # fmt: skip
    return st.lists(st.sampled_from(pieces) | st.text(max_size=4), max_size=5).map("".join)


@st.composite
def rows_to_answer(draw: st.DrawFn) -> tuple[str, str, int, dict[str, Any], list[list[int]]]:
    kind, name, way = draw(st.sampled_from(MATRIX))
    family, tokenizer = FAMILIES[name], TOKENIZERS[kind](name)
    texts = fragments(family)
    turns = draw(st.integers(1, 3))
    messages = [{"role": "system", "content": draw(texts)}] if family.system and draw(st.booleans()) else []
    for _ in range(turns):
        messages.append(user(draw(texts)))
        if name == "gemma" or draw(st.booleans()):
            messages.append(answer(draw(texts), draw(texts)))
    end = tokenizer.eos_token_id
    one = st.integers(0, len(tokenizer) - 1).filter(lambda token: token != end)
    spelled = texts.map(lambda text: [token for token in whole(tokenizer, [text])[0] if token != end])
    ids = st.lists(one, min_size=1, max_size=6) | spelled
    answers = [draw(ids) + ([end] if draw(st.booleans()) else []) for _ in range(turns)]
    assume(all(answers))
    tools = [{"type": "function", "function": {"name": "weather"}}] if draw(st.booleans()) else []
    return kind, name, way, {"messages": messages, "tools": tools}, answers


@settings(QUICK, max_examples=200)
@given(rows_to_answer(), st.integers(1, 60) | st.just(LONG), st.booleans())
def test_supervised_ids_are_the_generated_ids(case: Any, most: int, last_only: bool) -> None:
    kind, name, way, row, answers = case
    tokenizer, how = TOKENIZERS[kind](name), FAMILIES[name].how[way]
    made, prompts, given = answered(tokenizer, row, answers, how, last_only=last_only)
    chat = read_row(json.dumps(made).encode(), "x")
    assert isinstance(chat, Chat)
    sample = tokenize(tokenizer, chat.messages, LONG, how=how)
    if sample.dropped:
        assert sample.dropped == "empty answer"
        assert all(ids == [tokenizer.eos_token_id] for ids in given)
        return
    assert spans(sample) == [*zip(prompts, given, strict=True)]
    assert (sample.turns, sample.cut) == (len(given), sum(ids[-1] != tokenizer.eos_token_id for ids in given))
    # cut to a length, what is left is the same
    short = tokenize(tokenizer, chat.messages, most, how=how)
    whole = [(ids[:most], mask[:most]) for ids, mask in sample.documents]
    assert short.documents == [(ids, mask) for ids, mask in whole if any(mask)]
    assert short.turns == sum(len(prompt) < most for prompt in prompts)
    assert (short.dropped is None) == bool(short.documents)


# text, of any kind


def proven(family: Family, message: dict[str, Any]) -> str:
    """A pattern of all that may be trained on for an answer."""
    between = r"(?:\s|</?think>|<\|(?:start|end|channel|message)\|>|assistant|analysis|final)*"
    content, reasoning = message["content"], message.get("reasoning_content", "").strip()
    before = between + re.escape(reasoning) + between if reasoning else ""
    content = content.lstrip() if reasoning else content
    closing = between if reasoning and not content else ""
    if message.get("finish") == CUT:
        return before.removesuffix(between) if reasoning and not content else before + re.escape(content)
    return before + re.escape(content) + closing + re.escape(family.markers[0])


@st.composite
def chats(draw: st.DrawFn) -> tuple[str, str, int, list[dict[str, Any]]]:
    kind, name, way = draw(st.sampled_from(MATRIX))
    family = FAMILIES[name]
    texts = fragments(family) | st.sampled_from(["four", "two and two", "2+2?"])
    messages = [{"role": "system", "content": draw(texts)}] if family.system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(user(draw(texts)))
        more = {"finish": CUT} if draw(st.booleans()) else {}
        messages.append(answer(draw(texts), draw(texts | st.just("")), **more))
    return kind, name, way, messages


@settings(QUICK, max_examples=400)
@given(chats())
@example(("fast", "qwen3", 0, [user("a"), answer("b", "think")]))
@example(("fast", "qwen3", 0, [user("a"), answer("<think>", "</think>")]))
@example(("fast", "gpt-oss", 0, [user("a"), answer("final", "final")]))
def test_supervised_text_is_the_answer_and_its_end(case: Any) -> None:
    kind, name, way, messages = case
    family, tokenizer = FAMILIES[name], TOKENIZERS[kind](name)
    how = family.how[way]
    sample = tokenize(tokenizer, messages, LONG, how=how)
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    left = iter(answers)
    for prompt, ids in spans(sample):  # each is one of the answers, in their order, behind its own prompt
        text = tokenizer.decode(ids, skip_special_tokens=False)
        turn = next(
            turn
            for turn in left
            if re.fullmatch(proven(family, messages[turn]), text)
            and prompt == prompt_ids(tokenizer, messages[:turn], how=how)
        )
        header = render(tokenizer, messages[:turn], header=True, how=how)
        assert whole(tokenizer, [header + text]) == [prompt + ids]
    event(f"{name} {way}: {(sample.dropped or 'kept').split(':')[0]}")
    assert (sample.dropped is None) == bool(sample.documents)
    if sample.dropped is None:
        assert sample.turns == len(spans(sample)) == len(answers) - len(sample.left_out)


def test_markers_without_end_are_looked_at_in_no_time() -> None:
    tokenizer = fast("qwen3")
    noise = "<think></think> <b> [INST] " * 2000
    for message in (answer(noise + "y x", "x"), answer("x", noise + "y"), answer("x y", "x " + noise), answer(noise)):
        for place in (noise, noise + "!"):
            tokenize(tokenizer, [user(place), message], LONG)
