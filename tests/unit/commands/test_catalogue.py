"""Seeding the catalogue and importing tasks."""

import json
import shutil
from pathlib import Path

import pytest
from django.conf import settings
from django.core.management.base import CommandError

from rollouts.models import Task, TaskSet
from rollouts.services.environment_check import environment_errors
from sandboxes.models import Environment, Image
from sandboxes.services.catalogue import save_environment, save_image
from tests.unit.commands.calls import call

pytestmark = pytest.mark.django_db

EXAMPLES = settings.BASE_DIR / "examples"


def values_of(environment: Environment) -> dict[str, object]:
    return {field.name: getattr(environment, field.name) for field in Environment._meta.fields}


def test_seeding_twice_is_seeding_once_and_every_entry_can_run() -> None:
    first = call("seed_catalogue")
    rows = list(Environment.objects.order_by("name").values())
    second = call("seed_catalogue")

    assert first.out == second.out
    assert list(Environment.objects.order_by("name").values()) == rows
    assert [row["name"] for row in rows] == ["arithmetic", "terminal", "terminal-demo"]
    assert (Image.objects.get().name, Image.objects.get().source) == ("base", "base")
    for environment in Environment.objects.select_related("image"):
        assert list(environment_errors(values_of(environment))) == []


def test_the_shipped_demonstrations_are_what_the_examples_hold() -> None:
    call("seed_catalogue")

    for name, folder in [("terminal-demo", "demo_tasks"), ("arithmetic", "arithmetic")]:
        wanted = json.loads((EXAMPLES / folder / "demonstrations.json").read_text())
        environment = Environment.objects.get(name=name)
        assert environment.agent_settings["demonstrations"] == wanted


def test_seeding_puts_an_edited_entry_back_as_a_new_version_and_keeps_an_image_moved() -> None:
    call("seed_catalogue")
    shipped = Environment.objects.get(name="arithmetic")
    save_image(name="base", source="/images/other")
    save_environment(name="arithmetic", agent="single_turn", evaluator="exact")

    call("seed_catalogue")

    newest = Environment.objects.named("arithmetic", None).get()
    assert newest.version == 3
    ignored = ("id", "version", "created_at")
    assert {k: v for k, v in values_of(newest).items() if k not in ignored} == {
        k: v for k, v in values_of(shipped).items() if k not in ignored
    }
    assert Image.objects.get(name="base").source == "/images/other"


def test_the_example_tasks_are_imported_once_with_one_environment() -> None:
    call("seed_catalogue")
    count = len(list((EXAMPLES / "tasks").glob("*/task.toml")))

    first = call("import_tasks", "harbor", str(EXAMPLES / "tasks"), "--set", "examples")
    second = call("import_tasks", "harbor", str(EXAMPLES / "tasks"), "--set", "examples")

    assert count >= 12
    assert (first.code, first.err) == (0, "")
    assert table(first.out) == {"created": count, "changed": 0, "unchanged": 0, "refused": 0}
    assert table(second.out) == {"created": 0, "changed": 0, "unchanged": count, "refused": 0}
    main = Environment.objects.get(name="examples")
    assert (main.version, main.image.name, main.agent, main.evaluator, main.tools) == (
        1,
        "base",
        "command_line",
        "script",
        ["bash", "submit"],
    )
    for environment in {task.environment for task in Task.objects.select_related("environment")}:
        assert list(environment_errors(values_of(environment))) == []


def table(out: str) -> dict[str, int]:
    """Return the counts that an import printed."""
    lines = [line.split() for line in out.splitlines()[1:]]
    return {word: int(number) for word, number in lines}


def task_folder(root: Path, name: str, environment: str = "", image: str = "") -> None:
    """Write one Harbor task."""
    folder = root / name
    (folder / "tests").mkdir(parents=True)
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "task.toml").write_text(f'schema_version = "1.0"\n[environment]\n{environment}\n')


def test_tasks_with_other_needs_get_an_environment_of_their_own(tmp_path) -> None:
    save_image(name="base", source="base")
    save_image(name="gcc", source="/images/gcc.sif")
    task_folder(tmp_path, "a", "memory_mb = 64")
    task_folder(tmp_path, "b")
    task_folder(tmp_path, "c")
    task_folder(tmp_path, "d", 'docker_image = "gcc"\nworkdir = "/src"\nstorage_mb = 10')

    called = call("import_tasks", "harbor", str(tmp_path), "--set", "mixed")

    assert called.code == 0
    by_ref = {task.ref: task.environment for task in Task.objects.select_related("environment")}
    assert by_ref["b"] == by_ref["c"]
    assert (by_ref["b"].name, by_ref["b"].limits, by_ref["b"].workdir) == ("mixed", {}, "/app")
    assert by_ref["a"].limits == {"memory_bytes": 64 * 1024 * 1024}
    assert by_ref["d"].limits == {"disk_bytes": 10 * 1024 * 1024}
    assert (by_ref["d"].image.name, by_ref["d"].workdir) == ("gcc", "/src")
    assert len({environment.pk for environment in by_ref.values()}) == 3
    again = call("import_tasks", "harbor", str(tmp_path), "--set", "mixed")
    assert table(again.out)["unchanged"] == 4


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ('docker_image = "nope"', "image 'nope' is not in the catalogue"),
        ('network_mode = "public"', "the task asks for a network"),
        ('network_mode = "allowlist"\nallowed_hosts = ["pypi.org"]', "set PRORL_EGRESS=1"),
        ('memory_mb = "much"', "memory_mb is 'much'; it must be a whole number above 0"),
        ('cpus = "many"', "cpus is 'many'; it must be a number above 0"),
    ],
)
def test_what_cannot_be_given_is_refused_by_name_and_the_rest_imported(
    tmp_path, environment, reason
) -> None:
    save_image(name="base", source="base")
    task_folder(tmp_path, "bad", environment)
    task_folder(tmp_path, "good")
    (tmp_path / "empty").mkdir()

    called = call("import_tasks", "harbor", str(tmp_path), "--set", "some")

    assert called.code == 1
    assert table(called.out) == {"created": 1, "changed": 0, "unchanged": 0, "refused": 2}
    assert list(Task.objects.values_list("ref", flat=True)) == ["good"]
    assert any(
        line.startswith("refused bad: ") and reason in line for line in called.err.splitlines()
    )


def test_a_named_environment_takes_every_task(tmp_path) -> None:
    call("seed_catalogue")
    shutil.copytree(EXAMPLES / "demo_tasks", tmp_path / "demo")

    called = call(
        "import_tasks",
        "harbor",
        str(tmp_path / "demo"),
        "--set",
        "demo",
        "--environment",
        "terminal-demo",
    )

    assert called.code == 0
    assert set(Task.objects.values_list("environment__name", flat=True)) == {"terminal-demo"}
    assert not Environment.objects.filter(name="demo").exists()


def test_lines_are_imported_and_a_bad_one_is_told_by_its_number(tmp_path) -> None:
    call("seed_catalogue")
    path = tmp_path / "sums.jsonl"
    path.write_text(
        '{"ref": "a", "instruction": "1+1?", "answer": "2"}\n'
        "not json\n"
        '{"ref": "b", "instruction": "2+2?", "answer": "4"}\n'
    )

    called = call(
        "import_tasks", "jsonl", str(path), "--set", "sums", "--environment", "arithmetic"
    )

    assert called.code == 1
    assert table(called.out) == {"created": 2, "changed": 0, "unchanged": 0, "refused": 1}
    assert called.err.startswith(f"refused {path}:2: the line is not JSON")
    task = Task.objects.get(ref="a")
    assert (task.environment.name, task.hidden["evaluator"]) == ("arithmetic", "regex")
    assert task.hidden["evaluator_payload"] == {"answer": "2"}


def test_the_shipped_arithmetic_is_imported_whole() -> None:
    call("seed_catalogue")
    path = EXAMPLES / "arithmetic" / "tasks.jsonl"

    called = call(
        "import_tasks", "jsonl", str(path), "--set", "arithmetic", "--environment", "arithmetic"
    )

    assert called.code == 0
    assert table(called.out)["created"] == len(path.read_text().splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("jsonl", "/nowhere.jsonl", "--set", "x"), "/nowhere.jsonl is not there"),
        (("jsonl", "/x", "--set", "x", "--evaluator", "vibes"), "no evaluator 'vibes'"),
        (("jsonl", "/x", "--set", "x", "--tools", "environment"), "needs an environment"),
        (("harbor", "/nowhere", "--set", "x"), "/nowhere is not there"),
        (("harbor", "/nowhere", "--set", "Not A Name"), "Use lower-case letters"),
        (("harbor", "/nowhere", "--set", "x", "--environment", "y"), "no environment 'y'"),
        (
            ("harbor", "/nowhere", "--set", "x", "--environment", "y@z"),
            "write name or name@version",
        ),
    ],
)
def test_a_wrong_call_is_told_and_leaves_nothing(arguments, message) -> None:
    with pytest.raises(CommandError, match=message):
        call("import_tasks", *arguments)

    assert not TaskSet.objects.exists()


def test_an_empty_folder_is_told(tmp_path) -> None:
    with pytest.raises(CommandError, match="holds no task"):
        call("import_tasks", "harbor", str(tmp_path), "--set", "x")

    assert not TaskSet.objects.exists()
