"""What a template is given and what it may do: tools, dates, names, odd chats, odd tokenizers (C55, C56, C60)."""

import itertools
import json
from typing import Any

import pytest
import tokenizers
from chats import FAMILIES, TOKENIZERS, Family, answer, fast, pieces, user
from test_chat import LONG, MATRIX

from redraft.corpus.chat import Markers, chat_template, prompt_ids, render, template_hash, template_record
from redraft.corpus.parts import Part, Settings, tokenize_rows
from redraft.corpus.rows import UnusableError
from redraft.corpus.samples import tokenize
from redraft.corpus.tokenizer import tokenizer_hash
from redraft.frame.errors import RedraftError
from redraft.frame.profile import CorpusParams, TemplateParams
from redraft.target.tiny import TEMPLATE

PARAMS = CorpusParams(max_length=LONG, max_dropped=0.5)
ALL = pytest.mark.parametrize(("kind", "name", "way"), MATRIX, ids=lambda value: str(value))
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}


def rows(tokenizer: Any, *rows: dict[str, Any], how: TemplateParams | None = None, **more: Any) -> Part:
    """Rows as the corpus stage tokenises them; ids are `row-0` and so on."""
    how = how or TemplateParams()
    params = PARAMS.model_copy(update=more.pop("params", {}))
    settings = Settings(params, how, tokenizer_hash(tokenizer), template_hash(tokenizer, how), **more)
    lines = [(f"row-{number}", json.dumps(row).encode()) for number, row in enumerate(rows)]
    return tokenize_rows(lines, tokenizer, settings, Markers(tokenizer))


def texts(tokenizer: Any, part: Part, *, supervised: bool = True) -> list[str]:
    """Of every document what is trained on, or what is not."""
    offsets, found = part.arrays["offsets"], []
    for start, end in itertools.pairwise(offsets):
        ids, mask = part.arrays["input_ids"][start:end], part.arrays["loss_mask"][start:end]
        found.append(tokenizer.decode(ids[mask.astype(bool) == supervised].tolist(), skip_special_tokens=False))
    return found


def with_template(name: str, template: Any, make: Any = fast) -> Any:
    """The tokenizer of a family with another template, or several."""
    tokenizer = make.__wrapped__(name)
    tokenizer.chat_template = template
    return tokenizer


# C55


def call(city: str = "Paris", *, as_text: bool = False, **more: Any) -> dict[str, Any]:
    arguments = {"city": city, **more}
    function = {"name": "weather", "arguments": json.dumps(arguments) if as_text else arguments}
    return {"id": "functions.weather:0", "type": "function", "function": function}


def calling(reasoning: str, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [user("2+2?"), answer(None, reasoning, tool_calls=list(calls), **more)], "tools": [WEATHER]}


@ALL
def test_tools_of_a_row_stand_in_its_prompt(kind: str, name: str, way: int) -> None:
    family, tokenizer = FAMILIES[name], TOKENIZERS[kind](name)
    how = family.how[way]
    messages = [user("2+2?"), answer("four", "" if False in how.arguments.values() or not family.forgets else "two")]
    part = rows(tokenizer, {"messages": messages, "tools": [WEATHER]}, {"messages": messages}, how=how)
    assert part.told.no_place_for_tools == (0 if family.tools else 1)
    if part.names:
        one, two = texts(tokenizer, part, supervised=False)
        assert ("weather" in one, "weather" in two) == (family.tools, False)


QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    ("name", "way", "reasoning", "expected"),
    [
        ("qwen3", 0, "hm", "<think>\nhm\n</think>\n\n" + QWEN_CALL),
        ("qwen3", 2, "", QWEN_CALL),
        ("qwen3", 0, "", None),
        ("kimi", 0, "hm", "hm</think>" + KIMI_CALL),
        ("kimi", 2, "", KIMI_CALL),
        ("kimi", 0, "", None),
        ("kimi", 2, "hm", None),
        ("llama3", 0, "", '{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>'),
    ],
)
def test_tool_calls_are_trained_on_as_served(kind: str, name: str, way: int, reasoning: str, expected: Any) -> None:
    family, tokenizer = FAMILIES[name], TOKENIZERS[kind](name)
    given = [calling(reasoning, call(as_text=as_text)) for as_text in (False, True)]
    part = rows(tokenizer, *given, how=family.how[way])
    assert texts(tokenizer, part) == ([expected, expected] if expected else [])
    if not expected:
        assert part.told.dropped == {"rewritten": 2}
        assert "think" in part.told.examples["rewritten"][0]


def test_a_tool_call_is_proven_to_the_word() -> None:
    tokenizer, how = TOKENIZERS["fast"]("qwen3"), FAMILIES["qwen3"].how[2]
    odd = call('a "b" \\ é\nx', deep=[{"all": True, "none": None, "number": 1.5}], more="<b>")
    (text,) = texts(tokenizer, rows(tokenizer, calling("", odd), how=how))
    assert json.loads(text.split("\n")[1])["arguments"] == odd["function"]["arguments"]
    two = calling("", call("Paris"), call("Rome"))
    assert "Rome" in texts(tokenizer, rows(tokenizer, two, how=how))[0]

    def reason(template: str, row: dict[str, Any] = two) -> str:
        part = rows(with_template("qwen3", template), row, how=how)
        assert not part.names
        return part.told.examples["rewritten"][0]

    whole = FAMILIES["qwen3"].template
    first = "{%- for call in m.tool_calls or [] %}", "{%- for call in (m.tool_calls or [])[:1] %}"
    assert "leaves 'Rome' of a tool call out" in reason(whole.replace(*first))
    assert "'Calling' beside a tool call" in reason(whole.replace("'<tool_call>", "'Calling <tool_call>"))
    several = rows(TOKENIZERS["fast"]("llama3"), two, how=FAMILIES["llama3"].how[0])
    assert several.told.examples["template"] == ["row-0 (template: only one tool call at once)"]


@pytest.mark.parametrize("name", ["qwen3", "kimi"])
def test_what_a_tool_returns_is_read_and_the_next_turn_trained_on(name: str) -> None:
    family, tokenizer = FAMILIES[name], TOKENIZERS["fast"](name)
    back = {"role": "tool", "tool_call_id": "functions.weather:0", "content": "4 degrees"}
    row = calling("", call())
    row["messages"] += [back, answer("It is cold.")]
    part = rows(tokenizer, row, how=family.how[2])
    assert part.told.turns == 2
    assert "4 degrees" in "".join(texts(tokenizer, part, supervised=False))
    assert "It is cold." in texts(tokenizer, part)[-1]
    assert "4 degrees" not in "".join(texts(tokenizer, part))


# C56


def strict(family: Family) -> str:
    """The template, and roles must alternate."""
    odd = "(m.role == 'user') != (loop.index0 % 2 == 0)"
    check = "{% if " + odd + " %}{{ raise_exception('roles must alternate') }}{% endif %}"
    return "{% for m in messages %}" + check + "{% endfor %}" + family.template


@ALL
def test_an_odd_chat_is_left_out_and_named(kind: str, name: str, way: int) -> None:
    family, tokenizer = FAMILIES[name], TOKENIZERS[kind](name)
    how = family.how[way]
    thinks = family.forgets and False not in how.arguments.values()
    good = answer("four", "two" if thinks else "")
    odd = {
        "template": [good, user("2+2?"), good],
        "no content": [user(None), good],
        "empty answer": [user("2+2?"), answer(None)],
        "unknown role": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}],
        "no answer": [user("2+2?")],
        "no text": [user([{"type": "image_url", "image_url": {"url": "x"}}]), good],
        "tool call": [user("2+2?"), answer("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])],
    }
    given = [{"id": kind, "messages": messages} for kind, messages in odd.items()]
    part = rows(tokenizer, *given, {"id": "good", "messages": [user("2+2?"), good]}, how=how)
    told = part.told
    assert {kind: told.examples[kind][0].split(" (")[0] for kind in odd} == {kind: kind for kind in odd}
    known = name != "r1" and not (name == "kimi" and thinks)
    assert part.names == (["good"] if known else [])
    assert {**told.dropped, "rewritten": 0} == {**dict.fromkeys(odd, 1), "rewritten": 0}
    # (e): blanks are no answer, and an end marker alone is none either
    for blank in ("", " \n", None):
        sample = tokenize(tokenizer, [user("2+2?"), answer(blank or "")], LONG, how=how)
        assert sample.dropped == "empty answer"


@ALL
def test_the_word_of_a_template_that_refuses_is_the_reason(kind: str, name: str, way: int) -> None:
    family = FAMILIES[name]
    tokenizer = with_template(name, strict(family), TOKENIZERS[kind])
    chats = [[answer("four"), user("2+2?"), answer("four")], [user("a"), user("b"), answer("c")]]
    part = rows(tokenizer, *({"messages": each} for each in chats), how=family.how[way])
    assert part.told.examples == {"template": [f"row-{number} (template: roles must alternate)" for number in range(2)]}


def test_gemma_has_no_system_role() -> None:
    messages = [{"role": "system", "content": "Be short."}, user("2+2?"), answer("four")]
    part = rows(fast("gemma"), {"messages": messages})
    assert part.told.examples == {"template": ["row-0 (template: System role not supported)"]}


@pytest.mark.parametrize(
    "template", ["{% for message in %}", "{{ 1 / 0 }}", "{{ messages | nothing }}", "{{ [1][5].x }}"]
)
def test_a_template_that_is_broken_is_told(template: str) -> None:
    tokenizer = with_template("plain", template)
    part = rows(tokenizer, {"messages": [user("2+2?"), answer("four")]})
    assert part.told.dropped == {"template": 1}
    with pytest.raises(UnusableError, match="template: "):
        prompt_ids(tokenizer, [user("a")])


def test_the_header_is_asked_for_and_never_left_to_the_tokenizer() -> None:
    plain, other = fast("plain"), fast.__wrapped__("plain")

    class Other(type(other)):  # type: ignore[misc]
        def apply_chat_template(self, messages: Any, add_generation_prompt: bool = True, **given: Any) -> Any:
            return super().apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **given)

    other.__class__ = Other
    messages = [user("2+2?"), answer("four"), user("3+3?"), answer("six")]
    assert tokenize(other, messages, 200) == tokenize(plain, messages, 200)
    assert tokenize(plain, messages, 200).turns == 2


# as served: arguments, names and dates


def test_arguments_name_and_tools_decide_the_template_and_its_hash() -> None:
    several = {"default": TEMPLATE, "tool_use": "{{ tools | tojson }}" + TEMPLATE, "rag": "RAG" + TEMPLATE}
    tokenizer, one = with_template("plain", several), with_template("plain", "{# a b #}" + TEMPLATE)
    rag = TemplateParams(name="rag")
    messages = [user("2+2?")]
    assert chat_template(tokenizer)[0] == "default"
    assert chat_template(tokenizer, rag) == ("rag", several["rag"])
    assert render(tokenizer, messages, header=True) == render(one, messages, header=True)
    assert render(tokenizer, messages, header=True, tools=[WEATHER]).startswith('[{"type": "function"')
    assert render(tokenizer, messages, header=True, how=rag, tools=[WEATHER]).startswith("RAG<")
    hashes = [template_hash(tokenizer), template_hash(tokenizer, rag), template_hash(one)]
    hashes += [template_hash(one, TemplateParams(arguments=each)) for each in ({"a": 1}, {"a": 2}, {"a": 2, "b": "x"})]
    assert len(set(hashes)) == len(hashes)
    dated = TemplateParams(date="2026-01-01", arguments={"b": "x", "a": 2})
    assert template_record(one, dated) == {"sha256": hashes[-1], "date": "2026-01-01", "arguments": {"b": "x", "a": 2}}
    for made, name, named in ((tokenizer, "no", "default, rag, tool_use"), (one, "no", "without a name")):
        with pytest.raises(RedraftError, match=named):
            chat_template(made, TemplateParams(name=name))


@pytest.mark.parametrize(
    "arguments", [{"tokenize": True}, {"add_generation_prompt": True}, {"tools": "x"}, {"messages": 1}]
)
def test_arguments_that_are_not_the_templates_are_told(arguments: dict[str, Any]) -> None:
    part = rows(fast("plain"), {"messages": [user("a"), answer("b")]}, how=TemplateParams(arguments=arguments))
    assert part.told.dropped in ({"template": 1}, {})


@pytest.mark.parametrize("name", ["llama3", "gpt-oss"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_template_that_prints_today_prints_the_day_of_the_profile(kind: str, name: str) -> None:
    tokenizer = TOKENIZERS[kind](name)
    expected = {"llama3": "Today Date: 09 Nov 2026\n", "gpt-oss": "Current date: 2026-11-09\n"}[name]
    how = TemplateParams(date="2026-11-09")
    assert expected in render(tokenizer, [user("a")], header=True, how=how)
    for header in (True, False):  # else the text is the template's own, to the letter
        whole = render(tokenizer, [user("a")], header=header, how=how)
        assert whole == with_now(tokenizer, expected, header)
    part = rows(tokenizer, {"messages": [user("a"), answer("b")]})
    (reason,) = part.told.examples["template"]
    assert "it prints today's date: set target.template.date in the profile" in reason
    assert template_hash(tokenizer, how) == template_hash(tokenizer)


def with_now(tokenizer: Any, expected: str, header: bool) -> str:
    """The template's own text of today, with another date."""
    text = tokenizer.apply_chat_template([user("a")], tokenize=False, add_generation_prompt=header)
    begin = text.index(expected.split(": ")[0])
    return text[:begin] + expected + text[text.index("\n", begin) + 1 :]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% macro day() %}{{ strftime_now('%Y') }}{% endmacro %}{{ day() }}", "2026"),
        ("  {% if true %}\nx{% endif %}{{ strftime_now( \"%d 'x' %m\" ) | upper }}", "x09 'X' 11"),
        ("\n{{ 'y' if strftime_now is defined }}", "\ny"),
        ("{% for n in [1, 2] %}{{ strftime_now('%B') }}{% endfor %}", "NovemberNovember"),
        ("{{ strftime_now('%' + 'Y') }}", None),
    ],
)
def test_dates_of_any_form(template: str, expected: str | None) -> None:
    tokenizer = with_template("plain", template)
    how = TemplateParams(date="2026-11-09")
    if expected is not None:
        assert render(tokenizer, [user("a")], header=True, how=how) == expected
        tokenizer.chat_template = {"default": "no", "own": template}
        named = TemplateParams(date="2026-11-09", name="own")
        assert render(tokenizer, [user("a")], header=True, how=named) == expected
    else:
        with pytest.raises(UnusableError, match="a date in a form"):
            render(tokenizer, [user("a")], header=True, how=how)


# tokenizers that do not keep the text, or refuse it


def test_a_text_that_the_tokenizer_does_not_keep_is_not_trained_on() -> None:
    lossy = fast.__wrapped__("plain")
    lossy.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()
    unknown = pieces.__wrapped__("plain")
    state = json.loads(unknown.backend_tokenizer.to_str())
    state["model"]["byte_fallback"] = False
    unknown._tokenizer = type(unknown.backend_tokenizer).from_str(json.dumps(state))
    for tokenizer, text, found in (
        (lossy, "e\u0301", r"'\xe9<|end|>' of 'e\u0301<|end|>'"),
        (unknown, "four 😀", "'<unk>"),
        (pieces("plain"), "a▁b", r"' b<|end|>' of '\u2581b"),
    ):
        good, bad = ({"messages": [user("e\u0301 😀"), answer(each)]} for each in ("four", text))
        part = rows(tokenizer, good, bad)
        assert part.names == ["row-0"]
        (reason,) = part.told.examples["other text"]
        assert found in reason


def test_a_text_that_the_tokenizer_refuses_is_left_out_alone() -> None:
    tokenizer = fast.__wrapped__("plain")

    class Refusing(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, texts: Any, **given: Any) -> Any:
            if any("bad" in text for text in texts):
                raise ValueError("cannot do it")
            return super().__call__(texts, **given)

    tokenizer.__class__ = Refusing
    given = [{"messages": [user(text), answer("four")]} for text in ("a", "bad", "b")]
    part = rows(tokenizer, *given, {"messages": [user("a"), answer("bad"), user("b"), answer("six")]})
    assert part.names == ["row-0", "row-2"]
    assert part.told.examples["encode"] == ["row-1 (encode: cannot do it)", "row-3 (encode: cannot do it)"]
    with pytest.raises(UnusableError, match="encode: cannot do it"):
        prompt_ids(tokenizer, [user("bad")])


def test_an_argument_that_no_template_reads_is_refused_with_the_nearest_word() -> None:
    tokenizer = fast("qwen3")
    template_record(tokenizer, TemplateParams(arguments={"enable_thinking": False}))
    with pytest.raises(RedraftError, match=r"(?s)enable_thinkng.*did you mean enable_thinking"):
        template_record(tokenizer, TemplateParams(arguments={"enable_thinkng": False}))
