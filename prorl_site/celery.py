"""Celery application; each worker also consumes its node's own queue."""

import os
from typing import Any

from celery import Celery
from celery.signals import celeryd_after_setup, celeryd_init, setup_logging

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "prorl_site.settings.base")

app = Celery("prorl_site")
app.set_default()  # else only the thread that imports this has it as its current one
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["rollouts"])


@setup_logging.connect
def configure_logging(**_: Any) -> None:
    """Keep Django's logging configuration; Celery would replace it."""
    from logging.config import dictConfig

    from django.conf import settings

    dictConfig(settings.LOGGING)


@celeryd_init.connect
def connect_worker(**_: Any) -> None:
    """Make a Celery worker a stage worker."""
    import django

    django.setup()
    from rollouts.worker import connect

    connect()


@celeryd_after_setup.connect
def add_node_queues(instance: Any, **_: Any) -> None:
    """Consume `<stage>.<node>` beside every stage queue that the command line selected."""
    from django.conf import settings

    from rollouts import queues

    selected = instance.app.amqp.queues
    for stage in [name for name in queues.NODE_STAGES if name in selected.consume_from]:
        selected.select_add(queues.stage_queue(stage, settings.NODE_NAME))
