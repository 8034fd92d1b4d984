"""A run's folder, as train.py leaves it: its losses, and how far it is with what was asked for. Loads no torch."""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from command_line import InputError

# Settings that leave the training curve as it is.
NEUTRAL = {
    "out_dir", "seed", "init_from", "eval_only", "device", "compile", "backend", "dist_timeout", "micro_batch_size",
    "activation_checkpointing", "wandb_log", "wandb_project", "wandb_run_name", "wandb_group", "log_interval", "save_interval",
    "eval_interval", "deterministic", "keep_checkpoints", "milestone_interval", "max_bad_steps", "eval_tasks", "eval_tasks_limit",
    "eval_tasks_data", "diagnostics_interval", "profile",
}

_TOO_LARGE = 1e300  # a number that no run has written, and arithmetic on it would overflow


@dataclass
class Run:
    """One run folder. `train` and `val` map tokens to loss in nats, in order; `info` is config.json."""

    folder: Path
    info: dict[str, Any]
    train: dict[int, float]
    val: dict[int, float]
    steps: dict[int, int]  # tokens to steps
    hashes: dict[int, str]  # tokens to data_hash, of all training windows up to there
    unknown: list[tuple[str, int]]  # split and step of losses that are not numbers, of skipped steps say
    step_ms: float | None
    tokens_per_s: float | None
    peak_memory_gb: float | None

    @property
    def config(self) -> dict[str, Any]:
        return self.info["config"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    def setting(self, key: str) -> Any:
        """A setting as far as it matters for the curve: of the data set its content, where that is known."""
        if key == "dataset":
            return fingerprint(self.info) or self.config.get(key)
        return self.config.get(key)


def read_run(folder: Path) -> Run:
    """The run in `folder`. Raises InputError, naming the file, for anything that is not one."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a run folder" if folder.exists() else f"run folder {folder} does not exist")
    info = read_info(folder)
    records = read_records(folder / "metrics.jsonl")
    by_split: dict[str, dict[int, float]] = {"train": {}, "val": {}}
    steps: dict[int, int] = {}
    hashes: dict[int, str] = {}
    unknown = []
    for record in records:
        if _has_loss(record):
            by_split[record["split"]][record["tokens"]] = record["loss"]
        else:
            unknown.append((record["split"], record["step"]))
        steps[record["tokens"]] = record["step"]
        if isinstance(record.get("data_hash"), str):
            hashes[record["tokens"]] = record["data_hash"]
    for split, found in by_split.items():
        if not found:
            raise InputError(f"{folder / 'metrics.jsonl'} has no {split} loss yet; a run to compare has train and val lines")
    trained = [record for record in records if record["split"] == "train"]

    def numbers(key: str) -> list[float]:
        return [r[key] for r in trained if isinstance(r.get(key), int | float) and abs(r[key]) < _TOO_LARGE]

    return Run(
        folder, info, by_split["train"], by_split["val"], steps, hashes, unknown,
        *(pick(numbers(key)) if numbers(key) else None
          for key, pick in (("step_ms", median), ("tokens_per_s", median), ("peak_memory_gb", max))),
    )


def _has_loss(record: dict[str, Any]) -> bool:
    return record["loss"] is not None and math.isfinite(record["loss"])


def read_info(folder: Path) -> dict[str, Any]:
    """A run's config.json. Raises InputError."""
    path = folder / "config.json"
    try:
        info = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    config = info.get("config") if isinstance(info, dict) else None
    if not isinstance(config, dict):
        raise InputError(f'{path}: wanted an object with an object "config", as train.py writes it')
    for key in ("data", "hardware", "versions"):
        if not isinstance(info.get(key) or {}, dict):
            raise InputError(f"{path}: {key} wants an object, found {info[key]!r:.80}")
    numbers = {key: info.get(key, 0) for key in ("n_params", "flops_per_token", "tokens_per_step", "world_size")}
    for key, value in (numbers | config).items():
        if (key in numbers and not isinstance(value, int | float)) or (isinstance(value, int) and abs(value) >= _TOO_LARGE):
            raise InputError(f"{path}: {key} wants a number of ordinary size, found {value!r:.80}")
    if missing := sorted({"attention", "seed", "max_iters", "dataset"} - config.keys()):
        raise InputError(f'{path}: "config" lacks {", ".join(missing)}')
    for key, value in config.items():
        wanted = {"seed": int, "max_iters": int, "attention": str, "dataset": str}.get(key, str | int | float | None)
        if not isinstance(value, wanted):
            raise InputError(f"{path}: config: {key} is {value!r:.80}, which is no value of this setting")
    return info


def _read(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise InputError(f"{path} is not a file")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file with the splits train and val, without a last one that a crash cut off."""
    lines = _read(path).split("\n")  # what follows the last line end is empty, or was cut off
    records: list[dict[str, Any]] = []
    last: dict[str, dict[str, Any]] = {}  # of each split
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            whole = all(type(record[key]) is int and 0 <= record[key] < 2**63 for key in ("step", "tokens"))
            whole = whole and isinstance(record["split"], str)
            if whole and record["split"] not in ("train", "val"):
                continue
            loss = record["loss"]
            whole = whole and (loss is None or (type(loss) in (int, float) and not _TOO_LARGE <= abs(loss) < math.inf))
        except (ValueError, KeyError, TypeError, RecursionError):
            whole = False
        if not whole:
            raise InputError(f"{path} line {number}: wanted an object with step, tokens, split and loss, found {line[:80]!r}")
        before = last.setdefault(record["split"], {"step": -1, "tokens": -1})
        if record["step"] <= before["step"] or record["tokens"] <= before["tokens"]:
            raise InputError(f"{path} line {number}: out of order: step {record['step']}, {record['tokens']} tokens after step "
                             f"{before['step']}, {before['tokens']} tokens ({record['split']})")
        last[record["split"]] = record
        records.append(record)
    return records


# --- what runs were trained on ----------------------------------------------------------------------------------------------


def fingerprint(info: dict[str, Any]) -> str | None:
    """Of the data set that a run was trained on, None where its config.json does not say."""
    found = (info.get("data") or {}).get("fingerprint")
    return found if isinstance(found, str) else None


def other_data(runs: Iterable[tuple[Path, dict[str, Any]]]) -> list[str]:
    """Warnings of runs, each its folder and config.json, whose data sets have one name and are not the same."""
    first: dict[str, tuple[Path, str]] = {}
    found = []
    for folder, info in runs:
        ours, name = fingerprint(info), info["config"]["dataset"]
        if ours is None:
            continue
        base, theirs = first.setdefault(name, (folder, ours))
        if theirs != ours:
            found.append(f"{folder} was trained on other data than {base}, though both call it {name}: fingerprints "
                         f"{ours:.12} and {theirs:.12}")
    return found


def data_seen(runs: list[Run]) -> tuple[str, list[str]]:
    """Whether runs of one seed saw the same tokens in the same order, by the hashes in their metrics: a sentence, empty where no
    two have one seed, and warnings. A hash is of everything up to its step, so that runs which differ once do so from there on;
    they begin to at a step between two lines of the metrics."""
    first: dict[int, Run] = {}
    same, unknown, warned = [], [], []
    for run in runs:
        base = first.setdefault(run.seed, run)
        common = sorted(base.hashes.keys() & run.hashes.keys())
        other = next((tokens for tokens in common if base.hashes[tokens] != run.hashes[tokens]), None)
        if other is not None:
            before = max((run.steps[tokens] for tokens in common if tokens < other), default=0)
            warned.append(f"{run.folder} saw other tokens than {base.folder}, though both have seed {run.seed}: the first others "
                          f"in steps {before + 1:,} to {run.steps[other]:,}")
        elif base is not run:
            (same if common else unknown).append(run.steps[common[-1]] if common else str(run.folder))
    parts = []
    if same:
        parts.append(f"Runs with the same seed{', but for those of the warning,' if warned else ''} saw the same tokens, in the "
                     f"same order, up to step {min(same):,} (`data_hash`).")
    if unknown:
        names = ", ".join(f"`{folder}`" for folder in unknown)
        parts.append(f"Whether {names} saw the tokens of other runs with the same seed is not known: no `data_hash` at equal "
                     f"tokens.")
    return " ".join(parts), warned


# --- how far a run is -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """How far a run is: `kind` "finished", "unfinished", "missing", or "wrong" where the folder holds another run than the one
    that was wanted, or a broken one; `text` says more."""

    kind: str
    text: str


def state_of(folder: Path, wanted: dict[str, Any], explicit: set[str], data: str | None = None) -> State:
    """How far the run in `folder` is with the settings `wanted`, on the data set whose fingerprint is `data` (None: not there to
    be looked at). A setting that its code did not know yet counts where it is one of the `explicit` ones, which the run is
    about."""
    if os.path.lexists(folder) and not folder.is_dir():
        return State("wrong", f"{folder} is not a folder")
    if not (folder / "config.json").exists():
        return State("missing", "not started")
    try:
        info = read_info(folder)
        records = read_records(folder / "metrics.jsonl")
    except InputError as error:
        return State("wrong", str(error))
    found = info["config"]
    for key, value in wanted.items():
        if key in NEUTRAL and key != "seed":
            continue
        if key not in found and key in explicit:
            return State("wrong", f"{folder / 'config.json'} has no {key}, wanted {value!r}")
        if found.get(key, value) != value:
            return State("wrong", f"{folder / 'config.json'} has {key}={found[key]!r}, wanted {value!r}")
    trained_on = fingerprint(info)
    if data is not None and trained_on not in (None, data):
        return State("wrong", f"it was trained on other data (fingerprint {trained_on:.12}) than dataset {wanted['dataset']} has "
                              f"now ({data:.12})")
    steps = {record["split"]: record["step"] for record in records}
    last, planned = steps.get("train", 0), wanted["max_iters"]
    bad = [record for record in records if not _has_loss(record)]
    skipped = sum(record["split"] == "train" for record in bad)
    note = f", {skipped} steps skipped" if skipped else ""
    if any(record["split"] == "val" and record["step"] == steps["val"] for record in bad):
        return State("wrong", f"the validation loss at step {steps['val']:,} is not a number{note}")
    checkpoints = sorted(path.name for path in folder.glob("ckpt_*.pt"))
    behind = checkpoints and checkpoints[-1] < f"ckpt_{planned:08d}.pt"  # killed before the last one; none at all: removed since
    # Metrics are on the disk before the checkpoint of their step: one without them says that they were lost since, and no resumed
    # run would write them again.
    if checkpoints and checkpoints[-1] > "ckpt_00000000.pt" and (not records or (not behind and last < planned)):
        return State("wrong", f"{folder / 'metrics.jsonl'} ends at step {last:,}, before {checkpoints[-1]}: it is damaged")
    if steps.get("val", -1) < planned or last < planned or behind:
        return State("unfinished", f"step {last:,} of {planned:,}{note}")
    if skipped == sum(record["split"] == "train" for record in records):
        return State("wrong", f"no training loss is a number{note}")
    return State("finished", f"{planned:,} steps{note}")


def last_step(folder: Path) -> int:
    """The last step in a run's metrics, 0 where there is none yet. Reads the file's end alone."""
    try:
        with open(folder / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return 0
