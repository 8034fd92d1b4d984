"""Settings: typed defaults < config files in their order < --key=value on the command line.

    config = load(["config/1.4b.py", "config/seq16k.py", "--attention=xsa", "--max_iters=1e6"])

`Config` lists every setting with type, default and meaning; `--help` prints it. A config file is data and not code: lines
`key = value`, where a value is a literal, arithmetic, or a setting named earlier (`warmup_iters = max_iters // 100`).
"""

import ast
import difflib
import math
import operator
import os
import re
import stat
import types
from collections.abc import Iterator
from dataclasses import Field, asdict, dataclass, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from command_line import InputError
from model import GPT
from presets import PRESETS, GPTConfig


@dataclass
class Config(GPTConfig):
    """Every setting of a run: the model's (GPTConfig) and these. The defaults are the paper's recipe where it states one,
    NanoGPT's where it does not."""

    # run
    out_dir: Annotated[str, "folder for checkpoints, metrics.jsonl, config.json and log.txt"] = "out"
    init_from: Annotated[str, "scratch; resume: the newest checkpoint in out_dir; auto: resume if there is one, else "
                              "scratch; or the path of a checkpoint to continue from"] = "scratch"
    eval_only: Annotated[bool, "evaluate once, print the validation loss and stop"] = False
    seed: Annotated[int, "seed of weights, batches and dropout"] = 1337

    # data
    dataset: Annotated[str, "a folder under data/ (python -m data.fineweb and data.local make them) or any path"] = "fineweb"
    sampling: Annotated[Literal["random", "shuffle"], "random: windows drawn with replacement (the paper's protocol); "
                        "shuffle: every window once an epoch"] = "random"
    global_batch_size: Annotated[int, "sequences per optimizer step, over all ranks and micro-steps"] = 256
    micro_batch_size: Annotated[int, "sequences per forward pass on one rank"] = 8

    # optimizer: AdamW
    learning_rate: Annotated[float, "peak learning rate"] = 6e-4
    min_lr: Annotated[float | None, "learning rate after the decay; None: learning_rate / 10"] = None
    max_iters: Annotated[int, "optimizer steps of the run"] = 200_000
    warmup_iters: Annotated[int, "steps of linear warm-up"] = 2_000
    lr_decay_iters: Annotated[int | None, "step at which the cosine reaches min_lr; None: max_iters"] = None
    weight_decay: Annotated[float, "on matrices and embeddings only"] = 0.1
    beta1: Annotated[float, "AdamW"] = 0.9
    beta2: Annotated[float, "AdamW"] = 0.95
    grad_clip: Annotated[float, "largest gradient norm; 0: no clipping"] = 1.0
    max_bad_steps: Annotated[int, "stop after so many steps in a row with a non-finite loss or gradient; each is skipped"] = 10
    skip_spikes: Annotated[float, "after warm-up skip a step whose loss or gradient norm lies more than so many standard "
                           "deviations above the mean of the last 128 steps, at most 10 in a row; 0: off"] = 0.0

    # evaluation, logging, checkpoints
    eval_interval: Annotated[int, "steps between evaluations; there is always one at the start and one at the end"] = 1_000
    eval_tokens: Annotated[int, "validation tokens of an evaluation, over all ranks"] = 10_485_760
    eval_tasks: Annotated[str | None, "downstream tasks to score at every evaluation, e.g. hellaswag,lambada_openai; needs "
                          "requirements-eval.txt"] = None
    eval_tasks_limit: Annotated[int, "items of each of these tasks, the first ones"] = 500
    eval_tasks_data: Annotated[str | None, "their data: a folder made by python -m eval.local_data; None: the hub"] = None
    diagnostics_interval: Annotated[int, "steps between looks into the layers, logged as split diagnostics "
                                    "(eval/diagnostics.py); 0: none"] = 0
    log_interval: Annotated[int, "steps between lines of metrics.jsonl and the console"] = 10
    profile: Annotated[int, "torch's profiler over the five steps after step N: trace and table in out_dir; 0: off"] = 0
    save_interval: Annotated[int, "steps between checkpoints; there is always one at the end"] = 1_000
    keep_checkpoints: Annotated[int, "newest checkpoints that are kept"] = 2
    milestone_interval: Annotated[int, "checkpoints at multiples of this step are kept for good; 0: none"] = 0
    wandb_log: Annotated[bool, "also log to Weights & Biases; offline where there is no login"] = False
    wandb_project: Annotated[str, "wandb project"] = "nanoxsa"
    wandb_run_name: Annotated[str | None, "wandb run; None: the last part of out_dir"] = None
    wandb_group: Annotated[str | None, "wandb group, to lay variants over each other; None: dataset and model shape"] = None

    # machine
    device: Annotated[str, "auto, cpu, cuda, cuda:N or mps; under torchrun each rank takes the GPU of its LOCAL_RANK"] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], "of matrix products, through autocast; auto: "
                     "bfloat16 on CUDA where the GPU has it, else float32"] = "auto"
    compile: Annotated[bool | None, "torch.compile, block by block; None: on CUDA only"] = None
    activation_checkpointing: Annotated[bool, "keep only each block's input and recompute the rest in backward: less memory, "
                                        "a third more FLOPs"] = False
    deterministic: Annotated[bool, "the same bits in every run on the same machine and ranks; slower on a GPU"] = False
    parallel: Annotated[Literal["ddp", "fsdp"], "ddp: every rank holds weights, gradients and optimizer state; fsdp: each a "
                        "share of them (FSDP2): less memory, more traffic, the same training"] = "ddp"
    backend: Annotated[Literal["auto", "nccl", "gloo"], "of torch.distributed; auto: nccl on CUDA, else gloo"] = "auto"
    dist_timeout: Annotated[int, "seconds after which a rank that waits for another gives up"] = 600

    def __post_init__(self):
        super().__post_init__()
        for key in ("out_dir", "dataset", "init_from"):  # shells leave the ~ of --key=~/folder alone
            setattr(self, key, os.path.expanduser(getattr(self, key)))
        if self.eval_tasks_data is not None:
            self.eval_tasks_data = os.path.expanduser(self.eval_tasks_data)
        if self.min_lr is None:
            self.min_lr = self.learning_rate / 10
        if self.lr_decay_iters is None:
            self.lr_decay_iters = self.max_iters

        def require(condition: bool, key: str, wanted: str) -> None:
            if not condition:
                raise ValueError(f"{key} must be {wanted}, found {getattr(self, key)!r}")

        for key in ("global_batch_size", "micro_batch_size", "max_bad_steps", "eval_interval", "eval_tasks_limit",
                    "log_interval", "save_interval", "keep_checkpoints", "dist_timeout"):
            require(getattr(self, key) >= 1, key, "at least 1")
        for key in ("max_iters", "warmup_iters", "lr_decay_iters", "weight_decay", "grad_clip", "skip_spikes",
                    "milestone_interval", "diagnostics_interval", "profile", "seed"):
            require(0 <= getattr(self, key) < math.inf, key, "finite and not negative")
        require(self.profile == 0 or self.profile < self.max_iters, "profile", f"below max_iters={self.max_iters}")
        require(self.seed < 2**63, "seed", "below 2**63")
        require(self.max_iters < 10**8, "max_iters", "below 10**8 (a checkpoint's name has 8 digits)")
        require(0 < self.learning_rate < math.inf, "learning_rate", "finite and above 0")
        require(0 <= self.min_lr <= self.learning_rate, "min_lr", f"from 0 to learning_rate={self.learning_rate}")
        for key in ("beta1", "beta2"):
            require(0 <= getattr(self, key) < 1, key, "in [0, 1)")
        require(self.eval_tokens >= self.block_size, "eval_tokens", f"at least block_size={self.block_size}")
        for key in ("out_dir", "dataset", "init_from", "wandb_project"):
            require(getattr(self, key) != "", key, "not empty")
        # Two digits: torch takes an index modulo 256, cuda:256 would be GPU 0.
        known = re.fullmatch(r"auto|cpu|mps|cuda(:(0|[1-9][0-9]?))?", self.device)
        require(known is not None, "device", "auto, cpu, cuda, cuda:N or mps")

    def model_config(self) -> GPTConfig:
        return GPTConfig(**{f.name: getattr(self, f.name) for f in fields(GPTConfig)})

    def accumulation(self, world_size: int) -> int:
        """Micro-steps per optimizer step on each of world_size ranks. Raises InputError with values that would do."""
        per_pass = self.micro_batch_size * world_size
        if self.global_batch_size % per_pass == 0:
            return self.global_batch_size // per_pass
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        advice = f"--global_batch_size={max(1, round(self.global_batch_size / per_pass)) * per_pass}"
        if self.global_batch_size % world_size == 0:
            share = self.global_batch_size // world_size
            fits = next(n for n in range(min(share, self.micro_batch_size), 0, -1) if share % n == 0)
            advice = f"--micro_batch_size={fits} (same training), or {advice} (another recipe)"
        raise InputError(
            f"global_batch_size={self.global_batch_size} must be a multiple of micro_batch_size x ranks = "
            f"{self.micro_batch_size} x {world_size} = {per_pass} ({ranks}); try {advice}"
        )


# NanoGPT's names that this project has no use for, and what to write.
REPLACED = {
    "batch_size": "global_batch_size (sequences per optimizer step) and micro_batch_size (sequences per forward pass)",
    "gradient_accumulation_steps": "global_batch_size; the micro-steps follow from it, micro_batch_size and the ranks",
    "eval_iters": "eval_tokens (tokens per evaluation)",
    "always_save_checkpoint": "save_interval and keep_checkpoints",
    "decay_lr": "min_lr; a constant learning rate is min_lr = learning_rate with warmup_iters = 0",
}


def load(argv: list[str]) -> Config:
    """The settings that `argv`, without the program's name, gives. Raises InputError. --help and --attention=list print and raise
    SystemExit(0)."""
    if "--help" in argv or "-h" in argv:
        print(help_text())
        raise SystemExit(0)
    listing = "--attention=list" in argv
    argv = [arg for arg in argv if arg != "--attention=list"]
    values = {f.name: f.default for f in fields(Config)}
    files = [arg for arg in argv if not arg.startswith("-")]
    for path in files:
        values.update(_read_file(path, values))
    for arg in argv:
        if arg.startswith("-"):
            key, value = _read_argument(arg)
            values[key] = value
    try:
        config = Config(**values)
    except ValueError as error:
        raise InputError(str(error)) from None
    if listing:
        print(attention_text(config))
        raise SystemExit(0)
    return config


def help_text() -> str:
    """Every setting with type, default and meaning."""
    lines = ["usage: python train.py [config/FILE.py ...] [--key=value ...]", "",
             "Defaults < config files in their order < --key=value. Every setting:", ""]
    hints = get_type_hints(Config, include_extras=True)
    model = {f.name for f in fields(GPTConfig)}
    for f in sorted(fields(Config), key=lambda f: f.name not in model):  # stable: the model's settings first
        kind, meaning = get_args(hints[f.name])
        lines.append(f"  --{f.name}={f.default}  ({_describe(kind)})")
        lines.append(f"        {meaning}")
    return "\n".join(lines)


def attention_text(config: GPTConfig) -> str:
    """The presets of attention, and what each adds to plain attention in a model of config's shape: weights, FLOPs of a training
    token, and memory of a token in decoding."""
    def model(name: str) -> GPT:
        with torch.device("meta"):
            return GPT(config.with_attention(name).model_config())

    def count(gpt: GPT) -> int:
        return sum(p.numel() for p in gpt.parameters())

    plain = model("sa")
    shape = f"{config.n_layer} layers, width {config.n_embd}, {config.n_head} heads of {config.head_dim}, T {config.block_size}"
    lines = [f"{shape}: {count(plain):,} weights, {plain.flops_per_token() / 1e9:.4g} GFLOP a token", "",
             "attention      stage  paper (arXiv)  extra weights   FLOPs  KV cache"]
    for name, preset in PRESETS.items():
        label = f"{name:13}  {preset.stage:5}  {preset.paper:13}"
        try:
            gpt = model(name)
        except ValueError as error:
            lines.append(f"{label}  {error}")
            continue
        flops = gpt.flops_per_token() / plain.flops_per_token()
        cache = gpt.kv_cache_bytes_per_token() / plain.kv_cache_bytes_per_token()
        lines.append(f"{label}  {count(gpt) - count(plain):+13,}  {flops:6.3f}  {cache:8.3f}  {preset.line}")
    lines += ["", "FLOPs and KV cache: a share of the first row's. Explicit switches win, as in --attention=gsxa --gate=off."]
    return "\n".join(lines)


def _read_argument(arg: str) -> tuple[str, Any]:
    key, equals, text = arg.removeprefix("--").partition("=")
    if not arg.startswith("--") or not key.isidentifier():
        raise InputError(f"{arg!r} on the command line is not of the form --key=value")
    field = _field(key, "on the command line")
    if not equals:
        raise InputError(f"--{key} on the command line needs a value: --{key}=VALUE ({_describe(_kind(field))})")
    return key, _from_text(text, field)


def _from_text(text: str, field: Field) -> Any:
    """A command-line value by the field's type: text stays text, whatever it looks like."""
    kind = _kind(field)
    optional, base = _split_optional(kind)
    if optional and text in ("None", "none"):
        return None
    value: Any = text
    if base is bool:
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    elif base in (int, float):
        try:
            value = int(text)
        except ValueError:
            try:
                value = float(text)
            except ValueError:
                value = text
    return _typed(value, field, f"--{field.name} on the command line")


def _typed(value: Any, field: Field, where: str) -> Any:
    """`value` as the field's type: whole floats pass for int, ints for float. Anything else, text that cannot be printed and
    whole numbers of more than 64 bits are an InputError."""
    kind = _kind(field)
    optional, base = _split_optional(kind)
    if value is None and optional:
        return None
    if base is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if get_origin(base) is Literal:
        accepted = value in get_args(base)
    elif base is float:
        accepted = isinstance(value, float) and not math.isnan(value)
    else:
        accepted = isinstance(value, base) and (base is bool or not isinstance(value, bool))
    if accepted and base is int:
        accepted = abs(value) < _MAX_NUMBER
    if accepted and base is str:
        accepted = value.isprintable()  # no NUL, no lone surrogate: neither a path nor log.txt could hold it
    if not accepted:
        raise InputError(f"{where} wants {_describe(kind)}, found {value!r:.200}")
    return value


def typed_setting(key: str, value: Any, where: str) -> Any:
    """`value` as the setting `key` takes it. Raises InputError for an unknown key and for another type."""
    return _typed(value, _field(key, where), f"{key} ({where})")


def _field(key: str, where: str) -> Field:
    known = {f.name: f for f in fields(Config)}
    if key in known:
        return known[key]
    if key in REPLACED:
        raise InputError(f"{key} ({where}) does not exist here; use {REPLACED[key]}")
    near = difflib.get_close_matches(key, known, n=1)
    raise InputError(f"unknown setting {key} ({where})" + (f"; did you mean {near[0]}?" if near else "; see --help"))


_HINTS = get_type_hints(Config, include_extras=True)


def _kind(field: Field) -> Any:
    return get_args(_HINTS[field.name])[0]


def _split_optional(kind: Any) -> tuple[bool, Any]:
    if isinstance(kind, types.UnionType) or get_origin(kind) is Union:
        (base,) = (k for k in get_args(kind) if k is not type(None))
        return True, base
    return False, kind


def _describe(kind: Any) -> str:
    optional, base = _split_optional(kind)
    if get_origin(base) is Literal:
        text = " | ".join(map(str, get_args(base)))
    else:
        text = {"int": "whole number", "float": "number", "str": "text", "bool": "True or False"}[base.__name__]
    return text + " | None" if optional else text


# --- config files -----------------------------------------------------------------------------------------------------------

_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}
_MAX_FILE_BYTES = 100_000  # a config file is a page long; more is some other file
_MAX_NUMBER = 2**63


def _read_file(path: str, values: dict[str, Any]) -> dict[str, Any]:
    """The settings that a config file assigns; `values` are those in force before it."""
    assigned: dict[str, Any] = {}
    for key, node, where in assignments(path):
        _field(key, where)
        assigned[key] = typed_setting(key, evaluate(node, values | assigned, where), where)
    return assigned


def assignments(path: str) -> Iterator[tuple[str, ast.expr, str]]:
    """(key, value, "path line N") of each line of a file that is data in Python's syntax; nothing in it is run. InputError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe or a device may have no end, or no beginning
            raise OSError("not a regular file")
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the name itself is none, as with a NUL in it
        reason = getattr(error, "strerror", None) or error
        hint = "" if path.endswith(".py") else "; settings are written --key=value"
        raise InputError(f"config file {path!r} cannot be read: {reason}{hint}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise InputError(f"config file {path} has more than the {_MAX_FILE_BYTES} bytes that one may have")
    try:
        tree = ast.parse(data.decode("utf-8-sig"), filename=path)
    except (RecursionError, MemoryError):
        raise InputError(f"config file {path}: an expression is nested too deeply") from None
    except (SyntaxError, ValueError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise InputError(f"config file {path}{line} is not a list of `key = value` lines: {error}") from None
    for i, node in enumerate(tree.body):
        where = f"{path} line {node.lineno}"
        if i == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue  # a docstring
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise InputError(f"{where}: only `key = value` lines are allowed in a config file")
        yield node.targets[0].id, node.value, where


def evaluate(node: ast.expr, names: dict[str, Any], where: str) -> Any:
    """A literal, arithmetic on numbers, or one of `names`. Anything else is an InputError."""
    try:
        return _value(node, names, where)
    except RecursionError:
        raise InputError(f"{where}: the expression is nested too deeply") from None
    except ValueError:  # int to text has a limit of its own
        raise InputError(f"{where}: a number in the expression has too many digits") from None


def _value(node: ast.expr, names: dict[str, Any], where: str) -> Any:
    match node:
        case ast.Constant(value=int() as value) if value > _MAX_NUMBER:
            raise InputError(f"{where}: a number must be at most 2**63")
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name):
            if name not in names:
                _field(name, where)
                raise InputError(f"{where}: {name} is not set in the lines before")
            return names[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _arithmetic(op, where, _value(operand, names, where))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _arithmetic(op, where, _value(left, names, where), _value(right, names, where))
    raise InputError(f"{where}: a value is a literal, arithmetic on numbers or a setting named earlier, found "
                     f"{ast.unparse(node)[:60]!r}")


def _arithmetic(op: ast.operator | ast.unaryop, where: str, *operands: Any) -> int | float:
    for operand in operands:
        if isinstance(operand, bool) or not isinstance(operand, int | float):
            raise InputError(f"{where}: arithmetic wants numbers, found {operand!r}")
    try:
        if isinstance(op, ast.Pow) and all(isinstance(n, int) for n in operands):  # 9**9**9 would take hours
            base, power = operands
            if abs(base) > 1 and power * math.log2(abs(base)) > 1024:
                raise OverflowError("the result is too large")
        result = _OPERATORS[type(op)](*operands)
    except ArithmeticError as error:
        raise InputError(f"{where}: {error}") from None
    if isinstance(result, complex) or abs(result) > _MAX_NUMBER:
        raise InputError(f"{where}: the result must be a number of at most 2**63, found {result!r:.100}")
    return result


def as_dict(config: Config) -> dict[str, Any]:
    """Every setting, None included, as plain Python values."""
    return asdict(config)
