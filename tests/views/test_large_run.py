"""The memory of `megarl samples`, `sql` and `audit` does not grow with the run.

benchmarks/large_run.py measures this on a million responses. Here the same script makes a small run in shards of 4 MB.
"""

import json
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.kernels.benchmark import load_benchmark

SHARDS, TOKENS = 16, 500  # shards of 1,000 responses each; mean tokens of a response
# prints each command's result and by how many bytes the resident set grew, with mapped files
MEASURE = """
import json, re, sys
from pathlib import Path
from megarl.views.audit import audit
from megarl.views.responses.select import Filter, decoder, select
from megarl.views.sql import query

root, sql = Path(sys.argv[1]), "select sum(list_sum(rollout_logprobs)) from responses"

def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def peak(call):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    result = call()
    return result, resident("VmHWM") - before

list(query(root, "select 1"))  # DuckDB itself
print(json.dumps([
    peak(lambda: len(list(select(root, Filter(reward=(2, 2)), decoder(root))))),
    peak(lambda: sum(len(one.response.tokens) for one in select(root, Filter(), decoder(root)))),
    peak(lambda: list(query(root, sql))[0].popitem()[1]),
    peak(lambda: audit(root, 0).problems),
]))
"""


@pytest.fixture(scope="module")
def large(tiny_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("large") / "run"
    return load_benchmark("large_run").make_run(root, tiny_model, SHARDS * 1000, TOKENS)


def test_memory_does_not_grow_with_the_run(large):
    sizes = [path.stat().st_size for path in large.stage(0).rollouts.glob("*.arrow")]
    assert len(sizes) == SHARDS and sum(sizes) > 60e6
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(large.root)]
    measured = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    results, grown = zip(*json.loads(measured.splitlines()[-1]), strict=True)
    assert results[0] == 0 and abs(results[1] / (SHARDS * 1000 * TOKENS) - 1) < 0.01 and results[2:] == (0, [])
    assert max(grown) < sum(sizes) / 2, grown
