"""Start the server, or write the tokenizer folder or the weights."""

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import numpy as np

from examples.tiny_server.engine import MAX_WAITING
from examples.tiny_server.server import LOGPROBS_MODES, MODEL_NAME, Options, TinyServer
from examples.tiny_server.tensors import named_tensors
from examples.tiny_server.tokenizer import export_tokenizer
from examples.tiny_server.weights import load_weights

CACHE = Path("var/cache/tiny")


def main(arguments: list[str]) -> int:
    """Run the command line."""
    if arguments[:1] == ["export-tokenizer"]:
        return _export(arguments[1:])
    if arguments[:1] == ["export-weights"]:
        return _export_weights(arguments[1:])
    return _serve(arguments)


def _export(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_server export-tokenizer")
    parser.add_argument("folder", type=Path)
    print(export_tokenizer(parser.parse_args(arguments).folder))
    return 0


def _export_weights(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.tiny_server export-weights")
    parser.add_argument("file", type=Path, help="an .npz; 540 MB when it holds all tensors")
    parser.add_argument("--only", action="append", help="a tensor's name; may be repeated")
    parser.add_argument("--cache-dir", type=Path, default=CACHE)
    options = parser.parse_args(arguments)
    tensors = named_tensors(load_weights(options.cache_dir))
    unknown = set(options.only or ()) - tensors.keys()
    if unknown:
        parser.error(f"no tensor is called {', '.join(sorted(unknown))}")
    with options.file.open("wb") as file:
        np.savez(file, **{name: tensors[name] for name in options.only or tensors})  # type: ignore[arg-type]
    print(options.file)
    return 0


def _serve(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tiny_server", description=__doc__, epilog="see README.md"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8081, help="0 takes a free one")
    parser.add_argument("--cache-dir", type=Path, default=CACHE)
    parser.add_argument("--model-name", default=MODEL_NAME)
    parser.add_argument("--logprobs-mode", choices=LOGPROBS_MODES, default=LOGPROBS_MODES[0])
    parser.add_argument("--max-waiting", type=int, default=MAX_WAITING, help="above it: 429")
    parser.add_argument("--control", action="store_true", help="open pause, abort and weights")
    parser.add_argument("--weights-dir", type=Path, help="where --control may read weights")
    parser.add_argument("--weights", type=Path, help="tensors to replace before serving")
    parser.add_argument("--weight-version", default="default")
    options = parser.parse_args(arguments)
    if options.max_waiting < 0:
        parser.error("--max-waiting must not be negative")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Until there is a server to shut down, unwind: a half-written cache removes itself.
    signal.signal(signal.SIGTERM, lambda _signum, _frame: sys.exit(128 + signal.SIGTERM))
    server = TinyServer(
        cache_dir=options.cache_dir,
        host=options.host,
        port=options.port,
        options=Options(
            model_name=options.model_name,
            logprobs_mode=options.logprobs_mode,
            max_waiting=options.max_waiting,
            control=options.control,
            weights_dir=options.weights_dir,
            weights=options.weights,
            weight_version=options.weight_version,
        ),
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
