"""Values that pass by their type and later mean something else: answers, messages, columns."""

import contextlib
import json
from decimal import Decimal

import numpy as np
import pyarrow
import pytest

from megarl.data.templates import Renderer
from megarl.errors import UserError
from tests.data.prompt_sources import read
from tests.data.test_templates import CHAT, assistant, bpe, render, table, user

WRITTEN = {
    "1e-05": "0.00001",
    "42.0": "42",
    "-0.0": "0",
    "1" * 30: "1" * 30,
    "1e300": "1" + "0" * 300,
    '"1e-05"': "1e-05",
}
# IEEE 754: numbers below 2.2e-308 have fewer digits
UNKNOWN = ("0.1234567890123456789", "1.2345678e-320", "1e400", "1e-400", "NaN", "true", '{"value": 4}')


@pytest.mark.parametrize("written", [*WRITTEN, *UNKNOWN])
def test_a_number_is_an_answer_digit_by_digit_or_refused(tmp_path, written):
    text = f'{{"prompt": "p", "answer": {written}}}\n'
    if written in UNKNOWN:
        with pytest.raises(UserError, match="line 1: answer "):
            read(tmp_path / "p.jsonl", text)
    else:
        for name, content in (("p.jsonl", text), ("p.json", f"[{text}]")):
            assert read(tmp_path / name, content)[0]["answer"] == WRITTEN[written]


WITHOUT_TEXT = ([user("alpha"), assistant(None)], [user(None)], [user(["alpha"])], "   ", [])
WITHOUT_TEXT += ([{"role": 1, "content": "alpha"}], [{"from": "human", "value": "alpha"}])


@pytest.mark.parametrize("prompt", WITHOUT_TEXT)
def test_a_prompt_without_texts_is_refused(tmp_path, prompt):
    with pytest.raises(UserError, match="line 1"):
        read(tmp_path / "p.jsonl", [{"prompt": prompt, "answer": "4"}])


@pytest.mark.parametrize("begun", ["The answer is ", "\nSo", "a<|end|>"])
def test_a_prompt_that_ends_with_a_turn_of_the_model_is_continued(begun):
    text = render(bpe(), [user("1+2?"), assistant(begun)], template="chat").text
    assert text == "<|start|>user\n1+2?<|end|>\n<|start|>assistant\n" + begun.lstrip("\n")
    with pytest.raises(UserError, match="row 1 ends with a message of the assistant that cannot be"):
        render(bpe(chat_template="{{ messages[0].content }}"), [user("1+2?"), assistant(begun)], template="chat")


TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
COLUMNS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for d in documents or [] %}[{{ d.text }}]{% endfor %}"
    "{% if effort is defined %}effort {{ effort }}{% endif %}" + CHAT
)


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_columns_that_the_template_understands_reach_it(tmp_path, name):
    row = {"prompt": [user("hi")], "answer": "4", "tools": TOOLS, "documents": [{"text": "paper"}], "effort": "high"}
    other = {"prompt": [user("ho")], "answer": "4", "tools": None, "documents": None, "effort": None, "system": "S"}
    renderer = Renderer(table(template="chat", max_prompt_tokens=500), bpe(chat_template=COLUMNS))
    items = read(tmp_path / name, [row | {"system": None}, other])
    first, second = (renderer.render(item, "row").text for item in items)
    assert first == json.dumps(TOOLS) + "[paper]effort high<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert second == "<|start|>system\nS<|end|>\n<|start|>user\nho<|end|>\n<|start|>assistant\n"
    assert renderer.shown >= {"tools", "documents", "effort", "system", "prompt"} and "answer" not in renderer.shown


def test_columns_that_contradict_the_recipe_or_the_template_are_refused():
    for row, template, settings, said in (
        ({"tools": TOOLS}, CHAT, {}, "has tools, which the chat template does not show"),
        ({"tools": "{"}, COLUMNS, {}, "row 1: "),
        ({"tools": [1]}, COLUMNS, {}, "tools must be a list of objects"),
        ({"effort": "low"}, COLUMNS, {"template_arguments": {"effort": "high"}}, "template_arguments sets too"),
        ({"hint": None}, CHAT, {"prompt_template": "{hint} {prompt}"}, "column hint is null"),
    ):
        with pytest.raises(UserError, match=said):
            render(bpe(chat_template=template), "hi", columns=row, template="chat", **settings)


def arrow(kind, value, **more):
    """A table with an answer of Arrow's type ``kind``."""
    return pyarrow.table({"prompt": ["p"], "answer": pyarrow.array([value], kind)} | more)


def file_of(folder, rows):
    text = "p.csv" if str(rows).startswith("prompt,") else "p.jsonl"
    return folder / ("p.parquet" if isinstance(rows, pyarrow.Table) else text)


def truth(text):
    return [{"prompt": [user("p")], "reward_model": {"ground_truth": text}}]


TRUTH = {"columns": {"answer": "answer.ground_truth"}}
STRUCT = pyarrow.struct([("ground_truth", pyarrow.float32())])
NOT_UTF8 = pyarrow.StringArray.from_buffers(
    1, pyarrow.py_buffer(np.array([0, 2], np.int32)), pyarrow.py_buffer(b"\xff\xfe")
)
LABELS = {"answer": {"names": ["A", "B", "C", "D"], "_type": "ClassLabel"}}
HUGGING_FACE = {b"huggingface": json.dumps({"info": {"features": LABELS}}).encode()}
LIVE = {"question_content": "q", "public_test_cases": "[]", "metadata": "{}"}
CONTEST = {"description": "p", "public_tests": {"input": ["1", "2"], "output": ["1"]}}
CHOICES = {"question": "q", "answerKey": "A"}
GRID = {"train": [{"input": [[1]], "output": [[1]]}]}
PUZZLE = {"prompt": "p", "task_name": "t"}


@pytest.mark.parametrize(
    ("rows", "settings", "answer"),  # answer: None if the row is refused
    [
        # RFC 8259, section 4: an object whose names are not unique
        ('{"prompt": "p", "answer": "1", "answer": "2"}', {}, None),
        # RFC 4180, section 2: no quotes in a field that does not begin with them
        ('prompt,answer\np, "4"\n', {}, None),
        ("prompt,answer\nWhat is 1,000+1?,1001\n", {}, None),
        # 0 is an answer
        ([{"problem": "p", "answer": 0, "solution": r"\boxed{5}"}], "math", "0"),
        ([PUZZLE | {"answer": 0, "meta": {"answer": 5}}], "enigmata", "0"),
        ([{"prompt": "p", "answer": "1", "also_right": "42"}], {}, None),
        # verl's reward_model.ground_truth in Parquet, with Arrow's smaller floats
        (arrow(STRUCT, {"ground_truth": 0.1}), TRUTH, "0.1"),
        (arrow(pyarrow.list_(pyarrow.float16()), [0.1]), {"columns": {"answer": "answer.0"}}, "0.1"),
        (arrow(pyarrow.decimal128(10, 3), Decimal("3.500")), {}, "3.5"),
        # cais/mmlu and tasksource issue 6: the answer is a ClassLabel of Hugging Face's datasets
        (arrow(pyarrow.int64(), 2).replace_schema_metadata(HUGGING_FACE), {}, "C"),
        (arrow(pyarrow.int64(), -1).replace_schema_metadata(HUGGING_FACE), {}, None),
        # Parquet files of writers that check no UTF-8, and dates beyond those of Python
        (pyarrow.table({"prompt": ["p"], "answer": NOT_UTF8}), {}, None),
        (arrow(pyarrow.string(), "4", day=pyarrow.array([6585000], pyarrow.date32())), {}, None),
        (arrow(pyarrow.map_(pyarrow.string(), pyarrow.float32()), [("ground_truth", 4)]), TRUTH, None),
        # deepmind/code_contests: outputs that would belong to the inputs of another group of tests
        ([CONTEST | {"private_tests": {"input": ["3"], "output": ["2", "3"]}}], "code_contests", None),
        # DAPO's chats without a text
        ([truth("1")[0] | {"prompt": [user([{"type": "image"}])]}], "dapo_math", None),
        # allenai/ai2_arc
        ([CHOICES | {"choices": {"label": ["A", "B"], "text": ["x"]}}], "arc", None),
        ([CHOICES | {"choices": {"label": ["A", "A"], "text": ["x", "y"]}}], "arc", None),
        # fchollet/ARC-AGI: cells are digits
        ([GRID | {"test": [{"input": [[1]], "output": [[True]]}]}], "arc_agi", None),
        # BytedTsinghua-SIA/Enigmata-Eval: meta is JSON
        ([PUZZLE | {"meta": '{"answer": 0.1234567890123456789}'}], "enigmata", None),
        ([PUZZLE | {"meta": '{"answer": [1.50, null]}'}], "enigmata", "[1.5, null]"),
        # livecodebench/code_generation_lite: base64 of what is no zlib
        ([LIVE | {"private_test_cases": "AAAA"}], "livecodebench", None),
        # Skywork/Skywork-OR1-RL-Data: an interval is no JSON; an answer beside the right one is empty
        (truth("[0, 1)"), "skywork_or1", None),
        (truth('["1", "", null]'), "skywork_or1", "1"),
    ],
)
def test_an_answer_keeps_its_meaning_or_its_row_is_refused(tmp_path, rows, settings, answer):
    settings = {"format": settings} if isinstance(settings, str) else settings
    with pytest.raises(UserError, match="(line|row) 1") if answer is None else contextlib.nullcontext():
        (item,) = read(file_of(tmp_path, rows), rows, **settings)
        assert item["answer"] == answer and not item["metadata"].get("also_right")


USERS_ONLY = "{% for m in messages if m.role == 'user' %}{{ m.role }}: {{ m.content }}{% endfor %}"
CALLED = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
CALLED += "{% endfor %}; {% endfor %}"
OPENED = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
LOOKUP, INEXACT = (
    {"type": "function", "function": {"name": "f", "arguments": f'{{"x": {x}}}'}}
    for x in ("1", "0.1234567890123456789")
)


def chat(**columns):
    return [{"prompt": [user("hi")], "answer": "4"} | columns]


def called(**fields):
    return chat(prompt=[user("hi"), assistant(None) | fields, {"role": "tool", "content": "5"}])


@pytest.mark.parametrize(
    ("rows", "template", "settings", "text"),  # text: None if the row is refused
    [
        # conversations in CSV files: json.dumps(indent=2), str of a message, ShareGPT's JSON
        (chat(prompt=json.dumps([user("hi")], indent=2)), CHAT, {}, OPENED),
        (chat(prompt=str(user("hi"))), CHAT, {}, None),
        (chat(prompt='[{"from": "human", "value": "hi"}]'), CHAT, {}, None),
        (chat(prompt='{"from": "a", "to": "b"}'), "{{ messages[0].content }}", {}, '{"from": "a", "to": "b"}'),
        # contents in parts, which must be texts
        (chat(prompt=[user([{"type": "text", "text": "h"}, {"text": "i"}])]), CHAT, {}, OPENED),
        (chat(prompt=[user([{"type": "image", "image": "a.png"}, {"type": "text", "text": "hi"}])]), CHAT, {}, None),
        # messages that a template leaves out, as Qwen3's does those with other roles
        (chat(prompt=[{"role": "gpt", "content": "ho"}, user("hi")]), USERS_ONLY, {}, None),
        (chat(), USERS_ONLY, {"system": "S"}, None),
        (called(tool_calls=[LOOKUP]), CALLED, {}, "user: hi; assistant: f; tool: 5; "),
        (called(tool_calls=[LOOKUP]), CHAT, {}, None),
        # OpenAI's Responses, its function_call, TRL's tool_calls as JSON
        (chat(prompt=[user([{"type": "input_text", "text": "hi"}])]), CHAT, {}, None),
        (called(content="", function_call={"name": "f", "arguments": "{}"}), CALLED, {}, None),
        (called(tool_calls=json.dumps([INEXACT])), CALLED, {}, None),
        (called(tool_calls=[INEXACT]), CALLED, {}, None),
        # transformers' documents, with the null fields that Arrow adds, and columns without a value
        (chat(documents=[{"title": None, "text": "a"}]), "{{ documents[0].title }}" + CHAT, {}, OPENED),
        ('{"prompt": "hi", "answer": 4, "effort": NaN}', "{{ effort }}" + CHAT, {}, None),
        (chat(system=[{"type": "text", "text": "S"}]), CHAT, {}, None),
        # templates as Llama 3.1's and Mistral's show tools only beside some messages
        (chat(tools=TOOLS), "{% if tools and messages[0].role == 'system' %}{{ tools }}{% endif %}" + CHAT, {}, None),
        # columns of verl's extra_info, and of JSON and Parquet, in prompt_template
        (chat(prompt="p", info={"hint": None}), None, {"prompt_template": "{info[hint]} {prompt}"}, None),
        (chat(prompt="p", info={"hint": "h"}), None, {"prompt_template": "{info[hint]} {prompt}"}, "h p"),
        ('{"prompt": "p", "answer": 4, "x": NaN}', None, {"prompt_template": "{x} {prompt}"}, None),
        (arrow(pyarrow.string(), "4", x=[b"easy"]), None, {"prompt_template": "{x} {prompt}"}, None),
    ],
)
def test_a_prompt_says_what_its_row_says_or_the_row_is_refused(tmp_path, rows, template, settings, text):
    settings = settings | {"template": "chat"} if template else settings
    with pytest.raises(UserError, match="(line|row) 1") if text is None else contextlib.nullcontext():
        (item,) = read(file_of(tmp_path, rows), rows)
        assert Renderer(table(**settings), bpe(chat_template=template)).render(item, "line 1").text == text


def test_a_mark_of_the_byte_order_reaches_no_prompt(tmp_path):
    """Notepad and PowerShell begin files with it (playwright pull request 39420)."""
    (tmp_path / "t.jinja").write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}")
    for name, text in (("p.jsonl", '\ufeff{"prompt": "p", "answer": 4}'), ("p.csv", "\ufeffprompt,answer\np,4\n")):
        (item,) = read(tmp_path / name, text)
        assert Renderer(table(template=str(tmp_path / "t.jinja")), bpe()).render(item, "row 1").text == "p"
