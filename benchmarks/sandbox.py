"""Programs per minute that the sandbox runs and judges on this machine's processors, and processor time per program.

The programs: Python with one pair of input and output; Python with assertions (two sandboxes each); C++ (compiled, then
run) with ``<iostream>``, with ``<bits/stdc++.h>`` and with templates of it; and ``/bin/true``, which shows the cost of
the sandbox itself. ``--plain``: C++ without precompiled headers.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from megarl.data.prompts import Prompt
from megarl.recipe.tables import RewardTable
from megarl.rewards.code import Code
from megarl.rewards.cpp import make_headers
from megarl.rewards.sandbox import Program, check_sandbox, run

PAIR = {"tests": [{"input": "1 2\n", "output": "3\n"}]}
ADD = "print(sum(map(int, input().split())))"
ASSERTIONS = {"tests": "assert add(1, 2) == 3\nassert add(3, 4) == 7"}
CPP = "#include <{}>\nint main() {{ int a, b; std::cin >> a >> b; std::cout << a + b; }}"
SORTING = """#include <bits/stdc++.h>
using namespace std;
int main() {
  map<int, int> counts;
  vector<int> all;
  for (int x; cin >> x;) { counts[x]++; all.push_back(x); }
  sort(all.begin(), all.end());
  cout << accumulate(all.begin(), all.end(), 0) + (int)counts.size() - 2;
}
"""


def judge(columns: dict[str, object], program: str, language: str = "python") -> Callable[[], None]:
    """A function that judges ``program``, which must be right, once."""
    verifier = Code(RewardTable(kind="code", language=language))  # type: ignore[arg-type]
    prompt = Prompt(0, "?", (1,), "", {"metadata": columns})

    def once() -> None:
        assert verifier.score(prompt, program).value == 1

    return once


def nothing() -> None:
    assert run(Program(("/bin/true",), {})).succeeded


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    check_sandbox()
    if arguments.plain:
        os.environ["MEGARL_CACHE"] = "/nowhere"
    else:
        make_headers()
    few = max(1, arguments.programs // 10)
    cores = len(os.sched_getaffinity(0))
    kinds = {
        "no program": (nothing, arguments.programs),
        "Python, input and output": (judge(PAIR, ADD), arguments.programs),
        "Python, assertions": (judge(ASSERTIONS, "def add(a, b): return a + b"), arguments.programs),
        "C++, <iostream>": (judge(PAIR, CPP.format("iostream"), "cpp"), few),
        "C++, <bits/stdc++.h>": (judge(PAIR, CPP.format("bits/stdc++.h"), "cpp"), few),
        "C++, map, vector and sort": (judge(PAIR, SORTING, "cpp"), few),
    }
    print(f"{'kind':<28}{'programs/minute':>18}{'CPU ms each':>14}{'at full use of ' + str(cores) + ' cores':>28}")
    for name, (once, count) in kinds.items():
        start, cpu = time.monotonic(), cpu_seconds()
        with ThreadPoolExecutor(cores) as threads:
            for future in [threads.submit(once) for _ in range(count)]:
                future.result()
        seconds, cpu = time.monotonic() - start, cpu_seconds() - cpu
        print(f"{name:<28}{60 * count / seconds:>18.0f}{1000 * cpu / count:>14.1f}{60 * cores * count / cpu:>28.0f}")


if __name__ == "__main__":
    main()
