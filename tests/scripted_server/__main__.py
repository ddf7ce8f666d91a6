"""Start the scripted server."""

import argparse
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from tests.scripted_server.server import ScriptedServer, read_script


def main(arguments: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.scripted_server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one")
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer folder")
    options = parser.parse_args(arguments)
    server = ScriptedServer(
        tokenizer=options.tokenizer,
        script=read_script(options.script),
        host=options.host,
        port=options.port,
    )

    def stop(_signum: int, _frame: FrameType | None) -> None:
        threading.Thread(target=server.shutdown, name="shutdown").start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print(f"serving a SCRIPT, not a model, at {server.url}", flush=True)
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
