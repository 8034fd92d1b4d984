"""eval/harness.py against the harness's own Hugging Face backend, plain definitions in fp64, and itself in other batches."""

import copy
import dataclasses
import importlib
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train
from command_line import InputError
from data import local
from data.tokenizer import GPT2_CACHE_FILES, get_tokenizer
from distributed import Ranks, StopRequest
from eval import harness
from eval.harness import HarnessModel, Stopped, load_tasks, score
from eval.local_data import TASKS
from model import GPT, GPTConfig
from presets import PRESETS
from tracker import cut_back

ROOT = Path(__file__).parent.parent
ALONE = Ranks(0, 1, torch.device("cpu"))
BYTE = get_tokenizer("byte")
SMALL = {"block_size": 64, "vocab_size": 264, "n_layer": 2, "n_head": 4, "n_embd": 32}


def model(seed=0, **changes) -> GPT:
    """Small, and with weights larger than at the start, so that its probabilities are far from even."""
    made = GPT(GPTConfig(**SMALL | changes), seed=seed).eval()
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(4) if p.ndim == 2 else p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        made.wte.weight.mul_(6)
    return made


def instances(*pairs: tuple[str, ...]):
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


# --- against Hugging Face -----------------------------------------------------------------------------------------------------


def hugging_face(ours: GPT, gpt2_vocabulary: Path):
    """The harness's own backend over a GPT-NeoX with the same weights (test_model.py says why that is the same model)."""
    transformers = pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    c = ours.config
    theirs = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=c.vocab_size, hidden_size=c.n_embd, num_hidden_layers=c.n_layer, num_attention_heads=c.n_head,
        intermediate_size=4 * c.n_embd, hidden_act="gelu", rotary_pct=1.0, rotary_emb_base=10000,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        max_position_embeddings=c.block_size, layer_norm_eps=1e-5, use_parallel_residual=False, attention_bias=True,
        tie_word_embeddings=False,
    )).eval()
    with torch.no_grad():
        theirs.get_input_embeddings().weight.copy_(ours.ln_emb(ours.wte.weight))
        theirs.get_output_embeddings().weight.copy_(ours.wte.weight)
        theirs.gpt_neox.final_layer_norm.load_state_dict(ours.ln_f.state_dict())
        for a, b in zip(ours.h, theirs.gpt_neox.layers, strict=True):
            pairs = [(a.ln_1, b.input_layernorm), (a.ln_2, b.post_attention_layernorm), (a.attn.c_proj, b.attention.dense),
                     (a.mlp.c_fc, b.mlp.dense_h_to_4h), (a.mlp.c_proj, b.mlp.dense_4h_to_h)]
            for mine, its in pairs:
                its.load_state_dict(mine.state_dict())
            for name in ("weight", "bias"):
                qkv = getattr(a.attn.c_attn, name).unflatten(0, (3, c.n_head, c.head_dim)).transpose(0, 1).flatten(0, 2)
                getattr(b.attention.query_key_value, name).copy_(qkv)
    tokenizer = transformers.GPT2TokenizerFast(*(str(gpt2_vocabulary / GPT2_CACHE_FILES[name])
                                                 for name in ("encoder.json", "vocab.bpe")))
    return HFLM(pretrained=theirs, tokenizer=tokenizer, max_length=c.block_size, batch_size=4, device="cpu")


@pytest.fixture(scope="module")
def both(gpt2_vocabulary):
    """Our interface and Hugging Face's, over the same weights. The padding rows are out of play: HF would let them win."""
    ours = model(vocab_size=50304, block_size=128, bias=True)
    with torch.no_grad():
        ours.wte.weight[50257:] = 0
    return HarnessModel(ours, get_tokenizer("gpt2"), ALONE, batch_tokens=700), hugging_face(ours, gpt2_vocabulary)


@pytest.mark.parametrize("source", ["own", "real"])
def test_log_likelihoods_equal_hugging_faces_on_all_eight_tasks(both, task_data, source):
    """The real items are there once `python -m eval.local_data --out=data/tasks` has been run."""
    folder = task_data if source == "own" else ROOT / "data" / "tasks"
    if not folder.is_dir():
        pytest.skip("no data/tasks")
    ours, theirs = both
    tasks = load_tasks(list(TASKS), folder, limit=3)
    truncated = 0
    for task in tasks.values():
        requests = task.instances
        found, expected = ours.loglikelihood(requests, disable_tqdm=True), theirs.loglikelihood(requests, disable_tqdm=True)
        assert len(found) == len(requests) >= 3
        for (logp, greedy), (wanted, wanted_greedy) in zip(found, expected, strict=True):
            assert logp == pytest.approx(wanted, abs=2e-3, rel=1e-6) and greedy == wanted_greedy
        truncated += sum(len(ours.tok_encode("".join(request.args))) > 129 for request in requests)
    assert truncated >= 4  # contexts longer than the model's were among them


def test_odd_requests_equal_hugging_faces(both):
    """Empty contexts, trailing spaces, contexts longer than block_size, greedy continuations; and whole texts."""
    ours, theirs = both
    pairs = [("", "Hello there"), ("Hello", " there"), ("Hello ", "there"), ("Hello   ", "there you"),
             ("so " * 300, "so it goes"), ("a" * 600, "b" * 200), ("line\n\n", "next"), ("naïve 日本", "語 🙂")]
    for found, wanted in zip(ours.loglikelihood(instances(*pairs)), theirs.loglikelihood(instances(*pairs)), strict=True):
        assert found[0] == pytest.approx(wanted[0], abs=2e-3, rel=1e-6) and found[1] == wanted[1]
    start = [15496, 995, 11, 314]
    best = ours.model.generate(torch.tensor([start]), 5, temperature=0, n_vocab=50257)[0, 4:].tolist()
    requests = [(("", str(ids)), start, ids) for ids in (best, best[:1], [*best[:-1], 5])]
    found, wanted = (lm._loglikelihood_tokens(requests) for lm in (ours, theirs))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted] == [True, True, False]
    texts = [("One short text.",), ("word " * 400,), ("x",)]
    found, wanted = (lm.loglikelihood_rolling(instances(*texts)) for lm in (ours, theirs))
    assert found == pytest.approx(wanted, rel=1e-5)


# --- against the definition ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def plain(gpt: GPT, context: list[int], ids: list[int]) -> tuple[float, bool]:
    """One id after the other, each from a forward pass of its own over at most block_size ids, in fp64."""
    gpt, total, greedy, before = copy.deepcopy(gpt).double(), 0.0, True, list(context)
    start = max(0, len(context) + len(ids) - 1 - gpt.config.block_size)
    for i in ids:
        logits = gpt(torch.tensor([before[start:]]))[0][0, -1]
        total += float(logits.log_softmax(-1)[i])
        greedy &= int(logits[:257].argmax()) == i
        before.append(i)
    return total, greedy


@pytest.mark.parametrize("attention", PRESETS)
@pytest.mark.parametrize("shape", [{}, {"n_kv_head": 2, "n_sink": 3}])
def test_every_variant_equals_its_definition(attention, shape):
    gpt = model(attention=attention, **shape)
    lm = HarnessModel(gpt, BYTE, ALONE, batch_tokens=100)
    eot = BYTE.eot
    cases = {  # what the harness is given, and the ids that it means
        ("", "ab"): ([eot], b"ab"),
        ("the cat", " sat"): (b"the cat", b" sat"),
        ("the cat  ", "sat"): (b"the cat", b"  sat"),
        ("  ", "x"): ([eot], b"  x"),
        ("q" * 30 + "z" * 80, "end"): (b"q" * 30 + b"z" * 80, b"end"),
        ("w", "y" * 64): (b"w", b"y" * 64),
        ("wx", "y" * 64): (b"wx", b"y" * 64),
    }
    for (_, (context, ids)), (logp, greedy) in zip(cases.items(), lm.loglikelihood(instances(*cases)), strict=True):
        expected = plain(gpt, list(context), list(ids))
        assert logp == pytest.approx(expected[0], rel=1e-5, abs=1e-4) and greedy == expected[1]


def test_a_continuation_longer_than_the_model_is_predicted_once_each_id():
    gpt = model()
    lm = HarnessModel(gpt, BYTE, ALONE)
    text = "".join(chr(97 + i * i % 26) for i in range(150))
    ids = list(text.encode())
    windows = [([BYTE.eot], ids[:64]), (ids[63:64], ids[64:128]), (ids[85:128], ids[128:])]  # the last has what fits before it
    expected = math.fsum(plain(gpt, *window)[0] for window in windows)
    assert lm.loglikelihood_rolling(instances((text,))) == [pytest.approx(expected, rel=1e-5)]
    assert lm.loglikelihood(instances(("", text)))[0][0] == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_greedy_is_the_likeliest_id_that_the_tokenizer_has():
    gpt, start = model(), [10, 20, 30]
    best = gpt.generate(torch.tensor([start]), 6, temperature=0, n_vocab=257)[0, 3:].tolist()
    gpt.wte.weight[257:263] = 2 * gpt.wte.weight[best]
    assert (gpt(torch.tensor([[*start, *best[:-1]]]))[0][0, 2:].argmax(-1) >= 257).all()  # padding rows would win
    lm = HarnessModel(gpt, BYTE, ALONE)
    spoilt = [*best[:-1], (best[-1] + 1) % 257]
    requests = [(("", ""), start, ids) for ids in (best, spoilt, best[:1], [])]
    assert [greedy for _, greedy in lm._loglikelihood_tokens(requests)] == [True, False, True, True]
    logits = gpt(torch.tensor([[*start, *best[:-1]]]))[0][0, 2:].double()  # the probabilities count the padding rows
    expected = float(logits.log_softmax(-1).gather(-1, torch.tensor(best)[:, None]).sum())
    assert lm._loglikelihood_tokens(requests)[0][0] == pytest.approx(expected, rel=1e-5)


# --- batches, ranks, memory, side effects -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Rank(Ranks):
    """One rank of several that live in this process, one after the other; `everyone` collects what they bring."""

    everyone: list = dataclasses.field(default_factory=list)

    def gather_objects(self, value):
        self.everyone.append(value)
        return self.everyone


def test_results_depend_on_neither_batch_size_nor_ranks(task_data):
    requests = [i for task in load_tasks(["boolq", "piqa", "winogrande"], task_data).values() for i in task.instances]
    gpt = model(attention="xsa")
    reference = HarnessModel(gpt, BYTE, ALONE, batch_tokens=1000).loglikelihood(requests)
    assert len({round(logp, 3) for logp, _ in reference}) > 40
    for batch_tokens in (1, 65, 10**6):
        found = HarnessModel(gpt, BYTE, ALONE, batch_tokens=batch_tokens).loglikelihood(requests)
        assert [g for _, g in found] == [g for _, g in reference]
        assert [p for p, _ in found] == pytest.approx([p for p, _ in reference], rel=1e-5, abs=1e-4)
    for world_size in (2, 3, 50):
        everyone: list = []
        for rank in range(world_size):
            found = HarnessModel(gpt, BYTE, Rank(rank, world_size, ALONE.device, everyone=everyone), batch_tokens=1000) \
                .loglikelihood(requests)
        assert found == reference  # bit for bit: the batches are the same ones


class Largest(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out

    numel = 0


def test_logits_are_held_for_a_few_positions_at_a_time(monkeypatch):
    monkeypatch.setattr(harness, "loss_rows", lambda device: 8)
    gpt = model(vocab_size=5000)
    pairs = [(f"{i} " + "c" * 40, "answer") for i in range(8)]
    with Largest() as largest:
        HarnessModel(gpt, BYTE, ALONE).loglikelihood(instances(*pairs))
    assert largest.numel <= gpt.wte.weight.numel() < 8 * 40 * 5000 / 8


def test_equal_inputs_are_computed_once():
    gpt, shapes = model(), []
    gpt.h[0].register_forward_hook(lambda module, args, out: shapes.append(args[0].shape))
    HarnessModel(gpt, BYTE, ALONE).loglikelihood(instances(("passage", "a"), ("passage", "b"), ("other passage", "a")))
    assert [tuple(shape[:2]) for shape in shapes] == [(2, 13)]


def test_neither_mode_nor_random_numbers_are_touched(task_data):
    gpt = model(dropout=0.5)
    requests = load_tasks(["openbookqa"], task_data)["openbookqa"].instances
    expected = HarnessModel(gpt, BYTE, ALONE).loglikelihood(requests)
    gpt.train()
    before = torch.get_rng_state()
    assert HarnessModel(gpt, BYTE, ALONE).loglikelihood(requests) == expected
    assert gpt.training and torch.equal(torch.get_rng_state(), before)


def test_a_stop_request_ends_it_between_two_batches():
    gpt, asked = model().train(), []
    lm = HarnessModel(gpt, BYTE, ALONE, batch_tokens=1, should_stop=lambda: asked.append(1) or len(asked) == 3)
    with pytest.raises(Stopped):
        lm.loglikelihood(instances(*[("context", chr(97 + i) * (i + 1)) for i in range(9)]))
    assert len(asked) == 3 and gpt.training


def test_half_precision_keeps_fp32_log_softmax(task_data):
    """bf16 logits would tie; fp32 ones of bf16 hidden states do not."""
    gpt = model()
    requests = load_tasks(["hellaswag"], task_data)["hellaswag"].instances
    lm = HarnessModel(gpt, BYTE, ALONE, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    found, exact = lm.loglikelihood(requests), HarnessModel(gpt, BYTE, ALONE).loglikelihood(requests)
    assert [p for p, _ in found] == pytest.approx([p for p, _ in exact], rel=0.03)
    assert len({p for p, _ in found}) == len({p for p, _ in exact})


# --- tasks --------------------------------------------------------------------------------------------------------------------


def test_scores_are_the_harnesss_own(task_data):
    from lm_eval.evaluator import evaluate

    lm = HarnessModel(model(), BYTE, ALONE)
    theirs = evaluate(lm, {"tasks": load_tasks(list(TASKS), task_data), "groups": {}}, bootstrap_iters=0)
    for name, task in load_tasks(list(TASKS), task_data).items():
        ours, expected = score(lm, task), theirs["results"][name]
        for metric in ("acc", "acc_norm"):
            assert ours.get(metric) == expected.get(f"{metric},none")
        assert ours["n"] == 8 == len(ours["items"]["id"]) == len(set(ours["items"]["id"]))
        assert ours[f"{TASKS[name].metric}_stderr"] == pytest.approx(
            math.sqrt(ours[TASKS[name].metric] * (1 - ours[TASKS[name].metric]) / 7))
        gold = [logps[g] for logps, g in zip(ours["items"]["loglikelihoods"], ours["items"]["gold"], strict=True)]
        assert ours["loss"] == pytest.approx(-sum(gold) / 8)
        for i, logps in enumerate(ours["items"]["loglikelihoods"]):
            if len(logps) > 1:
                assert ours["items"]["acc"][i] == (max(range(len(logps)), key=logps.__getitem__) == ours["items"]["gold"][i])


def test_limit_takes_the_first_items(task_data):
    lm, whole = HarnessModel(model(), BYTE, ALONE), load_tasks(["piqa"], task_data)["piqa"]
    few = score(lm, load_tasks(["piqa"], task_data, limit=3)["piqa"])
    assert few["n"] == 3 and few["items"]["id"] == score(lm, whole)["items"]["id"][:3]


def test_data_that_changed_is_read_anew(task_data, tmp_path):
    """datasets caches a local folder by its README alone."""
    shutil.copytree(task_data / "baber", tmp_path / "baber")
    file = tmp_path / "baber" / "piqa" / "default_validation.jsonl"
    before = [i.args for i in load_tasks(["piqa"], tmp_path)["piqa"].instances]
    file.write_text(file.read_text().replace("iron nails", "steel nails"))
    after = [i.args for i in load_tasks(["piqa"], tmp_path)["piqa"].instances]
    assert "iron nails" in str(before) and [str(args).replace("iron", "steel") for args in before] == [str(a) for a in after]


def test_what_is_wrong_is_said(task_data, tmp_path, monkeypatch):
    for names, wanted in ([], "none|''"), (["hellasag"], "hellasag"), (["piqa", "piqa"], "twice"):
        with pytest.raises(InputError, match=wanted):
            load_tasks(names, task_data)
    with pytest.raises(InputError, match=f"no folder {tmp_path}/baber/piqa.*eval.local_data"):
        load_tasks(["piqa"], tmp_path)
    (tmp_path / "baber" / "piqa").mkdir(parents=True)
    with pytest.raises(InputError, match="task piqa: no data from .*eval.local_data"):
        load_tasks(["piqa"], tmp_path)
    with pytest.raises(InputError, match="winogrande.*hub.*eval.local_data"):  # offline, and not in the cache
        load_tasks(["winogrande"])
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(InputError, match="pip install -r requirements-eval.txt"):
        importlib.reload(harness)


# --- in training --------------------------------------------------------------------------------------------------------------

RUN = ["--vocab_size=257", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--global_batch_size=8",
       "--micro_batch_size=4", "--max_iters=8", "--warmup_iters=2", "--learning_rate=1e-2", "--eval_interval=3",
       "--eval_tokens=608", "--log_interval=1", "--save_interval=2", "--device=cpu", "--dropout=0.1", "--attention=xsa"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("data") / "bytes"
    source = folder.parent / "text.jsonl"
    texts = [source.read_text()[i : i + 2000] for source in sorted(ROOT.glob("*.py")) for i in range(0, 20000, 2000)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts if text))
    assert local.main([f"--input={source}", "--tokenizer=byte", f"--out={folder}", "--val_fraction=0.1"]) == 0
    return str(folder)


@pytest.fixture(scope="module")
def flags(dataset, task_data) -> list[str]:
    return [*RUN, f"--dataset={dataset}", "--eval_tasks=hellaswag,lambada_openai", "--eval_tasks_limit=5",
            f"--eval_tasks_data={task_data}"]


def curve(out_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    timings = "step_ms", "data_ms", "tokens_per_s", "peak_memory_gb"
    return [{k: v for k, v in line.items() if k not in timings} for line in lines]


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("straight") / "run"
    assert train.main([*flags, f"--out_dir={out_dir}"]) == 0
    return out_dir


def test_training_logs_tasks_and_is_not_changed_by_them(straight, dataset, task_data, tmp_path):
    assert train.main([*RUN, f"--dataset={dataset}", f"--out_dir={tmp_path}/plain"]) == 0
    lines = curve(straight)
    assert [line for line in lines if not line["split"].startswith("eval/")] == curve(tmp_path / "plain")
    for name in ("hellaswag", "lambada_openai"):
        scored = [line for line in lines if line["split"] == f"eval/{name}"]
        assert [line["step"] for line in scored] == [0, 3, 6, 8] and all(line["n"] == 5 for line in scored)
        assert all(line["tokens"] == line["step"] * 256 and math.isfinite(line["loss"]) for line in scored)
    # The last line is what the last checkpoint gives.
    lm = HarnessModel(GPT.from_checkpoint(straight / "ckpt_00000008.pt"), BYTE, ALONE)
    again = score(lm, load_tasks(["hellaswag"], task_data, 5)["hellaswag"])
    last = [line for line in lines if line["split"] == "eval/hellaswag"][-1]
    assert last["acc_norm"] == again["acc_norm"] and last["loss"] == pytest.approx(again["loss"], rel=1e-5)
    assert f"hellaswag acc_norm {last['acc_norm']:.3f}" in (straight / "log.txt").read_text()


@pytest.mark.parametrize("stop", [4, 6])  # between two evaluations, and at one
def test_a_resumed_run_has_every_line_once(straight, flags, tmp_path, stop):
    out_dir = tmp_path / "parts"
    assert train.main([*flags, f"--out_dir={out_dir}", f"--max_iters={stop}", "--lr_decay_iters=8"]) == 0
    assert train.main([*flags, f"--out_dir={out_dir}", "--init_from=resume"]) == 0
    extra = [line for line in curve(out_dir) if line["step"] == stop and line["split"] != "train" and stop % 3]
    assert [line for line in curve(out_dir) if line not in extra] == curve(straight) and len(extra) in (0, 3)


def test_an_evaluation_that_a_crash_cut_short_leaves_no_line(straight, tmp_path):
    file = tmp_path / "metrics.jsonl"
    shutil.copyfile(straight / "metrics.jsonl", file)
    cut_back(file, 3, evaluated=False)
    before = [line for line in curve(straight) if line["step"] < 3 or (line["step"], line["split"]) == (3, "train")]
    assert curve(tmp_path) == before


def test_an_evaluation_that_a_stop_cut_short_is_done_again(straight, flags, tmp_path, monkeypatch):
    stop = StopRequest()
    try:
        with monkeypatch.context() as patch:
            def stopped(lm, task):  # the request comes while the second task is scored
                if task.config.task == "lambada_openai" and stop.signal is None and calls.append(1) is None and len(calls) == 2:
                    stop.signal = "SIGTERM"
                return score(lm, task)

            calls: list[int] = []
            patch.setattr(harness, "score", stopped)
            assert train.main([*flags, f"--out_dir={tmp_path}/r"], stop) == 0
    finally:
        stop.restore()
    assert curve(tmp_path / "r")[-1]["step"] == 3 and curve(tmp_path / "r")[-1]["split"] == "train"
    assert train.main([*flags, f"--out_dir={tmp_path}/r", "--init_from=resume"]) == 0
    assert curve(tmp_path / "r") == curve(straight)


def test_scoring_compiles_nothing(flags, tmp_path, monkeypatch):
    """Blocks compiled in place would be compiled anew for every shape, and past eight run slowly without a word."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(GPT, "compile_parts", lambda self: [part.compile(backend=backend) for part in self.h])
    numbers = []
    for i, more in enumerate(([], ["--eval_tasks=None"])):
        torch.compiler.reset()
        graphs.clear()
        arguments = [*flags, "--dropout=0", "--max_iters=2", "--eval_interval=1", "--compile=True", f"--out_dir={tmp_path}/{i}"]
        assert train.main([*arguments, *more]) == 0
        numbers.append(len(graphs))
    assert numbers[0] == numbers[1] > 0


@pytest.mark.parametrize("change, wanted", [
    (["--eval_tasks=hellasag"], "hellasag"), (["--eval_tasks_data=/no/such/folder"], "/no/such/folder/Rowan/hellaswag"),
    (["--eval_tasks="], "tasks: wanted some of"), (["--eval_tasks_limit=0"], "eval_tasks_limit"),
])
def test_what_is_wrong_is_found_before_training(flags, tmp_path, change, wanted, capsys):
    assert train.main([*flags, *change, f"--out_dir={tmp_path}/r"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and wanted in captured.err
    assert not (tmp_path / "r").exists()
