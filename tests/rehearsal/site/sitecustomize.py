"""With this folder on ``PYTHONPATH``, an interpreter and all that it starts see the rehearsal device."""

import tests.rehearsal.hooks  # noqa: F401
