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
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from command_line import ArgumentParser, InputError, Stopped, StopRequest, printable, say

if __name__ == "__main__":  # before all else is loaded, which takes a second
    stop_request = StopRequest()

from tqdm import tqdm

from data import hub
from data.documents import SUFFIXES, DocumentError, Source, count_rows, local_source
from data.local import find_input
from data.parts import Part, tokenize_part
from data.pretokenized import LAST_NUMBER, download_pretokenized
from data.shards import DATA_FOLDER, META, SPLITS, UNFINISHED, begin, open_dataset, read_json, read_meta, write_meta
from data.tokenizer import NAMES, get_tokenizer
from data.workers import WorkerDied

MIN_VAL_DOCUMENTS = 10  # expected; fewer could well be none
_BY_POSITION = "python -m data.local, which of few documents takes the end of the text for validation"
_TURN = ".fineweb.turn.lock"
_OURS = re.compile(r"\.+(fineweb|meta\.json).*\.(lock|progress\.json|tmp)")  # of no meaning to anyone else


def merge(out: Path, note: dict[str, Any]) -> bool:
    """Write meta.json once every rank is finished. False: some are not, and it says which. One rank at a time may call it."""
    parts = [Part(out, rank, note["arguments"]["world"]) for rank in range(note["arguments"]["world"])]
    if (out / META).exists():  # another rank was finished at the same time, and faster
        return True
    progress = [part.load() for part in parts]
    if missing := [part.rank for part, done in zip(parts, progress, strict=True) if not (done and done.finished)]:
        say(f"{len(parts) - len(missing)} of {len(parts)} ranks are finished; still to do: {', '.join(map(str, missing))}")
        return False
    splits = {split: [shard for done in progress for shard in done.writers[split]["shards"]] for split in SPLITS}
    for split in SPLITS:
        if not splits[split]:
            n_documents = sum(done.documents for done in progress)
            raise DocumentError(
                f"no document for {split}: the hash of its text chooses the side of each of {n_documents:,}, and equal ones "
                f"are on one side; remove {out} and take another --val_fraction than {note['arguments']['val_fraction']}, "
                f"other documents, or {_BY_POSITION}"
            )
    tokenizer = get_tokenizer(note["arguments"]["tokenizer"])
    counts = {key: sum(getattr(done, key) for done in progress) for key in ("documents", "empty", "skipped", "skipped_files")}
    source = {key: value for key, value in note["source"].items() if key != "list"}
    write_meta(out, tokenizer=tokenizer.name, vocab_size=tokenizer.vocab_size, eot=tokenizer.eot, splits=splits,
               split_by="hash", source=source, arguments=note["arguments"], counts=counts)
    return True


def clean(out: Path) -> None:
    """Remove what is of no use once meta.json is there, be it left by a kill at the very end."""
    for path in out.iterdir():
        empty_list = path.name.endswith("_skipped.txt") and path.stat().st_size == 0
        if _OURS.fullmatch(path.name) or path.name == UNFINISHED or empty_list:
            path.unlink(missing_ok=True)


def _summarize(out: Path) -> None:
    meta = read_meta(out)
    counts, shard_tokens = meta["counts"], meta["arguments"]["shard_tokens"]
    say(f"{counts['documents']:,} documents, {counts['empty']:,} empty ones left out")
    if counts["skipped"] or counts["skipped_files"]:
        files = f" and {counts['skipped_files']:,} files" if counts["skipped_files"] else ""
        where = ", ".join(path.name for path in sorted(out.glob("*_skipped.txt")))
        say(f"{counts['skipped']:,} documents{files} could not be read and were left out: {where}")
    for split, shards in meta["splits"].items():
        tokens, documents = (sum(shard[key] for shard in shards) for key in ("tokens", "documents"))
        short = [f"{shard['tokens']:,}" for shard in shards if shard["tokens"] < shard_tokens]
        line = f"  {split}: {tokens:,} tokens, {documents:,} documents, {len(shards)} shards of {shard_tokens:,} tokens"
        say(line + (f", the last of each rank shorter, as it should be: {', '.join(short)}" if short else ""))
    name = out.name if out.resolve().parent == DATA_FOLDER else str(out)
    say(f"next: python train.py --dataset={name}")


def _find_sources(inputs: list[str], text_field: str, val_fraction: float, skip_bad: bool) -> list[Source]:
    """Local files. InputError: one is no parquet or has no such column, or so few documents that validation may get none."""
    sources = [local_source(name, path) for name, path in find_input(inputs, SUFFIXES).files]
    n_rows, enough = 0, math.ceil(MIN_VAL_DOCUMENTS / val_fraction)
    for source in tqdm(sources, desc="look at input", unit="file", mininterval=1, leave=False):
        try:
            n_rows += count_rows(source, text_field, enough - n_rows)
        except InputError:
            if not skip_bad:
                raise
    if not n_rows:
        raise InputError(f"--input: {' '.join(inputs)}: no documents")
    if n_rows < enough:
        way_out = f"--val_fraction={1.05 * MIN_VAL_DOCUMENTS / n_rows:.2g}, or " if n_rows > 20 else ""  # rounding takes 5%
        raise InputError(
            f"--val_fraction: {val_fraction} of {n_rows:,} documents are {val_fraction * n_rows:.2g}: wanted at least "
            f"{MIN_VAL_DOCUMENTS}, as by {way_out}{_BY_POSITION}"
        )
    return sources


def _digest(sources: list[Source]) -> str:
    return hashlib.sha256(json.dumps([[source.name, source.size, source.identity] for source in sources]).encode()).hexdigest()


def _read_note(out: Path) -> dict[str, Any] | None:
    """What the run that made `out` or is making it says of itself, None where nothing is there.

    Other ranks may be at work. They make the mark before anything else, and meta.json before the mark goes: so what is there is
    listed first, and the mark looked for before meta.json."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out}: is a file, wanted a folder")
    foreign = [path.name for path in out.iterdir() if not _OURS.fullmatch(path.name)] if out.exists() else []
    unfinished, finished = (out / UNFINISHED).exists(), (out / META).exists()
    if unfinished and not finished:
        try:
            note = read_json(out / UNFINISHED)
        except InputError:
            if not (out / META).exists():
                raise
        else:
            if not (isinstance(note, dict) and isinstance(note.get("source"), dict)):
                raise InputError(f"{out / UNFINISHED}: is not of this command; remove {out}, or name another folder")
            return note
    if unfinished or finished:
        return read_meta(out)
    if foreign:
        raise InputError(f"--out: {out}: holds other files, such as {foreign[0]!r}; name a new or an empty folder")
    return None


def _agree(out: Path, what: str, arguments: dict[str, Any], sources: list[Source] | None) -> dict[str, Any] | None:
    """The note of the run that made `out` or is making it, None where nothing is there. InputError: it is another one."""
    note = _read_note(out)
    if note is None:
        return None
    was, source = note.get("arguments"), note.get("source") or {}
    if was != arguments:
        raise InputError(f"--out: {out}: made with other arguments: {was}, now {arguments}; name another folder or remove it")
    if source.get("what") != what if sources is None else source.get("digest") != _digest(sources):
        raise InputError(f"--out: {out}: made from other input: {source.get('what')}; name another folder or remove it")
    return note


def prepare(own: argparse.Namespace) -> tuple[Part, dict[str, Any], list[Source], int] | None:
    """The part of this rank, the run's note, this rank's files, and the lock; None where all is done. Raises InputError."""
    out = Path(own.out)
    arguments = {"tokenizer": own.tokenizer, "val_fraction": own.val_fraction, "text_field": own.text_field,
                 "shard_tokens": own.shard_tokens, "world": own.world}
    what = " ".join(own.input) if own.input else own.subset
    sources = _find_sources(own.input, own.text_field, own.val_fraction, own.skip_bad) if own.input else None
    note = _agree(out, what, arguments, sources)
    if (out / META).exists():
        open_dataset(out.resolve())
        clean(out)
        _summarize(out)
        say(f"{out}: made before from this input with these arguments; nothing to do")
        return None
    found = sources if own.input or note else _hub_sources(own.subset)
    get_tokenizer(own.tokenizer)
    try:
        out.mkdir(parents=True, exist_ok=True)
        part = Part(out, own.rank, own.world)
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
    return part, note, sources[own.rank * len(sources) // own.world : (own.rank + 1) * len(sources) // own.world], lock


def make(own: argparse.Namespace, stop: StopRequest) -> None:
    """The command but for --pretokenized. Raises InputError, Stopped, and what tokenize_part does."""
    with stop.interrupting():
        prepared = prepare(own)
    if prepared is None:
        return
    part, note, share, lock = prepared
    try:
        _announce(part, note, share, own)
        if not tokenize_part(part, share, note["arguments"], own.workers, own.skip_bad, stop):
            raise Stopped
        with _one_at_a_time(part.out):
            merged = merge(part.out, note)
    finally:
        os.close(lock)
    if merged:
        clean(part.out)
        _summarize(part.out)


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
    say(f"input: {source['what']}: {source['files']:,} files, {source['bytes']:,} bytes")
    if others := _others(own.input or []):
        say(f"not taken: {len(others):,} files of other kinds or without content, such as {others[0]!r}")
    if part.world > 1:
        say(f"rank {part.rank} of {part.world}: {len(share):,} files, {sum(s.size for s in share):,} bytes")
    say(f"tokenizer: {own.tokenizer}, {own.workers} workers; {own.val_fraction:.4%} of the documents for validation")
    say(f"out: {part.out}, {shutil.disk_usage(part.out).free / 1e9:,.0f} GB free; a million tokens take 2 MB")
    if progress and not progress.finished:
        where = f"{share[progress.file].shown} row {max(0, progress.position.row)}"
        say(f"going on: {progress.documents:,} documents are done, next is {where}")


def _others(inputs: list[str]) -> list[str]:
    """Names in the input folders that are not taken as documents."""
    found = []
    for folder in filter(Path.is_dir, map(Path, inputs)):
        taken = {path for _, path in find_input([str(folder)], SUFFIXES).files}
        found += [path.name for path in sorted(folder.rglob("*")) if path not in taken and not path.is_dir()]
    return found


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
    parser.add_argument("--tokenizer", choices=NAMES, help="default gpt2")
    parser.add_argument("--val_fraction", type=float, help="share of the documents (default 0.0005)")
    parser.add_argument("--text_field", help="field or column that holds the text (default text)")
    parser.add_argument("--shard_tokens", type=int, help="tokens per shard (default 100000000)")
    own = parser.parse_args(argv)
    if own.pretokenized:
        if useless := [key for key, value in vars(own).items() if key not in ("out", "pretokenized", "shards") and value]:
            raise InputError(f"--{useless[0]}: not with --pretokenized, which takes --out and --shards")
        return own
    if own.shards is not None:
        raise InputError("--shards: only with --pretokenized")
    if own.subset is not None and own.input:
        raise InputError("--subset, --input: wanted one of them, found both")
    for key, value in {"subset": "sample-100BT", "tokenizer": "gpt2", "val_fraction": 0.0005, "text_field": "text",
                       "shard_tokens": 100_000_000}.items():
        if getattr(own, key) is None:
            setattr(own, key, value)
    if not 0 < own.val_fraction < 1:
        raise InputError(f"--val_fraction: wanted a number between 0 and 1, found {own.val_fraction}")
    if not 1 <= own.shard_tokens < 2**31:
        raise InputError(f"--shard_tokens: wanted 1 to {2**31 - 1}, found {own.shard_tokens}")
    if (own.rank is None) != (own.world is None):
        raise InputError("--rank and --world: wanted both or neither")
    if own.rank is None:
        own.rank, own.world = _torchruns_rank()
    if own.world < 1:
        raise InputError(f"--world: wanted at least 1, found {own.world}")
    if not 0 <= own.rank < own.world:
        raise InputError(f"--rank: wanted 0 to {own.world - 1} (--world={own.world}), found {own.rank}")
    if own.workers is None:
        own.workers = max(1, len(os.sched_getaffinity(0)) // max(1, _environment("LOCAL_WORLD_SIZE", 1)))
    if own.workers < 1:
        raise InputError(f"--workers: wanted at least 1, found {own.workers}")
    return own


def _torchruns_rank() -> tuple[int, int]:
    found = [f"{name}={os.environ[name]!r}" for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    rank, world = _environment("RANK", 0), _environment("WORLD_SIZE", 1)
    if len(found) == 1:
        raise InputError(f"RANK and WORLD_SIZE in the environment: wanted both or neither, found {found[0]} alone; unset it")
    if found and not rank < world:
        raise InputError(f"RANK in the environment: wanted a number below WORLD_SIZE, found {' and '.join(found)}")
    return rank, world


def _environment(name: str, default: int) -> int:
    """A whole number of torchrun's environment."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"\d{1,9}", text):
        raise InputError(f"{name} in the environment: wanted a whole number, found {text!r}")
    return int(text)


def _shard_numbers(text: str | None) -> list[int]:
    """[3, 4, 5, 9] of "3-5,9"; all 1030 of None. InputError: not such a text, or a number that is no shard's."""
    numbers: set[int] = set()
    for part in (f"1-{LAST_NUMBER}" if text is None else text).split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= LAST_NUMBER:
            raise InputError(f"--shards: wanted numbers from 1 to {LAST_NUMBER} and ranges such as 1-10,20, found {text!r}")
        numbers |= set(range(first, last + 1))
    return sorted(numbers)


def main(argv: list[str], stop: StopRequest | None = None) -> int:
    stop = stop or StopRequest()
    try:
        own = parse(argv)
        if own.pretokenized:
            with stop.interrupting():
                download_pretokenized(Path(own.out), _shard_numbers(own.shards))
        else:
            make(own, stop)
        return 0
    except Stopped:
        say(f"stopped by {stop.signal}; what is finished is saved, and the same command goes on")
        return 0
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        said = f"{error.filename or own.out}: {error.strerror}" if error.errno else str(error)  # which names its place itself
        print(f"error: {printable(said)}; what is finished stays, and the same command goes on", file=sys.stderr)
        return 1
    except DocumentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except WorkerDied as error:
        print(f"error: {error}; was it killed for want of memory? (--workers)", file=sys.stderr)
        return 1
    finally:
        stop.restore()


if __name__ == "__main__":
    status = main(sys.argv[1:], stop_request)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads that still wait for the network would hold up the end
