"""scripts/sample.py on checkpoints of tiny models."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import checkpoint
from configurator import Config
from data.tokenizer import get_tokenizer
from model import GPT
from scripts import sample

TINY = {"block_size": 32, "vocab_size": 320, "n_layer": 2, "n_head": 2, "n_embd": 32, "eval_tokens": 1024, "attention": "xsa"}


def write_checkpoint(path: Path, seed: int = 0, tokenizer: str | None = "byte", **settings) -> Path:
    config = Config(**TINY | settings)
    model = GPT(config.model_config(), seed=seed)
    step = int(path.stem.removeprefix("ckpt_")) if path.stem.startswith("ckpt_") else 7
    state = {
        "model": model.state_dict(), "optimizer": {}, "scaler": {}, "step": step, "tokens": 0, "evaluated_step": -1,
        "best_val_loss": None, "bad_steps": 0, "bad_steps_in_row": 0, "qk_clips": [], "spikes": {}, "data_hash": 0,
        "rng": torch.get_rng_state(), "config": asdict(config), "data": {"tokenizer": tokenizer}, "wandb_id": None,
    }
    assert state.keys() == checkpoint.KEYS.keys()
    torch.save(state, path)
    return path


@pytest.fixture
def file(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "ckpt_00000007.pt")


def run(capsys, *argv) -> tuple[int, str, str]:
    status = sample.main([str(a) for a in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_greedy_text_is_the_likeliest_token_each_time(file, capsys):
    status, out, err = run(capsys, file, "--prompt=ab", "--max_new_tokens=8", "--temperature=0")
    model, tokenizer = GPT.from_checkpoint(file), get_tokenizer("byte")
    ids = [tokenizer.eot, *b"ab"]
    for _ in range(8):
        logits, _ = model(torch.tensor([ids]))
        ids.append(int(logits[0, -1, : tokenizer.vocab_size].argmax()))
    assert status == 0
    assert out == f"----- sample 1 of 1 -----\n{tokenizer.decode(ids[1:])}\n"
    assert "step 7" in err and err.endswith(" tokens/s\n")


def test_samples_differ_and_the_seed_repeats_them(file, capsys):
    arguments = (file, "--prompt=x", "--num_samples=3", "--max_new_tokens=50", "--temperature=1")
    _, out, _ = run(capsys, *arguments)
    texts = out.split("----- sample ")[1:]
    assert [text[0] for text in texts] == ["1", "2", "3"] and len({text[1:] for text in texts}) == 3
    assert run(capsys, *arguments)[1] == out
    assert run(capsys, *arguments, "--seed=1")[1] != out


def test_padding_rows_of_the_embedding_are_never_sampled(tmp_path, capsys):
    config = Config(**TINY)
    model = GPT(config.model_config(), seed=0)
    with torch.no_grad():  # the ids that no text has are by far the likeliest
        model.wte.weight[257:] = 50 * model.ln_f.weight.new_ones(320 - 257, 32)
        model.wte.weight[256] = torch.randn(32, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "ckpt_00000001.pt"
    torch.save({"model": model.state_dict(), "config": asdict(config), "data": {"tokenizer": "byte"}, "step": 1}, path)
    assert run(capsys, path, "--num_samples=4", "--max_new_tokens=40", "--temperature=5", "--top_k=0")[0] == 0


def test_a_run_folder_gives_its_newest_checkpoint(tmp_path, capsys):
    old, new = (write_checkpoint(tmp_path / f"ckpt_0000000{step}.pt", seed=step) for step in (1, 2))
    (tmp_path / "latest").write_text(new.name + "\n")
    arguments = ("--prompt=q", "--max_new_tokens=30")
    status, out, err = run(capsys, tmp_path, *arguments)
    assert status == 0 and new.name in err
    assert out == run(capsys, new, *arguments)[1] != run(capsys, old, *arguments)[1]


def test_prompt_from_a_file_and_beyond_the_block(file, tmp_path, capsys):
    text = "Weißes Haus, " * 5
    (tmp_path / "start.txt").write_text(text, encoding="utf-8")
    status, out, _ = run(capsys, file, f"--prompt=FILE:{tmp_path / 'start.txt'}", "--max_new_tokens=3")
    assert status == 0 and text in out


def test_the_tokenizer_can_be_named(tmp_path, capsys):
    path = write_checkpoint(tmp_path / "x.pt", tokenizer=None)
    status, _, err = run(capsys, path)
    assert status == 2 and "--tokenizer=" in err
    assert run(capsys, path, "--tokenizer=byte", "--max_new_tokens=2")[0] == 0


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, capsys):
    status, out, err = run(capsys, write_checkpoint(tmp_path / "x.pt", vocab_size=128), "--max_new_tokens=2")
    assert status == 2 and out == "" and "vocab_size=128" in err


@pytest.mark.parametrize(("argument", "wanted"), [
    ("--prompt=FILE:/no/such/file", "/no/such/file"), ("--num_samples=0", "num_samples"),
    ("--max_new_tokens=0", "max_new_tokens"),
    ("--temperature=-1", "temperature"), ("--temperature=nan", "temperature"), ("--top_k=-1", "top_k"), ("--seed=x", "seed"),
    ("--device=abacus", "abacus"), ("--tokenizer=words", "words"), ("--tempreture=1", "tempreture"),
])
def test_bad_arguments(file, argument, wanted, capsys):
    status, out, err = run(capsys, file, argument)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and wanted in err


def test_bad_checkpoints(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("not a checkpoint")
    torch.save({"weights": 1}, tmp_path / "other.pt")
    for name in ("missing.pt", "empty", "text.pt", "other.pt"):
        status, out, err = run(capsys, tmp_path / name)
        assert status == 2 and out == "" and name in err
        assert err.startswith("error: ") and err.count("\n") == 1


def test_cuda_that_is_not_there_is_refused(file, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, _, err = run(capsys, file, "--device=cuda")
    assert status == 2 and "--device=cuda" in err
