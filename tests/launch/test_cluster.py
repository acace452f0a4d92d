"""launch/slurm.py on a real Slurm of two nodes: runs end as on one machine, whatever happens to their allocations."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import ROOT, megarl, processes_of, wait_until_nobody_works_on
from tests.phases.commands import settings
from tests.phases.test_kill import lines
from tests.phases.test_two_nodes import EASY, assert_same_result, assert_same_rollouts, complaint, events, updates

# two ranks of every phase on one node; without these settings, a run on two nodes has one rank on each
ON_ONE = ("rollout.workers=2", "actor.processes_per_node=2")
# many shards, updates and micro-batches, so that there is time to stop between two: Slurm takes seconds to signal
UPDATES, GROUPS = 64, 256
TINY = (*EASY, "schedule.stages=1", f"schedule.updates_per_stage={UPDATES}", "eval.every=0")
TINY += ("rollout.groups_per_chunk=1", f"actor.checkpoint_every={UPDATES}", "actor.tokens_per_micro_batch=20")


class Job:
    def __init__(self, slurm, number, folder):
        self.slurm, self.number, self.folder = slurm, number, Path(folder)

    @property
    def state(self):
        return self.slurm.job(self.number)["JobState"]

    @property
    def restarts(self):
        return int(self.slurm.job(self.number)["Restarts"])

    def wait(self, condition=None, timeout=900):
        """Wait until ``condition()`` holds, or without one until the job has ended; returns the job's state."""
        deadline = time.monotonic() + timeout
        while not (condition() if condition else self.state in ENDED):
            assert not condition or self.state not in ENDED, self.output()
            assert time.monotonic() < deadline, f"{self.state}\n{self.output()}"
            time.sleep(0.1)
        return self.state

    def output(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(f"log-*_{self.number}_*.out")))


ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE", "OUT_OF_MEMORY", "PREEMPTED")


@pytest.fixture
def submit(slurm, launch):

    def submit(recipe, run, *options, waits_and_fails=False):
        arguments = [recipe, "--run-dir", run, "--account", "ci", "--partition", "low"]
        arguments += [] if waits_and_fails else ["--detach"]
        python = ("--python", sys.executable, "--env", f"PYTHONPATH={ROOT}")
        result = launch(*arguments, *python, *options, environment=slurm.environment)
        assert result.returncode == (1 if waits_and_fails else 0), result.stdout + result.stderr
        found = re.findall(r"Slurm job (\d+), output in (\S+)", result.stdout)
        return [Job(slurm, number, folder) for number, folder in found]

    return submit


@pytest.fixture(scope="module")
def local(recipe, tmp_path_factory):
    run = tmp_path_factory.mktemp("local") / "run"
    result = megarl("train", recipe, "--run-dir", run, *settings(*TINY, *ON_ONE))
    assert result.returncode == 0, result.stderr
    return run


@contextlib.contextmanager
def frozen(run, phase):
    """Suspend the ranks of a phase until all of them have been asked to stop, so that none ends before that."""
    ranks = [rank for agent in agents_of(run) for rank in processes_of(agent.pid, phase)]
    assert ranks
    for rank in ranks:
        rank.suspend()
    yield
    while not all(is_asked_to_stop(rank) for rank in ranks):
        time.sleep(0.05)
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.resume()


def is_asked_to_stop(process):
    """Whether a suspended process has SIGTERM pending or runs again: Slurm may send SIGCONT and SIGTERM itself."""
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
        status = Path(f"/proc/{process.pid}/status").read_text()
        pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)", status, re.M)
        asked = any(int(signals, 16) >> (signal.SIGTERM - 1) & 1 for signals in pending)
        return asked or process.status() != psutil.STATUS_STOPPED
    return True


def preempt(slurm, job, run, phase):
    before = job.restarts
    whole = ("-N2", "--ntasks-per-node=8", "-o", "/dev/null")
    with frozen(run, phase):
        high = slurm.run("sbatch", "--parsable", "-p", "high", *whole, "--wrap", "sleep 1").strip()
    job.wait(lambda: job.restarts == before + 1)
    assert slurm.job(high)["JobState"] in ("PENDING", "RUNNING", "COMPLETED")


def test_a_job_preempted_in_rollout_and_in_optimize_makes_every_update_once(recipe, local, slurm, submit, tmp_path):
    run = tmp_path / "run"
    (job,) = submit(recipe, run, "--nodes", 2, *settings(*TINY))
    job.wait(lambda: list(run.glob("stages/000/rollouts/*.arrow")))
    preempt(slurm, job, run, "rollout")
    job.wait(lambda: lines(run / "metrics.jsonl") >= 1)
    preempt(slurm, job, run, "optimize")
    assert job.wait() == "COMPLETED", job.output()
    assert [event["phase"] for event in events(run, "phase_stopped")] == ["rollout", "optimize"]
    resumed = {event["phase"]: event["skipped"] for event in events(run, "resume")}
    assert 0 < resumed["rollout"] < GROUPS and 0 < resumed["optimize"] < UPDATES
    assert f"skips {resumed['optimize']} of {UPDATES} updates made earlier" in job.output()
    assert_same_rollouts(local, run)
    assert_same_result(local, run)


def test_a_job_that_runs_out_of_time_continues_in_its_next_allocation(recipe, local, submit, tmp_path):
    """Slurm checks time limits every 30 s, so its signal comes up to 30 s earlier than ``--margin`` says.

    Of the first minute, on a busy machine, nothing is left after that and the start of the processes.
    """
    minutes = 2 + int(3 * events(local, "phase_end")[0]["seconds"] / 60)
    run = tmp_path / "run"
    (job,) = submit(recipe, run, "--time", minutes, "--margin", 15, "--retries", 20, *settings(*TINY, *ON_ONE))
    job.wait(lambda: lines(run / "metrics.jsonl") >= 1)
    with frozen(run, "optimize"):
        assert job.restarts == 0
    assert job.wait() == "COMPLETED", job.output()
    assert job.restarts >= 1
    stopped = [event["phase"] for event in events(run, "phase_stopped")]
    assert "optimize" in stopped and set(stopped) <= {"rollout", "optimize"}  # on a busy machine also before it
    resumed = [event["skipped"] for event in events(run, "resume") if event["phase"] == "optimize"]
    assert resumed and all(0 < skipped < UPDATES for skipped in resumed)
    assert_same_result(local, run)


def agents_of(run, node=None):
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        command, environment = process.info["cmdline"] or [], process.info["environ"] or {}
        here = environment.get("SLURM_NODEID")
        if "megarl.cli" in command and str(run) in command and here is not None and node in (None, int(here)):
            found.append(process)
    assert found, f"no agent of node {node}"
    return found


def test_a_killed_agent_fails_the_job_with_the_cause_and_leaves_no_process(recipe, submit, tmp_path):
    run = tmp_path / "run"
    (job,) = submit(recipe, run, "--nodes", 2, "--retries", 0, *settings(*TINY))
    job.wait(lambda: list(run.glob("stages/000/rollouts/*.arrow")))
    agents_of(run, node=1)[0].send_signal(signal.SIGKILL)
    assert job.wait() == "FAILED"
    assert "the agent of node 1" in complaint(job.output())
    wait_until_nobody_works_on(run)


def test_a_job_with_retries_finishes_after_its_agent_was_killed(recipe, local, submit, tmp_path):
    run = tmp_path / "run"
    (job,) = submit(recipe, run, "--nodes", 2, "--retries", 1, *settings(*TINY))
    job.wait(lambda: lines(run / "metrics.jsonl") >= 1)
    agents_of(run, node=0)[0].send_signal(signal.SIGKILL)
    assert job.wait() == "COMPLETED", job.output()
    assert job.restarts == 1
    assert_same_result(local, run)


def test_a_job_with_a_mistake_in_its_recipe_is_not_queued_again(recipe, submit, tmp_path):
    (job,) = submit(recipe, tmp_path / "run", "--nodes", 1, "--retries", 3, *settings(*TINY, "objective.name=gpro"))
    assert job.wait() == "FAILED"
    assert job.restarts == 0
    assert "objective.name is 'gpro'" in job.output()


def test_chain_runs_each_phase_as_its_own_job(recipe, local, submit, tmp_path):
    run = tmp_path / "run"
    chain = ("--chain", "--nodes", 1, "--optimize-nodes", 2, "--optimize-partition", "high")
    jobs = submit(recipe, run, *chain, *settings(*TINY, "rollout.workers=2"))
    assert [job.wait() for job in jobs] == ["COMPLETED"] * 3, [job.output() for job in jobs]
    asked = [(job.slurm.job(job.number)["NumNodes"], job.slurm.job(job.number)["Partition"]) for job in jobs]
    assert asked == [("1", "low"), ("2", "high"), ("1", "low")]
    assert_same_result(local, run)
    assert (run / "report.html").exists()


def test_chain_cancels_what_depends_on_a_failed_job(recipe, submit, tmp_path):
    diverges = settings(*TINY, "optimizer.lr=1", "optimizer.weight_decay=1e30", "schedule.stages=2")
    jobs = submit(recipe, tmp_path / "run", "--chain", "--retries", 0, *diverges, waits_and_fails=True)
    assert len(jobs) == 5
    assert [job.wait() for job in jobs] == ["COMPLETED", "FAILED", "CANCELLED", "CANCELLED", "CANCELLED"]
    assert "finite" in "\n".join(jobs[1].output().rstrip().splitlines()[-25:])


def test_an_array_makes_every_run_of_a_sweep_once_and_one_table(recipe, slurm, submit, tmp_path):
    sweep, output = tmp_path / "sweep.toml", tmp_path / "sweep"
    short = "schedule = { stages = 1, updates_per_stage = 2 }\neval = { every = 1 }"
    text = f'recipe = "{os.path.relpath(recipe, ROOT)}"\nseeds = [0, 1]\n[set]\n{short}\n'
    sweep.write_text(text + '[axes]\n"optimizer.lr" = [1e-4, 2e-4]\n')
    (job,) = submit(sweep, output, "--array", 2, "--retries", 0)
    ids = [line.split()[0] for line in slurm.run("squeue", "-h", "-r", "-o", "%A").splitlines()]
    tasks = [Job(slurm, number, job.folder) for number in ids]
    assert len(tasks) == 2
    assert [task.wait() for task in tasks] == ["COMPLETED"] * 2, [task.output() for task in tasks]
    runs = sorted(path.parent for path in output.glob("*/*/recipe.toml"))
    assert [str(run.relative_to(output)) for run in runs] == [
        f"lr={lr}/seed_{seed}" for lr in ("0.0001", "0.0002") for seed in (0, 1)
    ]
    for run in runs:
        assert [line["update"] for line in updates(run)] == [1, 2]
        assert len(events(run, "phase_end")) == len({(e["phase"], e["stage"]) for e in events(run, "phase_end")})
    assert len((output / "table.csv").read_text().splitlines()) == 3


def test_the_local_executor_makes_the_same_run(recipe, local, launch, tmp_path):
    python = ("--python", sys.executable, "--env", f"PYTHONPATH={ROOT}")
    result = launch(recipe, "--run-dir", tmp_path / "run", "--local", *python, *settings(*TINY, *ON_ONE))
    assert result.returncode == 0, result.stdout + result.stderr
    assert_same_result(local, tmp_path / "run")
    assert json.loads((tmp_path / "run/events.jsonl").read_text().splitlines()[-1])["event"] == "phase_end"
    assert not [p for p in psutil.Process(os.getpid()).children(recursive=True) if "megarl.cli" in p.cmdline()]
