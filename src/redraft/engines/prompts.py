"""What an engine is asked: held-out prompts, and answers that are long enough to hold a draft."""

from redraft.corpus.corpus import Corpus
from redraft.frame.errors import RedraftError

LEAST_TOKENS = 2


def held_out(corpus: Corpus, asked: int, who: str, first: int = 0) -> list[list[int]]:
    """Prompts from number `first` on, going round; if there are fewer than `who` asks for, all, and that is told."""
    found = min(asked, len(corpus))
    if found < asked:
        print(f"{who}: {found} prompts of the {asked} asked for: there are no more held-out samples")
    return [corpus.prompt((first + at) % len(corpus)) for at in range(found)]


def require_drafts(max_new_tokens: int, where: str) -> None:
    """Refuse answers in which nothing is ever drafted.

    Raises:
        RedraftError: fewer than `LEAST_TOKENS`.
    """
    if max_new_tokens < LEAST_TOKENS:
        raise RedraftError(
            "Answers of one token hold no draft, and no decoding that could be measured.",
            where=f"{where}.max_new_tokens in the profile",
            expected=f"at least {LEAST_TOKENS}, and better some dozens",
            found=max_new_tokens,
            cause="the first token comes from the prefill, before any draft",
        )
