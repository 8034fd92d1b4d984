"""Pretrains a GPT.

On one device, a CPU included:      python train.py config/gpt2_124m.py --attention=xsa --out_dir=runs/124m-xsa
On the 8 GPUs of a node:            torchrun --nproc_per_node=8 train.py config/1.4b.py --attention=xsa --out_dir=runs/1.4b-xsa
Every setting with its default:     python train.py --help

Exit status: 0 done, or stopped on request with a checkpoint saved; 1 a failure, its reason on the last line; 2 bad arguments
or bad input, found before any work starts.
"""

import math
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from command_line import InputError, StopRequest, first_two

if __name__ == "__main__":  # before torch is loaded, which takes seconds
    stop_request = StopRequest()

import numpy as np
import torch

import checkpoint
import distributed
from configurator import Config, as_dict, load
from data.loader import Loader, validation_batches
from data.shards import Dataset, open_dataset
from data.tokenizer import get_tokenizer
from distributed import Ranks
from eval.diagnostics import diagnose
from eval.local_data import TASKS
from model import GPT
from safety import SpikeGuard, set_deterministic
from tracker import Clock, Profile, Silent, Tracker, device_name, environment, peak_flops, peak_memory_gb, seconds_since_start

DIAGNOSED_WINDOWS = 4  # of validation, small beside a step
COMPILE_TIMEOUT = 3600  # seconds that ranks wait for each other up to the end of the first step, where it compiles


class RunError(Exception):
    """Why a run that had started cannot go on."""


def main(argv: list[str], stop: StopRequest | None = None) -> int:
    """Trains by the settings in `argv`; returns the exit status. `stop` may have noted a request to stop already."""
    ranks, own_stop = None, None if stop else StopRequest()
    try:
        config = load(argv)
        config.accumulation(distributed.world_size())
        ranks = distributed.start(config, stop or own_stop)
        return Run(config, ranks).run()
    except InputError as error:
        if distributed.is_local_master() or ranks is not None:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        where = "" if distributed.world_size() == 1 else f"rank {os.environ['RANK']}: "
        if where and (reason := distributed.lost_rank(error)):
            print(f"error: {where}{reason}", file=sys.stderr)
            return 1
        traceback.print_exc()
        reason = " ".join(str(error).split())  # on one line, the last one, whatever CUDA has to say
        print(f"error: {where}{type(error).__name__}: {reason[:1000]}", file=sys.stderr)
        return 1
    finally:
        if ranks is not None:
            ranks.close()
        if own_stop is not None:
            own_stop.restore()


class Run:
    """One training run: its model, optimizer and data, and how far it is.

    `step` counts completed optimizer steps. At a step that is due for it comes first the evaluation, then the checkpoint, so
    that a checkpoint's run has done all that its step asked for and nothing is repeated after a resume."""

    def __init__(self, config: Config, ranks: Ranks):
        self.config, self.ranks = config, ranks
        self.device = ranks.device
        self.accumulation = config.accumulation(ranks.world_size)
        self.tokens_per_step = config.global_batch_size * config.block_size
        self.step = 0
        self.evaluated_step = -1
        self.saved_step = -1
        self.best_val_loss: float | None = None
        self.bad_steps = self.bad_steps_in_row = 0
        self.guard = SpikeGuard(config.skip_spikes)
        self.data_hash = 0  # on rank 0 of what was seen before this process, and of what each rank's batches have given it
        self.bad_step = ""  # what is to be said of the last one
        self.stopping = False  # whether any rank was asked to stop; the same on all
        self.wandb_id: str | None = None
        self.locked = False  # whether out_dir is this run's, on rank 0
        self.tasks: dict[str, Any] = {}  # eval_tasks, the harness's
        self.shell: GPT | None = None  # what has the weights whole for evaluation, where the model's are sharded
        self.tracker = Silent()
        self.writer = checkpoint.Writer()

    # --- from start to end -------------------------------------------------------------------------------------------------

    def run(self) -> int:
        with ExitStack() as self.at_exit:
            return self._run()

    def _run(self) -> int:
        config = self.config
        self.data = self._open_data()
        state = self._find_state()
        if state is not None and self._is_finished(state):
            self._print(f"{config.out_dir}: finished at step {state['step']} of max_iters={config.max_iters}; nothing to do")
            return 0
        self._load_tasks()
        if not self.ranks.stop_requested():
            self._build(state)
        state = None  # as large as the run's own
        if self.ranks.stop_requested():
            self._print("stopped on request before training began; nothing was changed")
            return 0
        if config.eval_only:
            loss, scores = self.evaluate()
            tokens = self.eval_windows * config.block_size
            self._print("stopped before the evaluation was done" if scores is None else
                        f"step {self.step}: validation loss {loss:.4f} nats over {tokens:,} tokens" + describe_scores(scores))
            return 0
        self._open_out_dir()
        failed = True
        try:
            self._loop()
            failed = False
        except InputError as error:  # found while the run was under way: no reason for exit status 2
            raise RunError(f"rank {self.ranks.rank}: step {self.step + 1}: {error}") from None
        except OSError as error:  # a disk that is full or gone
            raise RunError(f"rank {self.ranks.rank}: step {self.step}: {error}") from None
        except Exception as error:
            if is_out_of_memory(error):
                raise RunError(self._out_of_memory()) from None
            if "not have a deterministic implementation" in str(error):
                raise RunError(f"deterministic=True: {str(error).partition(', but you set')[0]}") from None
            raise
        finally:
            self._end_writing()
            self.tracker.close(failed)
        return 0

    def _loop(self) -> None:
        config, tracker = self.config, self.tracker
        clock, before, first = Clock(), self.data_hash, self.step + 1
        profile = Profile(config, self.device, on=self.ranks.is_master)
        self.at_exit.callback(lambda: profile.close(self.step))
        with closing(self.loader.batches(self.step)) as batches:
            while True:
                at_end = self.step >= config.max_iters  # more where a resumed run is given fewer steps
                due = self.step % config.eval_interval == 0 or at_end
                if due and self.evaluated_step != self.step:
                    with clock.paused():
                        self._evaluate_and_report()
                # After a bad step the weights themselves may be bad: they wait for a good one.
                regular = self.step % config.save_interval == 0 and self.step > 0 and not self.bad_steps_in_row
                if at_end or self.stopping or regular:
                    with clock.paused():
                        self.save(last=at_end or self.stopping)
                if at_end or self.stopping:
                    break
                profile.before(self.step)
                metrics = self.train_step(batches)
                if self.compiled and self.step == first:
                    self.ranks.set_timeout(config.dist_timeout)
                self.data_hash = before + batches.digest
                self.writer.check()
                clock.steps += 1
                with clock.paused():
                    if written := profile.after(self.step):
                        tracker.say(written)
                tracker.advance()
                if self.step == first and (startup_s := seconds_since_start()) is not None:
                    tracker.say(f"first step done {startup_s:.1f} s after the process began")
                bad = metrics["loss"] is None
                if bad or self.step % config.log_interval == 0 or self.step >= config.max_iters:
                    self._report_step(metrics | {"data_ms": 1e3 * batches.take_waited() / clock.steps}, clock)
                if config.diagnostics_interval and self.step % config.diagnostics_interval == 0:
                    with clock.paused():
                        self._diagnose()
                if self.bad_steps_in_row >= config.max_bad_steps:
                    raise RunError(f"{self.bad_step}; max_bad_steps={config.max_bad_steps} reached")
        if at_end and self.evaluated_step == self.step:
            best = "n/a" if self.best_val_loss is None else f"{self.best_val_loss:.4f}"
            tracker.say(f"done: step {self.step}, {self.step * self.tokens_per_step:,} tokens, best validation loss {best}")
        else:
            tracker.say(f"stopped on request at step {self.step} with a checkpoint; continue with --init_from=resume")

    # --- set-up ------------------------------------------------------------------------------------------------------------

    def _open_data(self) -> Dataset:
        """The data set, on every rank, checked against the settings."""
        config, data, fault = self.config, None, None
        try:
            data = open_dataset(config.dataset)
            if data.vocab_size is not None and data.vocab_size > config.vocab_size:
                raise InputError(f"vocab_size={config.vocab_size} is smaller than the {data.vocab_size} ids of dataset "
                                 f"{config.dataset} (tokenizer {data.tokenizer}); use --vocab_size={data.vocab_size}")
            self.loader = Loader(
                data.train, block_size=config.block_size, global_batch_size=config.global_batch_size,
                micro_batch_size=config.micro_batch_size, rank=self.ranks.rank, world_size=self.ranks.world_size,
                seed=config.seed, sampling=config.sampling, vocab_size=config.vocab_size, device=self.device,
            )
            self.eval_windows = min(config.eval_tokens, data.val.n_tokens - 1) // config.block_size
            self._validation_batches(data)
        except Exception as error:
            fault = error
        self.ranks.agree(fault)
        return data

    def _load_tasks(self) -> None:
        """The tasks that eval_tasks names, with their tokenizer, on every rank."""
        config, fault = self.config, None
        if config.eval_tasks is None:
            return
        try:
            from eval.harness import load_tasks

            # Data without a meta.json is that of llm.c, modded-nanogpt or NanoGPT, whose tokens are GPT-2's.
            self.tokenizer = get_tokenizer(self.data.tokenizer or "gpt2")
            if self.tokenizer.vocab_size > config.vocab_size:
                raise InputError(f"eval_tasks: tokenizer {self.tokenizer.name}, taken for dataset {config.dataset}, which names "
                                 f"none, has more ids than vocab_size={config.vocab_size}")
            folder = Path(config.eval_tasks_data) if config.eval_tasks_data is not None else None
            self.tasks = load_tasks(config.eval_tasks.split(","), folder, config.eval_tasks_limit)
        except Exception as error:
            fault = error
        self.ranks.agree(fault)

    def _find_state(self) -> dict[str, Any] | None:
        """The checkpoint that init_from asks for, None for a run from scratch. Refuses what would harm an earlier run."""
        config = self.config
        path, state, fault = None, None, None
        try:
            if self.ranks.is_master:
                self._lock()
                path = checkpoint.choose(config)
        except Exception as error:
            fault = error
        self.ranks.agree(fault)
        path = self.ranks.gather_objects(path)[0]
        if path is None:
            return None
        try:
            # Mapped, the ranks of a node share the file's pages; what stays on a CPU is copied out of the file at once.
            state = checkpoint.load(path, mmap=self.device.type != "cpu")
            checkpoint.check(path, state, config, self.data.fingerprint)
        except Exception as error:
            fault = error
        self.ranks.agree(fault)
        self._print(f"continuing from {path}")
        for key, new in as_dict(config).items():
            if key not in ("out_dir", "init_from") and (old := state["config"].get(key)) != new:
                self._print(f"note: {key} was {old!r} in the checkpoint and is {new!r} now")
        if path.parent.resolve() != Path(config.out_dir).resolve():
            state["wandb_id"] = None  # a branch of that run, not its continuation
        return state

    def _is_finished(self, state: dict[str, Any]) -> bool:
        config = self.config
        return not config.eval_only and state["step"] >= config.max_iters and state["evaluated_step"] == state["step"]

    def _lock(self) -> None:
        """Keeps other runs out of out_dir, if it exists, until this one ends, and removes what a killed one left half-written:
        here, because a run that turns out to be finished goes no further."""
        out_dir = self.config.out_dir
        if not Path(out_dir).is_dir() or self.config.eval_only:
            return
        try:
            self.at_exit.callback(checkpoint.lock(out_dir))
            self.locked = True
            checkpoint.sweep(out_dir)
        except OSError as error:
            raise InputError(f"out_dir={out_dir}: {checkpoint.refusal(error)}") from None

    def _build(self, state: dict[str, Any] | None) -> None:
        """Model, optimizer and scaler, new or from a checkpoint's state."""
        config, device = self.config, self.device
        set_deterministic(config.deterministic)
        torch.set_float32_matmul_precision("high")
        dtype = autocast_dtype(config.dtype, device)
        self.autocast = nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype=dtype)
        try:
            with torch.device(device):
                self.model = GPT(config.model_config(), seed=config.seed)
        except Exception as error:
            if isinstance(error, RuntimeError) and "overflow" in str(error) or is_out_of_memory(error):
                raise RunError(f"rank {self.ranks.rank}: the model does not fit into the memory of {device}; what it takes: "
                               f"python -m scripts.plan, with the same settings") from None
            raise
        self.model.activation_checkpointing = config.activation_checkpointing
        if state is not None:
            with refusing(state):
                self.model.load_state_dict(state["model"])
        if config.parallel == "fsdp" and self.ranks.world_size == 1:
            self._print("note: parallel=fsdp changes nothing on one rank, which holds the whole state")
        if self.ranks.sharded:
            with torch.device("meta"):
                self.shell = GPT(config.model_config())
        self.compiled = config.compile or (config.compile is None and device.type == "cuda")
        if self.compiled:
            self.model.compile_parts()
            if self.shell is not None:
                self.shell.compile_parts()
            self.ranks.set_timeout(max(config.dist_timeout, COMPILE_TIMEOUT))
        self.parallel = self.ranks.wrap(self.model, self.model.h)
        self.parameters = list(self.model.parameters())
        self.optimizer = configure_optimizer(self.model, config)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.qk_clips = torch.zeros(config.n_layer, dtype=torch.int64, device=device)  # stays there until someone asks
        if state is not None:
            with refusing(state):
                self._restore(state)

    def _open_out_dir(self) -> None:
        config, fault = self.config, None
        if self.ranks.is_master:
            try:
                if not self.locked:
                    Path(config.out_dir).mkdir(parents=True, exist_ok=True)
                    self._lock()
                    if any(Path(config.out_dir).iterdir()):
                        raise InputError(f"out_dir={config.out_dir}: another run has begun there since this one started; use "
                                         f"another out_dir, or start again with --init_from=auto to continue it")
                evaluated = self.evaluated_step == self.step
                self.tracker = Tracker(config, self.step, evaluated, self.wandb_id, self._describe())
                self.wandb_id = self.tracker.wandb_id
                self.tracker.say(self._settings_table())
            except OSError as error:
                fault = InputError(f"out_dir={config.out_dir}: {checkpoint.refusal(error)}")
            except Exception as error:
                fault = error
        self.ranks.agree(fault)

    # --- the step ----------------------------------------------------------------------------------------------------------

    def train_step(self, batches) -> dict[str, Any]:
        """One optimizer step over the global batch; skipped, on all ranks alike, where its loss or gradient is not finite or, by
        skip_spikes, far above the last ones'."""
        config = self.config
        lr = learning_rate(self.step, config)
        if config.dropout > 0:  # a function of (seed, step, rank): the same after a resume without any state
            torch.manual_seed(np.random.SeedSequence([config.seed, self.step, self.ranks.rank]).generate_state(1)[0])
        losses = []
        for micro_step in range(self.accumulation):
            x, y = next(batches)
            if self.parallel is not self.model:  # DDP reads this in its forward pass: reduce gradients in the last one only
                self.parallel.require_backward_grad_sync = micro_step == self.accumulation - 1
            with self.autocast():
                _, loss = self.parallel(x, y)
            self.scaler.scale(loss / self.accumulation).backward()
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        gradients = [distributed.local(p.grad) for p in self.parameters]
        grad_norm = torch.nn.utils.get_total_norm(gradients)

        # The step's one look at the device, and at the other ranks.
        *mine, norm = torch.stack([*losses, grad_norm]).tolist()
        gathered = self.ranks.gather([math.fsum(mine) / len(mine), norm, self.ranks.asked_to_stop])
        grad_norm = self.ranks.total_norm([values[1] for values in gathered])
        loss = math.fsum(values[0] for values in gathered) / len(gathered)
        good = all(math.isfinite(value) for values in gathered for value in values)
        self.stopping = any(values[2] for values in gathered)
        self.step += 1
        if not good:
            self._count_bad_step(mine, gathered)
        elif spike := self.guard.judge(loss, grad_norm, warming_up=self.step <= config.warmup_iters):
            self.tracker.say(f"warning: step {self.step}: {spike}")
            good = False
        if good:
            if config.grad_clip and grad_norm > config.grad_clip:
                torch._foreach_mul_(gradients, config.grad_clip / grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.scaler.step(self.optimizer)
            self.bad_steps_in_row = 0
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.parallel is self.model)  # DDP's gradients stay views of its buckets
        metrics = {"loss": loss if good else None, "lr": lr, "grad_norm": grad_norm if good else None}
        if config.qk_clip:
            metrics["max_logit"] = self._clip_logits(good)
        return metrics

    def _clip_logits(self, good: bool) -> torch.Tensor | None:
        """QK-Clip by the largest logits of the step's global batch, whose largest it returns; of a skipped step they are lost."""
        largest = self.model.take_max_logits()
        if not good:
            return None
        largest = self.ranks.maximum(largest)
        with self.ranks.replicated():
            self.qk_clips += self.model.qk_clip_(largest).sum(1)
        return largest.max()

    def _count_bad_step(self, losses: list[float], gathered: list[list[float]]) -> None:
        """Counts a step that was skipped and says which ranks and windows it was; `losses` are this rank's micro-steps'."""
        self.bad_steps += 1
        self.bad_steps_in_row += 1
        bad_ranks = [rank for rank, values in enumerate(gathered) if not math.isfinite(values[0])]
        starts = self.loader.starts(self.step - 1)

        def place(micro_step: int) -> str:
            slots = self.loader.micro_slots(micro_step)
            return f"micro-step {micro_step} (slots {slots[0]}-{slots[-1]}, tokens from {starts[slots].tolist()})"

        # A gradient is reduced over all: with finite losses it could be any window's.
        places = [place(i) for i, loss in enumerate(losses) if not (bad_ranks and math.isfinite(loss))]
        everyones = self.ranks.gather_objects(places)
        what = f"non-finite loss on ranks {bad_ranks}" if bad_ranks else "finite losses, non-finite gradient on all ranks"
        found = [f"rank {rank}: {first_two(everyones[rank], ', ')}" for rank in bad_ranks or range(len(gathered))]
        where = first_two(found, "; ")
        self.bad_step = f"step {self.step}: {what}: {where}; skipped ({self.bad_steps_in_row} in a row, {self.bad_steps} in all)"
        self.tracker.say(f"warning: {self.bad_step}")

    # --- evaluation --------------------------------------------------------------------------------------------------------

    def evaluate(self) -> tuple[float | None, dict[str, dict[str, Any]] | None]:
        """Validation loss and scores of eval_tasks, the same on all ranks; None for what a stop request came before."""
        with self.ranks.whole(self.model, self.shell) as model:
            loss = self._validation_loss(model)
            return loss, None if loss is None else self._task_scores(model)

    @torch.no_grad()
    def _validation_loss(self, model: GPT) -> float | None:
        """Mean in nats over the fixed validation windows."""
        model.eval()
        total, count = 0.0, 0
        for x, y in self._validation_batches(self.data):
            targets = int((y >= 0).sum())
            if targets:
                with self.autocast():
                    _, loss = model(x, y)
                total += loss.item() * targets
                count += targets
            self.stopping = self.ranks.stop_requested()
            if self.stopping:
                return None
        model.train()
        totals, counts = zip(*self.ranks.gather([total, count]), strict=True)
        return math.fsum(totals) / sum(counts)

    def _task_scores(self, model: GPT) -> dict[str, dict[str, Any]] | None:
        """Results of eval_tasks by task."""
        if not self.tasks:
            return {}
        from eval.harness import HarnessModel, Stopped, score

        batch_tokens = self.config.micro_batch_size * self.config.block_size  # for which training has the memory
        lm = HarnessModel(model, self.tokenizer, self.ranks, self.autocast, batch_tokens, self.ranks.stop_requested)
        # Every batch has a shape of its own, and each would be compiled anew.
        with torch.compiler.set_stance("force_eager") if self.compiled else nullcontext():
            try:
                return {name: score(lm, task) for name, task in self.tasks.items()}
            except Stopped:
                self.stopping = True
                return None

    def _evaluate_and_report(self) -> None:
        loss, scores = self.evaluate()
        if loss is not None and scores is not None:
            self._report_evaluation(loss, scores)

    def _diagnose(self) -> None:
        """Logs eval.diagnostics of the first validation windows. On rank 0: the others soon wait for it."""
        with self.ranks.whole(self.model, self.shell) as model:
            if self.ranks.is_master:
                self._log_diagnostics(model)

    def _log_diagnostics(self, model: GPT) -> None:
        config = self.config
        x, _ = next(validation_batches(
            self.data.val, block_size=config.block_size, eval_tokens=config.eval_tokens, micro_batch_size=DIAGNOSED_WINDOWS,
            rank=0, world_size=1, vocab_size=config.vocab_size, device=self.device,
        ))
        with self.autocast():
            layers = diagnose(model, x[:self.eval_windows])
        by_name = {name: [layer.get(name) for layer in layers] for name in dict.fromkeys(n for one in layers for n in one)}
        if config.qk_clip:
            by_name["qk_clips"] = self.qk_clips.tolist()
        self.tracker.log({"step": self.step, "tokens": self.step * self.tokens_per_step, "split": "diagnostics", **by_name})

    def _validation_batches(self, data: Dataset):
        config = self.config
        return validation_batches(
            data.val, block_size=config.block_size, eval_tokens=config.eval_tokens, micro_batch_size=config.micro_batch_size,
            rank=self.ranks.rank, world_size=self.ranks.world_size, vocab_size=config.vocab_size, device=self.device,
        )

    # --- state -------------------------------------------------------------------------------------------------------------

    def save(self, last: bool) -> None:
        """A checkpoint of this step, from rank 0, unless there is one; on the disk when this returns if it is the run's `last`,
        else some time later, and training goes on."""
        if self.saved_step != self.step:
            state = self._state(self._data_hash())
            if not self.ranks.is_master:
                distributed.gather_along(state)
            elif last and not self.ranks.sharded:  # nothing goes on that would need a copy
                self.writer.wait()
                self._write(state)
            else:
                self.writer.start(state, self._write)
            self.saved_step = self.step
        if last:
            self.writer.wait()

    def _write(self, state: dict[str, Any]) -> None:
        self.tracker.sync()
        keep = sys.maxsize if state["bad_steps_in_row"] else self.config.keep_checkpoints  # the last good one stays
        checkpoint.save(self.config.out_dir, state, keep, self.config.milestone_interval, self.writer.hurry)

    def _end_writing(self) -> None:
        """Waits for a checkpoint that is being written when the run fails; the run's own error stays its last word."""
        try:
            self.writer.wait()
        except Exception as error:
            print(f"error: {error}", file=sys.stderr)

    def _data_hash(self) -> int:
        """Of all windows that the run has seen. All ranks must call it."""
        halves = self.ranks.gather(divmod(self.data_hash % 2**64, 2**32))  # doubles hold them exactly
        return sum(int(high) * 2**32 + int(low) for high, low in halves) % 2**64

    def _state(self, data_hash: int) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "tokens": self.step * self.tokens_per_step,
            "evaluated_step": self.evaluated_step,
            "best_val_loss": self.best_val_loss,
            "bad_steps": self.bad_steps,
            "bad_steps_in_row": self.bad_steps_in_row,
            "qk_clips": self.qk_clips.tolist(),
            "spikes": self.guard.state_dict(),
            "data_hash": data_hash,
            "rng": torch.get_rng_state(),
            "config": as_dict(self.config),
            "data": {
                "fingerprint": self.data.fingerprint,
                "tokenizer": self.data.tokenizer,
                "vocab_size": self.data.vocab_size,
            },
            "wandb_id": self.wandb_id,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """All but the weights, which a sharded model takes before it is sharded."""
        moments = checkpoint.optimizer_state(state, self.model, self.optimizer)
        self.optimizer.load_state_dict(self.ranks.share_of(moments, self.optimizer))
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        self.step = self.saved_step = state["step"]
        self.evaluated_step, self.best_val_loss = state["evaluated_step"], state["best_val_loss"]
        self.bad_steps, self.bad_steps_in_row = state["bad_steps"], state["bad_steps_in_row"]
        self.qk_clips.copy_(torch.tensor(state["qk_clips"]))
        self.guard.load_state_dict(state["spikes"])
        self.data_hash = state["data_hash"] if self.ranks.is_master else 0
        self.wandb_id = state["wandb_id"]

    # --- telling -----------------------------------------------------------------------------------------------------------

    def _print(self, text: str) -> None:
        if self.ranks.is_master:
            print(text)

    def _report_step(self, metrics: dict[str, Any], clock: "Clock") -> None:
        seconds = clock.read()
        tokens_per_s = self.tokens_per_step / seconds
        peak = peak_flops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        mfu = tokens_per_s * self.model.flops_per_token() / (peak * self.ranks.world_size) if peak else None
        record = {
            "step": self.step,
            "tokens": self.step * self.tokens_per_step,
            "split": "train",
            **metrics,
            "step_ms": seconds * 1e3,
            "tokens_per_s": tokens_per_s,
            "mfu": mfu,
            "peak_memory_gb": peak_memory_gb(self.device),
            "bad_steps": self.bad_steps,
            "spikes": self.guard.count,
            "data_hash": f"{self._data_hash():016x}",
        }
        clipped = ""
        if "max_logit" in metrics:
            largest = None if metrics["max_logit"] is None else metrics["max_logit"].item()
            record |= {"max_logit": largest, "qk_clips": self.qk_clips.sum().item()}
            shown = "n/a" if largest is None else f"{largest:.1f}"
            clipped = f", largest logit {shown}, clipped {record['qk_clips']:,} times"
        self.tracker.log(record)
        shown = "n/a" if mfu is None else f"{mfu:.1%}"
        loss, norm = ("skipped" if metrics[key] is None else f"{metrics[key]:.4f}" for key in ("loss", "grad_norm"))
        left = timedelta(seconds=round(seconds * (self.config.max_iters - self.step)))
        self.tracker.say(f"step {self.step}: loss {loss}, lr {metrics['lr']:.2e}, norm {norm}{clipped}, {seconds * 1e3:.0f} ms, "
                         f"{tokens_per_s:,.0f} tokens/s, MFU {shown}, {left} left", often=True)

    def _report_evaluation(self, loss: float, scores: dict[str, dict[str, Any]]) -> None:
        self.evaluated_step = self.step
        self.saved_step = -1  # a checkpoint of this step, if there is one, does not know of it
        if math.isfinite(loss) and (self.best_val_loss is None or loss < self.best_val_loss):
            self.best_val_loss = loss
        done = {"step": self.step, "tokens": self.step * self.tokens_per_step}
        self.tracker.log({**done, "split": "val", "loss": loss})
        for name, result in scores.items():
            numbers = {key: value for key, value in result.items() if key not in ("items", "version")}
            self.tracker.log({**done, "split": f"eval/{name}", **numbers})
        self.tracker.say(f"step {self.step}: validation loss {loss:.4f}" + describe_scores(scores))

    def _settings_table(self) -> str:
        config, ranks = self.config, self.ranks
        total = sum(p.numel() for p in self.parameters)
        state_gb = 16 * total / (ranks.world_size if ranks.sharded else 1) / 1e9
        rows = {
            "model": f"{config.attention}, {config.n_layer} layers, width {config.n_embd}, {config.n_head} heads of "
                     f"{config.head_dim} ({config.n_kv_head} kv), T {config.block_size}",
            "attention": self.model.attention_path(self.device),
            "parameters": f"{self.model.num_params():,} outside the embedding, {total:,} in all",
            "data": f"{config.dataset}: {self.data.train.n_tokens:,} train, {self.data.val.n_tokens:,} val tokens, "
                    f"tokenizer {self.data.tokenizer or 'unknown'}, {config.sampling} windows",
            "step": f"{self.tokens_per_step:,} tokens = {config.global_batch_size} sequences = {ranks.world_size} ranks x "
                    f"{self.accumulation} micro-steps x {config.micro_batch_size}",
            "run": f"steps {self.step:,} to {config.max_iters:,}, {config.max_iters * self.tokens_per_step:,} tokens "
                   f"({config.max_iters * self.tokens_per_step / self.data.train.n_tokens:.2f} epochs)",
            "evaluation": f"every {config.eval_interval:,} steps on {self.eval_windows * config.block_size:,} tokens",
            "tasks": f"{config.eval_tasks}, the first {config.eval_tasks_limit:,} items of each, tokenizer {self.tokenizer.name}"
                     if self.tasks else "none",
            "device": f"{device_name(self.device)}, {config.dtype} dtype, compile {config.compile}",
            "memory": f"{state_gb:.2f} GB for weights, gradients and AdamW on each rank ({config.parallel}), plus activations",
            "out_dir": config.out_dir,
        }
        return "\n".join(f"{key:>11}  {value}" for key, value in rows.items())

    def _describe(self) -> dict[str, Any]:
        """config.json: everything needed to say what this run was."""
        return {
            "config": as_dict(self.config),
            "n_params": self.model.num_params(),
            "flops_per_token": self.model.flops_per_token(),
            "tokens_per_step": self.tokens_per_step,
            "world_size": self.ranks.world_size,
            "data": {"fingerprint": self.data.fingerprint, "tokenizer": self.data.tokenizer,
                     "train_tokens": self.data.train.n_tokens, "val_tokens": self.data.val.n_tokens},
            **environment(self.device),
        }

    def _out_of_memory(self) -> str:
        config = self.config
        share = config.global_batch_size // self.ranks.world_size
        smaller = [n for n in range(1, config.micro_batch_size) if share % n == 0]
        advice = (f"--micro_batch_size={smaller[-1]} gives the same training in {share // smaller[-1]} micro-steps"
                  if smaller else "micro_batch_size is 1 already: use more memory or a smaller model")
        if not config.activation_checkpointing:
            advice += "; --activation_checkpointing=True saves more"
        if self.ranks.world_size > 1 and not self.ranks.sharded:
            advice += "; --parallel=fsdp shares the state among the ranks"
        found = f"out of memory at step {self.step} with micro_batch_size={config.micro_batch_size}"
        return f"rank {self.ranks.rank}: {found}: {advice}"


@contextmanager
def refusing(state: dict[str, Any]) -> Iterator[None]:
    """Makes an InputError of whatever the content of a checkpoint provokes in torch."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        raise InputError(f"the checkpoint of step {state['step']} does not fit this model: {reason}") from None


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory has run out, a GPU's or the host's; torch's CPU allocator says so in words alone."""
    said = isinstance(error, RuntimeError) and re.search("not enough memory|can't allocate memory", str(error))
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(said)


def describe_scores(scores: dict[str, dict[str, Any]]) -> str:
    """", hellaswag acc_norm 0.312" and so on, the metrics being the paper's."""
    return "".join(f", {name} {TASKS[name].metric} {result[TASKS[name].metric]:.3f}" for name, result in scores.items())


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up over warmup_iters steps, then a cosine to min_lr at lr_decay_iters (paper, Training)."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= config.lr_decay_iters:
        return config.min_lr
    progress = (step - config.warmup_iters) / (config.lr_decay_iters - config.warmup_iters)
    return config.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (config.learning_rate - config.min_lr)


def configure_optimizer(model: GPT, config: Config) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and the embedding, none on gains, biases and sinks."""
    decayed, plain = [], []
    for name, p in model.named_parameters():
        (decayed if p.ndim >= 2 and name != "sink" else plain).append(p)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def autocast_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of matrix products, None for plain fp32."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    return {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


if __name__ == "__main__":
    exit_status = main(sys.argv[1:], stop_request)
    stop_request.ignore()
    sys.exit(exit_status)
