"""NeMo RL flattens our message logs and masks them as we mean it; from its source."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here: make test-adapters")
batched = pytest.importorskip(
    "nemo_rl.distributed.batched_data_dict",
    reason="NeMo RL's source is not here: make test-adapters",
)

from prorl_client import Client  # noqa: E402
from prorl_client.adapters import nemo_rl as adapter  # noqa: E402

from tests.adapters.made import every_kind  # noqa: E402
from tests.adapters.real.service import live, service  # noqa: E402

KINDS = every_kind()


def flattened(logs: list) -> tuple:
    """Return the trainer's own flat batch of message logs, with its loss masks."""
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message

    for log in logs:
        # As add_grpo_token_loss_masks_and_generation_logprobs does: its module needs the trainer.
        for message in log:
            sampled = message["role"] == "assistant" and "generation_logprobs" in message
            ids = message["token_ids"]
            message["token_loss_mask"] = torch.full_like(ids, int(sampled))
            message.setdefault("generation_logprobs", torch.zeros(len(ids)))
    return batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": 0})


def test_every_kind_flattens_to_its_own_tokens_and_mask() -> None:
    group = list(KINDS.values())
    columns = adapter.batch_columns([group], stand_in=0)
    empty = batched.BatchedDataDict({"extra_env_info": [{}] * len(group)})
    batch = adapter._final_batch(empty, columns)
    flat, lengths = flattened(batch["message_log"])
    for place, (name, each) in enumerate(KINDS.items()):
        size = int(lengths[place])
        sampled = int(flat["token_loss_mask"][place, :size].sum())
        scored = each.trainable and each.reward is not None
        assert sampled == (5 if scored else 0), name
        assert batch["loss_multiplier"][place].item() == float(scored)
    assert flat["token_ids"][0, :10].tolist() == [1, 2, 3, 11, 12, 90, 91, 13, 14, 15]
    assert batch["total_reward"].dtype == torch.float32
    assert batch["truncated"].tolist() == [name == "truncated" for name in KINDS]


@live
def test_a_batch_is_sampled_in_the_rollout_functions_place() -> None:
    known = service()
    infos = [{"task_ref": ref} for ref in known.tasks for _ in range(2)]
    given = batched.BatchedDataDict(
        {
            "message_log": [[] for _ in infos],
            "extra_env_info": infos,
            "task_name": ["prorl"] * len(infos),
            "idx": list(range(len(infos))),
            "loss_multiplier": torch.ones(len(infos)),
        }
    )
    with Client() as client:
        run = adapter.ServiceRollout(client.experiment(known.experiment), timeout=300)
        batch, metrics = run(
            policy_generation=None,
            input_batch=given,
            tokenizer=SimpleNamespace(eos_token_id=0),
            task_to_env={},
            max_seq_len=4096,
        )
    assert isinstance(batch, batched.BatchedDataDict)
    assert sorted(batch["total_reward"].tolist()) == [0.0, 0.0, 1.0, 1.0]
    assert batch["idx"] == given["idx"]
    assert batch["loss_multiplier"].tolist() == [1.0] * len(infos)
    flat, _lengths = flattened(batch["message_log"])
    assert int(flat["token_loss_mask"].sum()) == metrics["mean_gen_tokens_per_sample"] * len(infos)
