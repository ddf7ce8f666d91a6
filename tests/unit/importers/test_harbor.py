"""Reading the Harbor layout: what is taken, and what is refused with a reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollouts.importers.base import FileContent, RejectedTask, TaskRecord, TaskRejected
from rollouts.importers.folder import MAX_FILE_BYTES
from rollouts.importers.formats import read_source
from rollouts.importers.harbor import read_harbor_folder, read_harbor_task
from rollouts.importers.options import ReadOptions

TOML = """
schema_version = "1.4"
[task]
name = "org/sample"
[metadata]
difficulty = "easy"
[metadata.evaluator]
combine = "min"
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 30.5
env = { MODE = "strict" }
[environment]
docker_image = "debian-12"
cpus = 2
memory_mb = 256
network_mode = "no-network"
env = { LANG = "C.UTF-8" }
"""


def make_task(folder: Path) -> Path:
    """Write a sound task and return its folder."""
    for name, text in {
        "task.toml": TOML,
        "instruction.md": "Do it.\n",
        "environment/Dockerfile": "FROM debian\nRUN true\nWORKDIR /work\n",
        "environment/setup.sh": "mkdir /work\n",
        "environment/files/data.bin": "x",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "tests/__pycache__/junk.pyc": "junk",
        "solution/solve.sh": "true\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "environment/files/data.bin").write_bytes(b"\x00\xff")
    (folder / "environment/setup.sh").chmod(0o775)
    (folder / "tests/test.sh").chmod(0o600)
    return folder


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return make_task(tmp_path / "sample")


def test_a_sound_task_is_read_whole(task: Path) -> None:
    record = read_harbor_task(task)
    assert record == TaskRecord(
        ref="org/sample",
        instruction="Do it.\n",
        setup="mkdir /work\n",
        files={
            "files/data.bin": FileContent(data=b"\x00\xff"),
            "setup.sh": FileContent(data=b"mkdir /work\n", mode=0o755),
        },
        tests={"test.sh": FileContent(data=b"echo 1 > /logs/verifier/reward.txt\n")},
        solution={"solve.sh": FileContent(data=b"true\n")},
        agent_timeout_seconds=120.0,
        verifier_timeout_seconds=30.5,
        image="debian-12",
        environment={
            "cpus": 2,
            "memory_mb": 256,
            "network_mode": "no-network",
            "env": {"LANG": "C.UTF-8"},
            "workdir": "/work",
        },
        evaluator="script",
        evaluator_settings={"combine": "min"},
        evaluator_payload={"verifier_env": {"MODE": "strict"}},
        metadata={"difficulty": "easy"},
    )


def test_the_least_task_gets_the_defaults(tmp_path: Path) -> None:
    folder = tmp_path / "least"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text("")
    (folder / "instruction.md").write_text("Do it.")
    (folder / "tests/test.sh").write_text("true")
    record = read_harbor_task(folder)
    assert (record.ref, record.setup, record.image, record.files) == ("least", None, None, {})
    assert (record.agent_timeout_seconds, record.verifier_timeout_seconds) == (600.0, 600.0)
    assert (record.environment, record.evaluator_settings) == ({}, {})


def test_links_inside_the_folder_are_read_through(task: Path) -> None:
    (task / "tests/again.sh").symlink_to("test.sh")
    assert read_harbor_task(task).tests["again.sh"].data == (task / "tests/test.sh").read_bytes()


def test_the_hash_ignores_the_umask(task: Path) -> None:
    before = read_harbor_task(task).content_hash
    (task / "tests/test.sh").chmod(0o664)
    assert read_harbor_task(task).content_hash == before
    (task / "tests/test.sh").chmod(0o755)
    assert read_harbor_task(task).content_hash != before


def sparse(path: Path, size: int) -> None:
    """Make a file that looks large and takes no room."""
    with path.open("wb") as file:
        file.truncate(size)


def sparse_many(folder: Path, size: int) -> None:
    """Make six files that look large."""
    for number in range(6):
        sparse(folder / str(number), size)


def relink(path: Path, target: str) -> None:
    """Put a link in the place of a file."""
    path.unlink()
    path.symlink_to(target)


def replace(path: Path, old: str, new: str) -> None:
    """Change a text once."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no task.toml": (lambda t: (t / "task.toml").unlink(), "task.toml is missing; add it"),
    "bad toml": (lambda t: (t / "task.toml").write_text("a = "), "task.toml is not TOML: "),
    "toml bytes": (lambda t: (t / "task.toml").write_bytes(b"\xff"), "task.toml is not UTF-8"),
    "future schema": (
        lambda t: replace(t / "task.toml", '"1.4"', '"2.0"'),
        "schema_version '2.0'; 1.0 to 1.4 can be read",
    ),
    "no instruction": (
        lambda t: (t / "instruction.md").unlink(),
        "instruction.md is missing; add it",
    ),
    "empty instruction": (
        lambda t: (t / "instruction.md").write_text(" \n"),
        "instruction.md is empty",
    ),
    "instruction bytes": (
        lambda t: (t / "instruction.md").write_bytes(b"caf\xe9"),
        r"instruction.md is not UTF-8 text \(byte 3\); save it as UTF-8",
    ),
    "instruction nul": (
        lambda t: (t / "instruction.md").write_bytes(b"a\0b"),
        "instruction.md holds a NUL byte",
    ),
    "no test": (
        lambda t: (t / "tests/test.sh").unlink(),
        "tests/test.sh is missing; add the script that writes the reward",
    ),
    "test bytes": (
        lambda t: (t / "tests/test.sh").write_bytes(b"\x80"),
        "tests/test.sh is not UTF-8",
    ),
    "setup bytes": (
        lambda t: (t / "environment/setup.sh").write_bytes(b"\x80"),
        "environment/setup.sh is not UTF-8",
    ),
    "huge file": (
        lambda t: sparse(t / "environment/big", MAX_FILE_BYTES + 1),
        f"environment/big has {MAX_FILE_BYTES + 1} bytes, more than {MAX_FILE_BYTES}",
    ),
    "huge folder": (
        lambda t: sparse_many(t / "environment", MAX_FILE_BYTES),
        "environment holds more than 50000000 bytes; put large files into the image",
    ),
    "link out": (
        lambda t: (t / "tests/hosts").symlink_to("/etc/hosts"),
        "tests/hosts is a link out of the task's folder; put the file itself there",
    ),
    "instruction link out": (
        lambda t: relink(t / "instruction.md", "/etc/hosts"),
        "instruction.md is a link out",
    ),
    "relative link out": (
        lambda t: (t / "tests/other").symlink_to("../../sample2/task.toml"),
        "tests/other is a link",
    ),
    "dangling link": (
        lambda t: (t / "tests/gone").symlink_to("nowhere"),
        "tests/gone is a link that leads nowhere; remove it",
    ),
    "link to itself": (
        lambda t: (t / "tests/loop").symlink_to("loop"),
        "tests/loop is a link that leads nowhere",
    ),
    "folder link": (
        lambda t: (t / "tests/all").symlink_to("."),
        "tests/all is a link to a folder; put the folder itself there",
    ),
    "pipe": (
        lambda t: os.mkfifo(t / "tests/pipe"),
        "tests/pipe is not a plain file; remove it",
    ),
    "steps": (lambda t: (t / "steps").mkdir(), "several steps, which are not supported"),
    "artifacts": (
        lambda t: replace(t / "task.toml", 'schema_version = "1.4"', 'artifacts = ["a"]'),
        "the artifact 'a' must be a path from the root",
    ),
    "network of a part": (
        lambda t: replace(t / "task.toml", "timeout_sec = 120", 'network_mode = "public"'),
        r"\[agent\] network_mode is of one part only",
    ),
    "collect": (
        lambda t: replace(t / "task.toml", "timeout_sec = 30.5", "collect = ['/x']"),
        r"\[verifier\] collect is not supported",
    ),
    "compose": (
        lambda t: (t / "environment/docker-compose.yaml").write_text(""),
        "environment/docker-compose.yaml: several containers",
    ),
    "gpu": (lambda t: replace(t / "task.toml", "cpus = 2", "gpus = 1"), "gpus is not supported"),
    "windows": (
        lambda t: replace(t / "task.toml", "cpus = 2", 'os = "windows"'),
        "only linux is supported",
    ),
    "user": (
        lambda t: replace(t / "task.toml", "timeout_sec = 120", 'user = "bob"'),
        r"\[agent\] user is 'bob'; only root is supported",
    ),
    "separate verifier": (
        lambda t: replace(t / "task.toml", "timeout_sec = 30.5", 'environment_mode = "separate"'),
        "environment_mode is not supported",
    ),
    "unknown environment key": (
        lambda t: replace(t / "task.toml", "cpus = 2", "cpu = 2"),
        r"\[environment\] has cpu, which nothing here heeds",
    ),
    "unknown agent key": (
        lambda t: replace(t / "task.toml", "timeout_sec = 120", "timeout = 120"),
        r"\[agent\] has timeout, which nothing here heeds",
    ),
    "unknown verifier key": (
        lambda t: replace(t / "task.toml", "timeout_sec = 30.5", "allowed_hosts = []"),
        r"\[verifier\] has allowed_hosts",
    ),
    "unknown solution key": (
        lambda t: replace(t / "task.toml", "[environment]", "[solution]\nx = 1\n[environment]"),
        r"\[solution\] has x",
    ),
    "unknown table": (
        lambda t: replace(t / "task.toml", "[environment]", "[enviroment]"),
        "task.toml has enviroment",
    ),
    "both memories": (
        lambda t: replace(t / "task.toml", "cpus = 2", 'memory = "8G"'),
        "has memory and memory_mb; leave memory_mb",
    ),
    "storage size": (
        lambda t: replace(t / "task.toml", "cpus = 2", 'storage = "much"'),
        "storage is 'much'; write storage_mb = 2048",
    ),
    "endless storage": (
        lambda t: replace(t / "task.toml", "cpus = 2", f'storage = "{"9" * 400}G"'),
        "; write storage_mb = 2048",
    ),
    "both networks": (
        lambda t: replace(t / "task.toml", "cpus = 2", "allow_internet = true"),
        "has allow_internet and network_mode",
    ),
    "internet text": (
        lambda t: replace(t / "task.toml", "cpus = 2", 'allow_internet = "yes"'),
        "allow_internet is 'yes'; it must be true or false",
    ),
    "host text": (
        lambda t: replace(t / "task.toml", "cpus = 2", 'allowed_hosts = "example.org"'),
        "allowed_hosts must be a list of host names",
    ),
    "host number": (
        lambda t: replace(t / "task.toml", "cpus = 2", "allowed_hosts = [1]"),
        "allowed_hosts must be a list of host names",
    ),
    "zero timeout": (
        lambda t: replace(t / "task.toml", "120", "0"),
        r"\[agent\] timeout_sec is 0; it must be above 0",
    ),
    "infinite timeout": (
        lambda t: replace(t / "task.toml", "30.5", "inf"),
        r"\[verifier\] timeout_sec is inf",
    ),
    "timeout text": (
        lambda t: replace(t / "task.toml", "120", '"2m"'),
        "timeout_sec is '2m'; it must be a number of seconds",
    ),
    "host variable": (
        lambda t: replace(t / "task.toml", '"strict"', '"${TOKEN}"'),
        "verifier_env.MODE takes a variable of the host",
    ),
    "env number": (
        lambda t: replace(t / "task.toml", '"C.UTF-8"', "8"),
        "env.LANG is 8; it must be a text",
    ),
    "env name": (
        lambda t: replace(t / "task.toml", "{ LANG =", '{ "A=B" ='),
        "env has 'A=B', which is no name of a variable",
    ),
    "bad name": (
        lambda t: replace(t / "task.toml", "org/sample", "../up"),
        "the name '../up' must be letters",
    ),
    "table": (
        lambda t: (t / "task.toml").write_text("agent = 3"),
        r"\[agent\] must be a table",
    ),
    "image number": (
        lambda t: replace(t / "task.toml", '"debian-12"', "12"),
        "docker_image is 12; it must be a text",
    ),
    "evaluator setting": (
        lambda t: replace(t / "task.toml", '"min"', '"sum"'),
        r"\[metadata.evaluator\] setting 'combine' is 'sum'",
    ),
    "metadata date": (
        lambda t: replace(t / "task.toml", '"easy"', "2024-01-01"),
        r"\[metadata\]: .*date is not JSON serializable",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_bad_tasks_are_refused_with_a_reason(task: Path, name: str) -> None:
    breaks, reason = BREAKS[name]
    (task.parent / "sample2").mkdir()
    (task.parent / "sample2/task.toml").write_text("")
    breaks(task)
    with pytest.raises(TaskRejected, match=reason):
        read_harbor_task(task)


def test_a_dockerfile_is_built_where_neither_setup_nor_image_stand_for_it(task: Path) -> None:
    assert read_harbor_task(task).build is None
    (task / "environment/setup.sh").unlink()
    assert read_harbor_task(task).build is None
    replace(task / "task.toml", 'docker_image = "debian-12"', "")
    (task / "environment/Dockerfile").write_text(
        "FROM debian:12\nENV A=1 LANG=no\nCOPY files /data\nWORKDIR /other\nCMD x\n"
    )

    record = read_harbor_task(task)

    assert record.build is not None
    assert record.build.definition.startswith("Bootstrap: docker\nFrom: debian:12\n")
    assert (record.image, record.setup, record.files) == (None, None, {})
    assert record.environment["workdir"] == "/other"
    assert record.environment["env"] == {"A": "1", "LANG": "C.UTF-8"}  # task.toml's own wins
    assert record.metadata["dockerfile_ignored"] == ["line 5: CMD"]


def test_artifacts_go_to_the_grading(task: Path) -> None:
    replace(task / "task.toml", 'schema_version = "1.4"', 'artifacts = ["/app/out.csv"]')
    assert read_harbor_task(task).evaluator_payload == {
        "verifier_env": {"MODE": "strict"},
        "artifacts": ["/app/out.csv"],
    }


def test_one_bad_task_hides_no_other(tmp_path: Path) -> None:
    for name in ("b", "a", "c", "d"):
        make_task(tmp_path / name)
        replace(tmp_path / name / "task.toml", "org/sample", f"org/{name}")
    (tmp_path / "b/instruction.md").unlink()
    replace(tmp_path / "d/task.toml", "org/d", "org/a")
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").write_text("not a task")
    read = list(read_harbor_folder(tmp_path))
    assert [entry.ref if isinstance(entry, TaskRecord) else entry for entry in read] == [
        "org/a",
        RejectedTask(path=tmp_path / "b", reason="instruction.md is missing; add it"),
        "org/c",
        RejectedTask(path=tmp_path / "d", reason="the name 'org/a' is taken by a; choose another"),
    ]


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_harbor_folder(tmp_path / "none"))


def test_settings_of_the_import_are_for_what_the_task_does_not_say(task: Path) -> None:
    options = ReadOptions(evaluator_settings={"scope": "whole", "combine": "max"})
    (item,) = read_source(task.parent, "harbor", options)

    assert isinstance(item.entry, TaskRecord)
    assert item.entry.evaluator_settings == {"scope": "whole", "combine": "min"}


def test_settings_of_the_import_that_do_not_fit_refuse_the_task(task: Path) -> None:
    options = ReadOptions(evaluator_settings={"scope": "everything"})
    (item,) = read_source(task.parent, "harbor", options)

    assert isinstance(item.entry, RejectedTask)
    assert "setting 'scope' is 'everything'" in item.entry.reason


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ('memory = "8G"', {"memory_mb": 8192}),
        ('storage = "512 M"', {"memory_mb": 256, "storage_mb": 512}),
        ("gpus = 0", {"memory_mb": 256}),
        ("build_timeout_sec = 600.0", {"memory_mb": 256}),
    ],
)
def test_older_and_harmless_keys_are_known(task: Path, line: str, kept: dict[str, int]) -> None:
    if line.startswith("memory"):
        replace(task / "task.toml", "memory_mb = 256\n", "")
    replace(task / "task.toml", "cpus = 2", line)
    environment = read_harbor_task(task).environment
    assert {name: each for name, each in environment.items() if name.endswith("_mb")} == kept


@pytest.mark.parametrize(("allowed", "network"), [("true", "public"), ("false", "no-network")])
def test_allow_internet_is_the_older_network_mode(task: Path, allowed: str, network: str) -> None:
    replace(task / "task.toml", 'network_mode = "no-network"', f"allow_internet = {allowed}")
    assert read_harbor_task(task).environment["network_mode"] == network


def test_variables_of_a_solution_are_told_and_not_set(task: Path) -> None:
    replace(
        task / "task.toml", "[environment]", '[solution]\nenv = { B = "2", A = "1" }\n[environment]'
    )
    record = read_harbor_task(task)
    assert record.metadata["solution_env_ignored"] == ["A", "B"]
    assert record.solution == {"solve.sh": FileContent(data=b"true\n")}


def test_a_linked_task_folder_is_refused(tmp_path: Path) -> None:
    make_task(tmp_path / "elsewhere")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/linked").symlink_to("../elsewhere")
    assert list(read_harbor_folder(tmp_path / "tasks")) == [
        RejectedTask(
            path=tmp_path / "tasks/linked",
            reason="a link to a folder; put the folder itself there",
        )
    ]


def test_a_folder_counts_with_the_bytes_of_its_files(task: Path) -> None:
    (item,) = read_source(task.parent, "harbor", ReadOptions())
    assert isinstance(item.entry, TaskRecord)
    assert item.bytes == len(b"\x00\xff") + len(b"mkdir /work\n") + len(b"true\n") + len(
        b"echo 1 > /logs/verifier/reward.txt\n"
    )
