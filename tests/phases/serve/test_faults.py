"""An engine's faulty answers to agents are generated again; too many end the phase."""

import dataclasses
import threading

import numpy as np

from megarl.models.hf_config import read_hf_config
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.serve.chat import ChatRequest
from megarl.phases.serve.conversations import Conversation, Turn
from megarl.phases.serve.phase import TurnQueue
from megarl.recipe.load import load_recipe
from megarl.rollout.builtin import BuiltinEngine
from megarl.rollout.engine import fault
from tests.phases.mutants import nan


class Asked:
    """One turn that is asked of a real engine, whose first answers ``damage`` changes."""

    def __init__(self, recipe, damage, times):
        settings = load_recipe(recipe)
        worker = object.__new__(RolloutWorker)
        worker.recipe, worker.stop_token_ids = settings, (1,)
        self.vocabulary = worker.vocabulary = read_hf_config(settings.model.path)["vocab_size"]
        worker.engine, self.given = BuiltinEngine(settings.model.path, 0), []
        step = worker.engine.step

        def damaged():
            ended = []
            for number, one in step():
                self.given.append(one)
                ended.append((number, damage(one) if len(self.given) <= times else one))
            return ended

        worker.engine.step = damaged
        self.turn, self.answer = Turn(Conversation(0, [3, 4]), ChatRequest([], None, None), [], 6, 5), None
        self.queue = TurnQueue(worker, lambda: self.answer is not None)
        self.thread = threading.Thread(target=self.ask, daemon=True)
        self.thread.start()

    def ask(self):
        self.answer = self.queue.ask(self.turn)


def test_a_faulty_answer_is_generated_again_with_another_seed(recipe):
    asked = Asked(recipe, nan, times=2)
    asked.queue.run(lambda: False)
    asked.thread.join(60)
    assert fault(asked.answer, 6, asked.vocabulary) is None and asked.answer is asked.given[2]
    assert asked.turn.discarded == 2
    assert not any(np.array_equal(asked.given[0].logprobs, other.logprobs) for other in asked.given[1:])


def test_the_discarded_answers_of_all_turns_are_stored_with_the_response():
    one = Conversation(0, [3], discarded=3, finish_reason="stop")
    one.add([4], [-1.0])
    assert one.response(1.0, None, 0).discarded == 3
    assert dataclasses.replace(one, discarded=0).response(1.0, None, 0).discarded is None
