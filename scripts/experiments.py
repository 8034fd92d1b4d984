"""Experiments as data: a file in config/experiments/ is one, its name that of the file. It says which runs there are and what is
made of them; scripts.reproduce does the rest. It is read like a config file, never run, and may also hold lists and dictionaries:

    title = "Final loss against peak learning rate"
    figure = "final"                                   # what is made of the runs, one of FIGURES
    base = ["config/1.4b.py"]                          # config files of every run
    grid = {"learning_rate": [1e-4, 4e-4], "attention": ["sa", "xsa"]}
    seeds = [1337]

`grid` has an axis a line and a run for every combination (and seed). An axis lists values of the setting that it is named by,
or dictionaries: of settings that change together, with a "config" file to be read after `base`, and a "name" for tables, if any:

    grid = {"variant": [{"name": "gsxa", "attention": "gsxa"}, {"name": "without the gate", "attention": "gsxa", "gate": "off"}]}

    compare        the axis whose first value is the baseline (default: attention if there is one, else the last axis)
    x, x_label, x_scale, y_limits       axes of figure "final": x is a setting; x_scale linear, log or log2; y_limits [low, high]
    arguments      flags of the command that figures "bias", "block" and "tasks" are made by
    tiny           what replaces these at --scale tiny. Its grid names the axes that change, which keep their length.

Every run has a name made from its settings alone, so that experiments that want the same run share it.
"""

import ast
import hashlib
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from command_line import InputError
from configurator import Config, as_dict, assignments, evaluate, load, typed_setting
from scripts.compare import DERIVED
from scripts.runs import NEUTRAL

FOLDER = Path(__file__).parent.parent / "config" / "experiments"
FIGURES = ("curves", "final", "bias", "block", "tasks")
SCALES = ("paper", "tiny")
X_SCALES = ("linear", "log", "log2")
MAX_RUNS = 10_000  # of an experiment
MAX_NAME = 180  # of a run: file systems take 255 bytes, and names are made from it


@dataclass(frozen=True)
class Planned:
    """A run that an experiment wants. `arguments` are train.py's but for out_dir and init_from; `explicit` the settings that
    its experiment gives it."""

    name: str
    arguments: list[str]
    config: Config
    explicit: set[str]


@dataclass(frozen=True)
class Cell:
    """A place in the grid, for one seed: what it is called on each axis, and its run."""

    labels: dict[str, str]
    run: Planned


@dataclass(frozen=True)
class Experiment:
    """An experiment file at one scale. `grid` maps each axis to its entries as dictionaries of settings, "name" and "config"."""

    name: str
    path: str
    title: str = ""
    figure: str = ""
    base: list[str] = field(default_factory=list)
    grid: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [Config.seed])
    compare: str = ""
    x: str = ""
    x_label: str = ""
    x_scale: str = "linear"
    y_limits: list[float] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def cells(self, extra: list[str], seeds: list[int] | None = None) -> list[Cell]:
        """Every combination of the grid, for every seed. `extra` are settings, --key=value, of all runs. Raises InputError."""
        varied = {key for entries in self.grid.values() for entry in entries for key in entry} - {"name", "config"} - NEUTRAL
        for argument in extra:
            key = argument.removeprefix("--").partition("=")[0]
            if key in varied | {"seed", "out_dir", "init_from"}:
                reason = "is what the experiment varies" if key in varied else "is not given like this" + (
                    "; use --seeds" if key == "seed" else "; the runs are put under --out" if key == "out_dir" else "")
                raise InputError(f"--{key}: {key} {reason} ({self.path})")
        if not self.grid:
            return []
        n_runs = math.prod(map(len, self.grid.values())) * len(seeds or self.seeds)
        if n_runs > MAX_RUNS:
            raise InputError(f"{self.path}: grid and seeds make {n_runs:,} runs, wanted at most {MAX_RUNS:,}")
        for axis, entries in self.grid.items():
            labels = [self._label(entry, axis) for entry in entries]
            if repeated := [label for i, label in enumerate(labels) if label in labels[:i] and entries[i] not in entries[:i]]:
                raise InputError(f"{self.path}: grid: axis {axis!r} has two entries called {repeated[0]!r}; give each a name")
        cells = []
        for entries in itertools.product(*self.grid.values()):
            labels = {axis: self._label(entry, axis) for axis, entry in zip(self.grid, entries, strict=True)}
            for seed in seeds or self.seeds:
                try:
                    cells.append(Cell(labels, _planned(self.base, entries, extra, seed)))
                except InputError as error:
                    where = ", ".join(f"{axis} {label}" for axis, label in labels.items())
                    raise InputError(f"{self.path}: run {where}: {error}") from None
        first: dict[str, dict[str, str]] = {}
        for cell in cells:
            if (labels := first.setdefault(cell.run.name, cell.labels)) != cell.labels or labels is not cell.labels:
                both = f"{', '.join(labels.values())} and {', '.join(cell.labels.values())}"
                raise InputError(f"{self.path}: grid: {both} are one run, {cell.run.name}: the same settings, but for some that "
                                 f"change nothing learned")
        return cells

    def _label(self, entry: dict[str, Any], axis: str) -> str:
        for key in ("name", axis, self.x):
            if key in entry:
                return str(entry[key])
        return ", ".join(f"{key}={value}" for key, value in entry.items() if key not in NEUTRAL)


def _planned(base: list[str], entries: tuple[dict[str, Any], ...], extra: list[str], seed: int) -> Planned:
    files = base + [entry["config"] for entry in entries if "config" in entry]
    if not files:
        raise InputError("no config file: base wants at least one, or an axis gives one in each entry")
    settings = {key: value for entry in entries for key, value in entry.items() if key not in ("name", "config")}
    arguments = [*files, *(f"--{key}={value}" for key, value in settings.items()), f"--seed={seed}", *extra]
    config = load(arguments)
    explicit = set(settings) | {argument.removeprefix("--").partition("=")[0] for argument in extra}
    return Planned(_name(files[0], config), arguments, config, explicit)


def _name(file: str, config: Config) -> str:
    """ "1.4b-xsa-block_size=512-global_batch_size=1024": the size's file, attention, and every setting that is not as these make
    it; but for NEUTRAL ones, which do not change what is learned."""
    plain, ours = (as_dict(c) for c in (load([file, f"--attention={config.attention}"]), config))
    parts = [Path(file).stem, config.attention]
    for key in sorted(ours, key=lambda key: key == "seed"):  # stable: the seed last
        value = ours[key]
        follows = key in DERIVED and all(c[key] == DERIVED[key](c) for c in (plain, ours))
        if value == plain[key] or follows or key in NEUTRAL - {"seed"}:
            continue
        shown = Path(str(value)).resolve().name if key == "dataset" else value
        parts.append(re.sub(r"[^\w.=+-]", "_", f"{key}={shown}"))
    name = "-".join(parts)
    if len(name) > MAX_NAME:
        digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        name = f"{name[:MAX_NAME - len(digest)]}-{digest}"
    return name


# --- reading ----------------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """Of the experiments that there are."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def paper_names() -> list[str]:
    """Of those that are the paper's figures and tables: figN and tableN."""
    return [name for name in names() if re.fullmatch(r"(fig|table)\d+", name)]


def read(name: str, scale: str) -> Experiment:
    """The experiment of that name, or in the file of that path, at a scale. Raises InputError."""
    path = Path(name) if name.endswith(".py") else FOLDER / f"{name}.py"
    if not path.exists():
        raise InputError(f"experiment: wanted all, a file, or one of {', '.join(names())} (config/experiments/), found {name!r}")
    shown = str(path.relative_to(FOLDER.parent.parent) if path.is_relative_to(FOLDER) else path)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, node, where in assignments(str(path)):
        where = where.replace(str(path), shown, 1)
        try:
            values[key] = _literal(node, values, where)
        except RecursionError:
            raise InputError(f"{where}: the expression is nested too deeply") from None
        places[key] = where
    tiny = _checked(values.pop("tiny", {}), shown, places, nested=True)
    values = _checked(values, shown, places)
    for key in ("title", "figure"):
        if key not in values:
            raise InputError(f"{shown}: {key} is missing, wanted {KEYS[key][0]}")
    if scale == "tiny":
        grid = values.get("grid", {})
        for axis, entries in tiny.get("grid", {}).items():
            if len(grid.get(axis, [])) != len(entries):
                raise InputError(f"{shown}: tiny: axis {axis!r} of grid wants as many entries as grid has, "
                                 f"{len(grid.get(axis, []))}, found {len(entries)}")
        values |= tiny | ({"grid": grid | tiny["grid"]} if "grid" in tiny else {})
        values["y_limits"] = tiny.get("y_limits", [])  # the paper's say nothing about another size
    experiment = Experiment(path.stem, shown, **values)
    axes = list(experiment.grid)
    if not experiment.compare:
        experiment = replace(experiment, compare="attention" if "attention" in axes else axes[-1] if axes else "")
    if axes and experiment.compare not in axes:
        raise InputError(f"{shown}: compare wants an axis of grid ({', '.join(axes)}), found {experiment.compare!r}")
    if not axes and experiment.figure != "block":
        raise InputError(f"{shown}: grid is missing, wanted {KEYS['grid'][0]}")
    if experiment.x and not any(all(experiment.x in entry for entry in entries) for entries in experiment.grid.values()):
        raise InputError(f"{shown}: x wants a setting that every entry of an axis of grid has, found {experiment.x!r}")
    return experiment


def _literal(node: ast.expr, names: dict[str, Any], where: str) -> Any:
    match node:
        case ast.List(elts=items):
            return [_literal(item, names, where) for item in items]
        case ast.Dict(keys=keys, values=items):
            found: dict[str, Any] = {}
            for key, item in zip(keys, items, strict=True):
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    raise InputError(f"{where}: a dictionary's keys are text, found {ast.unparse(key) if key else '**'!r:.60}")
                if key.value in found:
                    raise InputError(f"{where}: {key.value!r} stands twice in a dictionary")
                found[key.value] = _literal(item, names, where)
            return found
    return evaluate(node, names, where)


def _is_list_of(kind: type, least: int = 0) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) >= least and all(type(item) is kind for item in value)


def _is_grid(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(entries, list) and entries for entries in value.values())


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_limits(value: Any) -> bool:
    return (isinstance(value, list) and len(value) in (0, 2) and all(type(item) in (int, float) for item in value)
            and value == sorted(set(value)))


# What an experiment file may set: in words, and whether a value is it.
KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "title": ("text of one line", _is_line),
    "figure": ("one of " + ", ".join(FIGURES), lambda value: value in FIGURES),
    "base": ("a list of config files", _is_list_of(str)),
    "grid": ("a dictionary of axes, each a list of values or of dictionaries", _is_grid),
    "seeds": ("a list of whole numbers", _is_list_of(int, 1)),
    "compare": ("an axis of grid", lambda value: isinstance(value, str)),
    "x": ("a setting that grid varies", lambda value: isinstance(value, str)),
    "x_label": ("text of one line", _is_line),
    "x_scale": ("one of " + ", ".join(X_SCALES), lambda value: value in X_SCALES),
    "y_limits": ("[low, high]", _is_limits),
    "arguments": ("a list of flags", _is_list_of(str)),
}


def _checked(values: Any, path: str, places: dict[str, str], nested: bool = False) -> dict[str, Any]:
    """The values with the grid's entries as dictionaries. Raises InputError for what a file cannot say."""
    prefix = "tiny: " if nested else ""
    if not isinstance(values, dict):
        raise InputError(f"{places['tiny']}: tiny wants a dictionary, found {values!r:.80}")
    for key, value in values.items():
        where = places["tiny" if nested else key]
        if key not in KEYS:
            raise InputError(f"{where}: {prefix}wanted one of {', '.join(KEYS)}{'' if nested else ', tiny'}, found {key!r}")
        wanted, accepts = KEYS[key]
        if not accepts(value):
            raise InputError(f"{where}: {prefix}{key} wants {wanted}, found {value!r:.80}")
    if "grid" not in values:
        return values
    where = places["tiny" if nested else "grid"]
    grid = {axis: [_entry(axis, item, f"{where}: {prefix}grid, axis {axis!r}") for item in entries]
            for axis, entries in values["grid"].items()}
    seen: dict[str, str] = {}
    for axis, entries in grid.items():
        for key in {key for entry in entries for key in entry} - {"name"}:
            if seen.setdefault(key, axis) != axis:
                raise InputError(f"{where}: {prefix}grid: {key} is set by two axes, {seen[key]!r} and {axis!r}")
    return values | {"grid": grid}


def _entry(axis: str, item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        item = {axis: item}
    entry: dict[str, Any] = {}
    for key, value in item.items():
        if key in ("name", "config"):
            if not _is_line(value):
                raise InputError(f"{where}: {key} wants text of one line, found {value!r:.80}")
            entry[key] = value
        elif key in ("seed", "out_dir", "init_from"):
            raise InputError(f"{where}: {key} is not for a grid" + ("; use seeds" if key == "seed" else ""))
        else:
            entry[key] = typed_setting(key, value, where)
    return entry
