"""Environments leave and enter as files, and are verified, from the command line."""

import io
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from rollouts.management.commands import verify_environment
from rollouts.models import Verification
from rollouts.services.end import end_rollout
from rollouts.services.verifications import begin_verification
from sandboxes.models import Environment
from tests import factories
from tests.unit.commands.calls import call

pytestmark = pytest.mark.django_db(transaction=True)

HIDDEN = {"evaluator": "exact", "evaluator_payload": {"answer": "hello"}}


def make_environment() -> Environment:
    environment = factories.make_environment(image=None, agent="single_turn", setup="one\ntwo\n")
    factories.make_task(environment=environment, hidden=HIDDEN)
    return environment


def test_what_is_exported_is_imported_to_the_same_version(tmp_path: Path) -> None:
    environment = make_environment()
    path = tmp_path / "e.toml"

    printed = call("export_environment", environment.name)
    written = call("export_environment", environment.ref, "--output", str(path))
    read = call("import_environment", str(path))

    assert printed.out == path.read_text()
    assert written.out == f"{environment.ref} is in {path}\n"
    assert read.out == f"environment {environment.ref}\n"
    with pytest.raises(CommandError, match="cannot be written: File exists"):
        call("export_environment", environment.name, "--output", str(path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("export_environment", "nothing"), "There is no environment 'nothing'"),
        (("export_environment", "a@b"), "write name or name@version"),
        (("import_environment", "nowhere.toml"), "cannot be read: No such file"),
        (("import_environment", "binary.toml"), "is no text in UTF-8"),
        (("import_environment", "wrong.toml"), "colour is no key of an environment"),
        (("verify_environment", "nothing"), "There is no environment 'nothing'"),
    ],
)
def test_what_cannot_be_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary.toml").write_bytes(b"\xff")
    Path("wrong.toml").write_text("colour = 1")
    factories.make_operator()

    with pytest.raises(CommandError, match=said):
        call(*arguments)
    assert Environment.objects.count() == 0


def test_a_verification_is_begun_with_what_is_asked() -> None:
    environment = make_environment()
    task_set = factories.make_task(hidden=HIDDEN).task_set
    with pytest.raises(CommandError, match="make one with create_operator"):
        call("verify_environment", environment.name)
    operator = factories.make_operator()

    begun = call(
        "verify_environment", environment.name, "--no-wait", "--task-set", task_set.name,
        "--repeats", "1", "--seed", "4",
    )  # fmt: skip

    verification = Verification.objects.get()
    assert begun.out == f"{verification.pk}\n"
    assert (verification.task_set, verification.repeats, verification.seed) == (task_set, 1, 4)
    assert verification.requested_by == operator
    with pytest.raises(CommandError, match="runs already"):
        call("verify_environment", environment.name)
    for option, name in (("--task-set", "task set"), ("--user", "operator")):
        with pytest.raises(CommandError, match=f"There is no {name} 'nobody'"):
            call("verify_environment", environment.name, option, "nobody")


def test_what_is_not_verified_ends_with_the_report_and_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = make_environment()
    factories.make_operator()

    def begin_and_carry_out(**values: Any) -> Verification:
        begun = begin_verification(**values)
        for rollout in begun.experiment.rollouts.all():
            assert end_rollout(rollout_id=rollout.pk, outcome="scored", reward=0.5)
        return begun

    monkeypatch.setattr(verify_environment, "begin_verification", begin_and_carry_out)
    out = io.StringIO()

    with pytest.raises(CommandError, match=f"{environment.ref} is broken") as ended:
        call_command("verify_environment", environment.name, stdout=out, no_color=True)

    assert ended.value.returncode == 1
    said = out.getvalue()
    assert said.count("0.5") == 4
    assert said.splitlines()[-1] == f"{environment.ref}: broken"
