"""Documents of parquet and jsonl files, on this disk or on the hub, in batches that a worker process tokenizes.

    for batch in read_batches(source, Position(), "text", skip_bad=False):
        result = tokenize_batch(batch.block, tokenizer, "text", val_fraction=0.0005)

A batch travels to its worker as bytes and is decoded there: the process that reads does no work for a single document. It
imports neither pyarrow nor datasets unless a file wants them, so that workers start at once.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from command_line import InputError, printable
from data import hub
from data.tokenizer import Tokenizer, utf8

SUFFIXES = (".parquet", ".jsonl")
BATCH_BYTES = 1 << 20  # of text in one task: a third of a second of work, and a few ms of the reading process
_ROWS_PER_READ = 256
_SAMPLES = 32
_RETRY_WAITS_S = (1, 2, 4, 8, 15, 30, 60, 60)


class DocumentError(Exception):
    """A file or a document that cannot be read, found while working; the message, of one line, names file and row."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


@dataclass(frozen=True)
class Source:
    """A file of documents: `name` stands for it in meta.json, `place` is a path or an address on the hub, `identity` is equal
    for files that are equal."""

    name: str
    place: str
    size: int
    identity: str

    @property
    def shown(self) -> str:
        """The place on one line, for messages and lists."""
        return printable(self.place)

    @property
    def is_remote(self) -> bool:
        return self.place.startswith("hf://")

    def open(self) -> BinaryIO:
        return hub.open_file(self.place, self.size) if self.is_remote else open(self.place, "rb")  # noqa: SIM115


@dataclass(frozen=True)
class Position:
    """Where the next document of a file lies: its row (or line), from 0, and for jsonl the byte."""

    row: int = 0
    byte: int = 0


_PASSED = Position(row=-1)  # after a file that is left out as a whole


@dataclass(frozen=True)
class Block:
    """Documents first_row, first_row + 1, ... as bytes: document i is data[ends[i-1]:ends[i]], UTF-8 text, or with `is_json` a
    line of JSON. `nulls` are the i that are null."""

    data: bytes
    ends: np.ndarray
    is_json: bool
    first_row: int
    nulls: tuple[int, ...] = ()


@dataclass(frozen=True)
class Batch:
    """A block, the position after it and the bytes of the file up to there. `unreadable` are rows of the file that were left
    out because the file is damaged there, each (first row, end, reason); (0, 0, reason) is the whole file."""

    block: Block
    next: Position
    bytes_done: int
    unreadable: tuple[tuple[int, int, str], ...] = ()


@dataclass
class Result:
    """What a batch's documents became: uint16 tokens with EOT before each, by split, in their order; how many documents, how
    many more were empty, and (row, reason) of those that are none."""

    tokens: dict[str, np.ndarray]
    n_documents: int = 0
    n_empty: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def local_source(name: str, path: Path) -> Source:
    """The identity is made from the size and samples, as the corpus may have terabytes: the end, where a parquet file has its
    index, and places all over the file."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for i in range(_SAMPLES):
            file.seek(size * i // _SAMPLES)
            digest.update(file.read(4096))
        file.seek(max(0, size - (1 << 16)))
        digest.update(file.read())
    return Source(name, str(path), size, digest.hexdigest())


def count_rows(source: Source, text_field: str, enough: int) -> int:
    """Documents of a local file: rows of parquet, from its index, lines of jsonl, which are counted until there are `enough`.
    InputError: not parquet, or no such column of strings."""
    if source.name.lower().endswith(".parquet"):
        try:
            with _open_parquet(source, text_field) as file:
                return file.metadata.num_rows
        except (DocumentError, OSError) as error:
            raise InputError(str(error)) from None
    n_lines, last = 0, b"\n"
    with source.open() as file:
        while n_lines < enough and (data := file.read(1 << 20)):
            n_lines += data.count(b"\n")
            last = data[-1:]
    return n_lines + (last != b"\n")


def read_batches(
    source: Source, start: Position, text_field: str, *, skip_bad: bool, pause: Callable[[str, float], None]
) -> Iterator[Batch]:
    """The file's documents from `start` on. What the network loses is asked for again, after `pause` (what happened, seconds),
    at growing intervals. DocumentError: the file is damaged (with skip_bad: that row group, or a file that is no parquet at all,
    is left out), it cannot be had, or the network stays away."""
    waits = iter(_RETRY_WAITS_S)
    read = _read_parquet if source.name.lower().endswith(".parquet") else _read_jsonl
    while True:
        try:
            for batch in read(source, start, text_field, skip_bad):
                yield batch
                start, waits = batch.next, iter(_RETRY_WAITS_S)
            return
        except Exception as error:
            if not (source.is_remote and hub.is_transient(error)):
                if hub.is_refusal(error):
                    raise DocumentError(f"{source.shown}: row {start.row}: cannot be read: {hub.reason(error)}") from error
                raise
            wait = next(waits, None)
            reason = f"{source.shown}: row {start.row}: {hub.reason(error)}"
            if wait is None:
                raise DocumentError(f"{reason} (after {len(_RETRY_WAITS_S)} more attempts)") from error
            pause(reason, max(wait, hub.asked_wait(error)))


def _open_parquet(source: Source, text_field: str) -> Any:
    """InputError: pyarrow is missing. DocumentError: not parquet, no such column of strings. Else: the file cannot be had."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError(f"{source.shown}: reading parquet needs the package pyarrow (pip install datasets brings it)") from None
    try:
        # Buffering ahead would take the text of the whole file into memory, and on a resumed run fetch what is done.
        file = pq.ParquetFile(source.open(), pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        if hub.is_refusal(error) or (source.is_remote and hub.is_transient(error)):
            raise
        raise DocumentError(f"{source.shown}: not readable as parquet ({first_line(error)})") from None
    schema, metadata = file.schema_arrow, file.metadata
    columns = schema.get_all_field_indices(text_field)
    if len(columns) != 1:
        found = f"{len(columns)} columns" if columns else "no column"
        raise DocumentError(f"{source.shown}: {found} {text_field!r}; it has {list_names(schema.names)} (--text_field)")
    kind = schema.field(columns[0]).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DocumentError(f"{source.shown}: column {text_field!r}: wanted strings, found {printable(kind, 80)}")
    if metadata.num_rows != sum(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)):
        raise DocumentError(f"{source.shown}: not readable as parquet (its row groups do not add up to {metadata.num_rows} rows)")
    return file


def _read_parquet(source: Source, start: Position, text_field: str, skip_bad: bool) -> Iterator[Batch]:
    if start == _PASSED:
        return
    nothing = Block(b"", np.zeros(0, dtype=np.int64), False, start.row)
    try:
        file = _open_parquet(source, text_field)
    except DocumentError as error:
        if not skip_bad:
            raise
        yield Batch(nothing, _PASSED, source.size, ((0, 0, str(error).removeprefix(f"{source.shown}: ")),))
        return
    import pyarrow as pa

    n_rows = file.metadata.num_rows
    unreadable: tuple[tuple[int, int, str], ...] = ()
    end_of_group = 0
    with file:
        for group in range(file.num_row_groups):
            row, end_of_group = end_of_group, end_of_group + file.metadata.row_group(group).num_rows
            if end_of_group <= start.row:
                continue
            try:
                for record in file.iter_batches(batch_size=_ROWS_PER_READ, row_groups=[group], columns=[text_field]):
                    column = record.column(0)
                    if row + len(column) > start.row:
                        for block in _blocks(column[max(0, start.row - row) :], max(row, start.row)):
                            end = block.first_row + len(block.ends)
                            yield Batch(block, Position(end), source.size * end // n_rows, unreadable)
                            unreadable = ()
                    row += len(column)
                if row != end_of_group:
                    raise pa.ArrowInvalid(f"row group {group} ends at row {row}, not {end_of_group}")
            except (pa.ArrowException, OSError) as error:
                if hub.is_refusal(error) or (source.is_remote and hub.is_transient(error)):
                    raise
                row = max(row, start.row)
                reason = f"not readable as parquet ({first_line(error)})"
                if not skip_bad:
                    raise DocumentError(f"{source.shown}: row {row}: {reason}") from None
                unreadable += ((row, end_of_group, reason),)
        if unreadable:
            yield Batch(nothing, Position(n_rows), source.size, unreadable)


def _blocks(column: Any, first_row: int) -> Iterator[Block]:
    """An arrow array of strings, cut where BATCH_BYTES are full; a longer document is a block of its own."""
    import pyarrow as pa

    column = column.cast(pa.large_binary())
    nulls = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)) if column.null_count else np.zeros(0, dtype=np.int64)
    _, offsets, data = column.buffers()
    offsets = np.frombuffer(offsets, dtype=np.int64)[column.offset : column.offset + len(column) + 1]
    first = 0
    while first < len(column):
        end = max(first + 1, int(np.searchsorted(offsets, offsets[first] + BATCH_BYTES, side="right")) - 1)
        text = bytes(memoryview(data)[offsets[first] : offsets[end]]) if data else b""
        own_nulls = tuple(int(i) - first for i in nulls if first <= i < end)
        yield Block(text, offsets[first + 1 : end + 1] - offsets[first], False, first_row + first, own_nulls)
        first = end


def _read_jsonl(source: Source, start: Position, text_field: str, skip_bad: bool) -> Iterator[Batch]:
    with source.open() as file:
        file.seek(max(0, start.byte - 1))
        if start.byte and file.read(1) != b"\n":
            raise DocumentError(f"{source.shown}: line {start.row} does not begin at byte {start.byte}: the file has changed")
        row, byte = start.row, start.byte
        while data := file.read(BATCH_BYTES):
            if not data.endswith(b"\n"):
                data += file.readline()
            ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n")) + 1
            if not data.endswith(b"\n"):
                ends = np.append(ends, len(data))
            block = Block(data, ends, True, row)
            row, byte = row + len(ends), byte + len(data)
            yield Batch(block, Position(row, byte), byte)


def first_line(error: BaseException) -> str:
    """Of its message, or its kind where it has none."""
    return printable((str(error).splitlines() or [type(error).__name__])[0], 200)


def list_names(names: Iterable[str]) -> str:
    """Of fields or columns, for a message."""
    return printable(", ".join(names) or "none", 200)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizing


def tokenize_batch(block: Block, tokenizer: Tokenizer, text_field: str, val_fraction: float) -> Result:
    """A document's split is a matter of its text alone: validation where the hash lies in the lowest val_fraction of its range,
    so that equal documents are on one side, whatever the order, the files and the workers."""
    eot = np.array([tokenizer.eot], dtype=np.uint16)
    limit = int(val_fraction * 2**64)
    parts: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    result = Result({})
    begin = 0
    for i, end in enumerate(block.ends.tolist()):
        row, raw, begin = block.first_row + i, block.data[begin:end], end
        try:
            text = _json_text(raw, row, text_field) if block.is_json else None if i in block.nulls else raw.decode("utf-8")
        except UnicodeDecodeError as error:
            result.bad.append((row, f"not UTF-8 (byte 0x{raw[error.start]:02x})"))
            continue
        except ValueError as error:
            result.bad.append((row, str(error)))
            continue
        if text is None:
            if not block.is_json:
                result.bad.append((row, f"{text_field!r} is null, wanted a string"))
        elif not text:
            result.n_empty += 1
        else:
            result.n_documents += 1
            side = "val" if document_hash(text) < limit else "train"
            parts[side] += (eot, tokenizer.encode([text])[0])
    result.tokens = {side: np.concatenate(arrays) if arrays else eot[:0] for side, arrays in parts.items()}
    return result


def document_hash(text: str) -> int:
    """64 bits of a document's text, as it is tokenized."""
    return int.from_bytes(hashlib.blake2b(utf8(text), digest_size=8).digest(), "little")


def _json_text(line: bytes, row: int, text_field: str) -> str | None:
    """The text of a line of JSON, None where the line is blank. ValueError says what else is there."""
    text = line.decode("utf-8-sig" if row == 0 else "utf-8")
    if not text.strip():
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"wanted an object with the field {text_field!r}, found {type(record).__name__}")
    if text_field not in record:
        raise ValueError(f"no field {text_field!r}; it has {list_names(record)} (--text_field)")
    if not isinstance(record[text_field], str):
        raise ValueError(f"field {text_field!r}: wanted a string, found {type(record[text_field]).__name__}")
    return record[text_field]
