"""The data set folder: write it, read it as one token stream per split, verify it.

    python -m data.shards verify quickstart       # sizes, headers, checksums, ids, documents; exit 1 if any is wrong
    python -m data.shards inspect quickstart      # tokens, documents, mean length and an example of each split

A folder holds `*_train_*.bin`, `*_val_*.bin` and `meta.json`. A shard is a header of 256 little-endian int32 (magic 20240520,
version 1, token count, zeros) and uint16 tokens: the format of llm.c and modded-nanogpt, whose folders, without a meta.json,
are read as they are. So are NanoGPT's `train.bin` and `val.bin`, which have no header. Shards of a split, in the order of
their names (of meta.json where there is one), are one packed stream: documents follow each other, EOT before each, and go
over shard borders.
"""

import hashlib
import json
import os
import re
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from command_line import ArgumentParser, InputError, printable, say

DATA_FOLDER = Path(__file__).resolve().parent
SPLITS = ("train", "val")
MAGIC, VERSION = 20240520, 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
TOKEN = np.dtype("<u2")
FORMAT_VERSION = 1  # of meta.json

META = "meta.json"
UNFINISHED = "meta.json.unfinished"  # there from the first byte written until meta.json is complete

_SHARD_NAME = re.compile(r".*_(train|val)_.*\.bin")  # greedy: the last _train_ or _val_ of a name decides
_MAX_OPEN_FILES = 64  # a full set has 1030 shards, and the usual limit of a process is 1024 open files


# ---------------------------------------------------------------------------------------------------------------------
# Writing


class ShardWriter:
    """Appends tokens to the packed stream of one split and cuts it into shards `<name>_<split>_<number, 6 digits>.bin`.

    The caller puts EOT before each document. Every shard but the last has `shard_tokens` tokens. A shard gets its name when
    it is complete and on the disk; until then it is a hidden file, which leaving the `with` block early keeps: `resume` goes
    on from the state that `save` returned.
    """

    def __init__(self, folder: Path, name: str, split: str, *, eot: int, shard_tokens: int = 100_000_000) -> None:
        if not 1 <= shard_tokens < 2**31:
            raise InputError(f"shard_tokens: wanted 1 to {2**31 - 1} (the header's count is an int32), found {shard_tokens}")
        self.n_tokens = 0
        self._folder, self._name, self._split = folder, name, split
        self._eot, self._shard_tokens = eot, shard_tokens
        self._shards: list[dict[str, Any]] = []
        self._file: Any = None
        self._filled = self._documents = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            with suppress(OSError):  # what is left in the buffer and finds no room on the disk; `save` did not speak of it
                self._file.close()
            self._file = None

    def save(self) -> dict[str, Any]:
        """Make all that was written last, a crash included. Returns the state that `resume` wants, plain JSON."""
        if self._file:
            _sync(self._file)
        return {"shards": list(self._shards), "filled": self._filled if self._file else 0, "documents": self._documents}

    def resume(self, state: dict[str, Any]) -> None:
        """Go back to the moment of `save`: what was written after it is dropped. InputError: what it speaks of is gone."""
        self._shards = list(state["shards"])
        self.n_tokens = sum(shard["tokens"] for shard in self._shards) + state["filled"]
        for shard in self._shards:
            open_shard(Entry(self._folder / shard["file"], shard["tokens"]))
        current = self._folder / self._file_name(len(self._shards))
        if not state["filled"]:
            self._temporary.unlink(missing_ok=True)
        elif current.exists():  # it became full after `save`
            os.replace(current, self._temporary)
        known = {shard["file"] for shard in self._shards}
        for path in self._folder.glob(f"{self._name}_{self._split}_*.bin"):
            if path.name not in known:
                path.unlink()
        if state["filled"]:
            wanted = HEADER_BYTES + TOKEN.itemsize * state["filled"]
            found = self._temporary.stat().st_size if self._temporary.exists() else 0
            if found < wanted:
                raise InputError(f"{self._temporary}: wanted at least {wanted} bytes of an unfinished shard, found {found}")
            self._file = open(self._temporary, "r+b")  # noqa: SIM115 - as in `write`
            self._file.truncate(wanted)
            self._file.seek(wanted)
            self._filled, self._documents = state["filled"], state["documents"]

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens: part of a document, one, or many. InputError: ids that uint16 would silently wrap."""
        tokens = as_uint16(tokens)
        self.n_tokens += len(tokens)
        while len(tokens):
            if self._file is None:
                self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed when the shard is full, or by __exit__
                self._file.write(bytes(HEADER_BYTES))
                self._filled = self._documents = 0
            part, tokens = np.split(tokens, [self._shard_tokens - self._filled])
            self._file.write(np.ascontiguousarray(part, dtype=TOKEN).data)
            self._filled += len(part)
            self._documents += int(np.count_nonzero(part == self._eot))
            if self._filled == self._shard_tokens:
                self._finish_shard()

    def close(self) -> list[dict[str, Any]]:
        """Finish the last, shorter shard. Returns for each shard its file, tokens, documents (those that begin in it) and
        the sha256 of the whole file: the entries of meta.json."""
        if self._file:
            self._finish_shard()
        return self._shards

    @property
    def _temporary(self) -> Path:
        return self._folder / f".{self._name}_{self._split}.tmp"

    def _file_name(self, number: int) -> str:
        return f"{self._name}_{self._split}_{number:06d}.bin"

    def _finish_shard(self) -> None:
        header = np.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = MAGIC, VERSION, self._filled
        self._file.seek(0)
        self._file.write(header.tobytes())
        _sync(self._file)
        self._file.close()
        self._file = None
        file = self._file_name(len(self._shards))
        with open(self._temporary, "rb") as f:
            sha256 = hashlib.file_digest(f, "sha256").hexdigest()
        os.replace(self._temporary, self._folder / file)
        _sync_folder(self._folder)
        self._shards.append({"file": file, "tokens": self._filled, "documents": self._documents, "sha256": sha256})


def as_uint16(tokens: np.ndarray) -> np.ndarray:
    """The same ids as uint16. InputError: not integers, not one-dimensional, negative or above 65535."""
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise InputError(f"tokens: wanted a row of integer ids, found {tokens.dtype} of shape {tokens.shape}")
    if tokens.dtype != np.uint16 and tokens.size and (tokens.min() < 0 or tokens.max() > 65535):
        raise InputError(f"tokens: wanted ids 0 to 65535, found {tokens.min()} to {tokens.max()}")
    return tokens.astype(np.uint16, copy=False)


def begin(folder: Path, note: dict[str, Any]) -> None:
    """Mark the folder as one that is being written; `note` (source, arguments) is kept in the mark until `write_meta`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / UNFINISHED, note)


def write_meta(
    folder: Path, *, tokenizer: str, vocab_size: int, eot: int, splits: dict[str, list[dict[str, Any]]], **more: Any
) -> None:
    """Finish the folder: meta.json, written last and at once, then the mark of `begin` goes. `splits` holds what
    `ShardWriter.close` returned; `more` is the source, the arguments and the like."""
    meta = {"format_version": FORMAT_VERSION, "tokenizer": tokenizer, "vocab_size": vocab_size, "eot": eot, "dtype": "uint16"}
    write_json(folder / META, meta | more | {"splits": splits})
    (folder / UNFINISHED).unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Put a file in place whole or not at all, for good."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            _sync(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@dataclass(frozen=True)
class Shard:
    """One file of a split: `n_tokens` uint16 tokens from byte `first_byte` on; sha256 where meta.json gives it."""

    path: Path
    n_tokens: int
    first_byte: int
    sha256: str | None = None
    documents: int | None = None


class TokenStream:
    """The shards of one split as one packed stream of `n_tokens` tokens. Any thread may read.

    Reads with os.pread from a few files kept open, rather than from memory maps, which count as the process's memory and
    would need more open files than a process may have.
    """

    def __init__(self, split: str, shards: list[Shard]) -> None:
        self.split, self.shards = split, shards
        self._ends = np.cumsum([shard.n_tokens for shard in shards], dtype=np.int64)
        self.n_tokens = int(self._ends[-1])
        self._handles: OrderedDict[int, int] = OrderedDict()  # shard number -> file descriptor, least recently used first
        self._lock = threading.Lock()

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens start .. start+length-1, uint16 (length,). IndexError: outside the stream. InputError: the file has
        become shorter since the folder was opened."""
        if not (0 <= start and 0 <= length and start + length <= self.n_tokens):
            raise IndexError(f"tokens {start} to {start + length} of a stream of {self.n_tokens}")
        number, offset = self._find(start)
        parts = []
        while length:
            part = min(length, self.shards[number].n_tokens - offset)
            parts.append(self._read_shard(number, offset, part))
            length -= part
            number, offset = number + 1, 0
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)

    def locate(self, offset: int) -> tuple[Path, int]:
        """File of token `offset` of the stream, and the token's place in it, for messages."""
        if not 0 <= offset < self.n_tokens:
            raise IndexError(f"token {offset} of a stream of {self.n_tokens}")
        number, inside = self._find(offset)
        return self.shards[number].path, inside

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        with self._lock:
            while self._handles:
                os.close(self._handles.popitem()[1])

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    def _find(self, offset: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, offset, side="right"))
        return number, offset - (int(self._ends[number - 1]) if number else 0)

    def _read_shard(self, number: int, offset: int, length: int) -> np.ndarray:
        shard = self.shards[number]
        with self._lock:  # held while reading, or another thread could close the file
            handle = self._handles.get(number)
            if handle is None:
                handle = os.open(shard.path, os.O_RDONLY)
                self._handles[number] = handle
                if len(self._handles) > _MAX_OPEN_FILES:
                    os.close(self._handles.popitem(last=False)[1])
            self._handles.move_to_end(number)
            data = os.pread(handle, 2 * length, shard.first_byte + 2 * offset)
            while len(data) < 2 * length:  # Linux reads at most 2 GiB at once
                more = os.pread(handle, 2 * length - len(data), shard.first_byte + 2 * offset + len(data))
                if not more:
                    raise InputError(f"{shard.path}: truncated since it was opened, no token {offset + len(data) // 2}")
                data += more
        return np.frombuffer(data, dtype=TOKEN).astype(np.uint16, copy=False)


@dataclass(frozen=True)
class Dataset:
    """An opened folder. `meta` is the content of meta.json; without one, `meta`, `tokenizer` and `vocab_size` are None.
    `fingerprint` (hex) tells data sets apart by names, counts, checksums, samples of tokens and tokenizer, wherever the folder
    lies."""

    folder: Path
    train: TokenStream
    val: TokenStream
    meta: dict[str, Any] | None
    fingerprint: str

    @property
    def tokenizer(self) -> str | None:
        return self.meta["tokenizer"] if self.meta else None

    @property
    def vocab_size(self) -> int | None:
        return self.meta["vocab_size"] if self.meta else None


@dataclass(frozen=True)
class Entry:
    """A shard as the folder lists it, its file not yet looked at. tokens, documents and sha256 as meta.json claims them."""

    path: Path
    tokens: int | None = None
    documents: int | None = None
    sha256: str | None = None


def open_dataset(folder: str | Path) -> Dataset:
    """Open a data set by its name under data/ or by its path; looks at every file's size, header and a few tokens.
    InputError names the file at fault: missing, unfinished, no train or no val tokens, another format, truncated."""
    path = find_folder(folder)
    meta, entries = _list_entries(path)
    streams = {split: TokenStream(split, [open_shard(entry) for entry in entries[split]]) for split in SPLITS}
    identity = [meta["tokenizer"] if meta else None] + [
        [split, [[shard.path.name, shard.n_tokens, shard.sha256] for shard in streams[split].shards]] for split in SPLITS
    ] + [_samples(streams[split]) for split in SPLITS]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return Dataset(path, streams["train"], streams["val"], meta, fingerprint)


def _samples(stream: "TokenStream") -> str:
    """Hash of the first, middle and last 2048 tokens of every shard: names and sizes are the same for many a data set, and a
    sha256 in meta.json is what the file was once."""
    digest, start = hashlib.sha256(), 0
    for shard in stream.shards:
        length = min(2048, shard.n_tokens)
        for offset in (0, (shard.n_tokens - length) // 2, shard.n_tokens - length):
            digest.update(stream.read(start + offset, length).tobytes())
        start += shard.n_tokens
    stream.close()
    return digest.hexdigest()


def find_folder(folder: str | Path) -> Path:
    """The folder that a data set's name (under data/) or path means. InputError: there is none."""
    for path in (DATA_FOLDER / folder, Path(folder)) if str(folder) else ():
        if path.is_dir():
            return path
    prepared = sorted(path.parent.name for path in DATA_FOLDER.glob(f"*/{META}"))
    raise InputError(
        f"dataset: no folder {str(folder)!r}, neither under data/ nor as a path. "
        f"Prepared under data/: {', '.join(prepared) or 'none'}. Make one: python -m data.fineweb, or "
        f"python -m data.local --input TEXT --tokenizer=gpt2 --out={folder or 'DIR'}"
    )


def _list_entries(folder: Path) -> tuple[dict[str, Any] | None, dict[str, list[Entry]]]:
    if (folder / META).exists():
        meta = read_meta(folder)
        return meta, entries_of_meta(folder, meta)
    if (folder / UNFINISHED).exists():
        raise InputError(never_finished(folder))
    entries, faults = entries_by_name(folder)
    if faults:
        raise InputError(faults[0])
    return None, entries


def never_finished(folder: Path) -> str:
    return f"{folder / UNFINISHED}: this data set was never finished; prepare it again with the same command"


def entries_of_meta(folder: Path, meta: dict[str, Any]) -> dict[str, list[Entry]]:
    """The shards of each split that a sound meta.json lists."""
    return {
        split: [Entry(folder / s["file"], s["tokens"], s.get("documents"), s.get("sha256")) for s in meta["splits"][split]]
        for split in SPLITS
    }


def entries_by_name(folder: Path) -> tuple[dict[str, list[Entry]], list[str]]:
    """The shards of each split in a folder without meta.json, and what keeps them from being a data set."""
    entries: dict[str, list[Entry]] = {split: [] for split in SPLITS}
    faults = []
    for path in sorted(folder.glob("*.bin")):
        match = _SHARD_NAME.fullmatch(path.name)
        if match and not path.name.startswith("."):
            entries[match[1]].append(Entry(path))
    for split in SPLITS:
        raw = folder / f"{split}.bin"
        if raw.exists() and entries[split]:
            faults.append(f"{folder}: holds both {raw.name} and {entries[split][0].path.name}; keep one of the two forms")
        if raw.exists():
            entries[split].append(Entry(raw))
        if not entries[split]:
            faults.append(f"{folder}: no {split} shards; wanted *_{split}_*.bin, or {split}.bin as NanoGPT writes it")
    return entries, faults


def read_json(path: Path) -> Any:
    """InputError: the file cannot be read or holds no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error})") from None


def read_meta(folder: Path) -> dict[str, Any]:
    """meta.json of a finished folder, checked. InputError names the key at fault."""
    meta, faults = check_meta(folder)
    if faults:
        raise InputError(faults[0])
    return meta


def check_meta(folder: Path) -> tuple[Any, list[str]]:
    """meta.json and everything that is wrong with it."""
    path = folder / META
    faults = []
    try:
        meta = read_json(path)
    except InputError as error:
        return None, [str(error)]

    def want(holds: bool, key: str, wanted: str, found: object) -> bool:
        if not holds:
            faults.append(f"{path}: {key}: wanted {wanted}, found {found!r:.80}")
        return holds

    if not want(isinstance(meta, dict), "content", "an object", type(meta).__name__):
        return None, faults
    want(meta.get("format_version") == FORMAT_VERSION, "format_version", str(FORMAT_VERSION), meta.get("format_version"))
    want(isinstance(meta.get("tokenizer"), str), "tokenizer", "a name", meta.get("tokenizer"))
    for key, low in (("vocab_size", 1), ("eot", 0)):
        want(_is_count(meta.get(key), low), key, f"an integer from {low} on", meta.get(key))
    want(meta.get("dtype") == "uint16", "dtype", "'uint16'", meta.get("dtype"))
    splits = meta.get("splits")
    if not want(isinstance(splits, dict), "splits", "an object", splits):
        return meta, faults
    for split in SPLITS:
        shards = splits.get(split)
        if not want(isinstance(shards, list) and len(shards) > 0, f"splits.{split}", "a list of shards, not empty", shards):
            continue
        for number, shard in enumerate(shards):
            key = f"splits.{split}[{number}]"
            if not want(isinstance(shard, dict), key, "an object", shard):
                continue
            file = shard.get("file")
            want(isinstance(file, str) and Path(file).name == file != "", f"{key}.file", "a file name", file)
            want(_is_count(shard.get("tokens"), 1), f"{key}.tokens", "a positive integer", shard.get("tokens"))
            if "documents" in shard:
                want(_is_count(shard["documents"], 0), f"{key}.documents", "a count", shard["documents"])
            if "sha256" in shard:
                want(isinstance(shard["sha256"], str), f"{key}.sha256", "hex digits", shard["sha256"])
    return meta, faults


def _is_count(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def open_shard(entry: Entry) -> Shard:
    """Check one file's header and size against each other and against meta.json. InputError: its first fault."""
    shard, faults = check_shard(entry)
    if shard is None or faults:
        raise InputError(faults[0])
    return shard


def check_shard(entry: Entry) -> tuple[Shard | None, list[str]]:
    """The shard, None where its tokens cannot be told, and every fault of its header and size."""
    path = entry.path
    try:
        if not path.is_file():
            return None, [f"{path}: missing" + (f", but listed in {META}" if entry.tokens is not None else "")]
        size = path.stat().st_size
        header = np.fromfile(path, dtype="<i4", count=3) if size >= HEADER_BYTES else np.zeros(3, dtype="<i4")
    except OSError as error:
        return None, [f"{path}: cannot be read ({error.strerror})"]
    if path.name in ("train.bin", "val.bin") and entry.tokens is None:
        if header[0] == MAGIC:
            return None, [f"{path}: has a shard's header under the name of a file without one; rename it x_{path.stem}_0.bin"]
        if size == 0 or size % 2:
            return None, [f"{path}: wanted uint16 tokens, two bytes each, found {size} bytes"]
        return Shard(path, size // 2, 0), []
    if size < HEADER_BYTES:
        return None, [f"{path}: header: wanted {HEADER_BYTES} bytes, the file has {size}"]
    if header[0] != MAGIC:
        return None, [f"{path}: magic number: wanted {MAGIC}, found {header[0]}: not a shard of uint16 tokens"]
    faults = []
    if header[1] != VERSION:
        faults.append(f"{path}: version: wanted {VERSION}, found {header[1]}")
    n_tokens = int(header[2])
    sized = n_tokens >= 1 and size == HEADER_BYTES + 2 * n_tokens
    if n_tokens < 1:
        faults.append(f"{path}: token count: wanted at least 1, found {n_tokens}")
    elif not sized:
        fault = "truncated" if size < HEADER_BYTES + 2 * n_tokens else "trailing bytes"
        faults.append(f"{path}: {fault}: {n_tokens} tokens take {HEADER_BYTES + 2 * n_tokens} bytes, the file has {size}")
    if entry.tokens is not None and n_tokens != entry.tokens:
        faults.append(f"{path}: token count: {META} says {entry.tokens}, the header {n_tokens}")
    known = sized and header[1] == VERSION
    return Shard(path, n_tokens, HEADER_BYTES, entry.sha256, entry.documents) if known else None, faults


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="python -m data.shards", description=__doc__)
    parser.add_argument("command", choices=("verify", "inspect"))
    parser.add_argument("folder", metavar="DIR", help="a data set's name under data/, or its path")
    from data.verify import inspect, verify  # it imports this module

    try:
        arguments = parser.parse_args(argv)
        folder = find_folder(arguments.folder)
        if arguments.command == "inspect":
            say(*inspect(folder))
            return 0
    except (InputError, PermissionError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    faults, report = verify(folder)
    say(*report)
    for fault in faults:
        print(f"fault: {printable(fault)}", file=sys.stderr)
    if faults:
        print(f"{printable(folder)}: {len(faults)} fault{'s' if len(faults) > 1 else ''}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
