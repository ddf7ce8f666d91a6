"""The service's settings, with the ways of before beside its own."""

from prorl_site.settings.base import *  # noqa: F403

ROOT_URLCONF = "benchmarks.payloads.urls"
