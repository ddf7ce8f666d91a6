"""URLs."""

from django.contrib import admin
from django.urls import include, path, re_path
from django.views.generic import RedirectView

from prorl_site.api import problems
from prorl_site.api.health import healthz, readyz
from prorl_site.api.metrics import metrics

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("favicon.ico", RedirectView.as_view(url="/static/sandboxes/icon.svg")),
    path("healthz", healthz, name="healthz"),
    path("readyz", readyz, name="readyz"),
    path("metrics", metrics, name="metrics"),
    path("api/v1/", include("prorl_site.api.urls")),
    path("", include("rollouts.api.reference.urls")),
    re_path(r"^api/", problems.unknown_address),
]

handler400 = problems.bad_request
handler403 = problems.forbidden
handler404 = problems.not_found
handler500 = problems.server_error
