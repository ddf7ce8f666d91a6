"""NeMo Gym's own models take our responses, and its agent server serves them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("nemo_gym", reason="NeMo Gym is not installed here: make test-adapters")

from prorl_client.adapters.nemo_gym import response_of, verify_fields

from tests.adapters.made import every_kind
from tests.adapters.real.service import live, service

KINDS = every_kind()


@pytest.mark.parametrize("kind", KINDS)
def test_nemo_gym_parses_every_response_with_its_ids(kind: str) -> None:
    from nemo_gym.base_resources_server import BaseVerifyResponse
    from nemo_gym.openai_utils import NeMoGymResponse

    given = response_of(KINDS[kind], model="m")
    parsed = NeMoGymResponse.model_validate(given)
    kept = [
        item.generation_token_ids for item in parsed.output if hasattr(item, "generation_token_ids")
    ]
    sent = [each["generation_token_ids"] for each in given["output"] if _has_ids(each)]
    assert kept == sent
    row = {"responses_create_params": {"input": [{"role": "user", "content": "x"}]}}
    verified = BaseVerifyResponse.model_validate(
        {**row, "response": given, **verify_fields(KINDS[kind])}
    )
    assert verified.mask_sample is (KINDS[kind].reward is None)


def _has_ids(item: dict[str, Any]) -> bool:
    return "generation_token_ids" in item


@live
def test_the_agent_server_runs_rows_and_responses() -> None:
    from fastapi.testclient import TestClient
    from nemo_gym.server_utils import BaseServerConfig, ServerClient
    from omegaconf import OmegaConf
    from prorl_client.adapters.nemo_gym_agent import ProrlAgent, ProrlAgentConfig

    known = service()
    # No other server of NeMo Gym's is asked for anything: the service is environment and grader.
    agent = ProrlAgent(
        config=ProrlAgentConfig(
            host="127.0.0.1",
            port=0,
            entrypoint="",
            name="prorl",
            experiment=known.experiment,
            timeout_seconds=300,
        ),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=9),
            global_config_dict=OmegaConf.create({}),
        ),
    )
    input_ = [{"role": "user", "content": "Do it."}]
    with TestClient(agent.setup_webserver()) as client:
        rows = [
            client.post(
                "/run",
                json={
                    "responses_create_params": {"input": input_},
                    "verifier_metadata": {"task_ref": ref},
                },
            )
            for ref in known.tasks
        ]
        response = client.post(
            "/v1/responses", json={"input": input_, "metadata": {"task_ref": known.tasks[0]}}
        )
    assert [row.status_code for row in rows] == [200] * len(known.tasks), rows[0].text
    assert sorted(row.json()["reward"] for row in rows) == [0.0, 1.0]
    for output in (*(row.json()["response"]["output"] for row in rows), response.json()["output"]):
        seen: list[int] = []
        for item in filter(_has_ids, output):
            assert item["prompt_token_ids"][: len(seen)] == seen
            assert len(item["generation_token_ids"]) == len(item["generation_log_probs"])
            seen = item["prompt_token_ids"] + item["generation_token_ids"]
        assert seen
