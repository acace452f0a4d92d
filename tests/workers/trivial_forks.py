"""A warm process that imports nothing, and prints to the file FORKS_LOG."""

import os
import sys
from multiprocessing.connection import Connection

from megarl.workers.warm import Imports, serve

if __name__ == "__main__":
    os.dup2(os.open(os.environ["FORKS_LOG"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    serve(Connection(int(sys.argv[1])), Imports(iter(())))
