"""configurator.py: what a person types or writes into a file gives the settings meant, or one line that says what is wrong."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from command_line import InputError
from configurator import REPLACED, Config, as_dict, help_text, load
from model import GPTConfig

ROOT = Path(__file__).parent.parent


def refused(argv: list[str]) -> str:
    """The one line with which `argv` is refused."""
    with pytest.raises(InputError) as caught:
        load(argv)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@pytest.fixture
def file(tmp_path):
    """Writes a config file and gives its path."""
    def write(content: str | bytes, name: str = "some.py") -> str:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(tmp_path / name)
    return write


# --- the command line --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument, value", [
    ("--learning_rate=1", 1.0), ("--learning_rate=.5", 0.5), ("--learning_rate=1e-3", 1e-3), ("--max_iters=1e6", 1_000_000),
    ("--max_iters=100_000", 100_000), ("--max_iters=5.0", 5), ("--max_iters=0", 0), ("--seed=007", 7),
    ("--compile=false", False), ("--compile=False", False), ("--compile=0", False), ("--compile=TRUE", True),
    ("--compile=1", True), ("--compile=None", None), ("--compile=none", None), ("--n_kv_head=3", 3),
    ("--wandb_run_name=1234", "1234"), ("--wandb_run_name=1e5", "1e5"), ("--wandb_run_name=True", "True"),
    ("--wandb_run_name=None", None), ("--wandb_run_name=", ""), ("--wandb_run_name=a=b=c", "a=b=c"),
    ("--wandb_run_name=lr=1e-3, été", "lr=1e-3, été"), ("--out_dir=None", "None"), ("--out_dir= a b ", " a b "),
    ("--wandb_project=-1", "-1"), ("--dataset=/a/b", "/a/b"), ("--attention=xsa", "xsa"), ("--grad_clip=0", 0.0),
    ("--device=cuda:7", "cuda:7"), ("--min_lr=0", 0.0),
])
def test_value_takes_the_setting_s_type(argument, value):
    found = getattr(load([argument]), argument[2:].partition("=")[0])
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("argument, wanted", [
    ("--max_iters=1.5", "whole number"), ("--max_iters=many", "whole number"), ("--max_iters=", "whole number"),
    ("--max_iters=True", "whole number"), ("--max_iters=None", "whole number"), ("--max_iters=inf", "whole number"),
    ("--max_iters=nan", "whole number"), ("--max_iters=1e300", "whole number"), ("--max_iters=0x10", "whole number"),
    ("--max_iters=2**10", "whole number"), ("--max_iters=" + "9" * 4000, "whole number"),
    ("--max_iters=" + "9" * 5000, "whole number"), ("--max_iters=-1", "not negative"), ("--max_iters=1e8", "10**8"),
    ("--learning_rate=-1e-3", "above 0"), ("--learning_rate=0", "above 0"), ("--learning_rate=inf", "finite"),
    ("--learning_rate=nan", "number"), ("--learning_rate=1,5", "number"), ("--learning_rate=None", "number"),
    ("--learning_rate=" + "9" * 4000, "finite"), ("--min_lr=1", "learning_rate"), ("--min_lr=", "number | None"),
    ("--compile=no", "True or False | None"), ("--bias=None", "True or False"), ("--bias=2", "True or False"),
    ("--bias=", "True or False"), ("--attention=", "sa | xsa |"), ("--attention=XSA", "sa | xsa |"), ("--dtype=fp16", "float16"),
    ("--out_dir=", "not empty"), ("--dataset=", "not empty"), ("--init_from=", "not empty"), ("--out_dir=a\nb", "text"),
    ("--out_dir=a\0b", "text"), ("--out_dir=\udc80", "text"), ("--seed=-1", "not negative"),
    ("--seed=9223372036854775808", "seed"),
    ("--beta2=1", "[0, 1)"), ("--dropout=1", "[0, 1)"), ("--grad_clip=-1", "not negative"),
    ("--keep_checkpoints=0", "at least 1"),
    ("--eval_tokens=2047", "block_size=2048"), ("--n_kv_head=5", "n_head=12"), ("--head_dim=3", "even"),
    ("--rope_base=1", "above 1"),
    ("--device=gpu", "cuda:N"), ("--device=cuda:", "cuda:N"), ("--device=cuda:-1", "cuda:N"), ("--device=cuda:256", "cuda:N"),
    ("--device=cuda:²", "cuda:N"), ("--device=cuda:01", "cuda:N"), ("--device=", "cuda:N"),
])
def test_bad_value_is_refused_with_what_was_wanted(argument, wanted):
    message = refused([argument])
    assert argument[2:].partition("=")[0] in message and wanted in message and len(message) < 500


@pytest.mark.parametrize("argument", [
    "-max_iters=1", "---max_iters=1", "--", "-", "--=1", "--max-iters=1", "--max iters=1", "-h=1", "--max_iters:1",
])
def test_other_forms_are_refused(argument):
    assert "--key=value" in refused([argument])


def test_setting_without_a_value_says_what_it_takes():
    assert "--eval_only=VALUE (True or False)" in refused(["--eval_only"])
    assert "--key=value" in refused(["max_iters=5"])  # taken for a file


def test_unknown_setting_names_the_nearest(file):
    assert "did you mean learning_rate?" in refused(["--lerning_rate=1"])
    message = refused([file("n_layer = 2\n\nn_heads = 4\n")])
    assert "did you mean n_head?" in message and "some.py line 3" in message
    assert "--help" in refused(["--zzzzz=1"])


@pytest.mark.parametrize("name", [
    "batch_size", "gradient_accumulation_steps", "eval_iters", "always_save_checkpoint", "decay_lr",
])
def test_nanogpt_s_removed_names_are_refused_with_their_replacement(name, file):
    for argument in (f"--{name}=1", file(f"{name} = 1")):
        message = refused([argument])
        assert name in message and REPLACED[name] in message
    for word in re.findall(r"[a-z]+_[a-z_]+", REPLACED[name]):
        assert word in as_dict(Config())


def test_the_last_of_two_wins(file):
    assert load(["--seed=1", "--seed=2"]).seed == 2
    assert load([file("seed = 1\nseed = 3\n")]).seed == 3


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    """The shell leaves it alone after `--out_dir=`; a folder named ~ is what someone then deletes with rm -r."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(["--out_dir=~/runs"]).out_dir == f"{tmp_path}/runs"
    assert load(["--dataset=~/a", "--init_from=~/b.pt"]).init_from == f"{tmp_path}/b.pt"


# --- layers ------------------------------------------------------------------------------------------------------------------


def test_defaults_then_files_in_order_then_command_line(file):
    a = file("n_layer = 2\nn_head = 4\nseed = 1\n", "a.py")
    b = file("n_layer = 3\nseed = 2\n", "b.py")
    config = load(["--seed=3", a, "--learning_rate=1", b])
    assert (config.n_layer, config.n_head, config.seed, config.learning_rate, config.n_embd) == (3, 4, 3, 1.0, 768)
    assert load([b, a]).n_layer == 2


def test_file_computes_with_numbers_and_earlier_settings(file):
    first = file("max_iters = 4_000\n", "first.py")
    config = load([first, file('''"""What this is."""
# a comment
warmup_iters = max_iters // 100  # of the file before
n_head = 2 + 2 * 3
n_embd = n_head * 16
block_size = 2**10
eval_tokens = 10 * block_size
learning_rate = 6e-4 * 0.999 ** 2000
min_lr = learning_rate / 3
weight_decay = +1
lr_decay_iters = max_iters % 3000 - -5
wandb_run_name = None
compile = False
out_dir = 'a' ; dataset = "b"
''')])
    assert (config.warmup_iters, config.n_head, config.n_embd, config.block_size, config.eval_tokens) == (40, 8, 128, 1024, 10240)
    assert config.learning_rate == 6e-4 * 0.999 ** 2000 and config.min_lr == config.learning_rate / 3
    assert config.weight_decay == 1.0 and isinstance(config.weight_decay, float) and config.lr_decay_iters == 1005
    assert config.compile is False and config.wandb_run_name is None and (config.out_dir, config.dataset) == ("a", "b")


def test_file_s_values_are_typed_like_the_command_line_s(file):
    assert load([file("max_iters = 1e6")]).max_iters == 1_000_000
    assert load([file("learning_rate = 1")]).learning_rate == 1.0
    for text, wanted in [("max_iters = 1.5", "whole number"), ("max_iters = '5'", "whole number"), ("bias = 1", "True or False"),
                         ("dropout = True", "number"), ("out_dir = 5", "text"), ("out_dir = None", "text"),
                         ("attention = True", "sa | xsa |"), ("max_iters = 7 / 2", "whole number"), ("out_dir = 'a\\0'", "text"),
                         ("out_dir = '\\ud800'", "text")]:
        message = refused([file("n_layer = 2\n" + text)])
        assert wanted in message and "line 2" in message


@pytest.mark.parametrize("config", sorted(ROOT.glob("config/*.py")), ids=lambda path: path.stem)
def test_every_config_of_the_repository_loads(config):
    assert isinstance(load([str(config)]), Config)


def test_byte_order_mark_and_windows_line_ends_are_fine(file):
    assert load([file(b"\xef\xbb\xbfseed = 5\r\nn_layer = 2\r\n")]).seed == 5


# --- files are data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [
    "seed = open('canary', 'w')", "seed = __import__('os').getpid()", "seed = (1).bit_length()", "seed = max_iters.real",
    "seed = int('5')", "import os", "from os import path", "seed = [1][0]", "seed = [x for x in (1,)]", "seed = {1: 2}[1]",
    "out_dir = f'{seed}'", "out_dir = f'a'", "seed = (lambda: 1)()", "compile = lambda: 1", "seed = (n := 1)", "seed += 1",
    "del seed", "seed, n_layer = 1, 2", "seed = n_layer = 1", "(seed) = 1; [n_layer] = [2]", "seed: int = 1", "seed = *(1,),",
    "seed = 1 if True else 2", "seed = 1 < 2", "seed = 1 and 2", "compile = not True", "seed = ~1", "seed = 1 << 2",
    "seed = 6 & 3",
    "seed = 6 | 1", "seed = 6 ^ 1", "seed = 2 @ 2", "out_dir = 'a' + 'b'", "out_dir = 'a' * 3", "out_dir = 'a%s' % 'b'",
    "out_dir = 'a' * 10**9", "seed = True + 1", "seed = None + 1", "out_dir = b'a'", "seed = 1j", "seed = (-8) ** 0.5",
    "seed = ...",
    "seed = (1, 2)", "seed = [1]", "seed = {1}", "seed = {}", "seed.x = 1", "seed[0] = 1", "seed", "'a'\n'b'", "1 + 1",
    "print('x')", "if True:\n  seed = 1", "for seed in (1, 2): pass", "while True: pass", "def f(): pass", "class A: pass",
    "pass",
    "try:\n  seed = 1\nfinally:\n  pass", "with open('x'): pass", "raise ValueError", "assert False", "global seed", "return 1",
    "yield 1", "await x", "match 1:\n  case 1: pass", "type X = int", "@f\ndef g(): pass", "seed = __name__", "seed = seeed",
    "__builtins__ = 1", "seed = __builtins__", "seed = os", "seed = `1`", "seed = 1 +", " seed = 1", "seed = 1\n\tn_layer = 2",
    "seed = '", "exec = 1", "load = 1", "help = 1",
])
def test_all_that_is_not_a_value_is_refused(code, file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "some.py" in refused([file(code)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["some.py"]


def test_only_settings_lend_their_values(file):
    assert "unknown setting width" in refused([file("width = 64\nn_embd = width")])
    assert "arithmetic wants numbers, found None" in refused([file("seed = lr_decay_iters + 1")])


@pytest.mark.parametrize("code", [
    "seed = 9**9**9", "seed = 2**1024", "seed = 2**64", "seed = -2**64", "seed = 10**18 * 10**18", "learning_rate = 1e308 * 10",
    "learning_rate = 1e308 * 10 - 1e308 * 10", "learning_rate = 1e400 - 1e400", "learning_rate = 1e400", "seed = 1e400",
    "seed = 1 / 0", "seed = 1 // 0", "seed = 1 % 0", "seed = 1.0 % 0.0", "seed = 0 ** -1", "learning_rate = 0.0 ** -1",
    "learning_rate = 10.0 ** 400", "seed = 10 ** 400.0", "seed = 2 ** -10**18 ** 18", "seed = " + "9" * 5000,
    "seed = " + "9" * 4000,
    "seed = 0x" + "f" * 20000, "max_iters = 0x" + "f" * 20000, "out_dir = 0x" + "f" * 20000,
    "max_iters = 0x" + "f" * 20000 + " + 1",
    "max_iters = 1 ** 0x" + "f" * 20000, "max_iters = [0x" + "f" * 20000 + "]", "seed = " + "-" * 50_000 + "1",
    "seed = " + "1+" * 40_000 + "1", "seed = " + "2**" * 30_000 + "1", "seed = " + "(" * 50_000,
    "seed = " + "[" * 150 + "]" * 150,
    "compile = " + "not " * 20_000 + "True", "compile = a" + ".a" * 40_000, "compile = a" + "()" * 40_000,
    "if 1:\n pass\n" + "elif 1:\n pass\n" * 6000, "seed = " + "x" * 99_000, "x" * 99_000 + " = 1", "#" * 100_001,
    b"seed = 1\0", b"\0" * 1000, b"seed = '\xff'", b"\xff\xfes\0e\0e\0d\0", b"seed = 1 # \xe9", b"\x7fELF", b"\x80\x04\x95",
    "\u2028seed = 1", "seed = \u0661\u0662\u00b2",
], ids=lambda content: repr(content[:20]))
def test_no_file_costs_more_than_a_moment(code, file):
    begin = time.monotonic()
    message = refused([file(code)])
    assert time.monotonic() - begin < 2 and len(message) < 101_000


@pytest.mark.parametrize("path", ["nowhere.py", ".", "", "/dev/zero", "/dev/null", "a\0b", "\ud800", "a/" * 5000, "x" * 300])
def test_what_is_no_file_is_refused(path):
    begin = time.monotonic()
    assert "cannot be read" in refused([path])
    assert time.monotonic() - begin < 2


def test_huge_file_is_not_read_whole(tmp_path):
    with open(tmp_path / "weights.py", "wb") as sparse:
        sparse.truncate(2**36)
    assert "100000 bytes" in refused([str(tmp_path / "weights.py")])


def test_pipe_as_config_file_does_not_wait(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = []
    thread = threading.Thread(target=lambda: found.append(refused([str(tmp_path / "pipe")])), daemon=True)
    thread.start()
    thread.join(5)
    assert found and "not a regular file" in found[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_file_without_permission_is_refused(file):
    path = file("seed = 1")
    os.chmod(path, 0)
    assert "Permission denied" in refused([path])


# --- fuzz --------------------------------------------------------------------------------------------------------------------

PIECES = [
    "seed", "n_layer", "n_head", "n_embd", "max_iters", "learning_rate", "out_dir", "compile", "attention", "wandb_run_name",
    "device", "block_size", "eval_tokens", "batch_size", "=", "==", " ", "\n", "\r", "\t", "**", "*", "/", "//", "%", "+", "-",
    "(",
    ")", "[", "]", "{", "}", "'", '"', '"""', "\\", "#", ":", ":=", ";", ",", ".", "@", "0", "1", "7", "64", "1e6", "1e308",
    "1e400",
    "-1", "0.1", "0x", "9" * 30, "0xf" + "f" * 4000, "1_000", "1j", "None", "True", "False", "'sa'", "'xsa'", "'cpu'",
    "f'{seed}'",
    "b'x'", "lambda: 1", "import os", "not ", "if ", " if 1 else 2", "for x in y", "é", "\u2028", "\ufeff", "\0", "\ud800", "²",
]


def mutate(text: str, rng: random.Random) -> str:
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.choice((0, 0, 1, 1, 2, 5, 20)))
        text = text[:start] + "".join(rng.choices(PIECES, k=rng.choice((0, 1, 1, 2, 4)))) + text[stop:]
    return text


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_fuzz_gives_a_config_or_an_input_error(file):
    """Mutations of this repository's own files and of plausible arguments, 1000 each."""
    rng = random.Random(0)
    sources = [path.read_text() for path in sorted(ROOT.glob("config/*.py"))]
    sources += [f"{f.name} = {f.default!r}\n" for f in fields(Config)]
    arguments = [f"--{f.name}={f.default}" for f in fields(Config)]
    outcomes = {"file": [0, 0], "argument": [0, 0]}
    for kind in ("file", "argument") * 1000:
        if kind == "file":
            content = mutate(rng.choice(sources), rng).encode("utf-8", "surrogatepass")
            argv = [file(content)]
        else:
            argv = content = [mutate(argument, rng) if rng.random() < 0.7 else argument for argument in rng.sample(arguments, 2)]
        begin = time.monotonic()
        try:
            config = load(argv)
        except InputError as error:
            assert str(error) and "\n" not in str(error), content
            outcomes[kind][1] += 1
        except SystemExit:
            assert set(argv) & {"--help", "-h"}
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error} from {content!r}") from error
        else:
            assert isinstance(config, Config) and json.loads(json.dumps(as_dict(config), allow_nan=False)) == as_dict(config)
            outcomes[kind][0] += 1
        assert time.monotonic() - begin < 2, content
    assert all(good > 50 and bad > 50 for good, bad in outcomes.values()), outcomes


# --- the whole ---------------------------------------------------------------------------------------------------------------


def test_help_lists_every_setting_once_with_type_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        load(["config/none.py", "--lerning_rate=1", "--help"])  # help comes before any complaint
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.strip() == help_text().strip()
    listed = re.findall(r"^  --(\w+)=(.*)  \((.+)\)\n        (\S.+)$", text, flags=re.MULTILINE)
    assert sorted(name for name, *_ in listed) == sorted(f.name for f in fields(Config))
    defaults = {f.name: f.default for f in fields(Config)}
    assert all(default == str(defaults[name]) for name, default, _, _ in listed)
    for name in REPLACED:
        assert f"--{name}=" not in text
    kinds = {name: kind for name, _, kind, _ in listed}
    assert kinds["max_iters"] == "whole number" and kinds["min_lr"] == "number | None"
    assert kinds["attention"].startswith("sa | xsa |")
    assert kinds["wandb_log"] == "True or False" and kinds["compile"] == "True or False | None" and kinds["out_dir"] == "text"


def test_help_of_the_program_runs_without_torch_s_devices_or_data():
    result = subprocess.run([sys.executable, "train.py", "-h"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "--attention=sa" in result.stdout and result.stderr == ""


def test_every_setting_can_be_given_its_default_by_flag_and_by_file(file):
    """No setting whose default its own type refuses."""
    for f in fields(Config):
        assert as_dict(load([f"--{f.name}={f.default}"])) == as_dict(load([]))
        assert as_dict(load([file(f"{f.name} = {f.default!r}")])) == as_dict(load([]))


def test_saved_settings_are_all_of_them_and_load_again(file):
    config = load(["--attention=xsa", "--n_kv_head=4", "--compile=false", "--wandb_group=7"])
    saved = json.loads(json.dumps(as_dict(config)))
    assert set(saved) == {f.name for f in fields(Config)}
    assert saved["wandb_run_name"] is None and saved["wandb_group"] == "7" and saved["min_lr"] == config.learning_rate / 10
    assert load([file("".join(f"{key} = {value!r}\n" for key, value in saved.items()))]) == config


def test_model_s_part_is_gptconfig_s():
    ours, model = get_type_hints(Config, include_extras=True), get_type_hints(GPTConfig, include_extras=True)
    assert {key: ours[key] for key in model} == model
    assert {f.name: f.default for f in fields(Config) if f.name in model} == {f.name: f.default for f in fields(GPTConfig)}
    assert Config().model_config() == GPTConfig()
    changed = load(["--attention=xsa", "--n_head=4", "--n_kv_head=2", "--head_dim=32", "--n_sink=3", "--bias=true"])
    assert type(changed.model_config()) is GPTConfig
    assert all(getattr(changed.model_config(), f.name) == getattr(changed, f.name) for f in fields(GPTConfig))
    assert all(len(get_args(hint)) == 2 for hint in ours.values())


@pytest.mark.parametrize("total, micro, ranks, micro_steps", [
    (8, 2, 1, 4), (8, 2, 2, 2), (8, 2, 4, 1), (8, 8, 1, 1), (6, 1, 3, 2),
])
def test_accumulation(total, micro, ranks, micro_steps):
    assert load([f"--global_batch_size={total}", f"--micro_batch_size={micro}"]).accumulation(ranks) == micro_steps


@pytest.mark.parametrize("total, micro, ranks", [
    (8, 3, 1), (8, 16, 1), (256, 8, 3), (1, 8, 8), (12, 8, 2), (7, 4, 1), (2**62, 7, 1), (10**18, 10**18 - 1, 2), (1, 2**62, 1),
])
def test_accumulation_that_does_not_come_out_proposes_what_does(total, micro, ranks):
    config = load([f"--global_batch_size={total}", f"--micro_batch_size={micro}"])
    begin = time.monotonic()
    with pytest.raises(InputError) as caught:
        config.accumulation(ranks)
    assert time.monotonic() - begin < 1
    proposals = re.findall(r"--(\w+)=(\d+)", str(caught.value))
    assert proposals
    for key, value in proposals:
        changed = load([f"--global_batch_size={total}", f"--micro_batch_size={micro}", f"--{key}={value}"])
        assert changed.accumulation(ranks) >= 1
