"""Updates of a policy's weights as a context manager."""

from __future__ import annotations

from typing import Any

import pytest
from prorl_client import Client, Conflict, Policy, WaitTimedOut

from tests.clients.scripted import BROKEN, Reply, Scripted, page, problem

UPDATES = "/policies/p1/updates/"
UPDATE, COMPLETE, ABANDON = f"{UPDATES}2/", f"{UPDATES}2/complete/", f"{UPDATES}2/abandon/"
POLICY = {"id": "p1", "name": "tiny", "model": "m", "version": 3}


def update(state: str, **values: Any) -> Reply:
    body = {
        "id": "u2",
        "policy": "p1",
        "number": 2,
        "from_version": 3,
        "to_version": 4,
        "mode": "abort",
        "state": state,
        "detail": "",
        "servers": [],
        **values,
    }
    return Reply(202 if state == "quiescing" else 200, body)


@pytest.fixture
def policy(service: Scripted, client: Client) -> Policy:
    service.on("GET", "/policies/p1/", Reply(body=POLICY))
    service.on("POST", UPDATES, update("quiescing"))
    service.on("GET", UPDATE, update("ready"))
    service.on("POST", COMPLETE, update("completed"))
    service.on("POST", ABANDON, update("abandoned"))
    return client.policy("p1")


def test_update_waits_until_it_is_ready_and_completes(service: Scripted, policy: Policy) -> None:
    service.on("POST", UPDATES, BROKEN, update("quiescing"))
    service.on("GET", UPDATE, update("quiescing"), BROKEN, update("ready"))
    service.on("POST", COMPLETE, BROKEN, update("completed"))

    with policy.update(4, mode="drain-calls") as held:
        assert (held.state, held.to_version) == ("ready", 4)
        assert service.calls("POST", COMPLETE) == []

    begun = service.calls("POST", UPDATES)
    assert begun[0].body == {"version": 4, "mode": "drain-calls", "control": False}
    assert begun[0].key == begun[1].key
    assert begun[0].key
    assert len(service.calls("POST", COMPLETE)) == 2
    assert service.calls("POST", ABANDON) == []


def test_update_is_abandoned_when_the_body_fails(service: Scripted, policy: Policy) -> None:
    with pytest.raises(ValueError, match="no weights"), policy.update(4):
        raise ValueError("no weights")

    assert [each.body for each in service.calls("POST", ABANDON)] == [
        {"detail": "ValueError: no weights"}
    ]
    assert service.calls("POST", COMPLETE) == []


def test_interrupted_update_is_abandoned(service: Scripted, policy: Policy) -> None:
    with pytest.raises(KeyboardInterrupt), policy.update(4):
        raise KeyboardInterrupt

    assert len(service.calls("POST", ABANDON)) == 1


def test_first_fault_is_seen_when_abandoning_fails_too(service: Scripted, policy: Policy) -> None:
    service.on("POST", ABANDON, problem(500, "server.error"))

    with pytest.raises(ZeroDivisionError), policy.update(4):
        raise ZeroDivisionError


def test_update_that_does_not_become_ready_is_abandoned(service: Scripted, policy: Policy) -> None:
    service.on("POST", UPDATES, update("quiescing", detail="3 generations are under way."))

    with pytest.raises(WaitTimedOut, match="3 generations"), policy.update(4, ready_timeout=0):
        pytest.fail("the body must not run")

    assert len(service.calls("POST", ABANDON)) == 1


def test_update_that_somebody_ended_meanwhile(service: Scripted, policy: Policy) -> None:
    service.on("GET", UPDATE, update("abandoned", detail="Timed out."))
    service.on("POST", ABANDON, problem(409, "policy.update_ended"))

    with pytest.raises(Conflict, match=r"was abandoned: Timed out\."), policy.update(4):
        pytest.fail("the body must not run")


def test_completing_insists_while_servers_still_load(service: Scripted, policy: Policy) -> None:
    mismatch = problem(409, "policy.version_mismatch", "a: 3")
    service.on("POST", COMPLETE, mismatch, mismatch, update("completed"))

    with policy.update(4):
        pass

    assert len(service.calls("POST", COMPLETE)) == 3
    assert service.calls("POST", ABANDON) == []


def test_update_is_abandoned_when_a_server_stays_behind(service: Scripted, policy: Policy) -> None:
    service.on("POST", COMPLETE, problem(409, "policy.version_mismatch", "a: 3"))

    with pytest.raises(Conflict, match="remove the server"), policy.update(4, complete_timeout=0):
        pass

    assert len(service.calls("POST", ABANDON)) == 1


def test_second_update_is_refused_and_the_first_left_alone(
    service: Scripted, policy: Policy
) -> None:
    service.on("POST", UPDATES, problem(409, "policy.update_open"))

    with pytest.raises(Conflict, match="Complete or abandon"), policy.update(4):
        pytest.fail("the body must not run")

    assert service.calls("POST", ABANDON) == []


def test_policy_is_found_by_its_name(service: Scripted, client: Client) -> None:
    service.on("GET", "/policies/", page({**POLICY, "name": "other"}, POLICY))

    assert client.policy("tiny").id == "p1"


def test_servers(service: Scripted, client: Client) -> None:
    row = {"id": "s1", "policy": "tiny", "url": "http://a", "kind": "vllm", "state": "active"}
    service.on("GET", "/inference-servers/", page(row))
    service.on("POST", "/inference-servers/", BROKEN, Reply(201, row))
    service.on("DELETE", "/inference-servers/s1/", Reply(204))
    service.on("POST", "/inference-servers/clear/", Reply(body={"removed": 2}))

    assert [each.url for each in client.servers(policy="tiny")] == ["http://a"]
    assert client.add_server("tiny", "http://a", kind="vllm").id == "s1"
    client.remove_server("s1")
    assert client.clear_servers("tiny") == 2
    sent = service.calls("POST", "/inference-servers/")
    assert sent[0].key == sent[1].key
    assert sent[0].key
