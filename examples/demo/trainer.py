"""A trainer's side of the demo: plain HTTP, nothing of the service is imported."""

from dataclasses import dataclass, field
from typing import Any

import httpx

JSON = dict[str, Any]


class ServiceRefused(Exception):
    """The service answered with a problem; the message carries its code and detail."""


@dataclass
class Trainer:
    """Speak to the service with a token."""

    url: str
    token: str
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(
            base_url=f"{self.url}/api/v1",
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=90,
        )

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def call(self, method: str, path: str, body: JSON | None = None, key: str = "") -> Any:
        """Send one call and return its JSON, empty for 204. Raises ServiceRefused."""
        headers = {"Idempotency-Key": key} if key else {}
        answer = self.client.request(method, path, json=body, headers=headers)
        if answer.is_error:
            raise ServiceRefused(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json() if answer.content else {}

    def all_rollouts(self, experiment: str) -> list[JSON]:
        """Return every rollout of an experiment."""
        return self.all_pages(f"/rollouts/?experiment={experiment}&page_size=500")

    def all_pages(self, path: str) -> list[JSON]:
        """Return every row of a list, page by page."""
        found: list[JSON] = []
        while path:
            page = self.call("GET", path)
            found += page["results"]
            path = str(page.get("next") or "").removeprefix(f"{self.url}/api/v1")
        return found
