"""Addresses of the API, version 1."""

from typing import Any

from django.urls import include, path
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerView
from rest_framework.routers import SimpleRouter

from evaluators.registry import EVALUATORS
from rollouts.api.idempotent import idempotent
from rollouts.handlers.registry import HANDLERS
from rollouts.services.environment_check import file_and_secret_errors
from rollouts.services.prompts import prompt_rule, tool_rule
from sandboxes.api import views
from sandboxes.api.image_builds import ImageBuildViewSet


class CatalogueImages(views.ImageViewSet):
    """Images that sandboxes start from."""

    create: Any = idempotent()(views.ImageViewSet.create)


class CatalogueEnvironments(views.EnvironmentViewSet):
    """Catalogue of environments; every edit is a new version."""

    create: Any = idempotent()(views.EnvironmentViewSet.create)
    registries = {"agents": HANDLERS, "evaluators": EVALUATORS}
    rules = (prompt_rule, tool_rule, file_and_secret_errors)


router = SimpleRouter(use_regex_path=False)
router.register("images", CatalogueImages)
router.register("image-builds", ImageBuildViewSet)
router.register("environments", CatalogueEnvironments)
router.register("nodes", views.NodeViewSet)
router.register("sandboxes", views.SandboxViewSet)

urlpatterns = [
    path("schema/", SpectacularAPIView.as_view(), name="schema"),
    path("docs/", SpectacularSwaggerView.as_view(url_name="schema"), name="docs"),
    *router.urls,
    path("", include("rollouts.api.urls")),
]
