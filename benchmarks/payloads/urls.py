"""The service's addresses, and below `before/` those of the ways that it is compared with."""

from django.urls import path

from benchmarks.payloads.before import by_msgspec, parsed_and_written
from prorl_site.urls import urlpatterns as own

urlpatterns = [
    *own,
    path("before/json/<uuid:batch_id>/", parsed_and_written),
    path("before/msgspec/<uuid:batch_id>/", by_msgspec),
]
