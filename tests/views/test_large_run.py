"""The memory of `megarl samples`, `sql` and `audit` does not grow with the run.

benchmarks/large_run.py measures this on a million responses. Here the same script makes a small run in shards of 4 MB.
"""

import multiprocessing

from megarl.views.audit import audit
from megarl.views.responses.select import Filter, decoder, select
from megarl.views.sql import query
from tests.helpers import peak_memory
from tests.kernels.benchmark import load_benchmark

SHARDS, TOKENS = 16, 500  # shards of 1,000 responses each; mean tokens of a response


def measure(root):
    list(query(root, "select 1"))  # DuckDB itself
    return [
        peak_memory(lambda: len(list(select(root, Filter(reward=(2, 2)), decoder(root))))),
        peak_memory(lambda: sum(len(one.response.tokens) for one in select(root, Filter(), decoder(root)))),
        peak_memory(lambda: list(query(root, "select sum(list_sum(rollout_logprobs)) as total from responses"))),
        peak_memory(lambda: audit(root, 0).problems),
    ]


def test_memory_does_not_grow_with_the_run(tiny_model, tmp_path):
    large = load_benchmark("large_run").make_run(tmp_path / "run", tiny_model, SHARDS * 1000, TOKENS)
    sizes = [path.stat().st_size for path in large.stage(0).rollouts.glob("*.arrow")]
    assert len(sizes) == SHARDS and sum(sizes) > 60e6
    with multiprocessing.get_context("spawn").Pool(1) as process:
        results, grown = zip(*process.apply(measure, (large.root,)), strict=True)
    assert results[0] == 0 and abs(results[1] / (SHARDS * 1000 * TOKENS) - 1) < 0.01
    assert results[2:] == ([{"total": 0}], [])
    assert max(grown) < sum(sizes) / 2, grown
