"""An engine's faulty answers to agents are generated again; too many end the phase."""

import dataclasses
import threading

import numpy as np

from megarl.heartbeats import WAITS
from megarl.models.hf_config import read_hf_config
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.serve.chat import ChatRequest
from megarl.phases.serve.conversations import Conversation, Turn
from megarl.phases.serve.phase import TurnQueue
from megarl.recipe.load import load_recipe
from megarl.rollout.builtin import BuiltinEngine
from megarl.rollout.engine import fault
from tests.phases.mutants import nan


def test_a_faulty_answer_is_generated_again_with_another_seed(recipe):
    """A turn is asked of a real engine, whose first two answers are damaged."""
    path = load_recipe(recipe).model.path
    worker = object.__new__(RolloutWorker)
    worker.recipe, worker.stop_token_ids, worker.engine = load_recipe(recipe), (1,), BuiltinEngine(path, 0)
    worker.vocabulary = read_hf_config(path)["vocab_size"]
    step, given, answers = worker.engine.step, [], []

    def damaged():
        ended = step()
        before = len(given)
        given.extend(one for _, one in ended)
        return [(to, nan(one) if before + n < 2 else one) for n, (to, one) in enumerate(ended)]

    worker.engine.step = damaged
    turn = Turn(Conversation(0, [3, 4]), ChatRequest([], None, None), [], [3, 4], 6, 5)
    queue = TurnQueue(worker, lambda: bool(answers))
    asking = threading.Thread(target=lambda: answers.append(queue.ask(turn)), daemon=True)
    asking.start()
    queue.run(lambda: False)
    asking.join(60)
    assert answers[0] is given[2] and fault(given[2], 6, worker.vocabulary) is None
    assert turn.discarded == 2
    assert not any(np.array_equal(given[0].logprobs, other.logprobs) for other in given[1:])


def test_waiting_for_agents_is_no_stall(monkeypatch):
    kinds = []
    monkeypatch.setattr("megarl.phases.serve.phase.beat", lambda kind, _: kinds.append(kind))
    assert TurnQueue(None, lambda: False)._next(wait=True) is None
    assert len(kinds) == 1 and WAITS not in kinds


def test_the_discarded_answers_of_all_turns_are_stored_with_the_response():
    one = Conversation(0, [3], discarded=3, finish_reason="stop")
    one.add([4], [-1.0])
    assert one.response(1.0, None, 0).discarded == 3
    assert dataclasses.replace(one, discarded=0).response(1.0, None, 0).discarded is None
