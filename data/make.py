"""Make the shipped corpora anew: `python data/make.py smollm` (or `tiny`, `kimi-tiny`), from the project's root.

The target answers every turn, greedily, as token ids. What would be trained on in part only is left out and counted:
chats with an answer that reached the limit of tokens, or longer than a sample of the profile.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from prompts import rows

from redraft.corpus.samples import given_turns
from redraft.frame.profile import load_profile
from redraft.target.sources import make_target

LIMIT = {"smollm": 160, "tiny": 64, "kimi-tiny": 80}
"""Tokens of an answer."""


def whole(line: str, longest: int) -> bool:
    """Whether every turn was answered to its end, within `longest` tokens."""
    row = json.loads(line)
    turns = given_turns(row["messages"])
    ends = [message["finish"] for message in row["messages"] if message["role"] == "assistant"]
    return "ended" not in row and set(ends) == {"stop"} and len(turns[-1].prompt) + len(turns[-1].answer) <= longest


def main(profile: str) -> None:
    described = load_profile(profile)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_target(described.target, folder / "target")
        options = ["--profile", profile, "--max-new-tokens", str(LIMIT[profile]), "--precision", "fp32"]
        for split, prompts in rows(profile).items():
            asked, answered = folder / f"{split}.jsonl", folder / f"{split}-answered.jsonl"
            asked.write_text("".join(json.dumps(row) + "\n" for row in prompts))
            command = [sys.executable, "-m", "redraft.cli", "regenerate", asked, "--target", folder / "target"]
            subprocess.run([*command, *options, "--output", answered], check=True)
            lines = answered.read_text().split("\n")[:-1]
            kept = [line for line in lines if whole(line, described.corpus.max_length)]
            turns = sum(line.count('"generated_ids"') for line in kept)
            path = Path("data") / profile / f"{split}.jsonl"
            path.write_text("".join(f"{line}\n" for line in kept))
            print(f"{path}: {len(kept)} chats, {turns} answers; left out: {len(lines) - len(kept)}")


if __name__ == "__main__":
    main(sys.argv[1])
