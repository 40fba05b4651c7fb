"""Small tokenizers of three kinds, and chat templates by the rules of the families that people serve."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import regex
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from redraft.frame.profile import TemplateParams
from redraft.target.hf import offline_transformers
from redraft.target.tiny import TEMPLATE

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What is never joined: line ends are not joined to the word behind them."""
WORDS = ["four five six seven, the answer is a number of two and two\n\n", 'Paris is {"city": "Paris"} assistant user']


@dataclass(frozen=True)
class Family:
    """A chat template, and the tokens that it writes."""

    template: str
    markers: tuple[str, ...]
    """The end marker first."""
    how: tuple[TemplateParams, ...] = (TemplateParams(),)
    """Ways in which it is served."""
    opens: str = ""
    """Ends the prompt of a target that thinks."""
    trims: bool = False
    """Whether white space around contents is taken away."""
    tools: bool = False
    system: bool = True
    date: bool = False
    forgets: bool = False
    """Whether reasoning of earlier turns is left out."""


def thinking(name: str, *flags: bool) -> tuple[TemplateParams, ...]:
    return tuple(TemplateParams(arguments={name: flag}) for flag in flags)


PLAIN = Family(TEMPLATE, ("<|end|>", "<|start|>", "<|pad|>"))

# the last assistant without tool calls, and all before, get an empty pair; the turns behind it keep their reasoning
KIMI = Family(
    """
{%- macro text(m) -%}{%- if m.content is string -%}{{ m.content }}{%- endif -%}{%- endmacro -%}
{%- macro calls(m) -%}
<|tool_calls_section_begin|>
{%- for call in m.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endmacro -%}
{%- set ns = namespace(final=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and not m.tool_calls -%}{%- set ns.final = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|im_assistant|>assistant<|im_middle|><think>
{%- if loop.index0 > ns.final and m.reasoning_content -%}{{ m.reasoning_content }}{%- endif -%}
</think>{{ text(m) }}{%- if m.tool_calls -%}{{ calls(m) }}{%- endif -%}
{%- elif m.role == 'user' -%}<|im_user|>user<|im_middle|>{{ text(m) }}
{%- elif m.role == 'tool' -%}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}
{{ text(m) }}
{%- else -%}<|im_system|>system<|im_middle|>{{ text(m) }}
{%- endif -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and not thinking -%}<think></think>{%- else -%}<think>{%- endif -%}
{%- endif -%}""",
    (
        "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<think>", "</think>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
        "<|tool_call_argument_begin|>", "[EOS]",
    ),
    (TemplateParams(), *thinking("thinking", True, False)),
    opens="<think>",
    tools=True,
    forgets=True,
)  # fmt: skip

# reasoning stands behind the last user turn only, and then as a pair even if it is empty
QWEN3 = Family(
    """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(query=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'system' and tools and loop.first %}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set reasoning = m.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    ("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|endoftext|>"),
    (TemplateParams(), *thinking("enable_thinking", True, False)),
    tools=True,
    forgets=True,
)

LLAMA3 = Family(
    """
{{- '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- set day = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{{- 'Today Date: ' + day + '\\n\\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}{%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('only one tool call at once') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
    {%- else %}{{- m.content | trim }}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    (TemplateParams(date="2026-02-03"),),
    trims=True,
    tools=True,
    date=True,
)

GEMMA = Family(
    """{{ '<bos>' }}
{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}""",
    ("<end_of_turn>", "<start_of_turn>", "<bos>", "<eos>"),
    trims=True,
    system=False,
)

R1 = Family(
    """<｜begin▁of▁sentence｜>
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' -%}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- else -%}{{ m.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>\\n' }}{%- endif -%}""",
    ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    opens="<think>\n",
    forgets=True,
)

GPT_OSS = Family(
    """
{{- '<|start|>system<|message|>You are a model.\\nCurrent date: ' + strftime_now("%Y-%m-%d") }}
{{- '\\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
    {%- if m.thinking and loop.last and not add_generation_prompt -%}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
    {%- endif -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
    {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else -%}
    {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' }}{%- endif -%}""",
    ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
    (TemplateParams(date="2026-02-03", arguments={"reasoning_effort": "low"}),),
    date=True,
    forgets=True,
)

FAMILIES = {
    "plain": PLAIN, "kimi": KIMI, "qwen3": QWEN3, "llama3": LLAMA3, "gemma": GEMMA, "r1": R1, "gpt-oss": GPT_OSS,
}  # fmt: skip
WAYS = [(name, number) for name, family in FAMILIES.items() for number in range(len(family.how))]
"""Every family in every way in which it is served: a name, and an index in `how`."""


@cache
def fast(name: str = "plain") -> Any:
    """Byte-level BPE, with the markers of a family."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    return _finished(bpe, FAMILIES[name])


@cache
def pieces(name: str = "plain") -> Any:
    """Pieces as SentencePiece makes them: a mark for a space, and bytes for what has no piece."""
    letters = sorted(set("".join(WORDS).replace(" ", "▁")))
    words = ["four", "▁five", "▁the", "▁the▁answer", "number", "ass", "istant", "<unk>"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges: list[tuple[str, str]] = []
    for word in words[:-1]:
        whole = word[0]
        for letter in word[1:]:
            merges.append((whole, letter))
            whole += letter
            tokens.append(whole)
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    bpe = Tokenizer(
        models.BPE(vocabulary, list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(bpe, FAMILIES[name])


def _finished(bpe: Tokenizer, family: Family) -> Any:
    kind = offline_transformers().PreTrainedTokenizerFast
    made = kind(tokenizer_object=bpe, eos_token=family.markers[0])
    made.add_special_tokens({"extra_special_tokens": list(family.markers[1:])})
    made.chat_template = family.template
    return made


class SlowTokenizer(PreTrainedTokenizer):
    """The byte-level BPE of `fast`, in Python, as tokenizers of a model's own code are."""

    def __init__(self, vocabulary: dict[str, int], merges: list[Any], **given: Any) -> None:
        self.vocabulary = vocabulary
        self.names = {number: token for token, number in vocabulary.items()}
        self.ranks = {tuple(pair): rank for rank, pair in enumerate(merges)}
        self.letters = bytes_to_unicode()
        self.values = {letter: byte for byte, letter in self.letters.items()}
        super().__init__(**given)

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    def get_vocab(self) -> dict[str, int]:
        return {**self.vocabulary, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        found = []
        for word in regex.findall(SPLIT, text):
            parts = [self.letters[byte] for byte in word.encode()]
            while len(parts) > 1:
                rank, at = min((self.ranks.get(pair, 1 << 30), at) for at, pair in enumerate(zip(parts, parts[1:])))  # noqa: B905, RUF007
                if rank == 1 << 30:
                    break
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            found += parts
        return found

    def _convert_token_to_id(self, token: str) -> int:
        return self.vocabulary[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self.names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        written = b"".join(
            token.encode() if token in self.added_tokens_encoder else bytes(self.values[letter] for letter in token)
            for token in tokens
        )
        return written.decode(errors="replace")


@cache
def slow(name: str = "plain") -> Any:
    """`fast` with the same ids, in Python."""
    quick, family = fast(name), FAMILIES[name]
    model = json.loads(quick.backend_tokenizer.to_str())["model"]
    made = SlowTokenizer(model["vocab"], model["merges"], eos_token=family.markers[0])
    made.add_special_tokens({"extra_special_tokens": [AddedToken(each, special=True) for each in family.markers[1:]]})
    made.chat_template = family.template
    return made


TOKENIZERS = {"fast": fast, "slow": slow, "pieces": pieces}


def user(text: object) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: object, reasoning: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"reasoning_content": reasoning} if reasoning else {}), **more}
