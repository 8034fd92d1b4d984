"""One rank's share of a corpus: its files tokenized by several processes into its shards, with progress that survives a kill.

    part = Part(Path("data/fineweb"), rank=0, world=1)
    tokenize_part(part, sources, arguments, n_workers=8, skip_bad=False, stop=StopRequest())     # data.fineweb is the command
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from tqdm import tqdm

from command_line import InputError, Stopped, StopRequest, printable
from data.documents import Batch, DocumentError, Position, Result, Source, read_batches
from data.shards import SPLITS, ShardWriter, write_json
from data.tokenizer import get_tokenizer
from data.workers import WorkerDied, Workers

_SAVE_INTERVAL_S = 2.0  # of work that a kill can cost; saving takes some milliseconds, during which the workers go on


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
    skipped: int = 0  # documents
    skipped_files: int = 0  # that could not be opened at all
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
        while True:
            handle = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                raise InputError(f"--out: {self.out}: another process is at work on {self.name}") from None
            except OSError:
                pass  # a file system without locks
            try:
                if os.path.samestat(os.fstat(handle), os.stat(self._lock)):
                    return handle
            except FileNotFoundError:
                pass
            os.close(handle)  # another's `unlock` removed the file after it was opened here: whoever comes next makes a new one

    def unlock(self, handle: int) -> None:
        self._lock.unlink(missing_ok=True)
        os.close(handle)


# ---------------------------------------------------------------------------------------------------------------------
# From documents to shards


def tokenize_part(
    part: Part, sources: list[Source], arguments: dict[str, Any], n_workers: int, skip_bad: bool, stop: StopRequest
) -> bool:
    """Make the shards of one rank's files, from where it was left. False: asked to stop, with everything saved.
    DocumentError, WorkerDied, OSError: what is saved stays."""
    progress = part.load() or Progress()
    if progress.finished:
        return True
    eot = get_tokenizer(arguments["tokenizer"]).eot
    starts = [0, *accumulate(source.size for source in sources)]
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
            time.sleep(seconds)

        def batches() -> Iterator[tuple[int, Batch]]:
            for number in range(progress.file, len(sources)):
                start = progress.position if number == progress.file else Position()
                for batch in read_batches(sources[number], start, arguments["text_field"], skip_bad=skip_bad, pause=pause):
                    yield number, batch

        def leave_out(source: Source, first: int, end: int, reason: str) -> None:
            rows = f"row {first}: " if end == first + 1 else f"rows {first} to {end - 1}: " if end else ""
            if not skip_bad:
                raise DocumentError(f"{source.shown}: {rows}{reason}; --skip_bad leaves such documents out")
            skipped.write(f"{printable(f'{source.shown}: {rows}{reason}')}\n".encode())
            progress.skipped += end - first
            progress.skipped_files += end == 0

        def take(number: int, batch: Batch, result: Result) -> None:
            for first, end, reason in batch.unreadable:
                leave_out(sources[number], first, end, reason)
            for row, reason in result.bad:
                leave_out(sources[number], row, row + 1, reason)
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

        with (
            Workers(n_workers, arguments["tokenizer"], text_field=arguments["text_field"],
                    val_fraction=arguments["val_fraction"]) as workers,
            closing(workers.tokenize(batches())) as results,
        ):
            try:
                while True:
                    with stop.interrupting():
                        result = next(results, None)
                    if result is None:
                        break
                    take(*result)
                    if time.perf_counter() - saved > _SAVE_INTERVAL_S:
                        save()
            except Stopped:
                save()
                return False
            except (DocumentError, WorkerDied):
                save()
                if stop.signal:  # a signal to the whole process group ends workers that have not begun to ignore it
                    return False
                raise
        train.close()
        val.close()
        progress.finished = True
        save()
    return True
