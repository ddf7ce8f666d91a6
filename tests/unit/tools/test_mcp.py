"""MCP servers over stdio and HTTP: real ones, some of which die."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.tools.background import CallCancelled
from rollouts.tools.base import (
    InvalidArguments,
    InvalidToolSettings,
    Tool,
    ToolContext,
    ToolUnavailable,
    UnknownTool,
)
from rollouts.tools.cassettes import Cassettes
from rollouts.tools.host import HostAccess
from rollouts.tools.mcp_servers import McpServer, read_mcp_servers
from rollouts.tools.mcp_tools import safe_name
from rollouts.tools.registry import build_tools, check_tools, close_tools

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = (sys.executable, "-m", "tests.unit.tools.mcp_program")
NOTES = McpServer(
    name="notes",
    command=PROGRAM,
    cwd=str(ROOT),
    env={"PYTHONDONTWRITEBYTECODE": "1"},
    start_seconds=120,  # a busy machine takes long to import what a server needs
)
CONTEXT = ToolContext(timeout_seconds=120)
NAMES = ["add", "who_am_i_91a6aca5", "fail", "die", "wait", "count"]


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """Return a folder that the servers' account can write to."""
    folder = Path(tempfile.mkdtemp(prefix="prorl-mcp-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def notes() -> Iterator[dict[str, Tool]]:
    """Yield the tools of one session that several tests use: a start takes a second."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PRORL_SECRET_KEY", "secret")
        tools = build_tools(["mcp:notes"], host=HostAccess(mcp_servers={"notes": NOTES}))
    yield tools
    close_tools(tools)


@pytest.fixture(scope="module")
def http_url() -> Iterator[str]:
    with subprocess.Popen(
        [*PROGRAM, "--http"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


@pytest.fixture(params=["stdio", "http"])
def host(request: pytest.FixtureRequest) -> HostAccess:
    if request.param == "stdio":
        return HostAccess(mcp_servers={"notes": NOTES})
    url = request.getfixturevalue("http_url")
    return HostAccess(mcp_servers={"notes": McpServer(name="notes", url=url)})


def test_a_server_s_tools_are_offered_and_called(host: HostAccess) -> None:
    tools = build_tools(
        ["think", "mcp:notes"], {"mcp:notes": {"max_calls": 3, "output_bytes": 256}}, host=host
    )
    try:
        assert list(tools) == ["think", *(f"notes__{name}" for name in NAMES)]
        add = tools["notes__add"]
        assert add.schema()["function"]["description"] == "Add two numbers."
        assert add.schema()["function"]["parameters"]["required"] == ["a", "b"]
        with pytest.raises(InvalidArguments, match="The arguments of notes__add are wrong"):
            add.call({"a": "x", "b": 1}, CONTEXT)

        answers = [
            add.call({"a": 1, "b": 2}, CONTEXT),
            tools["notes__fail"].call({"why": "because"}, CONTEXT),
            add.call({"a": 2, "b": 2}, CONTEXT),
            add.call({"a": 3, "b": 2}, CONTEXT),
        ]
    finally:
        close_tools(tools)
    close_tools(tools)

    assert [answer.content for answer in answers] == [
        "3",
        "[the tool says that it failed]\nError executing tool fail",
        "4",
        "All 3 calls of notes__add that this task allows are used; go on without it.",
    ]
    assert [(answer.data["reason"], answer.data["calls"]) for answer in answers] == [
        ("", 1),
        ("tool", 2),
        ("", 3),
        ("limit", 3),
    ]


def test_a_server_runs_without_root_and_without_the_worker_s_variables(
    notes: dict[str, Tool],
) -> None:
    answer = notes[f"notes__{NAMES[1]}"].call({}, CONTEXT).content

    uid, _, rest = answer.partition(" ")
    assert int(uid) != 0
    assert os.geteuid() != 0 or rest.startswith("[] ")
    given = {"HOME", "LOGNAME", "PATH", "PYTHONDONTWRITEBYTECODE", "SHELL", "TERM", "USER"}
    listed = rest.partition("] [")[2] or rest.partition(" [")[2]
    assert set(listed.strip("[]").replace("'", "").split(", ")) <= {*given, "LC_CTYPE"}


def test_a_server_that_died_is_started_again_once(
    shared_folder: Path, notes: dict[str, Tool]
) -> None:
    again = notes["notes__die"].call({"mark": str(shared_folder / "mark")}, CONTEXT)
    gone = notes["notes__die"].call({"mark": "/nowhere/mark"}, CONTEXT)
    after = notes["notes__add"].call({"a": 1, "b": 1}, CONTEXT)

    assert (again.content, after.content) == ("alive again", "2")
    assert (gone.data["failed"], gone.data["reason"]) == (True, "tool")


def test_a_server_that_is_gone_for_good_is_an_observation(shared_folder: Path) -> None:
    script = shared_folder / "serve.sh"
    script.write_text(f'#!/bin/sh\n[ -e "$0.gone" ] && exit 1\nexec {" ".join(PROGRAM)}\n')
    script.chmod(0o755)
    server = replace(NOTES, command=(str(script),))
    tools = build_tools(["mcp:notes"], host=HostAccess(mcp_servers={"notes": server}))
    try:
        (shared_folder / "serve.sh.gone").touch()
        gone = tools["notes__die"].call({"mark": str(shared_folder / "mark")}, CONTEXT)
    finally:
        close_tools(tools)

    assert gone.content.startswith("notes__die is not to be reached: it could not be opened: ")
    assert gone.data["reason"] == "unreachable"


def test_a_call_that_takes_too_long_or_is_cancelled_ends_and_the_session_goes_on(
    notes: dict[str, Tool],
) -> None:
    late = notes["notes__wait"].call({}, ToolContext(timeout_seconds=0.2))
    stopped = notes["notes__wait"].call({}, ToolContext(timeout_seconds=60, cancelled=lambda: True))
    after = notes["notes__add"].call({"a": 1, "b": 1}, CONTEXT)

    assert late.content == "notes__wait gave no answer in 0.2 seconds."
    assert (stopped.data["reason"], after.content) == ("cancelled", "2")


def test_what_was_recorded_is_replayed_without_the_server(
    tmp_path: Path, shared_folder: Path
) -> None:
    counted = {"path": str(shared_folder / "count")}
    live = HostAccess(mcp_servers={"notes": NOTES}, cassettes=Cassettes("record", tmp_path))
    tools = build_tools(["mcp:notes"], host=live)
    try:
        recorded = tools["notes__count"].call(counted, CONTEXT)
    finally:
        close_tools(tools)
    gone = replace(NOTES, command=("/nowhere",))
    replay = HostAccess(mcp_servers={"notes": gone}, cassettes=Cassettes("replay", tmp_path))

    tools = build_tools(["mcp:notes"], host=replay)
    replayed = tools["notes__count"].call(counted, CONTEXT)
    missing = tools["notes__add"].call({"a": 1, "b": 2}, CONTEXT)
    close_tools(tools)

    assert recorded.content == replayed.content == "x"
    assert (shared_folder / "count").read_text() == "x"
    assert missing.content == (
        "notes__add has no answer: no answer to this call of mcp:notes/add was recorded."
    )
    assert missing.data["reason"] == "not_recorded"


def test_what_cannot_be_opened_is_refused_by_name() -> None:
    gone = replace(NOTES, name="gone", command=("/nowhere",))
    host = HostAccess(mcp_servers={"notes": NOTES, "gone": gone})
    with pytest.raises(ToolUnavailable, match="MCP server gone does not tell its tools"):
        build_tools(["mcp:gone"], host=host)
    with pytest.raises(CallCancelled):
        build_tools(["mcp:notes"], host=host, cancelled=lambda: True)


def test_what_a_server_s_list_lacks_or_gives_twice_is_refused_by_name(tmp_path: Path) -> None:
    listed = {"tools": [{"name": "add", "description": "Add.", "parameters": {}}]}
    Cassettes("record", tmp_path).answer("mcp:notes", {}, lambda: listed)
    cassettes = Cassettes("replay", tmp_path)
    host = HostAccess(mcp_servers={"notes": NOTES}, cassettes=cassettes)

    assert list(build_tools(["mcp:notes"], host=host)) == ["notes__add"]
    with pytest.raises(ToolUnavailable, match="MCP server notes has no tool 'rocket'"):
        build_tools(["mcp:notes/rocket"], host=host)
    with pytest.raises(InvalidToolSettings, match="a tool of this name is there already"):
        build_tools(["mcp:notes", "mcp:notes/add"], host=host)
    with pytest.raises(ToolUnavailable, match="MCP server notes: its tools were not recorded"):
        build_tools(
            ["mcp:notes"], host=replace(host, cassettes=Cassettes("replay", tmp_path / "x"))
        )


@pytest.mark.parametrize(
    ("names", "settings", "reason"),
    [
        (["mcp:other"], {}, "no MCP server 'other' is allowed here; allowed: notes"),
        (["mcp:"], {}, "'mcp:' is no tool: write mcp:<server> or mcp:<server>/<tool>"),
        (["mcp:notes"], {"mcp:notes": {"speed": 1}}, "unknown setting 'speed'"),
        (["mcp:notes"], {"mcp:notes": {"max_calls": 0}}, "max_calls is 0"),
        (["mcp:notes"], {"mcp:notes": {"description": "x"}}, "a description is one tool's"),
        (["mcp:notes/add"], {"mcp:notes/add": []}, "its settings must be an object"),
    ],
)
def test_names_and_settings_are_checked_without_asking_a_server(names, settings, reason) -> None:
    host = HostAccess(mcp_servers={"notes": replace(NOTES, command=("/nowhere",))})
    with pytest.raises((UnknownTool, InvalidToolSettings), match=reason):
        check_tools(names, settings, host=host)
    check_tools(["mcp:notes/add"], {"mcp:notes/add": {"description": "Sum."}}, host=host)


def test_names_are_safe_for_templates_and_stay_apart() -> None:
    assert safe_name("notes", "add") == "notes__add"
    unsafe = [safe_name("n", "a.b"), safe_name("n", "a b"), safe_name("n", "x" * 100)]
    assert len(set(unsafe)) == 3
    assert [len(name) <= 64 and name.replace("_", "a").isalnum() for name in unsafe] == [True] * 3


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_the_operator_s_file_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"servers.{suffix}"
    path.write_text(
        {
            "toml": '[files]\ncommand = ["serve", "/srv"]\nenv = {A = "b"}\n'
            '[web]\nurl = "http://mcp:1/mcp"\ntimeout_seconds = 5\n',
            "json": '{"files": {"command": ["serve", "/srv"], "env": {"A": "b"}},'
            '"web": {"url": "http://mcp:1/mcp", "timeout_seconds": 5}}',
        }[suffix]
    )
    assert read_mcp_servers(path) == {
        "files": McpServer(name="files", command=("serve", "/srv"), env={"A": "b"}),
        "web": McpServer(name="web", url="http://mcp:1/mcp", timeout_seconds=5.0),
    }
    assert read_mcp_servers(None) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[a", "cannot be read"),
        ("a = 1", "must be a table"),
        ("[a]", "give either command, a list of texts, or url"),
        ('[a]\ncommand = ["x"]\nurl = "http://x"', "give either command"),
        ('[a]\ncommand = "x"', "give either command"),
        ('[a]\nurl = "ftp://x"', "it must begin with http"),
        ('[a]\ncommand = ["x"]\nenv = {A = 1}', "env must be a table of texts"),
        ('[a]\ncommand = ["x"]\ncwd = "here"', "an absolute path"),
        ('[a]\ncommand = ["x"]\nshell = true', "unknown setting 'shell'"),
        ('["a/b"]\ncommand = ["x"]', "a name is up to 40 letters"),
    ],
)
def test_a_wrong_file_is_told_in_words(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "servers.toml"
    path.write_text(text)
    with pytest.raises(InvalidToolSettings, match=reason):
        read_mcp_servers(path)
