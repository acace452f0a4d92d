"""Each field of OpenAI's and vLLM's request schema is honoured, refused, or harmless; OpenAI's client reads answers."""

import ast
import importlib.util
import json
import math
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, completion_create_params

from megarl.data.templates import Renderer
from megarl.data.tokenizer import load_tokenizer
from megarl.phases.serve.chat import HARMLESS, HONOURED, NEUTRAL, Refused, answer, decoder, parse_chat_request
from megarl.phases.serve.conversations import Conversations
from megarl.phases.serve.server import _completion, serving
from megarl.recipe.load import load_recipe
from megarl.rollout.builtin import BuiltinEngine
from megarl.rollout.engine import Completion, Request, Sampling, answers
from tests.commands.stages.agents import CALL, write_agent_model
from tests.commands.stages.test_serve import SETTINGS, TOOLS

KEY = "k" * 40
ASKED = [{"role": "user", "content": "2+3?"}]
# something of each kind that JSON has
VALUES = [True, False, 0, 1, -1, 7, 0.5, "", "x", "auto", "none", [], ["x"], [5], [{}], {}, {"type": "text"}, {"a": 1}]
UNKNOWN = ["guided_json", "min_length", "enable_thinking", "Temperature", "max_new_tokens", ""]
# of the clients' own argument, of OpenAI's other endpoints, of DeepSeek's, Anthropic's, SGLang's and TGI's schemas
UNKNOWN += ["extra_body", "best_of", "thinking", "stop_sequences", "regex", "lora_path", "do_sample", "typical_p"]
CLASSES = {"CompletionCreateParamsBase", "CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming"}


def fields_of(path, classes):
    """The names of the public fields of classes in a Python file."""
    tree = ast.parse(Path(path).read_text())
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name in classes]
    assert len(bodies) == len(classes)
    names = (one.target.id for body in bodies for one in body if isinstance(one, ast.AnnAssign))
    return {name for name in names if not name.startswith("_")}


def schema():
    found = fields_of(completion_create_params.__file__, CLASSES)
    assert {"seed", "functions", "stream"} <= found
    if vllm := importlib.util.find_spec("vllm"):
        path = Path(vllm.submodule_search_locations[0]) / "entrypoints/openai/chat_completion/protocol.py"
        own = fields_of(path, {"ChatCompletionRequest"})
        assert {"min_p", "ignore_eos", "chat_template_kwargs"} <= own
        found |= own
    return sorted(found)


class Served:
    """A server in front of a real engine, without the phase around it."""

    def __init__(self, settings, template=None):
        tokenizer = load_tokenizer(settings.model.path)
        tokenizer.chat_template = template or tokenizer.chat_template
        self.engine = BuiltinEngine(settings.model.path, 0)
        self.conversations = Conversations(
            settings,
            range(40),
            Renderer(settings.data, tokenizer),
            decoder(tokenizer),
            0,
            lambda name, group: None,
            {},
            frozenset(),
        )
        self.context = serving(0, self.conversations, self.ask, KEY, "m")
        self.http = httpx.Client(trust_env=False, timeout=60)

    def ask(self, turn):
        (found,) = answers(self.engine, Request([turn.prompt], Sampling(1.0, turn.limit, 1, (1,), (turn.seed,))))
        return found

    def __enter__(self):
        self.port = self.context.__enter__()
        return self

    def __exit__(self, *error):
        self.context.__exit__(*error)

    def base(self, name):
        return f"http://127.0.0.1:{self.port}/a/{name}"

    def client(self, name):
        return openai.OpenAI(base_url=f"{self.base(name)}/v1", api_key=KEY, max_retries=0)

    def send(self, body, name="x", path="v1/chat/completions"):
        """The answer to a request without the client, which would refuse some fields itself."""
        headers = {"Authorization": f"Bearer {KEY}"}
        return self.http.post(f"{self.base(name)}/{path}", content=json.dumps(body), headers=headers)


@pytest.fixture(scope="module")
def settings(recipe, tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("agent") / "model"
    write_agent_model(tiny_model, path)
    return load_recipe(recipe, [f"model.path='{path}'", *SETTINGS, "rollout.responses_per_prompt=40"])


@pytest.fixture
def served(settings):
    with Served(settings) as one:
        yield one


@pytest.fixture(scope="module")
def shared(settings):
    """A server in which one conversation has its first answer, which is given again to the same request."""
    with Served(settings) as one:
        assert one.send({"messages": ASKED}).status_code == 200
        yield one


def test_each_field_of_both_schemas_is_on_one_list():
    lists = [*HONOURED, *NEUTRAL, *HARMLESS]
    assert len(set(lists)) == len(lists)
    assert set(schema()) <= set(lists)
    assert all(len(reason.split()) > 2 for reason in HARMLESS.values())
    if importlib.util.find_spec("vllm"):
        assert set(lists) == set(schema()), "no field of no schema"


@pytest.mark.parametrize("field", [*sorted(set(schema()) - HONOURED), *UNKNOWN])  # those in HONOURED follow below
def test_a_field_is_refused_by_name_unless_it_asks_for_what_is_done_anyway(shared, field):
    """Over HTTP, with a value of every kind; the answer is that to a request without the field."""
    plain = shared.send({"messages": ASKED}).json()["choices"][0]["message"]["content"]
    for value in VALUES:
        found = shared.send({"messages": ASKED, field: value})
        if field in HARMLESS or value in NEUTRAL.get(field, ()):
            assert found.json()["choices"][0]["message"]["content"] == plain
        else:
            assert found.status_code == 400 and field in found.json()["error"]["message"], value
    assert shared.send({"messages": ASKED, field: None}).status_code == (400 if field in UNKNOWN else 200)


def test_honoured_fields_have_their_effect_or_are_refused(served):
    def ask(name="x", **fields):
        found = served.send({"messages": ASKED, **fields}, name)
        return found.status_code, (found.json()["usage"] if found.status_code == 200 else found.json()["error"])

    for number, name in enumerate(("max_tokens", "max_completion_tokens")):
        assert ask(f"n{number}", **{name: 1})[1]["completion_tokens"] == 1
        for wrong in (0, -1, 1.5, "5", True, [], {}):
            status, error = ask(**{name: wrong})
            assert status == 400 and name in error["message"]
    assert ask("both", max_tokens=9, max_completion_tokens=1)[1]["completion_tokens"] == 1
    assert ask("both2", max_tokens=1, max_completion_tokens=9)[1]["completion_tokens"] == 1
    assert ask(temperature=1.0)[0] == 200
    for name, wrong in (
        ("temperature", [0, 0.5, "1", [], math.nan]),
        ("stream", [1, 0, "yes", {}]),
        ("stream_options", [True, {"include_usage": True}, []]),
        ("chat_template_kwargs", [{"enable_thinking": False}, 5, ["x"]]),
        ("tools", [5, "x", {"a": 1}, [5], [{}], [{"type": "custom", "custom": {"name": "f"}}]]),
        ("tools", [[{"type": "function", "function": {"name": "add", "strict": True}}]]),
    ):
        for value in filter(lambda value: value != [] or name == "temperature", wrong):
            status, error = ask(**{name: value})
            assert status == 400 and name in error["message"], (name, value)
    status, error = ask(stream=True, stream_options={"continuous_usage_stats": True})
    assert status == 400 and "continuous_usage_stats" in error["message"]


def test_arguments_of_the_template_are_accepted_as_the_recipe_has_them():
    own = {"enable_thinking": False, "style": {"a": [1]}}
    for given in (None, {}, own, {"style": {"a": [1]}}):
        parse_chat_request({"messages": ASKED, "chat_template_kwargs": given}, 1.0, own)
    for given in ({"enable_thinking": True}, {"style": {}}, own | {"more": None}, {"more": None}):
        with pytest.raises(Refused, match="chat_template_kwargs"):
            parse_chat_request({"messages": ASKED, "chat_template_kwargs": given}, 1.0, own)


GOOD_MESSAGES = [
    {"role": "user", "content": "2", "name": "Ann"},
    {"role": "developer", "content": "2"},
    {"role": "user", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "+3"}]},
    {"role": "user", "content": [{"type": "text", "text": "2", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
    {"role": "tool", "content": "5", "tool_call_id": "c"},
    {"role": "assistant", "content": None, "refusal": None, "audio": None, "annotations": [], "function_call": None},
    {
        "role": "assistant",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}],
    },
]
BAD_MESSAGES = [
    {"content": "2"},
    {"role": 5, "content": "2"},
    {"role": "user"},
    *({"role": role, "content": None} for role in ("user", "system", "tool", "developer")),
    *({"role": "user", "content": content} for content in (5, True, {}, {"text": "2"}, [], ["2"], [None])),
    *({"role": "user", "content": [{"type": "text", "text": "2"}, part]} for part in (
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "image_url", "text": "2", "image_url": {"url": "data:"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file", "file": {}},
        {"type": "refusal", "refusal": "no"},
        {"type": "text"},
        {"type": "text", "text": None},
        {"type": "text", "text": 5},
        {"type": "text", "text": "2", "image_url": {}},
        {"text": "2"},
    )),
    *({"role": "assistant", "content": "2", name: value} for name, value in {
        "refusal": "no", "audio": {"id": "a"}, "function_call": {"name": "f", "arguments": "{}"}, "reasoning": "so",
        "reasoning_content": "so", "annotations": [{}], "tools": [{}], "task": "t", "prefix": True, "contents": "2",
    }.items()),
    *({"role": "user", "content": "2", name: 5} for name in ("name", "tool_call_id", "tool_calls")),
    {"role": "user", "content": "2", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    *({"role": "assistant", "tool_calls": calls} for calls in (
        [5], [{}], [{"id": "c"}], [{"id": "c", "function": {"name": "f"}}], {"a": 1},
        [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}],
        [{"id": "c", "function": {"name": 5, "arguments": "{}"}}],
        [{"id": "c", "type": "custom", "custom": {"name": "f", "input": ""}}],
        [{"id": "c", "type": "custom", "function": {"name": "f", "arguments": "{}"}}],
    )),
]  # fmt: skip


def test_nothing_in_a_message_is_dropped():
    for message in GOOD_MESSAGES:
        parse_chat_request({"messages": [message]}, 1.0)
    for message in BAD_MESSAGES:
        with pytest.raises(Refused, match="messages: ") as refused:
            parse_chat_request({"messages": [message]}, 1.0)
        assert refused.value.status == 400, message


FUNCTIONS = [{"type": "function", "function": {"name": "add"}}]
ONLY_USERS = (
    "{%- for m in messages %}{% if m.role == 'user' or m.role == 'assistant' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor -%}<|im_start|>assistant\n"
)


def test_what_the_template_does_not_show_is_refused(settings):
    with Served(settings, ONLY_USERS) as served:
        for fields, words in (
            ({"messages": [{"role": "system", "content": "2"}, *ASKED]}, "'system'"),
            ({"messages": [{"role": "developer", "content": "2"}, *ASKED]}, "'developer'"),
            ({"messages": [*ASKED, {"role": "critic", "content": "3"}]}, "'critic'"),
            ({"messages": ASKED, "tools": FUNCTIONS}, "tools"),
        ):
            found = served.send(fields)
            assert (found.status_code, words in found.json()["error"]["message"]) == (400, True), found.text
        said = served.send({"messages": ASKED}).json()["choices"][0]["message"]
        found = served.send({"messages": [*ASKED, said, {"role": "tool", "content": "5"}]})
        assert (found.status_code, "'tool'" in found.json()["error"]["message"]) == (400, True)
        called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        more = {"role": "assistant", "content": "2", "tool_calls": [called]}
        found = served.send({"messages": [*ASKED, said, ASKED[0], more, ASKED[0]]})
        assert (found.status_code, "'assistant'" in found.json()["error"]["message"]) == (400, True)
        assert served.send({"messages": [*ASKED, said, *ASKED]}).status_code == 200


UNNAMED = ONLY_USERS.replace("m.role == 'assistant'", "true")
NAMED = UNNAMED.replace("{{ m.role }}", "{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}")


@pytest.mark.parametrize(("template", "status"), [(UNNAMED, 400), (NAMED, 200)])
@pytest.mark.parametrize("role", ["user", "system", "developer", "tool"])
def test_a_name_that_tells_who_speaks_is_shown_or_refused(settings, role, template, status):
    """AutoGen's issues 2989 and 5401: agents told apart by a name that the model never saw."""
    with Served(settings, template) as served:
        said = served.send({"messages": ASKED}).json()["choices"][0]["message"]
        found = served.send({"messages": [*ASKED, said, {"role": role, "content": "5", "name": "user"}]})
        assert found.status_code == (200 if role == "tool" else status), found.text
        assert found.status_code == 200 or f"name of a message of {role!r}" in found.json()["error"]["message"]


def test_results_of_calls_have_the_order_of_the_calls(settings):
    """Most templates show no ids: ms-swift's pull request 10174, colibri's 118."""
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in "abc"]

    def order(*given, begin=({"role": "assistant", "tool_calls": calls},)):
        results = [{"role": "tool", "content": text, "tool_call_id": name} for text, name in given]
        sent = [*ASKED, *begin, *results, {"role": "user", "content": "so?"}]
        return [one["content"] for one in parse_chat_request({"messages": sent}, 1.0).messages[1 + len(begin) : -1]]

    assert order("2b", "1a", "3c") == order("3c", "2b", "1a") == order("1a", "2b", "3c") == ["1", "2", "3"]
    assert order("3c", "1a") == ["1", "3"]
    assert order("2b", "2b") == ["2", "2"]
    assert order("2b", ("1", None)) == order("2b", ("1", "")) == ["2", "1"]  # without an id the order is the client's
    assert order("2x", "1a", begin=({"role": "assistant", "content": "f()"},)) == ["2", "1"]  # calls of the agent's own
    again = {"role": "user", "content": "again"}
    assert order("2b", "1a", begin=({"role": "assistant", "tool_calls": calls}, again)) == ["2", "1"]
    with pytest.raises(Refused, match="tool_call_id = 'd' names no call"):
        order("1a", "4d")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [  # as JavaScript's clients write them (pydantic-ai 6300), LangChain, sorted (Mini-Agent 22), and others
        ('{"a":2,"b":3}', 200),
        ('{"b": 3, "a": 2}', 200),
        ('{\n  "a": 2,\n  "b": 3\n}', 200),
        ('{"a": 2.0, "b": 3}', 200),
        ('{"a": 2, "b": 4}', 409),
        ('{"a": 2}', 409),
        ('{"a": 2, "b": 3', 409),
        ("", 409),
    ],
)
def test_a_client_may_write_the_arguments_of_a_call_in_its_own_way(served, arguments, status):
    for number in range(20):
        said = served.send({"messages": ASKED, "tools": TOOLS}, f"n{number}").json()["choices"][0]["message"]
        if "tool_calls" in said:
            break
    said["tool_calls"][0]["function"]["arguments"] = arguments
    result = {"role": "tool", "content": "5", "tool_call_id": said["tool_calls"][0]["id"]}
    found = served.send({"messages": [*ASKED, said, result], "tools": TOOLS}, f"n{number}")
    assert found.status_code == status, found.text


@pytest.mark.parametrize("reason", ["stop", "length", "timeout"])
def test_an_answer_that_was_cut_off_says_so_even_with_a_call(reason):
    """vLLM's pull request 47963."""
    message = answer(f"{CALL} and <tool_call>{{", FUNCTIONS)
    found = _completion("m", message, Completion(0, 0, np.ones(3, np.int32), np.zeros(3), reason, None, 0), 2)
    choice = ChatCompletion.model_validate(found).choices[0]
    assert choice.finish_reason == ("tool_calls" if reason == "stop" else "length") and choice.message.tool_calls


def test_tags_of_calls_that_are_special_tokens_are_kept(settings):
    """vLLM's pull request 25281: some models have them as such."""
    tokenizer = load_tokenizer(settings.model.path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<|im_start|>"]})
    text = f"<|im_start|>{CALL}!<|im_end|>"
    tokens = tokenizer(text.replace("<tool_call>{", "<tool_call>5").replace("}<", "2<"))["input_ids"]
    assert decoder(tokenizer)(tokens).startswith("<tool_call>5")
    assert decoder(tokenizer)(tokens).endswith("2</tool_call>!")


def test_tools_that_change_during_a_conversation_are_refused(served):
    """The model has read those of the first request, so others would have no effect."""
    said = served.send({"messages": ASKED, "tools": TOOLS}).json()["choices"][0]["message"]
    for tools in (None, [], FUNCTIONS, [*TOOLS, *FUNCTIONS]):
        for messages in (ASKED, [*ASKED, said, *ASKED]):
            found = served.send({"messages": messages, "tools": tools})
            assert (found.status_code, "tools" in found.json()["error"]["message"]) == (409, True)
    assert served.send({"messages": [*ASKED, said, *ASKED], "tools": TOOLS}).status_code == 200


def test_unknown_fields_of_a_reward_are_refused(served):
    assert served.send({"messages": ASKED}).status_code == 200
    for body in ({"reward": 1, "corect": 1}, {"reward": 1, "weight": 2}, {"score": 1}, [1], 5, None):
        assert served.send(body, path="reward").status_code == 400
    assert served.send({"reward": 1, "correct": 1}, path="reward").status_code == 200


def test_answers_are_objects_of_the_official_client(served):
    """Every answer, whole and as a stream, is valid by the client's own types; both kinds occur, calls and texts."""
    reasons = set()
    for number in range(12):
        client = served.client(f"c{number}")
        raw = client.chat.completions.with_raw_response.create(model="m", messages=ASKED, tools=TOOLS)
        whole = ChatCompletion.model_validate_json(raw.http_response.content)
        message = whole.choices[0].message
        reasons.add(whole.choices[0].finish_reason)
        stream = served.send({"messages": ASKED, "tools": TOOLS, "stream": True}, f"c{number}").text
        *events, done, rest = stream.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        for event in events:
            ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))
        for call in message.tool_calls or ():
            assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 2, "b": 3}
        again = client.chat.completions.create(
            model="m", messages=[*ASKED, message, {"role": "user", "content": "again"}], tools=TOOLS
        )
        assert again.choices[0].message.role == "assistant"
        (model,) = client.models.list().data
        Model.model_validate(model.model_dump())
    assert "tool_calls" in reasons and len(reasons) > 1


CALLS = {  # what the model writes -> the arguments that clients get; None: it is no call and stays in the text
    '{"name": "f", "arguments": {"a": [1, null, true, "ü\\n\\"</x>"]}}': {"a": [1, None, True, 'ü\n"</x>']},
    '{"name": "f", "arguments": "{\\"a\\": 1}"}': {"a": 1},
    '{"name": "f", "arguments": {}}': {},
    '{"name": "f"}': {},
    '{"name": "f", "arguments": {"a": {"b": {"c": 1.5e-07}}}}': {"a": {"b": {"c": 1.5e-07}}},
    '{"name": "f", "arguments": "1"}': None,
    '{"name": "f", "arguments": "[1]"}': None,
    '{"name": "f", "arguments": ""}': None,
    '{"name": "f", "arguments": "a = 1"}': None,
    '{"name": "f", "arguments": "{\\"a\\": NaN}"}': None,
    '{"name": "f", "arguments": [1]}': None,
    '{"name": "f", "arguments": null}': None,
    '{"name": "f", "arguments": 5}': None,
    '{"name": "f", "arguments": {"a": NaN}}': None,
    '{"name": "f", "arguments": {"a": -Infinity}}': None,
    '{"name": "f", "arguments": {"a": 1e999}}': None,
    '{"name": "f", "arguments": {"a": 1' + "0" * 400 + "}}": None,
    '{"name": "f", "arguments": {"a": "\\ud800"}}': None,
    '{"name": null, "arguments": {}}': None,
    '{"name": 5, "arguments": {}}': None,
    '{"name": {"a": 1}, "arguments": {}}': None,
    '{"arguments": {}}': None,
    '{"name": "f", "arguments": {"a": 1}': None,
    "{}": None,
    # the forms of Llama (vLLM's llama_tool_parser), Anthropic, OpenAI's legacy functions and Mistral
    '{"name": "f", "parameters": {"a": 1}}': None,
    '{"name": "f", "input": {"a": 1}}': None,
    '{"name": "f", "args": {"a": 1}}': None,
    '{"type": "function", "name": "f", "parameters": {"a": 1}}': None,
    '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}': None,
    '[{"name": "f", "arguments": {"a": 1}}]': None,
    '{"type": "function", "name": "f", "arguments": {"a": 1}}': {"a": 1},
    # more than one object, or none (vLLM's issue 21301 and pull request 34101)
    '{"name": "f", "arguments": {"a": 1}}}': None,
    '{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}': None,
    '{"name": "f", "arguments": {"a": 1,}}': None,
    "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>": None,
    # tags inside of arguments, as programs that handle calls have them
    '{"name": "f", "arguments": {"a": "}</tool_call>"}}': {"a": "}</tool_call>"},
    '{"name": "f", "arguments": {"a": "<tool_call>{}</tool_call>"}}': {"a": "<tool_call>{}</tool_call>"},
    '{"name": "f", "arguments": {"a": "{\\"b\\": {}}\\n</tool_call>\\n"}}': {"a": '{"b": {}}\n</tool_call>\n'},
    "{'name': 'f', 'arguments': {}}": None,
}


@pytest.mark.parametrize("written", CALLS)
def test_arguments_of_a_tool_call_are_always_a_json_object(written):
    expected, text = CALLS[written], f"so <tool_call>\n{written}\n</tool_call>"

    def strict(constant):
        raise AssertionError(f"{constant} is no JSON")

    message = answer(text, FUNCTIONS)
    if expected is None:
        assert message == {"role": "assistant", "content": text}
    else:
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"], parse_constant=strict) == expected
        assert (call["function"]["name"], message["content"]) == ("f", "so")
    two = answer(f"{text} and <tool_call>{CALL[11:-12]}</tool_call>", FUNCTIONS)
    assert json.loads(two["tool_calls"][-1]["function"]["arguments"]) == {"a": 2, "b": 3}
    assert answer(text, None) == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<think>\nLet me call it: {CALL}\n</think>\n{CALL}", 1),  # verl's issue 4757
        (f"I could write {CALL}\n</think>\nNo.", 0),  # the prompt has opened the thoughts
        (f"<think>{CALL}", 0),  # cut off
        (f"{CALL} <think>{CALL}", 2),  # no thoughts, which begin an answer
    ],
)
def test_calls_in_thoughts_are_none_and_stay_in_the_text(text, calls):
    message = answer(text, FUNCTIONS)
    assert len(message.get("tool_calls", ())) == calls
    thoughts = text.partition("</think>")[0] if calls < 2 else ""
    assert message["content"].startswith(thoughts)


@pytest.mark.parametrize(
    "piece", ["<tool_call>{", '<tool_call>{"', "<tool_call> ", '{"a": <tool_call>', "<tool_call>{[", "}"]
)
def test_an_answer_of_nothing_but_beginnings_of_calls_is_read_at_once(piece):
    """Its time grows with its length and not with the square of it."""
    text = piece * (3_000_000 // len(piece))
    assert answer(text, FUNCTIONS)["content"] == text
