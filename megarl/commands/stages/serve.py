"""``megarl serve``: agents generate the rollouts of a stage through an OpenAI-compatible server."""

from __future__ import annotations

import secrets

from megarl.commands.stages.ingest import check_filled
from megarl.errors import UserError
from megarl.phases.serve import KEY
from megarl.recipe.tables import Recipe
from megarl.storage.files import write_atomic
from megarl.storage.policies import copy_policy
from megarl.storage.run_dir import RunDir, Stage
from megarl.storage.run_dir.checks import check_run
from megarl.storage.run_dir.retention import require_policy
from megarl.views.progress import Progress
from megarl.workers.launcher import run_phase
from megarl.workers.nodes import Nodes
from megarl.workers.preflight import check


def serve_stage(nodes: Nodes, stage: Stage, port: int) -> None:
    """Serve agents until they have filled ``stage``, then seal it. After a stop it can be called again to continue.

    port: to listen on at 127.0.0.1; 0 for any free port.
    """
    run = stage.run
    check_serving(nodes, run.recipe)
    check_run(run)
    if stage.number == 0 and not stage.policy.exists():
        copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, stage.policy)
    if stage.is_sealed():
        print(f"{stage.rollouts} is sealed already")
        return
    require_policy(stage)
    write_key(run)
    run.write_request(port=port)
    where = f"http://127.0.0.1:{port}" if port else "the address that events.jsonl names"
    print(f"serving on {where}/GROUP/CONVERSATION/v1, with the key in {run.root / KEY}", flush=True)
    with Progress(run.root, run.recipe):
        run_phase(nodes, stage, "serve", 1)
    print(f"sealed {stage.rollouts}")


def check_serving(nodes: Nodes, recipe: Recipe) -> None:
    """`UserError` if agents cannot be served with this recipe, on these nodes or with what is installed here."""
    if nodes.count > 1:
        raise UserError(
            f"agents are served by one replica on one node: start `megarl serve` on one node, not {nodes.count}"
        )
    check_filled(recipe)
    if recipe.data.template == "raw":
        raise UserError('[data] template = "raw": agents send messages, so it must be "chat" or a .jinja file')
    if recipe.rollout.workers > 1:
        raise UserError(f"rollout.workers = {recipe.rollout.workers}: agents are served by one replica; set it to 1")
    check(nodes.starter, recipe, nodes.count, optimizes=False)


def write_key(run: RunDir) -> None:
    """Write the run's secret key for agents, readable only by its owner, unless there is one."""
    if not (run.root / KEY).exists():
        write_atomic(run.root / KEY, secrets.token_urlsafe(32) + "\n", 0o600)
