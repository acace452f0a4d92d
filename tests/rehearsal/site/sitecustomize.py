"""On ``PYTHONPATH``: this interpreter, and every one that it starts, sees the rehearsal device."""

import tests.rehearsal.hooks  # noqa: F401
