"""Files of trajectories, read back by what they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prorl_client import Client, MissingExtra, NotFound, Trajectory, open_export, read_jsonl
from prorl_client.exports import Export
from prorl_client.exports.atif import as_atif

from tests.clients import shapes
from tests.clients.scripted import Reply, Scripted, page, problem

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many files?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I look.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "bash", "arguments": '{"cmd": "ls"}'},
            },
            {"function": {"name": "bash", "arguments": "not json"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "a b"},
    {"role": "tool", "content": [{"type": "text", "text": "err"}]},
    {"role": "assistant", "content": "2"},
]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]


def two_turns(**values: Any) -> dict[str, Any]:
    """Return a trajectory of two turns in one segment, with a tool's answer between them."""
    segment = {
        **shapes.segment(6),
        "response_mask": [1, 1, 0, 0, 1, 1],
        "response_logprobs": [-0.5, -0.25, 0.0, 0.0, -1.0, -2.0],
        "policy_versions": [[3, 4], [4, 2]],
        "turns": [
            {"start": 0, "end": 2, "finish_reason": "stop", "reward": None},
            {"start": 4, "end": 6, "finish_reason": "stop", "reward": 0.5},
        ],
    }
    made = shapes.trajectory(1, segments=[segment], messages=CONVERSATION, tools=TOOLS, turns=2)
    return {**made, **values}


def written(path: Path, *made: dict[str, Any], format: str | None = None) -> Path:
    with open_export(path, format=format) as export:
        for each in made:
            export.write(Trajectory.parse(each))
    assert export.count == len(made)
    assert list(path.parent.glob(".*")) == []
    return path


def test_jsonl_is_what_the_service_says_and_reads_back(tmp_path: Path) -> None:
    made = [
        two_turns(agent={"malformed_actions": 1}),
        shapes.trajectory(2, segments=[], error={"code": "trajectory.damaged"}, reward=None),
    ]
    path = written(tmp_path / "new" / "out.jsonl", *made)

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = list(read_jsonl(path))

    for line, whole in zip(lines, made, strict=True):
        assert line == {**whole, "agent": whole.get("agent", {})}
    assert [each.as_dict() for each in found] == lines
    shapes.same_tokens(found[0].segments[0], made[0]["segments"][0])


def test_parquet_has_a_row_for_each_segment(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    made = [
        two_turns(),
        shapes.trajectory(2, segments=[], reward=None, outcome="infra_failed"),
        shapes.trajectory(3, segments=[shapes.segment(2), shapes.segment(4, number=1)]),
    ]

    rows = parquet.read_table(written(tmp_path / "out.parquet", *made)).to_pylist()

    assert [(row["sample"], row["segment"]) for row in rows] == [(1, 0), (2, None), (3, 0), (3, 1)]
    first, none = rows[0], rows[1]
    assert first["response_ids"] == made[0]["segments"][0]["response_ids"]
    assert first["response_mask"] == [1, 1, 0, 0, 1, 1]
    assert first["policy_versions"] == [3, 3, 3, 3, 4, 4]
    assert json.loads(first["messages"]) == CONVERSATION
    assert (none["reward"], none["response_ids"], none["outcome"]) == (None, None, "infra_failed")


def test_parquet_without_a_row_is_a_file_too(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")

    assert parquet.read_table(written(tmp_path / "out.parquet")).num_rows == 0


def test_parquet_writes_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("prorl_client.exports.parquet.ROWS_AT_ONCE", 2)
    made = [shapes.trajectory(number) for number in range(5)]

    file = parquet.ParquetFile(written(tmp_path / "out.parquet", *made))

    assert file.num_row_groups == 3
    file.close()


def test_parquet_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)

    with (
        pytest.raises(MissingExtra, match=r"prorl-client\[arrow\]"),
        open_export(tmp_path / "a.pq"),
    ):
        pytest.fail("nothing can be written")

    assert list(tmp_path.iterdir()) == []


def test_atif_documents_are_valid_and_hold_each_turns_tokens(tmp_path: Path) -> None:
    atif = pytest.importorskip("atif", reason="atif needs Python 3.11")
    made = [two_turns(), shapes.trajectory(2)]
    folder = written(tmp_path / "out", *made)
    lines = written(tmp_path / "out.jsonl", *made, format="atif").read_text().splitlines()

    documents = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert [json.loads(line) for line in lines] == documents
    assert [path.name for path in sorted(folder.iterdir())] == [
        f"{shapes.rollout_id(number)}.json" for number in (1, 2)
    ]
    first = atif.Trajectory.model_validate(documents[0])
    atif.Trajectory.model_validate(documents[1])

    assert [step.source for step in first.steps] == ["system", "user", "agent", "agent"]
    acted, answered = first.steps[2], first.steps[3]
    assert acted.reasoning_content == "I look."
    assert [call.arguments for call in acted.tool_calls] == [
        {"cmd": "ls"},
        {"unparsed": "not json"},
    ]
    assert [(result.source_call_id, result.content) for result in acted.observation.results] == [
        ("c1", "a b"),
        (None, "err"),
    ]
    assert acted.metrics.prompt_token_ids == [1, 2]
    assert acted.metrics.completion_token_ids == [10, 11]
    assert acted.metrics.logprobs == [-0.5, -0.25]
    assert answered.metrics.prompt_token_ids == [1, 2, 10, 11, 12, 13]
    assert answered.metrics.completion_token_ids == [14, 15]
    assert answered.metrics.extra["policy_versions"] == [4]
    assert answered.message == "2"
    assert (first.agent.name, first.agent.version) == ("calc", "2")
    assert first.agent.tool_definitions == TOOLS
    assert first.final_metrics.total_completion_tokens == 4
    assert first.final_metrics.extra["reward"] == 1.0
    assert first.session_id == shapes.rollout_id(1)


def test_atif_gives_tokens_only_to_turns_that_were_sampled() -> None:
    given = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "not sampled here"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "sampled"},
    ]
    steps = as_atif(Trajectory.parse(shapes.trajectory(1, messages=given)))["steps"]
    assert ["metrics" in step for step in steps] == [False, False, False, True]

    # More turns than messages: nobody can say which is which.
    fewer = as_atif(Trajectory.parse(two_turns(messages=given[:2])))["steps"]
    assert ["metrics" in step for step in fewer] == [False, False]

    none = as_atif(Trajectory.parse(shapes.trajectory(1, segments=[])))["steps"]
    assert ["metrics" in step for step in none] == [False, False]


def test_unknown_roles_and_contents_are_kept_as_text() -> None:
    odd = [{"role": "critic", "content": {"a": 1}}, {"role": "tool", "content": None}, {}]

    steps = as_atif(Trajectory.parse(shapes.trajectory(1, messages=odd)))["steps"]

    assert [(step["source"], step["message"]) for step in steps] == [
        ("system", '{"a": 1}'),
        ("system", ""),
        ("system", ""),
    ]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out"])
def test_failed_export_leaves_nothing_and_what_was_there(tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = written(tmp_path / name, shapes.trajectory(1))
    before = sorted(tmp_path.rglob("*"))

    export = open_export(path)
    with pytest.raises(ZeroDivisionError), export:
        _write_and_fail(export)

    assert sorted(tmp_path.rglob("*")) == before


def _write_and_fail(export: Export) -> None:
    export.write(Trajectory.parse(shapes.trajectory(2)))
    raise ZeroDivisionError


def test_export_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", shapes.trajectory(1))
    written(folder, shapes.trajectory(2))

    assert [path.name for path in folder.iterdir()] == [f"{shapes.rollout_id(2)}.json"]


@pytest.mark.parametrize("name", ["out.csv", "out.json"])
def test_unknown_ending_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="there are jsonl, parquet, atif"):
        open_export(tmp_path / name)


def test_experiment_is_exported_rollout_by_rollout(
    service: Scripted, client: Client, tmp_path: Path
) -> None:
    row = {"experiment": "e1", "group": "g", "task": "t", "task_ref": "s", "environment": "e@1"}
    rows = [{"id": f"r{n}", "sample": n, "state": "done", **row} for n in (1, 2)]
    service.on("GET", "/experiments/e1/", Reply(body=shapes.experiment()))
    service.on("GET", "/rollouts/", page(*rows))
    for number in (1, 2):
        answer = Reply(body=shapes.trajectory(number))
        service.on("GET", f"/rollouts/r{number}/trajectory/", answer)

    count = client.experiment("e1").export(tmp_path / "out.jsonl", progress=True)

    assert (count, len(list(read_jsonl(tmp_path / "out.jsonl")))) == (2, 2)
    query = service.calls("GET", "/rollouts/")[0].query
    assert (query["experiment"], query["outcome"]) == (["e1"], ["scored"])


def test_batch_without_messages_fetches_them_for_the_export(
    service: Scripted, client: Client, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    service.on("GET", "/experiments/e1/", Reply(body=shapes.experiment()))
    service.on("POST", shapes.BATCHES, shapes.arrow_batch(shapes.trajectory(1)))
    rollout = shapes.rollout_id(1)
    service.on("GET", f"/rollouts/{rollout}/trajectory/", Reply(body=shapes.trajectory(1)))

    batch = client.experiment("e1").lease(groups=1, keep_alive=None)
    batch.export(tmp_path / "out.jsonl")

    assert batch.trajectories[0].messages is None
    (found,) = read_jsonl(tmp_path / "out.jsonl")
    assert found.messages == (
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
    )


def test_rollouts_that_left_nothing_are_passed_over(
    service: Scripted, client: Client, tmp_path: Path
) -> None:
    row = {"experiment": "e1", "group": "g", "task": "t", "task_ref": "s", "environment": "e@1"}
    rows = [{"id": f"r{n}", "sample": n, "state": "done", **row} for n in (1, 2)]
    service.on("GET", "/experiments/e1/", Reply(body=shapes.experiment()))
    service.on("GET", "/rollouts/", page(*rows))
    service.on("GET", "/rollouts/r1/trajectory/", problem(404, "trajectory.none"))
    service.on("GET", "/rollouts/r2/trajectory/", Reply(body=shapes.trajectory(2)))
    experiment = client.experiment("e1")

    assert experiment.export(tmp_path / "out.jsonl", outcome=None) == 1

    query = service.calls("GET", "/rollouts/")[0].query
    assert ("outcome" in query, query["state"]) == (False, ["done"])
    service.on("GET", "/rollouts/r1/trajectory/", problem(404, "trajectory.missing"))
    with pytest.raises(NotFound):
        experiment.export(tmp_path / "other.jsonl")
    assert not (tmp_path / "other.jsonl").exists()
