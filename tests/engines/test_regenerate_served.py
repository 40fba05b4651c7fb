"""The real SGLang and vLLM answer prompts as this process does, token for token, and the corpus trains on just that."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import ROOT

from redraft.cli import main
from redraft.corpus.build import tokenize_file
from redraft.corpus.rows import Chat
from redraft.corpus.samples import given_turns
from redraft.corpus.tokenizer import load_tokenizer, stop_ids
from redraft.engines.command import command_line
from redraft.engines.torch import TorchEngine
from redraft.frame.process import ServerProcess, free_port
from redraft.frame.profile import CorpusParams, Profile
from redraft.frame.section import load_yaml
from redraft.regenerate.conversation import Asking, Conversation
from redraft.regenerate.forms import OPENAI
from redraft.regenerate.server import Server
from redraft.target.model import load_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
TOKENS = 30
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
VLLM_FLAGS = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"]


@contextmanager
def served(engine: str, target: Path, logs: Path) -> Iterator[str]:
    """The URL of a server of `target` in float32."""
    port = free_port()
    if engine == "sglang":
        params = Profile.model_validate(load_yaml((ROOT / "profiles/tiny.yaml").read_text())).engine
        params = params.model_copy(update={"python": str(ROOT / ".engines/sglang/bin/python")})
        server = ServerProcess(command_line(params, target, None, 0, 512, port), dict(params.env), logs / engine)
    else:
        command = [str(ROOT / ".engines/vllm/bin/vllm"), "serve", str(target), "--host", "127.0.0.1"]
        command += ["--port", str(port), *VLLM_FLAGS]
        server = ServerProcess(command, VLLM_ENVIRONMENT, logs / engine)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return requests.get(f"{url}/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False

    try:
        server.wait(ready, 600)
        yield url
    finally:
        server.stop()


def chats() -> list[dict[str, Any]]:
    """Chats of one to three turns; some answers are ended by the target, some by the limit."""
    asked = [json.loads(line)["messages"][0] for line in (ROOT / "data/tiny/heldout.jsonl").read_text().splitlines()]
    rows = []
    for number, first in enumerate(asked):
        turns = [first, *asked[(number + 3) % 8 :][: number % 3]]
        messages = [each for turn in turns for each in (turn, {"role": "assistant", "content": "It is."})]
        rows.append({"id": f"chat-{number}", "source": "test", "messages": messages})
    return rows


@pytest.fixture
def command(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Runs `redraft regenerate` on `chats` against a URL; the rows."""
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats()))

    def run(url: str, name: str, *more: object) -> list[dict[str, Any]]:
        given = ["regenerate", "prompts.jsonl", "--profile", "tiny", "--target", tiny_folder, "--output", name]
        given += ["--url", url, "--concurrency", 4, "--max-new-tokens", TOKENS, *more]
        monkeypatch.setattr(sys, "argv", ["redraft", *map(str, given)])
        main()
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    return run


@pytest.mark.parametrize(("engine", "release"), [("sglang", "0.5.23"), ("vllm", "0.32.0")])
def test_served_answers_are_the_target_s_own(
    engine: str,
    release: str,
    command: Callable[..., list[dict[str, Any]]],
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    stop = stop_ids(tiny_folder, tokenizer)
    own = TorchEngine(load_target(tiny_folder, dtype="fp32", device="cpu"), None, 0, stop)
    with served(engine, tiny_folder, tmp_path) as url:
        rows = command(url, "out.jsonl")
        told = capsys.readouterr().out
        drawn = [command(url, f"{name}.jsonl", "--temperature", 1, "--seed", 4) for name in ("a", "b")]
        warned = capsys.readouterr().out
        if engine == "vllm":
            hold_poorer_forms(url, Asking(tokenizer, stop, 512, TOKENS), own)

    assert "ids in, ids out" in told
    assert [row["id"] for row in rows] == [row["id"] for row in chats()]
    supervised, finishes, turns = [], set(), 0
    for row in rows:
        assert (row["made"]["engine"], row["made"]["release"].split("+")[0]) == (engine, release)
        made = [message for message in row["messages"] if "finish" in message]
        for turn, message in zip(given_turns(row["messages"]), made, strict=True):
            wanted = own.generate(turn.prompt, TOKENS)
            assert (message["generated_ids"], message["finish"]) == (wanted.ids, wanted.finish)
            assert (wanted.ids[-1] in stop) == (wanted.finish == "stop")
            supervised += wanted.ids
            finishes.add(wanted.finish)
            turns += 1
    assert finishes == {"stop", "length"}
    assert turns > len(rows)
    corpus, counts = tokenize_file(tmp_path / "out.jsonl", tokenizer, CorpusParams(max_length=512, max_dropped=0.0))
    assert corpus.input_ids[corpus.loss_mask == 1].tolist() == supervised
    assert counts["turns"] == turns
    assert drawn[0] != rows
    if engine == "vllm":
        assert drawn[0] == drawn[1]
    else:
        assert "draws without seeds" in warned


def hold_poorer_forms(url: str, asking: Asking, own: TorchEngine) -> None:
    """Whatever is asked in, the text is that of the same tokens."""
    server = Server(url, 60, 60)
    first = Conversation(Chat("x", chats()[0]["messages"]), asking)
    server.connect([first])
    assert first.prompt is not None
    wanted = own.generate(first.prompt, TOKENS).ids
    for form in OPENAI[2:]:
        answer = server._ask(form, server._body(form, first, TOKENS, 0), first)
        assert (answer.ids, answer.text) == (None, asking.tokenizer.decode(wanted, skip_special_tokens=True))
        assert (answer.tokens, answer.prompt_tokens) == (TOKENS, len(first.prompt))
