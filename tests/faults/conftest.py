"""Servers that things are done to, and the record of what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.record import Record
from tests.faults.victim import Victim

MakeVictim = Callable[..., Victim]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="where results go: a path without its ending")


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Record:
    """Written where `--record` says; `make test` only looks."""
    # The option is known only where this folder is named on the command line.
    return Record(request.config.getoption("record", default=None))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeVictim]:
    """Start a server; whatever is left of it in the end is ended."""
    victims: list[Victim] = []

    def make(
        *arguments: str, kind: type[Victim] = Victim, log: Path | None = None, **settings: Any
    ) -> Victim:
        log = log or tmp_path_factory.mktemp("victim") / "log"
        victims.append(kind(log, *arguments, **settings))
        return victims[-1]

    yield make
    for victim in victims:
        victim.destroy()
