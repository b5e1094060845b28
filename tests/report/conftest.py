"""The command line, for tests of what it writes."""

from tests.e2e.conftest import cli

__all__ = ["cli"]
