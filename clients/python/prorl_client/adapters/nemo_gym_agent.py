"""NeMo Gym's agent server in front of the service: `/run` and `/v1/responses` are rollouts.

In the agent's configuration: `entrypoint`, `experiment` (an id), and `environment` for rows that
name no task. The address and the token come from PRORL_URL and PRORL_TOKEN.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request
from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
from nemo_gym.openai_utils import NeMoGymResponse, NeMoGymResponseCreateParamsNonStreaming
from pydantic import ConfigDict, PrivateAttr

from prorl_client import AsyncClient, AsyncExperiment, Trajectory
from prorl_client.adapters.nemo_gym import response_of, task_of_run, verify_fields
from prorl_client.adapters.sampling import sample_async


class ProrlAgentConfig(BaseResponsesAPIAgentConfig):
    """Which experiment samples, and as what rows without a task are taken."""

    experiment: str
    environment: str | None = None
    timeout_seconds: float | None = None


class ProrlRunRequest(BaseRunRequest):
    """A row of a data set, whatever it holds."""

    model_config = ConfigDict(extra="allow")


class ProrlVerifyResponse(BaseVerifyResponse):
    """The row, its response and its score."""

    model_config = ConfigDict(extra="allow")


class ProrlAgent(SimpleResponsesAPIAgent):
    """Have each row sampled, run and graded by the service."""

    ray_enabled = False
    config: ProrlAgentConfig
    _experiment: AsyncExperiment | None = PrivateAttr(default=None)
    _opening: asyncio.Lock = PrivateAttr(default_factory=asyncio.Lock)

    async def responses(
        self, request: Request, body: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymResponse:
        """Return a rollout as a response; the input is the task's text, `metadata` may name one."""
        del request
        given = body.model_dump(mode="json", exclude_none=True)
        row = {"responses_create_params": given, "metadata": given.get("metadata") or {}}
        trajectory = await self._sample(row)
        return NeMoGymResponse.model_validate(response_of(trajectory, model=self._model(given)))

    async def run(self, request: Request, body: ProrlRunRequest) -> ProrlVerifyResponse:
        """Return the row with the rollout's response and its score."""
        del request
        row = body.model_dump(mode="json", exclude_none=True)
        trajectory = await self._sample(row)
        response = response_of(trajectory, model=self._model(row["responses_create_params"]))
        verified: ProrlVerifyResponse = ProrlVerifyResponse.model_validate(
            {**row, "response": response, **verify_fields(trajectory)}
        )
        return verified

    async def _sample(self, row: dict[str, Any]) -> Trajectory:
        wanted = [(task_of_run(row, self.config.environment), 1)]
        [[trajectory]] = await sample_async(
            await self._opened(), wanted, timeout=self.config.timeout_seconds
        )
        return trajectory

    async def _opened(self) -> AsyncExperiment:
        async with self._opening:
            if self._experiment is None:
                self._experiment = await AsyncClient().experiment(self.config.experiment)
        return self._experiment

    def _model(self, given: dict[str, Any]) -> str:
        return str(given.get("model") or "policy")


if __name__ == "__main__":
    ProrlAgent.run_webserver()
