"""A split of the corpus from its files: chunks of rows on all cores, joined.

Memory holds a chunk a process, however long the files are. What was done stays in a scratch folder until the split is
written, so that a build that was killed goes on with the next chunk.
"""

import hashlib
import itertools
import multiprocessing
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redraft.corpus.chat import AS_IT_IS, template_record
from redraft.corpus.corpus import Corpus, read_corpus, write_arrays
from redraft.corpus.files import Raw, count_rows, name_of, raw_rows
from redraft.corpus.parts import Part, Settings, Told, begin, read_part, work
from redraft.corpus.prompts import Prompts
from redraft.corpus.tokenizer import require_markers, tokenizer_hash
from redraft.frame.errors import RedraftError, some
from redraft.frame.profile import CorpusParams, TemplateParams
from redraft.frame.progress import counter
from redraft.frame.store import files_fingerprint, fingerprint

CHUNK_ROWS, CHUNK_BYTES = 2048, 4 << 20
POOL_BYTES = 32 << 20
"""Files of fewer bytes are done in this process: another one takes seconds to load its tokenizer."""
_ROW_BYTES = 2048  # of a row of a table, for want of a measure
Rows = list[tuple[str, Raw]]


@dataclass
class Split:
    """A split that was written."""

    counts: dict[str, Any]
    """For the metrics: chats, samples (documents), turns (answers that are trained on), tokens, supervised (of these),
    generated (chats with ids), cut (of the turns), left_out (answers that are not), dropped (rows), and by reason."""
    prompts: Prompts


def build_split(
    paths: list[Path],
    out: Path,
    tokenizer: Any,
    params: CorpusParams,
    *,
    how: TemplateParams = AS_IT_IS,
    load: Callable[[], Any] | None = None,
    scratch: Path | None = None,
    target: str | None = None,
    rows: int | None = None,
) -> Split:
    """Tokenise files of chats into the file `out`.

    Args:
        paths: of one kind, see `redraft.corpus.files`; none gives an empty split.
        out: safetensors file, see `redraft.corpus.corpus`.
        tokenizer: the target's.
        params: limits.
        how: how chats are rendered.
        load: makes the tokenizer in another process; without it everything is done in this one.
        scratch: folder that keeps what is done until the end; a temporary one without it.
        target: hash of the target, to count answers of another one.
        rows: V, to leave out chats with ids that the target does not have.

    Raises:
        RedraftError: a file that cannot be read, nothing is left, or the dropped share passes `params.max_dropped`.
    """
    if paths:
        require_markers(tokenizer)
    identity = _identity(paths, tokenizer, params, how)
    settings = Settings(params, how, identity["tokenizer"], identity["template"], target, rows)
    code = files_fingerprint([Path(__file__).parent])
    with tempfile.TemporaryDirectory() as temporary:
        folder = (scratch or Path(temporary)) / fingerprint({**identity, "target": target, "rows": rows, "code": code})
        folder.mkdir(parents=True, exist_ok=True)
        parts = _parts(paths, folder, out.stem, tokenizer, settings, load)
        split = _join(parts, out, identity, params)
        shutil.rmtree(folder)
    return split


def _parts(
    paths: list[Path], folder: Path, split: str, tokenizer: Any, settings: Settings, load: Callable[[], Any] | None
) -> list[Part]:
    """Every chunk of the files, tokenised, on as many cores as pay."""
    most, size = settings.params.max_samples, sum(path.stat().st_size for path in paths)
    chosen = _evenly(sum(map(count_rows, paths)), most) if most else None
    cores = len(os.sched_getaffinity(0))
    begin(lambda: tokenizer, settings)
    pool: Any = nullcontext()
    if load and cores > 1 and size > POOL_BYTES:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(cores, context, initializer=begin, initargs=(load, settings))
    parts = []
    try:
        with pool as running, counter(size, f"tokenise {split}", "B", shown=size > POOL_BYTES) as bar:
            for path, read in _done(_chunks(paths, chosen), folder, running, 2 * cores):
                parts.append(read_part(path))
                bar.update(read)
    except BrokenProcessPool as error:
        raise RedraftError(
            "A process that tokenises was ended from outside.",
            cause="memory ran out, or somebody stopped it",
            fix="run it again: what was tokenised is kept",
        ) from error
    return parts


def _identity(paths: list[Path], tokenizer: Any, params: CorpusParams, how: TemplateParams) -> dict[str, Any]:
    """What names a split: its files, tokenizer, template and limits."""
    hashes = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise RedraftError("A file cannot be read.", where=path, found=error.strerror or error) from error
    record = template_record(tokenizer, how)
    return {
        "files": hashes,
        "tokenizer": tokenizer_hash(tokenizer),
        "template": record.pop("sha256"),
        **{f"template_{name}": value for name, value in record.items()},
        "max_length": params.max_length,
        "max_samples": params.max_samples,
        "cut": params.cut,
    }


def _evenly(count: int, most: int) -> set[int] | None:
    """`most` places of `count`, evenly spread; None if that is all of them."""
    return {place * count // most for place in range(most)} if count > most else None


def _chunks(paths: list[Path], chosen: set[int] | None) -> Iterator[tuple[Rows, int]]:
    """Chunks of the rows of `paths` (of those whose place over all files is `chosen`), and how many bytes were read."""
    chunk: Rows = []
    size = place = 0
    for path in paths:
        for number, raw in raw_rows(path):
            if chosen is None or place in chosen:
                chunk.append((name_of(path, number), raw))
            size += len(raw) if isinstance(raw, bytes) else _ROW_BYTES
            place += 1
            if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
                yield chunk, size
                chunk, size = [], 0
    if chunk:
        yield chunk, size


def _done(
    chunks: Iterable[tuple[Rows, int]], folder: Path, pool: ProcessPoolExecutor | None, ahead: int
) -> Iterator[tuple[Path, int]]:
    """Files of the parts in the order of the chunks, and bytes read; those that are there from before are kept."""
    waiting: deque[tuple[Path, int, Future[Path] | None]] = deque()
    for number, (rows, size) in enumerate(chunks):
        path = folder / f"{number:07d}.safetensors"
        running = None
        if not path.is_file():
            if pool:
                running = pool.submit(work, rows, path)
            else:
                work(rows, path)
        waiting.append((path, size, running))
        while len(waiting) > (ahead if pool else 0):
            yield _whole(*waiting.popleft())
    for each in waiting:
        yield _whole(*each)


def _whole(path: Path, size: int, running: Future[Path] | None) -> tuple[Path, int]:
    if running:
        running.result()
    return path, size


def _join(parts: list[Part], out: Path, identity: dict[str, Any], params: CorpusParams) -> Split:
    """Write the parts as one split.

    Raises:
        RedraftError: too much was dropped.
    """
    told = Told()
    names, twice = _distinct([name for part in parts for name in part.names])
    samples: list[str] = []
    sources: list[str] = []
    keys, chats = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    base = 0
    for part in parts:
        told.add(part.told)
        keys.append(part.arrays["keys"].view(np.uint64))
        chats.append(part.arrays["chats"] + base)
        for chat, documents in itertools.groupby(part.documents, key=lambda document: document[0]):
            from_where = [source for _, source in documents]
            name = names[base + chat]
            samples += [*(f"{name}#{turn}" for turn in range(1, len(from_where))), name]
            sources += from_where
        base += len(part.names)
    where = some(list(identity["files"]))
    if identity["files"]:
        _require_enough(told, params, where)
        _tell(told, twice, where)
    arrays = [part.arrays for part in parts]
    write_arrays(out, arrays, samples, sources, identity)
    counts = {
        "chats": base,
        "samples": len(samples),
        "turns": told.turns,
        "tokens": sum(len(each["input_ids"]) for each in arrays),
        "supervised": sum(int(each["loss_mask"].sum()) for each in arrays),
        "generated": told.generated,
        "cut": told.cut,
        "left_out": told.left_out.total(),
        "dropped": told.dropped.total(),
        **{f"dropped_{kind.replace(' ', '_')}": count for kind, count in sorted(told.dropped.items())},
    }
    return Split(counts, Prompts(np.concatenate(keys), np.concatenate(chats), names))


def _distinct(names: list[str]) -> tuple[list[str], int]:
    """Names, each once (a later one of the same gets a number), and how many stood there before."""
    last: dict[str, int] = {}
    there = set(names)
    found, twice = [], 0
    for name in names:
        number = last.get(name, 0) + 1
        twice += number > 1
        while number > 1 and f"{name}~{number}" in there:
            number += 1
        last[name] = number
        found.append(name if number == 1 else f"{name}~{number}")
    return found, twice


CAUSES = {
    "no answer": "prompts without an answer: run `redraft regenerate` on them",
    "empty answer": "answers without a text",
    "truncated": "corpus.max_length cuts the answer off",
    "boundary": "a token holds the end of the header and the beginning of the answer: regenerate the answers, as ids",
    "template": "the chat template does not render the chat",
    "rewritten": "the template writes other text than the answer, so it is not what the target generates: regenerate "
    "the answers, as ids, with the arguments that you serve with (target.template in the profile)",
    "unreadable": "rows of another form",
    "unknown role": "roles other than system, developer, user, assistant and tool",
    "encode": "the tokenizer refuses the text",
    "other text": "the tokenizer does not keep the text, so its ids are not what the target generates",
    "no content": "messages without a text",
    "no text": "images, or other parts that are no text",
    "tool call": "tool calls of another form than OpenAI's",
    "other tokenizer": "another model's ids",
    "other template": "target.template in the profile was changed after the answers were made",
    "cut": "answers that the token limit ended, and corpus.cut is drop",
    "ids": "damaged ids, or those of another tokenizer",
}
"""What is behind each kind of reason."""


def _require_enough(told: Told, params: CorpusParams, where: str) -> None:
    dropped = told.dropped.total()
    if told.chats > dropped and dropped <= params.max_dropped * told.chats:
        return
    kinds = [kind for kind, _ in told.dropped.most_common()]
    raise RedraftError(
        "Too many chats cannot be trained on." if told.chats else "The corpus has no chats.",
        where=where,
        expected=f"at most {params.max_dropped:.0%} dropped (corpus.max_dropped in the profile)",
        found=f"{dropped:,} of {told.chats:,}: {dict(told.dropped.most_common())}; {told.shown(told.dropped)}"
        if dropped
        else "no rows",
        cause="; ".join(f"`{kind}`: {CAUSES[kind]}" for kind in kinds) or "files without a row",
    )


def _tell(told: Told, twice: int, where: str) -> None:
    """What a reader of the metrics would not look for."""
    dropped, answers = told.dropped.total(), told.left_out.total()
    keys = [f"{key} ({count:,})" for key, count in told.unknown.most_common()]
    for line in (
        dropped and f"{dropped:,} of {told.chats:,} chats are left out: {told.shown(told.dropped)}",
        answers and f"{answers:,} answers of other chats are not trained on: {told.shown(told.left_out)}",
        keys and f"keys that nothing reads, and how many rows have them: {some(keys)}",
        twice and f"{twice:,} ids stand there more than once: later rows got a number behind theirs",
        told.no_place_for_tools
        and f"{told.no_place_for_tools:,} chats have tools, and the chat template has no place for them",
        told.other_target and f"{told.other_target:,} chats were answered by another target than this one",
    ):
        if line:
            print(f"note: {where}: {line}")


def tokenize_file(
    path: Path, tokenizer: Any, params: CorpusParams, *, how: TemplateParams = AS_IT_IS
) -> tuple[Corpus, dict[str, Any]]:
    """One file of chats as a corpus in this process, and its counts; see `build_split`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / f"{path.name.split('.')[0]}.safetensors"
        split = build_split([path], out, tokenizer, params, how=how)
        return read_corpus(out), split.counts
