"""A server with its conversations, without the phase around it."""

import httpx
import openai
import pytest

from megarl.data.templates import Renderer
from megarl.data.tokenizer import load_tokenizer
from megarl.phases.serve.chat import decoder
from megarl.phases.serve.conversations import Conversations
from megarl.phases.serve.phase import serving
from megarl.recipe.load import load_recipe
from megarl.rollout.builtin import BuiltinEngine
from megarl.rollout.engine import Request, Sampling, answers
from tests.commands.stages.agents import write_agent_model
from tests.commands.stages.test_serve import SETTINGS

KEY = "k" * 40
ASKED = [{"role": "user", "content": "2+3?"}]


class Server:
    """Serves 40 groups in front of ``ask``, by default a real engine."""

    def __init__(self, settings, ask=None):
        tokenizer = load_tokenizer(settings.model.path)
        renderer, store = Renderer(settings.data, tokenizer), lambda name, group: None
        conversations = Conversations(settings, range(40), renderer, decoder(tokenizer), 0, store, {}, frozenset())
        self.engine = None if ask else BuiltinEngine(settings.model.path, 0)
        self.context = serving(0, conversations, ask or self.answer, KEY, "m")
        self.http = httpx.Client(trust_env=False, timeout=60, headers={"Authorization": f"Bearer {KEY}"})

    def answer(self, turn):
        (found,) = answers(self.engine, Request([turn.prompt], Sampling(1.0, turn.limit, 1, (1,), (turn.seed,))))
        return found

    def __enter__(self):
        self.port = self.context.__enter__()
        self.address = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *error):
        self.context.__exit__(*error)

    def client(self, name):
        return openai.OpenAI(base_url=f"{self.address}/a/{name}/v1", api_key=KEY, max_retries=0)

    def send(self, body, name="x", path="v1/chat/completions"):
        """The answer to a request without the client, which would refuse some fields itself."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.http.post(f"{self.address}/a/{name}/{path}", **content)


@pytest.fixture(scope="module")
def settings(recipe, tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("agent") / "model"
    write_agent_model(tiny_model, path)
    return load_recipe(recipe, [f"model.path='{path}'", *SETTINGS, "rollout.responses_per_prompt=40"])


@pytest.fixture
def served(settings):
    with Server(settings) as one:
        yield one
