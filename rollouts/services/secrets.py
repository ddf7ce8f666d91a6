"""Secrets of environments: the catalogue holds references, a worker reads the values when it must.

`env:NAME` is the variable PRORL_SECRET_NAME of the worker's process, `file:PATH` a file below the
folder that PRORL_SECRETS_DIR names. Values are stored, logged and shown nowhere.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.conf import settings

from rollouts.exceptions import InfraFault
from rollouts.models import Task
from rollouts.services.inline import PREFIX
from sandboxes.models import Environment
from sandboxes.setup_files import RESERVED, SECRET_USES, VARIABLE_PREFIX, mask, secrets_for

MAX_BYTES = 64 * 1024
MARK = "secret"  # {"secret": NAME} in an evaluator's settings stands for the value


class SecretMissing(InfraFault):
    """A secret is not on this node, or is nothing that a program can be given."""

    code = "secret.missing"


def resolve_secrets(references: Mapping[str, str]) -> dict[str, str]:
    """Return the value of each reference by name. Raises SecretMissing for the first without."""
    return {name: _resolve(name, reference) for name, reference in references.items()}


def environment_secrets(environment: Environment, use: str) -> dict[str, str]:
    """Return the secrets that one use of an environment is given. Raises SecretMissing."""
    return resolve_secrets(secrets_for(environment.secrets, use))


def check_secrets(environment: Environment) -> None:
    """Raise SecretMissing unless this node has all that an environment names."""
    for use in SECRET_USES:
        environment_secrets(environment, use)


def evaluator_secrets(
    settings: Mapping[str, Any], *, environment: Environment, task: Task
) -> dict[str, str]:
    """Return what the marks `{"secret": NAME}` in a grading's settings may stand for.

    Raises SecretMissing. A task that a trainer sent along brings neither settings nor tests of its
    own beside an environment's secrets: they could send the value elsewhere.
    """
    values = environment_secrets(environment, "evaluator")
    brings_its_own = values and any(map(task.hidden.get, ("evaluator_settings", "tests")))
    if brings_its_own and _has_marks(settings) and task.task_set.name.startswith(PREFIX):
        raise InfraFault(
            "The environment's evaluator_settings hold secrets: a task that was sent along may "
            "bring neither evaluator_settings nor tests.",
            code="secret.refused",
            retryable=False,
        )
    return values


def replace_marks(given: Any, values: Mapping[str, str]) -> Any:
    """Return settings with a value in place of each mark. Raises SecretMissing for another name."""
    if isinstance(given, Mapping):
        if set(given) == {MARK} and isinstance(given[MARK], str):
            if given[MARK] not in values:
                raise SecretMissing(
                    f"evaluator_settings name the secret {given[MARK]!r}, which the environment "
                    'does not give to "evaluator".',
                    retryable=False,
                )
            return values[given[MARK]]
        return {key: replace_marks(value, values) for key, value in given.items()}
    if isinstance(given, list):
        return [replace_marks(value, values) for value in given]
    return given


def masked(value: Any, secrets: Mapping[str, str]) -> Any:
    """Return JSON in which the values of secrets are replaced by their names."""
    if not secrets:
        return value
    if isinstance(value, str):
        return mask(value, secrets)
    if isinstance(value, Mapping):
        return {mask(str(key), secrets): masked(each, secrets) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each, secrets) for each in value]
    return value


def _has_marks(value: Any) -> bool:
    if isinstance(value, Mapping):
        return set(value) == {MARK} or any(map(_has_marks, value.values()))
    return isinstance(value, list) and any(map(_has_marks, value))


def _resolve(name: str, reference: str) -> str:
    kind, _, rest = reference.partition(":")
    value = _variable(rest) if kind == "env" else _read(name, rest)
    if value is None:
        raise _missing(name, f"its worker has no variable {VARIABLE_PREFIX}{rest}")
    if not value or "\0" in value:
        raise _missing(name, f"what {reference} leads to is empty or holds a NUL character")
    return value


def _variable(rest: str) -> str | None:
    """Return a variable's value, None without; the service's own key is nobody's secret."""
    return None if rest == RESERVED else os.environ.get(VARIABLE_PREFIX + rest)


def _read(name: str, path: str) -> str:
    """Return a file's text without the line end that editors leave."""
    folder = settings.SECRETS_DIR
    if not folder:
        raise _missing(name, "its worker has no PRORL_SECRETS_DIR")
    root = Path(folder).resolve()
    try:
        # Links inside are how orchestrators exchange secrets; one that leads out is refused.
        found = (root / path).resolve()
        if not found.is_relative_to(root):
            raise _missing(name, f"file:{path} is not below PRORL_SECRETS_DIR")
        with found.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise _missing(name, f"file:{path} has more than {MAX_BYTES} bytes")
        return data.decode().removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise _missing(name, f"file:{path} cannot be read there ({error.strerror})") from None
    except ValueError:  # no UTF-8, or no path
        raise _missing(name, f"file:{path} is no text file") from None


def _missing(name: str, why: str) -> SecretMissing:
    return SecretMissing(f"Node {settings.NODE_NAME} lacks the secret {name}: {why}.")
