"""Selection through the whole line: filters, deadlines, and batches that come back."""

from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import JSON, Line, marker, wait_until, write_task

ImportFolder = Callable[..., None]
WRONG = "echo 0 > /logs/verifier/reward.txt"


def groups_of(line: Line, experiment: str, query: str = "") -> list[JSON]:
    """Return the groups of an experiment."""
    found: list[JSON] = line.trainer.call("GET", f"/experiments/{experiment}/groups/{query}")[
        "results"
    ]
    return found


def test_what_is_filtered_stays_readable_and_a_batch_given_back_comes_again(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    wrong = write_task(tmp_path, "filter-wrong", test=WRONG)
    right = write_task(tmp_path, "filter-right")
    import_folder("filtered", tmp_path)
    experiment = line.experiment("filtered", filters=[{"rule": "all_wrong"}])
    wait = {"groups": 2, "wait_seconds": 50}

    line.submit(experiment, [wrong, right, right], samples=2)
    first = line.trainer.call("POST", f"/experiments/{experiment}/batches/", wait)
    line.trainer.call("POST", f"/batches/{first['id']}/nack/")
    again = line.trainer.call("POST", f"/experiments/{experiment}/batches/", wait)
    line.trainer.call("POST", f"/batches/{again['id']}/ack/")

    assert {each["task_ref"] for each in first["trajectories"]} == {right}
    assert again["trajectories"] == first["trajectories"]
    assert again["repeats"] == first["id"]
    (kept,) = groups_of(line, experiment, "?state=filtered&rule=all_wrong")
    assert kept["filter_detail"] == "the best reward of 2 samples is 0"
    read = line.trainer.call("GET", f"/groups/{kept['id']}/trajectories/")["trajectories"]
    assert [(each["sample"], each["reward"]) for each in read] == [(0, 0.0), (1, 0.0)]
    assert all(each["segments"] for each in read)
    counts = line.trainer.call("GET", f"/experiments/{experiment}/groups/counts/")
    assert counts["rules"] == {"all_wrong": 1}
    assert (counts["states"]["consumed"], counts["states"]["filtered"]) == (2, 1)


def test_a_straggler_is_not_waited_for_beyond_its_deadline(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    stuck = write_task(tmp_path, "selection-stuck")
    quick = write_task(tmp_path, "selection-quick")
    import_folder("deadlines", tmp_path)
    line.server.play({"marker": marker("selection-stuck"), "turns": ["sleep 55", "submit"]})
    experiment = line.experiment("deadlines", selection={"group_deadline_seconds": 8})

    rollouts = line.submit(experiment, [stuck, quick], samples=2)
    batch = line.trainer.call(
        "POST", f"/experiments/{experiment}/batches/", {"groups": 1, "wait_seconds": 60}
    )

    assert {each["task_ref"] for each in batch["trajectories"]} == {quick}
    (filtered,) = groups_of(line, experiment, "?state=filtered")
    assert (filtered["task_ref"], filtered["filter_rule"]) == (stuck, "too_few_complete")
    ended = line.wait_done(rollouts)
    assert [each["outcome"] for each in ended] == [*["cancelled"] * 2, *["scored"] * 2]
    wait_until(lambda: line.sandboxes_left(rollouts) == 0, "the end of the sandboxes")
