"""Agents fill a stage through OpenAI's client: what the engine sampled is stored, and only that is trained."""

import contextlib
import functools
import itertools
import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from megarl.commands.one_phase import check_serving
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
from megarl.phases.serve import KEY
from megarl.recipe.load import load_recipe
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from megarl.views.audit import audit
from tests.commands.stages.agents import CALL, write_agent_model
from tests.helpers import SGLANG_PYTHON, events, lines_so_far, read_lines, start_megarl, wait_for
from tests.phases.commands import settings, succeed

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
SETTINGS = (
    "data.template='chat'",
    "data.prompt_template='{prompt}'",
    "data.max_prompt_tokens=64",
    "rollout.max_response_tokens=40",
    "rollout.responses_per_prompt=2",
    "schedule.stages=1",
    "schedule.updates_per_stage=1",
    "schedule.prompts_per_update=2",
    "actor.checkpoint_every=1",
    "eval.every=0",
)


@pytest.fixture(scope="module")
def agent_model(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("agent") / "model"
    write_agent_model(tiny_model, path)
    return path


class Served:
    """A running `megarl serve`."""

    def __init__(self, recipe, model, root, *more):
        options = settings(f"model.path='{model}'", *SETTINGS, *more)
        self.root, self.arguments = root, ["serve", root, "--stage", 0, "--port", 0, "--recipe", recipe, *options]
        self.start()

    def start(self):
        before = len(self._addresses())
        self.command = start_megarl(*self.arguments)
        wait_for(self.command, lambda: len(self._addresses()) > before)
        self.address, self.key = self._addresses()[-1], (self.root / KEY).read_text().strip()

    def _addresses(self):
        return [event["url"] for event in lines_so_far(self.root / "events.jsonl") if event["event"] == "serving"]

    def client(self, group, name):
        return openai.OpenAI(base_url=f"{self.address}/{group}/{name}/v1", api_key=self.key, max_retries=0)

    def ask(self, group, name, *messages):
        asked = self.client(group, name).chat.completions.create(model="m", messages=list(messages))
        return asked.choices[0].message

    def reward(self, group, name, value):
        """The status of the answer."""
        return self.send("POST", f"/{group}/{name}/reward", {"reward": value}).status_code

    def send(self, method, path, body=None, key=None):
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx.request(method, self.address + path, json=body, headers=headers, trust_env=False)

    def wait(self):
        assert self.command.wait() == 0, self.command.stderr
        return RunDir.open(self.root)


@contextlib.contextmanager
def serving(*arguments):
    one = Served(*arguments)
    yield one
    if one.command.poll() is None:
        one.command.send_signal(signal.SIGKILL)
        one.command.wait(60)


@pytest.fixture
def served(recipe, agent_model, tmp_path):
    with serving(recipe, agent_model, tmp_path / "run") as one:
        yield one


@pytest.fixture(scope="module")
def guarded(recipe, agent_model, tmp_path_factory):
    """A server that holds the prompt 2+3? out for evaluation."""
    folder = tmp_path_factory.mktemp("guarded")
    exam = folder / "exam.jsonl"
    exam.write_text(json.dumps({"prompt": "2+3?", "answer": "5"}) + "\n")
    with serving(recipe, agent_model, folder / "run", "eval.every=1", "eval.prompts=1", f"eval.suite='{exam}'") as one:
        yield one


def converse(served, group, name, turns=2):
    """Act as an agent that answers tool calls with 5 and asks again after an answer; returns all messages."""
    messages = [{"role": "user", "content": "2+3?" if group == "a" else "3+2?"}]
    with served.client(group, name) as client:
        for _ in range(turns):
            ask = functools.partial(client.chat.completions.create, model="run", messages=messages, tools=TOOLS)
            message = streamed(ask) if name == "y" else ask().choices[0].message
            messages.append(message)  # as the client's own object, as its documentation shows
            if message.tool_calls:
                (call,) = message.tool_calls[:1]
                assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
            else:
                messages.append({"role": "user", "content": "again"})
    return messages


def streamed(ask):
    """Ask with and without streaming; both must give the same message, which is returned."""
    state = ChatCompletionStreamState()
    for chunk in ask(stream=True, stream_options={"include_usage": True}):
        state.handle_chunk(chunk)
    whole, again = state.get_final_completion(), ask()

    def said(answer):
        (choice,) = answer.choices
        calls = [call.function.arguments for call in choice.message.tool_calls or ()]
        return answer.usage, choice.finish_reason, choice.message.content, calls

    assert said(whole) == said(again)
    return again.choices[0].message


def all_converse(served):
    """Hold four conversations at the same time; returns {(group, conversation): messages}."""
    names = list(itertools.product("ab", "xy"))
    with ThreadPoolExecutor(len(names)) as agents:
        return dict(zip(names, agents.map(lambda name: converse(served, *name), names), strict=True))


SGLANG = f"rollout.sglang_python='{SGLANG_PYTHON}'"
ENGINES = [
    pytest.param((), id="builtin"),
    pytest.param(("rollout.engine='vllm'",), marks=pytest.mark.vllm, id="vllm"),
    pytest.param(("rollout.engine='sglang'", SGLANG), marks=pytest.mark.sglang, id="sglang"),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_conversations_of_an_openai_client_become_a_stage(recipe, agent_model, tmp_path, engine):
    """Though responses are decoded together, each stored one is what its agent saw; the audit recomputes log-probs."""
    with serving(recipe, agent_model, tmp_path / "run", *engine) as served:
        said = all_converse(served)
        for number, (group, name) in enumerate(said):
            assert served.reward(group, name, float(number % 2)) == 200
        run, tokenizer = served.wait(), load_tokenizer(agent_model)
    groups = RolloutStore(run.stage(0).rollouts).read(list(run.stage(0).groups))
    sequences = [[*g.prompt_tokens.tolist(), *r.tokens.tolist()] for g in groups for r in g.responses]
    texts = [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in sequences]
    assert sorted(texts) == sorted(map(as_text, said.values()))
    assert all(not r.sampled.all() for g in groups for r in g.responses)
    assert not any(r.rollout_logprobs[~r.sampled].any() for g in groups for r in g.responses)
    if not engine:
        calls = [m for messages in said.values() for m in messages if getattr(m, "tool_calls", None)]
        assert 0 < len(calls) < 8
        succeed("optimize", run.root, "--stage", 0)
        (line,) = read_lines(run.metrics)
        assert line["trained_tokens"] == sum(r.sampled_tokens for g in groups for r in g.responses)
        assert len(events(run, "weight_drift")) == 1
    found = audit(run.root, 10)
    assert found.problems == [] and (engine or found.stages[0].trained == 2)


def as_text(messages):
    """What the chat template makes of a conversation up to its last answer."""
    text = "<|im_start|>system\ntools add<|im_end|>\n"
    for message in messages[:-1]:  # the last message was never sent
        one = message if isinstance(message, dict) else {"role": message.role, "content": message.content or CALL}
        text += f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n"
    return text.removesuffix("\n")


def test_requests_that_would_change_what_is_trained_are_refused(guarded):
    def refuse(status, words, group, name, *messages):
        with pytest.raises(openai.APIStatusError) as refused:
            guarded.ask(group, name, *messages)
        assert (refused.value.status_code, words in refused.value.body["message"]) == (status, True)

    asked, other, heldout = ({"role": "user", "content": text} for text in ("3+2?", "other", "2+3?"))
    assert guarded.reward("a", "x", 1) == 404  # no answer yet
    first = guarded.ask("a", "x", asked)
    refuse(409, "was changed", "a", "x", other)
    refuse(409, "was changed", "a", "x", asked, {"role": "assistant", "content": "edited"}, asked)
    refuse(400, "begin with the same messages", "a", "y", other)
    assert guarded.reward("a", "x", 1) == 200
    refuse(409, "has its reward", "a", "x", asked, first, asked)
    assert guarded.reward("a", "x", 0) == 409
    for wrong in ("high", 10**400, 1e308, -1000001):
        assert guarded.reward("a", "x", wrong) == 400
    assert guarded.send("GET", "/state").json()["open"] == {"a": {"x": "rewarded"}}
    refuse(409, "begin it anew", "b", "x", asked, first, asked)
    refuse(400, "valid list", "b", "x", asked | {"tool_calls": 5})
    refuse(400, "held out for evaluation", "h", "x", heldout)
    guarded.ask("h", "x", asked)  # the name is free for another prompt


def test_only_the_owner_on_this_machine_is_served(guarded):
    assert guarded.send("GET", "/state", key="wrong").status_code == 401
    port = int(guarded.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(60)
        stranger.sendall(b"POST /a/x/reward HTTP/1.1\r\nContent-Length: 60000000\r\n\r\n")
        assert stranger.recv(20).split()[1] == b"401"  # before its body is read
    assert (guarded.root / KEY).stat().st_mode & 0o777 == 0o600
    sockets = [line.split() for path in Path("/proc/net").glob("tcp*") for line in path.read_text().splitlines()]
    listening = [local for _, local, _, state, *_ in sockets if state == "0A" and local.endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]


def test_a_kill_loses_no_stored_group_and_requests_can_be_repeated(served):
    for name in "xy":
        messages = converse(served, "a", name, turns=1)
        assert converse(served, "a", name, turns=1)[1].content == messages[1].content
        assert [served.reward("a", name, 1.0) for _ in range(2)] == [200, 200]
    assert served.send("GET", "/state").json()["stored"] == ["a"]
    assert served.reward("a", "y", 0.0) == 409
    converse(served, "b", "x", turns=1)
    os.kill(served.command.pid, signal.SIGKILL)
    served.command.wait(60)
    before = RolloutStore(served.root / "stages/000/rollouts").read([0])
    assert "continue with `megarl serve`" in succeed("rollout", served.root, "--stage", 0, code=2).stderr
    served.start()
    state = {"groups": 2, "conversations_per_group": 2, "stored": ["a"], "open": {}}
    assert served.send("GET", "/state").json() == state
    assert served.send("DELETE", "/b/x").status_code == 409
    converse(served, "b", "x", turns=1)
    assert served.send("DELETE", "/b/x").status_code == 200  # its agent gave up
    for place in "xz":  # another group takes the place of the one that is empty now
        converse(served, "c", place, turns=1)
        assert served.reward("c", place, 0.0) == 200
    served.wait()
    store = RolloutStore(served.root / "stages/000/rollouts")
    assert store.external and store.group_ids == [0, 1]
    np.testing.assert_array_equal(store.read([0])[0].responses[0].tokens, before[0].responses[0].tokens)


def test_a_recipe_without_a_chat_template_is_refused(recipe):
    with pytest.raises(UserError, match='template = "raw"'):
        check_serving(SimpleNamespace(count=1), load_recipe(recipe))


def test_an_empty_key_file_is_refused(recipe, agent_model, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / KEY).write_text("\n")
    wanted = ("--stage", 0, "--port", 0, "--recipe", recipe, *settings(f"model.path='{agent_model}'", *SETTINGS))
    assert "holds no key" in succeed("serve", tmp_path / "run", *wanted, code=2).stderr
