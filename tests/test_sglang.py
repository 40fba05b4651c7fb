"""The engine `sglang` against a process that answers, or fails, as a server does (cases C19, C20, C23)."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from clones import answers_to_signals
from hypothesis import given
from hypothesis import strategies as st

from redraft.acceptance import Steps
from redraft.bench.machine import machine
from redraft.corpus.corpus import read_corpus
from redraft.drafter.checkpoint import read_checkpoint, weights_sha256, write_checkpoint
from redraft.engines.command import installed_version
from redraft.engines.engine import serving
from redraft.engines.open import _server
from redraft.engines.reply import read_counters
from redraft.engines.sglang import SGLangEngine
from redraft.frame import process
from redraft.frame.errors import RedraftError
from redraft.frame.params import load_config
from redraft.frame.process import explain
from redraft.frame.profile import EngineParams
from redraft.report.bench import read_bench

FAKE = Path(__file__).parent / "fake"
CAPTURES = Path(__file__).parent / "captures"
PROMPTS = [[5, 6, 7], [9, 9], [40, 2]]


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A word in the environment of every process that the test starts."""
    word = uuid.uuid4().hex
    monkeypatch.setenv("REDRAFT_TEST_MARK", word)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")]))
    return word


def left(mark: str) -> list[str]:
    """Command lines of the processes that carry `mark`, but for this one."""
    found = []
    for each in psutil.process_iter():
        try:
            if each.pid != os.getpid() and each.environ().get("REDRAFT_TEST_MARK") == mark:
                found.append(" ".join(each.cmdline()))
        except psutil.Error:
            continue
    return found


def params(**changes: Any) -> EngineParams:
    fields: dict[str, Any] = {
        "python": sys.executable, "max_running": 2, "topk": 1, "ready_seconds": 20, "request_seconds": 2,
        "flags": {}, "speculative": {}, "env": {},
    }  # fmt: skip
    return EngineParams(**{**fields, **changes})


def engine(folder: Path, steps: int = 0, **changes: Any) -> SGLangEngine:
    target, drafter = folder / "target", folder / "drafter"
    target.mkdir(exist_ok=True)
    drafter.mkdir(exist_ok=True)
    draft = drafter if steps else None
    return SGLangEngine(params(**changes), target, draft, steps, frozenset([2]), 64, folder / "logs")


def test_a_server_is_started_asked_and_ended(tmp_path: Path, mark: str) -> None:
    with serving(engine(tmp_path, 3)) as server:
        assert len(left(mark)) == 2  # the server and a child of it
        answers = [server.generate(prompt, 10) for prompt in PROMPTS]
        described = server.describe()
    assert left(mark) == []
    assert answers[0].ids == list(range(8, 18))
    assert answers[0].steps == Steps(5, 5, [0, 5, 0, 0])
    assert answers[0].prompt_tokens == 3
    assert 0 < answers[0].first_token_seconds <= answers[0].seconds
    assert server.acceptance().metrics()["accept_length"] == 2.0
    assert described["version"] == "0.5.23"
    assert described["speculative_num_draft_tokens"] == 4
    command = " ".join(described["command"])
    for words in ("--speculative-algorithm EAGLE3", "--speculative-eagle-topk 1", "--max-running-requests 2",
                  "--context-length 64", "--host 127.0.0.1"):  # fmt: skip
        assert words in command


def test_flags_and_environment_of_the_profile_reach_the_server(tmp_path: Path) -> None:
    flags = {"tp-size": 8, "trust-remote-code": True, "enable-metrics": False, "context-length": 32}
    backend = {"speculative-draft-attention-backend": "fa3"}  # case C19
    plain, draft = (engine(tmp_path, steps, flags=flags, speculative=backend).command(30000) for steps in (0, 2))
    assert "--trust-remote-code" in plain
    assert "--enable-metrics" not in plain
    assert plain[plain.index("--context-length") + 1] == "32"
    assert plain.count("--context-length") == 1
    assert "--speculative-draft-attention-backend" not in plain
    assert draft[draft.index("--speculative-draft-attention-backend") + 1] == "fa3"
    assert [word for word in plain if word not in draft] == []


@pytest.mark.parametrize(
    ("fake", "told"),
    [
        ("never ready", "did not become ready"),
        ("unknown model", "unknown model type: ValueError: The checkpoint you are trying to load has model type `odd`"),
        ("backend", "backend: ValueError: EAGLE is not supported in attention backend torch_native"),
        ("memory", "out of memory: torch.OutOfMemoryError"),
        ("weights", "weights: AssertionError: Attempted to load weight"),
        ("context", "context: ValueError: Warning: Target model's context_length"),
        ("dies", "died while it served"),
        ("hangs", "timed out"),
        ("500", "HTTP 500"),
        ("malformed", "not JSON"),
        ("dropped", "broke off an answer"),
        ("no counters", "has no counters"),
        ("corrected", "other settings than asked"),
        ("eagle", "EAGLE is not EAGLE3"),
    ],
)
def test_every_fault_is_one_error_and_leaves_no_process(
    fake: str, told: str, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", fake)
    seconds = 2 if fake == "never ready" else 20
    server = engine(tmp_path, 3, ready_seconds=seconds)
    with pytest.raises(RedraftError, match="(?s)" + told) as caught, serving(server):
        [server.generate(prompt, 10) for prompt in PROMPTS]
    assert left(mark) == []
    text = str(caught.value)
    assert text.count("Traceback") <= 1  # the server's own, in the log's last lines
    if fake in ("unknown model", "backend", "memory", "weights", "context"):
        assert "exit code 1" in text
        assert "last lines of its log" in text
        assert "sglang.launch_server" in text
    if fake == "dies":
        assert "exit code 17" in text
        assert "illegal memory access" in text


def test_a_death_is_explained_by_its_cause_and_at_most_50_lines(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "\n".join([f"line {n}" for n in range(200)])
    script = f"print({log!r}); print('KeyError: odd'); print('RuntimeError: a child died'); raise SystemExit(3)"
    server = process.ServerProcess([sys.executable, "-c", script], {}, tmp_path / "log")
    with pytest.raises(RedraftError, match="exit code 3; other: KeyError: odd") as caught:
        server.wait(lambda: False, 10)
    assert str(caught.value).count("    | ") == 50
    assert left(mark) == []


@given(st.text(max_size=400))
def test_any_log_is_explained(log: str) -> None:
    name, line, _ = explain(log)
    assert name
    assert len(line) <= 320


def test_a_port_in_use_is_told_at_once(tmp_path: Path, mark: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(RedraftError, match="port is in use"):
            engine(tmp_path, port=port).start()
    assert time.monotonic() - began < 2
    assert left(mark) == []


@pytest.mark.parametrize(
    ("steps", "topk", "tokens"), [(4, 1, 24), (2, 1, 2), (3, 1, 3), (3, 4, 1), (1, 2, 9)]
)  # the first two: case C20
def test_settings_that_sglang_would_correct_are_refused(steps: int, topk: int, tokens: int, tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match="do not fit each other"):
        engine(tmp_path, steps, topk=topk, draft_tokens=tokens)


def test_a_flag_that_the_engine_decides_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RedraftError, match="speculative-num-steps"):
        engine(tmp_path, 3, speculative={"speculative-num-steps": 5})


def test_an_interpreter_without_sglang_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for python in (sys.executable, str(tmp_path / "none")):
        with pytest.raises(RedraftError, match="no SGLang in the interpreter"):
            installed_version(python)


def test_a_joined_server_goes_on(tmp_path: Path, mark: str) -> None:
    with serving(engine(tmp_path)) as launched:
        joined = engine(tmp_path, baseline_url=launched._base)
        with serving(joined) as server:
            assert server.generate([5], 4).ids == [6, 7, 8, 9]
        assert launched.generate([5], 4).ids == [6, 7, 8, 9]
        with (
            pytest.raises(RedraftError, match="other settings than asked"),
            serving(engine(tmp_path, 3, url=launched._base)),
        ):
            pass  # it does not speculate
    assert left(mark) == []
    with pytest.raises(RedraftError, match="does not answer"):
        engine(tmp_path, baseline_url="http://127.0.0.1:9").start()


# --- counters


RELEASES = {
    "0.5.5": ("", ""),
    "0.5.6": ("spec_accept_token_num", ""),
    "0.5.9": ("spec_accept_token_num", "spec_accept_histogram"),
    "0.5.11": ("spec_accepted_drafts", "spec_accept_histogram"),
    "0.5.23": ("spec_num_correct_drafts", "spec_correct_drafts_histogram"),
}


@given(st.sampled_from(sorted(RELEASES)), st.lists(st.integers(0, 300), min_size=2, max_size=7))
def test_counters_of_every_release_give_the_same(release: str, histogram: list[int]) -> None:
    steps, right = sum(histogram), sum(count * number for number, count in enumerate(histogram))
    drafted = len(histogram) - 1
    correct, spread = RELEASES[release]
    meta: dict[str, Any] = {"spec_verify_ct": steps, "spec_accept_length": 1.5}
    meta["spec_accept_rate"] = right / (steps * drafted) if steps else 0.0
    meta |= {correct: right} if correct else {}
    meta |= {spread: histogram} if spread else {}
    assert read_counters(meta, drafted, "test") == Steps(steps, right, histogram if spread else None)


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"spec_verify_ct": 10},  # 0.5.3 and before
        {"spec_num_correct_drafts": 10},
        {"spec_verify_ct": 4, "spec_num_correct_drafts": 3, "spec_correct_drafts_histogram": [4]},
        {"spec_verify_ct": 4, "spec_num_correct_drafts": 5, "spec_correct_drafts_histogram": [3, 0, 0, 0, 0, 1]},
    ],
)
def test_a_reply_without_whole_counters_is_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(RedraftError, match="counters"):
        read_counters(meta, 3, "test")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eagle3", (13, 34, [1, 1, 0, 11])),
        ("eagle3_tree", (13, 36, [1, 0, 0, 12])),
        ("eagle3_random_draft", (47, 0, [47, 0, 0, 0])),
    ],
)
def test_captured_replies(name: str, expected: tuple[int, int, list[int]]) -> None:
    meta = json.loads((CAPTURES / f"sglang-0.5.23-{name}.json").read_text())["meta_info"]
    assert read_counters(meta, 3, "test") == Steps(*expected)


def test_a_server_of_another_release_is_given_ids_that_it_reads_right(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A12: the files of a drafter name the ids of the newest release for its target."""
    monkeypatch.setenv("REDRAFT_STORE", str(tmp_path / "store"))
    target = Path(shutil.copytree(project / "artifacts/target", tmp_path / "target"))
    fields = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**fields, "architectures": ["DeepseekV3ForCausalLM"]}))
    drafter, settings = tmp_path / "drafter", load_config(project)
    write_checkpoint(drafter, read_checkpoint(project / "artifacts/drafter"), (3, 5, 6), target)
    for version, ids in (("0.5.12", [2, 4, 5]), ("0.5.23", [3, 5, 6])):
        monkeypatch.setattr("redraft.engines.open.installed_version", lambda python, told=version: told)
        server = _server(settings, target, drafter, 3, settings.profile.engine)
        path = Path(server.command(1)[server.command(1).index("--speculative-draft-model-path") + 1])
        part = json.loads((path / "config.json").read_text())["eagle_config"]
        assert part["eagle_aux_hidden_state_layer_ids"] == ids
        assert (path == drafter) == (version == "0.5.23")
    monkeypatch.setattr("redraft.engines.open.installed_version", lambda python: "0.5.9")
    with pytest.raises(RedraftError, match="layers-shifted"):
        _server(settings, target, drafter, 3, settings.profile.engine)


# --- the stage


def stage(
    project: Path, fake: str, name: str = "probe", ignored: Sequence[int] = (), **more: str
) -> Iterator[subprocess.Popen[str]]:
    """A stage that runs; with `ignored` as a script starts it that ignores these signals."""

    def prepare() -> None:
        answers_to_signals()
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

    environment = {**os.environ, "FAKE": fake, "MLFLOW_TRACKING_URI": "http://127.0.0.1:9", **more}
    command = [sys.executable, f"stages/{name}.py"]
    with subprocess.Popen(
        command, cwd=project, env=environment, text=True, stderr=subprocess.PIPE, preexec_fn=prepare
    ) as running:
        yield running


def wait_until(true: Callable[[], bool], seconds: float = 120) -> None:
    """A busy machine takes its time."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(("fake", "told"), [("dies", "died while it served"), ("no counters", "has no counters")])
def test_a_failed_probe_leaves_no_metrics_and_no_process(fake: str, told: str, project: Path, mark: str) -> None:
    for running in stage(project, fake):
        _, errors = running.communicate(timeout=300)
    assert running.returncode == 1
    assert told in errors
    assert "Traceback (most recent call last)" not in errors
    assert not (project / "metrics").exists()
    assert not (project / "artifacts/samples.txt").exists()
    assert left(mark) == []


@pytest.mark.parametrize(
    ("ignored", "sent", "code"),
    [
        ([], [signal.SIGINT], 130),
        ([], [signal.SIGTERM], 143),
        ([], [signal.SIGHUP], 129),  # its terminal was closed
        ([signal.SIGINT], [signal.SIGINT, signal.SIGTERM], 143),  # in the background of a script
        ([signal.SIGHUP], [signal.SIGHUP, signal.SIGTERM], 143),  # started by nohup: it goes on
    ],
)
def test_an_interrupted_probe_ends_its_server(
    ignored: list[int], sent: list[int], code: int, project: Path, mark: str
) -> None:
    for running in stage(project, "never ready", ignored=ignored):
        wait_until(lambda: len(left(mark)) >= 3)
        for number in sent:
            running.send_signal(number)
        running.communicate(timeout=120)
    assert running.returncode == code
    assert left(mark) == []
    assert not (project / "metrics").exists()


def test_a_killed_probe_leaves_no_server(project: Path, mark: str) -> None:
    """SIGKILL, as of the kernel that is out of memory: nothing of the stage can act any more."""
    for running in stage(project, "never ready"):
        wait_until(lambda: len(left(mark)) >= 3)
        running.kill()
        running.communicate(timeout=120)
    wait_until(lambda: left(mark) == [])


@pytest.fixture
def other_project(project: Path, tmp_path: Path) -> Path:
    """A project of its own profile over the same artefacts; a tree, since the fake accepts what no drafter would."""
    for name in ("artifacts", "stages"):
        (tmp_path / name).mkdir() if name == "artifacts" else (tmp_path / name).symlink_to(project / name)
    for name in ("target", "corpus", "donor", "drafter"):
        (tmp_path / "artifacts" / name).symlink_to(project / "artifacts" / name)
    (tmp_path / "params.yaml").write_text((project / "params.yaml").read_text())
    (tmp_path / "profiles").mkdir()
    text = (project / "profiles/tiny.yaml").read_text()
    text = text.replace("topk: 1", "topk: 2").replace("concurrency: [1]", "concurrency: [2]")
    (tmp_path / "profiles/tiny.yaml").write_text(text.replace("  prompts: 4\n", "  prompts: 8\n"))
    return tmp_path


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_another_output_fails_a_probe_in_float32_alone(dtype: str, code: int, other_project: Path, mark: str) -> None:
    """In fewer bits a verify forward rounds otherwise than one of one token: it is told, and is no fault."""
    for running in stage(other_project, "changes the output", FAKE_DTYPE=dtype):
        _, errors = running.communicate(timeout=300)
    assert running.returncode == code, errors
    assert left(mark) == []
    if code:
        assert "Speculation changed the target's greedy output" in errors
        assert "logits 0.25 apart" in errors
        return
    probe = json.loads((other_project / "metrics/probe.json").read_text())
    assert probe["lossless"] is False
    assert probe["asked"] == {"prompts": 6, "max_new_tokens": 32}
    assert probe["drafter"] == weights_sha256(other_project / "artifacts/drafter")
    assert probe["outputs"]["largest_gap"] == 0.25
    assert "parity" not in probe


def test_a_bench_that_is_told_to_end_under_load_leaves_no_server(other_project: Path, mark: str) -> None:
    """Several clients wait for answers that will not come for an hour."""
    log = other_project / ".store/serve/sglang-baseline.log"
    for running in stage(other_project, "hangs", "bench"):
        wait_until(lambda: log.exists() and "hanging" in log.read_text())
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=120)  # an answer would take an hour
    assert running.returncode == 143
    assert left(mark) == []
    assert not (other_project / "metrics").exists()


def test_a_bench_tells_what_it_measured_with(other_project: Path, mark: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Case A7 of the trial: fewer prompts than asked for are told; and whose figures they are."""
    profile = other_project / "profiles/tiny.yaml"
    profile.write_text(profile.read_text().replace("  prompts: 8\n", "  prompts: 200\n"))
    for running in stage(other_project, "", "bench", FAKE_TOKEN_SECONDS="0.001", FAKE_CYCLE="1.2"):
        _, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors
    assert left(mark) == []
    bench = read_bench(other_project / "metrics/bench.json")
    samples = len(read_corpus(other_project / "artifacts/corpus/heldout.safetensors"))
    assert (bench["asked"]["prompts"], bench["prompts"]) == (200, samples)
    told = capfd.readouterr().out
    assert f"bench: {samples} prompts of the 200 asked for" in told
    assert "at the pace of the first answers about" in told
    assert bench["drafter"] == weights_sha256(other_project / "artifacts/drafter")
    assert bench["machine"] == machine()
    row = bench["levels"]["2"]["rows"]["3"]
    assert [row[name] for name in ("label", "drafter", "steps", "topk", "tokens")] == ["3 drafted", None, 3, 1, 4]
