"""A small tokenizer of Kimi's kind: Python around tiktoken, named by `auto_map`, with the same markers and defaults."""

import json
from typing import Any

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.tokenization_utils import PreTrainedTokenizer

from .tool_words import declared

PATTERN = r"\p{Han}+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RESERVED = 32


class TikTokenTokenizer(PreTrainedTokenizer):
    """Ranks of `tiktoken.model`, then `RESERVED` special ids; those without a name are `<|reserved_token_ID|>`."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, added_tokens_decoder: dict[int, Any] | None = None, **given: Any) -> None:
        ranks = load_tiktoken_bpe(vocab_file)
        names = {number: str(token) for number, token in (added_tokens_decoder or {}).items()}
        special = {
            names.get(number, f"<|reserved_token_{number}|>"): number
            for number in range(len(ranks), len(ranks) + RESERVED)
        }
        self.model = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
        self.letters = bytes_to_unicode()
        self.bytes_of = {letter: byte for byte, letter in self.letters.items()}
        self.decoder = {number: self._letters(number) for number in range(self.model.n_vocab)}
        self.encoder = {token: number for number, token in self.decoder.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, **given)

    def _letters(self, number: int) -> str:
        return "".join(self.letters[byte] for byte in self.model.decode_single_token_bytes(number))

    @property
    def vocab_size(self) -> int:
        return self.model.n_vocab

    def get_vocab(self) -> dict[str, int]:
        return self.encoder

    def encode(self, text: str, allow_special_tokens: bool = True, **given: Any) -> list[int]:
        if given:
            return super().encode(text, **given)
        allowed = {"allowed_special": "all"} if allow_special_tokens else {"disallowed_special": ()}
        return self.model.encode(text, **allowed)

    def decode(self, token_ids: int | list[int], **given: Any) -> str:
        if given:
            return super().decode(token_ids, **given)
        return self.model.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self.decoder[number] for number in self.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.encoder.get(token, self.unk_token_id)

    def _convert_id_to_token(self, index: int) -> str | None:
        return self.decoder.get(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(self.bytes_of[letter] for letter in "".join(tokens)).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        conversation: Any,
        tools: list[dict[str, Any]] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = True,
        thinking: bool = True,
        **given: Any,
    ) -> Any:
        """As Kimi's: a header and thinking unless they are refused, tools as words in `tools_ts_str`."""
        if tools:
            tools = json.loads(json.dumps(tools, sort_keys=True))
            given["tools_ts_str"] = declared(tools)
        return super().apply_chat_template(
            conversation,
            tools=tools,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            thinking=thinking,
            **given,
        )
