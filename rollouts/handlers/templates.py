"""Render the texts of an environment's prompt as Jinja2 templates, bounded in size and loops.

What an operator writes is a template; what a task brings is only ever a value in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError, meta, nodes
from jinja2.exceptions import SecurityError

from rollouts.handlers.base import AgentFault
from rollouts.handlers.template_environment import PromptEnvironment
from rollouts.handlers.template_meter import Meter, current

MAX_TEMPLATE_CHARACTERS = 200_000
MAX_LOOP_STEPS = 10_000
_FILE = "<template>"
_LOADING = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class InvalidTemplate(AgentFault):
    """Say which template is wrong, in which line, and why."""

    code = "agent.template_invalid"


class _Steps:
    """Count what `range` gives in one rendering: loops in loops share the bound."""

    def __init__(self) -> None:
        self.left = MAX_LOOP_STEPS

    def range(self, *bounds: int) -> range:
        """Return a range; raise SecurityError beyond the bound."""
        made = range(*bounds)
        self.left -= len(made) + 1
        if self.left < 0:
            raise SecurityError(f"range gives more than {MAX_LOOP_STEPS} numbers")
        return made


_environment = PromptEnvironment()


def check_template(name: str, text: str, variables: Mapping[str, Any]) -> None:
    """Raise `InvalidTemplate` for what can be known before a task is.

    `variables` are samples: a template that asks nothing of `task` is rendered with them.
    """
    if len(text) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidTemplate(f"{name} has more than {MAX_TEMPLATE_CHARACTERS} characters")
    try:
        tree = _environment.parse(text)
        _environment.compile(tree)
    except TemplateSyntaxError as error:
        raise InvalidTemplate(f"{name}, line {error.lineno}: {error.message}") from error
    for node in tree.find_all(_LOADING):
        raise InvalidTemplate(f"{name}, line {node.lineno}: other templates cannot be loaded")
    asked = meta.find_undeclared_variables(tree)
    known = {*variables, "range", "dict", "cycler", "joiner", "namespace"}
    for unknown in sorted(asked - known):
        line = next(n.lineno for n in tree.find_all(nodes.Name) if n.name == unknown)
        raise InvalidTemplate(
            f"{name}, line {line}: there is no variable {unknown!r}; known are "
            f"{', '.join(sorted(variables))}"
        )
    if "task" not in asked:
        render(name, text, variables)


def render(name: str, text: str, variables: Mapping[str, Any]) -> str:
    """Return what a template says; raise `InvalidTemplate`."""
    metering = current.set(Meter())
    try:
        return _environment.from_string(text).render(**variables, range=_Steps().range)
    except UndefinedError as error:
        raise InvalidTemplate(f"{name}{_line(error)}: {error.message}") from error
    except TemplateError as error:
        raise InvalidTemplate(f"{name}{_line(error)}: {error.message}") from error
    except (
        *(TypeError, ValueError, KeyError, AttributeError, IndexError),
        *(ArithmeticError, RecursionError, MemoryError),
    ) as error:
        raise InvalidTemplate(f"{name}{_line(error)}: {type(error).__name__}: {error}") from error
    finally:
        current.reset(metering)


def _line(error: BaseException) -> str:
    """Return the line of a template in which an error came up; Jinja2 rewrites tracebacks."""
    if isinstance(error, TemplateSyntaxError):
        return f", line {error.lineno}"
    place, found = error.__traceback__, 0
    while place is not None:
        if place.tb_frame.f_code.co_filename == _FILE:
            found = place.tb_lineno
        place = place.tb_next
    return f", line {found}" if found else ""
