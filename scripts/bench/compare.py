"""Two results of the same benchmark side by side: what changed, by how much, and whether that is more than the spread.

    python -m scripts.bench step --json=before.json                   # then the change, then the same with after.json
    python -m scripts.bench compare before.json after.json
    python -m scripts.bench compare before.json after.json --json=difference.json

Takes the files that the benchmarks' --json writes. Compared are all figures that both have: medians with their quartiles where
they were written, else single numbers; lists of single rounds are left out. Settings, versions and hardware that differ are named
first: where they do, the figures may say more of them than of a change. "within the spread": the ranges between the quartiles
overlap, and runs at two times on one machine differ by more than that easily; arms that took turns in one run are what to trust.
"""

import json
from pathlib import Path
from typing import Any

from checkpoint import write_aside
from command_line import ArgumentParser, InputError, check_output

FACTS = ("config", "versions", "hardware", "git_commit", "command", "rounds", "dtype", "dtypes", "compiled", "device")
SPREAD = "_quartiles"


def read(path: Path) -> dict[str, Any]:
    """Raises InputError for what is not a benchmark's result."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as a benchmark's --json: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise InputError(f"{path} is not what a benchmark's --json writes: wanted an object with config")
    try:
        figures(record)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{path} is not what a benchmark's --json writes: a figure is no number ({error})") from None
    return record


def figures(tree: Any, place: str = "") -> dict[str, list[float]]:
    """By place, as "arms / sa / step_ms", lower quartile, median and upper quartile, or a number by itself."""
    found: dict[str, list[float]] = {}
    branches = tree.items() if isinstance(tree, dict) else ()
    if isinstance(tree, list) and all(isinstance(one, dict) for one in tree):  # a cell for each size
        branches = ((str(i), one) for i, one in enumerate(tree))
    for key, value in branches:
        here = f"{place} / {key}" if place else key
        if key in FACTS and not (key == "dtypes" and isinstance(value, dict)):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool) and f"{key}{SPREAD}" not in tree:
            found[here] = [float(value)]
        elif isinstance(value, list) and len(value) == 3 and key.endswith(SPREAD):
            found[here.removesuffix(SPREAD)] = [float(one) for one in value]
        else:
            found |= figures(value, here)
    return found


def differences(a: dict[str, Any], b: dict[str, Any], place: str = "") -> list[str]:
    """What the facts of two results disagree on, but for when and how they were started."""
    lines = []
    for key in dict.fromkeys((*a, *b)):
        here = f"{place}.{key}" if place else key
        left, right = a.get(key), b.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            lines += differences(left, right, here)
        elif left != right:
            lines.append(f"{here}: {left} -> {right}")
    return lines


def facts(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key in FACTS and key not in ("command", "dtypes")}


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By place the figures of both, b / a of the medians, and whether the quartiles' ranges overlap (None without quartiles)."""
    left, right = figures(a), figures(b)
    result = {}
    for place in left:
        if place in right:
            x, y = left[place], right[place]
            middle = (x[len(x) // 2], y[len(y) // 2])
            overlap = (x[0] <= y[2] and y[0] <= x[2]) if len(x) == len(y) == 3 else None
            result[place] = {"a": x, "b": y, "ratio": middle[1] / middle[0] if middle[0] else None, "within_spread": overlap}
    return result


def table(result: dict[str, dict[str, Any]]) -> str:
    def shown(values: list[float]) -> str:
        text = [f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}" for value in values]
        return text[0] if len(text) == 1 else f"{text[1]} ({text[0]} - {text[2]})"

    wide = max(map(len, result))
    lines = [f"{'':{wide}}  {'A':>28}  {'B':>28}  {'B / A':>7}"]
    for place, one in result.items():
        ratio = "n/a" if one["ratio"] is None else f"{one['ratio']:.3f}"
        note = "  within the spread" if one["within_spread"] else ""
        lines.append(f"{place:{wide}}  {shown(one['a']):>28}  {shown(one['b']):>28}  {ratio:>7}{note}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Raises InputError."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0
    parser = ArgumentParser(prog="python -m scripts.bench compare", add_help=False)
    parser.add_argument("files", nargs=2, type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path)
    own = parser.parse_args(argv)
    if own.json:
        check_output("--json", own.json, inputs=own.files)
    a, b = map(read, own.files)
    result = compare(a, b)
    if not result:
        raise InputError(f"{own.files[0]} and {own.files[1]} have no figure in common: wanted two results of one benchmark")
    changed = differences(facts(a), facts(b))
    print("\n".join([f"A {own.files[0]}, B {own.files[1]}", *changed, "", table(result)]))
    if own.json:
        write_aside(own.json, json.dumps({"changed": changed, "figures": result}, indent=1) + "\n")
    return 0
