"""verl's agent loop: each sample is a group of one in an experiment of the service.

agent_loop.yaml: `- {name: prorl, _target_: prorl_client.adapters.verl_loop.ProrlAgentLoop,
experiment: ID}`. The address and the token come from PRORL_URL and PRORL_TOKEN.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
)

from prorl_client import AsyncClient, AsyncExperiment
from prorl_client.adapters.sampling import sample_async, task_of
from prorl_client.adapters.verl import output_list, single_output

_experiments: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, AsyncExperiment]] = (
    WeakKeyDictionary()
)


async def shared_experiment(experiment_id: str) -> AsyncExperiment:
    """Return an experiment over connections that all loops of this event loop share."""
    known = _experiments.setdefault(asyncio.get_running_loop(), {})
    if experiment_id not in known:
        known[experiment_id] = await AsyncClient().experiment(experiment_id)
    return known[experiment_id]


@register("prorl")
class ProrlAgentLoop(AgentLoopBase):
    """Run one sample of a dataset row through the service; see `task_of` for how it names its task.

    The V1 trainer (`trainer.use_v1`) gets a list: every segment of a fork, nothing for a rollout
    without a reward. The older one gets one output, masked where there is no reward.
    """

    def __init__(
        self, *args: Any, experiment: str, timeout: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.experiment_id = experiment
        self.timeout = timeout

    async def run(
        self, sampling_params: dict[str, Any], **kwargs: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Return the sample's outputs; how to sample is the experiment's own."""
        del sampling_params
        experiment = await shared_experiment(self.experiment_id)
        wanted = [(task_of(_plain(kwargs)), 1)]
        [[trajectory]] = await sample_async(experiment, wanted, timeout=self.timeout)
        limits = {
            "prompt_tokens": self.rollout_config.prompt_length,
            "response_tokens": self.rollout_config.response_length,
        }
        if self.config.trainer.get("use_v1", True):
            return [_made(each) for each in output_list(trajectory, **limits)]
        stand_in = self.tokenizer.eos_token_id
        return _made(single_output(trajectory, stand_in=stand_in, **limits))


def _made(fields: dict[str, Any]) -> AgentLoopOutput:
    return AgentLoopOutput(**{**fields, "metrics": AgentLoopMetrics(**fields["metrics"])})


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose values are not wrapped in numpy's scalars."""
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in row.items()
    }
