"""Secrets of environments: read by the worker alone, given where it says, kept nowhere."""

import gzip
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollouts.exceptions import InfraFault
from rollouts.models import Evaluation, Task
from rollouts.services.environment_check import environment_errors
from rollouts.services.inline import InlineTask, add_inline_tasks
from rollouts.services.secrets import (
    MAX_BYTES,
    SecretMissing,
    check_secrets,
    environment_secrets,
    evaluator_secrets,
    masked,
    replace_marks,
    resolve_secrets,
)
from rollouts.stages.evaluation import carry_out_eval
from rollouts.stages.journal import without_secrets
from rollouts.stages.lease import Held
from sandboxes.models import Environment
from sandboxes.runtime.exceptions import SetupFailed
from sandboxes.runtime.fake import Answer, FakeRuntime, FakeSandbox
from sandboxes.runtime.protocol import SandboxHandle, SandboxSpec
from sandboxes.runtime.sessions import ShellState
from sandboxes.services.catalogue import ENVIRONMENT_VALUES
from sandboxes.services.preparation import (
    Deadline,
    Recipe,
    environment_recipe,
    no_secrets,
    prepare_layers,
)
from sandboxes.setup_files import mask
from tests import factories
from tests.services import line

VALUE = "s3cret-value"


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Path:
    made = tmp_path / "secrets"
    made.mkdir()
    settings.SECRETS_DIR = str(made)
    settings.NODE_NAME = "n1"
    return made


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.NODE_NAME = "n1"
    monkeypatch.setenv("PRORL_SECRET_TOKEN", VALUE)
    monkeypatch.setenv("PRORL_SECRET_KEY", "the service's own")


def with_secrets(**secrets: Any) -> Environment:
    return Environment(name="e", version=1, secrets=secrets, setup="make", image=None)


def test_a_value_comes_from_the_workers_variables_and_files(variables: None, folder: Path) -> None:
    (folder / "..data").mkdir()
    (folder / "..data" / "db").write_text("p w\n")
    (folder / "db").symlink_to("..data/db")  # as orchestrators exchange them

    found = resolve_secrets({"A": "env:TOKEN", "B": "file:db", "C": f"file:{folder}/db"})

    assert found == {"A": VALUE, "B": "p w", "C": "p w"}


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("env:GONE", "its worker has no variable PRORL_SECRET_GONE"),
        ("env:KEY", "its worker has no variable PRORL_SECRET_KEY"),
        ("file:gone", "cannot be read there (No such file or directory)"),
        ("file:../outside", "is not below PRORL_SECRETS_DIR"),
        ("file:/etc/passwd", "is not below PRORL_SECRETS_DIR"),
        ("file:link", "is not below PRORL_SECRETS_DIR"),
        ("file:.", "cannot be read there (Is a directory)"),
        ("file:large", f"has more than {MAX_BYTES} bytes"),
        ("file:binary", "is no text file"),
        ("file:empty", "is empty or holds a NUL character"),
        ("file:nul", "is empty or holds a NUL character"),
    ],
)
def test_what_a_node_lacks_is_a_fault_that_names_it(
    variables: None, folder: Path, reference: str, why: str
) -> None:
    (folder.parent / "outside").write_text("x")
    (folder / "link").symlink_to("/etc/passwd")
    for name, data in (("large", b"x" * (MAX_BYTES + 1)), ("binary", b"\xff"), ("nul", b"a\0b")):
        (folder / name).write_bytes(data)
    (folder / "empty").write_text("\n")

    with pytest.raises(SecretMissing) as missing:
        resolve_secrets({"A": reference})

    assert missing.value.code == "secret.missing"
    assert str(missing.value).startswith("Node n1 lacks the secret A: ")
    assert why in str(missing.value)


def test_without_a_folder_no_file_is_read(settings: Any) -> None:
    settings.SECRETS_DIR = ""

    with pytest.raises(SecretMissing, match="its worker has no PRORL_SECRETS_DIR"):
        resolve_secrets({"A": "file:a"})


def test_each_use_gets_its_own(variables: None) -> None:
    environment = with_secrets(
        A={"from": "env:TOKEN", "to": ["setup", "tools"]},
        B={"from": "env:GONE", "to": ["evaluator"]},
    )

    assert environment_secrets(environment, "setup") == {"A": VALUE}
    assert environment_secrets(environment, "tools") == {"A": VALUE}
    with pytest.raises(SecretMissing):
        check_secrets(environment)


def test_marks_in_an_evaluators_settings_stand_for_values() -> None:
    given = {"url": "http://j", "headers": [{"key": {"secret": "A"}}], "secret": "A", "n": 1}

    assert replace_marks(given, {"A": VALUE}) == {
        "url": "http://j",
        "headers": [{"key": VALUE}],
        "secret": "A",
        "n": 1,
    }
    with pytest.raises(InfraFault, match="the secret 'B'") as missing:
        replace_marks({"key": {"secret": "B"}}, {"A": VALUE})
    assert missing.value.retryable is False


def test_settings_are_checked_with_a_text_in_the_place_of_a_mark() -> None:
    environment = with_secrets(A={"from": "env:TOKEN", "to": ["evaluator"]})
    environment.evaluator, environment.agent = "regex", "single_turn"

    def errors() -> list[str]:
        values = {name: getattr(environment, name) for name in ENVIRONMENT_VALUES}
        return [field for field, _reason in environment_errors(values)]

    environment.evaluator_settings = {"pattern": {"secret": "A"}}
    assert errors() == []
    environment.evaluator_settings = {"pattern": {"secret": "B"}}
    assert errors() == ["evaluator_settings"]
    environment.evaluator_settings = {"pattern": "x"}
    environment.secrets = {"A": {"from": VALUE, "to": ["evaluator"]}}
    assert errors() == ["secrets"]


@pytest.mark.django_db
def test_a_task_that_was_sent_along_takes_no_secret_elsewhere(variables: None) -> None:
    environment = factories.make_environment(
        secrets={"A": {"from": "env:TOKEN", "to": ["evaluator"]}}
    )
    settings = {"pattern": {"secret": "A"}, "mode": "search"}
    hidden = {"evaluator_settings": {"mode": "search"}}
    imported = factories.make_task(environment=environment, hidden=hidden)
    own, tested, plain = add_inline_tasks(
        experiment=factories.make_experiment(),
        tasks=[
            InlineTask(environment=environment.name, instruction="x", hidden=each)
            for each in (hidden, {"tests": {"test.sh": {"base64": "", "mode": 0}}}, {})
        ],
    )

    def given(task: Task) -> Mapping[str, str]:
        return evaluator_secrets(settings, environment=environment, task=task)

    assert given(imported) == given(plain) == {"A": VALUE}
    for task in (own, tested):
        with pytest.raises(InfraFault) as refused:
            given(task)
        assert (refused.value.code, refused.value.retryable) == ("secret.refused", False)


def test_values_are_masked_longest_first_and_line_by_line() -> None:
    secrets = {"A": VALUE, "B": f"{VALUE}-and-more", "C": "first line\nsecond line", "D": "abc"}

    said = mask(f"{VALUE}-and-more {VALUE}! second line; abc", secrets)

    assert said == "[secret B] [secret A]! [secret C]; abc"
    assert masked({VALUE: [VALUE, 1, None, (VALUE,)]}, secrets) == {
        "[secret A]": ["[secret A]", 1, None, ["[secret A]"]]
    }
    assert masked({"a": VALUE}, {}) == {"a": VALUE}


def test_a_journalled_shell_neither_exports_nor_holds_them() -> None:
    state = ShellState(
        cwd="/app",
        exports=f'declare -x A="{VALUE}"\ndeclare -x AB="x"\nexport A=\'{VALUE}\'\n'
        f'declare -x COPY="{VALUE}"',
        functions=f"f () {{ echo {VALUE}; }}",
    )

    kept = without_secrets(state, {"A": VALUE})

    assert kept.exports == 'declare -x AB="x"\ndeclare -x COPY="[secret A]"'
    assert kept.functions == "f () { echo [secret A]; }"
    assert without_secrets(state, {}) is state


class Node(FakeRuntime):
    """A node in memory on which a setup prints its secret, and the search finds what it is told."""

    def __init__(self, *, exit_code: int = 0, left: str = "", search: int = 0) -> None:
        super().__init__()
        self.ran: list[tuple[str, Mapping[str, str]]] = []
        self.searched: list[bytes] = []
        self.exit_code, self.left, self.search = exit_code, left, search
        self.script = self._run

    def exec(self, handle: SandboxHandle, argv: Any, **options: Any) -> Any:
        self.ran.append((argv[0], options.get("env") or {}))
        return super().exec(handle, argv, **options)

    def _run(self, _sandbox: FakeSandbox, command: str, stdin: bytes) -> Answer:
        if command.startswith("bash "):
            return Answer(output=f"saw {VALUE}\n", exit_code=self.exit_code)
        if command.startswith("sh "):
            self.searched.append(stdin)
            return Answer(output=self.left, exit_code=self.search)
        return Answer()


def prepare(node: Node, recipe: Recipe, **more: Any) -> None:
    @contextmanager
    def network(_handle: SandboxHandle) -> Iterator[Mapping[str, str]]:
        yield {"http_proxy": "x"}

    spec = SandboxSpec(name="a", image="base")
    prepare_layers(
        node,
        spec,
        [recipe],
        environment=Environment(name="e", version=1),
        start=lambda _layers: node.start(spec, timeout_seconds=60),
        network=network,
        deadline=Deadline(remaining_seconds=lambda: 60.0, cancelled=lambda: False),
        **more,
    )


SETUP = environment_recipe(with_secrets(A={"from": "env:TOKEN", "to": ["setup"]}))


def test_a_setup_gets_its_secrets_and_its_layer_is_known_by_the_reference(variables: None) -> None:
    node = Node()

    prepare(node, SETUP, resolve=resolve_secrets)

    assert node.ran[0] == ("bash", {"http_proxy": "x", "A": VALUE})
    assert node.searched == [VALUE.encode()]
    assert VALUE not in "".join(map(str, node.layers.__dict__.items()))
    key = SETUP.key(base="b")
    other = Recipe(kind="environment", script="make", secrets={"A": "env:OTHER"})
    plain = Recipe(kind="environment", script="make")
    assert len({key, other.key(base="b"), plain.key(base="b")}) == 3


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (Node(exit_code=1), "The environment's setup ended with 1: saw [secret A]\n"),
        (Node(left="/etc/conf\n/root/.netrc\n"), "left a secret in /etc/conf, /root/.netrc;"),
        (Node(search=3), "what it left could not be searched for them;"),
    ],
    ids=["failed", "left", "not searched"],
)
def test_a_setup_neither_tells_nor_leaves_them(variables: None, node: Node, said: str) -> None:
    with pytest.raises(SetupFailed) as failed:
        prepare(node, SETUP, resolve=resolve_secrets)

    assert said in str(failed.value)
    assert VALUE not in str(failed.value)
    assert node.list_layers() == []


def test_where_nothing_resolves_them_a_setup_does_not_run_without(variables: None) -> None:
    node = Node()

    with pytest.raises(SetupFailed, match="Nothing here resolves the secrets A"):
        prepare(node, SETUP)

    assert node.ran == []
    assert no_secrets({}) == {}


def test_files_without_a_setup_make_no_layer() -> None:
    entry = {"base64": "eA==", "mode": 0o755}
    environment = Environment(name="e", version=1, files={"bin/x": entry})
    assert not environment_recipe(environment)

    environment.setup = "make"
    assert environment_recipe(environment).files == {"bin/x": (b"x", 0o755)}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("value", "reward", "said"),
    [("^42$|wont-match", 1.0, ""), ("((((((", None, "the pattern '[secret A]' is wrong")],
)
def test_an_evaluator_is_given_them_and_what_it_says_is_masked(
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
    tmp_path: Path,
    value: str,
    reward: float | None,
    said: str,
) -> None:
    stores = {name: dict(store) for name, store in settings.STORAGES.items()}
    stores["trajectories"]["OPTIONS"] = {"location": str(tmp_path)}
    settings.STORAGES = stores
    monkeypatch.setenv("PRORL_SECRET_TOKEN", value)
    workers = line.make_node()
    task = line.make_task(sandbox=False)
    Environment.objects.filter(pk=task.environment_id).update(
        evaluator="regex",
        evaluator_settings={"pattern": {"secret": "A"}},
        secrets={"A": {"from": "env:TOKEN", "to": ["evaluator"]}},
    )
    rollout = line.make_group(task=task).rollouts.get()
    claim = line.bring_to(rollout, "eval", workers)
    assert claim is not None

    if reward is None:
        with pytest.raises(InfraFault) as broken:
            carry_out_eval(Held(claim))
        assert said in str(broken.value)
        assert value not in str(broken.value)
        return
    carry_out_eval(Held(claim))

    found = Evaluation.objects.get()
    assert found.reward == reward
    assert value not in f"{found.details} {found.log}"
    for path in tmp_path.rglob("*.gz"):
        assert value.encode() not in gzip.decompress(path.read_bytes())
