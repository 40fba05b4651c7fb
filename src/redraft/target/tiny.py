"""The target of profile `tiny`: a Llama of 8 layers, fitted in seconds on generated sentences.

It exists so that the real pipeline runs whole in a test: real tokenizer, real chat template, 8 distinct layers,
head_dim 32 (what SGLang and vLLM accept), and answers that a drafter can learn to foresee.
"""

import itertools
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from redraft.frame.progress import progress
from redraft.target.hf import offline_transformers

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|pad|>", "<|start|>", "<|end|>"]
VOCAB = 640
STEPS = 150
BATCH = 24

_HABITS = {
    "animals": {
        "fox": ("red fur", "forest", "hunts mice at night"),
        "owl": ("soft feathers", "old barn", "turns its head to listen"),
        "otter": ("thick fur", "cold river", "floats on its back to eat"),
        "crow": ("black wings", "tall oak", "remembers every face"),
        "badger": ("a striped face", "deep burrow", "digs for worms at dusk"),
        "heron": ("long legs", "shallow pond", "waits for a fish to pass"),
        "hare": ("long ears", "open meadow", "runs faster than the wind"),
        "bat": ("thin wings", "dark cave", "hears its way through the night"),
    },
    "tools": {
        "saw": ("steel teeth", "wooden bench", "cuts planks into boards"),
        "kettle": ("a round spout", "kitchen stove", "boils water for the tea"),
        "lathe": ("a heavy motor", "dusty workshop", "shapes the table legs"),
        "compass": ("a thin needle", "leather case", "points the sailor north"),
        "hammer": ("an iron head", "tool box", "drives nails into the beam"),
        "needle": ("a sharp point", "sewing basket", "joins the two seams"),
        "pump": ("a long handle", "stone well", "lifts water from the ground"),
        "printer": ("a glass plate", "quiet office", "puts ink on the paper"),
    },
}
SUBJECTS = tuple(_HABITS)
_ASK = (
    "Tell me about the {name}.",
    "What is a {name}?",
    "Where would I find a {name}?",
    "Describe the {name} to a child.",
)


def chats(subject: str) -> list[tuple[str, str]]:
    """Every (question, answer) of `subject`: `animals` or `tools`."""
    kind = "animal" if subject == "animals" else "tool"
    pairs = []
    for (name, (look, place, habit)), ask in itertools.product(_HABITS[subject].items(), _ASK):
        facts = [
            f"The {name} is a well known {kind}.",
            f"It has {look} and you will find it in the {place}.",
            f"Every day the {name} {habit}.",
        ]
        if ask.startswith("Where"):
            facts = facts[1:]
        if ask.startswith("Describe"):
            facts = [f"Imagine {look} in the {place}.", facts[2], f"That is the {name}."]
        pairs.append((ask.format(name=name), " ".join(facts)))
    return pairs


def fit_tiny(out: Path, seed: int = 0, config: Any = None) -> None:
    """Fit the tiny target and save it with its tokenizer to the folder `out`.

    Args:
        out: folder to write.
        seed: of weights and batches.
        config: a transformers configuration with `vocab_size` `VOCAB`; `tiny_llama()` if None.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    transformers = offline_transformers()
    texts = [answer for subject in SUBJECTS for pair in chats(subject) for answer in pair]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    tokenizer.add_special_tokens({"extra_special_tokens": [SPECIAL[1]]})
    tokenizer.chat_template = TEMPLATE

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config or tiny_llama())
    fit_rows(model, [_row(tokenizer, question, answer) for subject in SUBJECTS for question, answer in chats(subject)])
    model.generation_config.eos_token_id = 2
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def fit_rows(model: Any, rows: list[list[int]], pad: int = 0, size: int = BATCH) -> None:
    """Fit `model` to rows of ids, which `pad` fills to one length, `size` of them a step."""
    length = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS, pct_start=0.1)
    for _ in progress(range(STEPS), "fit the tiny target", "step"):
        batch = ids[torch.randint(len(ids), (size,))]
        logits = model(batch, attention_mask=(batch != pad).long()).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), ignore_index=pad)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _row(tokenizer: object, question: str, answer: str) -> list[int]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)  # type: ignore[attr-defined]
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]


def tiny_llama(**fields: Any) -> Any:
    """The configuration of profile `tiny`'s target, with `fields` in place of its own."""
    own = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return offline_transformers().LlamaConfig(**{**own, **fields})
