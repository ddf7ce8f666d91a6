"""Callers of the API, and a trajectory store of each test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import factories
from tests.api.callers import Caller


@pytest.fixture(autouse=True)
def trajectory_store(settings: Any, tmp_path: Path) -> Path:
    """Keep trajectories in a folder of this test."""
    folder = tmp_path / "trajectories"
    stores = {name: dict(store) for name, store in settings.STORAGES.items()}
    stores["trajectories"]["OPTIONS"] = {"location": str(folder)}
    settings.STORAGES = stores
    return folder


@pytest.fixture
def make_caller(db: None) -> Callable[..., Caller]:
    """Return a function that makes a caller with a token of its own."""

    def make(user: Any = None, **options: Any) -> Caller:
        user = user or factories.make_user()
        _token, text = factories.make_token(user, **options)
        return Caller(text, user)

    return make


@pytest.fixture
def trainer(make_caller: Callable[..., Caller]) -> Caller:
    """Return a trainer with the scopes of a trainer."""
    return make_caller()


@pytest.fixture
def stranger(make_caller: Callable[..., Caller]) -> Caller:
    """Return another trainer."""
    return make_caller()


@pytest.fixture
def operator(make_caller: Callable[..., Caller]) -> Caller:
    """Return an operator with every scope."""
    return make_caller(factories.make_operator(), scopes=["read", "submit", "policy", "operate"])


@pytest.fixture
def anybody(db: None) -> Caller:
    """Return a caller without a token."""
    return Caller()
