"""Probe: is the drafter served as it was trained, and does speculation leave the output as it was?"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from redraft.engines.engine import Engine, Generation, Margin, serving
from redraft.frame.errors import RedraftError
from redraft.frame.progress import progress

NEAR_TIE = 1e-3
"""Logits nearer than this are a tie in float32: rounding may pick either token."""


@dataclass
class Comparison:
    """Outputs with and without speculation on the same prompts."""

    prompts: int = 0
    equal: int = 0
    ties: int = 0
    """Outputs that part at a near-tie; what follows is not compared."""
    compared_tokens: int = 0
    different: list[dict[str, Any]] = field(default_factory=list)
    """Every other difference: prompt, position, both tokens, gap, shape noise."""
    answers: list[tuple[list[int], Generation, Generation]] = field(default_factory=list)
    """Prompt, plain answer, speculative answer."""

    def metrics(self) -> dict[str, Any]:
        """The counts, and the largest gap beside the largest shape noise where outputs part."""
        rows = {
            "prompts": self.prompts,
            "equal": self.equal,
            "ties": self.ties,
            "different": len(self.different),
            "compared_tokens": self.compared_tokens,
        }
        if self.different:
            rows |= {
                f"largest_{name}": round(max(row[name] for row in self.different), 4) for name in ("gap", "shape_noise")
            }
        return rows


def answer(engine: Engine, prompts: Sequence[list[int]], max_new_tokens: int, title: str) -> list[Generation]:
    """Answer `prompts` one after the other."""
    return [engine.generate(prompt, max_new_tokens) for prompt in progress(prompts, title, "prompt")]


def compare(
    prompts: Sequence[list[int]],
    plain: Sequence[Generation],
    speculative: Sequence[Generation],
    margin: Callable[[list[int], int, int], Margin],
) -> Comparison:
    """Explain the first token at which two answers part; `margin` compares two tokens after a prefix."""
    result = Comparison()
    for number, (prompt, one, two) in enumerate(zip(prompts, plain, speculative, strict=True)):
        result.answers.append((prompt, one, two))
        result.prompts += 1
        pairs = zip(one.ids, two.ids, strict=False)
        part = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.ids), len(two.ids)))
        result.compared_tokens += part
        if one.ids == two.ids:
            result.equal += 1
            continue
        if part in (len(one.ids), len(two.ids)):
            tokens = [answer.ids[part] if part < len(answer.ids) else None for answer in (one, two)]
            result.different.append(
                {"prompt": number, "position": part, "tokens": tokens, "gap": 0.0, "shape_noise": 0.0}
            )
            continue
        first, second = one.ids[part], two.ids[part]
        found = margin([*prompt, *one.ids[:part]], first, second)
        if abs(found.gap) <= NEAR_TIE:
            result.ties += 1
        else:
            result.different.append(
                {"prompt": number, "position": part, "tokens": [first, second]}
                | {"gap": round(abs(found.gap), 5), "shape_noise": round(found.shape_noise, 5)}
            )
    return result


def serve_both(
    engines: Mapping[int, Engine], prompts: Sequence[list[int]], max_new_tokens: int, title: str
) -> Comparison:
    """Answer `prompts` without speculation, then with it, one engine at a time, and compare.

    Args:
        engines: by drafted tokens, not started; without a 0 the answers are not compared.
        prompts: token ids.
        max_new_tokens: of each answer.
        title: of the progress bars.

    Raises:
        RedraftError: no engine speculates.
    """
    steps = max(engines, default=0)
    if not steps:
        raise RedraftError(
            "A probe needs a server with speculation.",
            where="engine.url in the profile",
            found="engine.baseline_url alone",
            fix="give engine.url as well, or neither: then both servers are started here",
        )
    answers: dict[int, list[Generation]] = {}
    for number in sorted(engines):
        with serving(engines[number]) as engine:
            answers[number] = answer(engine, prompts, max_new_tokens, f"{title}, {number or 'not'} drafted")
    if 0 not in engines:
        result = Comparison(prompts=len(prompts))
        result.answers = [(prompt, given, given) for prompt, given in zip(prompts, answers[steps], strict=True)]
        return result
    with ExitStack() as stack:
        started: list[Engine] = []

        def margin(prefix: list[int], first: int, second: int) -> Margin:
            if not started:  # only outputs that part need it again
                started.append(stack.enter_context(serving(engines[0])))
            return started[0].margin(prefix, first, second, steps + 1)

        return compare(prompts, answers[0], answers[steps], margin)


def require_lossless(comparison: Comparison) -> None:
    """Refuse any difference that is not a near-tie.

    Raises:
        RedraftError: naming the first one.
    """
    if comparison.different:
        row = comparison.different[0]
        raise RedraftError(
            "Speculation changed the target's greedy output.",
            where=f"prompt {row['prompt']}, answer token {row['position']}",
            expected=f"token {row['tokens'][0]}",
            found=f"token {row['tokens'][1]}, logits {row['gap']} apart; shape noise of the model {row['shape_noise']}",
            cause="a fault in the verify step or in a cache: the drafter alone can never change the output",
        )


def trained_length(outputs: Comparison, record: Mapping[str, Any]) -> dict[str, int]:
    """The longest row that the drafter was trained on (`redraft.json`), and how many probed answers end beyond it."""
    trained = record.get("training", {}).get("row_tokens")
    if not trained:
        return {}
    longer = sum(len(prompt) + len(given.ids) > trained for prompt, _, given in outputs.answers)
    if longer:
        print(f"warning: {longer} prompts with their answers are longer than the {trained} tokens of a training row")
    return {"trained_tokens": trained, "longer_than_trained": longer}


def require_acceptance(accept_length: float, least: float) -> None:
    """Refuse a drafter that accepts nothing: outputs stay right, so nothing else would tell.

    Raises:
        RedraftError: with the list of usual causes.
    """
    if accept_length < least:
        raise RedraftError(
            "The served drafter accepts next to nothing.",
            where="probe.min_accept_length in the profile",
            expected=f"accept length of at least {least}",
            found=accept_length,
            cause="in this order: mapping, missing weights, aux layers off by one, chat template, context",
        )


def samples_text(tokenizer: Any, answers: Sequence[tuple[list[int], Generation, Generation]]) -> str:
    """Prompt and speculative answer of every sample, with what its verify steps accepted."""
    blocks = []
    for prompt, _, answer in answers:
        steps = answer.steps
        if steps.order is not None:
            told = f"accepted a step: {' '.join(map(str, steps.order))}"
        else:
            spread = f", steps by number: {steps.histogram}" if steps.histogram else ""
            told = f"accepted {steps.right} in {steps.verify} steps{spread}"
        blocks.append(f"{tokenizer.decode(prompt)}{tokenizer.decode(answer.ids)}\n[{told}]\n")
    return "\n".join(blocks)
