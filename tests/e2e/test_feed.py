"""A real pull experiment through the whole line: fed, filtered, leased, rewound, evaluated."""

from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import JSON, Line, marker, wait_until, write_task

ImportFolder = Callable[..., None]


def lease(line: Line, experiment: str, groups: int) -> JSON:
    """Return a batch, waiting for it."""

    def asked() -> JSON | None:
        path = f"/experiments/{experiment}/batches/"
        answer = line.trainer.call("POST", path, {"groups": groups, "wait_seconds": 20})
        return dict(answer) if answer else None

    found: JSON = wait_until(asked, "a batch", 120)
    return found


def refs_of(batch: JSON) -> list[str]:
    """Return the tasks of a batch's groups in order, each once."""
    return list(dict.fromkeys(trajectory["task_ref"] for trajectory in batch["trajectories"]))


def test_a_pulling_experiment_from_its_first_draw_to_its_last(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    check = 'test -e /app/right && echo 1 > "$OUT" || echo 0 > "$OUT"'
    test = f"OUT=/logs/verifier/reward.txt; {check}"
    refs = [write_task(tmp_path, f"pull-{number}", test=test) for number in range(6)]
    import_folder("pulled", tmp_path)
    wrong = [refs[1], refs[4]]
    line.server.play(
        *(
            {"marker": marker(ref.removeprefix("e2e/")), "turns": ["touch /app/right", "submit"]}
            for ref in refs
            if ref not in wrong
        )
    )

    experiment = line.experiment(
        "pulled",
        feed="pull",
        group_size=2,
        mode="one-step-off",
        feed_settings={"batch_groups": 2, "epochs": 1, "shuffle": False},
        filters=[{"rule": "all_wrong"}],
    )
    first = lease(line, experiment, 2)
    line.trainer.call("POST", f"/batches/{first['id']}/ack/")
    second = lease(line, experiment, 2)
    line.trainer.call("POST", f"/batches/{second['id']}/ack/")

    # In start order, without those that all samples got wrong, which others replaced at once.
    assert [refs_of(first), refs_of(second)] == [[refs[0], refs[2]], [refs[3], refs[5]]]
    assert {t["reward"] for t in first["trajectories"] + second["trajectories"]} == {1.0}
    rows = line.sql(
        "SELECT task.ref, own.state, own.filter_rule FROM rollouts_group AS own "
        "JOIN rollouts_task AS task ON task.id = own.task_id "
        "WHERE own.experiment_id = %s ORDER BY own.sequence",
        experiment,
    )
    assert rows == [
        (ref, "filtered", "all_wrong") if ref in wrong else (ref, "consumed", "") for ref in refs
    ]
    path = f"/experiments/{experiment}/"
    shown = wait_until(
        lambda: (found := line.trainer.call("GET", path))["exhausted"] and found,
        "the end of the feed",
    )
    assert shown["feed_detail"] == "epoch 1 of 1 is used up"
    assert shown["coming"] == {"open": 0, "ready": 0}

    version = shown["policy_version"]
    body = {"version": version, "force": True}
    rewound = line.trainer.call("POST", f"{path}rewind/", body)

    assert (rewound["batches"], rewound["groups_ready"], rewound["groups_filtered"]) == (2, 4, 0)
    again = lease(line, experiment, 2)
    assert refs_of(again) == refs_of(first)
    assert again["trajectories"] == first["trajectories"]
    line.trainer.call("POST", f"/experiments/{experiment}/stop/")


def test_an_evaluation_through_the_line_says_how_often_each_task_was_solved(
    line: Line, import_folder: ImportFolder, tmp_path: Path
) -> None:
    write_task(tmp_path, "solved")
    write_task(tmp_path, "unsolved", test="echo 0 > /logs/verifier/reward.txt")
    import_folder("measured", tmp_path)
    body = {
        "name": "measured",
        "policy": line.policy,
        "task_sets": ["measured"],
        "samples_per_task": 2,
        "budgets": {"max_turns": 4},
    }

    runs = [line.trainer.call("POST", "/evaluations/", body) for _ in range(2)]

    def done() -> list[JSON] | None:
        found = [line.trainer.call("GET", f"/evaluations/{run['id']}/") for run in runs]
        return found if {each["state"] for each in found} == {"done"} else None

    first, second = wait_until(done, "the end of both evaluations", 120)
    overall = first["overall"]
    assert (overall["tasks"], overall["done"], overall["nulls"], overall["right"]) == (2, 4, 0, 2)
    assert overall["pass_at"]["1"]["value"] == overall["pass_at"]["2"]["value"] == 0.5
    assert first["overall"] == second["overall"]
    path = f"/evaluations/{runs[0]['id']}/compare/?with={runs[1]['id']}"
    compared = line.trainer.call("GET", path)
    assert (compared["ties"], compared["p_value"], compared["complete"]) == (2, 1.0, True)
