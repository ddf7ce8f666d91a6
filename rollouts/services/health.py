"""Probing what the service stands on: database, broker, trajectory storage, workers."""

import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import kombu.exceptions
import psycopg
from celery import current_app
from django.conf import settings
from django.core.files.base import ContentFile
from django.db import DatabaseError, ProgrammingError, connection
from django.db.migrations.executor import MigrationExecutor
from kombu.utils.url import maybe_sanitize_url

from rollouts import queues
from rollouts.models import Worker
from rollouts.states import Stage
from rollouts.storage import trajectory_storage

MINIMUM_POSTGRESQL = 14
DATABASE_TIMEOUT_SECONDS = 3
BROKER_TIMEOUT_SECONDS = 2
INSPECT_TIMEOUT_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Hold one finding; `remedy` says how to mend it and is empty when `ok`."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def check_database() -> list[Probe]:
    """Return whether PostgreSQL answers, is recent enough and has every migration.

    An unreachable server is told after `DATABASE_TIMEOUT_SECONDS`, not after the pool's wait.
    """
    name = "database"
    remedy = "Start PostgreSQL (`make up` starts the embedded one) or correct DATABASE_URL."
    fault = connection_fault()
    if fault:
        return [Probe(name=name, ok=False, detail=fault, remedy=remedy)]
    try:
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_version_num")
            version = int(cursor.fetchone()[0])
        executor = MigrationExecutor(connection)
        waiting = executor.migration_plan(executor.loader.graph.leaf_nodes())
    except DatabaseError as error:
        return [Probe(name=name, ok=False, detail=_one_line(error), remedy=remedy)]
    found = version // 10000
    recent = found >= MINIMUM_POSTGRESQL
    return [
        Probe(
            name=name,
            ok=recent,
            detail=f"PostgreSQL {found}.{version % 10000}",
            remedy="" if recent else f"Use PostgreSQL {MINIMUM_POSTGRESQL} or newer.",
        ),
        Probe(
            name="migrations",
            ok=not waiting,
            detail=f"{len(waiting)} not applied" if waiting else "all applied",
            remedy="Run: python manage.py migrate" if waiting else "",
        ),
    ]


def check_broker() -> list[Probe]:
    """Return whether the broker answers within `BROKER_TIMEOUT_SECONDS`."""
    options = {
        **current_app.conf.broker_transport_options,
        "socket_connect_timeout": BROKER_TIMEOUT_SECONDS,
        "socket_timeout": BROKER_TIMEOUT_SECONDS,
    }
    link: Any = current_app.connection_for_write(
        connect_timeout=BROKER_TIMEOUT_SECONDS, transport_options=options
    )
    try:
        with link:
            link.ensure_connection(max_retries=1, interval_start=0, timeout=BROKER_TIMEOUT_SECONDS)
            link.channel().close()
            where = maybe_sanitize_url(settings.BROKER_URL)
    except (OSError, kombu.exceptions.KombuError) as error:
        return [
            Probe(
                name="broker",
                ok=False,
                detail=_one_line(error),
                remedy="Start Valkey or Redis (`make up` starts the embedded one) or correct "
                "BROKER_URL.",
            )
        ]
    return [Probe(name="broker", ok=True, detail=where)]


def check_storage() -> list[Probe]:
    """Return whether a file can be written to the trajectory store, read back and deleted.

    Any exception of a storage backend is a finding: which ones exist depends on the backend.
    """
    storage = trajectory_storage()
    token = secrets.token_hex(16)
    try:
        name = storage.save(f".probe/{token}", ContentFile(token.encode()))
        try:
            with storage.open(name, "rb") as stream:
                same = stream.read() == token.encode()
        finally:
            storage.delete(name)
    except Exception as error:
        return [_storage_fault(_one_line(error))]
    if not same:
        return [_storage_fault("what was read differs from what was written")]
    return [Probe(name="storage", ok=True, detail=_storage_place())]


def check_workers() -> list[Probe]:
    """Return for each stage how many worker processes hold a lease; none without a database."""
    found: dict[str, list[tuple[int, str]]] = {stage: [] for stage in Stage.values}
    if not connection_fault():
        live = Worker.objects.live()
        with suppress(ProgrammingError):  # the table is missing until the migrations ran
            for stage, concurrency, node in live.values_list("stage", "concurrency", "node__name"):
                found[stage].append((concurrency, node))
    return [_stage_probe(stage, workers) for stage, workers in found.items()]


def check_control_worker() -> list[Probe]:
    """Return whether a worker consumes the control queue: asks all workers over the broker.

    Takes up to `INSPECT_TIMEOUT_SECONDS`; an unreachable broker is a finding.
    """
    answers: list[dict[str, Any]] | None = None
    if check_broker()[0].ok:
        # A list of answers: workers of one machine may share a name, which a mapping would merge.
        answers = current_app.control.broadcast(
            "active_queues", reply=True, timeout=INSPECT_TIMEOUT_SECONDS
        )
    serving = sorted(
        worker
        for answer in answers or []
        for worker, consumed in answer.items()
        if any(queue["name"] == queues.CONTROL for queue in consumed)
    )
    name = f"worker {queues.CONTROL}"
    if serving:
        return [Probe(name=name, ok=True, detail=", ".join(serving))]
    return [Probe(name=name, ok=False, detail="none answers", remedy=_start(queues.CONTROL))]


def connection_fault() -> str:
    """Return why a connection of one's own cannot be opened; empty when it can."""
    parameters = {
        **connection.get_connection_params(),
        "connect_timeout": DATABASE_TIMEOUT_SECONDS,
    }
    parameters.pop("pool", None)
    try:
        psycopg.connect(**parameters).close()
    except psycopg.Error as error:
        return _one_line(error)
    return ""


def _stage_probe(stage: str, workers: list[tuple[int, str]]) -> Probe:
    name = f"worker {stage}"
    if not workers:
        return Probe(name=name, ok=False, detail="none is live", remedy=_start(stage))
    nodes = ", ".join(sorted({node for _concurrency, node in workers}))
    places = sum(concurrency for concurrency, _node in workers)
    return Probe(name=name, ok=True, detail=f"{len(workers)} live with {places} places on {nodes}")


def _start(queue: str) -> str:
    pool = queues.POOL_OF_QUEUE[queue]
    return f"Run: celery -A prorl_site worker -Q {queue} --pool {pool} (`make up` starts all)"


def _storage_fault(detail: str) -> Probe:
    return Probe(
        name="storage",
        ok=False,
        detail=detail,
        remedy="Make the place that PRORL_TRAJECTORIES names writable for this account "
        f"(now {_storage_place()}), or correct PRORL_TRAJECTORY_STORAGE.",
    )


def _storage_place() -> str:
    configured: Any = settings.STORAGES["trajectories"]
    return str(configured.get("OPTIONS", {}).get("location") or "see the settings")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300]
