"""TRL's own trainer trains on what the service sampled, and its queue takes our samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
trl = pytest.importorskip("trl", reason="TRL is not installed here: make test-adapters")

from prorl_client import Client  # noqa: E402
from prorl_client.adapters.trl import (  # noqa: E402
    RolloutFunc,
    RolloutWorker,
    _as_arrays,
    rollout_samples,
    service_reward,
)

from tests.adapters.made import every_kind  # noqa: E402
from tests.adapters.real.service import live, service  # noqa: E402


def test_the_asynchronous_trainers_batcher_takes_every_sample() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import FixedCountBatcher
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    fields = rollout_samples(list(every_kind().values()), group_id=1, model_version=4)
    samples = [RolloutSample(**_as_arrays(each)) for each in fields]
    assert len(samples) == 7
    for each in samples:
        assert each.input_ids.shape == each.completion_mask.shape == each.old_log_probs.shape
        assert each.input_ids.dtype == np.int64
    queued = [
        {name: getattr(each, name) for name in ("input_ids", "completion_mask", "old_log_probs")}
        | {"advantage": each.advantage, "group_id": each.group_id, "metrics": each.metrics}
        for each in samples
    ]
    batches = list(FixedCountBatcher(queued, num_processes=2, microbatch_size=7))
    assert sum(len(row.samples) for row in batches[0]) == 7


@live
def test_grpo_trains_two_steps_on_what_the_service_sampled(tmp_path: Path) -> None:
    # Given a tiny model with the policy's vocabulary, and prompts that are tasks of the service.
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    known = service()
    tokenizer = AutoTokenizer.from_pretrained(known.tokenizer)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    before = model.lm_head.weight.detach().clone()
    seen: list[dict[str, Any]] = []

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        found = RolloutFunc(experiment, timeout=300)(prompts, trainer)
        seen.append(found)
        return found

    def shaped(completions: list[Any], **columns: Any) -> list[float | None]:
        # The scripted policy does the same in every sample: the service's rewards are equal.
        found = service_reward(completions, **columns)
        return [each if each is None else each + place % 2 for place, each in enumerate(found)]

    # When TRL's trainer takes two steps.
    with Client() as client:
        experiment = client.experiment(known.experiment)
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=shaped,
            train_dataset=Dataset.from_dict({"prompt": list(known.tasks) * 4}),
            rollout_func=rollout_func,
            args=GRPOConfig(
                output_dir=str(tmp_path),
                per_device_train_batch_size=4,
                num_generations=2,
                max_steps=2,
                learning_rate=1e-2,
                beta=0.0,
                report_to="none",
                use_cpu=True,
                save_strategy="no",
                logging_steps=1,
                gradient_checkpointing=False,
            ),
        )
        trainer.train()

    # Then it trained on the service's tokens, with the service's rewards.
    rewards = [each for found in seen for each in found["service_reward"]]
    assert set(rewards) == {0.0, 1.0}
    assert all(sum(mask) > 0 for found in seen for mask in found["env_mask"])
    logged = [each for each in trainer.state.log_history if "reward" in each]
    assert [each["reward"] for each in logged] == [
        pytest.approx(np.mean(found["service_reward"]) + 0.5) for found in seen
    ]
    assert not torch.equal(before, model.lm_head.weight)


@live
def test_the_worker_fills_trls_own_queue_and_stops() -> None:
    from collections import defaultdict

    from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

    known = service()
    with Client() as client:
        shared = client.experiment(known.experiment)
        experiment = client.create_experiment(
            "trl-worker",
            shared.policy,
            task_sets=list(shared.task_sets),
            sampling=dict(shared.sampling),
            budgets=dict(shared.budgets),
        )
        worker = RolloutWorker(experiment, groups=2, policy=client.policy(shared.policy))
        worker.start()
        experiment.submit(known.tasks, samples=2)
        dataset = RolloutQueueDataset(
            rollout_queue=worker.rollout_buffer,
            model_version_fn=lambda: 0,
            check_health_fn=worker.check_health,
            stale_after_s=300.0,
            metrics=defaultdict(list),
            max_staleness=4,
            report_to=[],
        )
        samples = iter(dataset)
        found = [next(samples) for _ in range(2 * len(known.tasks))]
        worker.stop()
        leases = [batch.state for batch in experiment.leases()]
    assert len({each["group_id"] for each in found}) == len(known.tasks)
    for each in found:
        assert len(each["input_ids"]) == len(each["completion_mask"]) == len(each["old_log_probs"])
        assert each["completion_mask"].sum() > 0
    assert set(leases) == {"acknowledged"}
    assert worker.metrics_queue.get_nowait() == {"prorl/batch_lag": 0.0}
