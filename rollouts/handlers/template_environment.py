"""The Jinja2 environment of prompts: sandboxed, the same text each time, metered throughout.

Jinja2's own sandbox keeps a template from Python, not from time and memory: each operator, filter,
call, loop and output goes through the meter, and what takes a width is absent or bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import MappingProxyType
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from rollouts.handlers.template_meter import MAX_OUTPUT_CHARACTERS, current, size

MAX_POWER = 64
MAX_WIDTH = 200
MAX_JSON_INDENT = 8
MAX_INTEGER_BITS = 4096
# Those whose result is about as long as what they are given, and `join`, `replace`, `indent`.
FILTERS_KEPT = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape"),
    *("filesizeformat", "first", "float", "groupby", "indent", "int", "items", "join", "last"),
    *("length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace"),
    *("reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum"),
    *("title", "tojson", "trim", "truncate", "unique", "upper", "wordcount"),
)
METHODS = frozenset(
    {
        *("capitalize", "casefold", "count", "endswith", "find", "get", "index", "isalnum"),
        *("isalpha", "isdigit", "islower", "isspace", "isupper", "items", "join", "keys"),
        *("lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind"),
        *("rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"),
        *("title", "upper", "values"),
    }
)
_VALUES = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset, range)


class PromptEnvironment(ImmutableSandboxedEnvironment):
    """Refuse what takes long or is another text each time; render within a meter alone."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%", "/", "//"})

    def __init__(self) -> None:
        super().__init__(
            undefined=StrictUndefined,
            keep_trailing_newline=True,
            autoescape=False,
            optimized=False,  # else constants are computed while compiling, outside of any meter
            finalize=_said,
        )
        self.globals.pop("lipsum")
        self.filters = {name: _metered(name, FILTERS[name]) for name in FILTERS_KEPT}
        self.filters.update(_counted=_metered_steps, _made=_made, _joined=_joined)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Metering().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute within bounds."""
        current.get().step()
        if operator == "**" and not (_small(left) and _small(right)):
            raise SecurityError("a power is too large")
        if operator == "%" and isinstance(left, str | bytes):
            raise SecurityError("texts are not formatted by %: join them with ~")
        if operator == "*":
            _check_product(left, right)
        elif operator == "+":
            current.get().make(size(left) + size(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse the one method whose widths stand within its text."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("the method format is not at hand here: use ~")
        return None

    def call(self, context: Any, called: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a global, or a method whose result is no longer than what it is given."""
        current.get().step()
        owner = getattr(called, "__self__", None)
        if isinstance(owner, _VALUES):
            name = getattr(called, "__name__", "")
            if name not in METHODS:
                raise SecurityError(f"the method {name} is not at hand here: use a filter")
            args = tuple(list(_metered_steps(each)) for each in args) if name == "join" else args
            current.get().make(_of_method(name, owner, [*args, *kwargs.values()]))
        return super().call(context, called, *args, **kwargs)


class _Metering(NodeTransformer):
    """Have loops, literals, joined texts and all that is said pass the meter."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        if node.recursive:
            raise TemplateSyntaxError("a loop cannot be recursive", node.lineno)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        listed = nodes.List(node.nodes, lineno=node.lineno, environment=node.environment)
        return _filtered(listed, "_joined")

    def visit_List(self, node: nodes.List) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_made")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_made")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_made") if node.ctx == "load" else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:  # noqa: N802
        return nodes.Const(node.data, lineno=node.lineno, environment=node.environment)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(
        node, name, [], [], None, None, lineno=node.lineno, environment=node.environment
    )


@pass_context
def _said(_context: Any, value: Any) -> Any:
    """Count an output; as it asks for the context, none is computed while compiling."""
    meter = current.get()
    meter.step()
    meter.say(size(value))
    return value


def _metered_steps(values: Any) -> Iterator[Any]:
    return current.get().counted(values)


def _made(value: Any) -> Any:
    current.get().make(size(value))
    return value


def _joined(values: list[Any]) -> str:
    current.get().make(size(values))
    return "".join(map(str, values))


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts what it is given before it begins."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = current.get()
        meter.step()
        given = list(args)
        if isinstance(given[place], Iterator):
            values = meter.counted(given[place])
            given[place] = list(values) if name in _EXACT else values
        options = [*given[place + 1 :], *kwargs.values()]
        if name != "truncate" and any(isinstance(o, int) and abs(o) > MAX_WIDTH for o in options):
            raise SecurityError(f"{name} takes numbers up to {MAX_WIDTH}")
        meter.make(_EXACT.get(name, _sum)(given[place], options))
        return function(*given, **kwargs)

    return metered


def _sum(value: Any, options: list[Any]) -> int:
    return size(value) + size(options)


def _of_join(value: Any, options: list[Any]) -> int:
    separators = len(value) if hasattr(value, "__len__") else 1
    return size(value) + separators * size(options[:1])


def _of_replace(value: Any, options: list[Any]) -> int:
    text = str(value) if size(value) else ""
    found = text.count(str(options[0])) if options else 0
    return len(text) + found * size(options[1:2])


def _of_indent(value: Any, options: list[Any]) -> int:
    widths = [size(o) if isinstance(o, str) else int(o) for o in options if o is not None]
    return size(value) + (1 + str(value).count("\n")) * max(widths, default=4)


def _of_sum(value: Any, options: list[Any]) -> int:
    """Return what adding lists up one by one copies."""
    lists = any(isinstance(option, list | tuple) for option in options)
    return size(value) * (len(value) if lists else 1)


def _of_tojson(value: Any, options: list[Any]) -> int:
    indents = [int(option) for option in options if option is not None]
    if any(indent > MAX_JSON_INDENT for indent in indents):
        raise SecurityError(f"tojson indents by {MAX_JSON_INDENT} at most")
    return size(value) * (1 + max(indents, default=0))


def _of_method(name: str, owner: Any, given: list[Any]) -> int:
    if name == "join":
        return _of_join(given[0], [owner]) if given else 0
    return _of_replace(owner, given) if name == "replace" else _sum(owner, given)


_EXACT = MappingProxyType(
    {
        "join": _of_join,
        "replace": _of_replace,
        "indent": _of_indent,
        "sum": _of_sum,
        "tojson": _of_tojson,
    }
)


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | bytes | list | tuple) and isinstance(other, int):
            if max(1, size(one)) * other > MAX_OUTPUT_CHARACTERS:
                raise SecurityError("a repeated text is too long")
            current.get().make(size(one) * max(0, other))
            return
    whole = isinstance(left, int) and isinstance(right, int)
    if whole and left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
        raise SecurityError("a product is too large")


def _small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_POWER
