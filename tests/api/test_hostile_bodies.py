"""Whatever a field holds, the answer is a success or a refusal, never a fault of ours."""

import json
from typing import Any

import pytest

from tests import factories
from tests.api.callers import Caller

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, 10**400),
    *("", " ", "\0", "\ud800", "x" * 100_000, "²", "a@²", "a@" + "9" * 100, "'; --", "../../x"),
    *([], [[]], [None], ["\0"], {}, {"a": None}, {"\0": 1}, {"a": ["\ud800"]}, {"a": {"b": 1}}),
]
FIELDS = {
    "experiments/": [
        *("name", "policy", "task_sets", "group_size", "sampling", "budgets", "priority", "share"),
        *("max_attempts", "failure_reward", "feed", "mode", "feed_settings", "filters"),
        *("selection", "max_policy_lag", "on_policy_lag"),
    ],
    "experiments/{id}/rewind/": ["version", "force"],
    "evaluations/": [
        *("name", "policy", "task_sets", "samples_per_task", "seed", "key", "threshold"),
        *("sampling", "budgets"),
    ],
    "experiments/{id}/groups/": ["groups", "task", "task_ref", "inline", "samples", "metadata"],
    "experiments/{id}/batches/": ["groups", "wait_seconds"],
    "policies/": ["name", "model", "tokenizer", "context_tokens", "version"],
    "inference-servers/": ["policy", "url", "kind", "max_in_flight"],
    "inference-servers/clear/": ["policy"],
    "images/": ["name", "source"],
    "environments/": [
        *("name", "description", "image", "setup", "workdir", "agent", "agent_settings"),
        *("system_prompt", "tools", "network", "limits", "evaluator", "evaluator_settings"),
    ],
}
INLINE = ["environment", "instruction", "payload", "hidden", "metadata"]


def bodies(path: str, field: str, good: dict[str, Any]) -> list[Any]:
    made: list[Any] = [{**good, field: value} for value in VALUES]
    if path.endswith("groups/"):
        made = [body if field == "groups" else {"groups": [body]} for body in made]
    return made


@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, names in FIELDS.items() for field in names]
)
def test_field(operator: Caller, settings: Any, path: str, field: str) -> None:
    settings.BATCH_WAIT_LIMIT_SECONDS = 0.01
    operator.raise_request_exception = False
    experiment = factories.make_experiment(owner=operator.user)
    good = {
        "experiments/": {"name": "x", "policy": experiment.policy.name},
        "experiments/{id}/batches/": {"groups": 1},
        "experiments/{id}/rewind/": {"version": 3},
        "evaluations/": {
            "name": "x",
            "policy": experiment.policy.name,
            "task_sets": [factories.make_task().task_set.name],
        },
        "policies/": {"name": "p", "model": "m", "tokenizer": "t"},
        "inference-servers/": {"policy": experiment.policy.name, "url": "http://h:1"},
        "images/": {"name": "i", "source": "s"},
        "environments/": {"name": "e"},
    }.get(path, {})

    for body in bodies(path, field, good):
        response = operator.call("POST", path.format(id=experiment.pk), body)
        assert response.status_code < 500, json.dumps(body)[:200]


@pytest.mark.parametrize("pull", [False, True])
def test_what_is_inside_of_an_experiments_settings(operator: Caller, pull: bool) -> None:
    operator.raise_request_exception = False
    policy = factories.make_policy().name
    good = {"name": "x", "policy": policy, "task_sets": [factories.make_task().task_set.name]}
    inside = {
        "feed_settings": ["batch_groups", "seed", "shuffle", "epochs", "weights", "skip"],
        "selection": ["order", "unfinished", "replace_failed", "group_deadline_seconds"],
    }

    for value in VALUES:
        made: list[Any] = [
            *({name: {key: value}} for name, keys in inside.items() for key in keys),
            {"feed_settings": {"curriculum": {"low": value}}},
            {"feed_settings": {"weights": {"a": value}}},
            {"feed_settings": {"skip": [value]}},
            {"filters": [value]},
            {"filters": [{"rule": value}]},
            {"filters": [{"rule": "all_wrong", "key": value}]},
        ]
        for body in made:
            if pull:
                settings = {"batch_groups": 1, **body.get("feed_settings", {})}
                body = {**body, "feed": "pull", "feed_settings": settings}
            response = operator.call("POST", "experiments/", {**good, **body})
            assert response.status_code < 500, json.dumps(body)[:200]


@pytest.mark.parametrize("field", INLINE)
def test_field_of_an_inline_task(operator: Caller, field: str) -> None:
    operator.raise_request_exception = False
    experiment = factories.make_experiment(owner=operator.user)
    good = {"environment": factories.make_environment().name, "instruction": "x"}

    for value in VALUES:
        body = [{"inline": {**good, field: value}, "samples": 1}]
        response = operator.call("POST", f"experiments/{experiment.pk}/groups/", body)
        assert response.status_code < 500, json.dumps(body)[:200]


@pytest.mark.parametrize(
    "query",
    [
        *("state=%00", "failure_code=%00", "node=%ED%A0%80", "created_after=9999999"),
        *("created_before=0001-01-01T00:00:00Z", "page_size=-1", "page_size=9e9", "cursor=%00"),
        *("cursor=cD0yMDI2", "cursor=bz0tMQ==", "group=%F0%9F%92%A9"),
    ],
)
def test_parameter(trainer: Caller, query: str) -> None:
    trainer.raise_request_exception = False
    factories.make_rollout(
        group=factories.make_group(experiment=factories.make_experiment(owner=trainer.user))
    )

    assert trainer.call("GET", f"rollouts/?{query}").status_code < 500
