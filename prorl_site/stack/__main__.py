"""Run the stack in the foreground: `python -m prorl_site.stack up`."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from honcho.manager import Manager

from prorl_site.stack.engines import free_port
from prorl_site.stack.processes import ROOT, commands, stack_environment
from prorl_site.stack.stack import Stack, StackError


def up(var_dir: Path, host: str, port: int, runtime: str) -> int:
    """Start everything, one log stream; Ctrl-C ends everything."""
    stack = Stack(var_dir, settings={"PRORL_RUNTIME": runtime}, host=host, port=port or free_port())
    # SIGINT too: a shell that starts this in the background has it ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        stack.prepare()
        sys.stdout.write(f"web: {stack.url}/admin/   settings: {var_dir / 'stack.env'}\n")
        manager = Manager()
        for name, command in commands().items():
            manager.add_process(
                name, f"exec {command}", env=stack_environment(var_dir), cwd=str(ROOT)
            )
        manager.loop()
        return int(manager.returncode or 0)
    except StackError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stack.stop()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m prorl_site.stack")
    parser.add_argument("command", choices=["up"])
    parser.add_argument("--var", type=Path, default=ROOT / "var")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--runtime", default="apptainer", choices=["apptainer", "local"])
    options = parser.parse_args()
    return up(options.var.resolve(), options.host, options.port, options.runtime)


if __name__ == "__main__":
    raise SystemExit(main())
