"""What executes cells inside a sandbox: plain Python, IPython, and matplotlib's figures.

Executed in there in one namespace with `python_kernel`, which says how, and before it.
"""

# The syntax and the annotations are those of Python 3.6; names of arguments are the base classes'.
# ruff: noqa: ARG002, UP031, UP037

import ast
import builtins
import importlib
import importlib.machinery
import importlib.util
import io
import linecache
import os
import sys
import traceback
import types
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandboxes.runtime.python_kernel import Channel

SOURCE_NAME = "<kernel>"
IMAGE_KINDS = ("image/png", "image/jpeg")  # an object that has both is shown as the first

_FIGURES = "rollout_figures"
_exc_info = sys.exc_info


def _find_image(bundle: "Any") -> "tuple[str, Any] | None":
    for kind in IMAGE_KINDS:
        if bundle.get(kind):
            return kind, bundle[kind]
    return None


class Figures:
    """Give matplotlib, where a cell imports it, a backend that shows figures as images."""

    def __init__(self, channel: "Channel") -> None:
        self._channel = channel
        self._busy = False

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Find our backend, and matplotlib as anybody would, but with our backend set."""
        if name == _FIGURES:
            return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]
        if name != "matplotlib" or self._busy or "MPLBACKEND" in os.environ:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_set(module: "Any") -> None:
                execute(module)
                module.rcParams["backend"] = "module://" + _FIGURES

            spec.loader.exec_module = execute_and_set  # type: ignore[method-assign]
        return spec

    def create_module(self, spec: "Any") -> None:
        """Let an empty module be made."""

    def exec_module(self, module: "Any") -> None:
        """Fill our backend."""
        module.FigureCanvas = _find("matplotlib.backends.backend_agg", "FigureCanvasAgg")
        module.FigureManager = _find("matplotlib.backend_bases", "FigureManagerBase")
        module.show = lambda *_, **__: self.show()
        _find("matplotlib.figure", "Figure")._repr_png_ = _draw  # a figure as a value

    def show(self) -> None:
        """Send every open figure and close it; done after each cell, as notebooks do."""
        if _FIGURES not in sys.modules:
            return
        for manager in _find("matplotlib._pylab_helpers", "Gcf").get_all_fig_managers():
            self._channel.send_image("image/png", _draw(manager.canvas.figure))


def _draw(figure: "Any") -> bytes:
    # Closed first: it is not to be shown twice, nor to fail again after each later cell.
    _find("matplotlib._pylab_helpers", "Gcf").destroy(getattr(figure, "number", None))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", bbox_inches="tight")
    return picture.getvalue()


class PlainPython:
    """Execute cells with nothing but Python: the last expression's value is shown."""

    kind = b"python"

    def __init__(self, channel: "Channel") -> None:
        self._channel = channel
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        self._names = module.__dict__
        self._flags = getattr(ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0)
        self._loop: "Any" = None
        self._count = 0

    def run(self, code: str) -> str:
        """Execute a cell; returns its traceback, empty when it ended well."""
        self._count += 1
        name = "<cell %d>" % self._count
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        try:
            tree: "Any" = compile(code, name, "exec", self._flags | ast.PyCF_ONLY_AST, True)
            last = tree.body[-1:]
            shown = bool(last) and isinstance(last[0], ast.Expr)
            if shown:
                tree.body = tree.body[:-1]
            if tree.body:
                self._evaluate(tree, name, "exec")
            if shown:
                value = last[0].value
                self._show(self._evaluate(ast.Expression(value), name, "eval"))
        except BaseException:
            return explain(*_exc_info())
        return ""

    def _evaluate(self, tree: "Any", name: str, mode: str) -> "Any":
        code = compile(tree, name, mode, self._flags, True)
        # `from __future__ import …` holds for the cells that follow.
        self._flags |= code.co_flags & _FUTURE
        value = eval(code, self._names)  # noqa: S307 - what this program is for
        if code.co_flags & 0x80:  # inspect.CO_COROUTINE: it awaits outside of any function
            if self._loop is None:
                import asyncio

                self._loop = asyncio.new_event_loop()
                asyncio.set_event_loop(self._loop)
            value = self._loop.run_until_complete(value)
        return value

    def _show(self, value: "Any") -> None:
        if value is None:
            return
        sys.stdout.write(repr(value) + "\n")
        self._names["_"] = value
        for kind, method in (("image/png", "_repr_png_"), ("image/jpeg", "_repr_jpeg_")):
            make = getattr(type(value), method, None)
            made = make(value) if make is not None else None
            if isinstance(made, tuple):
                made = made[0]
            if isinstance(made, bytes):
                self._channel.send_image(kind, made)
                return


def _future_flags() -> int:
    import __future__

    flags = 0
    for name in __future__.all_feature_names:
        flags |= getattr(__future__, name).compiler_flag
    return flags & ~0x10  # nested_scopes shares its bit with CO_NESTED


_FUTURE = _future_flags()


def check_text(code: str) -> None:
    """Raise what Python raises for code that is no text, where IPython would trip over it."""
    code.encode("utf-8")
    if "\0" in code:
        raise ValueError("source code string cannot contain null bytes")


def explain(kind: "Any", value: "Any", trace: "Any") -> str:
    """Return an exception's traceback without the frames of this file."""
    try:
        whole = traceback.TracebackException(kind, value, trace)
        pending, seen = [whole], set()
        while pending:
            part: "Any" = pending.pop()
            if part is None or id(part) in seen:
                continue
            seen.add(id(part))
            if getattr(part, "stack", None) is not None:
                part.stack[:] = [f for f in part.stack if f.filename != SOURCE_NAME]
            pending += [part.__cause__, part.__context__]
            pending += getattr(part, "exceptions", None) or []
        return "".join(whole.format())
    except BaseException:
        return "%s (its traceback could not be made)\n" % getattr(kind, "__name__", "error")


def _find(module: str, name: str) -> "Any":
    return getattr(importlib.import_module(module), name)


def make_ipython(channel: "Channel") -> "Any":
    """Return an interpreter with magics, `!command` and the like; raises without IPython."""
    absent: "Any" = None
    sys.modules.setdefault("jedi", absent)  # completion, a fifth of the time to start
    display_hook = _find("IPython.core.displayhook", "DisplayHook")
    publisher = _find("IPython.core.displaypub", "DisplayPublisher")
    interactive_shell = _find("IPython.core.interactiveshell", "InteractiveShell")
    type_trait = _find("traitlets", "Type")

    def show(bundle: "Any") -> None:
        if bundle.get("text/plain"):
            sys.stdout.write(bundle["text/plain"] + "\n")
        image = _find_image(bundle)
        if image is not None:
            data = image[1]
            if isinstance(data, str):
                from base64 import b64decode

                data = b64decode(data)
            channel.send_image(image[0], data)

    class Hook(display_hook):  # type: ignore[misc,valid-type]
        def write_output_prompt(self) -> None:
            pass

        def write_format_data(self, format_dict: "Any", md_dict: "Any" = None) -> None:
            show(format_dict)

        def finish_displayhook(self) -> None:
            pass

    class Publisher(publisher):  # type: ignore[misc,valid-type]
        def publish(self, data: "Any", *_: "Any", **__: "Any") -> None:
            show(data)

        def clear_output(self, wait: bool = False) -> None:
            pass

    class Shell(interactive_shell):  # type: ignore[misc,valid-type]
        displayhook_class = type_trait(Hook)
        display_pub_class = type_trait(Publisher)
        system = interactive_shell.system_raw  # on our pipe; the other form makes a terminal

        def init_display_formatter(self) -> None:
            super().init_display_formatter()
            self.display_formatter.active_types = ["text/plain", *IMAGE_KINDS]

        def _tee(self, channel: "Any") -> "Any":
            return io.BytesIO()  # a context that does nothing; IPython's keeps all that is printed

        def _showtraceback(self, etype: "Any", evalue: "Any", stb: "Any") -> None:
            shown = [part for part in stb if SOURCE_NAME not in part.lstrip().split("\n")[0]]
            self.errors.append(self.InteractiveTB.stb2text(shown))

        def enable_gui(self, gui: "Any" = None) -> None:
            pass  # `%matplotlib inline` asks for it

        def ask_exit(self) -> None:
            raise SystemExit

    if not os.access(os.environ.get("SHELL", ""), os.X_OK):
        os.environ["SHELL"] = "/bin/sh"  # what runs `!command`
    config = _find("traitlets.config", "Config")()
    config.HistoryManager.enabled = False
    modern = _find("IPython", "version_info")[0] >= 9
    config.InteractiveShell.colors = "nocolor" if modern else "NoColor"
    shell = Shell.instance(config=config)
    if sys.modules["jedi"] is None:
        del sys.modules["jedi"]
    warnings.filterwarnings("ignore", message="To exit: use")
    return shell


class IPythonCells:
    """Execute cells with IPython's shell."""

    kind = b"ipython"

    def __init__(self, shell: "Any") -> None:
        self._shell = shell
        shell.errors = []

    def run(self, code: str) -> str:
        """Execute a cell; returns its tracebacks, empty when it ended well."""
        self._shell.errors = []
        try:
            check_text(code)
            self._shell.run_cell(code, store_history=True)
        except BaseException:
            self._shell.errors.append(explain(*_exc_info()))
        history = self._shell.history_manager
        for kept in (getattr(history, "outputs", None), history.output_hist_reprs):
            if kept is not None:
                kept.clear()
        return "\n".join(self._shell.errors)
