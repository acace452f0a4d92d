"""Runs on two nodes, whose agents are two processes of one machine, compared with the same run on one node."""

import os
import shutil
import signal
import time

import pytest

from megarl.errors import UserError
from megarl.workers.node_rank import NodeRank, find_node_rank
from megarl.workers.nodes import LEADER_LOST_SECONDS
from tests.extent import EVERY
from tests.helpers import (
    free_ports,
    processes_of,
    read_lines,
    start_megarl,
    stop_and_release,
    wait_until_nobody_works_on,
)
from tests.network import Network
from tests.phases import commands
from tests.phases.commands import train
from tests.phases.test_kill import lines, rollouts_of

# a task that an untrained model sometimes solves, since one letter in its place is enough: else there is no gradient
EASY = ("reward.kind=reasoning_gym", "reward.correct_above=0.1", "reward.require_stop=false")
EASY += ("data.source=reasoning_gym", "data.train=spell_backward", "data.options={min_word_len = 3, max_word_len = 8}")
EASY += ("data.prompt_template={word}=", "data.max_prompt_tokens=16")
SETTINGS = (*EASY, "schedule.stages=1", "actor.tokens_per_micro_batch=40", "eval.every=0", "run.max_restarts=1")
SETTINGS += ("run.seed=4",)  # with which nearly every update has a gradient
SETTINGS += ("actor.checkpoint_every=6",)  # only a signal makes a checkpoint before the end
BLINK_SECONDS = 3.0  # TCP sends again up to twice as late; an agent counts as dead after 15 s
LEADER, BOTH = (0,), (0, 1)
SECOND_UPDATE = (LEADER, "open .*/metrics.jsonl", 2)  # of six
A_SHARD = (BOTH, r"replace .*\.arrow", 1)  # of the node that generates it; the other one finds nothing to do
SILENT = "or hangs: no heartbeat for 15 s"  # as docs/architecture.md says


def settings(*others):
    return commands.settings(*SETTINGS, *others)


class TwoNodes:
    """The agents of ``megarl train`` on two nodes; each phase has one process per node.

    network: where the nodes are, instead of on the loopback interface.
    hold: (nodes, pattern, count) of a file operation at which a process of a phase is held there (`tests.zygote.hold`).
    """

    def __init__(self, recipe, run, *options, network=None, hold=((), "", 0)):
        port = str(free_ports(2)[0])
        shared = {**os.environ, "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        nodes, *operation = hold
        self.run, self.held = run, {rank: run.with_name(f"{run.name} held {rank}") for rank in nodes}
        arguments = ("train", recipe, "--run-dir", run, *settings(), *options)
        self.agents = []
        for rank in (0, 1):
            environment = shared | (network.environment(rank) if network else {}) | {"NODE_RANK": str(rank)}
            held = [*operation, str(self.held[rank])] if rank in nodes else None
            self.agents.append(start_megarl(*arguments, env=environment, hold=held))

    def wait(self, timeout=900):
        """(exit code, output) of each agent."""
        return [(agent.wait(timeout), agent.stdout + agent.stderr) for agent in self.agents]

    def succeed(self):
        for code, output in self.wait():
            assert code == 0, output

    def wait_for(self, condition):
        while not condition(self.run):
            for agent in self.agents:
                assert agent.poll() is None, agent.stdout + agent.stderr
            time.sleep(0.005)

    def wait_until_held(self):
        self.wait_for(lambda run: any(held.exists() and held.read_text() for held in self.held.values()))

    def release(self):
        for held in self.held.values():
            held.write_text("")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for agent in self.agents:
            agent.kill()
            agent.wait()


def updates(run):
    return read_lines(run / "metrics.jsonl")


def events(run, name):
    return [event for event in read_lines(run / "events.jsonl") if event["event"] == name]


def complaint(output):
    """The output from megarl's last message on; torch may print a traceback after it."""
    return output[output.rindex("megarl: ") :]


@pytest.fixture(scope="module")
def one_node(recipe, tmp_path_factory):
    run = tmp_path_factory.mktemp("one") / "run"
    train(recipe, run, *settings("rollout.workers=2", "actor.processes_per_node=2"))
    return run


@pytest.fixture(scope="module")
def two_nodes(recipe, tmp_path_factory):
    run = tmp_path_factory.mktemp("two") / "run"
    with TwoNodes(recipe, run) as two:
        two.succeed()
    return run


@pytest.fixture
def sealed(two_nodes, tmp_path):
    """A copy of the run on two nodes, as it was before its optimize phase."""
    run = tmp_path / "run"
    shutil.copytree(two_nodes, run, ignore=shutil.ignore_patterns("final", "checkpoints", "*.jsonl", "report.html"))
    shutil.copy(two_nodes / "stages/000/rollouts/ledger.jsonl", run / "stages/000/rollouts")
    return run


def assert_same_rollouts(one, other):
    assert rollouts_of(one / "stages/000/rollouts") == rollouts_of(other / "stages/000/rollouts")


def assert_same_result(one, other):
    trained = [update["grad_norm"] > 0 for update in updates(one)]
    assert sum(trained) >= len(trained) / 2  # else there is nothing to compare
    for a, b in zip(updates(one), updates(other), strict=True):
        for key in ("update", "loss", "reward/mean", "grad_norm", "entropy", "ess", "tokens"):
            assert a[key] == b[key], (a["update"], key)
    assert (one / "final/model.safetensors").read_bytes() == (other / "final/model.safetensors").read_bytes()


def test_a_run_on_two_nodes_equals_the_run_on_one(one_node, two_nodes):
    assert_same_rollouts(one_node, two_nodes)
    assert_same_result(one_node, two_nodes)
    logs = sorted(str(path.relative_to(two_nodes / "logs")) for path in (two_nodes / "logs").rglob("*.log"))
    assert logs == [f"000_{phase}/attempt_0/rank_000{rank}.log" for phase in ("optimize", "rollout") for rank in (0, 1)]


@pytest.mark.parametrize("number", [signal.SIGKILL] + [signal.SIGSTOP] * EVERY)
def test_killed_or_stopped_follower_fails_the_run_with_the_cause(number, recipe, sealed):
    with TwoNodes(recipe, sealed, hold=SECOND_UPDATE) as two:
        two.wait_until_held()
        two.agents[1].send_signal(number)
        code = two.agents[0].wait()
        two.agents[1].send_signal(signal.SIGCONT)
        (_, output), (other, _) = two.wait()
    assert (code, other) == (1, -signal.SIGKILL if number == signal.SIGKILL else 1)
    assert "the agent of node 1" in complaint(output) and f"died {SILENT}" in complaint(output)
    wait_until_nobody_works_on(sealed)
    assert len(events(sealed, "phase_failed")) == 1


def test_killed_leader_ends_the_others(recipe, tmp_path):
    with TwoNodes(recipe, tmp_path / "run", hold=A_SHARD) as two:
        two.wait_until_held()
        two.agents[0].send_signal(signal.SIGKILL)
        _, (code, output) = two.wait(LEADER_LOST_SECONDS)  # less than a request to a leader that does not answer
    assert code == 1
    assert "lost the agent of node 0" in complaint(output)
    wait_until_nobody_works_on(tmp_path / "run")


def test_sigterm_to_one_agent_saves_between_checkpoints_and_the_run_continues(recipe, two_nodes, sealed):
    with TwoNodes(recipe, sealed, hold=SECOND_UPDATE) as two:
        two.wait_until_held()
        stop_and_release(two.agents[1], signal.SIGTERM, two.held[0])
        (code, output), _ = two.wait()
    assert code == 130 and "start the same command again" in complaint(output), output
    (saved,) = (sealed / "stages/000/checkpoints").glob("update_*")
    done = int(saved.name.removeprefix("update_"))
    assert 0 < done < 6
    wait_until_nobody_works_on(sealed)
    with TwoNodes(recipe, sealed) as two:
        two.succeed()
    assert f"skips {done} of 6 updates" in two.agents[0].stdout + two.agents[0].stderr
    assert [event["skipped"] for event in events(sealed, "resume")] == [done]
    assert_same_result(two_nodes, sealed)


def test_dead_process_of_one_node_restarts_the_phase_on_both(recipe, two_nodes, tmp_path):
    run = tmp_path / "run"
    with TwoNodes(recipe, run, "--until", "rollout:0", hold=A_SHARD) as two:
        two.wait_until_held()
        two.wait_for(lambda _: processes_of(two.agents[1].pid, "rollout"))
        (worker,) = processes_of(two.agents[1].pid, "rollout")
        worker.kill()
        two.release()
        two.succeed()
    (restart,) = events(run, "restart")
    assert restart["phase"] == "rollout" and restart["attempt"] == 1
    assert "rank 1, node 1" in restart["cause"] and "killed by signal 9" in restart["cause"]
    assert_same_rollouts(two_nodes, run)
    assert not (run / "stages/000/checkpoints").exists()


@pytest.mark.crash
def test_a_stopped_process_of_one_node_is_named_and_all_ranks_are_listed(recipe, sealed):
    patience = commands.settings("run.stall_seconds=60", "run.max_restarts=0")
    with TwoNodes(recipe, sealed, *patience, hold=SECOND_UPDATE) as two:
        two.wait_until_held()
        (rank,) = processes_of(two.agents[1].pid, "optimize")
        rank.suspend()
        two.release()
        (code, output), _ = two.wait()
    assert code == 1
    message = complaint(output)
    for words in ("node 1", "no progress for", f"process {rank.pid} (optimize:1) of rank 1 is stopped"):
        assert words in message.splitlines()[0], message
    assert all(f"rank {number} (process" in message for number in (0, 1)), message
    # to write its stack the stopped process is continued, and the other one may then end its work before it is asked
    assert "most recent call" in (sealed / "logs/000_optimize/attempt_0/rank_0001.log").read_text()
    assert "no progress for" in events(sealed, "no_progress")[0]["cause"]
    wait_until_nobody_works_on(sealed)


def test_mistake_ends_all_agents_at_once(recipe, tmp_path):
    with TwoNodes(recipe, tmp_path / "run", "--set", "actor.pipeline_parallel=3") as two:
        (code, output), (other, _) = two.wait()
    assert (code, other) == (2, 2)
    assert "pipeline_parallel = 3" in complaint(output)


@pytest.mark.crash
def test_nodes_on_a_slow_link_survive_a_moment_without_it_and_end_in_time_once_it_is_cut(recipe, two_nodes, tmp_path):
    """Each agent ends by itself; the run continues when it is started again, and every update is done once."""
    run = tmp_path / "run"
    with Network("8mbit") as network:
        with TwoNodes(recipe, run, network=network, hold=(LEADER, "open .*/metrics.jsonl", 4)) as two:
            two.wait_for(lambda run: lines(run / "metrics.jsonl") >= 1)
            network.cut(True)
            time.sleep(BLINK_SECONDS)
            network.cut(False)
            two.wait_until_held()
            network.cut(True)
            leader, follower = two.agents[0].wait(), two.agents[1].wait(2 * LEADER_LOST_SECONDS)
            said = [agent.stdout + agent.stderr for agent in two.agents]
        assert (leader, follower) == (1, 1), said
        assert "the agent of node 1" in complaint(said[0]) and SILENT in complaint(said[0])
        assert "lost the agent of node 0" in complaint(said[1])
        wait_until_nobody_works_on(run)
        assert events(run, "restart") == []
        network.cut(False)
        with TwoNodes(recipe, run, network=network) as two:
            two.succeed()
    assert [update["update"] for update in updates(run)] == list(range(1, 7))
    assert_same_rollouts(two_nodes, run)
    assert_same_result(two_nodes, run)


TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h"}
SLURM = {"SLURM_JOB_ID": "20007", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
SLURM |= {"SLURM_STEP_NODELIST": "gpu[07-09],x"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, NodeRank()),
        ({"SLURM_JOB_ID": "5", "SLURM_NNODES": "2"}, NodeRank()),  # a batch script outside any step
        (SLURM, NodeRank(1, 2, "gpu07", 25014)),
        (SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "99"}, NodeRank(1, 2, "10.0.0.1", 99)),
        (SLURM | {"SLURM_STEP_NODELIST": "r[2-3]n[4,5]"}, NodeRank(1, 2, "r2n4", 25014)),
        (TWO | {"MASTER_PORT": "7"}, NodeRank(1, 2, "h", 7)),
        (TWO, NodeRank(1, 2, "h", 29500)),
    ],
)
def test_node_rank_from_the_environment(environment, place):
    assert find_node_rank(environment) == place


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (SLURM | {"SLURM_STEP_NUM_TASKS": "16"}, "16 tasks on 2 nodes"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is not"),
        (TWO | {"NODE_RANK": "2"}, "NODE_RANK = '2': .* from 0 to 1"),
        (TWO | {"NNODES": "two"}, "NNODES = 'two': expected an integer"),
        (TWO | {"MASTER_PORT": "65535"}, "MASTER_PORT = '65535': expected an integer from 1 to 65534"),
    ],
)
def test_wrong_environments_of_nodes_are_refused(environment, message):
    with pytest.raises(UserError, match=message):
        find_node_rank(environment)
