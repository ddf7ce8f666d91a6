"""Each trainer's form of every kind of trajectory, without that trainer."""

from typing import Any

import pytest
from prorl_client.adapters import nemo_gym, nemo_rl, skyrl, slime, trl, verifiers, verl
from prorl_client.adapters.rows import placeholder, rows_of, single_row
from prorl_client.adapters.sampling import NoTask

from tests.adapters.made import every_kind, trajectory

KINDS = every_kind()
SCORED = [name for name, each in KINDS.items() if each.trainable and each.reward is not None]
UNSCORED = [name for name in KINDS if name not in SCORED]
RESPONSE = [11, 12, 90, 91, 13, 14, 15]
MASK = [1, 1, 0, 0, 1, 1, 1]
LOGPROBS = [-0.5, -0.25, 0.0, 0.0, -1.0, -0.125, -2.0]


def row_of(kind: str) -> Any:
    return single_row(KINDS[kind]) or placeholder(KINDS[kind], 7)


def test_trl_takes_flat_lists_and_a_reward_of_its_own_name() -> None:
    found = trl.outputs([row_of("completed"), row_of("failed")])
    assert found == {
        "prompt_ids": [[1, 2, 3], [7]],
        "completion_ids": [RESPONSE, [7]],
        "logprobs": [LOGPROBS, [0.0]],
        "env_mask": [MASK, [0]],
        "service_reward": [1.0, None],
        "rollout": ["r-1", "r-1"],
    }
    assert trl.service_reward(["a", "b"], service_reward=found["service_reward"]) == [1.0, None]


def test_trls_worker_gives_each_row_of_a_rollout_its_advantage() -> None:
    group = [KINDS["forked"], KINDS["zero"], KINDS["failed"]]
    found = trl.rollout_samples(group, group_id=5, model_version=9, first_version=3)
    assert [each["group_id"] for each in found] == [5, 5, 5]
    assert found[0]["advantage"] == found[1]["advantage"] == -found[2]["advantage"] > 0
    assert [each["model_version"] for each in found] == [0, 2, 0]
    assert found[0]["input_ids"] == [1, 2, 3, *RESPONSE]
    assert found[0]["completion_mask"] == [0, 0, 0, *MASK]
    assert found[0]["old_log_probs"] == [0.0, 0.0, 0.0, *LOGPROBS]
    unknown = trajectory()
    for each in unknown.segments:
        object.__setattr__(each, "version_values", each.version_values * 0 - 1)
    [only] = trl.rollout_samples([unknown], group_id=1, model_version=9)
    assert only["model_version"] == 9


def test_verls_list_form_has_every_segment_and_drops_what_is_unscored() -> None:
    found = verl.output_list(KINDS["forked"])
    assert [each["response_ids"] for each in found] == [RESPONSE, [16]]
    assert {each["reward_score"] for each in found} == {1.0}
    assert found[0]["extra_fields"]["reward_extra_info"] == {}
    assert found[0]["extra_fields"]["turn_scores"] == [0.25]
    assert (
        found[0]["extra_fields"]["min_global_steps"],
        found[0]["extra_fields"]["max_global_steps"],
    ) == (3, 4)
    for kind in UNSCORED:
        assert verl.output_list(KINDS[kind]) == []


def test_verls_limits_clip_responses_and_leave_out_long_prompts() -> None:
    [short] = verl.output_list(KINDS["completed"], response_tokens=3)
    assert (short["response_ids"], short["response_mask"]) == ([11, 12, 90], [1, 1, 0])
    assert verl.output_list(KINDS["completed"], prompt_tokens=2) == []
    single = verl.single_output(KINDS["completed"], stand_in=7, prompt_tokens=2)
    assert (single["prompt_ids"], single["response_mask"]) == ([7], [0])


@pytest.mark.parametrize("kind", KINDS)
def test_verls_single_form_is_always_there(kind: str) -> None:
    found = verl.single_output(KINDS[kind], stand_in=7)
    lengths = {len(found[name]) for name in ("response_ids", "response_mask", "response_logprobs")}
    assert len(lengths) == 1
    assert (sum(found["response_mask"]) > 0) is (kind in SCORED)
    assert isinstance(found["reward_score"], float)


@pytest.mark.parametrize("kind", KINDS)
def test_slimes_samples_have_a_number_and_a_token_at_least(kind: str) -> None:
    row = slime.rows_for(KINDS[kind], "most")[0]
    found = slime.sample_fields(KINDS[kind], row, neutral=0.5)
    size = found["response_length"]
    assert size == len(found["loss_mask"]) == len(found["rollout_log_probs"]) >= 1
    assert len(found["tokens"]) > size
    assert found["remove_sample"] is (kind not in SCORED)
    assert found["reward"] == (KINDS[kind].reward if kind in SCORED else 0.5)


def test_slimes_statuses_and_versions() -> None:
    statuses = {
        kind: slime.sample_fields(each, single_row(each), neutral=0.0)["status"]
        for kind, each in KINDS.items()
    }
    assert statuses["completed"] == "COMPLETED"
    assert statuses["truncated"] == "TRUNCATED"
    assert statuses["cancelled"] == "ABORTED"
    assert statuses["failed"] == statuses["unscored"] == "FAILED"
    found = slime.sample_fields(KINDS["completed"], row_of("completed"), neutral=0.0)
    assert found["weight_versions"] == ["3", "4"]
    assert found["response"] == "\nTwo files."
    assert len(slime.rows_for(KINDS["forked"], "all")) == 2
    assert slime.rows_for(KINDS["failed"], "all") == [None]


def test_skyrl_has_one_row_for_each_trajectory() -> None:
    groups = [list(KINDS.values()), [KINDS["zero"], KINDS["failed"]]]
    found = skyrl.generator_output(groups, stand_in=7, trajectory_ids=list(range(12)))
    for name in ("response_ids", "loss_masks", "rewards", "rollout_logprobs", "stop_reasons"):
        assert len(found[name]) == 12
    for ids, mask, logprobs in zip(
        found["response_ids"], found["loss_masks"], found["rollout_logprobs"], strict=True
    ):
        assert len(ids) == len(mask) == len(logprobs) > 0
    assert [sum(mask) > 0 for mask in found["loss_masks"][:10]] == [k in SCORED for k in KINDS]
    assert found["rewards"][10:] == [0.0, 0.0]
    mean = sum(KINDS[kind].reward or 0.0 for kind in SCORED) / len(SCORED)
    assert found["rewards"][list(KINDS).index("failed")] == mean
    assert found["trajectory_ids"] == list(range(12))
    assert found["is_last_step"] is None


def test_skyrls_steps_are_segments_and_the_reward_is_on_the_last() -> None:
    groups = [[KINDS["forked"], KINDS["failed"]]]
    found = skyrl.generator_output(groups, stand_in=7, trajectory_ids=["a", "b"], step_wise=True)
    assert found["is_last_step"] == [False, True, True]
    assert found["trajectory_ids"] == ["a", "a", "b"]
    assert found["rewards"] == [0.0, 1.0, 1.0]


def test_nemo_rls_log_is_the_row_in_messages() -> None:
    log = nemo_rl.message_log(row_of("completed"))
    assert [each["role"] for each in log] == ["user", "assistant", "user", "assistant"]
    assert [token for each in log for token in each["token_ids"]] == [1, 2, 3, *RESPONSE]
    assert [each.get("generation_logprobs") for each in log] == [
        None,
        [-0.5, -0.25],
        None,
        [-1.0, -0.125, -2.0],
    ]


@pytest.mark.parametrize("kind", UNSCORED)
def test_nemo_rls_log_of_what_is_unscored_has_nothing_to_train_on(kind: str) -> None:
    log = nemo_rl.message_log(row_of(kind))
    assert not any("generation_logprobs" in each for each in log)
    columns = nemo_rl.batch_columns([[KINDS["zero"], KINDS[kind]]], stand_in=7)
    assert columns["loss_multiplier"] == [1.0, 0.0]
    assert columns["total_reward"] == [0.0, 0.0]


def test_nemo_rls_metrics_count_tokens_and_ends() -> None:
    groups = [[KINDS["completed"], KINDS["truncated"], KINDS["failed"]]]
    columns = nemo_rl.batch_columns(groups, stand_in=7)
    found = nemo_rl.metrics_of(columns, groups)
    assert found["mean_gen_tokens_per_sample"] == (5 + 5 + 1) / 3
    assert found["mean_env_tokens_per_sample"] == (5 + 5 + 1) / 3
    assert found["truncation_rate"] == found["unscored_rate"] == 1 / 3
    assert (found["max_total_reward"], found["total_turns"]) == (1.0, 4)


def test_nemo_gyms_response_carries_ids_once_a_turn() -> None:
    found = nemo_gym.response_of(KINDS["completed"], model="m")
    assert [each["type"] for each in found["output"]] == [
        "function_call",
        "function_call_output",
        "message",
    ]
    with_ids = [each for each in found["output"] if "generation_token_ids" in each]
    assert [each["prompt_token_ids"] for each in with_ids] == [
        [1, 2, 3],
        [1, 2, 3, 11, 12, 90, 91],
    ]
    assert [each["generation_token_ids"] for each in with_ids] == [[11, 12], [13, 14, 15]]
    assert found["status"] == "completed"
    assert nemo_gym.response_of(KINDS["truncated"], model="m")["status"] == "incomplete"


@pytest.mark.parametrize("kind", KINDS)
def test_nemo_gyms_ids_are_contiguous_and_only_of_what_is_scored(kind: str) -> None:
    found = nemo_gym.response_of(KINDS[kind], model="m")
    seen: list[int] = []
    for item in found["output"]:
        if "generation_token_ids" in item:
            assert item["prompt_token_ids"][: len(seen)] == seen
            seen = item["prompt_token_ids"] + item["generation_token_ids"]
    assert bool(seen) is (kind in SCORED)
    fields = nemo_gym.verify_fields(KINDS[kind])
    assert fields["mask_sample"] is (KINDS[kind].reward is None)
    assert isinstance(fields["reward"], float)


def test_nemo_gyms_rows_name_a_task_or_are_one() -> None:
    row = {"responses_create_params": {"input": [{"role": "user", "content": "Add."}]}}
    named = {**row, "verifier_metadata": {"task_ref": "a"}}
    assert nemo_gym.task_of_run(named, None) == {"task_ref": "a"}
    with pytest.raises(NoTask):
        nemo_gym.task_of_run(row, None)
    whole: Any = nemo_gym.task_of_run({**row, "verifier_metadata": {"answer": "2"}}, "math@1")
    assert (whole.environment, whole.instruction) == ("math@1", "Add.")
    assert whole.hidden == {"evaluator_payload": {"answer": "2"}}


def test_prime_rls_samples_are_flat_and_scored_ones_alone() -> None:
    found = verifiers.training_samples([KINDS["forked"], KINDS["zero"], KINDS["failed"]])
    assert [each["token_ids"] for each in found] == [
        [1, 2, 3, *RESPONSE],
        [1, 2, 11, 90, 16],
        [1, 2, 3, *RESPONSE],
    ]
    for each in found:
        size = len(each["token_ids"])
        names = ("mask", "logprobs", "temperatures", "advantages")
        assert [len(each[name]) for name in names] == [size] * 4
        assert all(a == 0.0 or m for a, m in zip(each["advantages"], each["mask"], strict=True))
    assert set(found[0]["temperatures"]) == {0.5}
    assert found[0]["advantages"][3] == 0.5
    assert found[0]["env_name"] == "files@1"


@pytest.mark.parametrize("kind", UNSCORED)
def test_nothing_unscored_is_trained_on_anywhere(kind: str) -> None:
    each = KINDS[kind]
    assert trl.rollout_samples([each], group_id=1, model_version=0) == []
    assert verifiers.training_samples([each]) == []
    assert verl.output_list(each) == []
    assert all(not any(row.loss_mask) for row in rows_of(each))


def test_a_trace_has_a_path_for_each_segment() -> None:
    found = verifiers.trace_of(KINDS["forked"])
    assert [node["parent"] for node in found["nodes"]] == [None, 0, 1, 2, None, 4]
    assert [node["sampled"] for node in found["nodes"]] == [False, True, False, True, False, True]
    joined = [token for node in found["nodes"][:4] for token in node["token_ids"]]
    assert joined == [1, 2, 3, *RESPONSE]
    assert found["rewards"] == {"reward": {"score": 1.0}}


@pytest.mark.parametrize("kind", UNSCORED)
def test_a_trace_without_a_reward_has_an_error_and_no_tokens(kind: str) -> None:
    found = verifiers.trace_of(KINDS[kind])
    assert (found["ok"], found["nodes"], found["rewards"]) == (False, [], {})
    assert len(found["errors"]) == 1
