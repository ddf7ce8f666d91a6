"""RFC 9457 problem details for every error of the API."""

import logging
from http import HTTPStatus
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.defaults import bad_request as page_bad_request
from django.views.defaults import page_not_found
from django.views.defaults import permission_denied as page_permission_denied
from django.views.defaults import server_error as page_server_error
from rest_framework import exceptions
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import exception_handler as drf_exception_handler
from rest_framework.views import set_rollback

from prorl_site.api.exceptions import Problem

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"


def problem_body(status: int, code: str, detail: str, **extra: Any) -> dict[str, Any]:
    """Return the members of a problem."""
    return {
        "type": f"urn:prorl:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": detail,
        **extra,
    }


def _code_and_detail(exc: Exception) -> tuple[str, str, dict[str, Any]]:
    match exc:
        case Problem():
            return exc.code, str(exc.detail), exc.extra
        case exceptions.ValidationError():
            return "request.invalid", "Some fields are missing or wrong.", {"errors": exc.detail}
        case exceptions.ParseError():
            return "request.malformed", f"The body is not valid JSON: {exc.detail}", {}
        case exceptions.NotAuthenticated():
            return "auth.missing", "Send `Authorization: Bearer TOKEN`.", {}
        case exceptions.AuthenticationFailed():
            return "auth.invalid", str(exc.detail), {}
        case exceptions.PermissionDenied() | PermissionDenied():
            return "auth.forbidden", str(getattr(exc, "detail", exc)) or "Not allowed.", {}
        case exceptions.NotFound() | Http404():
            return "not_found", "There is no such resource, or it is not yours.", {}
        case exceptions.MethodNotAllowed():
            return "request.method", str(exc.detail), {}
        case exceptions.NotAcceptable():
            return "request.not_acceptable", str(exc.detail), {}
        case exceptions.UnsupportedMediaType():
            return "request.media_type", str(exc.detail), {}
        case exceptions.Throttled():
            return "request.throttled", str(exc.detail), {}
        case exceptions.APIException():
            return "request.refused", str(exc.detail), {}
    raise exc


def exception_handler(exc: Exception, context: dict[str, Any]) -> Response | None:
    """Turn an exception of a view into a problem; what is not ours stays an exception."""
    from prorl_site.api.mapping import to_problem

    exc = to_problem(exc) or exc
    _answer_in_json(context.get("request"))
    response = drf_exception_handler(exc, context)
    if response is None:
        logger.exception("unhandled error in %s", context.get("view"))
        set_rollback()
        body = problem_body(500, "server.error", "The service failed; the error was logged.")
        return Response(body, status=500, content_type=MEDIA_TYPE)
    code, detail, extra = _code_and_detail(exc)
    response.data = problem_body(response.status_code, code, detail, **extra)
    response.content_type = MEDIA_TYPE
    if isinstance(exc, Problem) and exc.retry_after is not None:
        response["Retry-After"] = str(max(1, round(exc.retry_after)))
    if response.status_code == 401 and "WWW-Authenticate" not in response:
        response["WWW-Authenticate"] = "Bearer"
    return response


def _answer_in_json(request: Request | None) -> None:
    """Make a problem JSON, whatever format the call itself would have answered in."""
    if request is not None:
        request.accepted_renderer = JSONRenderer()
        request.accepted_media_type = JSONRenderer.media_type


def problem_response(status: int, code: str, detail: str) -> JsonResponse:
    """Return a problem outside of the API framework."""
    return JsonResponse(problem_body(status, code, detail), status=status, content_type=MEDIA_TYPE)


@csrf_exempt
def unknown_address(request: HttpRequest) -> HttpResponse:
    """Answer 404 for what the API does not serve."""
    hint = "" if request.path.endswith("/") else " Addresses of the API end with a slash."
    return problem_response(404, "not_found", f"Nothing is served at {request.path}.{hint}")


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer 400: a problem below /api/, Django's page elsewhere."""
    if request.path.startswith("/api/"):
        return problem_response(400, "request.malformed", "The request is malformed.")
    return page_bad_request(request, exception)


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer 403: a problem below /api/, Django's page elsewhere."""
    if request.path.startswith("/api/"):
        return problem_response(403, "auth.forbidden", "Not allowed.")
    return page_permission_denied(request, exception)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer 404: a problem below /api/, Django's page elsewhere."""
    if request.path.startswith("/api/"):
        return unknown_address(request)
    return page_not_found(request, exception)


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer 500: a problem below /api/, Django's page elsewhere."""
    if request.path.startswith("/api/"):
        return problem_response(500, "server.error", "The service failed; the error was logged.")
    return page_server_error(request)
