"""scripts/bench/tokenize.py: that the arms make the same tokens, that a difference is found, and that the command says what it
should."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiktoken

from command_line import InputError
from data.shards import open_dataset
from scripts.bench import __main__ as command
from scripts.bench import common
from scripts.bench import tokenize as bench

EOT = 50256
TEXTS = [f"Document {i}: {'to be or not to be, ' * (i % 7)}\n\nsaid <|endoftext|> {i}." for i in range(130)] + ["", "é中😀"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """TEXTS, the first half as parquet and the rest as jsonl."""
    folder = tmp_path_factory.mktemp("text")
    bench.write_parquet(TEXTS[:70], folder / "a.parquet")
    lines = [json.dumps({"text": text, "id": "x"}) + "\n" for text in TEXTS[70:]]
    (folder / "b.jsonl").write_text("".join(lines), encoding="utf-8")
    return [folder / "a.parquet", folder / "b.jsonl"]


@pytest.fixture(scope="module")
def expected(gpt2_vocabulary: Path) -> np.ndarray:
    encoding = tiktoken.get_encoding("gpt2")
    parts = [[EOT, *encoding.encode(text, disallowed_special=())] for text in TEXTS if text]
    return np.concatenate(parts).astype(np.uint16)


def run(arm: str, files: list[Path], folder: Path) -> bench.Content:
    assert bench.run_arm(arm, bench.Corpus(files, 0.3), folder / arm, workers=2) > 0
    return bench.read_content(arm, folder / arm, EOT)


def test_arms_make_the_tokens_of_tiktoken(files, expected, tmp_path):
    contents = [run(arm, files, tmp_path) for arm in bench.ARMS]
    assert contents[0] == contents[1] == contents[2]
    assert (contents[0].documents, contents[0].tokens) == (len(TEXTS) - 1, len(expected))
    for arm in ("loop", "pool"):
        (path,) = (tmp_path / arm).iterdir()
        np.testing.assert_array_equal(np.fromfile(path, dtype=np.uint16), expected)
    assert min(stream.n_tokens for stream in (open_dataset(tmp_path / "ours").train, open_dataset(tmp_path / "ours").val)) > 0


def test_pool_fills_shards_to_the_brim(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "POOL_SHARD_TOKENS", 1000)
    bench.run_pool(files, tmp_path, 2)
    shards = [np.fromfile(path, dtype=np.uint16) for path in sorted(tmp_path.iterdir())]
    assert len(shards) == -(-len(expected) // 1000) > 2
    assert {len(shard) for shard in shards[:-1]} == {1000}
    np.testing.assert_array_equal(np.concatenate(shards), expected)


def write(folder: Path, documents: list[list[int]]) -> bench.Content:
    folder.mkdir()
    np.array([token for ids in documents for token in (EOT, *ids)], dtype=np.uint16).tofile(folder / "tokens.bin")
    return bench.read_content("loop", folder, EOT)


def test_content_depends_on_the_documents_and_not_on_their_order(tmp_path):
    documents = [[1, 2, 3], [4], [4], [5, 6]]
    content = write(tmp_path / "a", documents)
    assert (content.documents, content.tokens) == (4, 11)
    assert write(tmp_path / "b", documents[::-1]) == content
    for name, other in {"token": [[1, 2, 7], [4], [4], [5, 6]], "border": [[1, 2], [3, 4], [4], [5, 6]],
                        "twice": [[1, 2, 3], [5, 6], [4], [5, 6]], "order": [[1, 3, 2], [4], [4], [5, 6]]}.items():
        assert write(tmp_path / name, other) != content, name


def test_arms_that_differ_are_an_error(files, tmp_path, monkeypatch):
    contents = {"loop": bench.Content(2, 9, 77), "pool": bench.Content(2, 9, 78), "ours": bench.Content(2, 9, 77)}
    monkeypatch.setattr(bench, "run_arm", lambda arm, corpus, out, workers: 1.0)
    monkeypatch.setattr(bench, "read_content", lambda arm, out, eot: contents[arm])
    arguments = (bench.Corpus(files, 0.3), bench.Corpus([], 0.5), tmp_path, 1, 2, EOT)
    with pytest.raises(RuntimeError, match="pool and loop made different tokens"):
        bench.measure(*arguments)
    contents["pool"] = contents["loop"]
    content, seconds, start_up = bench.measure(*arguments)
    assert content == contents["loop"] and seconds == start_up == {arm: [1.0, 1.0] for arm in bench.ARMS}


def test_a_failing_arm_says_why(files, tmp_path):
    corpus = bench.Corpus([files[0], tmp_path / "missing.parquet"], 0.3)
    for arm in bench.ARMS:
        with pytest.raises(RuntimeError, match=rf"arm {arm}: exit status \d: .*missing\.parquet"):
            bench.run_arm(arm, corpus, tmp_path / arm, workers=1)


def test_summary_takes_ratios_within_rounds_and_start_up_off():
    seconds = {"loop": [11.0, 21.0, 41.0], "pool": [8.0, 16.0, 32.0], "ours": [7.0, 12.0, 22.0]}
    start_up = {"loop": [1.0] * 3, "pool": [3.0, 6.0, 12.0], "ours": [2.0] * 3}
    result = bench.summarize(seconds, start_up, tokens=200)
    assert result["arms"]["loop"]["work_quartiles"] == [15, 20, 30]
    assert result["arms"]["loop"]["tokens_per_s"] == 10
    assert result["arms"]["pool"]["start_up_quartiles"] == [4.5, 6, 9]
    assert result["ratios"]["ours/loop"]["speed_quartiles"] == [2, 2, 2]
    assert result["ratios"]["ours/loop"]["whole_speed"] == 21 / 12
    assert result["ratios"]["pool/loop"]["speed"] == 2
    assert "held, 5.3% to spare" in bench.figures(result, workers=2, cores=2)[0]
    assert bench.figures(result, workers=4, cores=8) == bench.figures(result, workers=2, cores=1) == []
    lines = bench.table(result).splitlines()
    assert lines[1].split() == ["loop", "1.00", "20.00", "15.00", "-", "30.00", "10"]
    assert lines[4] == "ours/loop: 2.000 times the speed (quartiles 2.000 - 2.000), 1.750 with the start-up"
    with pytest.raises(RuntimeError, match="ours: the text took no longer than the start-up"):
        bench.summarize(seconds, start_up | {"ours": [7.0] * 3}, tokens=200)


def test_verdict_says_when_the_spread_holds_the_limit():
    assert common.verdict("x", 1.9, 1.9, [1.8, 1.9, 2.0], at_least=True).endswith("held, 0.0% to spare, but within the spread: "
                                                                                 "more rounds on a quieter machine decide")
    assert "missed by 5.0%" in common.verdict("x", 1.05, 1.0, [1.04, 1.05, 1.06])


def test_default_text_is_the_quick_starts_in_finewebs_schema(tmp_path):
    what = bench.write_default_text(tmp_path, megabytes=25)
    paths = sorted(tmp_path.iterdir())
    tables = [pq.read_table(path) for path in paths]
    assert len(tables) >= 2 and what
    assert tuple(tables[0].column_names) == bench.FINEWEB_COLUMNS
    first, second = (table["text"].to_pylist() for table in tables[:2])
    assert second == first[: len(second)]
    n_bytes = sum(len(text.encode()) for table in tables for text in table["text"].to_pylist())
    assert 25e6 <= n_bytes < 25e6 + max(len(text.encode()) for text in first)


def test_command_end_to_end(files, gpt2_vocabulary, tmp_path, capsys, monkeypatch):
    # Of so little text the work drowns in the start-up, whose times are therefore set; the check's arms are real.
    real, checked = bench.run_arm, set()

    def timed(arm: str, corpus: bench.Corpus, out: Path, workers: int) -> float:
        if corpus.files != files:
            return 0.5
        if arm not in checked:
            checked.add(arm)
            assert real(arm, corpus, out, workers) > 0
        return {"loop": 4.5, "pool": 3.5, "ours": 2.5}[arm]

    monkeypatch.setattr(bench, "run_arm", timed)
    out = tmp_path / "bench.json"
    arguments = ["tokenize", "--input", *map(str, files), "--rounds=2", "--workers=2", f"--json={out}"]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    record = json.loads(out.read_text())
    assert f"all arms made the same {len(TEXTS) - 1} documents, {record['tokens']:,} tokens" in printed
    assert "speed, ours / loop         2.000  at least 1.90: held, 5.3% to spare" in printed or record["cores"] < 2
    assert record["documents"] == len(TEXTS) - 1 and record["workers"] == record["files"] == record["rounds"] == 2
    assert record["arms"]["pool"]["seconds"] == [3.5, 3.5] and record["ratios"]["pool/loop"]["speed"] == pytest.approx(4 / 3)
    assert {"python", "tiktoken", "pyarrow"} <= record["versions"].keys() and record["hardware"]["cpus"] >= 1


@pytest.mark.parametrize(("arguments", "message"), [
    (["--rounds=1"], "--rounds: wanted at least 2, found 1"),
    (["--workers=0"], "--workers: wanted at least 1, found 0"),
    (["--megabytes=-3"], "--megabytes: wanted a number above 0, found -3.0"),
    (["--json=/no/such/folder/x.json"], "--json: no folder /no/such/folder"),
    (["--input", "/no/such/file.parquet"], "--input: /no/such/file.parquet: no such file or folder"),
    (["--speed"], "unrecognized arguments: --speed"),
])
def test_bad_arguments(arguments, message, gpt2_vocabulary, capsys):
    assert command.main(["tokenize", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_too_few_documents_and_none_at_all(gpt2_vocabulary, tmp_path):
    bench.write_parquet(TEXTS[:5], tmp_path / "few.parquet")
    with pytest.raises(InputError, match="wanted at least 100 documents, found 5"):
        bench.main(["--input", str(tmp_path / "few.parquet")])
    (tmp_path / "bad.jsonl").write_text('{"no": 1}\n')
    with pytest.raises(InputError, match="bad.jsonl: cannot be read"):
        bench.main(["--input", str(tmp_path / "bad.jsonl")])


def test_help_without_work(capsys):
    assert command.main(["tokenize", "--help"]) == 0
    assert "python -m scripts.bench tokenize" in capsys.readouterr().out
