"""What a caller may see: each view starts from it, so that the rest answers 404."""

from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.http import Http404
from rest_framework.request import Request

from rollouts.models import Experiment

if TYPE_CHECKING:
    from rest_framework.viewsets import GenericViewSet

    _View = GenericViewSet[Any]
else:
    _View = object


class VisibleMixin(_View):
    """Start from the rows that the caller's user and token may see."""

    def get_queryset(self) -> Any:
        """Return the visible rows; none while the schema is generated."""
        queryset: Any = super().get_queryset()
        if getattr(self, "swagger_fake_view", False):
            return queryset.none()
        return queryset.visible_to(self.request.user, self.request.auth)


def visible_experiment(request: Request, experiment_id: UUID) -> Experiment:
    """Return an experiment that the caller may see. Raises Http404."""
    experiment = (
        Experiment.objects.visible_to(request.user, request.auth)
        .select_related("policy")
        .filter(pk=experiment_id)
        .first()
    )
    if experiment is None:
        raise Http404
    return experiment


def is_operator(request: Request) -> bool:
    """Tell whether the caller may do what operators do: staff, by session or with that scope."""
    token = request.auth
    return request.user.is_staff and (token is None or "operate" in getattr(token, "scopes", ()))
