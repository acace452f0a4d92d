"""Rewards from a server: its answer is the score, and without an answer there is no score."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megarl.data.prompts import Prompt
from megarl.errors import PhaseFailed, UserError
from megarl.rewards import Score, VerifierUnavailable, service
from megarl.rewards.parts import build_verifier, check_reward
from megarl.rewards.pool import Limits
from tests.data import prompt_sources
from tests.data.prompt_sources import write
from tests.rewards import pooling

KEY = "a-secret-key"
PROMPT = Prompt(0, "2 + 2?", (1,), "4", {"metadata": {"level": 3}})
SAID = {"NONE": None, "LARGE": "SCORE: 7", "CUT": "SCORE: 0"}  # by a judge that gives no score
REPLIES = {  # a word of the response to be scored: the server's status and answer
    "BUSY": (503, b"{}"),
    "REFUSED": (401, b'{"error": "no such key"}'),
    "DEEP": (200, b"[" * 100_000),
    "HUGE": (200, b"x" * (service.LARGEST_ANSWER + 1)),
    "ODD": (200, b"{}"),
}


class Server(ThreadingHTTPServer):
    """A server that does what the response to be scored says, and records the requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.keys, self.gate = [], set(), threading.Event()
        self.together = threading.Barrier(4, self.gate.set)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, b'{"data": [{"id": "grader"}]}')

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"] if "messages" in body else body["response"]
        server.keys.add(self.headers["Authorization"])
        server.asked.append((self.path, body))
        times = sum(other == body for _, other in server.asked)
        if "TOGETHER" in text and not server.gate.is_set():
            server.together.wait()
        if "TRICKLE" in text:
            self.answer(200, b"")
            while True:  # a byte at a time, for ever
                self.wfile.write(b" ")
                time.sleep(0.02)
        if "ONCE" in text and times == 1:
            self.answer(*REPLIES["BUSY"])
        else:
            scored = judged if "messages" in body else measured
            given = (reply for word, reply in REPLIES.items() if word in text)
            self.answer(*next(given, (200, json.dumps(scored(text, times, body)).encode())))

    def answer(self, status, data):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


def judged(text, times, body):
    """A chat completion that gives a score, except where it hesitates at temperature 0."""
    said = f"SCORE: 0? No.\n**SCORE: {'1' if 'RIGHT' in text else '.25'}**"
    if "HESITATES" in text and body["temperature"] == 0:
        said = "I would say 1/10"
    message = {"role": "assistant", "content": SAID.get(text.split()[-1], said)}
    return {"choices": [{"message": message, "finish_reason": "length" if "CUT" in text else "stop"}]}


def measured(text, times, body):
    """Score and reward from a service of one's own."""
    score = float("nan") if text == "NAN" else 1 if "RIGHT" in text else 0.25
    return {"score": None if "HESITATES" in text and times == 1 else score, "reward": -2.0}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr(service.time, "sleep", lambda seconds: None)  # no pauses between attempts
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.together.abort()
        server.shutdown()
        thread.join()


def recipe(tmp_path, url, kind="judge", **settings):
    file = write(tmp_path / "p.jsonl", [{"prompt": "?", "answer": "42"}])
    settings = {"url": url, "attempts": 3, "api_key": "JUDGE_KEY"} | settings
    if kind == "judge":
        question = tmp_path / "question.txt"
        question.write_text("{prompt} is {answer}: {response}")
        settings = {"model": "grader", "prompt": str(question)} | settings
    return prompt_sources.recipe(file=file, reward={"kind": kind, "service": settings})


def scored(settings, texts):
    limits = Limits.of_this_process(settings)
    return pooling.scored(lambda: build_verifier(settings, None), limits, [(PROMPT, text) for text in texts])


def test_a_judges_answer_gives_the_score(tmp_path, server):
    settings = recipe(tmp_path, server.url)
    check_reward(settings)
    texts = ["RIGHT", "wrong {answer}", "ONCE RIGHT", "HESITATES RIGHT"]
    assert scored(settings, texts) == [Score(1.0), Score(0.25), Score(1.0), Score(1.0)]
    asked = [(path, body["messages"][0]["content"]) for path, body in server.asked]
    assert ("/v1/chat/completions", "2 + 2? is 4: wrong {answer}") in asked
    assert [text for _, text in asked].count("2 + 2? is 4: ONCE RIGHT") == 2
    assert server.keys == {f"Bearer {KEY}"}
    again = [body for _, body in server.asked if body["temperature"]]
    assert [body["messages"][0]["content"] for body in again] == ["2 + 2? is 4: HESITATES RIGHT"]
    assert {body["model"] for _, body in server.asked} == {"grader"}


@pytest.mark.parametrize("text", SAID)
def test_a_judge_without_a_score_is_asked_again_and_then_ends_the_phase(tmp_path, server, text):
    with pytest.raises(VerifierUnavailable, match="after 3 attempts: the judge"):
        scored(recipe(tmp_path, server.url), ["RIGHT", text])
    assert [body["temperature"] for _, body in server.asked if text in body["messages"][0]["content"]] == [0, 1, 1]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("fine\nSCORE: 1", 1.0),
        ("**SCORE: `.5`**\nas I said", 0.5),
        ("SCORE: 0? No. SCORE: 1.0", 1.0),
        ("SCORE: 1\nSCORE: none", None),
        ("SCORE: 1/10", None),
        ("SCORE: 1 SCORE", None),
        ("<think>SCORE: 1</think>I cannot say.", None),
        ("SCORE: 1.01", None),
        ("SCORE: 0." + "0" * 400, None),
        ("SCORE:\n1", None),
        ("SCORE: 00.5", None),  # ms-swift 10163, uqlm 470 and openagent-eval 74: the beginning of a number
        # NeMo-Gym 2852 and evalscope 1578: what the judge quotes before its verdict
        ("It says 'SCORE: 1'.\n\nSCORE: 0", 0.0),
        ("The UNDERSCORE: 1", None),
        # flexeval 237 and usual forms of models: marks around the word, quotes, other spaces and colons
        ("**Score**: 0.5", 0.5),
        ("SCORE\uff1a\u00a01", 1.0),
        ('"SCORE: 1"', 1.0),
        # so long that with quadratic time they would take an hour
        ("SCORE:" + " " * 4_000_000 + "x", None),
        ("SCORE:" + " *" * 2_000_000 + "1", 1.0),
        ("SCORE:" * 700_000, None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_score_is_a_number_at_the_end_of_its_line(text, score):
    assert service.score_in(text) == score


def test_a_services_answer_gives_score_and_reward(tmp_path, server):
    """If it is no number, the service is asked again, and then the phase ends."""
    settings = recipe(tmp_path, server.url, "http")
    check_reward(settings)
    found = scored(settings, ["RIGHT", "else", "HESITATES RIGHT"])
    assert found == [Score(1.0, reward=-2.0), Score(0.25, reward=-2.0), Score(1.0, reward=-2.0)]
    row = {"prompt": "2 + 2?", "answer": "4", "level": 3}
    assert ("/v1", {"prompt": "2 + 2?", "response": "RIGHT", "answer": "4", "row": row}) in server.asked
    with pytest.raises(VerifierUnavailable, match="after 3 attempts: .* returned a score or reward that"):
        scored(settings, ["NAN"])
    asked = [body["response"] for _, body in server.asked]
    assert (asked.count("HESITATES RIGHT"), asked.count("NAN")) == (2, 3)


def test_requests_are_sent_concurrently(tmp_path, server):
    settings = recipe(tmp_path, server.url, at_once=4)
    assert scored(settings, [f"TOGETHER RIGHT {i}" for i in range(16)]) == [Score(1.0)] * 16  # else it hangs
    assert Limits.of_this_process(settings).workers == 4


WHY = {"BUSY": "503", "TRICKLE": "no answer within 0.3 s", "HUGE": "more than 4 MiB", "DEEP": "64 deep"}


@pytest.mark.parametrize(("text", "why"), WHY.items())
def test_a_request_without_an_answer_is_verifier_unavailable(tmp_path, server, text, why):
    settings = recipe(tmp_path, server.url, seconds=0.3 if text == "TRICKLE" else 30)
    with pytest.raises(VerifierUnavailable, match=f"chat/completions did not answer after 3 attempts: .*{why}"):
        scored(settings, ["RIGHT", text])


def test_a_refused_request_is_a_user_error_that_does_not_show_the_key(tmp_path, server):
    with pytest.raises(UserError, match=r"refuses the request: 401 Unauthorized.*no such key") as caught:
        scored(recipe(tmp_path, server.url), ["REFUSED"])
    assert KEY not in str(caught.value)
    with pytest.raises(UserError, match=r"is not a chat completion service: it answered \{\}"):
        scored(recipe(tmp_path, server.url), ["ODD"])


def test_mistakes_are_reported_before_the_run(tmp_path, server, monkeypatch):
    for settings, message in (
        ({"model": "grande"}, r"does not serve model = 'grande'; it serves \['grader'\]"),
        ({"url": "judge:8000"}, "is not an http:// or https:// address"),
        ({"url": "http://127.0.0.1:9"}, "nothing answers at http://127.0.0.1:9: .*refused"),
        ({"seconds": 1000.0}, "3 attempts of 1000 seconds may take 3008 s"),
        ({"prompt": str(tmp_path / "none")}, "none cannot be read"),
        ({"prompt": str(tmp_path / "p.jsonl")}, r"does not contain \{response\}"),
        ({"api_key": "NO_SUCH_KEY"}, "environment variable NO_SUCH_KEY, which is not set"),
    ):
        with pytest.raises(PhaseFailed if "nothing answers" in message else UserError, match=message):
            check_reward(recipe(tmp_path, **{"url": server.url} | settings))
