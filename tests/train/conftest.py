"""The command line of the end-to-end tests, for tests of what a run writes."""

from tests.e2e.conftest import cli

__all__ = ["cli"]
