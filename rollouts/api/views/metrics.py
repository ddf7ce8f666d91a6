"""Numbers of one experiment."""

from uuid import UUID

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from rollouts.api.scoping import visible_experiment
from rollouts.api.serializers.metrics import MetricsOutput
from rollouts.services.experiment_metrics import measure_experiment
from rollouts.stages import process


class ExperimentMetricsView(APIView):
    """An experiment in numbers."""

    @extend_schema(operation_id="experiments_metrics", responses=MetricsOutput)
    def get(self, request: Request, experiment_id: UUID) -> Response:
        """Return totals, and how the newest groups fare; 503 when counting takes too long."""
        experiment = visible_experiment(request, experiment_id)
        measured = measure_experiment(experiment=experiment, router=process.router())
        return Response(MetricsOutput(measured).data)
