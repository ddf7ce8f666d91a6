"""The service itself behind a real ASGI server, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prorl_client import Client, Experiment

from tests import factories
from tests.api.callers import Caller
from tests.api.conftest import make_caller, trainer, trajectory_store
from tests.api.live import served
from tests.clients.conftest import PLAIN, QUICK

__all__ = ["make_caller", "trainer", "trajectory_store"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let all of them see what other connections committed."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.django_db(transaction=True))


@pytest.fixture
def address(transactional_db: None) -> Iterator[str]:
    with served() as url:
        yield url


@pytest.fixture
def client(address: str, trainer: Caller) -> Iterator[Client]:
    with Client(address, trainer.text, retries=QUICK, http_options=PLAIN) as client:
        yield client


@pytest.fixture
def experiment(client: Client, trainer: Caller) -> Experiment:
    """Return an experiment of the trainer's, with groups of two."""
    made = factories.make_experiment(owner=trainer.user, name="live")
    return client.experiment(str(made.pk))
