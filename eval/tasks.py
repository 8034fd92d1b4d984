"""The paper's Table 2: checkpoints scored on its eight downstream tasks, 0-shot, by EleutherAI's lm-evaluation-harness.

    python -m eval.tasks runs/1.4b-sa runs/1.4b-xsa --json=results/1.4b.json
    torchrun --nproc_per_node=8 -m eval.tasks runs/1.4b-sa runs/1.4b-xsa --json=results/1.4b.json
    python -m eval.tasks runs/quick-sa runs/quick-xsa --task_data=data/tasks --limit=100     # without internet, on a CPU
    python -m eval.tasks results/sa.json results/xsa.json                                    # compares what was scored before

Each CHECKPOINT is a run's folder (its newest checkpoint), a checkpoint file, or a JSON file that this command wrote. Prints each
one's row beside the paper's row of the nearest size, in percent with standard errors over items, and for every checkpoint after
the first its difference to the first, item by item: both answered the same questions, and what is hard for one is hard for the
other, so that two separate error bars would hide most of what can be seen. A task's p is McNemar's exact test on the items that
only one of the two got right; the average's is the same test over all tasks together (signs of the items' differences flipped
at random). They speak of these two checkpoints; another seed's would differ by more than that.

--json=FILE keeps everything, each item's answers included, and is written anew after each checkpoint; where FILE is there
already, also as an input, FILE's neighbour NAME.unfinished.json is, and takes its place when all are scored.
Needs requirements-eval.txt. Exit status: 0 done; 1 a failure; 2 bad arguments or bad input, found before any work starts.
"""

import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import distributed
from checkpoint import until_done, write_aside
from command_line import ArgumentParser, InputError, make_output_folder
from configurator import Config
from data.tokenizer import NAMES
from distributed import Ranks
from eval.local_data import TASKS, check_names
from scripts.sample import Source, open_source
from tracker import git_commit
from train import autocast_dtype

FORMAT = 1  # of the JSON file
FLIPS = 200_000
COLUMNS = {"arc_easy": "ARC-E", "boolq": "BoolQ", "hellaswag": "HSwag", "lambada_openai": "LAMBADA", "openbookqa": "OBQA",
           "piqa": "PIQA", "social_iqa": "SocIQA", "winogrande": "WinoGr"}
# Table 2: size, non-embedding parameters, variant, and the tasks in the order of COLUMNS.
PAPER = [
    ("0.7B", 0.679e9, "sa", (51.26, 61.07, 55.68, 52.82, 35.00, 74.05, 40.02, 55.88)),
    ("0.7B", 0.679e9, "xsa", (52.69, 61.19, 56.29, 54.07, 32.20, 73.78, 41.45, 56.20)),
    ("1.4B", 1.409e9, "sa", (56.19, 65.47, 60.69, 56.24, 34.60, 75.90, 41.40, 58.80)),
    ("1.4B", 1.409e9, "xsa", (58.84, 62.29, 62.41, 58.57, 36.00, 76.61, 42.84, 59.98)),
    ("2.7B", 2.684e9, "sa", (58.59, 60.98, 66.20, 60.18, 37.00, 76.61, 42.94, 61.96)),
    ("2.7B", 2.684e9, "xsa", (60.65, 64.86, 67.40, 62.04, 38.40, 77.80, 41.45, 62.75)),
]


# --- statistics -------------------------------------------------------------------------------------------------------------


@dataclass
class Difference:
    """Of two checkpoints' scores on the same items: mean, its standard error, and a two-sided p (None: no item differs)."""

    mean: float
    stderr: float
    p: float | None


def paired(a: Sequence[int], b: Sequence[int]) -> Difference:
    """b - a on one task, from each item's 0 or 1 in the same order. p is McNemar's exact test: of the items that one of the two
    alone got right, each could as well have been the other's."""
    d = np.subtract(b, a)
    won, lost = int((d > 0).sum()), int((d < 0).sum())
    p = None
    if m := won + lost:
        tail = ways = 1  # of choosing k of the m, summed over k up to the smaller side
        for k in range(min(won, lost)):
            ways = ways * (m - k) // (k + 1)
            tail += ways
        p = min(1.0, 2 * tail / 2**m)
    return Difference(float(d.mean()), float(d.std(ddof=1) / math.sqrt(len(d))) if len(d) > 1 else math.nan, p)


def paired_average(tasks: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Difference:
    """b - a of the tasks' unweighted average. p is the sign-flip test that McNemar's is for one task: FLIPS draws, in each of
    which every item that tells the two apart is given to either with probability 1/2."""
    each = [paired(a, b) for a, b in tasks]
    mean = sum(difference.mean for difference in each) / len(each)
    stderr = math.sqrt(sum(difference.stderr**2 for difference in each)) / len(each)
    apart = [int(np.not_equal(a, b).sum()) for a, b in tasks]
    if not any(apart):
        return Difference(mean, stderr, None)
    rng = np.random.default_rng(0)
    flipped = sum((2 * rng.binomial(m, 0.5, FLIPS) - m) / len(a) for m, (a, _) in zip(apart, tasks, strict=True)) / len(each)
    extreme = int((np.abs(flipped) >= abs(mean) - 1e-12).sum())
    return Difference(mean, stderr, (extreme + 1) / (FLIPS + 1))


# --- results ----------------------------------------------------------------------------------------------------------------


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results in a JSON file of this command. Raises InputError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, wanted {FORMAT}")
        if not content["results"]:
            raise ValueError("it has no results")
        for result in content["results"]:
            for key, kind in (("checkpoint", str), ("step", int), ("config", dict), ("n_params", int), ("tasks", dict)):
                if not isinstance(result[key], kind):
                    raise ValueError(f"{key} is {result[key]!r:.80}")
            _ = result["config"]["attention"], result["limit"]
            if result["n_params"] < 1 or not result["tasks"]:
                raise ValueError("a result is of no weights, or of no task")
            for task, scores in result["tasks"].items():
                metric = TASKS[task].metric
                _ = scores[f"{metric}_stderr"]
                ids, right = scores["items"]["id"], scores["items"][metric]
                if not 0 < len(ids) == len(right) or {*right} - {0, 1} or not 0 <= scores[metric] <= 1:
                    raise ValueError(f"its items of {task} are not whole")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{path} is not a JSON file of python -m eval.tasks: {what}") from None
    return content["results"]


def check_items(result: dict[str, Any], ids: dict[str, list[str]]) -> None:
    """Raises InputError unless a result is on the same tasks and items."""
    for task in sorted(ids.keys() ^ result["tasks"].keys()):
        raise InputError(f"{result['checkpoint']} cannot be compared: task {task} is scored for one and not for the other; "
                         f"use --tasks={','.join(result['tasks'])}")
    for task, wanted in ids.items():
        found = result["tasks"][task]["items"]["id"]
        if found != wanted:
            raise InputError(f"{result['checkpoint']} cannot be compared: its {len(found)} items of {task} are not the "
                             f"{len(wanted)} of the other; use the same --limit and --task_data")


# --- tables -----------------------------------------------------------------------------------------------------------------


def score_of(result: dict[str, Any], task: str) -> tuple[float, float | None]:
    """A result's score on a task by the paper's metric, and its standard error (None with one item)."""
    scores, metric = result["tasks"][task], TASKS[task].metric
    return scores[metric], scores[f"{metric}_stderr"]


def cell(value: float, stderr: float | None) -> str:
    return f"{100 * value:.2f}" + ("" if stderr is None or math.isnan(stderr) else f" ({100 * stderr:.2f})")


def report(results: list[dict[str, Any]]) -> str:
    """Markdown: scores beside the paper's, then differences to the first."""
    tasks = list(results[0]["tasks"])
    whole = len(tasks) == len(COLUMNS)
    names = [COLUMNS[task] for task in tasks] + ["Avg" if whole else f"Avg of {len(tasks)}"]

    def row(label: str, cells: list[str]) -> str:
        return "| " + " | ".join([label, *cells]) + " |"

    lines = ["Percent (standard error over items); " + ", ".join(f"{COLUMNS[task]} {TASKS[task].metric}" for task in tasks), "",
             row("model", names), row("---", ["---:"] * len(names))]
    papers = []
    for result in results:
        scores = [score_of(result, task) for task in tasks]
        stderrs = [e for _, e in scores if e is not None]
        mean = sum(v for v, _ in scores) / len(scores)
        stderr = math.sqrt(sum(e * e for e in stderrs)) / len(scores) if len(stderrs) == len(scores) else None
        lines.append(row(label(result), [cell(*pair) for pair in [*scores, (mean, stderr)]]))
        papers.append(paper_row(result, tasks))
    for size, variant, values in dict.fromkeys(papers):
        lines.append(row(f"paper, {size} {variant}", [f"{v:.2f}" for v in [*values, sum(values) / len(values)]]))
    if any(result["limit"] for result in results):
        lines += ["", "Not all items were used (--limit): no numbers to set against the paper's."]
    first = results[0]
    for result in results[1:]:
        pairs = [tuple(r["tasks"][task]["items"][TASKS[task].metric] for r in (first, result)) for task in tasks]
        differences = [*(paired(a, b) for a, b in pairs), paired_average(pairs)]
        lines += ["", f"{label(result)} - {label(first)}, paired over items", "", row("", names),
                  row("---", ["---:"] * len(names)),
                  row("difference", [cell(d.mean, d.stderr) for d in differences]),
                  row("p", ["n/a" if d.p is None else f"{d.p:.2g}" for d in differences])]
        variants = [paper_row(r, tasks) for r in (first, result)]
        if variants[0][0] == variants[1][0] and variants[0][1] != variants[1][1]:
            changes = [b - a for a, b in zip(variants[0][2], variants[1][2], strict=True)]
            lines.append(row(f"paper, {variants[0][0]}", [f"{v:.2f}" for v in [*changes, sum(changes) / len(changes)]]))
    return "\n".join(lines)


def label(result: dict[str, Any]) -> str:
    n = result["n_params"]
    size = next(f"{n / unit:.3g}{name}" for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1, "")) if n >= unit)
    return f"{result['config']['attention']}, {size}, {result['checkpoint']}, step {result['step']:,}"


def paper_row(result: dict[str, Any], tasks: list[str]) -> tuple[str, str, tuple[float, ...]]:
    """The paper's size, variant and scores nearest to a result: the same variant, or its baseline for one it does not have."""
    variant = "xsa" if result["config"]["attention"] == "xsa" else "sa"
    rows = [row for row in PAPER if row[2] == variant]
    size, _, _, values = min(rows, key=lambda row: abs(math.log(row[1] / result["n_params"])))
    by_task = dict(zip(COLUMNS, values, strict=True))
    return size, variant, tuple(by_task[task] for task in tasks)


# --- command ----------------------------------------------------------------------------------------------------------------


def open_all(places: list[Path], tokenizer: str | None) -> list[list[dict[str, Any]] | Source]:
    """What each argument names: results of an earlier command, or a model, its weights on the disk until they are used."""
    opened: list[list[dict[str, Any]] | Source] = []
    for place in places:
        if place.suffix == ".json":
            opened.append(read_results(place))
            continue
        source = open_source(place, tokenizer, torch.device("cpu"))
        if source.tokenizer.vocab_size > (rows := source.model.config.vocab_size):
            raise InputError(f"{source.path} has vocab_size={rows}, tokenizer {source.tokenizer.name} has "
                             f"{source.tokenizer.vocab_size} ids; is it the one that the model was trained with?")
        opened.append(source)
    return opened


def score_checkpoint(source: Source, tasks: dict[str, Any], args: Any, ranks: Ranks) -> dict[str, Any]:
    """One checkpoint's result on every task."""
    import lm_eval

    from eval.harness import HarnessModel, score

    device = ranks.device
    dtype = autocast_dtype(args.dtype, device)
    model = source.model.to(device)
    lm = HarnessModel(model, source.tokenizer, ranks, batch_tokens=args.batch_tokens, progress=True,
                      autocast=nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype=dtype))
    begin = time.perf_counter()
    scores = {}
    for name, task in tasks.items():
        scores[name] = score(lm, task)
        if ranks.is_master:
            print(f"  {name}: {TASKS[name].metric} {cell(*score_of({'tasks': scores}, name))}, {scores[name]['n']:,} items, "
                  f"{time.perf_counter() - begin:.0f} s", flush=True)
    settings = torch.load(source.path, map_location="cpu", weights_only=True, mmap=True)["config"]
    return {
        "checkpoint": str(source.path), "step": source.step, "config": settings, "n_params": model.num_params(),
        "tokenizer": source.tokenizer.name, "limit": args.limit, "num_fewshot": 0,
        "task_data": str(args.task_data) if args.task_data else None, "dtype": str(dtype or torch.float32).removeprefix("torch."),
        "harness": f"lm-eval {lm_eval.__version__}", "torch": torch.__version__, "git_commit": git_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": round(time.perf_counter() - begin, 1),
        "tasks": scores,
    }


def run(args: Any, ranks: Ranks) -> None:
    """Raises InputError before the first model is run."""
    opened, tasks, fault = [], {}, None
    try:
        if args.json and ranks.is_master:
            make_output_folder(f"--json={args.json}", args.json.parent, [args.json.name])
        opened = open_all(args.checkpoints, args.tokenizer)
        saved = [result for group in opened if isinstance(group, list) for result in group]
        if any(isinstance(source, Source) for source in opened):
            from eval import harness

            tasks = harness.load_tasks(args.tasks, args.task_data, args.limit)
            ids = {name: [identity for identity, _, _ in harness.items(task)] for name, task in tasks.items()}
        else:
            ids = {name: scores["items"]["id"] for name, scores in saved[0]["tasks"].items()} if saved else {}
        for result in saved:
            check_items(result, ids)
    except Exception as error:
        fault = error
    ranks.agree(fault)
    if ranks.is_master and tasks:
        n_requests = sum(len(task.instances) for task in tasks.values())
        print(f"{len(tasks)} tasks, {sum(len(i) for i in ids.values()):,} items, {n_requests:,} requests, {ranks.world_size} x "
              f"{ranks.device}, {args.batch_tokens:,} tokens a batch", flush=True)
    meanwhile = until_done(args.json) if args.json else None

    groups: list[list[dict[str, Any]]] = [source if isinstance(source, list) else [] for source in opened]

    def keep() -> None:
        if meanwhile and ranks.is_master:
            write_aside(meanwhile, json.dumps({"format": FORMAT, "results": sum(groups, [])}) + "\n")

    for source, group in zip(opened, groups, strict=True):
        if isinstance(source, list):
            continue
        if ranks.is_master:
            print(f"{source.path}, step {source.step}, {source.model.config.attention}", flush=True)
        group.append(score_checkpoint(source, tasks, args, ranks))
        source.model.to("meta")  # frees it for the next one
        keep()
    keep()  # also where nothing had to be scored
    if ranks.is_master:
        if meanwhile:
            meanwhile.replace(args.json)
        print(f"\n{report(sum(groups, []))}" + (f"\n\nwritten: {args.json}" if args.json else ""))


def parse(argv: list[str]) -> Any:
    parser = ArgumentParser(prog="python -m eval.tasks", description=__doc__)
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="a run, a checkpoint or a JSON file")
    parser.add_argument("--tasks", default=",".join(COLUMNS), metavar="A,B", help=f"some of {','.join(COLUMNS)} (default: all)")
    parser.add_argument("--limit", type=int, metavar="N", help="only each task's first N items")
    parser.add_argument("--task_data", type=Path, metavar="DIR", help="python -m eval.local_data's folder; default: the hub")
    parser.add_argument("--batch_tokens", type=int, default=16_384, metavar="N", help="tokens of a forward pass (default 16384)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results here")
    parser.add_argument("--tokenizer", choices=NAMES, help="default: the one that the checkpoint names")
    parser.add_argument("--device", default="auto", help="as in train.py (default auto)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16, as in train.py (default auto)")
    args = parser.parse_args(argv)
    args.tasks = args.tasks.split(",")
    check_names(args.tasks)
    for key in ("limit", "batch_tokens"):
        if (value := getattr(args, key)) is not None and value < 1:
            raise InputError(f"--{key}: wanted at least 1, found {value}")
    if args.dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise InputError(f"--dtype: wanted auto, float32, bfloat16 or float16, found {args.dtype!r}")
    try:
        # Results are gathered as objects, once for each task: gloo does it on any device, and a rank may be hours behind.
        args.config = Config(device=args.device, backend="gloo", dist_timeout=24 * 3600)
    except ValueError as error:
        raise InputError(f"--{error}") from None
    return args


def main(argv: list[str]) -> int:
    ranks = None
    try:
        args = parse(argv)
        ranks = distributed.start(args.config)
        run(args, ranks)
    except InputError as error:
        if distributed.is_local_master() or ranks is not None:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        if ranks is not None:
            ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
