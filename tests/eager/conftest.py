"""As of loops."""

from tests.loops.conftest import pool as pool
