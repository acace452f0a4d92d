"""Values that pass by their type and only later mean something else: as answers, messages, columns of templates."""

import json
from decimal import Decimal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megarl.data.files import read_rows
from megarl.data.templates import Renderer
from megarl.errors import UserError
from megarl.recipe.data_table import SourceTable
from tests.data.test_templates import CHAT, assistant, bpe, system, table, user

# chat templates of public models treat contents and roles in these ways
TEMPLATES = {
    "any role": CHAT,
    "known roles, text only": (  # Qwen3
        "{%- for m in messages %}{%- set c = m.content if m.content is string else '' %}"
        "{%- if m.role in ('user', 'system', 'assistant', 'tool') %}"
        "{{- '<|start|>' + m.role + '\n' + c + '<|end|>\n' }}"
        "{%- for t in m.tool_calls or [] %}{{- '<call>' + t.function.name + (t.function.arguments | tojson) }}"
        "{%- endfor %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant\n' }}{%- endif %}"
    ),
    "prints whatever it gets": (  # GLM
        "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}"
        "{% for t in m.tool_calls or [] %}<call>{{ t.function.name }}{% endfor %}<|end|>{% endfor %}"
    ),
    "without a system message": (
        "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    ),
}


def read(tmp_path, rows, name="p.jsonl", **settings):
    path = tmp_path / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(rows if isinstance(rows, pyarrow.Table) else pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
    return [item for _, item in read_rows(SourceTable(source="file", train=str(path), **settings))]


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("1e-05", "0.00001"),
        ("42.0", "42"),
        ("-0.0", "0"),
        ("-7.50", "-7.5"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("1e300", "1" + "0" * 300),
        ('"1e-05"', "1e-05"),
        ("0.1234567890123456789", None),
        ("9007199254740993.0", None),
        ("1e400", None),
        ("1e-400", None),
        ("NaN", None),
        ("true", None),
        ('{"value": 4}', None),
    ],
)
def test_a_number_is_an_answer_digit_by_digit_or_refused(tmp_path, written, answer):
    text = f'{{"prompt": "p", "answer": {written}}}\n'
    if answer is None:
        with pytest.raises(UserError, match="line 1: answer "):
            read(tmp_path, text)
    else:
        assert read(tmp_path, text)[0]["answer"] == answer
        assert read(tmp_path, f"[{text}]", "p.json")[0]["answer"] == answer


CONVERSATIONS = [
    ([user([{"type": "text", "text": "alpha"}, {"type": "text", "text": " beta"}])], ["alpha beta"]),
    ([user([{"text": "alpha"}])], ["alpha"]),
    ([system("gamma"), user("alpha")], ["gamma", "alpha"]),
    ([user([{"type": "image", "image": "a.png"}, {"type": "text", "text": "alpha"}])], ["alpha", "a.png"]),
    ([{"role": "human", "content": "assistant"}], ["assistant<|end|>"]),  # the word opens the turn
    ([{"role": "gpt", "content": "delta"}, user("alpha")], ["delta", "alpha"]),
    ([user("alpha"), assistant("beta"), user("4"), user("4")], ["alpha", "beta", "4"]),
    ([user("alpha"), assistant(None)], None),
    ([user(None)], None),
    ([user(["alpha"])], None),
    ([user(3)], None),
    ([{"role": 1, "content": "alpha"}], None),
    ([{"from": "human", "value": "alpha"}], None),
    ([user("alpha"), {"role": "tool", "content": None}], None),
    (
        [
            user("alpha"),
            assistant(None) | {"tool_calls": [{"type": "function", "function": {"name": "lookup", "arguments": "{}"}}]},
            {"role": "tool", "content": "beta"},
        ],
        ["alpha", "lookup", "beta"],
    ),
    ("   ", None),
    ([], None),
    ("[{'role': 'user', 'content': 'alpha'}]", None),
    (json.dumps([user("alpha")]), ["alpha"]),
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("prompt", "needed"), CONVERSATIONS)
def test_the_text_of_every_message_stands_in_the_prompt_or_the_row_is_refused(tmp_path, template, prompt, needed):
    text, refused = None, ""
    try:
        (item,) = read(tmp_path, [{"prompt": prompt, "answer": "4"}])
        text = Renderer(table(template="chat"), bpe(chat_template=TEMPLATES[template])).render(item, "row 1").text
    except UserError as error:
        refused = str(error)
    if text is None:
        all_text = needed and "tool_calls" not in str(prompt) and "image" not in str(prompt)
        assert ("line 1" in refused or "row 1" in refused) and not (all_text and template == "any role")
    else:
        assert needed is not None and all(part in text for part in needed) and "None" not in text and "[{" not in text


def test_a_system_message_of_the_recipe_that_a_template_leaves_out_is_refused(tmp_path):
    (item,) = read(tmp_path, [{"prompt": "p", "answer": "4"}])
    renderer = Renderer(table(template="chat", system="S"), bpe(chat_template=TEMPLATES["without a system message"]))
    with pytest.raises(UserError, match="row 1: the chat template does not show a message of 'system'"):
        renderer.render(item, "row 1")


@pytest.mark.parametrize("begun", ["The answer is ", "\nSo", "a<|end|>"])
def test_a_prompt_that_ends_with_a_turn_of_the_model_is_continued(tmp_path, begun):
    (item,) = read(tmp_path, [{"prompt": [user("1+2?"), assistant(begun)], "answer": "3"}])
    text = Renderer(table(template="chat"), bpe()).render(item, "row 1").text
    assert text == "<|start|>user\n1+2?<|end|>\n<|start|>assistant\n" + begun.lstrip("\n")
    with pytest.raises(UserError, match="row 1 ends with a message of the assistant that cannot be continued"):
        Renderer(table(template="chat"), bpe(chat_template="{{ messages[0].content }}")).render(item, "row 1")


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
    first, second = (
        renderer.render(item, "row").text for item in read(tmp_path, [row | {"system": None}, other], name)
    )
    assert first == json.dumps(TOOLS) + "[paper]effort high<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert second == "<|start|>system\nS<|end|>\n<|start|>user\nho<|end|>\n<|start|>assistant\n"
    assert renderer.shown >= {"tools", "documents", "effort", "system", "prompt"} and "answer" not in renderer.shown


def test_columns_that_contradict_the_recipe_or_the_template_are_refused(tmp_path):
    for row, template, settings, said in (
        ({"tools": TOOLS}, CHAT, {}, "has tools, which the chat template does not show"),
        ({"tools": "{"}, COLUMNS, {}, "row 1: "),
        ({"tools": [1]}, COLUMNS, {}, "tools must be a list of objects"),
        ({"effort": "low"}, COLUMNS, {"template_arguments": {"effort": "high"}}, "template_arguments sets too"),
        ({"hint": None}, CHAT, {"prompt_template": "{hint} {prompt}"}, "column hint is null"),
    ):
        (item,) = read(tmp_path, [{"prompt": "hi", "answer": "4"} | row])
        with pytest.raises(UserError, match=said):
            Renderer(table(template="chat", **settings), bpe(chat_template=template)).render(item, "row 1")


def arrow(kind, value, **more):
    """A table with an answer of Arrow's type ``kind``."""
    return pyarrow.table({"prompt": ["p"], "answer": pyarrow.array([value], kind)} | more)


def chat_of(ground_truth):
    return [{"prompt": [user("p")], "reward_model": {"ground_truth": ground_truth}}]


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
    ("name", "rows", "settings", "answer"),  # answer: None if the row is refused
    [
        # RFC 8259, section 4: an object whose names are not unique
        ("p.jsonl", '{"prompt": "p", "answer": "1", "answer": "2"}', {}, None),
        # IEEE 754: numbers below 2.2e-308 have fewer digits
        ("p.jsonl", '{"prompt": "p", "answer": 1.2345678e-320}', {}, None),
        # RFC 4180, section 2: no quotes in a field that does not begin with them
        ("p.csv", 'prompt,answer\np, "4"\n', {}, None),
        ("p.csv", "prompt;answer\np;4\n", {}, None),
        ("p.csv", "prompt,answer\nWhat is 1,000+1?,1001\n", {}, None),
        # 0 is an answer
        ("p.jsonl", [{"problem": "p", "answer": 0, "solution": r"\boxed{5}"}], "math", "0"),
        ("p.jsonl", [{"prompt": "p", "task_name": "t", "answer": 0, "meta": {"answer": 5}}], "enigmata", "0"),
        ("p.jsonl", [{"prompt": "p", "answer": "1", "also_right": "42"}], {}, None),
        ("p.jsonl", [{"prompt": "p", "answer": "1", "also_right": None}], {}, "1"),
        # verl's reward_model.ground_truth in Parquet, with Arrow's smaller floats
        ("p.parquet", arrow(STRUCT, {"ground_truth": 0.1}), TRUTH, "0.1"),
        ("p.parquet", arrow(pyarrow.list_(pyarrow.float32()), [0.1]), {"columns": {"answer": "answer.0"}}, "0.1"),
        ("p.parquet", arrow(pyarrow.float16(), np.float16(0.1)), {}, "0.1"),
        ("p.parquet", arrow(pyarrow.int64(), 9007199254740993), {}, "9007199254740993"),
        ("p.parquet", arrow(pyarrow.decimal128(10, 3), Decimal("3.500")), {}, "3.5"),
        # cais/mmlu and tasksource issue 6: the answer is a ClassLabel of Hugging Face's datasets
        ("p.parquet", arrow(pyarrow.int64(), 2).replace_schema_metadata(HUGGING_FACE), {}, "C"),
        ("p.parquet", arrow(pyarrow.int64(), -1).replace_schema_metadata(HUGGING_FACE), {}, None),
        # Parquet files of writers that check no UTF-8, and dates beyond those of Python
        ("p.parquet", pyarrow.table({"prompt": ["p"], "answer": NOT_UTF8}), {}, None),
        ("p.parquet", arrow(pyarrow.string(), "4", day=pyarrow.array([6585000], pyarrow.date32())), {}, None),
        ("p.parquet", arrow(pyarrow.string(), "4", at=pyarrow.array([1], pyarrow.timestamp("ns"))), {}, None),
        ("p.parquet", arrow(pyarrow.date32(), 1), {}, None),
        ("p.parquet", arrow(pyarrow.bool_(), True), {}, None),
        ("p.parquet", arrow(pyarrow.list_(pyarrow.string()), ["4"]), {}, None),
        ("p.parquet", arrow(pyarrow.map_(pyarrow.string(), pyarrow.float32()), [("ground_truth", 4)]), TRUTH, None),
        # deepmind/code_contests: outputs that would belong to the inputs of another group of tests; texts for lists
        ("p.jsonl", [CONTEST | {"private_tests": {"input": ["3"], "output": ["2", "3"]}}], "code_contests", None),
        ("p.jsonl", [CONTEST | {"public_tests": {"input": "12", "output": "12"}}], "code_contests", None),
        # DAPO's chats without a text
        (
            "p.jsonl",
            [{"prompt": [user([{"type": "image"}])], "reward_model": {"ground_truth": "1"}}],
            "dapo_math",
            None,
        ),
        # evalplus/mbppplus as CSV has its lists as texts; allenai/ai2_arc
        ("p.jsonl", [{"prompt": "p", "test": "t", "test_list": "['assert f(1)']"}], "evalplus", None),
        ("p.jsonl", [CHOICES | {"choices": {"label": "AB", "text": ["x", "y"]}}], "arc", None),
        ("p.jsonl", [CHOICES | {"choices": {"label": ["A", "B"], "text": ["x", None]}}], "arc", None),
        ("p.jsonl", [CHOICES | {"choices": {"label": ["A", "B"], "text": ["x"]}}], "arc", None),
        ("p.jsonl", [CHOICES | {"choices": {"label": ["A", "A"], "text": ["x", "y"]}}], "arc", None),
        # fchollet/ARC-AGI: cells are digits
        ("p.jsonl", [GRID | {"test": [{"input": [[1]], "output": [[0, None]]}]}], "arc_agi", None),
        ("p.jsonl", [GRID | {"test": [{"input": [[1]], "output": [[True]]}]}], "arc_agi", None),
        ("p.jsonl", [GRID | {"test": [{"input": ["12"], "output": ["34"]}]}], "arc_agi", None),
        # BytedTsinghua-SIA/Enigmata-Eval: meta is JSON
        ("p.jsonl", [PUZZLE | {"meta": '{"answer": 0.1234567890123456789}'}], "enigmata", None),
        ("p.jsonl", [PUZZLE | {"meta": '{"answer": [NaN]}'}], "enigmata", None),
        ("p.jsonl", [PUZZLE | {"meta": '{"answer": [1.50, null]}'}], "enigmata", "[1.5, null]"),
        # livecodebench/code_generation_lite: base64 of what is no zlib, and of nothing
        ("p.jsonl", [LIVE | {"private_test_cases": "AAAA"}], "livecodebench", None),
        ("p.jsonl", [LIVE | {"private_test_cases": ""}], "livecodebench", None),
        # Skywork/Skywork-OR1-RL-Data: an interval is no JSON; an answer beside the right one is empty
        ("p.jsonl", chat_of("[0, 1)"), "skywork_or1", None),
        ("p.jsonl", chat_of('["1", "", null]'), "skywork_or1", "1"),
        ("p.jsonl", chat_of("[1e-05]"), "skywork_or1", "0.00001"),
    ],
)
def test_an_answer_keeps_its_meaning_or_its_row_is_refused(tmp_path, name, rows, settings, answer):
    settings = {"format": settings} if isinstance(settings, str) else settings
    if answer is None:
        with pytest.raises(UserError, match=r"(line|row) 1"):
            read(tmp_path, rows, name, **settings)
    else:
        (item,) = read(tmp_path, rows, name, **settings)
        assert item["answer"] == answer and not item["metadata"].get("also_right")


CALLED = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}{% endfor %}"
OPENED = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 0.1234567890123456789}'}}


def chat(**columns):
    return [{"prompt": [user("hi")], "answer": "4"} | columns]


def called(**fields):
    return chat(prompt=[user("hi"), assistant("") | fields, {"role": "tool", "content": "5"}])


@pytest.mark.parametrize(
    ("rows", "template", "settings", "text"),  # text: None if the row is refused
    [
        # conversations in CSV files: json.dumps(indent=2), str of a list, a message or NumPy's array, ShareGPT's JSON
        (chat(prompt=json.dumps([user("hi")], indent=2)), CHAT, {}, OPENED),
        (chat(prompt=str(user("hi"))), CHAT, {}, None),
        (chat(prompt=json.dumps(user("hi"))), CHAT, {}, None),
        (chat(prompt='[{"from": "human", "value": "hi"}]'), CHAT, {}, None),
        (chat(prompt='{"from": "a", "to": "b"}'), "{{ messages[0].content }}", {}, '{"from": "a", "to": "b"}'),
        # datasets' Sequence of objects, OpenAI's Responses, its function_call, TRL's tool_calls as JSON
        (chat(prompt={"role": ["user"], "content": ["hi"]}), CHAT, {}, None),
        (chat(prompt=[user([{"type": "input_text", "text": "hi"}])]), CHAT, {}, None),
        (called(function_call={"name": "f", "arguments": "{}"}), CALLED, {}, None),
        (called(tool_calls=json.dumps([CALL])), CALLED, {}, None),
        (called(tool_calls=[CALL]), CALLED, {}, None),
        # transformers' documents, with the null fields that Arrow adds, and columns without a value
        (chat(documents=[{"title": None, "text": "a"}]), "{{ documents[0].title }}" + CHAT, {}, OPENED),
        ('{"prompt": "hi", "answer": 4, "effort": NaN}', "{{ effort }}" + CHAT, {}, None),
        (chat(system=[{"type": "text", "text": "S"}]), CHAT, {}, None),
        (chat(namespace="std", range=3), "{% set n = namespace(at=range(1)) %}" + CHAT, {}, OPENED),
        # templates as Llama 3.1's and Mistral's show tools only beside some messages
        (chat(tools=TOOLS), "{% if tools and messages[0].role == 'system' %}{{ tools }}{% endif %}" + CHAT, {}, None),
        (chat(tools=[{"type": "web_search"}]), "{{ tools | tojson }}" + CHAT, {}, None),
        # columns of verl's extra_info, and of JSON and Parquet, in prompt_template
        (chat(prompt="p", info={"hint": None}), None, {"prompt_template": "{info[hint]} {prompt}"}, None),
        (chat(prompt="p", info={"hint": "h"}), None, {"prompt_template": "{info[hint]} {prompt}"}, "h p"),
        ('{"prompt": "p", "answer": 4, "x": NaN}', None, {"prompt_template": "{x} {prompt}"}, None),
        (arrow(pyarrow.string(), "4", x=[b"easy"]), None, {"prompt_template": "{x} {prompt}"}, None),
    ],
)
def test_a_prompt_says_what_its_row_says_or_the_row_is_refused(tmp_path, rows, template, settings, text):
    def render():
        (item,) = read(tmp_path, rows, "p.parquet" if isinstance(rows, pyarrow.Table) else "p.jsonl")
        kind = {"template": "chat"} if template else {}
        return Renderer(table(max_prompt_tokens=500, **kind, **settings), bpe(chat_template=template)).render(
            item, "line 1"
        )

    if text is None:
        with pytest.raises(UserError, match=r"(line|row) 1"):
            render()
    else:
        assert render().text == text


def test_a_mark_of_the_byte_order_reaches_no_prompt(tmp_path):
    """Notepad and PowerShell begin files with it (playwright pull request 39420)."""
    (tmp_path / "t.jinja").write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}")
    for name, text in (("p.jsonl", '\ufeff{"prompt": "p", "answer": 4}'), ("p.csv", "\ufeffprompt,answer\np,4\n")):
        (item,) = read(tmp_path, text, name)
        assert Renderer(table(template=str(tmp_path / "t.jinja")), bpe()).render(item, "row 1").text == "p"
