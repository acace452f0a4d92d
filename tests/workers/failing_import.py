"""A warm process, one of whose imports fails as soon as the file FAILS_WHEN exists."""

import os
import sys
from multiprocessing.connection import Connection

from megarl.workers.warm import Imports, serve


def fails():
    while not os.path.exists(os.environ["FAILS_WHEN"]):
        yield
    raise ImportError


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), Imports(fails()))
