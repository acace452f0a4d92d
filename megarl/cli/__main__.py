"""``python -m megarl.cli``: the command ``megarl`` without installing it."""

from megarl.cli import run

if __name__ == "__main__":
    run()
