"""What launch/slurm.py would submit, and the layouts it refuses. Needs nemo-run, but no Slurm."""

import json
import os
import re
import subprocess
import sys

import pytest

from launch.layout import ChainJob, check_layout
from megarl.errors import UserError
from megarl.recipe.load import load_without_objective
from tests.helpers import ROOT

QWEN = ROOT / "examples/qwen3_30b_a3b/mu_grpo.toml"
SUBMIT = ("--run-dir", "runs/x", "--account", "lab", "--partition", "gpu", "--time", "08:00:00", "--dry-run")
# runs launch/slurm.py for every line of stdin, each time in a fork of this process: importing nemo-run takes seconds
FORKS = """
import json, os, runpy, sys
import nemo_run
for line in sys.stdin:
    *sys.argv, output, errors = json.loads(line)
    if (child := os.fork()) == 0:
        for number, path in ((1, output), (2, errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def imported_launcher(launch_python, tmp_path_factory):
    environment = {**os.environ, "NEMORUN_HOME": str(tmp_path_factory.mktemp("nemo")), "WANDB_API_KEY": "f00dcafe"}
    environment.pop("PYTHONPATH", None)
    command, pipe = [str(launch_python), "-c", FORKS], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def launch(imported_launcher, tmp_path):

    def run(recipe, *options, code=0, submit=SUBMIT):
        outputs = tmp_path / "stdout", tmp_path / "stderr"
        order = ["launch/slurm.py", recipe, *submit, *options, *outputs]
        print(json.dumps([str(part) for part in order]), file=imported_launcher.stdin, flush=True)
        found = int(imported_launcher.stdout.readline())
        result = subprocess.CompletedProcess(order, found, *(path.read_text() for path in outputs))
        assert found == code, result.stderr
        return result

    return run


def scripts(result):
    """(#SBATCH directives, the command that srun gets, the whole script) of each job."""
    for text in result.stdout.split("#!/bin/bash")[1:]:
        directives = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=?(.*)$", text))
        (srun,) = re.findall(r"(?m)^srun .*$", text)
        yield directives, srun, text


def test_the_script_for_four_nodes(launch):
    result = launch(
        *(QWEN, "--nodes", 4, "--margin", 120, "--retries", 7, "--after", 77, "--sbatch", "mail-type=END"),
        *("--env", "NCCL_IB_HCA=mlx5_0 mlx5_1", "--set", "schedule.stages=3", "--set", "objective.name=grpo"),
    )
    ((lines, srun, script),) = scripts(result)
    expected = {"nodes": "4", "ntasks-per-node": "1", "gpus-per-node": "8", "exclusive": "", "account": "lab"}
    expected |= {"partition": "gpu", "time": "08:00:00", "signal": "TERM@120", "dependency": "afterok:77"}
    expected |= {"open-mode": "append", "kill-on-invalid-dep": "yes", "mem": "0", "mail-type": "END"}
    assert expected.items() <= lines.items()
    assert "cpus-per-task" not in lines
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    for line in ("TORCHX_MAX_RETRIES=7", "MEGARL_SHUTDOWN_SECONDS=108", "NCCL_IB_HCA='mlx5_0 mlx5_1'"):
        assert f"export {line}\n" in script
    agent = f"python -m megarl.cli train {QWEN} --run-dir {ROOT}/runs/x --set schedule.stages=3"
    assert (
        f"--cpu-bind=none {agent} --set objective.name=grpo --set 'model.path=\"{ROOT}/models/Qwen3-30B-A3B-Base\"'"
        in srun
    )
    assert "requeue" in script


def test_a_recipe_is_checked_except_for_the_fields_of_its_objective():
    one_response = ["rollout.responses_per_prompt=1", "objective.advantage=batch_normalised", "objective.nowhere=1"]
    recipe = load_without_objective(QWEN, one_response)
    assert (recipe.rollout.responses_per_prompt, recipe.objective.advantage) == (1, "batch_normalised")
    with pytest.raises(UserError, match="responses_per_prompt"):
        load_without_objective(QWEN, one_response[:1])


def test_the_dry_run_names_missing_files(launch, tmp_path):
    result = launch(QWEN, "--nodes", 4, "--set", f"model.path='{tmp_path}'")
    missing = [line for line in result.stderr.splitlines() if line.startswith("not on this machine: ")]
    assert missing and not any("[model]" in line for line in missing)
    assert f"not on this machine: [data] train: {load_without_objective(QWEN).data.train}" in missing
    (suite, *_) = load_without_objective(QWEN).suites
    assert f"not on this machine: [eval] suite {suite.name}: {suite.data.train}" in missing
    assert "[model] path" in launch(QWEN, "--nodes", 4).stderr


def test_without_nemo_run_the_error_names_make_launch():
    command = [sys.executable, "-S", "launch/slurm.py", "--help"]  # without any package, nemo-run among them
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "`make launch`" in result.stderr


def test_relative_paths_become_absolute_those_of_several_data_sources_too(launch, tmp_path):
    text = re.sub(r"(?m)^(source|train|format) = .*\n", "", QWEN.read_text().partition("[reward]")[0])
    recipe = tmp_path / "recipe.toml"
    sources = (
        '[[data.sources]]\nsource = "file"\ntrain = "a.jsonl"\ncolumns = { prompt = "q.0" }\n'
        '[[data.sources]]\nsource = "reasoning_gym"\ntrain = "chain_sum"\noptions = { min_terms = 3 }\nweight = 0.5\n'
    )
    rest = "[reward]" + QWEN.read_text().partition("[reward]")[2]
    # with several sources, suites have no default source
    rest = rest.replace("[[eval.suites]]\n", '[[eval.suites]]\nsource = "file"\n')
    rest = rest.replace('[objective]\nname = "mu_grpo"', '[objective]\npath = "mine.py:Mine"\nbeta = 0.3')
    recipe.write_text(text + sources + rest)
    own = ("rollout.sglang_python=sglang-env/bin/python", "reward.kind=python")
    own += ("reward.path=mine.py:score", "reward.boxed=false")
    result = launch(recipe, "--nodes", 4, *(part for one in own for part in ("--set", one)))
    assert "--set objective.beta=0.3" in result.stdout
    assert "objective.path" not in launch(recipe, "--nodes", 4, "--set", "objective.name=grpo").stdout
    assert len(re.findall(rf"--set '(?:objective|reward).path=\"{ROOT}/mine.py:\w+\"'", result.stdout)) == 2
    assert f"--set 'rollout.sglang_python=\"{ROOT}/sglang-env/bin/python\"'" in result.stdout, result.stderr
    (setting,) = re.findall(r"--set '(data\.sources=[^']*)'", result.stdout)
    sources = load_without_objective(recipe, [setting]).data.sources
    assert sources == load_without_objective(recipe).data.sources
    assert (sources[0].train, sources[1].options) == (f"{ROOT}/a.jsonl", {"min_terms": 3})


def test_container_options_reach_srun_and_secrets_are_passed_by_name_and_never_printed(launch):
    image = ("--container-image", "image", "--container-mounts", "/fast:/fast", "--python", "/fast/bin/python")
    variables = ("--env", "WANDB_API_KEY", "--env", "TOKENIZERS_PARALLELISM=false")
    result = launch(QWEN, "--nodes", 4, *image, *variables)
    assert "--container-env WANDB_API_KEY" in result.stdout and "f00dcafe" not in result.stdout + result.stderr
    assert "export TOKENIZERS_PARALLELISM=false\n" in result.stdout
    ((_, srun, _),) = scripts(result)
    assert "--container-image image --container-mounts /fast:/fast," in srun
    assert " /fast/bin/python -m megarl.cli train " in srun
    for variable, words in {
        "WANDB_API_KEY=f00dcafe": "use --env WANDB_API_KEY",
        "MLFLOW_TRACKING_URI=https://me:f00dcafe@host": "use --env MLFLOW_TRACKING_URI",
        "NOT_SET_HERE": "not set here",
    }.items():
        refused = launch(QWEN, "--env", variable, code=2)
        assert words in refused.stderr and "f00dcafe" not in refused.stderr


def test_a_chain_has_one_job_for_each_phase(launch):
    other = ("--optimize-nodes", 2, "--optimize-partition", "big")
    found = list(scripts(launch(QWEN, "--nodes", 3, "--chain", *other, "--set", "schedule.stages=2")))
    asked = [(lines["nodes"], lines["partition"]) for lines, *_ in found]
    assert asked == [("3", "gpu"), ("2", "big"), ("3", "gpu"), ("2", "big"), ("3", "gpu")]
    until = [srun.partition(" --until ")[2] for _, srun, _ in found]
    assert until == ["rollout:0", "optimize:0", "rollout:1", "optimize:1", ""]


@pytest.fixture
def sweep_of_qwen(tmp_path):
    path = tmp_path / "sweep.toml"
    models = '[axes.model]\nhere = { }\nthere = { model = { path = "elsewhere" } }\n'
    path.write_text(f'recipe = "{QWEN}"\nseeds = [0, 1]\n[axes]\n"optimizer.lr" = [1e-6, 2e-6]\n{models}')
    return path


def test_a_sweep_is_an_array_of_jobs_of_one_node(launch, sweep_of_qwen):
    result = launch(sweep_of_qwen, "--array", 3)
    ((lines, srun, _),) = scripts(result)
    assert (lines["array"], lines["nodes"], lines["gpus-per-node"]) == ("0-2", "1", "8")
    assert "_%A_%a.out" in lines["output"]
    agent = f"env --chdir={ROOT} python -P -m megarl.cli sweep {sweep_of_qwen} --output {ROOT}/runs/x"
    assert srun.endswith(f" {agent}")
    missing = [line for line in result.stderr.splitlines() if "[model] path" in line]
    paths = [f"{ROOT}/models/Qwen3-30B-A3B-Base", f"{ROOT}/elsewhere"]  # of the recipe, and of an axis; each once
    assert missing == [f"not on this machine: [model] path: {path}" for path in paths]


def test_impossible_options_of_an_array_are_refused(launch, sweep_of_qwen):
    for options, words, code in [
        (("--array", 2, "--nodes", 2), "excludes --local, --chain, --set, --nodes", 2),
        (("--array", 2, "--set", "run.seed=1"), "excludes --local, --chain, --set, --nodes", 2),
        (("--array", 0), "give at least 1", 2),
        (("--array", 2, "--gpus-per-node", 4), "does not fill the 4 GPUs", 1),
    ]:
        refused = launch(sweep_of_qwen, *options, code=code)
        assert words in refused.stderr and "#SBATCH" not in refused.stdout
    waiting = [option for option in SUBMIT if option != "--dry-run"]
    assert "needs --detach" in launch(sweep_of_qwen, "--array", 2, submit=waiting, code=2).stderr


@pytest.mark.parametrize(
    ("nodes", "gpus", "settings", "message"),
    [
        (4, 4, [], "processes_per_node = 8 does not fill the 4 GPUs of a node"),
        (4, 8, ["rollout.workers=3"], "workers * tensor_parallel = 6 does not fill the 8 GPUs"),
        (3, 8, ["actor.pipeline_parallel=2"], "* pipeline_parallel = 16 does not fill 3 nodes"),
        (0, 8, [], "--nodes 0: give at least 1"),
        (2, 8, ['actor.backend="cpu"'], 'backend = "cpu"'),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fill_the_nodes_are_refused(nodes, gpus, settings, message):
    recipe = load_without_objective(QWEN, settings)
    with pytest.raises(UserError, match=re.escape(message)):
        check_layout(recipe, ChainJob("run", None, True, nodes, None), gpus)
    check_layout(load_without_objective(QWEN), ChainJob("run", None, True, 4, None), 8)


def test_cpu_recipe_asks_for_cores(launch, recipe):
    workers = ("--set", "rollout.workers=3", "--set", "actor.processes_per_node=2")
    ((lines, srun, _),) = scripts(launch(recipe, "--nodes", 2, *workers))
    assert (lines["cpus-per-task"], lines["nodes"]) == ("3", "2")
    assert not {"gpus-per-node", "exclusive"} & lines.keys() and "--cpus-per-task=3" in srun
