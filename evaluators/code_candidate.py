"""Be the candidate's process: run a program, or answer calls of its functions.

Put into the sandbox with `code_runner`, in the syntax of Python 3.6. What the process tells is the
candidate's word, for it may do anything in here.
"""

# ruff: noqa: PTH109, PTH123, S102, SIM105, UP031

import json
import os
import sys
import types

from evaluators.code_values import pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RESULT_FD = 187  # far from those that this interpreter opens itself
ERROR_BYTES = 600
# Names that answers use without an import, as graders of such tasks have always allowed.
EXPORTS = {
    "typing": "Any Callable Deque Dict FrozenSet Generator Generic Iterable Iterator List "
    "Mapping NamedTuple Optional Sequence Set Tuple Type TypeVar Union",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "itertools": "accumulate chain combinations combinations_with_replacement compress count cycle "
    "dropwhile groupby islice pairwise permutations product repeat starmap takewhile tee "
    "zip_longest",
    "functools": "cache cmp_to_key lru_cache partial reduce wraps",
    "math": "acos asin atan atan2 ceil comb cos degrees dist e exp fabs factorial floor fmod gcd "
    "hypot inf isclose isinf isnan isqrt lcm log log10 log2 nan perm pi prod radians sin sqrt tan "
    "tau trunc",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "operator": "add and_ attrgetter itemgetter mul or_ sub truediv xor",
    "copy": "copy deepcopy",
    "random": "choice randint shuffle",
    "datetime": "date datetime timedelta",
    "fractions": "Fraction",
    "decimal": "Decimal",
    "io": "BytesIO StringIO",
    "sys": "setrecursionlimit stdin stdout",
}
MODULES = frozenset(
    {"array", "bisect", "collections", "copy", "datetime", "functools", "heapq", "io", "itertools"}
    | {"json", "math", "operator", "os", "random", "re", "statistics", "string", "sys", "typing"}
)


def main() -> None:
    """Run the program at the given path as `main`, or hold it ready for `call`s."""
    kind, path = sys.argv[1:]
    with open(path, "rb") as file:
        source = file.read()
    sys.setrecursionlimit(50000)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(1 << 20)
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.argv, sys.path[0] = [path], os.getcwd()
    code = compile(source, path, "exec")
    give_names(code, module.__dict__)
    if kind == "main":
        exec(code, module.__dict__)
        return
    module.__dict__["__name__"] = "solution"  # so that its own trial under __main__ is left out
    calls = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    first = calls.readline()
    try:
        exec(code, module.__dict__)
    except BaseException as fault:
        tell_fault(fault)
        raise
    while first:
        answer(module, json.loads(first.decode("utf-8")))
        first = calls.readline()


def answer(module: types.ModuleType, call: "dict[str, Any]") -> None:
    """Call the function and tell its value."""
    try:
        function = find(module, call["name"])
        value = function(*unpack(call["args"]), **unpack(call.get("kwargs", {"dict": []})))
        line = json.dumps({"value": pack(value)}).encode()
    except BaseException as fault:
        tell_fault(fault)
        return
    tell(line)


def find(module: types.ModuleType, name: str) -> "Any":
    """Return the function, or the method of that name of the class `Solution`."""
    solution = getattr(module, "Solution", None)
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    if not hasattr(module, name):
        raise NameError("there is no function %r" % name)
    return getattr(module, name)


def tell_fault(fault: BaseException) -> None:
    told = {"raised": type(fault).__name__, "error": str(fault)[:ERROR_BYTES]}
    tell(json.dumps(told).encode())


def tell(line: bytes) -> None:
    data = line + b"\n"
    while data:
        data = data[os.write(RESULT_FD, data) :]


def give_names(code: types.CodeType, scope: "dict[str, Any]") -> None:
    """Import what the code names without an import of its own, and nothing else: it costs time."""
    wanted = names_of(code)
    for module, exported in EXPORTS.items():
        for name in wanted.intersection(exported.split()):
            try:
                scope[name] = getattr(__import__(module), name)
            except (ImportError, AttributeError):
                pass
    for module in wanted.intersection(MODULES):
        scope[module] = __import__(module)


def names_of(code: types.CodeType) -> "Any":
    """Return the names that a code object and those inside it look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
    return names
