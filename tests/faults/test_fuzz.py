"""Some hundred broken inputs of each kind, and those that are meant to run code, to hang or to eat memory."""

import contextlib
import io
import os
import pickle
import time
import zipfile

import pytest
import torch

import checkpoint
import configurator
import train
from command_line import InputError
from model import GPT
from scripts import experiments
from tests.faults.conftest import build_dataset
from tests.faults.driver import SMALL
from tests.faults.fuzz import Fuzzer, bounded_memory, case, cases, describe


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory) -> Fuzzer:
    folder = tmp_path_factory.mktemp("fuzz")
    build_dataset(folder / "source", n_documents=12)
    assert train.main([*SMALL, f"--dataset={folder}/source", f"--out_dir={folder}/straight"]) == 0
    return Fuzzer(folder, folder / "source", folder / "straight")


def test_mutated_inputs_end_in_success_or_one_clean_line(fuzzer):
    counts, faults = cases(fuzzer, 600, seed=7)
    assert not faults, faults[0]
    assert all(counts[kind, "refused"] > 10 for kind in fuzzer.kinds), describe(counts)
    assert sum(counts[kind, "accepted"] > 0 for kind in fuzzer.kinds) >= 8, describe(counts)


def test_a_fault_is_noticed(fuzzer, monkeypatch):
    """The fuzzer sees what it is there for: another error, a message of two lines, a hang, memory without end."""
    def hang(rng):
        while True:
            time.sleep(0.01)

    monkeypatch.setattr("tests.faults.fuzz.SECONDS", 1)
    greedy = lambda rng: "x" * (1 << 34)  # noqa: E731
    for broken, words in ((lambda rng: {}["x"], "KeyError"), (hang, "took more than"), (greedy, "MemoryError")):
        monkeypatch.setitem(fuzzer.kinds, "shard", broken)
        with bounded_memory(), pytest.raises(AssertionError, match=words):
            case(fuzzer, "shard", 0, 0)


CODE = [
    "seed = __import__('os').system('touch {}')", "out_dir = open('{}', 'w')", "seed = (lambda: open('{}', 'w'))()",
    "seed = [open('{}', 'w') for _ in '1']", "seed = (x := open('{}', 'w'))", "out_dir = f\"{{open('{}', 'w')}}\"",
    "import os; os.mkdir('{}')", "seed: open('{}', 'w') = 1", "seed = 1 if open('{}', 'w') else 2",
    "seed = seed.__class__.__base__.__subclasses__()", "out_dir = out_dir.format(seed)", "out_dir = '%s' % seed",
    "seed = seed[0]", "class seed: open('{}', 'w')", "def seed(x=open('{}', 'w')): ...", "seed = await x", "seed = yield",
    "seed = *seed,", "seed = `1`", "exec('')", "del seed", "global seed", "seed += 1", "seed, out_dir = 1, 2", "seed.x = 1",
    "seed[0] = 1", "# coding: rot13\nfrrq = 1",
]
BOMBS = [
    "seed = 2**10**9", "seed = 9**9**9**9", "seed = 2**62**2", "seed = " + "(" * 40_000 + ")" * 40_000,
    "seed = " + "-" * 90_000 + "1", "seed = " + "1+" * 45_000 + "1", "seed = " + "9" * 99_000, "out_dir = 'a' * 10**9",
    "seed = [0] * 10**9", "seed = 10**400 % 7", "learning_rate = 1e308 * 10 * 10", "n_layer = 10**9", "n_embd = 2**62",
    "block_size = 10**18", "n_head = 2**40", "vocab_size = 10**12", "window_pattern = 'w' * 10**9", "seed = 1 << 10**9",
    "seed = 'x' + " * 9_000 + "'x'",
]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize("read", [lambda path: configurator.load([path]), lambda path: experiments.read(path, "paper")])
def test_files_of_settings_run_no_code_and_cost_nothing(tmp_path, read):
    mark, path = tmp_path / "mark", tmp_path / "settings.py"
    with bounded_memory():
        for line in [code.replace("{}", str(mark)).replace("{{", "{").replace("}}", "}") for code in CODE] + BOMBS:
            path.write_text(line + "\n")
            begin = time.monotonic()
            with pytest.raises(InputError) as caught:
                read(str(path))
            assert time.monotonic() - begin < 5 and "\n" not in str(caught.value), line[:80]
            assert len(str(caught.value)) < 1000, line[:80]
    assert not mark.exists()


class Payload:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def test_checkpoints_run_no_code(fuzzer, tmp_path):
    """Callables in the pickle of a file that is a sound checkpoint otherwise, wherever they stand."""
    mark = tmp_path / "mark"
    payloads = [
        Payload(os.mkdir, str(mark)), Payload(os.system, f"touch {mark}"), Payload(eval, f"open({str(mark)!r}, 'w')"),
        Payload(exec, f"open({str(mark)!r}, 'w')"), Payload(open, str(mark), "w"), Payload(getattr, "x", "upper"),
        Payload(torch.load, str(mark)), Payload(__import__, "os"), Payload(bytearray, 1 << 40),
    ]
    path = tmp_path / "ckpt_00000012.pt"
    for payload in payloads:
        for key in ("config", "rng", "wandb_id", "new"):
            torch.save(fuzzer.state | {key: payload}, path)
            for read in (checkpoint.load, checkpoint.damage):
                with pytest.raises(InputError), bounded_memory():
                    read(path)
            if key == "config":
                with pytest.raises(ValueError, match="more than tensors and plain Python$|: MemoryError$"):
                    GPT.from_checkpoint(path)
    path.write_bytes(pickle.dumps(payloads[0]))  # the form before zip archives
    with pytest.raises(InputError):
        checkpoint.load(path)
    assert not mark.exists()
    pickle.loads(path.read_bytes())
    assert mark.exists()  # so it would have shown


def test_archive_that_unpacks_to_gigabytes_is_refused_without_holding_it(tmp_path):
    path = tmp_path / "ckpt_00000001.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as file:
            for _ in range(300):
                file.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    for read in (checkpoint.load, checkpoint.damage):
        with bounded_memory(), pytest.raises(InputError):
            read(path)


@pytest.mark.parametrize("arguments", [
    ["--n_layer=1000000000"], ["--n_embd=1073741824", "--n_head=1"], ["--vocab_size=1000000000000"],
    ["--block_size=1e18", "--eval_tokens=1e18"],
    ["--n_embd=16777216", "--n_head=16777216", "--head_dim=16777216"], ["--n_embd=1048576"], ["--head_dim=2e18"],
])
def test_sizes_that_no_machine_has_end_at_once(fuzzer, tmp_path, arguments):
    errors = io.StringIO()
    begin = time.monotonic()
    with contextlib.redirect_stderr(errors), bounded_memory():
        status = train.main([*SMALL, f"--dataset={fuzzer.dataset}", f"--out_dir={tmp_path}/run", *arguments])
    assert status in (1, 2) and errors.getvalue().startswith("error: ") and errors.getvalue().count("\n") == 1, errors.getvalue()
    assert time.monotonic() - begin < 20 and not (tmp_path / "run").exists()
