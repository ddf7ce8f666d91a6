"""Environments for imported tasks: what a task asks of its sandbox becomes a catalogue entry."""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError

from evaluators.registry import get_evaluator
from rollouts.importers.base import ImageBuild, TaskRecord
from rollouts.models import Task
from sandboxes.images.exceptions import ReferenceInvalid
from sandboxes.images.references import parse_source
from sandboxes.models import Environment, Image
from sandboxes.network.allow_list import InvalidPattern, parse_pattern
from sandboxes.services.catalogue import save_environment
from sandboxes.services.images import define_image
from sandboxes.states import Network

DEFAULT_IMAGE = "base"
DEFAULT_WORKDIR = "/app"
SHELL_AGENT, ANSWER_AGENT, REPAIR_AGENT = "command_line", "single_turn", "bash_block"
CLOSED = (None, "", "no-network", "none")
REACHING = (Network.ALLOW_LIST, Network.HOST)
MIB = 1024 * 1024
REPAIR_PROMPT = (
    "You work in a Linux shell, in a repository whose issue you are given. Change the code so that "
    "the issue is resolved; tests that you are not shown decide. Write one bash block a turn, and "
    "submit when you are done."
)


@dataclass(frozen=True)
class Need:
    """What a task asks of its sandbox; tasks with equal needs share an environment.

    `image` is a name in the catalogue, empty for tasks that need no sandbox.
    """

    image: str
    workdir: str
    memory_mb: int | None
    storage_mb: int | None
    cpus: float | None = None
    agent: str = SHELL_AGENT
    evaluator: str = "script"
    hosts: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Return a short name of this need; what later releases added counts where it is set."""
        plain = {"cpus": None, "agent": SHELL_AGENT, "evaluator": "script", "hosts": ()}
        body = {
            name: value
            for name, value in asdict(self).items()
            if name not in plain or value != plain[name]
        }
        return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:8]

    @property
    def limits(self) -> dict[str, int | float]:
        """Return the limits as an environment holds them, in bytes."""
        found: dict[str, int | float] = {
            name: value * MIB
            for name, value in (
                ("memory_bytes", self.memory_mb),
                ("disk_bytes", self.storage_mb),
            )
            if value
        }
        return {**found, **({"cpus": self.cpus} if self.cpus else {})}


def unmet(
    record: TaskRecord, *, images: Collection[str], environment: Environment | None = None
) -> str:
    """Return why a task cannot run here, empty when it can.

    `images` are the names in the catalogue, `environment` what is given for all tasks.
    """
    asked = record.environment
    for name in ("memory_mb", "storage_mb"):
        if asked.get(name) is not None and _whole(asked[name]) is None:
            return f"[environment] {name} is {asked[name]!r}; it must be a whole number above 0"
    if asked.get("cpus") is not None and _cpus(asked["cpus"]) is None:
        return f"[environment] cpus is {asked['cpus']!r}; it must be a number above 0"
    if wanting := _unmet_network(record, environment):
        return wanting
    if environment is not None:
        wanted = get_evaluator(record.evaluator).wants_sandbox(record.evaluator_settings)
        if wanted and environment.image_id is None:
            return (
                f"environment {environment.ref} has no sandbox, which evaluator "
                f"{record.evaluator!r} needs; choose one that has an image"
            )
        return ""
    return _unmet_image(record, images)


def _unmet_network(record: TaskRecord, environment: Environment | None) -> str:
    mode, hosts = record.environment.get("network_mode"), record.environment.get("allowed_hosts")
    if mode in CLOSED and not hosts:
        return ""
    if environment is not None and environment.network in REACHING:
        return ""
    if mode not in (*CLOSED, "allowlist"):
        return (
            f"the task asks for a network (network_mode {mode!r}), and sandboxes reach listed "
            "hosts only; say network_mode = 'allowlist' and allowed_hosts, or import with an "
            "environment that has the network"
        )
    if environment is not None:
        return f"the task asks for a network, which environment {environment.ref} does not give"
    if not settings.EGRESS:
        return "the task asks for a network, and none is permitted here; set PRORL_EGRESS=1"
    try:
        for host in hosts or ():
            parse_pattern(host)
    except (InvalidPattern, TypeError, AttributeError) as fault:
        return f"[environment] allowed_hosts: {fault}"
    return ""


def _unmet_image(record: TaskRecord, images: Collection[str]) -> str:
    name = need_of(record).image
    if not name or record.build is not None or name in images:
        return ""
    image = record.image or DEFAULT_IMAGE
    if _is_reference(image):
        try:
            parse_source(_source(image))
        except ReferenceInvalid as fault:
            return f"image {image!r}: {fault}"
    else:
        return (
            f"image {image!r} is not in the catalogue; add it there, write a whole "
            "reference such as docker.io/library/debian:12, or import with an environment that "
            "has what the task needs"
        )
    return ""


def refuse_taken_name(*, set_name: str) -> None:
    """Refuse to make environments named after a set where the name is another's.

    Raises ValidationError.
    """
    if not Environment.objects.filter(name=set_name).exists():
        return
    if not Task.objects.filter(task_set__name=set_name, environment__name=set_name).exists():
        raise ValidationError(
            {
                "set_name": f"The catalogue has an environment {set_name!r} that no task of this "
                f"set uses: say environment = {set_name!r} (--environment {set_name}) for the "
                "tasks to run in it, or choose another name for the set."
            }
        )


class EnvironmentMaker:
    """Give each task the environment of its need, made when the first task asks for it.

    The need whose digest is `main` gets the environment `name`, the others `name-<digest>`. A task
    of the set `name` keeps its environment while that gives what the task needs, and new tasks get
    the newest version that does: what operators edited otherwise stays as they left it.
    """

    def __init__(self, *, name: str, main: str) -> None:
        self._name = name
        self._main = main
        self._made: dict[Need, Environment] = {}
        self._present: dict[str, Environment] = {}
        self._known: dict[UUID, Environment] = {}

    def recall(self, refs: Sequence[str]) -> None:
        """Look up the environments that tasks have, those of the records that come next."""
        tasks = Task.objects.filter(task_set__name=self._name, ref__in=refs)
        pks = dict(tasks.values_list("ref", "environment_id"))
        if len(self._known) >= MAX_NEEDS:
            self._known.clear()
        new = set(pks.values()) - self._known.keys()
        found = Environment.objects.select_related("image").defer("files")
        self._known.update(found.in_bulk(new) if new else {})
        self._present = {ref: self._known[pk] for ref, pk in pks.items() if pk in self._known}

    def __call__(self, record: TaskRecord) -> Environment:
        """Return the environment of a task that `unmet` found nothing against."""
        need = need_of(record)
        present = self._present.get(record.ref)
        if present is not None and _gives(present, need):
            return present
        if need not in self._made:
            if len(self._made) >= MAX_NEEDS:
                self._made.clear()  # bounded memory: they are found again by what they are
            self._made[need] = self._make(need, record)
        return self._made[need]

    def _make(self, need: Need, record: TaskRecord) -> Environment:
        name = self._name if need.digest == self._main else f"{self._name[:90]}-{need.digest}"
        versions = Environment.objects.filter(name=name).select_related("image").defer("files")
        for version in versions.order_by("-version"):
            if _gives(version, need):
                return version
        in_shell = need.agent != ANSWER_AGENT
        reaching: dict[str, Any] = {}
        if need.hosts:
            reaching = {"network": Network.ALLOW_LIST, "egress_hosts": list(need.hosts)}
        return save_environment(
            name=name,
            image=_image(need, record),
            workdir=need.workdir,
            agent=need.agent,
            tools=["bash", "submit"] if in_shell else [],
            limits=need.limits,
            evaluator=need.evaluator,
            system_prompt=REPAIR_PROMPT if need.agent == REPAIR_AGENT else "",
            **reaching,
        )


MAX_NEEDS = 10_000


def _gives(environment: Environment, need: Need) -> bool:
    """Tell whether an environment has all that a need speaks of, and as it says."""
    asked = ("memory_bytes", "disk_bytes", "cpus")
    limits = {name: value for name, value in environment.limits.items() if name in asked}
    network, hosts = (Network.ALLOW_LIST, need.hosts) if need.hosts else (Network.NONE, ())
    return (
        (environment.image.name if environment.image else "") == need.image
        and (environment.workdir, environment.agent) == (need.workdir, need.agent)
        and environment.evaluator == need.evaluator
        and limits == need.limits
        and (environment.network, tuple(sorted(set(environment.egress_hosts)))) == (network, hosts)
    )


def need_of(record: TaskRecord) -> Need:
    """Return what a task asks of its sandbox."""
    asked = record.environment
    in_sandbox = get_evaluator(record.evaluator).wants_sandbox(record.evaluator_settings)
    agent = str(asked.get("agent") or (SHELL_AGENT if in_sandbox else ANSWER_AGENT))
    wants_image = in_sandbox or agent != ANSWER_AGENT
    return Need(
        image=_image_name(record) if wants_image else "",
        workdir=str(asked.get("workdir") or DEFAULT_WORKDIR),
        memory_mb=_whole(asked.get("memory_mb")),
        storage_mb=_whole(asked.get("storage_mb")),
        cpus=_cpus(asked.get("cpus")),
        agent=agent,
        evaluator=record.evaluator if record.evaluator in ("script", "swe", "code") else "exact",
        hosts=tuple(sorted(set(asked.get("allowed_hosts") or ()))),
    )


def always(environment: Environment) -> Callable[[TaskRecord], Environment]:
    """Return a function that gives every task the same environment."""

    def environment_of(_record: TaskRecord) -> Environment:
        return environment

    return environment_of


def _image_name(record: TaskRecord) -> str:
    """Return the name that a task's image has, or is to have, in the catalogue."""
    if record.build is not None:
        return record.build.name
    image = record.image or DEFAULT_IMAGE
    if not _is_reference(image):
        return image
    words = re.sub(r"[^a-z0-9._-]+", "-", image.split("://")[-1].lower()).strip("-._")
    digest = hashlib.sha256(_source(image).encode()).hexdigest()[:8]
    return f"{words[-80:].lstrip('-._')}-{digest}"


def _is_reference(image: str) -> bool:
    """Tell whether a text is a registry's reference: no name in the catalogue has a slash."""
    return "/" in image or ":" in image


def _source(image: str) -> str:
    return image if "://" in image else f"docker://{image}"


def _image(need: Need, record: TaskRecord) -> Image | None:
    if not need.image:
        return None
    build: ImageBuild | None = record.build
    if build is not None:
        return define_image(
            name=need.image,
            source="definition:",
            definition=build.definition,
            files=dict(build.files),
        )
    found = Image.objects.filter(name=need.image).first()
    if found is None and record.image is not None:
        found = define_image(name=need.image, source=_source(record.image))
    return found or Image.objects.get(name=DEFAULT_IMAGE)


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _cpus(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < 1e6 else None
