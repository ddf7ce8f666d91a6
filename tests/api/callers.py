"""A client of the API, and what every refusal looks like."""

import json
from typing import Any

from rest_framework.test import APIClient


class Caller(APIClient):
    """A client that sends JSON below the API's prefix, as one user with one token."""

    def __init__(self, text: str = "", user: Any = None) -> None:
        super().__init__()
        self.text = text
        self.user = user
        if text:
            self.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Send one request; header names are written as in HTTP, with `_` for `-`."""
        return self.generic(
            method,
            path if path.startswith("/") else f"/api/v1/{path}",
            self._body(body),
            content_type="application/json",
            headers={name.replace("_", "-"): value for name, value in headers.items()},
        )

    def _body(self, body: Any) -> Any:
        if body is None or isinstance(body, bytes):
            return body or b""
        return json.dumps(body).encode()


def assert_problem(response: Any, status: int, code: str) -> dict[str, Any]:
    """Assert that a response is a problem with this status and code; return its members."""
    assert response.status_code == status, response.content
    assert response["Content-Type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert body["code"] == code
    assert body["type"] == f"urn:prorl:problem:{code}"
    assert body["title"]
    assert body["detail"]
    return body
