"""Numbers for Prometheus, read from the database when they are asked for."""

from collections.abc import Iterator
from typing import Any

from django.db.models import Count
from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from rest_framework.request import Request
from rest_framework.views import APIView

from prorl_site.api.experiment_metrics import ExperimentCollector
from rollouts.inference.exceptions import RouterUnavailable
from rollouts.stages import process
from sandboxes.models import Node, Sandbox
from sandboxes.states import SandboxState

BREAKER_NUMBERS = {"closed": 0, "half_open": 1, "open": 2}


class SandboxCollector(Collector):
    """Sandboxes by node and state, slots, and instances that nothing owned."""

    def collect(self) -> Iterator[Metric]:
        """Yield the families; two queries."""
        capacity = GaugeMetricFamily(
            "prorl_node_capacity", "Sandbox slots of a node.", labels=["node"]
        )
        leaked = CounterMetricFamily(
            "prorl_sandboxes_leaked",
            "Instances found on a node that no row owned, and removed.",
            labels=["node"],
        )
        present = GaugeMetricFamily(
            "prorl_sandboxes", "Sandboxes that hold a slot.", labels=["node", "state"]
        )
        rows = Sandbox.objects.present().values("node", "state").annotate(count=Count("pk"))
        counts = {(row["node"], row["state"]): row["count"] for row in rows.order_by()}
        for node in Node.objects.order_by("name"):
            capacity.add_metric([node.name], node.capacity)
            leaked.add_metric([node.name], node.leaked)
            for state in SandboxState.values:
                if state != SandboxState.GONE:
                    present.add_metric([node.name, state], counts.get((node.pk, state), 0))
        yield from (capacity, leaked, present)


class RoutingCollector(Collector):
    """What is in flight on inference servers, what waits, and which servers are left alone."""

    def collect(self) -> Iterator[Metric]:
        """Yield the families, from the routing store; none when it does not answer."""
        router = process.router()
        try:
            loads, breakers, waiting = router.load(), router.breakers(), router.waiting()
        except RouterUnavailable:
            return
        requests = GaugeMetricFamily(
            "prorl_inference_requests", "Requests in flight on a server.", labels=["server"]
        )
        tokens = GaugeMetricFamily(
            "prorl_inference_tokens",
            "Tokens in flight on a server: new prompt tokens and those expected.",
            labels=["server"],
        )
        breaker = GaugeMetricFamily(
            "prorl_inference_breaker",
            "0 a server is well, 1 it is tried again with one request, 2 it is left alone.",
            labels=["server"],
        )
        queued = GaugeMetricFamily(
            "prorl_inference_waiting", "Requests that wait for a slot.", labels=["experiment"]
        )
        for server, load in loads.items():
            requests.add_metric([server], load.requests)
            tokens.add_metric([server], load.tokens)
            breaker.add_metric([server], BREAKER_NUMBERS[breakers.get(server, "closed")])
        for experiment, count in sorted(waiting.items()):
            queued.add_metric([experiment], count)
        yield from (requests, tokens, breaker, queued)


class MetricsView(APIView):
    """The numbers, in Prometheus' text format, for a token with the scope `read`."""

    @extend_schema(exclude=True)
    def get(self, request: Request) -> HttpResponse:
        """Return all families."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(SandboxCollector())
        registry.register(RoutingCollector())
        registry.register(ExperimentCollector(process.router()))
        return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


metrics: Any = MetricsView.as_view()
