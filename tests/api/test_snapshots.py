"""Snapshots over HTTP: ask, look, start groups from them, delete."""

from typing import Any
from uuid import uuid4

import pytest
from django.utils import timezone

from rollouts.models import Group, JournalEntry, Rollout
from sandboxes.models import Snapshot
from tests import factories
from tests.api.callers import Caller, assert_problem


@pytest.fixture
def rollout(trainer: Caller) -> Rollout:
    """Return a queued rollout of the trainer, whose environment has a sandbox."""
    return make_rollout(trainer)


def make_rollout(caller: Caller, **columns: Any) -> Rollout:
    environment = factories.make_environment(image=factories.make_image())
    group = factories.make_group(
        experiment=factories.make_experiment(owner=caller.user),
        task=factories.make_task(environment=environment),
    )
    return factories.make_rollout(group=group, **{"needs_sandbox": True, **columns})


def make_snapshot(rollout: Rollout, **columns: Any) -> Snapshot:
    """Return a snapshot that was taken of a rollout's sandbox."""
    return Snapshot.objects.create(
        **{
            "owner": rollout.pk,
            "environment": rollout.environment,
            "state": "ready",
            "turn": 2,
            "node": factories.make_node(),
            "layers": ["layer-" + "1" * 32],
            "workdir": "/app",
            "ready_at": timezone.now(),
            **columns,
        }
    )


def shown(snapshot: Snapshot) -> dict[str, Any]:
    def moment(at: Any) -> str | None:
        return at and at.isoformat().replace("+00:00", "Z")

    return {
        "id": str(snapshot.pk),
        "rollout": str(snapshot.owner),
        "environment": snapshot.environment.ref,
        "turn": snapshot.turn,
        "state": snapshot.state,
        "node": snapshot.node and snapshot.node.name,
        "workdir": snapshot.workdir,
        "detail": snapshot.detail,
        "created_at": moment(snapshot.created_at),
        "ready_at": moment(snapshot.ready_at),
    }


def everything() -> list[Any]:
    return [list(model.objects.order_by("pk").values()) for model in (Snapshot, Group, Rollout)]


@pytest.mark.parametrize(("body", "turn"), [({}, None), ({"turn": 3}, 3), (None, None)])
def test_ask_for_the_state_after_a_turn_or_the_next(
    trainer: Caller, rollout: Rollout, body: Any, turn: int | None
) -> None:
    response = trainer.call("POST", f"rollouts/{rollout.pk}/snapshots/", body)

    assert response.status_code == 202
    snapshot = Snapshot.objects.get()
    assert (snapshot.owner, snapshot.turn, snapshot.state) == (rollout.pk, turn, "requested")
    assert snapshot.environment == rollout.environment
    assert response.json() == shown(snapshot)


def test_the_same_key_asks_once(trainer: Caller, rollout: Rollout) -> None:
    path = f"rollouts/{rollout.pk}/snapshots/"

    first = trainer.call("POST", path, {"turn": 1}, Idempotency_Key="key")
    again = trainer.call("POST", path, {"turn": 1}, Idempotency_Key="key")
    other = trainer.call("POST", path, {"turn": 2}, Idempotency_Key="key")

    assert (again.status_code, again.json()) == (202, first.json())
    assert again["Idempotency-Replayed"] == "true"
    assert_problem(other, 422, "idempotency.conflict")
    assert [str(each.pk) for each in Snapshot.objects.all()] == [first.json()["id"]]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"turn": 0}, "turn"),
        ({"turn": 2**31}, "turn"),
        ({"turn": "soon"}, "turn"),
        ({"turn": None}, "turn"),
        ({"after": 1}, "after"),
    ],
)
def test_what_is_no_turn_is_refused(
    trainer: Caller, rollout: Rollout, body: Any, field: str
) -> None:
    response = trainer.call("POST", f"rollouts/{rollout.pk}/snapshots/", body)

    assert list(assert_problem(response, 400, "request.invalid")["errors"]) == [field]
    assert not Snapshot.objects.exists()


def test_what_can_no_longer_come_is_refused(trainer: Caller, rollout: Rollout) -> None:
    attempt = factories.make_attempt(rollout=rollout)
    JournalEntry.objects.create(
        rollout=rollout, attempt=attempt, restarts=0, turn=0, kind="observed", body={}
    )
    over = factories.make_scored_rollout(group=rollout.group, needs_sandbox=True)
    plain = factories.make_rollout(group=rollout.group)

    answers = [
        trainer.call("POST", f"rollouts/{each.pk}/snapshots/", {"turn": 1})
        for each in (rollout, over, plain)
    ]

    assert_problem(answers[0], 409, "snapshot.too_late")
    assert_problem(answers[1], 409, "snapshot.too_late")
    assert_problem(answers[2], 409, "snapshot.no_sandbox")
    assert not Snapshot.objects.exists()


def test_a_rollouts_snapshots_are_listed_newest_first(trainer: Caller, rollout: Rollout) -> None:
    older = make_snapshot(rollout)
    newer = make_snapshot(rollout, state="failed", detail="sandbox.gone: it ended")
    make_snapshot(make_rollout(trainer))

    listed = trainer.call("GET", f"rollouts/{rollout.pk}/snapshots/")

    assert listed.status_code == 200
    assert listed.json() == [shown(newer), shown(older)]
    assert trainer.call("GET", f"snapshots/{older.pk}/").json() == shown(older)
    assert b"layer-" not in listed.content


def test_a_snapshot_is_deleted_once(trainer: Caller, rollout: Rollout) -> None:
    taken, kept = make_snapshot(rollout), make_snapshot(rollout)
    path = f"snapshots/{taken.pk}/"

    response = trainer.call("DELETE", path)

    assert (response.status_code, response.content) == (204, b"")
    assert list(Snapshot.objects.all()) == [kept]
    assert_problem(trainer.call("DELETE", path), 404, "not_found")


def test_a_group_starts_from_a_snapshot_which_then_stays(trainer: Caller, rollout: Rollout) -> None:
    snapshot = make_snapshot(rollout)
    body = [{"task": str(rollout.group.task_id), "samples": 2, "snapshot": str(snapshot.pk)}]

    response = trainer.call("POST", f"experiments/{rollout.experiment_id}/groups/", body)

    assert response.status_code == 202
    (made,) = response.json()["groups"]
    assert Group.objects.get(pk=made["id"]).snapshot == snapshot
    assert trainer.call("GET", f"groups/{made['id']}/").json()["snapshot"] == str(snapshot.pk)
    before = everything()
    assert_problem(trainer.call("DELETE", f"snapshots/{snapshot.pk}/"), 409, "snapshot.in_use")
    assert everything() == before


def test_another_trainers_snapshot_starts_no_group(
    trainer: Caller, stranger: Caller, rollout: Rollout
) -> None:
    snapshot = make_snapshot(rollout)
    own = factories.make_experiment(owner=stranger.user, task_sets=[rollout.group.task.task_set])
    before = everything()
    for chosen in (str(snapshot.pk), str(uuid4())):
        body = [{"task": str(rollout.group.task_id), "samples": 1, "snapshot": chosen}]

        response = stranger.call("POST", f"experiments/{own.pk}/groups/", body)

        problem = assert_problem(response, 400, "snapshot.unknown")
        assert problem["detail"] == f"groups[0]: there is no snapshot {chosen} that is ready."
    assert everything() == before


CALLS = [
    ("GET", "rollouts/{rollout}/snapshots/"),
    ("POST", "rollouts/{rollout}/snapshots/"),
    ("GET", "snapshots/{snapshot}/"),
    ("DELETE", "snapshots/{snapshot}/"),
]


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_another_trainers_snapshots_are_not_there(
    trainer: Caller,
    stranger: Caller,
    make_caller: Any,
    operator: Caller,
    rollout: Rollout,
    method: str,
    path: str,
) -> None:
    path = path.format(rollout=rollout.pk, snapshot=make_snapshot(rollout).pk)
    other = factories.make_experiment(owner=trainer.user)
    bound_elsewhere = make_caller(trainer.user, experiments=[other])
    before = everything()

    for caller in (stranger, bound_elsewhere):
        assert_problem(caller.call(method, path), 404, "not_found")
    assert everything() == before

    bound_here = make_caller(trainer.user, experiments=[rollout.experiment])
    assert bound_here.call(method, path).status_code < 300
    if method == "GET":
        assert operator.call(method, path).status_code == 200


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_reading_and_writing_need_their_scopes(
    trainer: Caller,
    anybody: Caller,
    make_caller: Any,
    rollout: Rollout,
    method: str,
    path: str,
) -> None:
    path = path.format(rollout=rollout.pk, snapshot=make_snapshot(rollout).pk)
    needed = "read" if method == "GET" else "submit"
    lacking = [scope for scope in ("read", "submit", "policy") if scope != needed]
    before = everything()

    assert_problem(anybody.call(method, path), 401, "auth.missing")
    refused = make_caller(trainer.user, scopes=lacking).call(method, path)
    assert_problem(refused, 403, "auth.forbidden")
    assert everything() == before

    assert make_caller(trainer.user, scopes=[needed]).call(method, path).status_code < 300


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_not_there(trainer: Caller, method: str) -> None:
    assert_problem(trainer.call(method, f"rollouts/{uuid4()}/snapshots/"), 404, "not_found")
    assert_problem(trainer.call("GET", f"snapshots/{uuid4()}/"), 404, "not_found")
    assert_problem(trainer.call("DELETE", f"snapshots/{uuid4()}/"), 404, "not_found")
    assert_problem(trainer.call("GET", "snapshots/1/"), 404, "not_found")
