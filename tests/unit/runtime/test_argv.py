"""The command lines that isolate."""

from pathlib import Path

import pytest

from sandboxes.runtime import argv
from sandboxes.runtime.exceptions import RuntimeMissing

TOOLS = argv.Tools(engine="/e", nsenter="/n", unshare="/u")


def test_start_isolates_and_has_no_network() -> None:
    words = argv.start_argv(
        TOOLS, name="a", options="userxattr,x", merged="instances/a/merged", network="none"
    )

    assert words[:6] == ["/u", "-U", "-r", "-m", "--", "/bin/sh"]
    assert words[words.index("/e") :] == [
        *("/e", "--silent", "instance", "start", "--userns", "--containall"),
        *("--no-mount", "home,tmp,cwd,bind-paths,/etc/localtime,/etc/hosts"),
        *("--cleanenv", "--uts", "--hostname", "sandbox", "--net", "--network", "none"),
        *("--writable", "instances/a/merged", "a"),
    ]


def test_the_host_network_is_the_only_difference() -> None:
    start = [
        argv.start_argv(TOOLS, name="a", options="", merged="m", network=network)
        for network in ("none", "host")
    ]
    enter = [argv.enter_argv(TOOLS, pid=7, network=network) for network in ("none", "host")]

    assert [w for w in start[0] if w not in start[1]] == ["--net", "--network", "none"]
    assert enter[0] == [
        *("/n", "-t", "7", "-U", "--preserve-credentials"),
        *("-m", "-p", "-i", "-u", "-n", "--"),
    ]
    assert [w for w in enter[0] if w not in enter[1]] == ["-n"]


def test_the_engine_gets_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")

    env = argv.engine_env(Path("/r"))

    assert set(env) == {
        *("PATH", "HOME", "LANG"),
        *(
            f"{kind}_{key}"
            for kind in ("APPTAINER", "SINGULARITY")
            for key in ("CONFIGDIR", "CACHEDIR", "TMPDIR")
        ),
    }
    assert env["APPTAINER_CONFIGDIR"] == "/r/apptainer"


def test_missing_tools_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(argv, "HOST_PATH", "/nowhere")

    with pytest.raises(RuntimeMissing, match=r"apptainer \(or singularity\), nsenter, unshare"):
        argv.find_tools()
