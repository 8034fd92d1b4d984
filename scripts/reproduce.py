"""A figure or table of the paper by its name: its runs, and from finished runs the picture and the table.

    python -m scripts.reproduce fig4                                    # what it would take: runs, commands, GPU-hours, disk
    python -m scripts.reproduce fig4 --launch=slurm --n_gpus=32         # submits what is not finished
    python -m scripts.reproduce fig4 --collect                          # fig4.png and fig4.md from the runs there are
    python -m scripts.reproduce all --scale=tiny                        # everything at CPU size: runs and collects, in minutes

Experiments are the files in config/experiments/ by name, or any such file by its path (scripts/experiments.py says how to write
one); all means the paper's: fig1 to fig6 and table2. A run that several of them want is made once, and one that is finished is
never repeated: the same command goes on where it was. Flags:
    --launch=HOW     local: one process after the other; torchrun: one run after the other on this node's --n_gpus GPUs; slurm: a
                     job each (scripts/slurm/train.sbatch)
    --collect        evaluate finished runs where the figure wants it (on this machine's GPU, if there is one), draw, tabulate
                     (what is there stays until a better one is made; what is evaluated is kept, also when this is interrupted)
    --scale=SCALE    paper, or tiny: the same experiments at sizes for two cores, on the quick start's data. Without --launch,
                     --collect or --plan it is run locally and collected
    --plan           only say what would be run
    --out=DIR        folder of runs, pictures and tables (default runs, at --scale=tiny runs/tiny)
    --seeds=A,B      a run for each of these seeds (default: the experiment's)
    --gpu=NAME --n_gpus=N --mfu=X       as in scripts.plan (default H100, 8, 0.4; at --scale=tiny one GPU)
    --task_data=DIR  for Table 2 without internet (default data/tasks, if it is there)
Every other --key=value is a setting of all runs, for train.py.

DIR/commands.txt keeps every command that was started, DIR/logs what it said; a table says which command made it. Ctrl-C: the run
that is going saves and stops.
Exit status: 0 done or stopped on request; 1 a run or an evaluation failed or is broken, the others were made; 2 bad arguments
or bad input.
"""

import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

from command_line import ArgumentParser, InputError, StopRequest, make_output_folder

if __name__ == "__main__":  # before torch is loaded, which takes seconds
    stop_request = StopRequest()

from configurator import as_dict
from scripts.experiments import SCALES, Cell, Experiment, names, paper_names, read
from scripts.launch import (
    GPUS_PER_NODE,
    Wanted,
    command,
    data_fingerprint,
    data_problems,
    launch,
    mixed_data,
    prepare_data,
    shown,
)
from scripts.runs import NEUTRAL, last_step, state_of

METRICS_LINE = 250  # bytes of a line in metrics.jsonl, roughly


# --- planning ---------------------------------------------------------------------------------------------------------------


def gather(experiments: dict[str, tuple[Experiment, list[Cell]]], out: Path) -> list[Wanted]:
    """Every run once, in the order in which the experiments name them. Raises InputError."""
    found: dict[str, Wanted] = {}
    data: dict[str, str | None] = {}  # fingerprints, of the data sets of runs that are there
    for name, (_, cells) in experiments.items():
        for cell in cells:
            run = cell.run
            if run.name not in found:
                folder, dataset = out / run.name, run.config.dataset
                if dataset not in data and (folder / "config.json").exists():
                    data[dataset] = data_fingerprint(dataset)
                found[run.name] = Wanted(run, folder, state_of(folder, as_dict(run.config), run.explicit, data.get(dataset)))
            wanted = found[run.name]
            ours, theirs = as_dict(run.config), as_dict(wanted.run.config)
            if differ := [key for key in ours if key not in NEUTRAL - {"seed"} and ours[key] != theirs[key]]:
                raise InputError(f"run {run.name}: {name} wants {differ[0]}={ours[differ[0]]}, {wanted.experiments[0]} "
                                 f"{theirs[differ[0]]}; config files with the same name want different ones, or --out")
            if name not in wanted.experiments:
                wanted.experiments.append(name)
    return list(found.values())


def describe(experiments: dict[str, tuple[Experiment, list[Cell]]], runs: list[Wanted], args: Namespace) -> str:
    """The plan as text."""
    from scripts.plan import cost

    launcher = args.launch or ("local" if args.scale == "tiny" else "torchrun")
    hours_of: dict[str, float] = {}
    rows = [["run", "state", "tokens", "GPU-hours", "disk GB", "for"]]
    totals = {"all": [0.0, 0.0, 0.0], "to do": [0.0, 0.0, 0.0]}
    for wanted in runs:
        config = wanted.run.config
        costs = cost(config, args.gpu, args.n_gpus, args.mfu)
        hours = costs["gpu_hours"] + args.n_gpus * costs["evaluation_hours"]
        hours_of[wanted.run.name] = hours
        disk = (costs["run_folder_bytes"] + METRICS_LINE * config.max_iters / config.log_interval) / 1e9
        state = wanted.state
        rows.append([wanted.run.name, state.kind if state.kind in ("missing", "finished") else f"{state.kind}: {state.text}",
                     _short(costs["tokens"]), _number(hours), _number(disk), " ".join(wanted.experiments)])
        left = {"missing": 1.0, "unfinished": 1 - last_step(wanted.folder) / config.max_iters}.get(state.kind, 0.0)
        for key, share in (("all", 1.0), ("to do", left)):
            more = share * costs["tokens"], share * hours, disk * (share > 0)
            totals[key] = [total + part for total, part in zip(totals[key], more, strict=True)]
    for key, (tokens, hours, disk) in totals.items():
        rows.append([key, "", _short(tokens), _number(hours), _number(disk), ""])
    lines = []
    for name, (experiment, cells) in experiments.items():
        mine = {cell.run.name for cell in cells}
        takes = f"{len(mine)} runs, {_number(sum(hours_of[run] for run in mine))} GPU-hours" if mine else "nothing to train"
        lines.append(f"{name:8}  {experiment.title} ({experiment.path}): {takes}")
    if runs:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [""] + ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += ["", f"GPU-hours: training and evaluation at {args.mfu:.0%} of the bf16 peak of {args.gpu}, which is assumed.",
                  f"Disk: a run's checkpoints while the newest is being written, and its metrics, under {args.out}/"]
        if todo := [wanted for wanted in runs if wanted.state.kind in ("missing", "unfinished")]:
            lines += ["", f"{len(todo)} of {len(runs)} runs to be made:"]
            lines += [shown(command(wanted, launcher, args.n_gpus)) for wanted in todo]
        lines += [f"note: {problem}" for problem in data_problems(runs)]
        lines += [f"warning: {warning}" for warning in mixed_data(runs)]
    return "\n".join(lines)


def _short(n: float) -> str:
    return next((f"{n / unit:.4g}{letter}" for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if n >= unit), f"{n:.0f}")


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}" if x >= 0.01 or x == 0 else "< 0.01"


# --- command ----------------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[Namespace, list[str]]:
    """The arguments, and train.py's settings among them. Raises InputError."""
    from scripts.plan import check_machine

    parser = ArgumentParser(prog="python -m scripts.reproduce", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="EXPERIMENT", help=f"{', '.join(names())}, all, or a file")
    parser.add_argument("--launch", choices=("local", "torchrun", "slurm"))
    parser.add_argument("--collect", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--scale", choices=SCALES, default="paper")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--seeds", metavar="A,B")
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--n_gpus", type=int)
    parser.add_argument("--mfu", type=float, default=0.4)
    parser.add_argument("--task_data", type=Path, metavar="DIR")
    args, extra = parser.parse_known_args(argv)
    args.command = ["python", "-m", "scripts.reproduce", *argv]
    for argument in extra:
        if not argument.startswith("--") or "=" not in argument:
            raise InputError(f"wanted --key=value, found {argument!r} (see --help)")
    tiny = args.scale == "tiny"
    if args.launch == "local" and (args.n_gpus or 1) > 1:
        raise InputError(f"--launch=local is one process a run, found --n_gpus={args.n_gpus}; use --launch=torchrun")
    if args.n_gpus is None:
        args.n_gpus = 1 if tiny else GPUS_PER_NODE
    args.gpu = check_machine(args.gpu, args.n_gpus, args.mfu)
    if args.plan and (args.launch or args.collect):
        raise InputError("--plan only says what would be run: wanted without --launch and --collect")
    if tiny and not (args.plan or args.launch or args.collect):
        args.launch, args.collect = "local", True
    if args.launch == "slurm":
        if args.n_gpus > GPUS_PER_NODE and args.n_gpus % GPUS_PER_NODE:
            raise InputError(f"--n_gpus: wanted whole nodes of {GPUS_PER_NODE}, found {args.n_gpus}")
        if missing := [name for name in ("sbatch", "squeue") if shutil.which(name) is None]:
            raise InputError(f"--launch=slurm: {missing[0]} is not on this machine; start it where jobs are submitted")
        if args.collect:
            raise InputError("--collect: wanted once the jobs are done, not with --launch=slurm")
    args.out = args.out or Path("runs/tiny" if tiny else "runs")
    nearest = next(path for path in (args.out, *args.out.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise InputError(f"--out: wanted a folder, {nearest} is none")
    try:
        args.seeds = args.seeds and [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
        raise InputError(f"--seeds: wanted whole numbers, A,B,C, found {args.seeds!r}") from None
    if args.seeds and len(set(args.seeds)) < len(args.seeds):
        raise InputError(f"--seeds: one is given twice in {args.seeds}")
    if args.task_data is None and Path("data/tasks").is_dir():
        args.task_data = Path("data/tasks")
    return args, extra


def reproduce(args: Namespace, extra: list[str], stop: StopRequest) -> list[str]:
    """Does what the arguments ask for; returns what failed. Raises InputError before any run is started."""
    chosen = dict.fromkeys(name for given in args.names for name in (paper_names() if given == "all" else [given]))
    read_ones = [read(name, args.scale) for name in chosen]
    if len({experiment.name for experiment in read_ones}) < len(read_ones):
        raise InputError(f"experiments: wanted files with different names, found {', '.join(e.path for e in read_ones)}")
    experiments = {e.name: (e, e.cells(extra, args.seeds)) for e in read_ones}
    runs = gather(experiments, args.out)
    for wanted in runs if args.launch or not args.collect else []:
        try:
            wanted.run.config.accumulation(1 if args.launch == "local" else args.n_gpus)
        except InputError as error:
            ranks = f"ranks are --n_gpus={args.n_gpus}, or 1 with --launch=local"
            raise InputError(f"run {wanted.run.name}: {error} ({ranks})") from None
    if not args.launch and not args.collect:
        print(describe(experiments, runs, args))
        return []
    made = [f"{name}.{kind}" for name in experiments for kind in ("md", "png")] if args.collect else []
    make_output_folder("--out", args.out, ["commands.txt", *made, *(["results.md"] if len(made) > 2 else [])])
    failures: list[str] = []
    if args.launch and runs and not stop.signal:
        prepare_data(runs, args.out, stop)
        if not stop.signal:
            failures += launch(runs, args, stop)
    if args.collect and not stop.signal:
        from scripts.collect import collect

        failures += collect(experiments, {w.run.name: w for w in runs}, args, stop)
    if stop.signal:
        print("stopped on request; the same command goes on from here")
    return list(dict.fromkeys(failures))  # a wrong run fails the launch, and every experiment that wants it


def main(argv: list[str], stop: StopRequest | None = None) -> int:
    stop = stop or StopRequest()
    try:
        args, extra = parse(argv)
        failures = reproduce(args, extra, stop)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        stop.restore()
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], stop_request))
