"""An operator's browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from django.contrib.auth import get_user_model
from django.contrib.messages import get_messages
from django.core.files.storage import storages
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse


class Operator:
    """Ask for admin pages and carry out actions, as a browser would."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def get(
        self, model: type, page: str = "changelist", pk: object = None, query: str = ""
    ) -> HttpResponse:
        return self.client.get(address(model, page, pk) + query)

    def post(
        self, model: type, page: str, data: dict[str, object], pk: object = None
    ) -> HttpResponse:
        return self.client.post(address(model, page, pk), data)

    def act(self, model: type, action: str, *rows: object) -> str:
        """Carry out an action on rows; return the message that the operator reads."""
        data = {"action": action, "_selected_action": [row.pk for row in rows]}
        answer = self.client.post(address(model, "changelist"), data)
        assert answer.status_code == 302, answer.content
        return messages_of(answer)[-1]


def address(model: type, page: str = "changelist", pk: object = None) -> str:
    meta = model._meta
    return reverse(f"admin:{meta.app_label}_{meta.model_name}_{page}", args=[pk] if pk else [])


def messages_of(answer: HttpResponse) -> list[str]:
    """Return the messages that an answer left for the next page."""
    return [str(message) for message in get_messages(answer.wsgi_request)]


@pytest.fixture
def operator(db: None, client: Client) -> Operator:
    user = get_user_model()(username="operator", is_staff=True, is_superuser=True)
    user.set_unusable_password()
    user.save()
    client.force_login(user)
    return Operator(client)


@pytest.fixture(autouse=True)
def trajectory_folder(tmp_path: Path, settings) -> Iterator[Path]:
    """Keep the trajectories of a test in a folder of its own; static files are not looked for."""
    folder = tmp_path / "trajectories"
    settings.MIDDLEWARE = [name for name in settings.MIDDLEWARE if "whitenoise" not in name]
    settings.STORAGES = {
        **settings.STORAGES,
        "trajectories": {
            "BACKEND": "rollouts.storage.SyncedFileStorage",
            "OPTIONS": {"location": str(folder)},
        },
    }
    yield folder
    storages._storages.clear()
