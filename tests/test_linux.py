"""Forks."""

import os
import threading
import warnings

from megarl.linux import fork


def test_a_fork_of_a_process_with_threads_prints_no_warning():
    """Python 3.12 and newer would warn."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not (pid := fork()):
            os._exit(0)
    end.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0 and not caught
