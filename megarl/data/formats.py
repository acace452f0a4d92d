"""Converts rows of public data sets, as they are published, to ``prompt``, ``answer`` and what verifiers need.

Prompts are bare questions, and ``data.prompt_template`` adds how to answer them; only those of DAPO-Math-17k say it
themselves. The columns are taken from the data sets' cards, or from public programs that read them.
"""

from __future__ import annotations

import base64
import json
import pickletools
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from megarl.data.boxes import last_box
from megarl.data.values import check_exact, parse, prompt_of

Row = dict[str, Any]
LARGEST_TESTS = 1 << 30  # most bytes of a row's compressed tests after decompression
LETTERS = "ABCDEFGHIJ"
# in or1_data/eval/aime24.parquet
SKYWORK_AFTER = " Let's think step by step and output the final answer within \\boxed{}."
# a replacement of the part of numpy that EvalPlus' tests use, since the sandbox has no numpy; it makes no arrays
NUMPY = """class np:
    class ndarray: pass
    float32 = float64 = float
    def allclose(a, b, rtol=1e-05, atol=1e-08):
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(np.allclose(x, y, rtol, atol) for x, y in zip(a, b))
        return a == b or abs(a - b) <= atol + rtol * abs(b) < float("inf")
    class testing:
        def assert_allclose(a, b, rtol=1e-07, atol=0):
            assert np.allclose(a, b, rtol, atol)"""


@dataclass(frozen=True)
class Format:
    """How to read one public data set.

    convert: from a published row to one with ``prompt``, ``answer`` or ``tests``, and other columns. columns, optional:
    the published columns that it reads; no others are loaded from a Parquet file.
    """

    convert: Callable[[Row], Row]
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()


def dapo_math(row: Row) -> Row:
    """https://huggingface.co/datasets/BytedTsinghua-SIA/DAPO-Math-17k and BytedTsinghua-SIA/AIME-2024: the prompts as
    they are published, which ask for a last line "Answer: ..".

    The columns are taken from the card of its copy LuyiCui/DAPO-Math-17k.
    """
    return {"prompt": _user_text(row["prompt"]), "answer": row["reward_model"]["ground_truth"]}


def deepscaler(row: Row) -> Row:
    """https://huggingface.co/datasets/agentica-org/DeepScaleR-Preview-Dataset"""
    return {"prompt": row["problem"], "answer": row["answer"]}


def skywork_or1(row: Row) -> Row:
    """https://huggingface.co/datasets/Skywork/Skywork-OR1-RL-Data: mathematics and programs; also or1_data/eval/ of
    https://github.com/SkyworkAI/Skywork-OR1, whose questions of 2024 end with an instruction.

    The ground truth is JSON: a list of answers, of which any is right, or one of two kinds of tests, which are read as
    that repository's `compute_score` does; or a text, the answer itself.
    """
    prompt, text = _user_text(row["prompt"]).removesuffix(SKYWORK_AFTER), row["reward_model"]["ground_truth"]
    truth = parse(text) if text.lstrip()[:1] in ("[", "{") else text
    if isinstance(truth, str):
        return {"prompt": prompt, "answer": truth}
    if isinstance(truth, list):
        return {"prompt": prompt, "answer": truth[0], "also_right": truth[1:]}
    if truth.get("test_code") is not None:
        names = {"tests": "test_code", "entry_point": "entry_point"} | dict.fromkeys(
            ("test_setup", "preamble"), "import_prefix"
        )
        return {"prompt": prompt, **{name: truth[column] for name, column in names.items()}}
    return {"prompt": prompt, "tests": truth | {"harness": "livecodebench"}}


def math(row: Row) -> Row:
    """https://huggingface.co/datasets/EleutherAI/hendrycks_math and similar ones: HuggingFaceH4/MATH-500,
    HuggingFaceH4/aime_2024, math-ai/aime24, math-ai/aime25.

    The answer is the column ``answer`` or, without one, the last box in ``solution``.
    """
    answer = row.get("answer")
    answer = last_box(row["solution"]) if answer in (None, "") else answer
    subject = row.get("subject") or row.get("type")
    return {"prompt": row["problem"], "answer": answer, "level": row.get("level"), "subject": subject}


def gsm8k(row: Row) -> Row:
    """https://huggingface.co/datasets/openai/gsm8k: the answer follows ####."""
    _, marker, answer = row["answer"].rpartition("####")
    if not marker:
        raise ValueError("no #### in the column answer")
    return {"prompt": row["question"], "answer": answer.strip().replace(",", "")}


def big_math(row: Row) -> Row:
    """https://huggingface.co/datasets/SynthLabsAI/Big-Math-RL-Verified"""
    kept = {name: row.get(name) for name in ("source", "domain", "llama8b_solve_rate")}
    return {"prompt": row["problem"], "answer": row["answer"], **kept}


def code_contests(row: Row) -> Row:
    """https://huggingface.co/datasets/deepmind/code_contests, with its public, private and generated tests."""
    groups = [row.get(name) or {} for name in ("public_tests", "private_tests", "generated_tests")]
    pairs = [pair for each in groups for pair in zip(_list(each.get("input")), _list(each.get("output")), strict=True)]
    # for harness see `megarl.rewards.harness`
    tests = {"inputs": [pair[0] for pair in pairs], "outputs": [pair[1] for pair in pairs], "harness": "code_contests"}
    return {"prompt": row["description"], "tests": tests, "name": row.get("name"), "difficulty": row.get("difficulty")}


def livecodebench(row: Row) -> Row:
    """https://huggingface.co/datasets/livecodebench/code_generation_lite, with its public and private tests.

    Private tests may be pickled and compressed; their text is then extracted from the pickle's opcodes without
    executing them.
    """
    tests = [*_json_or_packed(row["public_test_cases"]), *_json_or_packed(row["private_test_cases"])]
    question, starter = row["question_content"], row.get("starter_code")
    found: Row = {f"{side}s": [test[side] for test in tests] for side in ("input", "output")}
    if any(test.get("testtype") == "functional" for test in tests):
        found["fn_name"] = json.loads(row["metadata"])["func_name"]
    found["harness"] = "livecodebench"
    kept = {name: row.get(name) for name in ("difficulty", "contest_date")}
    prompt = f"{question}\n\n```python\n{starter}\n```" if starter else question
    return {"prompt": prompt, "tests": found, **kept}


def evalplus(row: Row) -> Row:
    """https://huggingface.co/datasets/evalplus/humanevalplus and https://huggingface.co/datasets/evalplus/mbppplus.

    Questions of the latter do not name the function, so their first short test, ``test_list[0]``, is appended.
    """
    example = "".join("\n\n" + test for test in _list(row.get("test_list"))[:1])
    tests = row["test"].replace("import numpy as np", NUMPY, 1)
    return {
        "prompt": f"{row['prompt']}{example}",
        "tests": tests,
        "entry_point": row.get("entry_point"),
        "code": row.get("code"),
    }


def gpqa(row: Row) -> Row:
    """https://huggingface.co/datasets/Idavidrein/gpqa: four choices, in an order that depends only on the question."""
    right = row["Correct Answer"].strip()
    choices = [right, *(row[f"Incorrect Answer {n}"].strip() for n in (1, 2, 3))]
    random.Random(row["Question"]).shuffle(choices)
    prompt = _choices(row["Question"].strip(), LETTERS[:4], choices)
    return {"prompt": prompt, "answer": LETTERS[choices.index(right)], "subdomain": row.get("Subdomain")}


def arc(row: Row) -> Row:
    """https://huggingface.co/datasets/allenai/ai2_arc, with letters for the labels 1 to 5 that some questions have."""
    labels = _list(row["choices"]["label"])
    if labels.count(row["answerKey"]) != 1:
        raise ValueError(f"answerKey {row['answerKey']!r} is not one of {labels}")
    prompt = _choices(row["question"], LETTERS[: len(labels)], _list(row["choices"]["text"]))
    return {"prompt": prompt, "answer": LETTERS[labels.index(row["answerKey"])]}


def arc_agi(row: Row) -> Row:
    """https://github.com/fchollet/ARC-AGI, a task in a row, as its files are: ``train`` and ``test``, lists of pairs of
    grids ``input`` and ``output``.

    The answer is the grid that belongs to each test, a line for each row of it, with empty lines between grids.
    """
    shown = [f"Input:\n{_grid(pair['input'])}\n\nOutput:\n{_grid(pair['output'])}" for pair in row["train"]]
    asked = [f"Input:\n{_grid(pair['input'])}\n\nOutput:" for pair in row["test"]]
    return {"prompt": "\n\n".join(shown + asked), "answer": "\n\n".join(_grid(pair["output"]) for pair in row["test"])}


def enigmata(row: Row) -> Row:
    """https://huggingface.co/datasets/BytedTsinghua-SIA/Enigmata-Eval, and output of the generators of
    https://github.com/BytedTsinghua-SIA/Enigmata.

    It needs a verifier of kind "python", which gets the puzzle's ``task_name`` and ``meta``. The answer is the column
    ``answer`` or, without one, that of ``meta``.
    """
    meta = row.get("meta")
    meta = parse(meta) if isinstance(meta, str) and meta else meta or {}
    answer = meta.get("answer") if row.get("answer") in (None, "") else row["answer"]
    check_exact(answer, "answer", null=True)
    answer = json.dumps(answer, ensure_ascii=False) if isinstance(answer, list | dict | bool) else answer
    return {"prompt": row["prompt"], "answer": answer, "task_name": row["task_name"], "meta": meta}


FORMATS = {
    "dapo_math": Format(dapo_math, ("prompt", "reward_model")),
    "deepscaler": Format(deepscaler, ("problem", "answer")),
    "skywork_or1": Format(skywork_or1, ("prompt", "reward_model")),
    "math": Format(math, ("problem",), ("solution", "answer", "level", "type", "subject")),
    "gsm8k": Format(gsm8k, ("question", "answer")),
    "big_math": Format(big_math, ("problem", "answer"), ("source", "domain", "llama8b_solve_rate")),
    "code_contests": Format(
        code_contests, ("description", "public_tests"), ("private_tests", "generated_tests", "name", "difficulty")
    ),
    "livecodebench": Format(
        livecodebench,
        ("question_content", "public_test_cases", "private_test_cases"),
        ("starter_code", "metadata", "difficulty", "contest_date"),
    ),
    "evalplus": Format(evalplus, ("prompt", "test"), ("entry_point", "test_list")),
    "gpqa": Format(gpqa, ("Question", "Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3))), ("Subdomain",)),
    "arc": Format(arc, ("question", "choices", "answerKey")),
    "arc_agi": Format(arc_agi, ("train", "test")),
    "enigmata": Format(enigmata, ("prompt", "task_name"), ("answer", "meta")),
}


def _user_text(messages: list[dict[str, Any]]) -> str:
    """The text of a chat that is a single user message."""
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise ValueError("the prompt is not a single message of the user")
    return str(cast(list[Row], prompt_of(messages))[0]["content"])


def _list(value: Any) -> list[Any]:
    """A list, empty for null; ValueError for a text, whose characters would pass for its entries."""
    if not isinstance(value, list | None):
        raise ValueError(f"{value!r:.60} is not a list")
    return value or []


def _grid(rows: list[list[int]]) -> str:
    if not all(type(cell) is int for row in rows for cell in row):
        raise ValueError("a grid has cells that are not whole numbers")
    return "\n".join(" ".join(map(str, row)) for row in rows)


def _choices(question: str, labels: str, choices: list[str]) -> str:
    return "\n".join([question, "", *(label + ". " + choice for label, choice in zip(labels, choices, strict=True))])


def _json_or_packed(text: str) -> list[dict[str, Any]]:
    """LiveCodeBench's tests, from JSON or from base64 of a compressed pickle of JSON."""
    if text.lstrip()[:1] != "[":
        unpacker = zlib.decompressobj()
        packed = unpacker.decompress(base64.b64decode(text, validate=True), LARGEST_TESTS)
        if unpacker.unconsumed_tail:
            raise ValueError(f"tests of more than {LARGEST_TESTS} bytes")
        texts = [value for _, value, _ in pickletools.genops(packed) if isinstance(value, str)]
        text = max(texts, key=len)
    tests = json.loads(text)
    if not isinstance(tests, list):
        raise ValueError("tests are not a list")
    return tests
