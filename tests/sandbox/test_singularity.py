"""The other engine, SingularityCE: chosen by name, with the same command lines.

Options are those of the sources of SingularityCE 3.11.5 to 4.5.1. Before 4.1 an instance of uid 0
in a user namespace wants a control group and does not start. PRORL_ENGINE=singularity runs the
other modules of this folder with it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.runtime import argv
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.argv import Tools, find_tools
from sandboxes.runtime.exceptions import RuntimeMissing
from sandboxes.runtime.layout import Layout
from tests.sandbox.conftest import Start, open_folder, runtime_with, starter

# Options of `singularity instance start` and `exec`, and values of `--no-mount`, from its sources.
OPTIONS = {
    *("--silent", "--userns", "--containall", "--no-mount", "--cleanenv", "--uts", "--hostname"),
    *("--net", "--network", "--nv", "--rocm", "--writable", "--pwd"),
}
NO_MOUNT = {"proc", "sys", "dev", "devpts", "home", "tmp", "hostfs", "cwd", "bind-paths"}
NAMED = Tools(engine="/opt/bin/singularity", nsenter="/n", unshare="/u")


@pytest.mark.parametrize("gpu", ["", "nvidia", "rocm"])
@pytest.mark.parametrize("network", ["none", "host"])
@pytest.mark.parametrize("driver", [argv.KERNEL_DRIVER, argv.FUSE_DRIVER])
def test_a_start_uses_options_that_both_engines_have(network, gpu, driver) -> None:  # type: ignore[no-untyped-def]
    words = argv.start_argv(
        NAMED, name="a", options="o", merged="m", network=network, gpu=gpu, driver=driver
    )

    engine = words[words.index(NAMED.engine) :]
    used = {word for word in engine if word.startswith("-")}
    assert used <= OPTIONS
    assert used >= {"--userns", "--containall", "--cleanenv", "--writable"}
    skipped = engine[engine.index("--no-mount") + 1].split(",")
    assert {kind for kind in skipped if not kind.startswith("/")} <= NO_MOUNT
    assert engine[-2:] == ["m", "a"]


def test_entering_through_the_engine_uses_options_that_both_have() -> None:
    words = argv.engine_exec_argv(NAMED, name="a", env={"A": "b c"})

    engine = words[words.index(NAMED.engine) : words.index("instance://a")]
    assert {word for word in engine if word.startswith("-")} <= OPTIONS
    assert words[words.index("instance://a") + 1 :] == ["/usr/bin/env", "-i", "A=b c"]


def test_no_command_line_meets_the_mode_without_instances() -> None:
    start = argv.start_argv(NAMED, name="a", options="o", merged="m", network="none")
    enter = argv.engine_exec_argv(NAMED, name="a", env={})

    for words in (start, enter):
        assert words.index("SINGULARITY_NO_OCI=1") < words.index(NAMED.engine)


def test_both_engines_keep_their_records_below_the_root() -> None:
    env = argv.engine_env(Path("/r"))

    for key in ("CONFIGDIR", "CACHEDIR", "TMPDIR"):
        assert env[f"SINGULARITY_{key}"] == env[f"APPTAINER_{key}"]
        assert env[f"SINGULARITY_{key}"].startswith("/r/")


@pytest.mark.parametrize("kind", ["app", "sing"])
def test_the_records_of_both_engines_are_found(tmp_path: Path, kind: str) -> None:
    base = tmp_path / "apptainer" / "instances"
    entry = base / kind / "host" / "user" / "test-a"
    entry.mkdir(parents=True)
    (entry / "test-a.json").write_text(json.dumps({"pid": 7}))
    (base / kind / "host" / "user" / "test-ab").mkdir()
    logs = base / "logs" / "host" / "user"
    logs.mkdir(parents=True)
    for name in ("test-a.err", "test-a.out", "test-ab.err"):
        (logs / name).touch()

    found = Layout(tmp_path).engine_records("test-a")

    assert sorted(found) == sorted([entry, logs / "test-a.err", logs / "test-a.out"])


def test_the_engine_is_chosen_by_name_or_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("apptainer", "singularity", "nsenter", "unshare"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(argv, "HOST_PATH", "/nowhere")

    assert find_tools().engine == f"{tmp_path}/apptainer"
    assert find_tools(engine="singularity").engine == f"{tmp_path}/singularity"
    assert find_tools(engine=f"{tmp_path}/singularity").engine == f"{tmp_path}/singularity"
    with pytest.raises(RuntimeMissing, match="missing podman: run"):
        find_tools(engine="podman")
    (tmp_path / "apptainer").unlink()
    assert find_tools().engine == f"{tmp_path}/singularity"


@pytest.fixture
def named_runtime(base_image: Path) -> Iterator[ApptainerRuntime]:
    """Yield a runtime whose engine is called singularity, as Apptainer's own packages call it."""
    folder = open_folder("prorl-engine-")
    link = folder / "singularity"
    link.symlink_to(find_tools().engine)
    with runtime_with(find_tools(engine=str(link))) as made:
        yield made
    link.unlink()
    folder.rmdir()


@pytest.mark.sandbox
def test_a_sandbox_runs_under_the_other_name(
    named_runtime: ApptainerRuntime, base_image: Path
) -> None:
    made: list[str] = []
    start: Start = starter(named_runtime, str(base_image), made)

    handle = start()

    result = named_runtime.exec(handle, ["cat", "/proc/1/comm"], timeout_seconds=30)
    assert result.stdout in (b"appinit\n", b"sinit\n")
    # The home folder that the engine sees, for a starter that knows no other place.
    link = named_runtime.root / "home" / ".singularity"
    assert link.resolve() == named_runtime.root / "apptainer"
    for name in made:
        named_runtime.stop(name)
    assert named_runtime.list() == []
    assert list((named_runtime.root / "apptainer" / "instances").glob("*/*/*/*")) == []
