"""A finished experiment is scored again by EVAL workers, from what was kept, without rollouts."""

from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import JSON, Line, marker, wait_until, write_task

ImportFolder = Callable[..., None]


def test_what_a_sandbox_left_is_judged_by_other_settings_without_another_sandbox(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    wrote = '{"reward": \'$(wc -l < /app/made)\', "style": 0.25}'
    ref = write_task(tmp_path, "again", test=f"echo '{wrote}' > /logs/verifier/reward.json")
    import_folder("again", tmp_path)
    line.server.play(
        {"marker": marker("again"), "turns": ["mkdir -p /app; echo > /app/made", "submit"]}
    )
    experiment = line.experiment("again")
    rollouts = line.submit(experiment, [ref], samples=2)
    done = line.wait_done(rollouts)
    assert [each["reward"] for each in done] == [1.0, 1.0]

    def scored_again(**body: object) -> JSON:
        job = line.operator.call("POST", f"/experiments/{experiment}/reevaluations/", body)
        address = f"/reevaluations/{job['id']}/"
        wait_until(lambda: line.operator.call("GET", address)["state"] == "done", "the job's end")
        return dict(line.operator.call("GET", address)["report"])

    by_style = scored_again(evaluator="script", evaluator_settings={"key": "style"})
    by_answer = scored_again(evaluator="regex", evaluator_settings={"pattern": "submit"})

    assert (by_style["done"], by_style["scored"], by_style["mean_after"]) == (2, 2, 0.25)
    assert (by_style["mean_before"], by_style["agreement"]) == (1.0, 0.0)
    assert {each["rollout"] for each in by_style["changed"]} == set(rollouts)
    assert by_answer["done"] == 2
    assert [line.rollout(each)["reward"] for each in rollouts] == [1.0, 1.0]
    evaluations = line.trainer.call("GET", f"/rollouts/{rollouts[0]}/evaluations/")
    assert [each["source"] for each in evaluations] == ["rollout"] + ["reevaluation"] * 2
    assert evaluations[0]["evidence"]["size_bytes"] > 0
    sandboxes = line.sql(
        "SELECT count(*) FROM sandboxes_sandbox WHERE owner = ANY(%s)", list(rollouts)
    )
    assert sandboxes == [(4,)]  # one for the agent and one for its tests, of each
