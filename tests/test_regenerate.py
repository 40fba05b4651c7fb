"""Answers by a server that fails in every way it can, by a process that is killed, and in this process."""

import fcntl
import gzip
import hashlib
import json
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import requests
from clones import answers_to_signals
from conftest import ROOT
from test_turns import END, Row, asking, chats, made, reply, rows_of, talking, user, write

from redraft.cli import main
from redraft.corpus.build import tokenize_file
from redraft.corpus.samples import given_turns
from redraft.corpus.tokenizer import load_tokenizer
from redraft.frame.errors import RedraftError
from redraft.frame.process import free_port
from redraft.frame.profile import CorpusParams
from redraft.regenerate.answered import answered
from redraft.regenerate.conversation import Conversation
from redraft.regenerate.server import Server
from redraft.regenerate.threads import answer_by

KINDS = ("sglang", "vllm", "tensorrt", "ids", "text", "chat")


class Fake:
    """`tests/fake/answers.py` as a process."""

    def __init__(self, folder: Path, *options: object) -> None:
        command = [sys.executable, str(ROOT / "tests/fake/answers.py"), str(folder), *map(str, options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=answers_to_signals)
        assert self.process.stdout is not None
        scheme = "https" if "--certificate" in options else "http"
        self.url = f"{scheme}://127.0.0.1:{self.process.stdout.readline().strip()}"

    def seen(self) -> Row:
        return requests.get(f"{self.url}/seen", timeout=5).json()

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def fake(tiny_folder: Path) -> Iterator[Callable[..., Fake]]:
    started: list[Fake] = []

    def start(*options: object) -> Fake:
        started.append(Fake(tiny_folder, *options))
        return started[-1]

    yield start
    for each in started:
        each.stop()


class Place:
    """A folder with prompts, in which the command runs."""

    def __init__(self, folder: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.target: Path | None = target
        self.prompts = write(folder / "prompts.jsonl", chats(30))
        self.out = folder / "out.jsonl"
        self.journal = folder / ".out.jsonl.answered"

    def arguments(self, url: str | None, *more: object, **files: Path) -> list[str]:
        prompts, out = files.get("prompts", self.prompts), files.get("out", self.out)
        given: list[object] = ["regenerate", prompts, "--profile", "tiny", "--output", out, "--max-new-tokens", 30]
        given += ["--target", self.target] if self.target else []
        given += ["--url", url, "--timeout", 1, "--patience", 4] if url else []
        return list(map(str, [*given, *more]))

    def run(self, url: str | None, *more: object, **files: Path) -> str:
        """What the command prints on stdout; `err` keeps the rest."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["redraft", *self.arguments(url, *more, **files)])
            try:
                main()
            finally:
                out, self.err = self.capsys.readouterr()
        return out

    def fail(self, url: str | None, *more: object, **files: Path) -> str:
        """The error it ends with."""
        with pytest.raises(SystemExit) as ended:
            self.run(url, *more, **files)
        assert str(ended.value).startswith("error: ")
        return str(ended.value)

    def start(self, url: str, *more: object, **how: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "redraft.cli", *self.arguments(url, *more)]
        limits = how.pop("limits", answers_to_signals)
        return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, preexec_fn=limits, **how)

    def kept(self) -> int:
        """Rows in the journal."""
        return max(0, self.journal.read_bytes().count(b"\n") - 1) if self.journal.exists() else 0

    def until(self, rows: int, process: subprocess.Popen[str]) -> None:
        while self.kept() < rows:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)


@pytest.fixture
def place(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Place:
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return Place(tmp_path, tiny_folder, capsys)


@pytest.fixture
def undisturbed(fake: Callable[..., Fake], place: Place) -> bytes:
    """The file of a run that nothing disturbs, one request at a time."""
    place.run(fake().url, "--concurrency", 1)
    data = place.out.read_bytes()
    place.out.unlink()
    return data


def break_off(out: Path, run: Row, rows: dict[int, Row]) -> None:
    """What a run leaves that was broken off."""
    with suppress(RuntimeError), answered(out, run) as kept:
        for place, row in rows.items():
            kept.add(place, row)
        raise RuntimeError


# --- failures


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_fails_the_file_is_that_of_an_undisturbed_run(
    kind: str, fake: Callable[..., Fake], place: Place
) -> None:
    many = kind == "sglang"
    place.prompts = write(place.prompts, chats(70 if many else 20))
    place.run(fake("--kind", kind).url, "--concurrency", 1)
    calm = place.out.read_bytes()
    failing = fake("--kind", kind, "--faults", 0.5, "--seed", 1)
    told = place.run(failing.url, "--concurrency", 8, "--overwrite")
    assert place.out.read_bytes() == calm
    seen = failing.seen()
    assert seen["most at once"] <= 8
    assert sum(seen["faults"].values()) > 10
    if many:
        assert len(seen["faults"]) == 28  # every one there is
    assert [row["id"] for row in rows_of(place.out)] == [f"chat-{number}" for number in range(70 if many else 20)]
    assert ("without ids" in told) == (kind in ("ids", "text", "chat"))
    assert not place.journal.exists()


def test_a_process_that_is_killed_goes_on_to_the_row(
    fake: Callable[..., Fake], place: Place, undisturbed: bytes
) -> None:
    server, frozen = fake("--faults", 0.2, "--delay", 0.1, "--seed", 3), fake("--freeze", 20)
    for url, rows, number in (
        (server.url, 5, signal.SIGKILL),
        (server.url, 11, signal.SIGKILL),
        (frozen.url, 14, signal.SIGINT),
    ):
        process = place.start(url, "--concurrency", 4, "--timeout", 60)
        place.until(rows, process)
        process.send_signal(number)
        began = time.monotonic()
        _, told = process.communicate()
        assert time.monotonic() - began < 5
        assert not place.out.exists()
        assert "Traceback" not in told
        places = [json.loads(line)["place"] for line in place.journal.read_bytes().splitlines()[1:]]
        assert len(set(places)) == len(places) >= rows
        with place.journal.open("ab") as file:
            file.write(b'{"place": 29, "row": {"id": "half')
    assert process.returncode == 130
    assert f"{len(places)} of 30 chats are kept" in told
    asked = server.seen()["asked"]
    place.run(server.url, "--concurrency", 4)
    assert place.out.read_bytes() == undisturbed
    left = sum(len(made(row)) for row in rows_of(place.out)[14:])
    assert server.seen()["asked"] - asked < 3 * left


def test_a_server_that_comes_late_and_dies_on_the_way(tiny_folder: Path, place: Place, undisturbed: bytes) -> None:
    port = free_port()
    process = place.start(f"http://127.0.0.1:{port}", "--concurrency", 4)
    assert process.stderr is not None
    assert process.stderr.readline().startswith(f"waiting for http://127.0.0.1:{port}, 4 s at most: The server did not")
    late = Fake(tiny_folder, "--port", port, "--delay", 0.1)
    place.until(4, process)
    late.stop()
    _, told = process.communicate()
    assert process.returncode == 1
    assert "Traceback" not in told
    assert told.count("error: ") == 1
    assert "error: The server does not answer.\n" in told
    assert "what was answered is kept" in told
    assert 4 <= place.kept() < 30
    again = Fake(tiny_folder, "--port", port)
    try:
        place.run(again.url)
    finally:
        again.stop()
    assert place.out.read_bytes() == undisturbed


def test_no_row_is_blamed_for_an_outage(tiny_folder: Path) -> None:
    """It lasts longer than one row may fail, and ends with a server that fails on half of what it is asked."""
    how, port = asking(tiny_folder, limit=20), free_port()
    first = Fake(tiny_folder, "--port", port, "--delay", 0.3)
    server = Server(first.url, 1, 5)
    server.connect([talking("a", how)])
    found: list[Any] = []
    prompts = [(number, talking(f"a {number}", how)) for number in range(8)]
    running = threading.Thread(target=lambda: found.extend(answer_by(server, prompts, 8)))
    running.start()
    time.sleep(0.1)
    first.stop()
    time.sleep(3)
    second = Fake(tiny_folder, "--port", port, "--faults", 0.5)
    try:
        running.join(20)
    finally:
        second.stop()
    assert sorted(place for place, _ in found) == list(range(8))
    assert all(isinstance(each, Conversation) for _, each in found)


def test_a_full_disk_is_one_error_and_the_run_goes_on_afterwards(
    fake: Callable[..., Fake], place: Place, undisturbed: bytes
) -> None:
    server = fake()

    def little_room() -> None:
        answers_to_signals()
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))

    process = place.start(server.url, limits=little_room)
    _, told = process.communicate()
    assert (process.returncode, "Traceback" in told, told.count("error: ")) == (1, False, 1)
    assert place.kept() > 0
    place.run(server.url)
    assert place.out.read_bytes() == undisturbed


@pytest.mark.parametrize("concurrency", [1, 8])
def test_prompts_that_the_server_fails_on_are_left_out_and_named(
    concurrency: int, fake: Callable[..., Fake], place: Place
) -> None:
    rows = chats(16)
    for number, status in ((0, 400), (5, 403), (15, 500)):
        rows[number]["messages"] = [user(f"poison {status}")]
        rows[number].pop("conversations", None)
    rows[7]["messages"] += [user("poison 400"), reply("It is.")]
    server = fake("--seed", 1)
    prompts = write(place.folder / "poison.jsonl", rows)
    told = place.run(server.url, "--concurrency", concurrency, prompts=prompts)
    assert "left out: 3 chats: chat-0 (server: The server refused a request. /generate: HTTP 400" in told
    assert "chat-5 (server" in told
    assert "chat-15 (server" in told
    assert "ended early: 1 chat, the server refuses the next prompt" in told
    answered_rows = {row["id"]: row for row in rows_of(place.out)}
    assert answered_rows.keys() == {row["id"] for row in rows} - {"chat-0", "chat-5", "chat-15"}
    assert answered_rows["chat-7"]["messages"][-1]["role"] == "assistant"
    place.out.unlink()
    many = [{**each, "id": f"{each['id']}-{again}"} for again, each in enumerate([rows[1], *[rows[0]] * 9])]
    told = place.fail(server.url, prompts=write(place.folder / "many.jsonl", many))
    assert "Too many chats cannot be answered." in told
    assert "chat-0-" in told
    assert "HTTP 400" in told


def test_a_server_of_another_model_or_of_no_known_form_is_refused(fake: Callable[..., Fake], place: Place) -> None:
    assert "it serves another model" in place.fail(fake("--kind", "other").url)
    strange = fake("--kind", "sglang").url
    assert "expected: another" in place.fail(strange, "--model", "another")
    nothing = place.fail(fake("--kind", "ids").url + "/elsewhere")
    assert "does not tell what it serves" in nothing
    assert "gives no answer that can be used" in place.fail(strange.replace("http", "http") + "/x", "--model", "tiny")
    assert list(place.folder.glob(".out*")) == []


# --- keys and certificates


def test_the_key_is_sent_and_never_told(
    fake: Callable[..., Fake], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake("--key", "sk-right")
    assert "The server wants a key." in place.fail(server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    told = place.fail(server.url)
    assert "The server refuses the key." in told
    monkeypatch.setenv("OPENAI_API_KEY", "sk-two\nlines")
    told += place.fail(server.url)
    assert "The key cannot be sent." in told
    monkeypatch.setenv("OPENAI_API_KEY", " sk-right\n")
    told += place.run(server.url)
    monkeypatch.setenv("MINE", "sk-right")
    monkeypatch.delenv("OPENAI_API_KEY")
    told += place.run(server.url, "--key-env", "MINE", "--overwrite")
    told += place.run(server.url.replace("//", "//me:sk-two@"), "--key-env", "MINE", "--overwrite")
    assert server.seen()["keys"] == [None, "Bearer sk-wrong", "Bearer sk-right"]
    for secret in ("sk-wrong", "sk-right", "sk-two"):
        assert secret not in told + place.out.read_text() + place.err


def test_a_certificate_is_trusted_by_the_environment_alone(
    fake: Callable[..., Fake], place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate")
    files = [place.folder / name for name in ("key.pem", "cert.pem", "both.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1", "-days", "2"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(files[0]), "-out", str(files[1])]
    subprocess.run(command, check=True, capture_output=True)
    files[2].write_text(files[0].read_text() + files[1].read_text())
    server = fake("--certificate", files[2])
    began = time.monotonic()
    assert "REQUESTS_CA_BUNDLE" in place.fail(server.url, "--patience", 60)
    assert time.monotonic() - began < 5
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "nowhere.pem")
    assert "nowhere.pem" in place.fail(server.url, "--patience", 60)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(files[1]))
    assert "30 chats" in place.run(server.url)


# --- files


def test_nothing_is_overwritten_unasked(fake: Callable[..., Fake], place: Place) -> None:
    place.out.write_text("mine")
    url = fake().url
    assert "--overwrite" in place.fail(url)
    assert place.out.read_text() == "mine"
    place.run(url, "--overwrite")
    assert len(rows_of(place.out)) == 30
    assert "one file of JSONL" in place.fail(url, out=place.folder)
    assert "one file of JSONL" in place.fail(url, out=place.folder / "x.parquet")


def test_packed_files_and_tables_are_the_same_rows(fake: Callable[..., Fake], place: Place, undisturbed: bytes) -> None:
    url = fake().url
    packed = place.folder / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(place.prompts.read_bytes()))
    place.run(url, prompts=packed, out=place.folder / "a.jsonl.gz")
    assert gzip.decompress((place.folder / "a.jsonl.gz").read_bytes()) == undisturbed
    rows = [{**row, "when": "now"} for row in chats(8)[1:5]]
    table = pyarrow.Table.from_pylist(rows).append_column("day", pyarrow.array([5] * 4, pyarrow.date32()))
    pyarrow.parquet.write_table(table, place.folder / "x.parquet")
    place.run(url, prompts=place.folder / "x.parquet", out=place.folder / "b.jsonl")
    found = rows_of(place.folder / "b.jsonl")
    whole = [json.loads(line) for line in undisturbed.splitlines()]
    assert [row["messages"] for row in found] == [row["messages"] for row in whole[1:5]]
    assert {row["day"] for row in found} == {"1970-01-06"}


def test_answers_of_another_run_are_kept_from_this_one(fake: Callable[..., Fake], place: Place) -> None:
    url = fake().url
    write(place.folder / "bad.jsonl", [*chats(3), {"id": "x"}])
    place.fail(url, prompts=place.folder / "bad.jsonl")
    assert not place.journal.exists()  # nothing was answered
    place.run(url)
    other = rows_of(place.out)[0]["made"]
    place.out.unlink()
    other = {**other, "release": "0.5.22", "sampling": {"temperature": 0.0, "max_new_tokens": 40}}
    hashed = hashlib.sha256(place.prompts.read_bytes()).hexdigest()
    break_off(place.out, {"prompts_sha256": hashed, "last_only": False, "made": other}, {0: {"messages": []}})
    told = place.fail(url)
    assert "The answers that are kept here are of another run." in told
    assert "found: max_new_tokens 40 (now 30), release 0.5.22 (now 0.5.23)\n" in told
    with place.journal.open("ab") as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        assert "Another process writes this output." in place.fail(url)


def test_what_a_lost_machine_left_is_answered_again(tmp_path: Path) -> None:
    """Zeros, half a line, a line twice; the rows come in their order."""
    out, run = tmp_path / "out.jsonl", {"made": {}}
    break_off(out, run, {4: {"id": "e"}, 1: {"id": "b", "day": Path("x")}})
    with (tmp_path / ".out.jsonl.answered").open("ab") as file:
        file.write(b'\0\0\0\0{"place": 2}\n[1]\n{"place": "x"}\n{"place": 0, "row": {"id": "a"}}\n{"place": 3')
    with answered(out, run) as kept:
        assert [place for place in range(6) if place in kept] == [0, 1, 4]
        kept.add(3, {"id": "d"})
        assert ([row["id"] for row in kept.rows()], len(kept)) == (["a", "b", "d", "e"], 4)
    assert list(tmp_path.iterdir()) == []


# --- what is asked


def test_prompts_beyond_the_context_are_named_before_anything_is_asked(fake: Callable[..., Fake], place: Place) -> None:
    server = fake("--kind", "vllm", "--context", 60)
    rows = chats(11)
    rows[3] = {"id": "long", "messages": [user("Tell me more about the owl. " * 9)]}
    prompts = write(place.folder / "some.jsonl", rows)
    told = place.run(server.url, prompts=prompts)
    assert "left out: 1 chat: long (context: a prompt of" in told
    assert "the target takes 60)" in told
    assert [row["id"] for row in rows_of(place.out)] == [row["id"] for row in rows if row["id"] != "long"]
    before = server.seen()["asked"]
    rows[4:7] = [{**rows[3], "id": f"long-{number}"} for number in range(3)]
    told = place.fail(server.url, "--overwrite", prompts=write(prompts, rows))
    assert "4 of 11: long (context" in told
    assert server.seen()["asked"] == before + 1  # what found the form


def test_answers_that_reach_the_limit_are_counted(fake: Callable[..., Fake], place: Place) -> None:
    told = place.run(fake().url, "--max-new-tokens", 12)
    rows = rows_of(place.out)
    cut = [message for row in rows for message in made(row) if message["finish"] == "length"]
    assert 0 < len(cut) < sum(len(made(row)) for row in rows)
    assert {len(message["generated_ids"]) for message in cut} == {12}
    assert f"{len(cut)} of {sum(len(made(row)) for row in rows)} answers reached the limit of 12 tokens" in told
    assert all(message["generated_ids"][-1] == END for row in rows for message in made(row) if message not in cut)


def test_seeds_are_recorded_and_another_one_for_every_answer(fake: Callable[..., Fake], place: Place) -> None:
    files = []
    for seed in (1, 1, 2):
        server = fake()
        told = place.run(server.url, "--temperature", 0.8, "--seed", seed, "--overwrite")
        assert "draws without seeds, unless" in told
        seeds = server.seen()["seeds"][1:]
        assert len(set(seeds)) == len(seeds) == sum(len(made(row)) for row in rows_of(place.out))
        assert rows_of(place.out)[0]["made"]["sampling"] == {"temperature": 0.8, "max_new_tokens": 30, "seed": seed}
        files.append(place.out.read_bytes())
    assert files[0] == files[1]
    assert rows_of(place.out)[1]["messages"] != json.loads(files[0].splitlines()[1])["messages"]


def test_turns_are_asked_on_the_answers_before_them_and_trained_on(
    fake: Callable[..., Fake], place: Place, tiny_folder: Path
) -> None:
    place.run(fake().url)
    tokenizer = load_tokenizer(tiny_folder)
    corpus, counts = tokenize_file(place.out, tokenizer, CorpusParams(max_length=512, max_dropped=0.0))
    supervised = []
    for row in rows_of(place.out):
        for turn, message in zip(given_turns(row["messages"]), made(row), strict=True):
            before = row["messages"][: row["messages"].index(message)]
            shown = [{"role": each["role"], "content": each["content"]} for each in before]
            text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
            assert turn.prompt == tokenizer(text, add_special_tokens=False)["input_ids"]
            assert turn.answer == message["generated_ids"]
            supervised += turn.answer
    assert corpus.input_ids[corpus.loss_mask == 1].tolist() == supervised
    assert (counts["generated"], counts["turns"]) == (30, 66)


@pytest.mark.parametrize(
    ("url", "more", "told"),
    [
        ("http://h", ["--batch", "4"], "--batch has no effect with --url."),
        (None, ["--concurrency", "4"], "--concurrency has no effect without --url."),
        (None, ["--key-env", "A"], "--key-env has no effect without --url."),
        (None, ["--seed", "4"], "--seed has no effect without --temperature."),
        ("h:1", [], "This is no address"),
        ("http://[::1", [], "This is no address"),
        ("http://h:99999", [], "This is no address"),
        ("http://h/v1?x=1", [], "This is no address"),
        ("http://h", ["--concurrency", "0"], "--concurrency 0"),
        ("http://h", ["--concurrency", "5000"], "from 1 to 1024"),
        ("http://h", ["--temperature", "nan"], "--temperature nan"),
        ("http://h", ["--temperature", "-1"], "--temperature -1"),
        ("http://h", ["--timeout", "0"], "--timeout 0"),
        ("http://h", ["--max-new-tokens", "0"], "--max-new-tokens 0"),
    ],
)
def test_options_that_cannot_be_used_are_told(url: str | None, more: list[str], told: str, place: Place) -> None:
    assert told in place.fail(url, *more)


# --- in this process


def test_the_command_answers_in_this_process(place: Place) -> None:
    prompts = write(place.folder / "few.jsonl", chats(6))
    told = place.run(None, "--batch", 4, prompts=prompts)
    rows = rows_of(place.out)
    assert f"6 chats with {sum(len(made(row)) for row in rows)} answers" in told
    assert rows[0]["made"]["engine"] == "transformers"
    assert {"release", "dtype", "target", "tokenizer", "template", "sampling"} <= rows[0]["made"].keys()
    assert len({json.dumps(row["made"]) for row in rows}) == 1


def test_the_target_is_found_by_the_profile(
    fake: Callable[..., Fake], place: Place, tiny_folder: Path, undisturbed: bytes
) -> None:
    """What the target stage made, and a folder; of a server's target nothing but the tokenizer is read."""
    url, place.target = fake().url, None
    (place.folder / "artifacts").mkdir()
    shutil.copytree(tiny_folder, place.folder / "artifacts/target", ignore=shutil.ignore_patterns("*.safetensors"))
    (place.folder / "artifacts/target/target.json").write_text('{"source": "fit:tiny", "revision": null}')
    place.run(url)
    assert place.out.read_bytes() == undisturbed
    (place.folder / "profiles").unlink()
    (place.folder / "profiles").mkdir()
    text = (ROOT / "profiles/tiny.yaml").read_text().replace("fit:tiny", str(tiny_folder))
    (place.folder / "profiles/tiny.yaml").write_text(text)
    place.run(url, "--overwrite")
    assert place.out.read_bytes() == undisturbed


def test_a_target_of_another_source_is_refused(place: Place, tiny_folder: Path) -> None:
    place.target = shutil.copytree(tiny_folder, place.folder / "other")
    (place.target / "target.json").write_text(json.dumps({"source": "org/other", "revision": "1", "weights": "."}))
    assert "another one than the profile's" in place.fail(None)


def test_an_error_of_the_conversations_ends_the_threads(fake: Callable[..., Fake], tiny_folder: Path) -> None:
    """Whatever the prompts raise comes out, and no thread is left that asks the server."""
    how = asking(tiny_folder, limit=9)
    server = Server(fake("--delay", 0.2).url, 2, 4)
    server.connect([talking("a", how)])
    before = threading.active_count()

    def prompts() -> Iterator[tuple[int, Conversation]]:
        for number in range(30):
            yield number, talking(f"a {number}", how)
        raise RedraftError("no more")

    with pytest.raises(RedraftError, match="no more"):
        list(answer_by(server, prompts(), 4))
    end = time.monotonic() + 3
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.02)
    assert threading.active_count() == before
    asked = requests.get(f"{server.shown}/seen", timeout=5).json()["asked"]
    assert asked < 32
