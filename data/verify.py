"""What `python -m data.shards verify` and `inspect` do: check a data set folder whole, or show what is in it.

    python -m data.shards verify quickstart       # reports documents and duplicates; lists every fault, exit 1 if there is one
    python -m data.shards inspect quickstart      # reads meta.json and the first document of each split only

`verify` reads val, then train, once each, with little memory however large they are (data/duplicates.py has the bound). A
second thread computes the checksums, which take longest.
"""

import hashlib
import itertools
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from command_line import InputError, printable
from data import duplicates
from data.duplicates import Cutter, Documents, Duplicates, Found
from data.shards import (
    META,
    SPLITS,
    TOKEN,
    UNFINISHED,
    Entry,
    Shard,
    TokenStream,
    check_meta,
    check_shard,
    entries_by_name,
    entries_of_meta,
    never_finished,
    open_dataset,
)
from data.tokenizer import TOKENIZERS, Tokenizer, get_tokenizer

GPT2_EOT = 50256
_LEFT_OVER = (".tmp", ".spool", ".part", ".incomplete")
_N_EXAMPLES = 5
_EXAMPLE_TOKENS = 300
_EXAMPLE_IDS = 32  # where they cannot be decoded
_FIRST_TOKENS = 1 << 20  # in which inspect looks for a document

# ---------------------------------------------------------------------------------------------------------------------
# Verify


@dataclass
class _Split:
    """A split under check. shards: None where one cannot be read; stream: of the others, None if there are none."""

    name: str
    shards: list[Shard | None]
    stream: TokenStream | None = None
    complete: bool = True  # all of it could be read
    first_token: int | None = None
    highest: int = -1
    n_eot: int = 0
    lengths: dict[str, int] = field(default_factory=lambda: {"n": 0, "sum": 0, "min": 1 << 62, "max": 0, "empty": 0})

    def __post_init__(self) -> None:
        if readable := self.readable:
            self.stream = TokenStream(self.name, readable)

    @property
    def readable(self) -> list[Shard]:
        return [shard for shard in self.shards if shard is not None]

    def count(self, documents: Documents) -> None:
        if lengths := self.lengths if len(documents.lengths) else None:
            lengths["n"] += len(documents.lengths)
            lengths["sum"] += int(documents.lengths.sum())
            lengths["min"] = min(lengths["min"], int(documents.lengths.min()))
            lengths["max"] = max(lengths["max"], int(documents.lengths.max()))
            lengths["empty"] += int(np.count_nonzero(documents.lengths == 1))


def verify(folder: Path) -> tuple[list[str], list[str]]:
    """Read everything once. Returns the faults and the report, in lines.

    Faults are what contradicts the format or meta.json: a header, a size, a checksum, an id outside the vocabulary, a vocabulary
    that is not the tokenizer's, a number of documents, a split that does not begin with EOT (every document is preceded by it),
    files not listed, missing or listed twice, a mark of an unfinished run, duplicates that the way of splitting excludes. Only
    reported are what may well be meant: lengths, empty documents, left-over temporaries, and all that concerns EOT in a folder
    without meta.json. A file whose header or size is wrong is not read further.
    """
    meta, entries, faults = _survey(folder)
    faults += _check_vocabulary(folder, meta) if meta else []
    splits = {}
    for name in SPLITS:
        shards = []
        for entry in entries[name]:
            shard, wrong = check_shard(entry)
            shards.append(shard)
            faults += wrong
        splits[name] = _Split(name, shards)
    val, train = splits["val"], splits["train"]
    for split in splits.values():
        if split.stream and split.shards[0]:
            try:
                split.first_token = int(split.stream.read(0, 1)[0])
            except (OSError, InputError):
                pass  # named when the file is read
    eot = meta["eot"] if meta else _assumed_eot(list(splits.values()))

    found = _read_both(val, train, eot, 0, meta, faults)
    faults += _check_counts(folder, meta, val, train) if meta else []
    report = [line for split in splits.values() for line in _report(split, meta, eot)]
    if found:
        for first in range(duplicates.HELD_DOCUMENTS, val.lengths["n"], duplicates.HELD_DOCUMENTS):
            found.add(_read_both(val, train, eot, first, None, None))
        lines, fault = _report_duplicates(folder, meta, val, train, found)
        report += lines
        faults += fault
    report += [
        f"left over: {path} (from a run that was stopped, or that goes on)"
        for path in sorted(folder.iterdir())
        if path.name.endswith(_LEFT_OVER) or (path.name.startswith(".") and path.name.endswith(".bin"))
    ]
    if not faults:
        checked = f"no {META}: checksums and vocabulary not checked"
        if meta:
            unknown = sum(shard.sha256 is None for split in splits.values() for shard in split.readable)
            checked = f"vocabulary {meta['vocab_size']}" + (f", {unknown} shards without a checksum" if unknown else "")
        report.append(f"{folder}: good: highest id {max(val.highest, train.highest)}, {checked}")
    return faults, report


def _survey(folder: Path) -> tuple[dict[str, Any] | None, dict[str, list[Entry]], list[str]]:
    """A sound meta.json, the shards, and the faults found so far. Where meta.json cannot be used, or was never written, the
    shards are those that the names tell, so that their own faults are found too."""
    mark = (folder / UNFINISHED).exists()
    if not (folder / META).exists():
        entries, faults = entries_by_name(folder)
        return None, entries, [never_finished(folder)] if mark else faults
    meta, faults = check_meta(folder)
    if mark:
        faults.append(f"{folder / UNFINISHED}: a run writes here or was stopped; remove it if nothing else is wrong")
    if len(faults) > mark:
        return None, entries_by_name(folder)[0], faults
    entries = entries_of_meta(folder, meta)
    listed = [entry.path for name in SPLITS for entry in entries[name]]
    present = {path for path in folder.glob("*.bin") if not path.name.startswith(".")}
    faults += [f"{path}: not listed in {META}" for path in sorted(present - set(listed))]
    faults += [f"{path}: listed {listed.count(path)} times in {META}" for path in sorted({*listed}) if listed.count(path) > 1]
    return meta, entries, faults


def _check_vocabulary(folder: Path, meta: dict[str, Any]) -> list[str]:
    """Of the tokenizers that are known here, size and EOT; of others only that EOT is in the vocabulary."""
    if known := TOKENIZERS.get(meta["tokenizer"]):
        return [f"{folder / META}: {key}: {meta[key]}, but tokenizer {known.name} has {getattr(known, key)}"
                for key in ("vocab_size", "eot") if meta[key] != getattr(known, key)]
    if meta["eot"] >= meta["vocab_size"]:
        return [f"{folder / META}: eot: wanted an id below vocab_size {meta['vocab_size']}, found {meta['eot']}"]
    return []


def _check_counts(folder: Path, meta: dict[str, Any], val: _Split, train: _Split) -> list[str]:
    """meta.json's number of documents in both splits, where it has one; nothing is known of it where a shard is unreadable."""
    if "counts" not in meta or not (val.complete and train.complete):
        return []
    counts, n_eot = meta["counts"], val.n_eot + train.n_eot
    said = counts.get("documents", n_eot) if isinstance(counts, dict) else counts
    return [f"{folder / META}: counts.documents: {said!r:.80}, the shards have {n_eot}"] if said != n_eot else []


def _assumed_eot(splits: list[_Split]) -> int | None:
    """GPT-2's EOT where a split of shards with headers begins with it. One is enough: the public FineWeb shards are one stream
    cut by position, val first, so that train begins inside a document."""
    for split in splits:
        if split.first_token == GPT2_EOT and all(shard.first_byte for shard in split.readable):
            return GPT2_EOT
    return None


def _read_both(
    val: _Split, train: _Split, eot: int | None, first: int, meta: dict[str, Any] | None, faults: list[str] | None
) -> Found | None:
    """Look for the documents of val from number `first` on in train, and with a list of faults check both splits on the way.
    None: without EOT or one of the splits there is nothing to look for."""
    search = Duplicates(val.stream, train.stream, first) if eot is not None and val.stream and train.stream else None
    n_bytes = sum(2 * shard.n_tokens for split in (val, train) for shard in split.readable)
    desc = "verify" if faults is not None else f"documents of val from {first:,} on"
    with tqdm(total=n_bytes, desc=desc, unit="B", unit_scale=True, mininterval=1) as progress:
        _read_split(val, eot, search and search.add, progress, meta, faults)
        if search:
            search.sort()
        _read_split(train, eot, search and search.look, progress, meta, faults)
    return search.found(_N_EXAMPLES) if search else None


def _read_split(
    split: _Split,
    eot: int | None,
    see: Callable[[Documents], None] | None,
    progress: tqdm,
    meta: dict[str, Any] | None,
    faults: list[str] | None,
) -> None:
    """Read a split through, show its documents to `see`, and with a list of faults check it and count its documents. A file
    that fails while it is read is a gap in the stream."""
    cutter = None if eot is None else Cutter(eot)

    def pass_on(documents: Documents) -> None:
        if see:
            see(documents)
        if faults is not None:
            split.count(documents)

    with ThreadPoolExecutor(1) as pool:
        for shard in split.shards:
            if shard is None:
                split.complete = False
                if cutter:
                    cutter.gap(0)  # the stream is that of the other shards
                continue
            digest = hashlib.sha256() if shard.sha256 is not None and faults is not None else None
            n_read, highest, n_eot = 0, -1, cutter.n_eot if cutter else 0
            try:
                for tokens in _read_shard(shard, digest, pool):
                    n_read += len(tokens)
                    highest = max(highest, int(tokens.max()))
                    if cutter:
                        pass_on(cutter.feed(tokens))
                    progress.update(2 * len(tokens))
                trouble = f"ended at token {n_read} of {shard.n_tokens}" if n_read < shard.n_tokens else None
            except (OSError, InputError) as error:
                trouble = f"could not be read on at token {n_read} ({getattr(error, 'strerror', None) or error})"
            split.complete &= trouble is None
            if trouble and cutter:
                cutter.gap(shard.n_tokens - n_read)
            if faults is not None:
                split.highest = max(split.highest, highest)
                n_eot = cutter.n_eot - n_eot if cutter else 0
                split.n_eot += n_eot
                if meta and highest >= meta["vocab_size"]:
                    known = f"tokenizer {printable(meta['tokenizer'], 80)} has a vocabulary of {meta['vocab_size']}"
                    faults.append(f"{shard.path}: id {highest}: {known}")
                faults += [f"{shard.path}: {trouble}"] if trouble else _compare_with_meta(shard, n_eot, digest)
        if cutter and split.shards and split.shards[-1]:
            pass_on(cutter.finish())
    if faults is not None and meta and split.first_token not in (None, eot):
        faults.append(f"{split.shards[0].path}: begins with id {split.first_token}, wanted EOT {eot} before every document")


def _read_shard(shard: Shard, digest: Any, pool: ThreadPoolExecutor) -> Iterator[np.ndarray]:
    """The tokens in chunks, each valid until the next; the pool's thread gives every byte of the file to `digest`."""
    buffers = [np.empty(duplicates.CHUNK_TOKENS, dtype=TOKEN) for _ in range(2)]
    hashing: Future | None = None
    n_left = shard.n_tokens
    try:
        with open(shard.path, "rb") as file:
            header = file.read(shard.first_byte)
            if digest:
                digest.update(header)
            for number in itertools.count():
                buffer = buffers[number % 2][:n_left]
                chunk = buffer[: file.readinto(buffer) // 2]
                if hashing:
                    hashing.result()
                if not len(chunk):
                    return
                n_left -= len(chunk)
                if digest:
                    hashing = pool.submit(digest.update, chunk)
                yield chunk
    finally:
        if hashing:
            hashing.result()


def _compare_with_meta(shard: Shard, n_eot: int, digest: Any) -> list[str]:
    faults = []
    if digest and digest.hexdigest() != shard.sha256:
        faults.append(f"{shard.path}: sha256: {META} says {shard.sha256}, the file has {digest.hexdigest()}")
    if shard.documents is not None and n_eot != shard.documents:
        faults.append(f"{shard.path}: documents: {META} says {shard.documents}, the file has {n_eot}")
    return faults


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def _report(split: _Split, meta: dict[str, Any] | None, eot: int | None) -> list[str]:
    if not split.stream:
        return [f"{split.name}: nothing readable"]
    line = f"{split.name}: {split.stream.n_tokens:,} tokens in {len(split.readable)} shards"
    if eot is None:
        return [f"{line}; documents unknown: no {META} says which id is EOT"]
    lengths = split.lengths
    line += f", {split.n_eot:,} documents"
    if lengths["n"]:
        mean = lengths["sum"] / lengths["n"]
        line += f" of {mean:,.1f} tokens on average ({lengths['min']:,} to {lengths['max']:,}, EOT included)"
        line += f", {lengths['empty']:,} empty"
    if split.first_token is not None:
        line += "; begins with EOT" if split.first_token == eot else "; begins inside a document"
    return [line if meta else f"{line}; EOT {eot} is assumed"]


def _report_duplicates(
    folder: Path, meta: dict[str, Any] | None, val: _Split, train: _Split, found: Found
) -> tuple[list[str], list[str]]:
    """Report and faults.

    Where a hash of the text chose the side, equal documents went to the same one, and a duplicate means that a shard is not
    what its meta.json says. (Texts that differ in lone surrogates alone have the same tokens and other hashes; no UTF-8 input
    has them.) Where the stream was cut by position, or nobody says how, duplicates are the corpus's own repetitions: val is
    then not quite unseen, which one should know, but the folder is what it was meant to be.
    """
    how = (meta or {}).get("split_by")
    line = f"{found.n:,} of {val.lengths['n']:,} val documents ({found.n_tokens:,} tokens) are in train as well, token for token"
    if not found.n:
        return [f"duplicates: {line}"], []
    lines = [f"duplicates: {line}; " + ("the first:" if how == "hash" else "not a fault, the split was not by hash; the first:")]
    tokenizer = None
    if meta:
        try:
            tokenizer = get_tokenizer(meta["tokenizer"])
        except InputError:
            pass  # ids are shown
    for start, in_train, length in found.examples[:_N_EXAMPLES]:
        places = " = ".join(_place(*place) for place in (val.stream.locate(start), train.stream.locate(in_train)))
        begin = _text(val.stream.read(start + 1, min(length - 1, 24)), tokenizer)
        lines.append(f"  {places}, {length:,} tokens: {begin[:80]!r}{'...' if len(begin) > 80 or length > 25 else ''}")
    return lines, [f"{folder}: {line}, though a hash of the text chose the split"] if how == "hash" else []


def _place(file: Path, offset: int) -> str:
    return f"{file.name} token {offset}"


def _text(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """The text of ids, or the ids where it is not to be had."""
    try:
        if tokenizer:
            return tokenizer.decode(ids)
    except InputError:
        pass
    return " ".join(map(str, ids.tolist()))


# ---------------------------------------------------------------------------------------------------------------------
# Inspect


def inspect(folder: Path) -> list[str]:
    """What is in the folder, for people, in lines. Quick: documents are those that meta.json counts."""
    dataset = open_dataset(folder)
    meta = dataset.meta
    streams = (dataset.train, dataset.val)
    eot = meta["eot"] if meta else _assumed_eot([_Split(s.split, s.shards, first_token=int(s.read(0, 1)[0])) for s in streams])
    lines = [f"{folder}: fingerprint {dataset.fingerprint[:16]}"]
    if meta:
        lines.append(f"tokenizer {printable(meta['tokenizer'], 80)}, vocabulary {meta['vocab_size']}, EOT {eot}")
    else:
        lines.append(f"no {META}" + ("" if eot is None else f"; begins with {eot}: GPT-2 is assumed"))
    tokenizer = None
    if eot is not None:
        try:
            tokenizer = get_tokenizer(meta["tokenizer"] if meta else "gpt2")
        except InputError as error:
            lines.append(f"ids instead of text: {error}")
    for stream in streams:
        line = f"{stream.split}: {stream.n_tokens:,} tokens in {len(stream.shards)} shards"
        if len(stream.shards) > 1:
            line += f", the last of {stream.shards[-1].n_tokens:,}"
        counts = [shard.documents for shard in stream.shards]
        if None in counts:
            line += ", documents not counted"
        elif sum(counts):
            line += f", {sum(counts):,} documents of {stream.n_tokens / sum(counts):,.1f} tokens on average, EOT included"
        lines += [line, *_example(stream, eot, tokenizer)]
    return lines


def _example(stream: TokenStream, eot: int | None, tokenizer: Tokenizer | None) -> list[str]:
    """The first document that is whole and not empty; where EOT is unknown, the first tokens."""
    tokens = stream.read(0, min(_FIRST_TOKENS, stream.n_tokens))
    if eot is None:
        return [f"  begins {_text(tokens[:_EXAMPLE_IDS], None)}"]
    borders = np.append(np.flatnonzero(tokens == eot), len(tokens))
    filled = np.flatnonzero(np.diff(borders) > 1)
    if not len(filled):
        return [f"  no document begins in the first {len(tokens):,} tokens"]
    start, end = borders[filled[0]] + 1, borders[filled[0] + 1]
    ends = end < len(tokens) or len(tokens) == stream.n_tokens
    whole = f"{'' if ends else 'more than '}{end - start:,} tokens"
    shown = min(int(end - start), _EXAMPLE_TOKENS if tokenizer else _EXAMPLE_IDS)
    text = _text(tokens[start : start + shown], tokenizer)
    lines = [f"  first document ({whole}{f', of which {shown}' if shown < end - start else ''}):"]
    for row in text.split("\n"):
        lines += [f"    | {part}" for part in textwrap.wrap(printable(row), 110, drop_whitespace=False) or [""]]
    return lines
