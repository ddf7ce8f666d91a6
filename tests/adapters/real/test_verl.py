"""verl takes our outputs as its own, and its registry finds the loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

verl = pytest.importorskip("verl", reason="verl is not installed here: make test-adapters")

from prorl_client.adapters.verl import output_list, single_output  # noqa: E402

from tests.adapters.made import every_kind  # noqa: E402
from tests.adapters.real.service import live, service  # noqa: E402

KINDS = every_kind()


@pytest.mark.parametrize("kind", KINDS)
def test_verl_makes_tensors_of_every_output(kind: str) -> None:
    from prorl_client.adapters.verl_loop import _made

    made = [*output_list(KINDS[kind]), single_output(KINDS[kind], stand_in=0)]
    for fields in made:
        found = _made(fields).as_dict()
        size = found["responses"].shape
        assert found["response_mask"].shape == found["rollout_log_probs"].shape == size
        assert found["rm_scores"].shape == size
        assert found["rm_scores"].sum().item() == fields["reward_score"]
        assert found["rm_scores"][-1].item() == fields["reward_score"]
        assert found["prompts"].tolist() == fields["prompt_ids"]
        assert found["extra_fields"]["reward_extra_info"] == {}


def test_the_loop_is_registered_under_its_name() -> None:
    import prorl_client.adapters.verl_loop  # noqa: F401
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    assert _agent_loop_registry["prorl"]["_target_"].endswith("verl_loop.ProrlAgentLoop")


@live
@pytest.mark.parametrize("use_v1", [True, False])
def test_hydra_makes_the_loop_and_it_runs_a_sample(use_v1: bool) -> None:
    import hydra
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap

    known = service()
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"prompt_length": 4096, "response_length": 4096}},
            "trainer": {"use_v1": use_v1},
            "data": {},
        }
    )

    async def run() -> Any:
        loop = hydra.utils.instantiate(
            {
                "_target_": "prorl_client.adapters.verl_loop.ProrlAgentLoop",
                "experiment": known.experiment,
                "timeout": 300,
            },
            trainer_config=DictConfigWrap(config=config),
            server_manager=None,
            tokenizer=AutoTokenizer.from_pretrained(known.tokenizer),
            processor=None,
            dataset_cls=None,
            data_config=DictConfigWrap(config=config.data),
            hf_model_type=None,
        )
        rows = ({"extra_info": {"task_ref": ref}, "index": 0} for ref in known.tasks)
        return await asyncio.gather(*(loop.run({}, **row) for row in rows))

    found = asyncio.run(run())
    assert all(isinstance(each, list) is use_v1 for each in found)
    outputs = [each[0] if use_v1 else each for each in found]
    assert all(isinstance(each, AgentLoopOutput) for each in outputs)
    assert {each.reward_score for each in outputs} <= {0.0, 1.0}
    assert all(sum(each.response_mask) > 0 for each in outputs)
    assert all(each.extra_fields["min_global_steps"] is not None for each in outputs)
