"""From a data set's own file to scored rollouts: one command, one upload, one experiment each."""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.e2e.harness import JSON, Line, wait_until, write_task


def verl_row(number: int, marker: str) -> JSON:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": f"Answer in a box. {marker}"},
            {"role": "user", "content": f"What is {number} + {number}? ({marker})"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"split": "train", "index": number},
    }


def upload(line: Line, path: Path, **query: Any) -> JSON:
    """Send a file to be imported and return the import once it is over."""
    operator = line.operator
    sent = operator.client.post(
        "/task-sets/imports/",
        params={"name": path.name, **query},
        content=path.read_bytes(),
        headers={"Content-Type": "application/octet-stream"},
    )
    assert sent.status_code == 202, sent.text
    place = f"/task-sets/imports/{sent.json()['id']}/"

    def over() -> JSON | None:
        found = dict(operator.call("GET", place))
        return None if found["state"] in ("queued", "running") else found

    done: JSON = wait_until(over, "the end of the import", 120)
    return done


def test_a_verl_parquet_is_uploaded_imported_by_a_worker_and_scored(
    line: Line, tmp_path: Path
) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([verl_row(n, "verlmark") for n in (3, 4)]), path)

    done = upload(line, path, set_name="verl-sums")

    assert (done["state"], done["format"], done["created"], done["rejected"]) == (
        *("done", "verl"),
        2,
        0,
    )
    experiment = line.experiment("verl-sums")
    line.server.play(
        {"marker": "What is 3 + 3? (verlmark)", "turns": [r"It is \boxed{6}."]},
        {"marker": "What is 4 + 4? (verlmark)", "turns": ["It is 9."]},
    )
    refs = ["openai/gsm8k/train/3", "openai/gsm8k/train/4"]
    rollouts = line.wait_done(line.submit(experiment, refs))
    assert {r["task_ref"]: (r["outcome"], r["reward"]) for r in rollouts} == {
        refs[0]: ("scored", 1.0),
        refs[1]: ("scored", 0.0),
    }
    messages = line.trajectory(rollouts[0]["id"])["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == "Answer in a box. verlmark"


def test_a_harbor_folder_is_one_command_with_variables_of_its_own(
    line: Line, tmp_path: Path
) -> None:
    folder = tmp_path / "tasks"
    ref = write_task(
        folder,
        "env-told",
        test='[ "$TOLD" = "the agent" ] && [ "$(cat /app/told)" = "the agent" ] '
        "&& echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt",
        setup='echo "$TOLD" > /app/setup-told',
    )
    toml = folder / "env-told" / "task.toml"
    toml.write_text(f'{toml.read_text()}[environment]\nenv = {{ TOLD = "the agent" }}\n')
    packed = Path(shutil.make_archive(str(tmp_path / "tasks"), "zip", folder))

    done = upload(line, packed, set_name="harbor-told")

    assert (done["state"], done["format"], done["created"]) == ("done", "harbor", 1)
    line.server.play(
        {
            "marker": "Marker env-told end.",
            "turns": [
                'test "$(cat /app/setup-told)" = "$TOLD" && printf %s "$TOLD" > /app/told',
                "submit",
            ],
            "after": "submit",
        }
    )
    experiment = line.experiment("harbor-told")
    (rollout,) = line.wait_done(line.submit(experiment, [ref]))
    assert (rollout["outcome"], rollout["reward"]) == ("scored", 1.0)
