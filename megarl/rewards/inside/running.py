"""Runs in the program's sandbox: a benchmark's preamble, then the program as the main module.

As in LiveCodeBench's grader a program may exit with any status, and only its output counts.
"""

import contextlib

if __name__ == "__main__":
    with open("/box/preamble.py") as file:
        exec(compile(file.read(), "preamble.py", "exec"))
    with open("/box/program.py", encoding="utf-8", errors="surrogateescape") as file:
        program = file.read()
    with contextlib.suppress(SystemExit):
        exec(compile(program, "/box/program.py", "exec"))
