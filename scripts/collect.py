"""Pictures and tables of experiments from the runs that there are (scripts.reproduce --collect). What is missing, unfinished or
wrong is named, and what can be made of the rest is made."""

import hashlib
import json
import math
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from urllib.parse import quote

from command_line import InputError, StopRequest
from scripts.compare import FINAL_SHARE, markdown, save_text
from scripts.experiments import Cell, Experiment
from scripts.figures import Gap, Gaps, Point, baseline_of, draw_curves, draw_final, final_loss
from scripts.launch import Wanted, data_fingerprint, execute, last_words
from scripts.runs import Run, State, data_seen, other_data, read_run

SPLITS = ("train", "val")
CPU_FLOPS = 1e15  # hours: an evaluation of more than that is not begun on a CPU
TINY_NOTE = ("Scale tiny: models thousands of times too small, trained for seconds. It shows that command and picture "
             "work; no difference here says anything of a method.")
DECIDE_TOKENS = ("dataset", "sampling", "block_size", "global_batch_size")  # of a step, and the seed
NOT_DONE = "Not made, or not all of it."  # in the text of an experiment: the next collection writes over it whatever it has
AGREE = 2e-3  # nats between a checkpoint's loss on the validation windows and what its run has logged, for rounding


@dataclass
class Made:
    """What was made of an experiment: the lines of its text, whether all of it is there, what failed, and what a reader should
    know of it."""

    lines: list[str] = field(default_factory=list)
    complete: bool = False
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Command:
    """Arguments of Python, the files that it makes in the experiment's folder, and from what: runs, and by name a hash of each
    data set's content, None where it is not there."""

    argv: list[str]
    results: list[str]
    runs: list[Run] = field(default_factory=list)
    data: dict[str, str | None] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)  # device and torch version, where results depend on them

    def mark(self, argv: list[str]) -> dict[str, Any]:
        """What tells results that it has made from others, to be kept with them."""
        times = {str(p): p.stat().st_mtime_ns for run in self.runs for p in sorted(run.folder.glob("ckpt_*.pt"))}
        return {"command": argv, "checkpoints": times, "data": self.data, "machine": self.machine}

    def has_made(self, kept: dict[str, Any], mark: dict[str, Any], folder: Path) -> bool:
        """Whether the results in `folder`, with the mark `kept`, are those of `mark`. They outlive the data, and a CPU's never
        replace a GPU's."""
        gpu_s = _on_cpu(mark) and not _on_cpu(kept)
        return (all(kept.get(key) == mark[key] for key in mark if key not in ("data", *(["machine"] if gpu_s else [])))
                and all(content in (None, kept.get("data", {}).get(name)) for name, content in self.data.items())
                and all((folder / name).exists() for name in self.results))


@dataclass
class Collector:
    """One experiment's cells, the state of their runs, and where things go."""

    experiment: Experiment
    cells: list[Cell]
    wanted: dict[str, Wanted]
    args: Namespace
    stop: StopRequest

    @property
    def out(self) -> Path:
        return self.args.out

    @property
    def folder(self) -> Path:
        """Of what commands make."""
        return self.out / self.experiment.name

    @property
    def picture(self) -> Path:
        return self.out / f"{self.experiment.name}.png"

    def points(self, kinds: tuple[str, ...] = ("finished",)) -> list[Point]:
        """The grid's places, with those of their runs that are in one of these states."""
        found: dict[tuple[str, ...], Point] = {}
        for cell in self.cells:
            point = found.setdefault(tuple(cell.labels.values()), Point(cell.labels))
            wanted = self.wanted[cell.run.name]
            if wanted.state.kind in kinds:
                try:
                    point.runs[cell.run.config.seed] = read_run(wanted.folder)
                except InputError as error:  # a run that has only begun has no losses yet
                    if wanted.state.kind == "finished":
                        wanted.state = State("wrong", str(error))
        return list(found.values())

    def problems(self) -> list[str]:
        """The runs that are not finished, by name."""
        names = dict.fromkeys(cell.run.name for cell in self.cells)
        states = [(name, self.wanted[name].state) for name in names]
        return [f"**{state.kind.capitalize()}:** `{name}`, {state.text}.  " for name, state in states if state.kind != "finished"]

    def data_warnings(self) -> list[str]:
        """Of runs that are to be compared and were not trained on the same data, or not in the same order."""
        kinds = ("finished", "unfinished") if self.experiment.figure == "curves" else ("finished",)
        runs = [run for point in self.points(kinds) for run in point.runs.values()]
        alike: dict[tuple[Any, ...], list[Run]] = {}
        for run in runs:
            alike.setdefault(tuple(run.config.get(key) for key in DECIDE_TOKENS), []).append(run)
        found = other_data((run.folder, run.info) for run in runs)
        return found + [warning for group in alike.values() for warning in data_seen(group)[1]]

    # --- figures 3 to 6 -----------------------------------------------------------------------------------------------------

    def curves(self) -> Made:
        points = self.points(("finished", "unfinished"))
        if not any(point.runs for point in points):
            return Made(["No run has losses yet."])
        return self._with_table(lambda _: draw_curves(self.experiment, points, self.picture), self.points())

    def final(self) -> Made:
        points = self.points()
        if not any(point.runs for point in points):
            return Made(["No run is finished yet."])
        return self._with_table(lambda gaps: draw_final(self.experiment, points, gaps, self.picture), points)

    def _with_table(self, draw: Callable[[Gaps], None], points: list[Point]) -> Made:
        gaps, notes = self.gaps(points)
        if self.stop.signal:
            return Made(["Stopped on request before it was done."])
        draw(gaps)
        rows = [[*self.experiment.grid, "seeds", "train loss", "train difference", "val loss", "val difference"]]
        for i, point in enumerate(points):
            row = [*point.labels.values(), ", ".join(map(str, point.runs)) or "missing"]
            for split in SPLITS:
                losses = [final_loss(run, split) for run in point.runs.values()]
                is_baseline = baseline_of(self.experiment, points, point) is None
                row += [f"{mean(losses):.4f}" if losses else "n/a",
                        "baseline" if is_baseline else str(gaps[i, split]) if (i, split) in gaps else "n/a"]
            rows.append(row)
        lines = [
            f"![{self.experiment.title}]({quote(self.picture.name)})", "", markdown(rows), "",
            f"Losses in nats, means over seeds. Train: the last {FINAL_SHARE:.0%} of the logged steps; val: the last evaluation. "
            "Differences are to the baseline at the same place, ± the standard error of their mean: over seeds, paired, or with "
            "one seed over validation windows, paired (what other text would change, not what another seed would).",
        ]
        return Made(lines, complete=True, notes=notes)

    def gaps(self, points: list[Point]) -> tuple[Gaps, list[str]]:
        """Differences to the baseline, by point and split, and what a reader should know of them."""
        gaps: Gaps = {}
        notes: list[str] = []
        for i, point in enumerate(points):
            base = baseline_of(self.experiment, points, point)
            common = [seed for seed in point.runs if base is not None and seed in base.runs]
            if base is None or not common:
                continue
            for split in SPLITS:
                paired = [final_loss(point.runs[seed], split) - final_loss(base.runs[seed], split) for seed in common]
                if len(common) > 1:
                    error = stdev(paired) / math.sqrt(len(paired))
                    gaps[i, split] = Gap(mean(paired), error, f"{len(paired)} seeds")
                else:
                    gaps[i, split] = Gap(paired[0], None, "one seed")
            if len(common) == 1:
                try:
                    a, b = (self.window_losses(p.runs[common[0]], notes) for p in (base, point))
                except InputError as error:
                    notes.append(f"no standard error over validation windows: {error}")
                    continue
                from eval.paired import paired as over_windows

                result = over_windows(a, b)
                gaps[i, "val"] = Gap(result.difference, result.standard_error, f"{result.windows} windows")
        return gaps, list(dict.fromkeys(notes))

    def window_losses(self, run: Run, notes: list[str]) -> list[float]:
        """A finished run's loss on each validation window, kept in out/windows/. Raises InputError where it cannot be had."""
        from eval.paired import newest, window_losses
        from scripts.sample import choose_device

        path = newest(run.folder)
        kept = self.out / "windows" / f"{run.folder.name}.json"
        mark = {"checkpoint": path.name, "mtime_ns": path.stat().st_mtime_ns}
        saved = _load_json(kept)
        if saved.get("mark") != mark:
            if self.stop.signal:
                raise InputError("stopped on request")
            device = choose_device("auto")
            flops = run.info.get("flops_per_token", 0) / 3 * run.config.get("eval_tokens", 0)
            if device.type == "cpu" and flops > CPU_FLOPS:
                raise InputError("its windows have to be evaluated on a GPU: --collect there")
            saved = {"mark": mark, "losses": window_losses(path, device, progress=True)}
            kept.parent.mkdir(exist_ok=True)
            save_text(json.dumps(saved) + "\n", kept)
        if abs(mean(saved["losses"]) - final_loss(run, "val")) > AGREE:
            notes.append(f"{path} has a loss of {mean(saved['losses']):.4f} on the validation windows, its run logged "
                         f"{final_loss(run, 'val'):.4f}")
        return saved["losses"]

    # --- figures 1 and 2, table 2: made by commands of their own ------------------------------------------------------------

    def bias(self) -> Made:
        runs = [run for point in self.points() for run in point.runs.values()]
        if not runs:
            return Made(["No run is finished yet."])
        argv = ["-m", "eval.bias", *(str(run.folder) for run in runs), f"--out={self.folder}"]
        given = [text.removeprefix("--dataset=") for text in self.experiment.arguments if text.startswith("--dataset=")]
        data = {dataset: data_fingerprint(dataset) for dataset in given or [run.config["dataset"] for run in runs]}
        return self._by_command([Command(argv, ["bias.json", "bias.png"], runs, data)])

    def block(self) -> Made:
        argv = ["-m", "scripts.bench", "block", *self.experiment.base, f"--json={self.folder / 'block.json'}",
                f"--out={self.folder}"]
        made = self._by_command([Command(argv, ["block.json", "block.png"], machine=self._machine())])
        if made.complete and self.args.scale == "paper" and _on_cpu(_load_json(self.folder / "made_from.json")["block.json"]):
            made.notes.append("measured on a CPU, in a form cut down for it: --collect on a node with a GPU measures the paper's "
                              "sizes")
        return made

    def _machine(self) -> dict[str, str]:
        """What a command with this experiment's arguments would measure on."""
        import torch

        from scripts.sample import choose_device
        from tracker import device_name

        given = [text.removeprefix("--device=") for text in self.experiment.arguments if text.startswith("--device=")]
        return {"device": device_name(choose_device(given[-1] if given else "auto")), "torch": torch.__version__}

    def tasks(self) -> Made:
        """A command for each baseline with its variants, whose differences it tests item by item."""

        def place(labels: dict[str, str], seed: int) -> tuple[Any, ...]:
            return *(label for axis, label in labels.items() if axis != self.experiment.compare), seed

        sets: dict[tuple[Any, ...], list[Run]] = {}
        for point in self.points():
            for seed, run in point.runs.items():
                sets.setdefault(place(point.labels, seed), []).append(run)
        if not sets:
            return Made(["No run is finished yet."])
        # A set is named by its baseline's run: labels are free text, no names of files.
        baselines: dict[tuple[Any, ...], str] = {}
        for cell in self.cells:
            baselines.setdefault(place(cell.labels, cell.run.config.seed), cell.run.name)
        task_data = self.args.task_data
        given = [f"--task_data={task_data}"] if task_data else []
        data = {str(task_data): _listing(task_data)} if task_data else {}
        commands = []
        for where, runs in sets.items():
            name = f"{baselines[where]}.json"
            argv = ["-m", "eval.tasks", *(str(run.folder) for run in runs), *given, f"--json={self.folder / name}"]
            commands.append(Command(argv, [name], runs, data))

        def table(command: Command) -> str:
            from eval.tasks import read_results, report

            return report(read_results(self.folder / command.results[0]))

        return self._by_command(commands, table)

    def _by_command(self, commands: list[Command], table: Callable[[Command], str] | None = None) -> Made:
        """Runs each command unless it has made its results from these checkpoints and this data before. Shows what they print, or
        what `table` makes of each one's results."""
        self.folder.mkdir(exist_ok=True)
        kept = self.folder / "made_from.json"
        saved = _load_json(kept)
        made, lines = Made(complete=True), []
        for command in commands:
            argv = [sys.executable, *command.argv, *self.experiment.arguments]
            found = saved.get(command.results[0])
            mark = command.mark(argv)
            if not (isinstance(found, dict) and command.has_made(found, mark, self.folder)):
                print(f"{self.experiment.name}: {shlex.join(['python', *argv[1:]])}", flush=True)
                log = self.out / "logs" / f"{self.experiment.name}.log"
                output = self.folder / "output.txt"
                status = execute(argv, log, self.out, self.stop, output=output)
                if self.stop.signal:
                    return Made(["Stopped on request before it was done."], failures=made.failures)
                if status:
                    reason = last_words(log).removeprefix("error: ")
                    made.complete = False
                    made.lines.append(f"**Missing:** {reason}  ")
                    if status != 2:  # 2: what it needs is not there, which is no failure of what was made
                        made.failures.append(f"{self.experiment.name}: exit status {status}: {reason} ({log})")
                    print(f"    {reason}", flush=True)
                    continue
                found = mark | {"text": output.read_text(encoding="utf-8", errors="replace")}
                saved[command.results[0]] = found
                save_text(json.dumps(saved) + "\n", kept)
            text = (table(command) if table else found["text"]).strip()
            if text.startswith("#"):  # Markdown, to go below this file's own title
                text = "#" + text.replace("\n#", "\n##")
            elif table is None:
                text = f"```text\n{text}\n```"
            lines += [_as_typed(["python", *argv[1:]]), "", text, ""]
        if made.complete and (pictures := [name for command in commands for name in command.results if name.endswith(".png")]):
            shutil.copyfile(self.folder / pictures[0], self.picture)
            lines = [f"![{self.experiment.title}]({quote(self.picture.name)})", "", *lines]
        made.lines += [*([""] if made.lines else []), *lines]
        return made


def _as_typed(argv: list[str]) -> str:
    """A command in Markdown, to be copied into a shell."""
    return f"```sh\n{shlex.join(argv)}\n```"


def _on_cpu(mark: dict[str, Any]) -> bool:
    return str(mark.get("machine", {}).get("device", "")).startswith("cpu")


def _is_done(path: Path) -> bool:
    """Whether an earlier collection has made this text's picture or table."""
    try:
        return NOT_DONE not in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def _listing(folder: Path) -> str | None:
    """Hash of the names, sizes and times of all files in a folder."""
    if not folder.is_dir():
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [[str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def _load_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def collect(experiments: dict[str, tuple[Experiment, list[Cell]]], wanted: dict[str, Wanted], args: Namespace,
            stop: StopRequest) -> list[str]:
    """Writes NAME.md and NAME.png of every experiment, and results.md, their list. Returns what failed, wrong runs included."""
    failures: list[str] = []
    rows = [["experiment", "runs finished", "made", "missing, or to know"]]
    for name, (experiment, cells) in experiments.items():
        collector = Collector(experiment, cells, wanted, args, stop)
        make: Callable[[], Made] = getattr(collector, experiment.figure)
        made = make()
        runs = list(dict.fromkeys(cell.run.name for cell in cells))
        failures += made.failures
        warned = collector.data_warnings() + made.notes
        for warning in warned:
            print(f"warning: {name}: {warning}", file=sys.stderr)
        problems = [*collector.problems(), *(f"**Warning:** {warning}.  " for warning in warned)]
        failures += [f"{run}: {wanted[run].state.text}" for run in runs if wanted[run].state.kind == "wrong"]
        text = [f"# {experiment.title}", "", _as_typed(args.command), "",
                *([TINY_NOTE, ""] if args.scale == "tiny" else []), *problems, *([""] if problems else []),
                *([] if made.complete else [NOT_DONE, ""]), *made.lines]
        path = args.out / f"{name}.md"
        keeps = not made.complete and _is_done(path)
        if not keeps:
            save_text("\n".join(text).rstrip() + "\n", path)
        if stop.signal:
            return failures
        files = [path.name, *([collector.picture.name] if (made.complete or keeps) and collector.picture.exists() else [])]
        missing = [f"`{run}`" for run in runs if wanted[run].state.kind != "finished"]
        if len(missing) > 3:
            missing = [*missing[:2], f"{len(missing) - 2} more runs, named in {name}.md"]
        if not made.complete:
            missing.append(made.lines[0].removeprefix("**Missing:** ").rstrip())
        if warned:
            missing.append(f"{len(warned)} warnings in {name}.md")
        finished = sum(wanted[run].state.kind == "finished" for run in runs)
        rows.append([experiment.title, f"{finished} of {len(runs)}" if runs else "none wanted",
                     ", ".join(f"[{file}]({quote(file)})" for file in files) + (" of before" if keeps else "")
                     if made.complete or keeps else "nothing",
                     ", ".join(missing) or "nothing"])
        if len(experiments) == 1:
            print("\n".join(["", *text, "", f"{'kept, of before' if keeps else 'written'}: "
                             f"{', '.join(str(args.out / file) for file in files)}"]))
    if len(experiments) > 1:
        overview = f"# Results at scale {args.scale}\n\n{_as_typed(args.command)}\n\n{markdown(rows)}\n"
        save_text(overview, args.out / "results.md")
        print(f"\n{overview}\nwritten: {args.out / 'results.md'}")
    return failures
