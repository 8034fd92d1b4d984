"""eval/bias.py against a brute-force fp64 computation with whole T x T matrices, which shares no code with model.py for sa, xsa,
kv groups and sinks."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import train
from data import shards
from eval import bias
from model import GPT
from presets import PRESETS, GPTConfig

TINY = {"block_size": 12, "vocab_size": 61, "n_layer": 3, "n_head": 4, "n_embd": 24, "head_dim": 6}
VARIANTS = {
    "sa": {},
    "xsa": {"attention": "xsa"},
    "gqa": {"n_kv_head": 2, "bias": True},
    "xsa, mqa": {"attention": "xsa", "n_kv_head": 1},
    "sinks": {"n_sink": 3},
    "xsa, gqa, sinks": {"attention": "xsa", "n_kv_head": 2, "n_sink": 2},
}
MANY = 2**30  # weights at a time: all rows at once
ERROR = {"rtol": 1e-9, "atol": 1e-12}


def make_model(trained: bool = False, **settings) -> GPT:
    """In fp64, with attention far from uniform; or after some steps of training."""
    model = GPT(GPTConfig(**TINY | settings), seed=1).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(6)
    if trained:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(30):
            x, y = make_batch(8, seed=100 + step)
            _, loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def make_batch(n: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token t is often followed by t + 1: something to learn."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 2, (n, TINY["block_size"] + 1), generator=generator)
    tokens = (torch.randint(TINY["vocab_size"], (n, 1), generator=generator) + steps.cumsum(1)) % TINY["vocab_size"]
    return tokens[:, :-1], tokens[:, 1:]


def cut(batch: tuple[Tensor, Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(*(t.split(size) for t in batch), strict=True)


# --- brute force ------------------------------------------------------------------------------------------------------------


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))


def head_means(p: np.ndarray, v: np.ndarray, strength: float | None, n_sink: int) -> dict[str, float]:
    """Of one head and sequence: weights p (T, T) and values v (T, d), with sinks; pair by pair and position by position."""
    y = p @ v
    real = range(n_sink, len(v))
    m = v[n_sink:].mean(0)
    found = {
        "cos_v_v": np.mean([cosine(v[i], v[j]) for i in real for j in real if i < j]),
        "a_own": np.mean([p[i, i] for i in real]),
        "cos_y_v": np.mean([cosine(y[i], v[i]) for i in real]),
        "common": np.mean([y[i] @ m / np.linalg.norm(y[i]) / np.linalg.norm(v[i]) for i in real]),
        "token": np.mean([y[i] @ (v[i] - m) / np.linalg.norm(y[i]) / np.linalg.norm(v[i]) for i in real]),
    }
    if strength is not None:
        z = [y[i] - strength * (y[i] @ v[i]) / (v[i] @ v[i]) * v[i] for i in real]
        found["cos_z_v"] = np.mean([0.0 if np.linalg.norm(z[n]) < 1e-12 else cosine(z[n], v[i]) for n, i in enumerate(real)])
    return found


def brute_force(model: GPT, idx: Tensor) -> list[dict[str, np.ndarray]]:
    """Per layer (sequences, heads) of every mean, from the weights of a model with the plain projection and softmax."""
    c, w = model.config, {name: p.detach() for name, p in model.named_parameters()}
    H, K, d = c.n_head, c.n_kv_head, c.head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]
        return x + w.get(f"{name}.bias", 0)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    layers = [[] for _ in range(c.n_layer)]
    for tokens in idx:
        x = w["wte.weight"][tokens]
        if c.n_sink:
            x = torch.cat((w["sink"], x))
        x = norm(x, "ln_emb")
        T = len(x)
        angle = torch.arange(T, dtype=x.dtype)[:, None] / c.rope_base ** (torch.arange(0, d, 2, dtype=x.dtype) / d)
        turn = torch.polar(torch.ones_like(angle), angle)
        for layer in range(c.n_layer):
            name = f"h.{layer}"
            qkv = linear(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn").split(d, dim=1)
            outputs, means = [], []
            for h in range(H):
                g = h // (H // K)
                q, k = (torch.complex(part[:, : d // 2], part[:, d // 2 :]) * turn for part in (qkv[h], qkv[H + g]))
                s = (q @ k.conj().T).real / math.sqrt(d)
                p = s.masked_fill(torch.ones(T, T).triu(1) > 0, -math.inf).softmax(-1)
                v = qkv[H + K + g]
                y = p @ v
                means.append(head_means(p.numpy(), v.numpy(), 1.0 if c.exclusive == "on" else None, c.n_sink))
                outputs.append(y - (y * v).sum(1, keepdim=True) / (v * v).sum(1, keepdim=True) * v if c.exclusive == "on" else y)
            layers[layer].append(means)
            x = x + linear(torch.cat(outputs, dim=1), f"{name}.attn.c_proj")
            x = x + linear(F.gelu(linear(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")), f"{name}.mlp.c_proj")
    found = []
    for sequences in layers:
        joined = {key: np.array([[head[key] for head in heads] for heads in sequences]) for key in sequences[0][0]}
        found.append(joined | {"cos_v_v": joined["cos_v_v"][:, :: H // K]})  # one for each kv head
    return found


@pytest.mark.parametrize("trained", [False, True], ids=["random", "trained"])
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=list(VARIANTS))
def test_equals_brute_force(settings, trained):
    model, batch = make_model(trained, **settings), make_batch()
    found, loss = bias.measure(model, cut(batch, 2), MANY)
    assert loss == pytest.approx(model(*batch)[1].item())
    for layer, expected in zip(found, brute_force(model, batch[0]), strict=True):
        assert layer.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(layer[key], torch.from_numpy(expected[key]), **ERROR)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(name):
    """Against whole matrices from the model's own definition of its weights, which test_attention.py checks."""
    model, (x, y) = make_model(attention=name, n_sink=1), make_batch()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "alpha" in key or "sink_logit" in key:
                p.fill_(0.7)
    seen = []
    with bias.watch(model, lambda layer, *tensors: seen.append(tensors)), torch.no_grad():
        model(x, y)
    found, _ = bias.measure(model, cut((x, y), 2), 100)
    for attn, (q, k, v, _), layer in zip((block.attn for block in model.h), seen, found, strict=True):
        p = attn.probabilities(q, k).detach().numpy()
        strengths = {"off": [None], "on": [1.0]}.get(attn.exclusive) or attn.alpha.tanh().tolist()
        group = p.shape[1] // v.shape[1]
        for b in range(len(x)):
            for h in range(p.shape[1]):
                expected = head_means(p[b, h], v[b, h // group].numpy(), strengths[h % len(strengths)], n_sink=1)
                assert expected.keys() == layer.keys()
                assert layer["cos_v_v"][b, h // group].item() == pytest.approx(expected.pop("cos_v_v"), rel=1e-8, abs=1e-10)
                for key, value in expected.items():
                    assert layer[key][b, h].item() == pytest.approx(value, rel=1e-8, abs=1e-10), key


@pytest.mark.parametrize("settings", [{}, VARIANTS["xsa, gqa, sinks"], {"attention": "gsxa"}], ids=["sa", "xsa", "gsxa"])
def test_batch_and_chunk_size_do_not_matter(settings):
    model, batch = make_model(**settings), make_batch(7)
    one, loss = bias.measure(model, cut(batch, 7), MANY)
    for size, max_weights in ((1, 1), (2, 130), (7, 3 * 7 * 4 * 12)):
        other, other_loss = bias.measure(model, cut(batch, size), max_weights)
        assert other_loss == pytest.approx(loss)
        for a, b in zip(one, other, strict=True):
            for key in a:
                torch.testing.assert_close(a[key], b[key], rtol=1e-10, atol=1e-14)


def test_weights_never_exist_as_a_whole(monkeypatch):
    model, (x, y) = make_model(), make_batch()
    most = 0
    attn_class = type(model.h[0].attn)
    probabilities = attn_class.probabilities

    def spy(*arguments):
        nonlocal most
        p = probabilities(*arguments)
        most = max(most, p.numel())
        return p

    monkeypatch.setattr(attn_class, "probabilities", spy)
    bias.measure(model, iter([(x, y)]), 5 * 4 * 12 * 3)
    assert 0 < most <= 5 * 4 * 12 * 3 < 5 * 4 * 12 * 12


def test_parts_add_up_and_xsa_leaves_nothing():
    model, batch = make_model(attention="xsa").float(), make_batch()
    for layer in bias.measure(model, cut(batch, 5), MANY)[0]:
        torch.testing.assert_close(layer["common"] + layer["token"], layer["cos_y_v"], rtol=0, atol=1e-14)
        assert layer["cos_z_v"].abs().max() < 1e-9  # position 0 included, where z is rounding alone
        assert layer["cos_y_v"].abs().max() > 0.05


def test_z_is_what_the_model_passes_on():
    """The output projection of z, written out, is the exclusive attention's output."""
    model, (x, y) = make_model(attention="xsa", n_kv_head=2), make_batch()
    outputs, seen = [], []
    for block in model.h:
        block.attn.register_forward_hook(lambda _, inputs, output: outputs.append(output[0]))
    with bias.watch(model, lambda layer, *tensors: seen.append(tensors)), torch.no_grad():
        model(x, y)
    for block, (_, _, v, y), output in zip(model.h, seen, outputs, strict=True):
        v = v.repeat_interleave(2, dim=1)
        z = y - (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
        torch.testing.assert_close(z.transpose(1, 2).flatten(2) @ block.attn.c_proj.weight.T, output)
    assert not any("attend" in vars(block.attn) for block in model.h)


def test_zero_vectors_count_as_zero():
    model, batch = make_model(), make_batch()
    with torch.no_grad():
        model.h[1].attn.c_attn.weight[2 * 4 * 6 :].zero_()
    layer = bias.measure(model, cut(batch, 5), MANY)[0][1]
    assert all((layer[key] == 0).all() for key in ("cos_v_v", "cos_y_v", "common", "token")) and (layer["a_own"] > 0).all()


def test_summary_from_known_numbers():
    found = bias.summarize({"a_own": torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.float64)})["a_own"]
    assert found["mean"] == 3 and found["heads"] == [2, 4]
    assert found["standard_error"] == pytest.approx(1.5) and found["heads_standard_error"] == pytest.approx([1, 2])


# --- the command ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs of a few steps on a small data set, all in one folder."""
    folder = tmp_path_factory.mktemp("bias")
    data = folder / "data"
    rng = np.random.default_rng(0)
    shards.begin(data, {})
    splits = {}
    for split, n in (("train", 4000), ("val", 200)):
        with shards.ShardWriter(data, "x", split, eot=256) as writer:
            writer.write((np.cumsum(rng.integers(0, 3, n)) % 256).astype(np.uint16))
            splits[split] = writer.close()
    shards.write_meta(data, tokenizer="byte", vocab_size=257, eot=256, splits=splits)
    for name in ("sa", "xsa"):
        assert train.main([f"--attention={name}", f"--out_dir={folder / name}", f"--dataset={data}", "--n_layer=2", "--n_head=2",
                           "--n_embd=16", "--block_size=16", "--vocab_size=257", "--global_batch_size=4", "--max_iters=3",
                           "--micro_batch_size=4", "--eval_tokens=32", "--warmup_iters=1", "--device=cpu"]) == 0
    return folder


def test_command(runs, capsys):
    capsys.readouterr()
    out = runs / "out"
    argv = [str(runs / "sa"), str(runs / "xsa" / "ckpt_00000003.pt"), "--sequences=5", "--device=cpu"]
    assert bias.main([*argv, "--batch_size=2", f"--out={out}"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout.strip() == (out / "bias.md").read_text().strip() and "5 sequences of 16" in stderr and "MB" in stderr
    assert (out / "bias.png").stat().st_size > 10_000
    record = json.loads((out / "bias.json").read_text())
    assert record["sequences"] == 5 and record["versions"]["torch"] == torch.__version__
    sa, xsa = record["checkpoints"]
    assert (sa["attention"], sa["step"], xsa["attention"], len(sa["layers"])) == ("sa", 3, "xsa", 2)
    assert "cos_z_v" not in sa["layers"][0] and abs(xsa["layers"][0]["cos_z_v"]["mean"]) < 1e-9
    for layer in sa["layers"]:
        assert len(layer["a_own"]["heads"]) == 2 and layer["a_own"]["standard_error"] > 0
        assert f"{layer['a_own']['mean']:.4f} ± {layer['a_own']['standard_error']:.4f}" in stdout

    assert bias.main([*argv, "--batch_size=5", f"--out={runs / 'other'}"]) == 0
    other = json.loads((runs / "other" / "bias.json").read_text())
    for a, b in zip(sa["layers"], other["checkpoints"][0]["layers"], strict=True):
        assert all(a[key]["heads"] == pytest.approx(b[key]["heads"], abs=1e-6) for key in a)


def test_an_earlier_result_stays_until_the_new_one_is_done(runs, capsys, monkeypatch):
    out, analyse = runs / "kept", bias.analyse
    argv = [str(runs / "sa"), str(runs / "xsa"), "--sequences=2", "--device=cpu", f"--out={out}"]
    assert bias.main(argv) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert {path.name for path in before} == {"bias.json", "bias.md", "bias.png"}

    def once(source, *rest):
        monkeypatch.setattr(bias, "analyse", lambda *_: 1 / 0)
        return analyse(source, *rest)

    monkeypatch.setattr(bias, "analyse", once)
    with pytest.raises(ZeroDivisionError):
        bias.main([*argv, "--seed=1"])
    assert {path: path.read_bytes() for path in before} == before
    assert len(json.loads((out / "bias.unfinished.json").read_text())["checkpoints"]) == 1
    monkeypatch.setattr(bias, "analyse", analyse)
    assert bias.main([*argv, "--seed=1"]) == 0
    assert set(out.iterdir()) == set(before) and (out / "bias.json").read_bytes() != before[out / "bias.json"]


def test_another_data_set_is_told(runs, capsys):
    data = runs / "data2"
    data.mkdir()
    np.arange(300, dtype=np.uint16).clip(max=256).tofile(data / "train.bin")
    np.arange(50, dtype=np.uint16).tofile(data / "val.bin")
    assert bias.main([str(runs / "sa"), f"--dataset={data}", "--sequences=2", "--device=cpu", f"--out={runs / 'o2'}"]) == 0
    assert "warning: " in capsys.readouterr().err


@pytest.mark.parametrize("argv, said", [
    ([], "CHECKPOINT_OR_RUN"),
    (["none"], "none"),
    (["{runs}"], "holds no checkpoint"),
    (["{runs}/data/meta.json"], "is not a checkpoint"),
    (["{runs}/sa", "--sequences=1"], "--sequences: wanted 2 to 1,000,000, found 1"),
    (["{runs}/sa", "--sequences=99999999999"], "--sequences: wanted 2 to 1,000,000, found 99,999,999,999"),
    (["{runs}/sa", "--batch_size=99999999999"], "--batch_size"),
    (["{runs}/sa", "--seed=99999999999999999999"], "--seed"),
    (["{runs}/sa", "--batch_size=0"], "--batch_size"),
    (["{runs}/sa", "--seed=-1"], "--seed"),
    (["{runs}/sa", "--dataset=nowhere"], "nowhere"),
    (["{runs}/sa", "--device=cuda:77"], "cuda:77"),
    (["{runs}/sa", "--device=meta"], "wanted cpu or cuda"),
])
def test_bad_arguments_exit_2_before_any_work(argv, said, runs, capsys, tmp_path):
    argv = [part.format(runs=runs) for part in argv]
    assert bias.main([*argv, f"--out={tmp_path / 'out'}"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1 and said in err
    assert not (tmp_path / "out").exists()
