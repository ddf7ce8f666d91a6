"""System checks: what a worker or a command refuses to start with."""

import pytest
from celery.app.defaults import NAMESPACES, flatten
from django.conf import settings as django_settings
from django.core.checks import run_checks

from prorl_site.env import Env, SettingError, read_env_file
from rollouts import checks
from rollouts.queues import named_queue, stage_queue


def ids(found: list) -> list[str]:
    return [each.id for each in found]


def test_the_settings_as_they_are_have_no_errors() -> None:
    assert [each for each in run_checks() if each.level >= 40] == []


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("TOOL_CALL_LIMIT_SECONDS", 3600, "PRORL_TOOL_CALL_LIMIT_SECONDS (3600 s) must be below"),
        ("STAGE_LIMIT_SECONDS", 599, "PRORL_TOOL_CALL_LIMIT_SECONDS (600 s) must be below"),
        ("STAGE_GRACE_SECONDS", 400, "must be below PRORL_HARD_LIMIT_SECONDS (3900 s)"),
        ("CELERY_TASK_TIME_LIMIT", 3660, "must be below PRORL_HARD_LIMIT_SECONDS (3660 s)"),
    ],
)
def test_deadlines_that_do_not_nest_are_refused(
    settings: object, name: str, value: int, says: str
) -> None:
    setattr(settings, name, value)

    (found,) = checks.check_deadlines()

    assert found.id == "rollouts.E001"
    assert says in found.msg


def test_a_heartbeat_too_slow_for_its_lease_is_refused(settings: object) -> None:
    settings.HEARTBEAT_SECONDS = 11
    settings.LEASE_SECONDS = 30

    assert ids(checks.check_deadlines()) == ["rollouts.E002"]


def test_an_unknown_setting_is_refused(settings: object) -> None:
    env = Env({"PRORL_LEASE_SECOND": "3", "PRORL_DEBUG": "0", "PRORL_TOKEN": "x", "OTHER": "1"})
    env.boolean("PRORL_DEBUG", False)
    settings.ENV = env

    (found,) = checks.check_setting_names()

    assert (found.id, "PRORL_LEASE_SECOND " in found.msg) == ("rollouts.E003", True)


def test_mcp_servers_never_run_as_the_sandboxes_account(settings: object) -> None:
    settings.MCP_SERVERS = "/etc/mcp.toml"  # type: ignore[attr-defined]
    settings.MCP_ACCOUNT = settings.SANDBOX_ACCOUNT  # type: ignore[attr-defined]

    assert [found.id for found in checks.check_accounts()] == ["rollouts.E006"]
    settings.MCP_ACCOUNT = "nobody"  # type: ignore[attr-defined]
    assert checks.check_accounts() == []


def test_a_celery_key_that_celery_does_not_know_is_refused(settings: object) -> None:
    settings.CELERY_TASK_TIME_LIMITS = 3

    (found,) = checks.check_celery_keys()

    assert (found.id, "CELERY_TASK_TIME_LIMITS" in found.msg) == ("rollouts.E004", True)


def test_every_celery_key_of_ours_is_one_of_celerys() -> None:
    known = {f"CELERY_{found[0].upper()}" for found in flatten(NAMESPACES)}
    ours = {name for name in dir(django_settings) if name.startswith("CELERY_")}

    assert ours - known == set()
    assert "CELERY_TASK_QUEUES" in ours


@pytest.mark.parametrize(
    ("queues", "pool", "refusals"),
    [
        (["init"], "celery.concurrency.thread", 0),
        (["run", "run.n1"], "threads", 0),
        (["eval"], "celery.concurrency.prefork", 0),
        (["control"], "threads", 0),
        (["eval"], "celery.concurrency.thread", 1),
        (["run"], "celery.concurrency.prefork", 1),
        (["init"], "celery.concurrency.solo", 1),
        (["init", "run"], "threads", 1),
        (["init", "run", "eval", "control"], "prefork", 4),
    ],
)
def test_wrong_pools_are_refused(queues: list[str], pool: str, refusals: int) -> None:
    assert len(checks.pool_errors(queues, pool)) == refusals


def test_each_queue_has_an_exchange_of_its_own() -> None:
    queue = stage_queue("run", "n1")

    assert (queue.name, queue.exchange.name, queue.routing_key) == ("run.n1", "run.n1", "run.n1")
    assert named_queue("eval").exchange.name == "eval"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("abc", "PRORL_X is 'abc', not a number"),
        ("-1", "PRORL_X is -1; it must be at least 0"),
        ("nan", "PRORL_X is nan; it must be at least 0"),
    ],
)
def test_a_malformed_number_says_what_to_write(value: str, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        Env({"PRORL_X": value}).seconds("PRORL_X", 5)


def test_a_missing_setting_says_where_to_set_it() -> None:
    with pytest.raises(
        SettingError, match=r"DATABASE_URL is not set\. Set it in the environment or"
    ):
        Env({}).text("DATABASE_URL")


def test_an_env_file_is_read_without_comments(tmp_path: object) -> None:
    path = tmp_path / "stack.env"
    path.write_text("# comment=1\nA=1\nB = x=y \n\nnonsense\n")

    assert read_env_file(path) == {"A": "1", "B": "x=y"}
    assert read_env_file(tmp_path / "absent") == {}
