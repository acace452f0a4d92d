"""What trainers and engines tell each other through the store alone, and which groups and versions trainers take."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarl.phases.live import trainer
from megarl.phases.live.service import LiveRolloutWorker
from megarl.phases.live.state import LiveState
from megarl.phases.live.trainer import LiveBatches, Publisher
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir

LOCAL = threading.local()


class Trainers:
    """Two trainers, as threads, that wait for update 0; there is one engine."""

    def __init__(self, monkeypatch, colocate):
        # all that they may use of torch.distributed; a collective would be an AttributeError
        ranks = SimpleNamespace(get_rank=lambda: LOCAL.rank, get_world_size=lambda: 2)
        monkeypatch.setattr(trainer, "dist", ranks)
        self.released, self.found, self.polls, self.stored = [], {}, [0, 0], threading.Event()
        monkeypatch.setattr(trainer, "release", lambda device: self.released.append(LOCAL.rank))
        store = dist.HashStore()
        self.state = LiveState(store, 1)
        self.batches = [self.make(LiveState(store, 1), colocate) for _ in range(2)]
        self.threads = [threading.Thread(target=self.read, args=(rank,), daemon=True) for rank in (0, 1)]

    def make(self, state, colocate):
        batches = object.__new__(LiveBatches)
        batches.actor = SimpleNamespace(device=torch.device("cpu"))
        batches.state, batches.stop = state, SimpleNamespace(asked=False)
        batches.schedule, batches.stage = SimpleNamespace(colocate=colocate), SimpleNamespace(first_update=0)
        batches.store, batches.idle_seconds = SimpleNamespace(read=lambda groups: ["a group"]), 0.0
        batches._missing, batches._groups = self.missing, lambda update: [0]
        return batches

    def missing(self, update):
        self.polls[LOCAL.rank] += 1
        return not self.stored.is_set()

    def read(self, rank):
        LOCAL.rank = rank
        self.found[rank] = self.batches[rank].read(0)

    def until(self, condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def poll_again(self):
        before = self.polls[0]
        self.until(lambda: self.polls[0] > before + 5)

    def end(self):
        for thread in self.threads:
            thread.join(60)
        return self.found


def test_engines_begin_once_all_trainers_have_released_memory_and_trainers_once_engines_rest(monkeypatch):
    trainers = Trainers(monkeypatch, colocate=True)
    trainers.threads[0].start()
    trainers.state.rest(0, 0)  # an engine that has generated all that it may
    trainers.poll_again()
    assert trainers.state.round() == 0  # the other trainer still holds its memory
    trainers.threads[1].start()
    trainers.until(lambda: trainers.state.round() == 1)
    assert sorted(trainers.released) == [0, 1]
    trainers.stored.set()
    trainers.poll_again()
    assert trainers.found == {}  # the engine is still at work
    trainers.state.rest(0, 1)
    assert trainers.end() == {0: ["a group"], 1: ["a group"]}


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("colocate", [True, False])
def test_all_trainers_stop_if_one_is_asked_to_while_they_wait(monkeypatch, colocate, asked):
    trainers = Trainers(monkeypatch, colocate)
    for thread in trainers.threads:
        thread.start()
    trainers.until(lambda: trainers.state.decision(0) == "wait")
    trainers.batches[asked].stop.asked = True
    assert trainers.end() == {0: None, 1: None}


def test_an_engine_that_is_asked_to_stop_still_needs_its_version_in_the_next_attempt(publisher):
    """The trainer is stopped later, perhaps after it has published one more version and removed those not in use."""
    inner = SimpleNamespace(repeats_chunks=False, decoding=0, decoding_tokens=0)
    none = SimpleNamespace(over_limit=0)
    engine = SimpleNamespace(unfinished=False, close=lambda: None, engine=inner, scoring=none, discarded=0)
    stop, choice = SimpleNamespace(asked=False), SimpleNamespace(chooses=False, may_be_chosen=lambda chunk: True)
    worker = LiveRolloutWorker(publisher.stage, SimpleNamespace(rank=0), publisher.state, stop, [choice] * 6)

    def load(version):
        publisher.state.announce(0, 4)
        stop.asked, worker.worker = True, engine
        return engine

    publisher.state.publish(4)
    worker._load, worker._chunks = load, lambda missing, whole: [[4]]  # which it has not generated
    worker.work([4])
    assert publisher.state.oldest_in_use() == 4


@pytest.fixture
def publisher(recipe, tmp_path, monkeypatch):
    """That of the only trainer of a stage of six updates, which may train groups of the version before."""
    monkeypatch.setattr(trainer, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
    settings = ["kind=live", "sync_every=2", "max_lag=2", "prompts_per_update=1"]
    changed = [*(f"schedule.{setting}" for setting in settings), "eval.every=0", "eval.every_updates=4"]
    return Publisher(RunDir(tmp_path, load_recipe(recipe, changed)).stage(0), LiveState(dist.HashStore(), 1))


def test_versions_are_removed_once_no_engine_needs_them_and_they_are_evaluated(publisher):
    run, exporter = publisher.stage.run, SimpleNamespace(export=lambda version, path: path.mkdir(parents=True))
    publisher.trained(exporter, 2)
    publisher.trained(exporter, 3)
    assert run.versions() == [2] and publisher.state.newest() == 2
    publisher.state.announce(0, 2)
    publisher.trained(exporter, 4)
    assert run.versions() == [2, 4]  # the engine may still load the first of them
    found = []
    stop = SimpleNamespace(exit_if_asked=lambda: (found.append(run.versions()), publisher.state.leave(0)))
    publisher.end_stage(stop)
    assert found == [[2, 4]]  # what was there while the engine had not left the stage
    assert run.versions() == [4]  # it is to be evaluated
    for suite in run.recipe.suites:
        run.log_event("evaluation", stage=0, update=4, suite=suite.name)
    publisher.end_stage(stop)
    assert run.versions() == []
