"""The engine `vllm` against a stand-in for its server: what comes back is this document's, or one clear error."""

import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from conftest import HIDDEN, LAYERS, ROOT, VOCAB, llama
from made_states import made, normed
from torch import Tensor
from transformers import GemmaConfig

from redraft.frame import process
from redraft.frame.errors import RedraftError
from redraft.frame.profile import Profile, load_profile
from redraft.frame.section import validate
from redraft.hidden import transfer, vllm
from redraft.hidden.engine import States
from redraft.hidden.vllm import VllmEngine, opening
from redraft.target.ends import Ends, read_ends
from redraft.target.norm import PLAIN, FinalNorm, final_norm

FAKE = ROOT / "tests/fake"
AUX = (2, 4, 5)
EPS = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "target"
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(transfer, "SHARED_MEMORY", tmp_path)
    for module, name in ((vllm, "FIRST_PAUSE"), (vllm, "DEATH_SECONDS"), (process, "POLL_SECONDS")):
        monkeypatch.setattr(module, name, 0.2)
    monkeypatch.setattr(transfer, "GRACE_SECONDS", 0.1)


def served(fake: str = "", first: int = 1, times: int = 999, law: str = "states", **changes: Any) -> Profile:
    """Profile `tiny` with the stand-in as its server, which fails as `fake` says from request `first` on."""
    values = load_profile("tiny", ROOT).model_dump()
    told = {"FAKE": fake, "FAKE_FROM": str(first), "FAKE_TIMES": str(times), "OMP_NUM_THREADS": "1"}
    values["extract"] |= {"engine": "vllm", "law": law, "server": {
        "python": sys.executable, "dtype": "fp32", "concurrency": 2, "ready_seconds": 60, "request_seconds": 20,
        "retries": 2, "env": {**told, "PYTHONPATH": os.pathsep.join(map(str, (FAKE, ROOT / "tests")))}, **changes,
    }}  # fmt: skip
    return validate(Profile, values, Path("tiny"))


def documents(
    seed: int = 0, sizes: tuple[tuple[int, ...], ...] = ((5, 9, 30, 4), (17,), (8, 6, 3))
) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [[torch.randint(VOCAB, (size,), generator=draw, dtype=torch.int32) for size in group] for group in sizes]


def extracted(
    folder: Path, profile: Profile, groups: list[list[Tensor]], around: bool = False, layers: tuple[int, ...] = AUX
) -> dict[tuple[int, int], States]:
    with opening(folder, profile).open(()) as engine:
        return {each[:2]: each[2] for each in engine.states(groups, layers, around=around)}


def check(
    states: dict[tuple[int, int], States], groups: list[list[Tensor]], ends: Ends, layers: tuple[int, ...]
) -> None:
    """They are what the stand-in makes of these ids, in its own fp32."""
    assert states.keys() == {(group, place) for group, each in enumerate(groups) for place in range(len(each))}
    for (group, place), given in states.items():
        ids = groups[group][place].tolist()
        for layer in layers:
            wanted = made(ids, [layer], HIDDEN)[:, 0] if layer else ends.embed[ids]
            assert torch.equal(given[f"layer_{layer}"], wanted)
            assert given[f"layer_{layer}"].is_contiguous()
        if "final" in given:
            final = normed(made(ids, [LAYERS], HIDDEN)[:, 0], ends.norm, EPS)
            assert torch.allclose(given["final"], final, atol=1e-5)
            assert given["greedy"].tolist() == (final @ ends.head.T).argmax(-1).tolist()


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """No process and no file of a server is left."""
    yield
    assert not [each for each in psutil.Process().children(recursive=True) if "serve" in each.cmdline()]
    assert not list(tmp_path.glob(f"{transfer.PREFIX}*"))


@pytest.mark.usefixtures("nothing_left")
def test_states_of_several_servers(folder: Path) -> None:
    """Layers that a running server lacks are a new start of it; the embedding is no server's."""
    groups, ends = documents(), read_ends(folder)
    opened = opening(folder, served(servers=2))
    assert opened.identity == {"name": "vllm", "release": "0.32.0", "dtype": "fp32"}
    with opened.open(()) as engine:
        assert isinstance(engine, VllmEngine)
        check({each[:2]: each[2] for each in engine.states(groups, AUX)}, groups, ends, AUX)
        first = [requests.get(f"{each.client.base}/seen", timeout=9).json() for each in engine.servers.servers]
        assert sum(each["asked"] for each in first) == 8 + 2  # two probes
        assert min(each["asked"] for each in first) > 1
        wide = (0, 1, 2, 3)
        around = {each[:2]: each[2] for each in engine.states(groups, wide, around=True)}
        check(around, groups, ends, wide)
        assert engine.servers.layers == (1, 2, 3, 4, 5, LAYERS)
        ids = groups[0][1].tolist()
        assert torch.equal(around[0, 1]["unnormed"], made(ids, [LAYERS], HIDDEN)[:, 0])
        check({each[:2]: each[2] for each in engine.states(groups, AUX)}, groups, ends, AUX)


def test_order_and_the_files_in_flight_are_bounded(folder: Path) -> None:
    """However slow the reader is; a document is never two shards ahead."""
    groups = documents(sizes=((4,) * 10, (3,) * 10, (5,) * 10))
    with opening(folder, served("late", 5, 3)).open(()) as engine:
        assert isinstance(engine, VllmEngine)
        order = []
        for group, _, _ in engine.states(groups, AUX):
            order.append(group)
            time.sleep(0.01)
            assert all(order.count(before) == 10 for before in range(group - 1))
        seen = requests.get(f"{engine.servers.servers[0].client.base}/seen", timeout=9).json()
        assert seen["most"] <= 2
        assert engine.servers.folder is not None
        assert not list(engine.servers.folder.iterdir())
        flags = seen["command"][3:]
        assert ("--max-model-len", "129") in itertools.pairwise(flags)
    assert len(order) == 30


@pytest.mark.parametrize("fake", ["500", "late", "no file", "half a file", "unlocked"])
def test_a_request_that_failed_is_asked_again(fake: str, folder: Path) -> None:
    groups = documents()
    check(extracted(folder, served(fake, 2, 2, request_seconds=1), groups), groups, read_ends(folder), AUX)


@pytest.mark.parametrize(
    ("fake", "told"),
    [
        ("500", "does not give a document's states(.|\n)*HTTP 500(.|\n)*after 2 retries"),
        ("400", "HTTP 400(.|\n)*after 0 retries"),
        ("no file", "its lock is free, and there is no file(.|\n)*after 2 retries"),
        ("half a file", "safetensors(.|\n)*after 2 retries"),
        ("unlocked", "lock: there is no such file"),
        ("no states", "gives no hidden states(.|\n)*extract_hidden_states"),
        ("a layer less", r"Another number of states(.|\n)*4: \[2, 4, 5, 8\]"),
        ("prefix cached", "another number of tokens(.|\n)*no-enable-prefix-caching"),
        ("other tokens", "states are of other tokens"),
        ("another document", "next token is not the one that its last state gives"),
        ("half precision", "another dtype(.|\n)*float32(.|\n)*float16"),
        ("nan", r"not finite(.|\n)*in \[4\]"),
        ("die", "died while it gave hidden states(.|\n)*exit code 3(.|\n)*the worker is gone"),
    ],
)
@pytest.mark.usefixtures("nothing_left")
def test_what_cannot_be_this_documents_ends_in_one_error(fake: str, told: str, folder: Path) -> None:
    with pytest.raises(RedraftError, match=told) as error:
        extracted(folder, served(fake, 3, request_seconds=1), documents())
    if fake not in ("die", "no states"):
        assert "document" in str(error.value)


def test_a_release_without_the_last_state(folder: Path) -> None:
    """It is told from the first file; the server's own law stands in for it, where that is what is kept."""
    groups, ends = documents(), read_ends(folder)
    with pytest.raises(RedraftError, match=r"expected: 4(.|\n)*lacks the state after the last layer(.|\n)*law: top64"):
        extracted(folder, served("a layer less", 0), groups)
    states = extracted(folder, served("a layer less", 0, law="top64"), groups)
    check(states, groups, ends, AUX)
    for (group, place), given in states.items():
        assert given.keys() == {*(f"layer_{layer}" for layer in AUX), "top_ids", "top_logits", "greedy"}
        final = normed(made(groups[group][place].tolist(), [LAYERS], HIDDEN)[:, 0], ends.norm, EPS)
        top = (final @ ends.head.T).topk(64)
        assert torch.equal(given["top_ids"], top.indices.int())
        assert torch.allclose(given["top_logits"].softmax(-1), top.values.softmax(-1), atol=1e-5)
        assert torch.equal(given["greedy"], given["top_ids"][:, 0])
    asked = served(law="top64", layers=(2, 4, 5))
    assert "top_ids" in extracted(folder, asked, groups)[0, 0]  # launched without it, since a release may die of it
    assert "final" in extracted(folder, served(law="top64"), groups)[0, 0]


def test_joined_servers_must_agree(folder: Path) -> None:
    """What they were launched with they do not tell; what they give is compared, between them and with the profile."""
    groups, ends = documents(), read_ends(folder)
    with opening(folder, served()).open(()) as one, opening(folder, served()).open(()) as other:
        assert isinstance(one, VllmEngine)
        assert isinstance(other, VllmEngine)
        list(one.states(groups, AUX))
        list(other.states(groups, (2, 4, 6)))
        urls = [each.servers.servers[0].client.base for each in (one, other)]

        def joined(urls: list[str], layers: tuple[int, ...]) -> Profile:
            return served(python=None, urls=tuple(urls), layers=layers)

        check(extracted(folder, joined(urls[:1], (2, 4, 5, LAYERS)), groups), groups, ends, AUX)
        with pytest.raises(RedraftError, match="different states of the same tokens"):
            extracted(folder, joined(urls, (2, 4, 5, LAYERS)), groups)
        with pytest.raises(RedraftError, match=r"another number of states(.|\n)*found: 4"):
            extracted(folder, joined(urls, (1, 2, 4, 5, LAYERS)), groups)
        with pytest.raises(RedraftError, match=r"do not give all states(.|\n)*no 5(.|\n)*layer_ids\":\[2,4,5,8\]"):
            extracted(folder, joined(urls, (2, 4, 6, LAYERS)), groups)


def test_a_server_that_does_not_come_up(folder: Path) -> None:
    with pytest.raises(RedraftError, match=r"unknown model type(.|\n)*not supported"):
        extracted(folder, served("never ready"), documents())
    with pytest.raises(RedraftError, match=r"no vLLM in the interpreter(.|\n)*extract.server.python"):
        opening(folder, served(env={}))
    with pytest.raises(RedraftError, match=r"longer than a server takes(.|\n)*at most 128"):
        extracted(folder, served(), documents(sizes=((129,),)))
    with pytest.raises(RedraftError, match="does not answer"):
        opening(folder, served(python=None, urls=("http://127.0.0.1:9",), layers=(2, 4, 5, 8)))
    with pytest.raises(RedraftError, match=r"decided here(.|\n)*kv-transfer-config"):
        extracted(folder, served(flags={"kv_transfer_config": "{}"}), documents())
    with pytest.raises(RedraftError, match=r"no room(.|\n)*extract.server.folder"):
        extracted(folder, served(concurrency=10**12), documents())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"urls": ("http://a",)}, "either python"),
        ({"python": None}, "either python"),
        ({"python": None, "urls": ("http://a",)}, "urls need layers"),
        ({"servers": 2, "devices": ("0",)}, "devices for 2 servers"),
        ({"flags": {"--tp": 2}}, "without dashes"),
        ({"layers": (2, 2)}, "every value once"),
    ],
)
def test_a_section_that_cannot_be(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RedraftError, match=told):
        served(**changes)


def test_the_engine_needs_its_section() -> None:
    values = load_profile("tiny", ROOT).model_dump()
    values["extract"]["engine"] = "vllm"
    with pytest.raises(RedraftError, match="engine: vllm needs the section server"):
        validate(Profile, values, Path("tiny"))


def test_flags_that_decide_numbers_are_another_identity(folder: Path) -> None:
    def identity(**flags: Any) -> dict[str, Any]:
        return opening(folder, served(flags=flags)).identity

    assert identity(tensor_parallel_size=8) == identity()
    assert identity(quantization="fp8") != identity()


SCRIPT = """
import sys, test_vllm_states as tests
from pathlib import Path
groups = tests.documents(sizes=((9,) * 400,))
tests.transfer.SHARED_MEMORY = Path(sys.argv[2])
with tests.opening(Path(sys.argv[1]), tests.served("late", 3)).open(()) as engine:
    for done, _ in enumerate(engine.states(groups, (2, 4, 5))):
        print(done, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.usefixtures("nothing_left")
def test_a_run_that_is_ended_leaves_no_server(number: int, folder: Path, tmp_path: Path) -> None:
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "REDRAFT_STORE": str(tmp_path)}
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path)], env=environment, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    server = next(each for each in psutil.Process(child.pid).children() if "serve" in each.cmdline())
    child.send_signal(number)
    assert child.wait(20) != 0
    server.wait(20)
    left = list(tmp_path.glob(f"{transfer.PREFIX}*"))
    assert len(left) == (number == signal.SIGKILL)
    for path in left:  # its files go when the next run starts
        os.utime(path, (0, 0))
    with transfer.transfer_folder(None, 1):
        assert not [path for path in left if path.exists()]


@pytest.mark.parametrize("kind", sorted(PLAIN - {"kimi_k2"}))  # Kimi's is DeepseekV3
def test_the_final_norm_is_the_models_own(kind: str) -> None:
    name = kind.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    own = next(each for key, each in vars(module).items() if key.endswith("RMSNorm") and isinstance(each, type))
    states, weight = torch.randn(7, 16), torch.randn(16)
    norm = own(16, eps=1e-3)
    norm.weight.data.copy_(weight)
    for dtype, near in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        wanted = norm.to(dtype)(states.to(dtype))
        assert torch.allclose(FinalNorm(weight, 1e-3)(states.to(dtype)).float(), wanted.float(), rtol=near, atol=near)


def test_a_norm_that_is_not_known_is_refused(tmp_path: Path, folder: Path) -> None:
    GemmaConfig().save_pretrained(tmp_path)
    with pytest.raises(RedraftError, match=r"final norm of this target is not known(.|\n)*gemma"):
        final_norm(tmp_path, torch.ones(4))
    assert final_norm(folder, torch.ones(4)).eps == EPS
