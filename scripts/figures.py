"""Pictures of experiments (scripts.reproduce): loss curves, and final losses against a setting or by variant. The baseline is
black and the other variants have compare.py's colours; several seeds are a mean and a band from the smallest to the largest."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from scripts.compare import (
    BASELINE_COLOUR,
    COLOURS,
    DASHES,
    STYLE,
    Curve,
    Variant,
    common_curve,
    difference_curve,
    final_train_loss,
    pyplot,
    save_picture,
)
from scripts.experiments import Experiment
from scripts.runs import Run

TEXT = {"text.parse_math": False}  # a dollar sign in a label is one
SMOOTH = 0.02  # training loss is drawn as a moving average over this share of a run


@dataclass
class Point:
    """A place in an experiment's grid: its labels by axis, and its finished runs by seed."""

    labels: dict[str, str]
    runs: dict[int, Run] = field(default_factory=dict)


@dataclass(frozen=True)
class Gap:
    """A point's loss less its baseline's, in nats, with its standard error and what that is over; None and why where there is
    none."""

    value: float
    error: float | None
    over: str

    def __str__(self) -> str:
        return f"{self.value:+.4f} ± {self.error:.4f} ({self.over})" if self.error is not None else (
            f"{self.value:+.4f}, s.e. n/a ({self.over})")


def final_loss(run: Run, split: str) -> float:
    """At the end of a run: training, the mean over its last steps; validation, the last evaluation."""
    end = max(run.train)
    return final_train_loss(run, end) if split == "train" else run.val[max(run.val)]


def other_axes(experiment: Experiment) -> list[str]:
    """The axes that neither tell the variants apart nor are drawn as x."""
    return [axis for axis, entries in experiment.grid.items()
            if axis != experiment.compare and not (experiment.x and experiment.x in entries[0])]


def variants(experiment: Experiment, points: list[Point]) -> list[str]:
    """Labels on the compared axis, the baseline's first."""
    return list(dict.fromkeys(point.labels[experiment.compare] for point in points))


def _look(experiment: Experiment, points: list[Point], point: Point) -> dict[str, Any]:
    """Colour by the compared axis, dashes by the others."""
    i = variants(experiment, points).index(point.labels[experiment.compare])
    rest = list(dict.fromkeys(_rest(experiment, p) for p in points))
    colour = BASELINE_COLOUR if i == 0 else COLOURS[(i - 1) % len(COLOURS)]
    return {"color": colour, "linestyle": DASHES[rest.index(_rest(experiment, point)) % len(DASHES)]}


def _rest(experiment: Experiment, point: Point) -> str:
    return ", ".join(point.labels[axis] for axis in other_axes(experiment))


def _name(experiment: Experiment, point: Point) -> str:
    return ", ".join(filter(None, [_rest(experiment, point), point.labels[experiment.compare]]))


def _seeds(points: list[Point]) -> str:
    counts = sorted({len(point.runs) for point in points})
    if counts[-1] == 1:
        return "one seed"
    return f"mean of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds, band: smallest to largest"


def baseline_of(experiment: Experiment, points: list[Point], point: Point) -> Point | None:
    """The point that differs from this one in nothing but having the baseline's label; None for the baseline itself."""
    first = variants(experiment, points)[0]
    if point.labels[experiment.compare] == first:
        return None
    wanted = point.labels | {experiment.compare: first}
    return next(other for other in points if other.labels == wanted)


# --- loss curves ------------------------------------------------------------------------------------------------------------


def draw_curves(experiment: Experiment, points: list[Point], path: Path) -> None:
    """Training and validation loss against iteration, and below them the difference to the baseline. `points` have runs that are
    finished, or on their way."""
    plt, drawn = pyplot(), [point for point in points if point.runs]
    with plt.rc_context(STYLE | TEXT):
        figure, axes = plt.subplots(2, 2, figsize=(9, 6.6), sharex=True, layout="constrained", height_ratios=[2, 1])
        axes[0, 1].sharey(axes[0, 0])
        axes[1, 1].sharey(axes[1, 0])
        late: dict[int, list[np.ndarray]] = {0: [], 1: []}  # what the vertical axes have to hold, by row
        for column, split in enumerate(("train", "val")):
            smooth = SMOOTH if split == "train" else 0.0
            axes[0, column].set_title("Training loss, moving average" if smooth else "Validation loss")
            axes[1, column].set_xlabel("iteration")
            for point in drawn:
                look = _look(experiment, points, point)
                curve = _curve(list(point.runs.values()), split).smooth(smooth)
                late[0].append(_line(axes[0, column], point, curve, look, _name(experiment, point)))
                other = baseline_of(experiment, points, point)
                if other is not None and other.runs:
                    ours, theirs = (Variant("", list(p.runs.values())) for p in (point, other))
                    end = min(max(run.train) for run in (*ours.runs, *theirs.runs))
                    gap = difference_curve(ours, theirs, split, end).smooth(smooth)
                    late[1].append(_line(axes[1, column], point, gap, look, None))
            axes[1, column].axhline(0, color=BASELINE_COLOUR, linewidth=1)
        axes[0, 0].set(ylabel="loss (nats)", xlim=(0, None))
        baseline = variants(experiment, points)[0]
        axes[1, 0].set_ylabel(f"difference to {baseline}\n(nats)")
        _fit(axes[0, 0], late[0], experiment.y_limits)
        _fit(axes[1, 0], [*late[1], np.zeros(1)], [])
        axes[0, 0].xaxis.set_major_locator(plt.MaxNLocator(6))
        axes[0, 0].xaxis.set_major_formatter(lambda steps, _: f"{steps / 1000:g}k" if steps >= 1000 else f"{steps:g}")
        _finish(figure, axes[0, 1], f"{experiment.title} ({_seeds(drawn)})", columns=len(dict.fromkeys(
            _rest(experiment, p) for p in drawn)))
        save_picture(figure, path)


def _curve(runs: list[Run], split: str) -> Curve:
    return common_curve([getattr(run, split) for run in runs], min(max(run.train) for run in runs))


def _line(axes: Any, point: Point, curve: Curve, look: dict[str, Any], label: str | None) -> np.ndarray:
    """Draws mean and band over steps; returns the values that have to be seen, those after the first tenth: beside the first
    losses the rest would be a line."""
    steps = next(iter(point.runs.values())).steps
    x = np.array([steps[tokens] for tokens in curve.tokens])
    marks = {"marker": "o", "markersize": 3} if 1 < len(x) <= 40 else {}
    axes.plot(x, curve.values.mean(0), linewidth=1.3, label=label, **look, **marks)
    if len(curve.values) > 1:
        axes.fill_between(x, curve.values.min(0), curve.values.max(0), color=look["color"], alpha=0.15, linewidth=0)
    return curve.values[:, x >= x.max() / 10].ravel() if len(x) else np.zeros(0)


def _fit(axes: Any, values: list[np.ndarray], limits: list[float]) -> None:
    """The vertical axis as `limits` say, where nothing of the values would then be unseen; else as the values want it."""
    inside = np.concatenate([*values, limits])
    if limits and inside.min() >= limits[0] and inside.max() <= limits[1]:
        axes.set_ylim(*limits)
    elif inside.size:
        margin = 0.05 * float(np.ptp(inside)) or 0.01
        axes.set_ylim(inside.min() - margin, inside.max() + margin)


def _finish(figure: Any, axes: Any, title: str, columns: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, 4) if columns > 1 else len(labels))
    figure.suptitle(title, fontsize=11)


# --- final losses -----------------------------------------------------------------------------------------------------------

Gaps = dict[tuple[int, str], Gap]  # by a point's place in the list and "train" or "val"


def draw_final(experiment: Experiment, points: list[Point], gaps: Gaps, path: Path) -> None:
    """Final training and validation loss against x, and below them the difference to the baseline; without an x, by variant."""
    plt = pyplot()
    with plt.rc_context(STYLE | TEXT):
        if experiment.x:
            figure = _against_x(plt, experiment, points, gaps)
        else:
            figure = _by_variant(plt, experiment, points, gaps)
        save_picture(figure, path)


def _against_x(plt: Any, experiment: Experiment, points: list[Point], gaps: Gaps) -> Any:
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained", height_ratios=[2, 1])
    axes[1, 1].sharey(axes[1, 0])
    drawn = [(i, point) for i, point in enumerate(points) if point.runs]
    lines: dict[str, list[tuple[int, Point]]] = {}
    for i, point in drawn:
        lines.setdefault(_name(experiment, point), []).append((i, point))

    def x_of(point: Point) -> float:
        return next(iter(point.runs.values())).config[experiment.x]

    for column, split in enumerate(("train", "val")):
        axes[0, column].set(title="Final training loss" if split == "train" else "Final validation loss")
        axes[1, column].set_xlabel(experiment.x_label or experiment.x)
        for name, members in lines.items():
            members.sort(key=lambda member: x_of(member[1]))
            look = _look(experiment, points, members[0][1])
            losses = [[final_loss(run, split) for run in point.runs.values()] for _, point in members]
            x = [x_of(point) for _, point in members]
            axes[0, column].plot(x, list(map(mean, losses)), marker="o", markersize=4, linewidth=1.4, label=name, **look)
            axes[0, column].fill_between(x, list(map(min, losses)), list(map(max, losses)), color=look["color"], alpha=0.15,
                                         linewidth=0)
            known = [(x_of(point), gaps[i, split]) for i, point in members if (i, split) in gaps]
            if known:
                axes[1, column].errorbar(
                    [place for place, _ in known], [gap.value for _, gap in known], [_bar(gap) for _, gap in known],
                    marker="o", markersize=4, linewidth=1.2, capsize=3, **look)
        axes[1, column].axhline(0, color=BASELINE_COLOUR, linewidth=1)
        everything = np.array([final_loss(run, split) for _, point in drawn for run in point.runs.values()])
        _fit(axes[0, column], [everything], experiment.y_limits)
        _scale_x(axes[1, column], experiment, sorted({x_of(point) for _, point in drawn}))
    axes[0, 0].set_ylabel("loss (nats)")
    axes[1, 0].set_ylabel(f"difference to {variants(experiment, points)[0]}\n± 1 s.e. (nats)")
    _finish(figure, axes[0, 1], f"{experiment.title} ({_seeds([point for _, point in drawn])})", 1)
    return figure


def _bar(gap: Gap) -> float:
    return math.nan if gap.error is None else gap.error  # NaN: no bar


def _scale_x(axes: Any, experiment: Experiment, values: list[float]) -> None:
    """The paper's axes have a tick at every value and nowhere else."""
    if experiment.x_scale == "log2":
        axes.set_xscale("log", base=2)
    elif experiment.x_scale == "log":
        axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def _by_variant(plt: Any, experiment: Experiment, points: list[Point], gaps: Gaps) -> Any:
    drawn = [(i, point) for i, point in enumerate(points) if point.runs]
    figure, axes = plt.subplots(1, 2, figsize=(9, 1.6 + 0.3 * len(drawn)), sharey=True, layout="constrained")
    for place, (i, point) in enumerate(drawn):
        colour = _look(experiment, points, point)["color"]
        losses = [final_loss(run, "val") for run in point.runs.values()]
        axes[0].plot([min(losses), max(losses)], [place, place], color=colour, linewidth=4, alpha=0.3)
        axes[0].plot(mean(losses), place, marker="o", color=colour)
        if (i, "val") in gaps:
            axes[1].errorbar(gaps[i, "val"].value, place, xerr=_bar(gaps[i, "val"]), marker="o", capsize=3, color=colour)
    axes[0].set_yticks(range(len(drawn)), [_name(experiment, point) for _, point in drawn])
    axes[0].invert_yaxis()
    axes[0].set(title="Final validation loss", xlabel="loss (nats)")
    axes[1].axvline(0, color=BASELINE_COLOUR, linewidth=1)
    axes[1].set(title=f"Difference to {variants(experiment, points)[0]}, ± 1 s.e.", xlabel="difference (nats)")
    figure.suptitle(f"{experiment.title} ({_seeds([point for _, point in drawn])})", fontsize=11)
    return figure


