"""Addresses of the surface; they are the reference's own, without a prefix or a last slash."""

from django.urls import path

from rollouts.api.reference import views
from rollouts.api.reference.process import process

urlpatterns = [
    path("start", views.StartView.as_view(), name="reference-start"),
    path("stop", views.StopView.as_view(), name="reference-stop"),
    path("status", views.StatusView.as_view(), name="reference-status"),
    path("process", process, name="reference-process"),
    path("cancel", views.CancelView.as_view(), name="reference-cancel"),
    path("add_llm_server", views.AddServerView.as_view(), name="reference-add-server"),
    path("clear_llm_server", views.ClearServersView.as_view(), name="reference-clear-servers"),
]
