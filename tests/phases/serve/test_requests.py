"""Each field of OpenAI's and vLLM's request schema is honoured, refused, or harmless; OpenAI's client reads answers."""

import json
import math

import numpy as np
import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from megarl.data.templates import Renderer
from megarl.data.tokenizer import load_tokenizer
from megarl.phases.serve.chat import (
    HARMLESS,
    NEUTRAL,
    Refused,
    _Request,
    answer,
    decoder,
    new_tokens,
    parse_chat_request,
    same,
)
from megarl.phases.serve.conversations import Turn
from megarl.phases.serve.phase import _completion
from megarl.rollout.engine import Completion
from tests.commands.stages.agents import CALL
from tests.commands.stages.test_serve import TOOLS
from tests.phases.serve.conftest import ASKED

# something of each kind that JSON has
VALUES = [True, False, 0, 1, -1, 7, 0.5, "", "x", "auto", "none", [], ["x"], [5], [{}], {}, {"type": "text"}, {"a": 1}]
OTHERS = ["enable_thinking", "Temperature", "guided_json"]  # of vLLM's schema, misspelt, or of another
NEUTRAL_NAMES = {name for _, names in NEUTRAL for name in names}
HONOURED = {*_Request.model_fields, "temperature", "chat_template_kwargs"}  # the last two as the recipe has them


def parse(temperature=1.0, arguments=None, **fields):
    return parse_chat_request({"messages": ASKED, **fields}, temperature, arguments or {})


def test_a_field_is_refused_by_name_unless_it_asks_for_what_is_done_anyway():
    """It is on one of the lists at most; a null asks for nothing."""
    assert not NEUTRAL_NAMES & HARMLESS and not HONOURED & (NEUTRAL_NAMES | HARMLESS)
    for field in {*CompletionCreateParamsBase.__annotations__, *NEUTRAL_NAMES, *HARMLESS, *OTHERS} - HONOURED:
        parse(**{field: None})
        for value in VALUES:
            if field in HARMLESS or any(value == neutral and field in names for neutral, names in NEUTRAL):
                parse(**{field: value})
            else:
                with pytest.raises(Refused, match=f"{field} = .* not permitted"):
                    parse(**{field: value})


def test_the_shortest_limit_of_a_turn_counts(served):
    for number, limits in enumerate(((1, None), (None, 1), (9, 1), (1, 9))):
        fields = dict(zip(("max_tokens", "max_completion_tokens"), limits, strict=True))
        found = served.send({"messages": ASKED, **fields}, f"n{number}")
        assert found.json()["usage"]["completion_tokens"] == 1


def test_wrong_values_of_honoured_fields_are_refused():
    parse(temperature=0.7, stream=True, stream_options={"include_usage": True})
    for name, wrong in (
        *((name, [0, 1.5, "5", True]) for name in ("max_tokens", "max_completion_tokens")),
        ("temperature", [0, 0.5, "1", math.nan]),
        *((name, [1, "yes"]) for name in ("stream", "logprobs", "return_token_ids")),
        ("stream_options", [True, {"include_usage": 5}, {"continuous_usage_stats": True}]),
        ("chat_template_kwargs", [{"enable_thinking": False}, 5]),
        ("tools", [5, [5], [{"type": "custom", "custom": {"name": "f"}}]]),
        ("tools", [[{"type": "function", "function": {"name": "add", "strict": True}}]]),
    ):
        for value in wrong:
            with pytest.raises(Refused, match=name):
                parse_chat_request({"messages": ASKED, name: value}, 1.0, {})


def test_arguments_of_the_template_are_accepted_as_the_recipe_has_them():
    own = {"enable_thinking": False, "style": {"a": [1]}}
    for given in (None, {}, own, {"style": {"a": [1]}}):
        parse(arguments=own, chat_template_kwargs=given)
    for given in ({"enable_thinking": True}, {"style": {}}, own | {"more": None}):
        with pytest.raises(Refused, match="chat_template_kwargs"):
            parse(arguments=own, chat_template_kwargs=given)


FUNCTIONS = [{"type": "function", "function": {"name": "add"}}]
CALLING = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
SAID = {"role": "assistant", "content": "5"}
CALLED = SAID | {"tool_calls": [CALLING]}
TEXT = {"type": "text", "text": "2"}
GOOD_MESSAGES = [
    {"role": "user", "content": "2", "name": "Ann"},
    {"role": "developer", "content": "2"},
    {"role": "user", "content": [TEXT, {"type": "text", "text": "+3"}]},
    {"role": "tool", "content": "5", "tool_call_id": "c"},
    {"role": "assistant", "content": None, "refusal": None, "audio": None, "annotations": [], "function_call": None},
    {"role": "assistant", "tool_calls": [CALLING | {"index": 0}]},
]
BAD_MESSAGES = [
    {"content": "2"},
    {"role": 5, "content": "2"},
    {"role": "user"},
    *({"role": "user", "content": content} for content in (None, 5, [], ["2"])),
    *({"role": "user", "content": [TEXT, TEXT | part]} for part in ({"type": "image_url"}, {"text": None}, {"a": {}})),
    *(SAID | extra for extra in ({"reasoning_content": "so"}, {"annotations": [{}]}, {"name": 5}, {"tool_call_id": 5})),
    *(SAID | {"tool_calls": calls} for calls in (5, [5], [CALLING | {"type": "custom"}])),
    *(
        SAID | {"tool_calls": [CALLING | {"function": {"name": "f"} | given}]}
        for given in ({}, {"arguments": {"a": 1}})
    ),
]


def test_nothing_in_a_message_is_dropped():
    for message in GOOD_MESSAGES:
        parse_chat_request({"messages": [message]}, 1.0, {})
    for message in BAD_MESSAGES:
        with pytest.raises(Refused, match="messages: 0"):
            parse_chat_request({"messages": [message]}, 1.0, {})


def test_tools_that_the_template_does_not_show_are_refused(settings):
    tokenizer = load_tokenizer(settings.model.path)
    tokenizer.chat_template = "{%- for m in messages %}{{ m.content }}<|im_end|>{% endfor -%}<|im_start|>assistant\n"
    renderer = Renderer(settings.data, tokenizer)
    assert new_tokens(renderer, parse(), None, "x")
    with pytest.raises(Refused, match="tools: the chat template does not show them"):
        new_tokens(renderer, parse(tools=FUNCTIONS), None, "x")


def test_a_client_may_write_the_arguments_of_a_call_in_its_own_way():
    def call(arguments):
        return SAID | {"tool_calls": [CALLING | {"function": {"name": "add", "arguments": arguments}}]}

    ours = call('{"a": 2, "b": 3}')
    assert same(ours, call('{"b":3,"a":2}'))  # as JavaScript's clients write them (pydantic-ai 6300), or sorted
    for other in ('{"a": 2, "b": 4}', '{"a": 2, "b": 3'):
        assert not same(ours, call(other))


@pytest.mark.parametrize("reason", ["stop", "length", "timeout"])
def test_an_answer_that_was_cut_off_says_so_even_with_a_call(reason):
    """vLLM's pull request 47963."""
    message = answer(f"{CALL} and <tool_call>{{", FUNCTIONS)
    completion = Completion(0, 0, np.ones(3, np.int32), np.zeros(3), reason, None, 0)
    found = _completion("m", Turn(None, None, [], [1, 2], 3, 0, answer=message, completion=completion))
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


def test_changed_tools_and_unknown_fields_of_a_reward_are_refused(served):
    """The model has read those of the first request, so others would have no effect."""
    said = served.send({"messages": ASKED, "tools": TOOLS}).json()["choices"][0]["message"]
    for tools in (None, [], FUNCTIONS, [*TOOLS, *FUNCTIONS]):
        for messages in (ASKED, [*ASKED, said, *ASKED]):
            found = served.send({"messages": messages, "tools": tools})
            assert (found.status_code, "tools" in found.json()["error"]["message"]) == (409, True)
    assert served.send({"messages": [*ASKED, said, *ASKED], "tools": TOOLS}).status_code == 200
    for body in ({"reward": 1, "corect": 1}, {"score": 1}, [1], 5, None):
        assert served.send(body, path="reward").status_code == 400
    assert served.send({"reward": 1, "correct": 1}, path="reward").status_code == 200


def test_answers_are_objects_of_the_official_client(served):
    """Every answer, whole and as a stream, is valid by the client's own types; both kinds occur, calls and texts."""
    reasons, asked = set(), {"messages": ASKED, "tools": TOOLS}
    for name in map(str, range(12)):
        whole = ChatCompletion.model_validate(served.send(asked, name).json())
        reasons.add(whole.choices[0].finish_reason)
        *events, done, rest = served.send(asked | {"stream": True}, name).text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        for event in events:
            ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))
    assert "tool_calls" in reasons and len(reasons) > 1
    (model,) = served.client("x").models.list().data
    Model.model_validate(model.model_dump())


CALLS = {  # what the model writes -> the arguments that clients get; None: it is no call and stays in the text
    '{"name": "f", "arguments": {"a": [1, null, true, "ü\\n\\"</x>"]}}': {"a": [1, None, True, 'ü\n"</x>']},
    '{"name": "f", "arguments": "{\\"a\\": 1}"}': {"a": 1},
    '{"name": "f", "arguments": {}}': {},
    '{"name": "f"}': {},
    '{"name": "f", "arguments": "[1]"}': None,
    '{"name": "f", "arguments": {"a": NaN}}': None,
    '{"name": "f", "arguments": {"a": "\\ud800"}}': None,
    '{"name": null, "arguments": {}}': None,
    '{"name": "f", "arguments": {"a": 1}': None,
    '{"name": "f", "parameters": {"a": 1}}': None,  # the form of Llama
    '{"type": "function", "name": "f", "arguments": {"a": 1}}': {"a": 1},
    # more than one object (vLLM's issue 21301 and pull request 34101)
    '{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}': None,
    # tags inside of arguments, as programs that handle calls have them
    '{"name": "f", "arguments": {"a": "<tool_call>{}</tool_call>"}}': {"a": "<tool_call>{}</tool_call>"},
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
    assert "tool_calls" not in answer(f"I could write {CALL}", FUNCTIONS, thinks=True)  # opened by the prompt, cut off


@pytest.mark.parametrize("piece", ["<tool_call>{", '<tool_call>{"'])
def test_an_answer_of_nothing_but_beginnings_of_calls_is_read_at_once(piece):
    """Its time grows with its length and not with the square of it."""
    text = piece * (3_000_000 // len(piece))
    assert answer(text, FUNCTIONS)["content"] == text
