"""Wiring of the rollout service: settings, Celery application, URLs."""

from prorl_site.celery import app as celery_app

__all__ = ["celery_app"]
