"""EleutherAI's lm-evaluation-harness over our GPT: its model interface, its tasks, and the scores of one on the other.

    tasks = load_tasks(["hellaswag"], task_data=Path("data/tasks"), limit=500)
    result = score(HarnessModel(model, tokenizer, ranks), tasks["hellaswag"])     # result["acc_norm"], result["items"], ...

The harness makes the prompts and judges the answers; the model is asked for the log-likelihoods here, through its forward pass
alone, whatever its attention variant. `python -m eval.tasks` is the command, train.py's `eval_tasks` the other user. Importing
this module needs lm-eval (requirements-eval.txt).
"""

import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from tqdm import tqdm

from command_line import InputError
from data.tokenizer import Tokenizer
from distributed import Ranks
from eval.local_data import TASKS, check_names, go_offline_where_no_hub_answers
from model import GPT, loss_rows

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise InputError(f"downstream tasks need lm-eval ({error}): pip install -r requirements-eval.txt") from None

# Where lm_eval/tasks/ has them.
_TASK_FOLDERS = ("arc", "super_glue/boolq", "hellaswag", "lambada", "openbookqa", "piqa", "siqa", "winogrande")
BATCH_TOKENS = 16_384  # of a forward pass: its logits are never held, so that a GPU's memory takes more

Window = tuple[list[int], list[int]]  # context ids, of which there is one at least, and the ids to be predicted after them


class Stopped(Exception):
    """`should_stop` said so; there is no result."""


# --- the model interface ----------------------------------------------------------------------------------------------------


class HarnessModel(TemplateLM):
    """The harness's view of a GPT: log-likelihoods, in nats, of continuations given contexts.

    As the harness's own backends do it: context and continuation are encoded together and split, with the context's trailing
    spaces given to the continuation (TemplateLM); the context loses its beginning where both are longer than block_size; an
    empty one is a single EOT. A continuation that is itself longer than block_size is predicted window by window, as
    loglikelihood_rolling does it. Probabilities are the model's own, over all rows of its embedding, padding rows included, as
    in the training loss; "greedy" means the likeliest of the tokenizer's ids. Matrix products are in autocast's dtype but for
    the last one, whose logits are fp32: in bf16 many would tie.

    Equal inputs are computed once (BoolQ's two answers follow one passage). Batches are made of inputs of like length, at most
    `batch_tokens` tokens with their padding, and dealt to the ranks: results do not depend on the number of ranks, and on
    batch_tokens within rounding. All ranks must make the same calls, and all get all results. `should_stop` is asked before
    each batch, on all ranks equally often; the model's train or eval mode is left as it was."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        ranks: Ranks,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        batch_tokens: int = BATCH_TOKENS,
        should_stop: Callable[[], bool] = lambda: False,
        progress: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.encoder, self.ranks, self.autocast = model, tokenizer, ranks, autocast
        self.batch_tokens, self.should_stop, self.progress = batch_tokens, should_stop, progress

    @property
    def eot_token_id(self) -> int:
        return self.encoder.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.encoder.encode([string])[0].tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._score([self._windows(context or [self.eot_token_id], ids) for _, context, ids in requests])

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return [total for total, _ in self._score([self._rolling(self.eot_token_id, ids) for ids in texts])]

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        raise NotImplementedError("tasks that generate text are not served; the paper's eight score continuations")

    def _windows(self, context: list[int], ids: list[int]) -> list[Window]:
        if len(ids) <= self.model.config.block_size:
            return [(context, ids)]
        return self._rolling(context[-1], ids)

    def _rolling(self, before: int, ids: list[int]) -> list[Window]:
        """Every id predicted once, each window but the first with all the context that block_size leaves it."""
        return [make_disjoint_window(pair) for pair in get_rolling_token_windows(ids, before, self.model.config.block_size, 1)]

    def _score(self, requests: Sequence[list[Window]]) -> list[tuple[float, bool]]:
        """For each request, whose windows are predicted independently: their log-likelihood, and whether every id was greedy."""
        by_input: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for number, windows in enumerate(requests):
            for context, ids in windows:
                inputs = tuple((context + ids[:-1])[-self.model.config.block_size :])
                by_input.setdefault(inputs, []).append((number, ids))
        batches = list(self._batches(by_input))
        mine: list[tuple[int, float, bool]] = []
        training = self.model.training
        self.model.eval()
        try:
            for start in tqdm(range(0, len(batches), self.ranks.world_size), unit="batch", leave=False, dynamic_ncols=True,
                              disable=None if self.progress and self.ranks.is_master else True):
                if self.should_stop():
                    raise Stopped
                if (at := start + self.ranks.rank) < len(batches):
                    mine += self._score_batch([(inputs, by_input[inputs]) for inputs in batches[at]])
        finally:
            self.model.train(training)
        totals: list[list[float]] = [[] for _ in requests]
        greedy = [True] * len(requests)
        for part in self.ranks.gather_objects(mine):
            for number, logp, is_greedy in part:
                totals[number].append(logp)
                greedy[number] &= is_greedy
        return [(math.fsum(parts), flag) for parts, flag in zip(totals, greedy, strict=True)]  # fsum: no order, no rounding

    def _batches(self, inputs: Iterable[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Longest first: if memory runs out, it does so at once."""
        batch: list[tuple[int, ...]] = []
        for row in sorted(inputs, key=len, reverse=True):
            if batch and (len(batch) + 1) * len(batch[0]) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    @torch.no_grad()
    def _score_batch(self, batch: list[tuple[tuple[int, ...], list[tuple[int, list[int]]]]]) -> list[tuple[int, float, bool]]:
        """(request, log-likelihood, greedy) of every continuation of every input. Padding is on the right, where a causal model
        does not see it."""
        device = self.model.wte.weight.device
        idx = torch.full((len(batch), len(batch[0][0])), self.eot_token_id)
        rows, columns, targets = [], [], []
        for row, (inputs, continuations) in enumerate(batch):
            idx[row, : len(inputs)] = torch.tensor(inputs)
            for _, ids in continuations:
                rows += [row] * len(ids)
                columns += range(len(inputs) - len(ids), len(inputs))
                targets += ids
        with self.autocast():
            hidden = self.model._hidden(idx.to(device))
        with torch.autocast(device.type, enabled=False):
            logps, hits = self._of_targets(hidden[rows, columns].float(), torch.tensor(targets, dtype=torch.long, device=device))
        results, start = [], 0
        for _, continuations in batch:
            for number, ids in continuations:
                span = slice(start, start + len(ids))
                results.append((number, math.fsum(logps[span]), all(hits[span])))
                start += len(ids)
        return results

    def _of_targets(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[list[float], list[bool]]:
        """log p of targets (N,) after hidden (N, C), and whether each is the likeliest id, a few rows of logits at a time."""
        logps, hits = [], []
        for x, target in zip(*(t.split(loss_rows(t.device)) for t in (hidden, targets)), strict=True):
            logits = F.linear(x, self.model.wte.weight.float())
            logps += (logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
            hits += (logits[:, : self.encoder.vocab_size].argmax(-1) == target).tolist()
        return logps, hits


# --- tasks ------------------------------------------------------------------------------------------------------------------


def load_tasks(names: Sequence[str], task_data: Path | None = None, limit: int | None = None) -> dict[str, Any]:
    """The harness's tasks with their requests, 0-shot, of the first `limit` items each; from the folder `task_data` (made by
    python -m eval.local_data), or from the hub and its cache. Raises InputError, at once where there is no internet."""
    check_names(names)
    advice = "python -m eval.local_data makes a folder for --task_data (--help; in train.py: eval_tasks_data)"
    if task_data is None:
        go_offline_where_no_hub_answers()
    else:
        for name in names:
            if not (folder := task_data / TASKS[name].path).is_dir():
                raise InputError(f"task {name}: there is no folder {folder}; {advice}")
    tasks = {}
    for name in names:
        folder = task_data / TASKS[name].path if task_data else None
        try:
            # A data set's name is a path first, then the hub's. The harness's bars and warnings about its own files are no use.
            with _cache_of(folder), redirect_stderr(io.StringIO()), chdir(task_data or Path()):
                task = _task_manager().load([name])["tasks"][name]
                task.set_config(key="num_fewshot", value=0)
                task.build_all_requests(limit=limit)
        except Exception as error:  # datasets raises many kinds, by what is missing
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            place = folder or f"{TASKS[name].path} on the hub, nor from its cache"
            raise InputError(f"task {name}: no data from {place} ({reason}); {advice}") from error
        tasks[name] = task
    return tasks


@contextmanager
def _cache_of(folder: Path | None) -> Iterator[None]:
    """A cache of its own for this content of a local folder: datasets itself goes by the README alone, and would give the rows
    that another folder of that name, or this one before a change, has had."""
    if folder is None:
        yield
        return
    import datasets

    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    usual = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = Path(usual) / f"task_data_{digest.hexdigest()[:16]}"
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = usual


@cache
def _task_manager() -> Any:
    """Knows the eight tasks; to read the files of all that the harness has would take seconds."""
    import datasets
    import lm_eval.tasks

    datasets.disable_progress_bars()
    root = Path(lm_eval.tasks.__file__).parent
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=[root / folder for folder in _TASK_FOLDERS])


def items(task: Any) -> list[tuple[str, Any, list[Any]]]:
    """(id, document, requests) of a task's items. The id is a digest of all that the model is asked, so that equal ids mean
    equal items, whatever file they came from."""
    requests: dict[int, list[Any]] = {}
    for instance in task.instances:
        requests.setdefault(instance.doc_id, []).append(instance)
    found = []
    for instances in requests.values():
        instances.sort(key=lambda instance: instance.idx)
        doc = instances[0].doc
        asked = json.dumps([[instance.args for instance in instances], _gold(task, doc, len(instances))])
        found.append((hashlib.sha256(asked.encode()).hexdigest()[:16], doc, instances))
    return found


def _gold(task: Any, doc: Any, n_choices: int) -> int:
    """Which of an item's requests holds the right answer."""
    if n_choices == 1:
        return 0
    return task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)


def score(lm: TemplateLM, task: Any) -> dict[str, Any]:
    """The model's result on a task of load_tasks: `n`, each metric with its standard error, `loss` (mean negative
    log-likelihood of the right answer, nats), the task's `version`, and `items`: columns `id`, `gold`, `loglikelihoods` (of
    each choice) and each metric's 0 or 1. Raises Stopped."""
    found = items(task)
    answers = iter(lm.loglikelihood([instance for _, _, instances in found for instance in instances], disable_tqdm=True))
    columns: dict[str, list[Any]] = {"id": [], "gold": [], "loglikelihoods": []}
    for identity, doc, instances in found:
        given = [next(answers) for _ in instances]
        row = {"id": identity, "gold": _gold(task, doc, len(instances)), "loglikelihoods": [logp for logp, _ in given]}
        judged = task.process_results(doc, given)
        row |= {metric: int(judged[metric]) for metric in ("acc", "acc_norm") if metric in judged}
        for key, value in row.items():
            columns.setdefault(key, []).append(value)
    n = len(found)
    result: dict[str, Any] = {"n": n, "version": task.VERSION}
    for metric in ("acc", "acc_norm"):
        if metric in columns:
            mean = sum(columns[metric]) / n
            result[metric] = mean
            result[f"{metric}_stderr"] = math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None
    pairs = zip(columns["loglikelihoods"], columns["gold"], strict=True)
    result["loss"] = -math.fsum(logps[gold] for logps, gold in pairs) / n
    return result | {"items": columns}
