"""As of runtime."""

from tests.runtime.conftest import pool as pool
