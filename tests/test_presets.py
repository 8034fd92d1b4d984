"""presets.py: what presets and switches mean, which combinations are refused, what a model's shape costs by them."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

import model as model_module
from configurator import Config, attention_text, load
from model import GPT
from presets import PLAIN, PRESETS, GPTConfig, few_kv_heads

TINY = {"block_size": 16, "vocab_size": 61, "n_layer": 4, "n_head": 8, "n_embd": 32, "head_dim": 8}


def test_presets_name_switches_and_change_something():
    switches = {f.name for f in dataclasses.fields(GPTConfig)}
    resolved = {}
    for name, preset in PRESETS.items():
        assert preset.switches.keys() <= PLAIN.keys() <= switches and preset.line
        config = GPTConfig(**TINY, attention=name)
        resolved[name] = tuple(getattr(config, key) for key in PLAIN)
    assert len(set(resolved.values())) == len(PRESETS)


def test_an_explicit_switch_wins():
    config = load(["--attention=gsxa", "--gate=off", "--n_kv_head=6"])
    assert (config.gate, config.n_kv_head, config.exclusive, config.softmax) == ("off", 6, "on", "ssmax")
    assert [few_kv_heads(GPTConfig(n_head=n, n_embd=n * 8)) for n in (1, 2, 4, 6, 7, 12, 24, 40)] == [1, 1, 1, 1, 1, 3, 6, 10]

    few = [GPTConfig(n_head=n, n_embd=n * 8, attention="gqa", differential=True).n_kv_head for n in (2, 4, 8, 12, 24)]
    assert few == [2, 2, 2, 2, 6]


@pytest.mark.parametrize("cls", [GPTConfig, Config])
def test_another_preset_keeps_what_was_set_on_purpose(cls):
    config = cls(attention="gsxa", gate="element", n_embd=96)
    plain = config.with_attention("sa")
    assert type(plain) is cls and plain == cls(attention="sa", gate="element", n_embd=96)
    assert plain.with_attention("gsxa") == config
    for name in PRESETS:
        assert cls(attention="gqa").with_attention(name) == cls(attention=name)


@pytest.mark.parametrize("changes, key", [
    ({"attention": "diff", "n_head": 5, "n_embd": 40}, "n_head"), ({"attention": "diff", "n_kv_head": 1}, "n_kv_head"),
    ({"attention": "diff", "softmax": "sigmoid"}, "softmax"), ({"attention": "softcap", "qk_clip": 100.0}, "qk_clip"),
    ({"exclusive_layers": "sx"}, "exclusive"), ({"window_pattern": "wf"}, "window"), ({"position": "rx"}, "position"),
    ({"window": 4, "window_pattern": ""}, "window_pattern"), ({"window": -1}, "window"), ({"qk_clip": math.inf}, "qk_clip"),
    ({"exclusive": "on", "exclusive_layers": "off"}, "exclusive_layers"), ({"softmax": "max"}, "softmax"),
    ({"logit_softcap": -1.0}, "logit_softcap"), ({"logit_softcap": 1e39}, "logit_softcap"),
    ({"logit_softcap": 1e-50}, "logit_softcap"),
    ({"attention": "xsa", "block_size": 1}, "block_size"), ({"attention": "ssmax", "block_size": 1}, "block_size"),
    ({"gate": "heads"}, "gate"), ({"attention": "diff", "dropout": 0.1}, "dropout"),
    ({"attention": "xsa", "exclusive_layers": "ss"}, "exclusive_layers"), ({"attention": "xsa", "window": 1}, "window"),
    ({"window": 8, "window_pattern": "fff"}, "window_pattern"), ({"softmax": "ssmax", "window": 1}, "window"),
    ({"exclusive": "on", "exclusive_layers": "ssx", "n_layer": 2}, "exclusive_layers"),
])
def test_combinations_without_sense_are_refused_by_key(changes, key):
    with pytest.raises(ValueError, match=f"^{key} must be .*, found "):
        GPTConfig(**TINY | changes)


def test_list_shows_every_preset_at_the_given_shape(capsys):
    with pytest.raises(SystemExit) as caught:
        load(["config/1.4b.py", "--attention=list"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert text.strip() == attention_text(load(["config/1.4b.py"])).strip()
    rows = {line.split()[0]: line for line in text.splitlines() if line[:1].islower()}
    assert set(PRESETS) | {"attention"} == set(rows)
    assert f"-{24 * 2048 * 2 * 18 * 128:,}" in rows["gqa"] and "0.250" in rows["gqa"]
    assert all(PRESETS[name].paper in rows[name] and PRESETS[name].line in rows[name] for name in PRESETS)
    assert "n_head must be even" in attention_text(load(["--n_head=3", "--n_embd=96"]))


def test_flops_and_cache_count_what_a_query_sees():
    shape = {"n_layer": 4, "n_head": 8, "n_embd": 64, "head_dim": 16, "block_size": 100, "n_sink": 2, "vocab_size": 64}

    def attention_flops(**settings):
        gpt = GPT(GPTConfig(**shape | settings), seed=0)
        return gpt.flops_per_token() - 6 * (gpt.num_params() + 64 * 64)

    assert attention_flops() == attention_flops(attention="gsxa") == 12 * 4 * 8 * 16 * 102
    assert attention_flops(attention="gemma2") == 12 * 8 * 16 * 2 * (102 + 25)
    assert attention_flops(window=1000) == attention_flops()
    assert attention_flops(attention="diff") == 18 * 4 * 8 * 16 * 102
    for K in (8, 2):
        gpt = GPT(GPTConfig(**shape, n_kv_head=K), seed=0)
        caches = [model_module.KVCache(102) for _ in gpt.h]
        gpt._hidden(torch.zeros(1, 3, dtype=torch.long), caches)
        assert gpt.kv_cache_bytes_per_token(4) == sum(4 * (c.k.numel() + c.v.numel()) for c in caches) / 102


@pytest.mark.parametrize("size", ["0.7b", "1.4b", "2.7b"])
def test_gsxa_configs_are_the_paper_s_sizes_and_state_their_weights(size):
    counts = []
    configs = load([f"config/{size}.py", "--attention=gsxa"]), load([f"config/gsxa_{size}.py"]), load([f"config/{size}.py"])
    assert configs[0] == configs[1]
    for config in configs[1:]:
        with torch.device("meta"):
            counts.append(GPT(config.model_config()).num_params())
    C, inner, K = config.n_embd, config.n_head * config.head_dim, configs[0].n_kv_head
    kv, gates = 2 * C * (inner - K * config.head_dim), config.n_head * C
    assert counts[0] == counts[1] - config.n_layer * (kv - gates)
    text = Path(f"config/gsxa_{size}.py").read_text()
    assert f"{counts[0] / 1e9:.3f}B weights outside the embedding, the baseline's {counts[1] / 1e9:.3f}B" in text
