"""Prepared layers: made once on a node, shared, made again when anything of a setup differs."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from sandboxes.models import Environment
from sandboxes.runtime.exceptions import SandboxCancelled, SetupFailed, StartTimeout
from sandboxes.runtime.fake import Answer, FakeRuntime, FakeSandbox
from sandboxes.runtime.protocol import SandboxHandle, SandboxSpec
from sandboxes.services.preparation import (
    Deadline,
    Layers,
    Recipe,
    base_key,
    environment_recipe,
    find_layers,
    prepare_layers,
)

SPEC = SandboxSpec(name="spec", image="base")
ENVIRONMENT = Environment(name="e", version=1)
SETUP = Recipe(kind="environment", script="apt-get install x\n")
TASK = Recipe(kind="task", script="", files={"data/in.txt": (b"1 2 3", 0o644)})


class Node(FakeRuntime):
    """A node in memory that notes what setups ran, what was looked up and which layers it made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []
        self.ran: list[tuple[str, str, Mapping[str, tuple[bytes, int]]]] = []
        self.answer: Callable[[], Answer] = Answer
        self.looked_up = threading.Semaphore(0)
        self.script = self._run

    def _run(self, sandbox: FakeSandbox, command: str, _stdin: bytes) -> Answer:
        """Carry out what a setup is made of."""
        if command.startswith("rm -rf /setup"):
            sandbox.files = {p: v for p, v in sandbox.files.items() if not p.startswith("/setup")}
            return Answer()
        self.ran.append((sandbox.handle.name, command, dict(sandbox.files)))
        answer = self.answer()
        sandbox.files["/installed"] = (b"", 0o644)
        return answer

    def find_layer(self, key: str) -> str | None:
        try:
            return super().find_layer(key)
        finally:
            self.looked_up.release()

    def freeze(self, handle: SandboxHandle, *, key: str = "") -> str:
        self.made.append(super().freeze(handle, key=key))
        return self.made[-1]

    def files_of(self, layer: str) -> list[str]:
        return sorted(self.layers.merged((layer,)))


@pytest.fixture
def node() -> Node:
    return Node()


class Caller:
    """One who needs layers: starts sandboxes under a name of its own and notes on what."""

    def __init__(self, node: Node, name: str = "a") -> None:
        self.node = node
        self.name = name
        self.started: list[Layers] = []
        self.reached: list[str] = []
        self.seconds = 60.0
        self.cancelled: Callable[[], bool] = lambda: False

    def start(self, layers: Layers) -> SandboxHandle:
        self.node.stop(self.name)
        self.started.append(layers)
        spec = SandboxSpec(name=self.name, image="base", layers=layers)
        return self.node.start(spec, timeout_seconds=60)

    @contextmanager
    def network(self, handle: SandboxHandle) -> Iterator[Mapping[str, str]]:
        self.reached.append(handle.name)
        yield {}
        self.reached.append("closed")

    def prepare(
        self,
        *recipes: Recipe,
        spec: SandboxSpec = SPEC,
        environment: Environment = ENVIRONMENT,
    ) -> Layers:
        return prepare_layers(
            self.node,
            spec,
            recipes,
            environment=environment,
            start=self.start,
            network=self.network,
            deadline=Deadline(
                remaining_seconds=lambda: self.seconds, cancelled=lambda: self.cancelled()
            ),
        )


def test_nothing_to_do_is_no_layer_and_no_sandbox(node: Node) -> None:
    caller = Caller(node)
    nothing = [
        environment_recipe(Environment(setup=" \n")),
        Recipe(kind="task", script="", files={}),
    ]

    assert caller.prepare(*nothing) == ()
    assert find_layers(node, SPEC, nothing, environment=ENVIRONMENT) == ()
    assert (caller.started, caller.reached, node.calls) == ([], [], [])


def test_each_setup_is_a_layer_on_the_one_before_and_leaves_no_trace_of_itself(node: Node) -> None:
    caller = Caller(node)
    task = Recipe(kind="task", script="make", files=TASK.files)
    assert find_layers(node, SPEC, [SETUP, task], environment=ENVIRONMENT) is None

    layers = caller.prepare(SETUP, task)

    _top, below = layers
    assert caller.started == [(), (below,)]
    assert caller.reached == ["a", "closed"] * 2
    assert [(command, sorted(files)) for _name, command, files in node.ran] == [
        ("bash /setup/.environment-setup.sh", ["/setup/.environment-setup.sh"]),
        (
            "bash /setup/.task-setup.sh",
            ["/installed", "/setup/.task-setup.sh", "/setup/data/in.txt"],
        ),
    ]
    assert node.ran[0][2]["/setup/.environment-setup.sh"] == (b"apt-get install x\n", 0o755)
    assert node.ran[1][2]["/setup/data/in.txt"] == (b"1 2 3", 0o644)
    assert [node.files_of(each) for each in layers] == [["/installed"]] * 2
    assert node.sandboxes == {}
    assert find_layers(node, SPEC, [SETUP, task], environment=ENVIRONMENT) == layers
    assert find_layers(node, SPEC, [SETUP], environment=ENVIRONMENT) == (below,)


def test_what_is_there_is_taken_and_only_what_is_missing_is_made(node: Node) -> None:
    first, second = Caller(node, "a"), Caller(node, "b")
    (below,) = first.prepare(SETUP)

    assert second.prepare(SETUP) == (below,)
    assert second.started == []
    top, again = second.prepare(SETUP, Recipe(kind="task", script="make"))
    assert (again, second.started) == (below, [(below,)])
    assert [name for name, _command, _files in node.ran] == ["a", "b"]
    assert top != below


def test_files_without_a_script_are_a_setup_that_runs_nothing(node: Node) -> None:
    (layer,) = Caller(node).prepare(TASK)

    assert node.ran == []
    assert node.files_of(layer) == []


def test_sixteen_who_need_the_same_at_once_make_it_once(node: Node) -> None:
    callers = [Caller(node, f"c{number}") for number in range(16)]

    def all_have_looked(layers: Layers, start: Callable[[Layers], SandboxHandle]) -> SandboxHandle:
        """Start only once all have seen that the layer is missing; the holder looked twice."""
        for _ in range(17):
            assert node.looked_up.acquire(timeout=30)
        return start(layers)

    for caller in callers:
        caller.start = lambda layers, start=caller.start: all_have_looked(layers, start)  # type: ignore[method-assign, misc]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda caller: caller.prepare(SETUP), callers))

    assert len(set(found)) == 1
    assert tuple(node.made) == found[0]
    assert [sum(len(each.started) for each in callers), len(node.ran)] == [1, 1]


def test_a_setup_that_fails_tells_its_output_and_the_next_caller_tries_again(node: Node) -> None:
    first, second = Caller(node, "a"), Caller(node, "b")
    node.answer = lambda: Answer(output="no such ", stderr="package\n", exit_code=100)

    with pytest.raises(SetupFailed) as failed:
        first.prepare(SETUP)

    assert str(failed.value) == "The environment's setup ended with 100: no such package\n"
    assert (failed.value.code, failed.value.timed_out) == ("sandbox.setup_failed", False)
    assert node.made == []
    node.answer = Answer
    assert second.prepare(SETUP) == tuple(node.made)
    assert first.prepare(SETUP) == tuple(node.made)
    assert [name for name, _command, _files in node.ran] == ["a", "b"]


def test_the_end_of_much_output_is_told(node: Node) -> None:
    node.answer = lambda: Answer(output="x" * 5000 + "the reason", exit_code=1)

    with pytest.raises(SetupFailed) as failed:
        Caller(node).prepare(SETUP)

    assert str(failed.value) == f"The environment's setup ended with 1: {'x' * 1990}the reason"


def test_a_setup_that_does_not_end_says_so(node: Node) -> None:
    node.answer = lambda: Answer(output="waiting", timed_out=True)

    with pytest.raises(SetupFailed, match="setup did not end in time: waiting") as failed:
        Caller(node).prepare(SETUP)

    assert failed.value.timed_out
    assert node.made == []


def while_another_waits(
    node: Node, first: Caller, second: Caller
) -> tuple[BaseException | Layers, BaseException | Layers]:
    """Let the second begin to wait once the first holds the layer; return what both get."""
    waits = threading.Event()

    def note_waiting() -> bool:  # it is asked while it waits
        waits.set()
        return False

    second.cancelled = note_waiting
    start = first.start

    def start_once_the_other_waits(layers: Layers) -> SandboxHandle:
        assert waits.wait(timeout=30)
        return start(layers)

    first.start = start_once_the_other_waits  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first.prepare, SETUP)
        assert node.looked_up.acquire(timeout=30)
        assert node.looked_up.acquire(timeout=30)  # the first holds the layer now
        two = pool.submit(second.prepare, SETUP)
        return one.exception(timeout=60) or one.result(), two.exception(timeout=60) or two.result()


def test_of_two_who_wait_the_second_makes_what_the_first_could_not(node: Node) -> None:
    first, second = Caller(node, "a"), Caller(node, "b")
    node.fail_next("start", StartTimeout("the node was slow"))

    one, two = while_another_waits(node, first, second)

    assert isinstance(one, StartTimeout)
    assert two == tuple(node.made)
    assert [name for name, _command, _files in node.ran] == ["b"]


@pytest.mark.parametrize("timed_out", [False, True])
def test_who_waited_for_a_setup_that_failed_shares_the_failure_and_later_ones_do_not(
    node: Node, timed_out: bool
) -> None:
    first, second = Caller(node, "a"), Caller(node, "b")
    answers = iter([Answer(output="no", exit_code=1, timed_out=timed_out), Answer()])
    node.answer = lambda: next(answers)

    one, two = while_another_waits(node, first, second)

    assert isinstance(one, SetupFailed)
    assert isinstance(two, SetupFailed)
    assert (str(two), two.timed_out) == (str(one), timed_out)
    assert two.__cause__ is one
    assert (second.started, [name for name, _command, _files in node.ran]) == ([], ["a"])
    assert Caller(node, "c").prepare(SETUP) == tuple(node.made)
    assert [name for name, _command, _files in node.ran] == ["a", "c"]


def test_who_waits_can_be_cancelled_and_runs_out_of_time(node: Node) -> None:
    key = SETUP.key(base=base_key(node, SPEC, ENVIRONMENT))
    caller = Caller(node)
    with node.hold_layer(key, timeout_seconds=60):
        caller.cancelled = lambda: True
        with pytest.raises(SandboxCancelled):
            caller.prepare(SETUP)
        caller.cancelled, caller.seconds = (lambda: False), -5.0  # a second at the least
        with pytest.raises(StartTimeout):
            caller.prepare(SETUP)

    assert (caller.started, node.made) == ([], [])
    assert caller.prepare(SETUP) == tuple(node.made)


def key(recipe: Recipe = SETUP, *, base: str = "base") -> str:
    return recipe.key(base=base)


@pytest.mark.parametrize(
    "other",
    [
        Recipe(kind="environment", script="apt-get install y\n"),
        Recipe(kind="environment", script="apt-get install x\n", files={"f": (b"", 0o644)}),
    ],
)
def test_another_script_or_file_is_another_layer(other: Recipe) -> None:
    assert key(other) != key()


def test_the_key_depends_on_files_their_content_their_modes_and_the_base() -> None:
    files = [
        {"f": (b"1", 0o644)},
        {"f": (b"2", 0o644)},
        {"f": (b"1", 0o755)},
        {"g": (b"1", 0o644)},
        {"f": (b"1", 0o644), "g": (b"1", 0o644)},
    ]
    keys = {key(Recipe(kind="task", script="x", files=each)) for each in files}
    keys.add(key(Recipe(kind="task", script="x", files=files[0]), base="other"))

    assert len(keys) == 6


def test_the_key_depends_neither_on_the_order_of_files_nor_on_whose_setup_it_is() -> None:
    one, two = {"f": (b"1", 0o644)}, {"g": (b"2", 0o600)}

    forth = Recipe(kind="task", script="x", files={**one, **two})
    back = Recipe(kind="environment", script="x", files={**two, **one})

    assert key(forth) == key(back)


def test_image_and_working_directory_tell_unprepared_sandboxes_apart(node: Node) -> None:
    image = SandboxSpec(name="spec", image="other")
    workdir = SandboxSpec(name="spec", image="base", workdir="/src")
    named = SandboxSpec(name="another", image="base")

    keys = [base_key(node, spec, ENVIRONMENT) for spec in (SPEC, image, workdir, named)]

    assert len(set(keys)) == 3
    assert keys[0] == keys[3]
    assert Caller(node).prepare(SETUP) != Caller(node).prepare(SETUP, spec=image)


def test_what_a_sandbox_reaches_tells_unprepared_ones_apart(node: Node) -> None:
    hosts = ["b.org", "a.org"]
    listed = Environment(network="allow_list", egress_hosts=hosts)
    kinds = [
        (SPEC, ENVIRONMENT),
        (SandboxSpec(name="spec", image="base", network="host"), ENVIRONMENT),
        (SandboxSpec(name="spec", image="base", gpu="nvidia"), ENVIRONMENT),
        (SPEC, Environment(network="model_only")),
        (SPEC, listed),
        (SPEC, Environment(network="allow_list", egress_hosts=["b.org"])),
    ]
    sorted_hosts = Environment(network="allow_list", egress_hosts=sorted(hosts))

    assert len({base_key(node, *each) for each in kinds}) == len(kinds)
    assert base_key(node, SPEC, sorted_hosts) == base_key(node, SPEC, listed)
    made = {Caller(node).prepare(SETUP, environment=each) for each in (ENVIRONMENT, listed)}
    assert len(made) == 2
    assert find_layers(node, SPEC, [SETUP], environment=sorted_hosts) in made
