"""Ask a token server for one turn, streamed where it can."""

import time
from typing import Any

from rollouts.inference.answers import Answer
from rollouts.inference.exceptions import InferenceFault
from rollouts.inference.protocol import Cancelled, Generation
from rollouts.inference.statuses import raise_for_status
from rollouts.inference.transport import Headers, Response, Transport

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


class Asker:
    """Post a request and read its answer; remember which servers cannot stream. Thread-safe."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._whole_only: set[str] = set()

    def ask(
        self,
        path: str,
        body: dict[str, Any],
        answer: Answer,
        *,
        headers: Headers | None = None,
        timeout_seconds: float,
        cancelled: Cancelled | None,
        interrupted: Cancelled | None,
    ) -> Generation:
        """Return the turn. `body` is the request as it is without streaming.

        A server that answers 400 and names `stream` is asked again without, from then on always.
        """
        url = f"{answer.server.url.rstrip('/')}{path}"
        deadline = time.monotonic() + timeout_seconds
        while True:
            streamed = url not in self._whole_only
            started = time.monotonic()
            try:
                outcome = self.transport.stream(
                    url,
                    answer.collect,
                    json={**body, **(STREAMED if streamed else {})},
                    headers=headers,
                    timeout_seconds=deadline - started,
                    cancelled=cancelled,
                    interrupted=interrupted,
                )
                if isinstance(outcome, Response):
                    if streamed and outcome.status == 400 and b"stream" in outcome.body:
                        self._whole_only.add(url)
                        continue
                    raise_for_status(outcome, answer.server)
                    answer.read_whole(outcome.body)
                return answer.generation(
                    seconds=time.monotonic() - started, interrupted=outcome == "interrupted"
                )
            except InferenceFault as fault:
                fault.server_id = answer.server.id
                raise
