"""Tokenize FineWeb, from the hub or from files, into a data set folder, with every core and on as many machines as there are.

    python -m data.fineweb --out=data/fineweb                                          # sample-100BT, streamed from the hub
    python -m data.fineweb --out=data/edu --subset=fineweb-edu/sample-10BT
    python -m data.fineweb --out=data/fineweb --input /downloads/fineweb/sample/100BT    # parquet or jsonl, already here
    python -m data.fineweb --out=data/fineweb --rank=3 --world=16                      # one of 16 machines, the same folder
    python -m data.fineweb --out=data/fineweb --pretokenized --shards=1-10             # 1B tokens that others tokenized

The same command goes on after any interruption, a kill or a power cut included, where it stopped; the result is byte for byte
that of a run that was left alone, whatever the number of workers. Each rank takes a stretch of the files and writes shards of
its own; the one that finishes last writes meta.json, and until then train.py refuses the folder.
"""

import argparse
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from command_line import STOP_SIGNALS, ArgumentParser, InputError, StopRequest
from data import hub
from data.documents import (
    SUFFIXES,
    Batch,
    Block,
    DocumentError,
    Position,
    Result,
    Source,
    count_rows,
    local_source,
    read_batches,
    tokenize_batch,
)
from data.local import find_input
from data.pretokenized import download_pretokenized
from data.shards import DATA_FOLDER, META, SPLITS, UNFINISHED, ShardWriter, begin, read_json, read_meta, write_json, write_meta
from data.tokenizer import NAMES, Tokenizer, get_tokenizer

MIN_VAL_DOCUMENTS = 10  # expected; fewer could well be none
_SAVE_INTERVAL_S = 2.0  # of work that a kill can cost; saving takes some milliseconds, during which the workers go on
_BATCHES_AHEAD = 8  # per worker: a document of several MB keeps one worker busy for seconds, and the others need not wait
_TURN = ".fineweb.turn.lock"
_OURS = re.compile(r"\.fineweb.*\.(lock|progress\.json)|\.meta\.json.*\.tmp")  # of no meaning to anyone else


# ---------------------------------------------------------------------------------------------------------------------
# What is done


@dataclass
class Progress:
    """A rank's state on the disk. File `file` is read up to `position`; everything before it is in the shards."""

    file: int = 0
    position: Position = field(default_factory=Position)
    writers: dict[str, dict[str, Any]] | None = None  # of ShardWriter.save, by split
    documents: int = 0
    empty: int = 0
    skipped: int = 0
    skipped_bytes: int = 0  # of the list of what was left out
    finished: bool = False


class Part:
    """What one rank makes in the folder: its shards, the list of what it left out, and until all is merged its progress."""

    def __init__(self, out: Path, rank: int, world: int) -> None:
        self.out, self.rank, self.world = out, rank, world
        self.name = "fineweb" if world == 1 else f"fineweb-{rank:0{len(str(world - 1))}d}"
        self.skipped = out / f"{self.name}_skipped.txt"
        self._progress, self._lock = out / f".{self.name}.progress.json", out / f".{self.name}.lock"

    def load(self) -> Progress | None:
        """None where nothing was saved yet. InputError: a damaged file."""
        try:
            saved = json.loads(self._progress.read_text(encoding="utf-8"))
            return Progress(**saved | {"position": Position(**saved["position"])})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{self._progress}: damaged ({error}); remove {self.out} and start again") from None

    def save(self, progress: Progress) -> None:
        write_json(self._progress, asdict(progress))

    def lock(self) -> int:
        """Until the process ends, or what is returned is closed. InputError: another process is at work on this part."""
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise InputError(f"--out: {self.out}: another process is at work on {self.name}") from None
        except OSError:
            pass  # a file system without locks
        return handle

    def forget(self) -> None:
        """Remove what is of no use once meta.json is there."""
        self._progress.unlink(missing_ok=True)
        self._lock.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------------------------
# Work in parallel


_tokenizer: Tokenizer | None = None  # of a worker process


def _start_worker(tokenizer_name: str) -> None:
    """The parent alone answers stop signals; when it is gone, however it went, so is the worker."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    global _tokenizer
    _tokenizer = get_tokenizer(tokenizer_name)


def _work(block: Block, text_field: str, val_fraction: float) -> Result:
    return tokenize_batch(block, _tokenizer, text_field, val_fraction)


def tokenize_in_order(
    batches: Iterator[tuple[int, Batch]], n_workers: int, arguments: dict[str, Any]
) -> Iterator[tuple[int, Batch, Result]]:
    """(number of the file, batch, result) in the order of `batches`, tokenized by n_workers processes."""
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of whatever was imported
    pool = ProcessPoolExecutor(n_workers, context, _start_worker, (arguments["tokenizer"],))
    waiting: deque[tuple[int, Batch, Future]] = deque()
    try:
        for file, batch in batches:
            future = pool.submit(_work, batch.block, arguments["text_field"], arguments["val_fraction"])
            waiting.append((file, batch, future))
            if len(waiting) >= _BATCHES_AHEAD * n_workers:
                file, batch, future = waiting.popleft()
                yield file, batch, future.result()
        while waiting:
            file, batch, future = waiting.popleft()
            yield file, batch, future.result()
    finally:
        if waiting:  # given up on: nobody wants what the workers are at
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------------------
# The command


class _Stopped(Exception):
    """Asked to stop while waiting for the network."""


def tokenize_part(
    part: Part, sources: list[Source], arguments: dict[str, Any], n_workers: int, skip_bad: bool, stop: StopRequest
) -> bool:
    """Make the shards of one rank's files, from where it was left. False: asked to stop, with everything saved.
    DocumentError, OSError: what is saved stays."""
    progress = part.load() or Progress()
    if progress.finished:
        return True
    eot = get_tokenizer(arguments["tokenizer"]).eot
    starts = [0, *itertools.accumulate(source.size for source in sources)]
    with (
        tqdm(total=starts[-1], initial=starts[progress.file], desc=part.name, unit="B", unit_scale=True, mininterval=1) as bar,
        ShardWriter(part.out, part.name, "train", eot=eot, shard_tokens=arguments["shard_tokens"]) as train,
        ShardWriter(part.out, part.name, "val", eot=eot, shard_tokens=arguments["shard_tokens"]) as val,
        open(part.skipped, "ab") as skipped,
    ):
        writers = {"train": train, "val": val}
        for split in SPLITS if progress.writers else ():
            writers[split].resume(progress.writers[split])
        skipped.truncate(progress.skipped_bytes)
        skipped.seek(0, os.SEEK_END)
        started = saved = time.perf_counter()
        tokens_before = train.n_tokens + val.n_tokens

        def pause(reason: str, seconds: float) -> None:
            bar.write(f"{reason}; next attempt in {seconds:.0f} s", file=sys.stderr)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if stop.signal:
                    raise _Stopped
                time.sleep(0.1)

        def batches() -> Iterator[tuple[int, Batch]]:
            for number in range(progress.file, len(sources)):
                start = progress.position if number == progress.file else Position()
                for batch in read_batches(sources[number], start, arguments["text_field"], skip_bad=skip_bad, pause=pause):
                    yield number, batch

        def leave_out(name: str, first: int, end: int, reason: str) -> None:
            if not skip_bad:
                raise DocumentError(f"{name}: row {first}: {reason}; --skip_bad leaves such documents out")
            rows = f"row {first}" if end == first + 1 else f"rows {first} to {end - 1}"
            skipped.write(f"{name}: {rows}: {reason}\n".encode("utf-8", "backslashreplace"))
            progress.skipped += end - first

        def take(number: int, batch: Batch, result: Result) -> None:
            for first, end, reason in batch.unreadable:
                leave_out(sources[number].name, first, end, reason)
            for row, reason in result.bad:
                leave_out(sources[number].name, row, row + 1, reason)
            for split in SPLITS:
                writers[split].write(result.tokens[split])
            progress.documents += result.n_documents
            progress.empty += result.n_empty
            progress.file, progress.position = number, batch.next
            tokens = train.n_tokens + val.n_tokens
            rate = (tokens - tokens_before) / (time.perf_counter() - started)
            bar.set_postfix_str(f"{progress.documents:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s", refresh=False)
            bar.update(starts[number] + batch.bytes_done - bar.n)

        def save() -> None:
            nonlocal saved
            progress.writers = {split: writers[split].save() for split in SPLITS}
            skipped.flush()
            os.fsync(skipped.fileno())
            progress.skipped_bytes = skipped.tell()
            part.save(progress)
            saved = time.perf_counter()

        with closing(tokenize_in_order(batches(), n_workers, arguments)) as results:
            try:
                for number, batch, result in results:
                    take(number, batch, result)
                    if stop.signal:
                        raise _Stopped
                    if time.perf_counter() - saved > _SAVE_INTERVAL_S:
                        save()
            except _Stopped:
                save()
                return False
            except (DocumentError, BrokenProcessPool):
                save()
                if stop.signal:  # a signal to the whole process group ends workers that have not begun to ignore it
                    return False
                raise
        train.close()
        val.close()
        progress.finished = True
        save()
    if not progress.skipped:
        part.skipped.unlink()
    return True


def merge(out: Path, note: dict[str, Any]) -> None:
    """Write meta.json once every rank is finished; before, say which are not. One rank at a time may call it."""
    parts = [Part(out, rank, note["arguments"]["world"]) for rank in range(note["arguments"]["world"])]
    if not (out / META).exists():  # else another rank was finished at the same time, and faster
        progress = [part.load() for part in parts]
        if missing := [part.rank for part, done in zip(parts, progress, strict=True) if not (done and done.finished)]:
            print(f"{len(parts) - len(missing)} of {len(parts)} ranks are finished; still to do: {', '.join(map(str, missing))}")
            return
        splits = {split: [s for done in progress for s in done.writers[split]["shards"]] for split in SPLITS}
        for split in SPLITS:
            if not splits[split]:
                raise DocumentError(f"no document for {split}: val_fraction is {note['arguments']['val_fraction']}")
        tokenizer = get_tokenizer(note["arguments"]["tokenizer"])
        counts = {key: sum(getattr(done, key) for done in progress) for key in ("documents", "empty", "skipped")}
        source = {key: value for key, value in note["source"].items() if key != "list"}
        write_meta(out, tokenizer=tokenizer.name, vocab_size=tokenizer.vocab_size, eot=tokenizer.eot, splits=splits,
                   split_by="hash", source=source, arguments=note["arguments"], counts=counts)
    for part in parts:
        part.forget()
    _summarize(out)


def _summarize(out: Path) -> None:
    meta = read_meta(out)
    counts, shard_tokens = meta["counts"], meta["arguments"]["shard_tokens"]
    print(f"{counts['documents']:,} documents, {counts['empty']:,} empty ones left out")
    if counts["skipped"]:
        where = ", ".join(path.name for path in sorted(out.glob("*_skipped.txt")))
        print(f"{counts['skipped']:,} documents could not be read and were left out: {where}")
    for split, shards in meta["splits"].items():
        tokens, documents = (sum(shard[key] for shard in shards) for key in ("tokens", "documents"))
        short = [f"{shard['tokens']:,}" for shard in shards if shard["tokens"] < shard_tokens]
        line = f"  {split}: {tokens:,} tokens, {documents:,} documents, {len(shards)} shards of {shard_tokens:,} tokens"
        print(line + (f", the last of each rank shorter, as it should be: {', '.join(short)}" if short else ""))
    name = out.name if out.resolve().parent == DATA_FOLDER else str(out)
    print(f"next: python train.py --dataset={name}")


def _find_sources(inputs: list[str], text_field: str, val_fraction: float, skip_bad: bool) -> list[Source]:
    """Local files. InputError: one is no parquet or has no such column, or so few documents that validation may get none."""
    sources = [local_source(name, path) for name, path in find_input(inputs, SUFFIXES).files]
    n_rows = 0
    for source in tqdm(sources, desc="look at input", unit="file", mininterval=1, leave=False):
        try:
            n_rows += count_rows(source, text_field)
        except InputError:
            if not skip_bad:
                raise
    if val_fraction * n_rows < MIN_VAL_DOCUMENTS:
        raise InputError(
            f"--val_fraction: {val_fraction} of about {n_rows:,} documents are {val_fraction * n_rows:.2g}: wanted at least "
            f"{MIN_VAL_DOCUMENTS}, such as with --val_fraction={MIN_VAL_DOCUMENTS / max(n_rows, 2 * MIN_VAL_DOCUMENTS):.2g}"
        )
    return sources


def _digest(sources: list[Source]) -> str:
    return hashlib.sha256(json.dumps([[source.name, source.size, source.identity] for source in sources]).encode()).hexdigest()


def _agree(out: Path, what: str, arguments: dict[str, Any], sources: list[Source] | None) -> dict[str, Any] | None:
    """The note of the run that made or is making `out`, None where nothing is there. InputError: it is another one."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out}: is a file, wanted a folder")
    if (out / META).exists():
        note = read_meta(out)
    elif (out / UNFINISHED).exists():
        note = read_json(out / UNFINISHED)
    elif out.exists() and any(not _OURS.fullmatch(path.name) for path in out.iterdir()):
        raise InputError(f"--out: {out}: holds other files; name a new or an empty folder")
    else:
        return None
    was, source = note.get("arguments"), note.get("source") or {}
    if was != arguments:
        raise InputError(f"--out: {out}: made with other arguments: {was}, now {arguments}; name another folder or remove it")
    if source.get("what") != what if sources is None else source.get("digest") != _digest(sources):
        raise InputError(f"--out: {out}: made from other input: {source.get('what')}; name another folder or remove it")
    return note


def make(own: argparse.Namespace, stop: StopRequest) -> int:
    """The command but for --pretokenized. Raises InputError."""
    out = Path(own.out)
    arguments = {"tokenizer": own.tokenizer, "val_fraction": own.val_fraction, "text_field": own.text_field,
                 "shard_tokens": own.shard_tokens, "world": own.world}
    what = " ".join(own.input) if own.input else own.subset
    sources = _find_sources(own.input, own.text_field, own.val_fraction, own.skip_bad) if own.input else None
    note = _agree(out, what, arguments, sources)
    part = Part(out, own.rank, own.world)
    if (out / META).exists():
        for path in out.iterdir():
            if _OURS.fullmatch(path.name):  # a kill came between meta.json and their removal
                path.unlink()
        print(f"{out}: made before from this input with these arguments; nothing to do")
        return 0
    found = sources if own.input or note else _hub_sources(own.subset)
    get_tokenizer(own.tokenizer)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = part.lock()
        with _one_at_a_time(out):  # the first says which files, and which revision of them, all read
            note = _agree(out, what, arguments, sources)
            if note is None:
                n_bytes = sum(source.size for source in found)
                origin = {"what": what, "files": len(found), "bytes": n_bytes, "digest": _digest(found)}
                if not own.input:
                    origin["list"] = [[source.name, source.place, source.size, source.identity] for source in found]
                note = {"source": origin, "arguments": arguments}
                begin(out, note)
    except OSError as error:
        raise InputError(f"--out: {out}: cannot be written ({error.strerror})") from None
    if sources is None:  # the revision that the first rank found, and that a run which goes on began with
        sources = [Source(*entry) for entry in note["source"]["list"]]
    try:
        share = sources[own.rank * len(sources) // own.world : (own.rank + 1) * len(sources) // own.world]
        _announce(part, note, share, own)
        if not tokenize_part(part, share, arguments, own.workers, own.skip_bad, stop):
            print(f"stopped by {stop.signal}; everything so far is saved, and the same command goes on")
            return 0
        with _one_at_a_time(out):
            merge(out, note)
    finally:
        os.close(lock)
    if (out / META).exists():
        (out / _TURN).unlink(missing_ok=True)
    return 0


@contextmanager
def _one_at_a_time(out: Path) -> Iterator[None]:
    """Ranks that come to the same place together take turns."""
    handle = os.open(out / _TURN, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _hub_sources(subset: str) -> list[Source]:
    return [Source(file.name, file.url, file.size, file.url) for file in hub.find_subset(subset)]


def _announce(part: Part, note: dict[str, Any], share: list[Source], own: argparse.Namespace) -> None:
    source, progress = note["source"], part.load()
    print(f"input: {source['what']}: {source['files']:,} files, {source['bytes']:,} bytes")
    if part.world > 1:
        print(f"rank {part.rank} of {part.world}: {len(share):,} files, {sum(s.size for s in share):,} bytes")
    print(f"tokenizer: {own.tokenizer}, {own.workers} workers; {own.val_fraction:.4%} of the documents for validation")
    print(f"out: {part.out}, {shutil.disk_usage(part.out).free / 1e9:,.0f} GB free; a million tokens take 2 MB")
    if progress and not progress.finished:
        where = f"{share[progress.file].name} row {progress.position.row}"
        print(f"going on: {progress.documents:,} documents are done, next is {where}")
    sys.stdout.flush()


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises InputError."""
    parser = ArgumentParser(prog="python -m data.fineweb", description=__doc__)
    parser.add_argument("--out", metavar="DIR", default=str(DATA_FOLDER / "fineweb"), help="default data/fineweb")
    parser.add_argument("--subset", metavar="NAME", help="sample-100BT (the default), sample-10BT, sample-350BT, a dump such as "
                        "CC-MAIN-2024-10, fineweb-edu, or a subset of that: fineweb-edu/sample-10BT")
    parser.add_argument("--input", nargs="+", action="extend", metavar="PATH", help="parquet or jsonl files, or folders of them")
    parser.add_argument("--pretokenized", action="store_true", help="download the public GPT-2 shards of FineWeb-100B instead")
    parser.add_argument("--shards", metavar="N-M,...", help="which of these: 1-1030 (the default)")
    parser.add_argument("--workers", type=int, help="tokenizing processes; default: the cores of this process")
    parser.add_argument("--rank", type=int, help="which of the machines this is, from 0; default: torchrun's, else 0")
    parser.add_argument("--world", type=int, help="how many machines share the work; default: torchrun's, else 1")
    parser.add_argument("--skip_bad", action="store_true", help="leave out, count and list documents that cannot be read")
    parser.add_argument("--tokenizer", choices=NAMES, default="gpt2", help="default gpt2")
    parser.add_argument("--val_fraction", type=float, default=0.0005, help="share of the documents (default 0.0005)")
    parser.add_argument("--text_field", default="text", help="field or column that holds the text (default text)")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens per shard (default 100000000)")
    own = parser.parse_args(argv)
    if sum((bool(own.subset), bool(own.input), own.pretokenized)) > 1:
        raise InputError("--subset, --input, --pretokenized: wanted one of them, found more")
    if own.shards and not own.pretokenized:
        raise InputError("--shards: only with --pretokenized")
    own.subset = own.subset or "sample-100BT"
    if not 0 < own.val_fraction < 1:
        raise InputError(f"--val_fraction: wanted a number between 0 and 1, found {own.val_fraction}")
    if not 1 <= own.shard_tokens < 2**31:
        raise InputError(f"--shard_tokens: wanted 1 to {2**31 - 1}, found {own.shard_tokens}")
    if (own.rank is None) != (own.world is None):
        raise InputError("--rank and --world: wanted both or neither")
    if own.rank is None:
        own.rank, own.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= own.rank < own.world:
        raise InputError(f"--rank: wanted 0 to {own.world - 1} (--world={own.world}), found {own.rank}")
    if own.workers is None:
        own.workers = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if own.workers < 1:
        raise InputError(f"--workers: wanted at least 1, found {own.workers}")
    return own


def _shard_numbers(text: str | None) -> list[int]:
    """[3, 4, 5, 9] of "3-5,9"; all 1030 of None."""
    numbers: set[int] = set()
    for part in (text or "1-1030").split(","):
        first, _, last = part.partition("-")
        try:
            numbers |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            raise InputError(f"--shards: wanted numbers and ranges such as 1-10,20, found {text!r}") from None
    return sorted(numbers)


def main(argv: list[str]) -> int:
    stop = StopRequest()
    try:
        own = parse(argv)
        if own.pretokenized:
            download_pretokenized(Path(own.out), _shard_numbers(own.shards))
            return 0
        return make(own, stop)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = error.filename or own.out
        print(f"error: {where}: {error.strerror or error}; what is finished stays, and the same command goes on", file=sys.stderr)
        return 1
    except DocumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenProcessPool:
        print("error: a worker process died; was it killed for want of memory? (--workers)", file=sys.stderr)
        return 1
    finally:
        stop.restore()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
