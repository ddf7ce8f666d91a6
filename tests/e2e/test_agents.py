"""The built-in agents through the whole line, with real token ids and real sandboxes."""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prorl_site.stack.processes import ROOT
from rollouts.importers.base import FileContent, encode_files
from rollouts.inference.rendering import load_renderer
from tests.e2e.harness import JSON, WHOLE, Line, ModelServer, marker, write_task

ImportFolder = Callable[..., None]
TOOLS = ["bash", "editor", "ipython", "think", "submit"]
# ChatML with tools as Hermes and Qwen show them; the demo's own template shows none.
TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string
     else call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif not loop.first or message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@pytest.fixture(scope="module")
def caller(whole_line: Line, tokenizer_folder: Path) -> Any:
    """Yield a policy whose template shows tools, and its own scripted server."""
    folder = tokenizer_folder.parent / "with-tools"
    shutil.copytree(tokenizer_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE.strip()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "renderer.json").write_text(json.dumps({"tool_parser": "hermes"}))
    server = ModelServer(folder)
    server.start()
    try:
        policy = whole_line.trainer.call(
            "POST",
            "/policies/",
            {
                "name": "caller",
                "model": "scripted-not-a-model",
                "tokenizer": str(folder),
                "context_tokens": 32768,
            },
        )["id"]
        body = {"policy": policy, "url": server.url, "kind": "vllm", "max_in_flight": 16}
        whole_line.trainer.call("POST", "/inference-servers/", body)
        yield policy, server, folder
    finally:
        server.kill()


@pytest.fixture
def environment(line: Line) -> Callable[..., str]:
    """Return a function that makes an environment over the base image; returns its name."""

    def make(name: str, agent: str, tools: list[str], **settings: Any) -> str:
        body = {
            "name": name,
            "image": "base",
            "agent": agent,
            "tools": tools,
            "agent_settings": settings,
        }
        line.operator.call("POST", "/environments/", body)
        return name

    return make


def call(name: str, **arguments: Any) -> str:
    """Return a call as the template's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def masked(segment: JSON) -> list[list[int]]:
    """Return the sampled ids of a segment, turn by turn."""
    return [segment["response_ids"][turn["start"] : turn["end"]] for turn in segment["turns"]]


def test_tools_are_called_in_the_templates_own_syntax(
    line: Line,
    caller: Any,
    import_folder: ImportFolder,
    environment: Callable[..., str],
    tmp_path: Path,
) -> None:
    policy, server, folder = caller
    ref = write_task(
        tmp_path,
        "calls",
        setup="mkdir -p /app",
        test="grep -qx 42 /app/out && echo 1 > /logs/verifier/reward.txt",
    )
    environment("calls", "tools", TOOLS)
    import_folder("calls", tmp_path, "calls")
    create = call("editor", command="create", path="/app/a.py", file_text="print(6 * 7)\n")
    texts = [
        "I write it.\n" + create + "\n" + call("bash", command="cd /app; python3 a.py > out; pwd"),
        call("ipython", code="open('/app/out').read()") + "\n" + call("fly", to="the moon"),
        '<tool_call>\n{"name": "bash", "arguments": {"command": \n</tool_call>',
        call("think", thought="All is there."),
        call("submit", answer="42"),
    ]
    server.play({"marker": marker("calls"), "turns": texts})

    experiment = line.experiment("calls", policy=policy)
    (rollout,) = line.wait_done(line.submit(experiment, [ref]))

    assert (rollout["outcome"], rollout["reward"]) == ("scored", 1.0), rollout
    assert (rollout["stop_reason"], rollout["turns"]) == ("finished", 5)
    trajectory = line.trajectory(rollout["id"])
    results = [m for m in trajectory["messages"] if m["role"] == "tool"]
    assert [m["name"] for m in results][:4] == ["editor", "bash", "ipython", "fly"]
    assert results[1]["content"] == "/app\n[exit code: 0]"
    assert "42" in results[2]["content"]
    assert results[3]["content"].startswith("There is no tool named fly.")
    assert trajectory["agent"]["tool_counts"] == {"bash": 1, "editor": 1, "ipython": 1, "think": 1}
    assert trajectory["agent"]["malformed_actions"] == 2
    (segment,) = trajectory["segments"]
    renderer = load_renderer(folder)
    assert [renderer.decode(ids) for ids in masked(segment)] == texts


def test_an_interpreter_that_uses_up_its_sandbox_ends_the_episode(
    line: Line, caller: Any, import_folder: ImportFolder, tmp_path: Path
) -> None:
    policy, server, _folder = caller
    ref = write_task(tmp_path, "pyhog")
    body = {"name": "pyhog", "image": "base", "agent": "tools", "tools": TOOLS}
    limits = {"memory_bytes": 512 * 1024**2}
    line.operator.call("POST", "/environments/", {**body, "limits": limits})
    import_folder("pyhog", tmp_path, "pyhog")
    hog = "x = []\nwhile True: x.append(bytes([1]) * (1 << 20))"
    texts = [call("ipython", code="1 + 1"), call("ipython", code=hog), call("submit", answer="")]
    server.play({"marker": marker("pyhog"), "turns": texts})

    experiment = line.experiment("pyhog", policy=policy, failure_reward=-1.0)
    (rollout,) = line.wait_done(line.submit(experiment, [ref]))

    assert (rollout["outcome"], rollout["reward"]) == ("scored", -1.0), rollout
    assert (rollout["stop_reason"], rollout["turns"]) == ("sandbox_limit", 2)
    assert rollout["restarts"] == 0
    assert line.trajectory(rollout["id"])["agent"]["over_limit"] == "memory"


def test_one_block_a_turn(
    line: Line, import_folder: ImportFolder, environment: Callable[..., str], tmp_path: Path
) -> None:
    ref = write_task(
        tmp_path,
        "blocks",
        test="cp /tmp/b /logs/verifier/b && echo 1 > /logs/verifier/reward.txt",
        evaluator=WHOLE,
    )
    environment("blocks", "bash_block", ["bash", "submit"])
    import_folder("blocks", tmp_path, "blocks")
    turns = [
        "I make a file.\n```bash\ncat > /tmp/b <<'EOF'\ntwo\nlines\nEOF\nwc -l < /tmp/b\n```",
        "I do not know.",
        "Done.\n```bash\nsubmit 2\n```",
    ]
    line.server.play({"marker": marker("blocks"), "turns": turns})

    (rollout,) = line.wait_done(line.submit(line.experiment("blocks"), [ref]))

    assert (rollout["outcome"], rollout["reward"]) == ("scored", 1.0), rollout
    assert (rollout["stop_reason"], rollout["answer"]) == ("finished", "2")
    messages = line.trajectory(rollout["id"])["messages"]
    assert "2\n[exit code: 0]" in [m["content"] for m in messages]


def start_with_a_snapshot(line: Line, experiment: str, ref: str, *, turn: int) -> tuple[str, str]:
    """Start a rollout that is asked for its sandbox after a turn; return both ids."""
    line.trainer.call("POST", f"/experiments/{experiment}/pause/")
    (rollout,) = line.submit(experiment, [ref])
    asked = line.trainer.call("POST", f"/rollouts/{rollout}/snapshots/", {"turn": turn})
    line.trainer.call("POST", f"/experiments/{experiment}/resume/")
    return rollout, asked["id"]


def branch(line: Line, experiment: str, snapshot: str, samples: int, **inline: Any) -> list[JSON]:
    """Sample a task that is sent along from a snapshot; return the rollouts once all are done."""
    groups = [{"inline": inline, "samples": samples, "snapshot": snapshot}]
    answer = line.trainer.call("POST", f"/experiments/{experiment}/groups/", {"groups": groups})
    return line.wait_done([each for group in answer["groups"] for each in group["rollouts"]])


def hidden_test(test: str) -> JSON:
    """Return what the evaluator of a task gets that no importer saw."""
    return {"tests": encode_files({"test.sh": FileContent(data=test.encode(), mode=0o755)})}


def test_actions_are_sampled_where_another_episode_stood(
    line: Line, import_folder: ImportFolder, environment: Callable[..., str], tmp_path: Path
) -> None:
    ref = write_task(tmp_path, "point", setup="mkdir -p /app")
    environment("point", "branch", ["bash", "submit"], style="bash_block")
    import_folder("point", tmp_path, "point")
    first_turn = "```bash\necho one >> /app/log\n```"
    look = "```bash\ncat /app/log\n```"
    line.server.play({"marker": marker("point"), "turns": [first_turn, look]})
    experiment = line.experiment("point")
    source, snapshot = start_with_a_snapshot(line, experiment, ref, turn=1)
    line.wait_done([source])
    prefix = line.trajectory(source)["messages"][:3]
    assert prefix[1] == {"role": "assistant", "content": first_turn}

    done = branch(
        line,
        experiment,
        snapshot,
        2,
        environment="point",
        instruction="Go on.",
        messages=prefix,
        hidden=hidden_test("cp /app/log /logs/verifier && echo 0.5 > /logs/verifier/reward.txt"),
    )

    assert [(r["outcome"], r["reward"], r["turns"]) for r in done] == [("scored", 0.5, 1)] * 2, done
    assert {r["answer"] for r in done} == {"cat /app/log"}
    for rollout in done:
        trajectory = line.trajectory(rollout["id"])
        assert trajectory["messages"][:3] == prefix
        assert trajectory["messages"][4]["content"] == "one\n[exit code: 0]"
        (segment,) = trajectory["segments"]
        assert segment["response_mask"] == [1] * len(segment["response_ids"])
        (sampled,) = masked(segment)
        assert load_renderer(line.server.tokenizer).decode(sampled) == look


def test_an_episode_with_tools_is_branched_off_after_its_second_turn(
    line: Line,
    caller: Any,
    import_folder: ImportFolder,
    environment: Callable[..., str],
    tmp_path: Path,
) -> None:
    policy, server, folder = caller
    ref = write_task(tmp_path, "trunk", setup="mkdir -p /app")
    environment("trunk", "tools", TOOLS)
    environment("twigs", "branch", TOOLS, style="tools")
    import_folder("trunk", tmp_path, "trunk")
    texts = [
        call("bash", command="mkdir /tmp/w; cd /tmp/w; echo one > log"),
        call("bash", command="echo two >> log"),
        call("bash", command="pwd; cat log; echo three >> log") + call("think", thought="So."),
        call("submit", answer="done"),
    ]
    server.play({"marker": marker("trunk"), "turns": texts})
    experiment = line.experiment("trunk", policy=policy)
    source, snapshot = start_with_a_snapshot(line, experiment, ref, turn=2)
    (ended,) = line.wait_done([source])
    assert (ended["outcome"], ended["turns"]) == ("scored", 4), ended
    messages = line.trajectory(source)["messages"]
    prefix = messages[:5]
    assert [m["role"] for m in prefix] == ["user", "assistant", "tool", "assistant", "tool"]

    done = branch(
        line,
        experiment,
        snapshot,
        4,
        environment="twigs",
        instruction="Go on.",
        messages=prefix,
        hidden={
            **hidden_test("wc -l < /tmp/w/log > /logs/verifier/reward.txt"),
            "evaluator_settings": {"scope": "whole"},
        },
    )

    assert [(r["outcome"], r["reward"], r["turns"]) for r in done] == [("scored", 3.0, 1)] * 4, done
    for rollout in done:
        trajectory = line.trajectory(rollout["id"])
        assert trajectory["messages"] == messages[:8]
        assert trajectory["messages"][6]["content"] == "/tmp/w\none\ntwo\n[exit code: 0]"
        (segment,) = trajectory["segments"]
        (sampled,) = masked(segment)
        assert load_renderer(folder).decode(sampled) == texts[2]


@pytest.fixture
def operators_servers(line: Line) -> Iterator[Callable[..., None]]:
    """Return a function that starts what reads the operator's settings anew, with others."""
    processes = line.stack.started()

    def start(**settings: str) -> None:
        processes.stop("web", "run")
        for name in ("web", "run"):
            processes.start(name, **settings)
        line.stack.wait_ready()

    yield start
    processes.stop("web", "run")
    line.ensure_up()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder that the servers' account can write to."""
    folder = Path(tempfile.mkdtemp(prefix="prorl-mcp-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_an_mcp_server_is_called_recorded_and_replayed_without_it(
    line: Line,
    caller: Any,
    import_folder: ImportFolder,
    operators_servers: Callable[..., None],
    open_folder: Path,
    tmp_path: Path,
) -> None:
    policy, server, _folder = caller
    listed = tmp_path / "servers.json"
    command = [sys.executable, "-m", "tests.unit.tools.mcp_program"]
    listed.write_text(json.dumps({"notes": {"command": command, "cwd": str(ROOT)}}))
    settings = {
        "PRORL_MCP_SERVERS": str(listed),
        "PRORL_TOOL_RECORDING": "record",
        "PRORL_TOOL_RECORDINGS": str(tmp_path / "recordings"),
    }
    operators_servers(**settings)
    names = ["mcp:notes/add", "mcp:notes/count", "submit"]
    body = {
        "name": "notes",
        "image": "base",
        "agent": "tools",
        "tools": names,
        "tool_settings": {"mcp:notes/count": {"max_calls": 1}},
    }
    line.operator.call("POST", "/environments/", body)
    ref = write_task(tmp_path / "tasks", "notes")
    import_folder("notes", tmp_path / "tasks", "notes")
    count = call("notes__count", path=str(open_folder / "count"))
    turns = [call("notes__add", a=2, b=40) + count, count, call("submit", answer="42")]
    server.play({"marker": marker("notes"), "turns": turns})
    experiment = line.experiment("notes", policy=policy)

    (live,) = line.wait_done(line.submit(experiment, [ref]))

    assert (live["outcome"], live["stop_reason"]) == ("scored", "finished"), live
    recorded = line.trajectory(live["id"])
    assert [tool["function"]["name"] for tool in recorded["tools"]] == [
        "notes__add",
        "notes__count",
        "submit",
    ]
    assert [m["content"] for m in recorded["messages"] if m["role"] == "tool"] == [
        "42",
        "x",
        "All 1 calls of notes__count that this task allows are used; go on without it.",
    ]

    listed.write_text(json.dumps({"notes": {"command": ["/nowhere"]}}))
    operators_servers(**{**settings, "PRORL_TOOL_RECORDING": "replay"})
    (replayed,) = line.wait_done(line.submit(experiment, [ref]))

    assert (replayed["outcome"], replayed["stop_reason"]) == ("scored", "finished"), replayed
    again = line.trajectory(replayed["id"])
    assert (again["messages"], again["tools"]) == (recorded["messages"], recorded["tools"])
    assert (open_folder / "count").read_text() == "x"
