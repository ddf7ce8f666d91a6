"""The calls of the reference system's first server, on this service's own jobs and policies."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.http import Http404
from rest_framework import serializers
from rest_framework.exceptions import PermissionDenied
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.views import APIView

from rollouts.api.reference.answers import reference_handler
from rollouts.api.reference.authentication import NamedAccountAuthentication
from rollouts.api.reference.surface import Surface, current_surface
from rollouts.exceptions import InvalidValue, StateConflict, UnknownReference
from rollouts.models import Policy
from rollouts.models.policy import validate_server_url
from rollouts.services.reference_jobs import (
    cancel_job,
    is_running,
    require_running,
    start_surface,
    stop_surface,
    surface_status,
)
from rollouts.services.servers import clear_servers, register_server


class CancelInput(serializers.Serializer[Any]):
    """Which job."""

    job_id = serializers.CharField(max_length=200)


class ServerInput(serializers.Serializer[Any]):
    """Which server."""

    address = serializers.CharField(max_length=500)


_USUAL: Any = api_settings.DEFAULT_AUTHENTICATION_CLASSES


class SurfaceView(APIView):
    """A call of the surface; 404 where it is off."""

    authentication_classes = [*_USUAL, NamedAccountAuthentication]
    renderer_classes = [JSONRenderer]
    schema = None
    required_scope = "submit"
    surface: Surface

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Read the settings, then check the caller. Raises Http404, PermissionDenied."""
        surface = current_surface()
        if surface is None:
            raise Http404
        self.surface = surface
        super().initial(request, *args, **kwargs)
        token: Any = request.auth
        if token is not None and token.is_bound:
            raise PermissionDenied("This token is bound to experiments; the surface makes its own.")

    def get_exception_handler(self) -> Any:
        """Word every fault as the reference does: `detail`, and our code beside it."""
        return reference_handler

    def policy(self, name: str) -> Policy:
        """Return a policy that the caller may see. Raises UnknownReference."""
        found = Policy.objects.visible_to(self.request.user).filter(name=name).first()
        if found is None:
            raise UnknownReference(f"There is no policy {name!r}.", code="policy.unknown")
        return found


class CancelView(SurfaceView):
    """POST /cancel."""

    def post(self, request: Request) -> Response:
        """Cancel a job that is under way; 404 when there is none of that id."""
        require_running(owner=request.user)
        given = CancelInput(data=request.data)
        given.is_valid(raise_exception=True)
        job_id = given.validated_data["job_id"]
        cancel_job(owner=request.user, job_id=job_id)
        return Response({"status": f"Cancel requested for job {job_id}"})


class StatusView(SurfaceView):
    """GET /status."""

    def get(self, request: Request) -> Response:
        """Return how many jobs wait and run, by stage; 503 when the surface is not running."""
        require_running(owner=request.user)
        counts = surface_status(owner=request.user)
        pending = {"pending_jobs": counts["jobs"], "running": True}
        return Response({"status": "running", **pending, **counts})


class StartView(SurfaceView):
    """POST /start."""

    def post(self, request: Request) -> Response:
        """Take jobs from now on; 400 when it does so already."""
        try:
            start_surface(owner=request.user, policy=self.policy(self.surface.policy))
        except StateConflict as error:
            raise InvalidValue(str(error), code=error.code) from None
        return Response({"status": "Server started successfully"})


class StopView(SurfaceView):
    """POST /stop."""

    def post(self, request: Request) -> Response:
        """Take no more jobs and cancel those under way; 503 when it is not running."""
        stop_surface(owner=request.user)
        return Response({"status": "Server stopped successfully"})


class AddServerView(SurfaceView):
    """POST /add_llm_server."""

    required_scope = "policy"

    def post(self, request: Request) -> Response:
        """Register a server of the surface's policy; it may be told before the start."""
        given = ServerInput(data=request.data)
        given.is_valid(raise_exception=True)
        address = given.validated_data["address"]
        try:
            validate_server_url(address)
        except ValidationError as error:
            raise InvalidValue(" ".join(error.messages)) from None
        register_server(
            policy=self.policy(self.surface.policy),
            url=address,
            kind=self.surface.server_kind,
            max_in_flight=self.surface.max_in_flight,
        )
        known = "Added" if is_running(owner=request.user) else "Buffered"
        return Response({"status": f"{known} LLM server address: {address}"})


class ClearServersView(SurfaceView):
    """POST /clear_llm_server."""

    required_scope = "policy"

    def post(self, request: Request) -> Response:
        """Send the surface's policies no more new work until servers are added again."""
        clear_servers(policies=[self.policy(name) for name in self.surface.policies()])
        if is_running(owner=request.user):
            return Response({"status": "Cleared all LLM server addresses"})
        return Response({"status": "Cleared buffered LLM server addresses"})
