"""The command line for all end-to-end tests: imported once, forked for each call."""

from collections.abc import Iterator

import pytest

from tests.e2e.runs import Cli


@pytest.fixture(scope="session")
def cli() -> Iterator[Cli]:
    server = Cli()
    yield server
    server.close()
