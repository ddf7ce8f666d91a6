"""The published contract."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.conf import settings
from django.core.management import call_command

from tests.api.callers import Caller, assert_problem

COMMITTED = Path(settings.BASE_DIR) / "docs" / "openapi.yaml"


@pytest.fixture(scope="module")
def generated() -> str:
    out = StringIO()
    call_command("spectacular", "--validate", "--fail-on-warn", stdout=out)
    return out.getvalue()


def test_committed_file_is_what_the_code_says(generated: str) -> None:
    assert COMMITTED.read_text().strip() == generated.strip(), (
        "run: python manage.py spectacular --validate --fail-on-warn --file docs/openapi.yaml"
    )


def test_every_creating_call_takes_an_idempotency_key(generated: str) -> None:
    calls = yaml.safe_load(generated)["paths"]
    takers = {
        path
        for path, methods in calls.items()
        if any(
            each["name"] == "Idempotency-Key"
            for each in methods.get("post", {}).get("parameters", [])
        )
    }

    assert takers == {
        f"/api/v1/{path}/"
        for path in (
            *("experiments", "experiments/{experiment_id}/groups", "policies", "environments"),
            *("experiments/{experiment_id}/batches", "inference-servers", "images"),
            *("rollouts/{rollout_id}/snapshots", "policies/{policy_id}/updates", "evaluations"),
            *("experiments/{experiment_id}/webhooks", "experiments/{experiment_id}/reevaluations"),
            *("environments/import", "environments/{environment_id}/verifications"),
        )
    }


def test_every_call_may_answer_with_a_problem(generated: str) -> None:
    paths: dict[str, Any] = yaml.safe_load(generated)["paths"]
    for methods in paths.values():
        for call in methods.values():
            assert "application/problem+json" in call["responses"]["default"]["content"]


def test_schema_and_its_page_need_a_login(anybody: Caller, trainer: Caller) -> None:
    for path in ("schema/", "docs/"):
        assert_problem(anybody.call("GET", path), 401, "auth.missing")
    assert trainer.call("GET", "schema/").status_code == 200
    page = trainer.call("GET", "docs/")
    assert (page.status_code, page["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"swagger-ui" in page.content
