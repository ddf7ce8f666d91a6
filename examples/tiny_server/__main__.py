"""Start the server, or write the tokenizer folder."""

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from examples.tiny_server.server import MODEL_NAME, TinyServer
from examples.tiny_server.tokenizer import export_tokenizer


def main(arguments: list[str]) -> int:
    """Run the command line."""
    if arguments[:1] == ["export-tokenizer"]:
        return _export(arguments[1:])
    return _serve(arguments)


def _export(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_server export-tokenizer")
    parser.add_argument("folder", type=Path)
    print(export_tokenizer(parser.parse_args(arguments).folder))
    return 0


def _serve(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tiny_server", description=__doc__, epilog="see README.md"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8081, help="0 takes a free one")
    parser.add_argument("--cache-dir", type=Path, default=Path("var/cache/tiny"))
    parser.add_argument("--model-name", default=MODEL_NAME)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Until there is a server to shut down, unwind: a half-written cache removes itself.
    signal.signal(signal.SIGTERM, lambda _signum, _frame: sys.exit(128 + signal.SIGTERM))
    server = TinyServer(
        cache_dir=options.cache_dir,
        host=options.host,
        port=options.port,
        model_name=options.model_name,
    )

    def stop(_signum: int, _frame: FrameType | None) -> None:
        threading.Thread(target=server.shutdown, name="shutdown").start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print(f"serving {server.model_name} at {server.url}", flush=True)
    server.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
