"""Values that pass by their type and later mean something else: answers, messages, columns."""

import contextlib
import json
import re
from decimal import Decimal

import numpy as np
import pyarrow
import pytest

from megarl.data.templates import Renderer
from megarl.errors import UserError
from tests.data.prompt_sources import read
from tests.data.test_templates import CHAT, TEXT, assistant, bpe, system, table, user

refused = re.compile  # what the message says, in tables that otherwise have what is right
ROW_1 = refused("(line|row) 1")

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
    first, second = (renderer.render(item, "row")[0] for item in items)
    assert first == json.dumps(TOOLS) + "[paper]effort high<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert second == "<|start|>system\nS<|end|>\n<|start|>user\nho<|end|>\n<|start|>assistant\n"
    assert renderer.shown >= {"tools", "documents", "effort", "system", "prompt"} and "answer" not in renderer.shown


def arrow(kind, value, **more):
    """A table with an answer of Arrow's type ``kind``."""
    return pyarrow.table({"prompt": ["p"], "answer": pyarrow.array([value], kind)} | more)


def file_of(folder, rows):
    kinds = {"{": "jsonl", "[": "json", "p": "csv"}  # by how a text begins
    suffix = kinds[rows[0]] if isinstance(rows, str) else "parquet" if isinstance(rows, pyarrow.Table) else "jsonl"
    return folder / f"p.{suffix}"


def unless_refused(expected):
    said = isinstance(expected, re.Pattern)
    return pytest.raises(UserError, match=expected) if said else contextlib.nullcontext()


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
SOLVED = {"question": "q", "answer": "so\n#### 1"}
GRID = {"train": [{"input": [[1]], "output": [[1]]}]}
PUZZLE = {"prompt": "p", "task_name": "t"}
# IEEE 754: numbers below 2.2e-308 have fewer digits
INEXACT_OR_NONE = ("0.1234567890123456789", "1.2345678e-320", "1e400", "1e-400", "NaN", "true", '{"value": 4}')
NUMBERS = {
    "1e-05": "0.00001",
    "42.0": "42",
    "-0.0": "0",
    "1" * 30: "1" * 30,
    "1e300": "1" + "0" * 300,
    '"1e-05"': "1e-05",
    **dict.fromkeys(INEXACT_OR_NONE, refused("(line|row) 1: answer ")),
}


@pytest.mark.parametrize(
    ("rows", "settings", "answer"),
    [
        *((f'{{"prompt": "p", "answer": {written}}}', {}, answer) for written, answer in NUMBERS.items()),
        *((f'[{{"prompt": "p", "answer": {written}}}]', {}, answer) for written, answer in NUMBERS.items()),
        # RFC 8259, section 4: an object whose names are not unique
        ('{"prompt": "p", "answer": "1", "answer": "2"}', {}, ROW_1),
        # RFC 4180, section 2: no quotes in a field that does not begin with them
        ('prompt,answer\np, "4"\n', {}, ROW_1),
        ("prompt,answer\nWhat is 1,000+1?,1001\n", {}, ROW_1),
        # 0 is an answer
        ([{"problem": "p", "answer": 0, "solution": r"\boxed{5}"}], "math", "0"),
        ([PUZZLE | {"answer": 0, "meta": {"answer": 5}}], "enigmata", "0"),
        ([{"prompt": "p", "answer": "1", "also_right": "42"}], {}, ROW_1),
        # verl's reward_model.ground_truth in Parquet, with Arrow's smaller floats
        (arrow(STRUCT, {"ground_truth": 0.1}), TRUTH, "0.1"),
        (arrow(pyarrow.list_(pyarrow.float16()), [0.1]), {"columns": {"answer": "answer.0"}}, "0.1"),
        (arrow(pyarrow.decimal128(10, 3), Decimal("3.500")), {}, "3.5"),
        # cais/mmlu and tasksource issue 6: the answer is a ClassLabel of Hugging Face's datasets
        (arrow(pyarrow.int64(), 2).replace_schema_metadata(HUGGING_FACE), {}, "C"),
        (arrow(pyarrow.int64(), -1).replace_schema_metadata(HUGGING_FACE), {}, ROW_1),
        # Parquet files of writers that check no UTF-8, and dates beyond those of Python
        (pyarrow.table({"prompt": ["p"], "answer": NOT_UTF8}), {}, ROW_1),
        (arrow(pyarrow.string(), "4", day=pyarrow.array([6585000], pyarrow.date32())), {}, ROW_1),
        (arrow(pyarrow.map_(pyarrow.string(), pyarrow.float32()), [("ground_truth", 4)]), TRUTH, ROW_1),
        # deepmind/code_contests: outputs that would belong to the inputs of another group of tests
        ([CONTEST | {"private_tests": {"input": ["3"], "output": ["2", "3"]}}], "code_contests", ROW_1),
        # DAPO's chats without a text
        ([truth("1")[0] | {"prompt": [user([{"type": "image"}])]}], "dapo_math", ROW_1),
        # allenai/ai2_arc
        ([CHOICES | {"choices": {"label": ["A", "B"], "text": ["x"]}}], "arc", ROW_1),
        ([CHOICES | {"choices": {"label": ["A", "A"], "text": ["x", "y"]}}], "arc", ROW_1),
        # fchollet/ARC-AGI: cells are digits
        ([GRID | {"test": [{"input": [[1]], "output": [[True]]}]}], "arc_agi", ROW_1),
        # BytedTsinghua-SIA/Enigmata-Eval: meta is JSON
        ([PUZZLE | {"meta": '{"answer": 0.1234567890123456789}'}], "enigmata", ROW_1),
        ([PUZZLE | {"meta": '{"answer": [1.50, null]}'}], "enigmata", "[1.5, null]"),
        # livecodebench/code_generation_lite: base64 of what is no zlib
        ([LIVE | {"private_test_cases": "AAAA"}], "livecodebench", ROW_1),
        # Skywork/Skywork-OR1-RL-Data: an interval is no JSON; an answer beside the right one is empty
        (truth("[0, 1)"), "skywork_or1", ROW_1),
        (truth('["1", "", null]'), "skywork_or1", "1"),
        ([SOLVED, SOLVED | {"answer": "2"}], "gsm8k", refused("line 2 is not .* 'gsm8k': ValueError.'no ####")),
        ([SOLVED], "gsm8", refused("data.format = 'gsm8': unknown; did you mean 'gsm8k'")),
        ([{"problem": "p", "solution": "No box."}], "math", refused("line 1: answer must be .*, got None")),
        ([CHOICES | {"choices": {"label": ["B"], "text": ["x"]}}], "arc", refused("answerKey 'A' is not one of")),
    ],
)
def test_an_answer_keeps_its_meaning_or_its_row_is_refused(tmp_path, rows, settings, answer):
    settings = {"format": settings} if isinstance(settings, str) else settings
    with unless_refused(answer):
        (item,) = read(file_of(tmp_path, rows), rows, **settings)
        assert item["answer"] == answer and not item["metadata"].get("also_right")


USERS_ONLY = "{% for m in messages if m.role == 'user' %}{{ m.role }}: {{ m.content }}{% endfor %}"
CALLED = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
CALLED += "{% endfor %}; {% endfor %}"
LOOKUP, INEXACT = (
    {"type": "function", "function": {"name": "f", "arguments": f'{{"x": {x}}}'}}
    for x in ("1", "0.1234567890123456789")
)


def opened(*messages):
    """What `CHAT` makes of a conversation."""
    turns = (f"<|start|>{one['role']}\n{one['content'].strip()}<|end|>\n" for one in messages)
    return "".join(turns) + "<|start|>assistant\n"


def chat(**columns):
    return [{"prompt": [user("hi")], "answer": "4"} | columns]


def called(**fields):
    return chat(prompt=[user("hi"), assistant(None) | fields, {"role": "tool", "content": "5"}])


OPENED = opened(user("hi"))
TURNS = [user("1+2?"), assistant("3"), user("And\n\n3?")]
WITHOUT_TEXT = ([user("alpha"), assistant(None)], [user(None)], [user(["alpha"])], "   ", [])
WITHOUT_TEXT += ([{"role": 1, "content": "alpha"}], [{"from": "human", "value": "alpha"}])
SOLVE = {"prompt_template": "Solve:\n\n{prompt}", "system": "You sum."}
THINK, MISSPELT = ({"template_arguments": {name: True}} for name in ("enable_thinking", "enable_think"))
FIRST = "{{ messages[0].content }}"
THINKS = CHAT + "{% if enable_thinking is false %}-{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    ("rows", "template", "settings", "text"),
    [
        # a text becomes a message of the user; a system message of the prompt's own takes precedence
        (chat(prompt="1+2?"), CHAT, SOLVE, opened(system("You sum."), user("Solve:\n\n1+2?"))),
        (chat(prompt=TEXT), CHAT, {}, opened(user(TEXT))),
        (chat(prompt=TURNS), CHAT, {}, opened(*TURNS)),
        (chat(prompt=TURNS), CHAT, {"system": "S"}, opened(system("S"), *TURNS)),
        (chat(prompt=[system("mine"), *TURNS]), CHAT, {"system": "S"}, opened(system("mine"), *TURNS)),
        # a turn of the model that ends the prompt is continued
        *((chat(prompt=[*TURNS, assistant(begun)]), CHAT, {}, opened(*TURNS) + begun) for begun in ("so ", "a<|end|>")),
        (chat(prompt=[*TURNS, assistant("\nSo")]), CHAT, {}, opened(*TURNS) + "So"),
        (chat(prompt=[user("a"), assistant("b")]), FIRST, {}, refused("line 1 ends with a .* that cannot be cont")),
        # templates: several of one tokenizer, their arguments, and those that do not fit
        (chat(), {"default": CHAT, "tool_use": CHAT + "T"}, {}, OPENED),
        (chat(), "{{ strftime_now('%d %b %Y') }}" + CHAT, {}, "26 Jul 2024" + OPENED),  # on every day
        (chat(), THINKS, THINK, OPENED),
        (chat(), THINKS, {"template_arguments": {"enable_thinking": False}}, OPENED + "-"),
        (chat(), THINKS, MISSPELT, refused("enable_think, which the chat template does not use")),
        (chat(), None, {"template": "chat"}, refused("has no chat template")),
        (chat(), None, {"template": "/gone.jinja"}, refused(r"cannot read data.template .*gone\.jinja")),
        (chat(), None, {}, refused('line 1 is a list of chat messages: set data.template to "chat"')),
        (chat(), CHAT, {"prompt_template": "Q: {prompt}"}, refused("cannot be combined with data.prompt_template")),
        (chat(), NO_SYSTEM, {"system": "S"}, refused("template does not fit line 1: TemplateError: no system")),
        *((chat(prompt=prompt), CHAT, {}, refused("line 1: .*prompt (must|has)")) for prompt in WITHOUT_TEXT),
        # conversations in CSV files: json.dumps(indent=2), str of a message, ShareGPT's JSON
        (chat(prompt=json.dumps([user("hi")], indent=2)), CHAT, {}, OPENED),
        (chat(prompt=str(user("hi"))), CHAT, {}, ROW_1),
        (chat(prompt='[{"from": "human", "value": "hi"}]'), CHAT, {}, ROW_1),
        (chat(prompt='{"from": "a", "to": "b"}'), FIRST, {}, '{"from": "a", "to": "b"}'),
        # contents in parts, which must be texts
        (chat(prompt=[user([{"type": "text", "text": "h"}, {"text": "i"}])]), CHAT, {}, OPENED),
        (chat(prompt=[user([{"type": "image", "image": "a.png"}, {"type": "text", "text": "hi"}])]), CHAT, {}, ROW_1),
        # messages that a template leaves out, as Qwen3's does those with other roles
        (chat(prompt=[{"role": "gpt", "content": "ho"}, user("hi")]), USERS_ONLY, {}, ROW_1),
        (chat(), USERS_ONLY, {"system": "S"}, ROW_1),
        (called(tool_calls=[LOOKUP]), CALLED, {}, "user: hi; assistant: f; tool: 5; "),
        (called(tool_calls=[LOOKUP]), CHAT, {}, ROW_1),
        # OpenAI's Responses, its function_call, TRL's tool_calls as JSON
        (chat(prompt=[user([{"type": "input_text", "text": "hi"}])]), CHAT, {}, ROW_1),
        (called(content="", function_call={"name": "f", "arguments": "{}"}), CALLED, {}, ROW_1),
        (called(tool_calls=json.dumps([INEXACT])), CALLED, {}, ROW_1),
        (called(tool_calls=[INEXACT]), CALLED, {}, ROW_1),
        # transformers' documents, with the null fields that Arrow adds, and columns without a value
        (chat(documents=[{"title": None, "text": "a"}]), "{{ documents[0].title }}" + CHAT, {}, OPENED),
        ('{"prompt": "hi", "answer": 4, "effort": NaN}', "{{ effort }}" + CHAT, {}, ROW_1),
        (chat(system=[{"type": "text", "text": "S"}]), CHAT, {}, ROW_1),
        # templates as Llama 3.1's and Mistral's show tools only beside some messages
        (chat(tools=TOOLS), CHAT, {}, refused("has tools, which the chat template does not show")),
        (chat(tools="{"), COLUMNS, {}, ROW_1),
        (chat(tools=[1]), COLUMNS, {}, refused("tools must be a list of objects")),
        (chat(enable_thinking=1), THINKS, THINK, refused("enable_thinking, which data.template_arguments sets too")),
        (chat(tools=TOOLS), "{% if tools and messages[0].role == 'system' %}{{ tools }}{% endif %}" + CHAT, {}, ROW_1),
        # columns of verl's extra_info, and of JSON and Parquet, in prompt_template
        (chat(prompt="p", info={"hint": None}), None, {"prompt_template": "{info[hint]} {prompt}"}, ROW_1),
        (chat(prompt="p", hint=None), CHAT, {"prompt_template": "{hint} {prompt}"}, refused("column hint is null")),
        (chat(prompt="p", info={"hint": "h"}), None, {"prompt_template": "{info[hint]} {prompt}"}, "h p"),
        ('{"prompt": "p", "answer": 4, "x": NaN}', None, {"prompt_template": "{x} {prompt}"}, ROW_1),
        (arrow(pyarrow.string(), "4", x=[b"easy"]), None, {"prompt_template": "{x} {prompt}"}, ROW_1),
    ],
)
def test_a_prompt_says_what_its_row_says_or_the_row_is_refused(tmp_path, rows, template, settings, text):
    settings, tokenizer = ({"template": "chat"} if template else {}) | settings, bpe(chat_template=template)
    with unless_refused(text):
        (item,) = read(file_of(tmp_path, rows), rows)
        shown, tokens = Renderer(table(**settings), tokenizer).render(item, "line 1")
        assert shown == text
        spelled = "<|end|>" in str(rows)  # a special token of the row's own, which is text
        assert (tokens == tuple(tokenizer(text)["input_ids"])) != spelled


def test_a_mark_of_the_byte_order_reaches_no_prompt(tmp_path):
    """Notepad and PowerShell begin files with it (playwright pull request 39420)."""
    (tmp_path / "t.jinja").write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}")
    for name, text in (("p.jsonl", '\ufeff{"prompt": "p", "answer": 4}'), ("p.csv", "\ufeffprompt,answer\np,4\n")):
        (item,) = read(tmp_path / name, text)
        assert Renderer(table(template=str(tmp_path / "t.jinja")), bpe()).render(item, "row 1")[0] == "p"
