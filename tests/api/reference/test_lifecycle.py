"""Start, stop, status, servers, cancelling; who may call; what is refused."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.checks import run_checks
from django.test import RequestFactory

from rollouts.api.reference.authentication import NamedAccountAuthentication
from rollouts.models import Experiment, InferenceServer, Policy, Rollout
from rollouts.states import Outcome, RolloutState, ServerState
from tests import factories
from tests.api.callers import Caller
from tests.api.live import eventually, served
from tests.api.reference.jobs import finish, write_surface

JOB = {"instance": {"instruction": "Do it."}, "sampling_params": {}}
NOT_RUNNING = {
    "detail": "Server is not running. Please start the server first.",
    "code": "reference.not_running",
}


@pytest.fixture
def policy(trainer: Caller) -> Policy:
    return factories.make_policy(owner=trainer.user)


@pytest.fixture
def surface(settings: Any, tmp_path: Path, policy: Policy) -> dict[str, Any]:
    """Serve the surface; data source `task` is a task of a set, all others are inline."""
    environment = factories.make_environment()
    task_set = factories.make_task_set()
    factories.make_task(task_set=task_set, ref="t-1")
    values: dict[str, Any] = {
        "data_sources": {
            "task": {"task_set": task_set.name},
            "*": {"environment": environment.name},
        }
    }
    settings.REFERENCE_SURFACE = write_surface(tmp_path, policy, **values)
    return values


def test_it_is_not_served_unless_it_is_set(trainer: Caller) -> None:
    response = trainer.call("POST", "/start")
    assert response.status_code == 404
    assert not Experiment.objects.exists()


def test_it_is_started_once_and_stopped_once(trainer: Caller, surface: Any) -> None:
    stopped = trainer.call("POST", "/stop")
    assert (stopped.status_code, stopped.json()) == (503, NOT_RUNNING)

    for _round in range(2):
        started = trainer.call("POST", "/start")
        assert started.json() == {"status": "Server started successfully"}
        again = trainer.call("POST", "/start")
        assert again.status_code == 400
        assert again.json() == {"detail": "Server is already running", "code": "reference.running"}
        stopped = trainer.call("POST", "/stop")
        assert stopped.json() == {"status": "Server stopped successfully"}

    for method, path in (("POST", "/process"), ("POST", "/cancel"), ("GET", "/status")):
        refused = trainer.call(method, path, {} if method == "POST" else None)
        assert (refused.status_code, refused.json()) == (503, NOT_RUNNING)
    assert Experiment.objects.count() == 1


def test_servers_are_added_before_and_after_the_start_and_cleared(
    trainer: Caller, surface: Any, policy: Policy
) -> None:
    address = "http://10.0.0.7:8000/v1"

    first = trainer.call("POST", "/add_llm_server", {"address": address})
    assert first.json() == {"status": f"Buffered LLM server address: {address}"}
    trainer.call("POST", "/start")
    second = trainer.call("POST", "/add_llm_server", {"address": address})
    assert second.json() == {"status": f"Added LLM server address: {address}"}

    server = InferenceServer.objects.get()
    assert (server.policy, server.url, server.kind) == (policy, "http://10.0.0.7:8000", "vllm")
    cleared = trainer.call("POST", "/clear_llm_server")
    assert cleared.json() == {"status": "Cleared all LLM server addresses"}
    server.refresh_from_db()
    assert server.state == ServerState.REMOVED


@pytest.mark.parametrize(
    "address", ["10.0.0.7:8000", "file:///etc/passwd", "http://user:word@host", ""]
)
def test_what_is_no_address_is_refused(trainer: Caller, surface: Any, address: str) -> None:
    response = trainer.call("POST", "/add_llm_server", {"address": address})
    assert response.status_code in (400, 422)
    assert not InferenceServer.objects.exists()


def test_a_job_needs_a_server_and_a_known_data_source(
    trainer: Caller, surface: Any, settings: Any, tmp_path: Path, policy: Policy
) -> None:
    trainer.call("POST", "/start")
    response = trainer.call("POST", "/process", JOB)
    assert response.status_code == 503
    assert response.json()["code"] == "reference.no_servers"

    factories.make_server(policy=policy)
    surface["data_sources"].pop("*")
    settings.REFERENCE_SURFACE = write_surface(tmp_path, policy, **surface)
    unknown = trainer.call("POST", "/process", JOB)
    assert unknown.status_code == 400
    assert unknown.json() == {
        "detail": "Invalid dataset type or function not registered: "
        "Dataset type swebench is not registered",
        "code": "reference.data_source",
    }
    missing = trainer.call(
        "POST", "/process", {**JOB, "instance": {"data_source": "task", "instance_id": "t-2"}}
    )
    assert (missing.status_code, missing.json()["code"]) == (400, "task.unknown")
    assert not Rollout.objects.exists()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"instance": [], "sampling_params": {}}, 422),
        ({"instance": {}, "sampling_params": "x"}, 422),
        ({**JOB, "job_id": {}}, 422),
        ({**JOB, "sampling_params": {"temperature": "hot"}}, 400),
        ({**JOB, "sampling_params": {"top_p": 0}}, 400),
        ({**JOB, "sampling_params": {"max_iterations": 1e9}}, 400),
        ({**JOB, "sampling_params": {"token_level_generation": 1}}, 400),
        ({**JOB, "sampling_params": {"model": 7}}, 400),
        ({**JOB, "instance": {}}, 400),
        ({**JOB, "instance": {"instruction": {"not": "text"}}}, 400),
        ({**JOB, "instance": {"instruction": "x", "data_source": []}}, 400),
        (b'{"instance": {"instruction": "a\\u0000"}, "sampling_params": {}}', 400),
        (b"[", 400),
    ],
)
def test_a_wrong_body_starts_nothing(
    trainer: Caller, surface: Any, policy: Policy, body: Any, status: int
) -> None:
    factories.make_server(policy=policy)
    trainer.call("POST", "/start")
    response = trainer.call("POST", "/process", body)
    assert response.status_code == status, response.content
    assert set(response.json()) == {"detail", "code"}
    assert not Rollout.objects.exists()


def test_scopes_and_bindings_of_tokens_hold(
    make_caller: Any, trainer: Caller, surface: Any
) -> None:
    reader = make_caller(trainer.user, scopes=["read"])
    assert reader.call("POST", "/start").status_code == 403
    submitter = make_caller(trainer.user, scopes=["read", "submit"])
    assert submitter.call("POST", "/clear_llm_server").status_code == 403
    bound = make_caller(trainer.user, experiments=[factories.make_experiment(owner=trainer.user)])
    assert bound.call("POST", "/start").status_code == 403
    assert Caller().call("POST", "/start").status_code == 401
    assert Experiment.objects.count() == 1


def test_another_trainer_neither_sees_nor_stops_it(
    trainer: Caller, stranger: Caller, surface: Any
) -> None:
    trainer.call("POST", "/start")
    assert stranger.call("GET", "/status").status_code == 503
    assert stranger.call("POST", "/stop").status_code == 503
    assert stranger.call("POST", "/start").status_code == 400  # the policy is another's
    assert trainer.call("GET", "/status").status_code == 200


def test_calls_without_a_token_are_the_named_accounts_from_its_networks_alone(
    settings: Any, tmp_path: Path, policy: Policy, surface: Any, trainer: Caller
) -> None:
    account = trainer.user.username
    settings.REFERENCE_SURFACE = write_surface(tmp_path, policy, **surface, account=account)
    nobody = Caller()

    assert nobody.call("POST", "/start").status_code == 200
    assert Experiment.objects.get().owner == trainer.user
    for name in ("X_Forwarded_For", "Forwarded", "Via", "X_Real_IP", "Origin"):
        assert nobody.call("GET", "/status", **{name: "127.0.0.1"}).status_code == 401
    outside = nobody.generic("GET", "/status", REMOTE_ADDR="10.1.2.3")
    assert outside.status_code == 401
    wrong = Caller("0" * 64)
    assert wrong.call("GET", "/status").status_code == 401
    # The rest of the service still wants a token.
    assert nobody.call("GET", "experiments/").status_code == 401


def test_an_account_that_is_gone_is_refused(
    settings: Any, tmp_path: Path, policy: Policy, surface: Any
) -> None:
    settings.REFERENCE_SURFACE = write_surface(tmp_path, policy, **surface, account="gone")
    assert Caller().call("POST", "/start").status_code == 401
    assert not Experiment.objects.exists()


def test_without_an_account_no_address_is_trusted(surface: Any) -> None:
    request: Any = RequestFactory().get("/status")
    assert NamedAccountAuthentication().authenticate(request) is None


def test_the_checks_warn_of_calls_without_a_token_and_refuse_a_wrong_file(
    settings: Any, tmp_path: Path, policy: Policy, surface: Any
) -> None:
    def found() -> list[str]:
        return [each.id for each in run_checks() if each.id in ("rollouts.W021", "rollouts.E020")]

    assert found() == []
    settings.REFERENCE_SURFACE = write_surface(tmp_path, policy, **surface, account="x")
    assert found() == ["rollouts.W021"]
    settings.REFERENCE_SURFACE = str(tmp_path / "missing.toml")
    assert found() == ["rollouts.E020"]


@pytest.mark.django_db(transaction=True)
class TestWaiting:
    """Jobs that somebody waits for, over HTTP."""

    @pytest.fixture
    def client(self, transactional_db: None, trainer: Caller, policy: Policy, surface: Any) -> Any:
        factories.make_server(policy=policy)
        bearer = {"Authorization": f"Bearer {trainer.text}"}
        with served() as base, httpx.Client(base_url=base, headers=bearer, timeout=60) as client:
            client.post("/start").raise_for_status()
            yield client

    def test_status_counts_and_a_cancelled_job_answers(self, client: httpx.Client) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, "/process", json={**JOB, "job_id": "a"})
            eventually(Rollout.objects.exists, "the job has a rollout")
            status = client.get("/status").json()
            assert status["status"] == "running"
            assert (status["pending_jobs"], status["jobs"], status["total"]) == (1, 1, 1)
            assert (status["init_queue"], status["init"], status["run"], status["eval"]) == (
                *(1, 0),
                *(0, 0),
            )

            other = client.post("/cancel", json={"job_id": "b"})
            assert (other.status_code, other.json()["detail"]) == (404, "Job b not found")
            done = client.post("/cancel", json={"job_id": "a"})
            assert done.json() == {"status": "Cancel requested for job a"}
            result = waiting.result().json()
        assert result["error"] == "CancelledError: Operation cancelled"
        assert (result["filter"], result["messages"], result["resolved"]) == (True, [], False)
        assert Rollout.objects.get().outcome == Outcome.CANCELLED

    def test_stopping_cancels_and_tells_who_waits(self, client: httpx.Client) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, "/process", json=JOB)
            eventually(Rollout.objects.exists, "the job has a rollout")
            client.post("/stop").raise_for_status()
            response = waiting.result()
        assert response.status_code == 500
        assert response.json()["detail"].endswith("Server is stopping; job cancelled")
        assert Rollout.objects.get().outcome == Outcome.CANCELLED

    def test_two_calls_with_one_job_id_wait_for_one_rollout(self, client: httpx.Client) -> None:
        with ThreadPoolExecutor(2) as pool:
            body = {**JOB, "job_id": "same"}
            waiting = [pool.submit(client.post, "/process", json=body) for _ in range(2)]
            eventually(lambda: _watched() == 2, "both calls wait")
            finish(
                Rollout.objects.get(),
                {"columns": {"outcome": "scored", "stop_reason": "finished", "reward": 1.0}},
            )
            answers = [each.result().json() for each in waiting]
        assert answers[0] == answers[1]
        assert answers[0]["resolved"] is True

    def test_a_call_that_takes_too_long_is_answered_and_its_job_cancelled(
        self, client: httpx.Client, settings: Any, tmp_path: Path, policy: Policy, surface: Any
    ) -> None:
        settings.REFERENCE_SURFACE = write_surface(
            tmp_path, policy, **{**surface, "timeout_seconds": 1}
        )
        from rollouts.api.reference.surface import Surface

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Surface, "wait_seconds", 0.01)
            response = client.post("/process", json=JOB)
        assert (response.status_code, response.json()["detail"]) == (504, "Processing timed out")
        assert Rollout.objects.get().outcome == Outcome.CANCELLED

    @pytest.mark.parametrize(("job_id", "state"), [(None, "done"), ("kept", "queued")])
    def test_a_caller_that_goes_away_ends_its_job_but_one_that_can_be_asked_for_again(
        self, client: httpx.Client, job_id: str | None, state: str
    ) -> None:
        eventually(lambda: _watched() == 0, "no call waits")
        request = client.build_request("POST", "/process", json={**JOB, "job_id": job_id})
        address = (client.base_url.host, client.base_url.port or 80)
        with socket.create_connection(address) as connection:
            connection.sendall(_raw(request))
            eventually(lambda: _watched() == 1, "the call waits")
        eventually(lambda: _watched() == 0, "the service has seen it go")
        eventually(lambda: Rollout.objects.get().state == state, f"the rollout is {state}")

    def test_tasks_of_a_set_are_found_by_their_instance(self, client: httpx.Client) -> None:
        body = {**JOB, "instance": {"data_source": "task", "instance_id": "t-1"}}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, "/process", json=body)
            eventually(Rollout.objects.exists, "the job has a rollout")
            rollout = Rollout.objects.select_related("group__task").get()
            finish(rollout, {"columns": {"outcome": "timed_out", "failure_code": "stage.timeout"}})
            answer = waiting.result().json()
        assert rollout.group.task.ref == "t-1"
        assert (answer["critical_error"], answer["filter"]) == ("timeout", True)
        assert answer["timing"]["timeout_triggered"] is True
        assert rollout.state == RolloutState.QUEUED


def _raw(request: httpx.Request) -> bytes:
    """Return a request as it goes over the wire."""
    lines = [f"{request.method} {request.url.path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + request.content


def _watched() -> int:
    """Return how many calls wait, over all event loops of this process."""
    from rollouts.api.reference import waiting

    return sum(
        len(futures)
        for watch in list(waiting._watches.values())
        for futures in watch._waiting.values()
    )
