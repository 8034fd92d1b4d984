"""Eight items of each downstream task, in the columns of its data set: own sentences, with what trips an evaluation in them
(passages longer than a model's context, trailing spaces, WikiHow's brackets, text outside ASCII)."""

from typing import Any

FACTS = [
    ("Ice", "melts", "when it is warmed", "when it is frozen again", "when nobody looks", "only on Mondays"),
    ("A magnet", "attracts", "iron nails", "wooden spoons", "the smell of bread", "a glass of water"),
    ("The café's owner", "opened", "the door at seven", "the ocean", "a prime number", "the north wind"),
    ("A green plant", "makes", "sugar from light", "light from sugar", "bricks", "noise – a lot of it"),
    ("The sailor", "tied", "the rope to the mast", "the mast to the fog", "the sea in a knot", "his lunch to the moon"),
    ("Copper wire", "carries", "electric current well", "letters to the king", "no heat at all, ever", "water uphill"),
    ("The pupil", "sharpened", "the pencil before the test", "the window", "her teacher's name", "the colour of five"),
    ("An owl", "hunts", "mice in the dark", "clouds at noon", "its own wings", "the 日本 express train"),
]


def rows(task: str) -> list[dict[str, Any]]:
    return [_ITEMS[task](i, *fact) for i, fact in enumerate(FACTS)]


def _arc_easy(i, who, does, *ends):
    order, text = _shuffled(i, ends)
    return {"id": f"item-{i}", "question": f"{who} {does} something. What is it?{' ' * (i % 3)}",
            "choices": {"text": text, "label": list("ABCD")}, "answerKey": "ABCD"[order.index(0)]}


def _openbookqa(i, who, does, *ends):
    order, text = _shuffled(i, ends)
    return {"id": f"item-{i}", "question_stem": f"{who} {does}{' ' * (i % 3)}", "choices": {"text": text, "label": list("ABCD")},
            "answerKey": "ABCD"[order.index(0)]}


def _boolq(i, who, does, *ends):
    passage = f"{who} -- " + " ".join(f"It is told that {who.lower()} {does} {end}." for end in ends) * (1 + 4 * i)
    return {"question": f"{does} {who.lower()} {ends[i % 2]}", "passage": passage, "idx": i, "label": 1 - i % 2}


def _hellaswag(i, who, does, *ends):
    order, text = _shuffled(i, ends)
    return {"ind": i, "activity_label": f"Part {i}", "ctx_a": f"[header] How it goes [title] {who} is  there.",
            "ctx_b": "then it", "ctx": "", "endings": [f"{does} {end}. [substeps] So it is." for end in text],
            "source_id": f"own~{i}", "split": "val", "split_type": "indomain", "label": str(order.index(0))}


def _lambada(i, who, does, *ends):
    return {"text": f"“{who}?” she asked. “{who} {does} {ends[0]}.”\nHe thought, and said again that it {does} {ends[0]}"}


def _piqa(i, who, does, *ends):
    good, bad = f"Know that it {does} {ends[0]}.", f"Know that it {does} {ends[1]}; " + "wait, and " * 3 * i + "go on."
    first, second = (bad, good) if i % 2 else (good, bad)
    return {"goal": f"To see what {who.lower()} {does}", "sol1": first, "sol2": second, "label": i % 2}


def _social_iqa(i, who, does, *ends):
    order, text = _shuffled(i, ends[:3])
    return {"context": f"{who} {does} {ends[0]} and Robin saw it.", "question": "What will Robin say?",
            **{f"answer{'ABC'[k]}": f"that it {does} {end}" for k, end in enumerate(text)}, "label": str(order.index(0) + 1)}


def _winogrande(i, who, does, *ends):
    options = [who, "The old chair"] if i % 2 else ["The old chair", who]
    return {"sentence": f"Of the two it was _ that {does} {ends[0]}.", "option1": options[0], "option2": options[1],
            "answer": str(options.index(who) + 1)}


def _shuffled(i: int, ends: tuple[str, ...]) -> tuple[list[int], list[str]]:
    order = [(k + i) % len(ends) for k in range(len(ends))]
    return order, [ends[k] for k in order]


_ITEMS = {
    "arc_easy": _arc_easy, "boolq": _boolq, "hellaswag": _hellaswag, "lambada_openai": _lambada, "openbookqa": _openbookqa,
    "piqa": _piqa, "social_iqa": _social_iqa, "winogrande": _winogrande,
}
