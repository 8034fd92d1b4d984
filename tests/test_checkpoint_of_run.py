"""checkpoint.py: what is in a checkpoint of train.py, and which ones a run takes back."""

import collections
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import train
from command_line import InputError
from configurator import load
from distributed import Ranks
from model import GPT
from tests.test_checkpoint import names, same

ROOT = Path(__file__).parent.parent

TRAINED = ["--vocab_size=257", "--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--eval_tokens=64",
           "--global_batch_size=2", "--micro_batch_size=1", "--max_iters=4", "--save_interval=2", "--device=cpu",
           "--dtype=float16", "--n_sink=1", "--dropout=0.1", "--warmup_iters=0", "--learning_rate=1e-2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The run folder of four steps in fp16, so that the gradient scaler has a state."""
    folder = tmp_path_factory.mktemp("trained")
    ids = np.frombuffer(b"to be or not to be, that is the question. " * 200, dtype=np.uint8).astype(np.uint16)
    ids[:-2000].tofile(folder / "train.bin")
    ids[-2000:].tofile(folder / "val.bin")
    assert train.main([*TRAINED, f"--dataset={folder}", f"--out_dir={folder}/run"]) == 0
    return folder / "run"


def leaves(value, where="state"):
    """Every value in a checkpoint with its place."""
    if type(value) in (dict, collections.OrderedDict):
        for key, item in value.items():
            yield f"key of {where}", key
            yield from leaves(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from leaves(item, f"{where}[{i}]")
    else:
        yield where, value


def test_real_checkpoint_holds_plain_tensors_and_plain_python(trained):
    path = checkpoint.latest(trained)
    assert path.name == "ckpt_00000004.pt" and checkpoint.damage(path) is None
    state = torch.load(path, weights_only=False)  # as whatever was saved, so that a type which weights_only allows shows too
    assert state.keys() == checkpoint.KEYS.keys()
    found = list(leaves(state))
    for where, value in found:
        assert type(value) in (torch.Tensor, str, int, float, bool, type(None)), f"{where} is {type(value)}"
        if isinstance(value, torch.Tensor):
            assert not value.requires_grad and value.device.type == "cpu"
            assert value.untyped_storage().nbytes() == value.nbytes, f"{where} drags a larger storage along"
    assert sum(isinstance(value, torch.Tensor) for _, value in found) > 30
    assert state["step"] == 4 and state["tokens"] == 4 * 2 * 16 and state["evaluated_step"] == 4 and state["scaler"]["scale"] > 0
    assert not any("module." in key or "_orig_mod" in key for key in state["model"])


def test_real_checkpoint_saved_again_is_the_same(trained, tmp_path):
    """Two rounds of load and save move no name and no number."""
    state = checkpoint.load(checkpoint.latest(trained))
    again = checkpoint.load(checkpoint.save(tmp_path, checkpoint.load(checkpoint.save(tmp_path, state, keep=2)), keep=2))
    assert same(state, again) and list(state["model"]) == list(again["model"])


def restored(state: dict, *arguments: str) -> train.Run:
    run = train.Run(load([*TRAINED, *arguments]), Ranks(0, 1, torch.device("cpu")))
    run._build(state)
    return run


@pytest.mark.parametrize("spoil, message", [
    (lambda s: s[0].update(exp_avg=torch.zeros(3)), r"exp_avg of wte.weight is torch.float32 \[3\], wanted .* \[257, 16\]"),
    (lambda s: s[1].update(exp_avg_sq=torch.zeros(3)), "exp_avg_sq of .* wanted"),
    (lambda s: s[0].update(exp_avg=torch.zeros(()).expand(257, 16)), "exp_avg of wte.weight is .* wanted a plain tensor"),
    (lambda s: s[0].update(exp_avg=s[0]["exp_avg"].double()), "exp_avg of wte.weight is torch.float64"),
    (lambda s: s[0].update(exp_avg=torch.zeros(257, 16, device="meta")), "exp_avg of wte.weight is .* wanted a plain tensor"),
    (lambda s: s[0].update(exp_avg=None), "exp_avg of wte.weight is None, wanted a plain tensor"),
    (lambda s: s[0].update(max_exp_avg_sq=s[0]["exp_avg_sq"]), "the optimizer's state of wte.weight is .*max_exp_avg_sq"),
    (lambda s: s[0].pop("exp_avg_sq"), "the optimizer's state of wte.weight is"),
    (lambda s: s[2].update(step=torch.tensor(0.0)), "the optimizer's step of .* is 0, wanted 4"),
    (lambda s: s[2].update(step=4), "the optimizer's step of .* wanted a plain tensor"),
    (lambda s: [one.update(step=torch.tensor(3.0)) for one in s.values()], "the optimizer's step of wte.weight is 3, wanted 4"),
    (lambda s: s.pop(3), "after 4 steps taken the optimizer has states of .* the model has"),
    (lambda s: s.clear(), "after 4 steps taken the optimizer has states of 0 parameters, the model has"),
    (lambda s: s.update({999: s[0]}), "the model has"),
])
def test_an_optimizer_state_that_is_not_the_model_s_is_refused(trained, spoil, message):
    """torch takes it, and trains on from something else, or writes beyond a moment's end."""
    state = checkpoint.load(checkpoint.latest(trained))
    spoil(state["optimizer"]["state"])
    with pytest.raises(InputError, match=f"the checkpoint of step 4 does not fit this model: .*{message}"):
        restored(state)


def test_parameters_in_other_groups_weights_of_another_dtype_and_layers_too_few_are_refused(trained):
    state = checkpoint.load(checkpoint.latest(trained))
    groups = state["optimizer"]["param_groups"]
    for part, message in (
        ({"optimizer": state["optimizer"] | {"param_groups": [groups[0] | {"params": groups[0]["params"][::-1]}, groups[1]]}},
         "groups of parameters"),
        ({"model": state["model"] | {"wte.weight": state["model"]["wte.weight"].long()}}, "wte.weight is torch.int64"),
        ({"qk_clips": []}, "qk_clips has 0 layers, wanted 1"),
    ):
        with pytest.raises(InputError, match=f"does not fit this model: .*{message}"):
            restored(state | part)


def test_a_resumed_optimizer_has_the_moments_of_the_checkpoint_and_the_recipe_of_the_settings(trained):
    state = checkpoint.load(checkpoint.latest(trained))
    optimizer = restored(state, "--weight_decay=0.3", "--beta2=0.9").optimizer
    assert [(group["weight_decay"], group["betas"]) for group in optimizer.param_groups] == [(0.3, (0.9, 0.9)), (0.0, (0.9, 0.9))]
    assert same(optimizer.state_dict()["state"], state["optimizer"]["state"])


KILLED_WHILE_SAVING = """
import os, sys, signal
import torch
import checkpoint
folder, path = sys.argv[1:]
state = checkpoint.load(path)
write = torch.save
def slow(state, file):
    write(state, file)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = slow
checkpoint.save(folder, state | {"step": 9}, keep=1)
"""


def test_killed_with_everything_written_but_the_name(trained, tmp_path):
    checkpoint.save(tmp_path, checkpoint.load(checkpoint.latest(trained)), keep=1)
    result = subprocess.run([sys.executable, "-c", KILLED_WHILE_SAVING, str(tmp_path), str(checkpoint.latest(trained))], cwd=ROOT)
    assert result.returncode == -9
    assert names(tmp_path) == [".ckpt_00000009.pt.nanoxsa.tmp", "ckpt_00000004.pt", "latest"]
    assert checkpoint.load(checkpoint.latest(tmp_path))["step"] == 4
    checkpoint.sweep(tmp_path)
    assert names(tmp_path) == ["ckpt_00000004.pt", "latest"]


def test_no_flipped_bit_reaches_an_evaluation(trained, tmp_path):
    """torch.load alone reads what is there."""
    path = tmp_path / "ckpt_00000004.pt"
    whole = checkpoint.latest(trained).read_bytes()
    path.write_bytes(whole)
    weight = GPT.from_checkpoint(path).wte.weight.detach().clone()
    flipped = bytearray(whole)
    flipped[whole.index(weight.numpy().tobytes()) + 10] ^= 4
    path.write_bytes(flipped)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["wte.weight"], weight)
    with pytest.raises(ValueError, match="checksum of .* does not match"):
        GPT.from_checkpoint(path)
    with pytest.raises(InputError, match="ckpt_00000004.pt is damaged .checksum of .* does not match"):
        checkpoint.latest(tmp_path)
