"""The command line for the tests of `llmq-nb plan`: imported once, forked for each call."""

from collections.abc import Iterator

import pytest

from tests.e2e.runs import Cli


@pytest.fixture(scope="module")
def cli() -> Iterator[Cli]:
    server = Cli()
    yield server
    server.close()
