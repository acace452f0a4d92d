"""Generates docs/compositions.md, which settings a recipe may combine, by asking the check that precedes every start.

Models are the tiny ones of the tests, one of each family, since the check reads config.json alone.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.models import FAMILIES
from megarl.models.hf_config import read_hf_config
from megarl.models.lora import matrices
from megarl.planner.preflight import check_composition
from megarl.recipe.load import parse_recipe
from tests.actor.conftest import config_settings

PAGE = Path(__file__).resolve().parents[1] / "docs/compositions.md"
HEAD = """# What can be combined

Made by `tools/compositions_page.py`: for each cell it asks the check that precedes every start. A number is that of a
reason below, in the words of the message.

`make test-slow WHAT=families` compares all that works. It makes updates, exports and log-probs of the families on
Transformer Engine (stand-ins for it, on a CPU), with adapters and replayed experts: they are those of the torch layers
to 1e-4. The first loss with adapters or `routing_replay = "actor"` is that without. For each cell of the second table a
run ends with the weights, byte for byte, of a plain loop over its rollouts, which finds the groups to train by a plain
search. All tokens have the log-probs, to 1e-4, of the policies that the schedule names, and replayed experts are those
that the engine recorded (the built-in engine is made to record some). `make test` also compares the files of a run with
`lockstep` with those of a staged run, byte for byte.
"""
Tables = dict[str, dict[str, Any]]
LAYERS: dict[str, Tables] = {
    "torch": {},
    "Transformer Engine": {"actor": {"layers": "transformer_engine"}},
}
REPLAYS = ("none", "actor", "engine")
SYNC_EVERY = 4
LIVE = {"kind": "live", "sync_every": SYNC_EVERY}
SCHEDULES: dict[str, Tables] = {
    "staged": {},
    "staged, `token_budget`": {"rollout": {"token_budget": 2, "oversample": 2.0}},
    "`lockstep`": {"schedule": LIVE | {"lockstep": True}},
    "`delay`": {"schedule": LIVE | {"delay": 1}},
    "`max_lag`": {"schedule": LIVE | {"max_lag": 2 * SYNC_EVERY}},
    "`max_lag`, `partial`": {"schedule": LIVE | {"max_lag": 2 * SYNC_EVERY, "partial": True}},
    "`lockstep`, `colocate`": {"schedule": LIVE | {"lockstep": True, "colocate": True}},
}
PARTS: dict[str, Tables] = {
    "`passes`": {"schedule": {"passes": 2}},
    "`oversample`": {"rollout": {"oversample": 2.0}},
    "TIS": {"objective": {"truncated_importance": {"maximum": 1.0}}},
    "IcePop": {"objective": {"icepop": {"maximum": 1.0}}},
    "OPSM": {"objective": {"opsm": {}}},
    "KL": {"objective": {"kl": {"coefficient": 0.1}}},
    "`decoupled_ppo`": {"objective": {"name": "decoupled_ppo"}},
    '`routing_replay = "actor"`': {"actor": {"routing_replay": "actor"}},
    '`routing_replay = "engine"`': {"actor": {"routing_replay": "engine"}},
}


def merged(*tables: Tables) -> Tables:
    names = dict.fromkeys(name for one in tables for name in one)
    return {name: {k: v for one in tables for k, v in one.get(name, {}).items()} for name in names}


def refusal(hf: dict[str, Any], *tables: Tables) -> str | None:
    """Why a recipe with these tables is refused for a model; None: it is not."""
    plain: Tables = {
        "model": {"path": "model"},
        "data": {"source": "reasoning_gym", "train": "spell_backward"},
        "reward": {"kind": "reasoning_gym"},
    }
    try:
        check_composition(parse_recipe(merged(plain, *tables)), hf)
    except UserError as error:
        return str(error).removeprefix("the recipe is wrong:\n").strip()
    return None


def models() -> dict[str, dict[str, Any]]:
    """{family: settings of its tiny model}."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            (Path(folder) / "config.json").write_text(json.dumps(config_settings(family)))
            found[family] = read_hf_config(Path(folder))
    return found


def adapters(hf: dict[str, Any]) -> Tables:
    """``[actor.lora]`` with adapters beside all matrices that can have them."""
    names = {matrix.name.rpartition(".")[2] for n in range(hf["num_hidden_layers"]) for matrix in matrices(hf, n)}
    return {"actor": {"lora": {"rank": 4, "targets": sorted(names)}}}


def of_models(hf: dict[str, Any]) -> Iterator[tuple[str, str, bool, str | None]]:
    """(replay, layers, whether with adapters, refusal) of a family's model."""
    for replay, layers, lora in itertools.product(REPLAYS, LAYERS, (False, True)):
        tables = LAYERS[layers], adapters(hf) if lora else {}, {"actor": {"routing_replay": replay}}
        yield replay, layers, lora, refusal(hf, *tables)


def table(first: str, rows: Iterable[tuple[str, dict[str, str | None]]], reasons: list[str]) -> str:
    """A table with a row for all names whose cells are equal. rows: (name, {column: refusal})."""
    grouped: dict[tuple[str | None, ...], list[str]] = {}
    for name, cells in rows:
        grouped.setdefault(tuple(cells.values()), []).append(name)
        columns = list(cells)
    lines = [[first, *columns], ["---"] * (len(columns) + 1)]
    for refusals, names in grouped.items():
        for reason in refusals:
            if reason and reason not in reasons:
                reasons.append(reason)
        cells = ["yes" if reason is None else str(reasons.index(reason) + 1) for reason in refusals]
        lines.append(["; ".join(names), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def page() -> str:
    reasons: list[str] = []
    rows: dict[str, dict[str, dict[str, str | None]]] = {replay: {} for replay in REPLAYS}
    known = models()
    for family, hf in known.items():
        for replay, layers, lora, reason in of_models(hf):
            column = f"{layers}{', adapters' if lora else ''}"
            rows[replay].setdefault(f"`{family}`", {})[column] = reason
    first = "".join(
        f'\n`routing_replay = "{replay}"`\n\n{table("family", rows[replay].items(), reasons)}' for replay in REPLAYS
    )
    hf = known["qwen3_moe"]
    schedules = [(name, {p: refusal(hf, tables, PARTS[p]) for p in PARTS}) for name, tables in SCHEDULES.items()]
    second = table("schedule", schedules, reasons)
    cells = [c for of_family in rows.values() for row in of_family.values() for c in row.values()]
    cells += [cell for _, row in schedules for cell in row.values()]
    listed = "".join(f"{number}. {reason}\n" for number, reason in enumerate(reasons, 1))
    return (
        f"{HEAD}\n{cells.count(None)} of {len(cells)} combinations work, and all of these are compared.\n\n"
        "## Model family, layers, adapters, replay\n"
        f"{first}\n## Schedule\n\n{second}\n## Reasons\n\n{listed}"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
