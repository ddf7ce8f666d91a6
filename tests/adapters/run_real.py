"""Run the adapters against the trainers' own packages, each in an environment of its own.

python -m tests.adapters.run_real [--folder DIR] [--keep] [--only NAME] [--without-service]

Makes the environments below DIR (a temporary folder unless given; what is there is used again),
runs the contract tests in each, and with a whole stack behind them the live ones too. slime, NeMo
RL and prime-rl are not on PyPI: SLIME_SOURCE, NEMO_RL_SOURCE and PRIME_RL_SOURCE name checkouts of
them; without one its tests are skipped. NeMo Gym wants Python 3.13: `python3.13` or PYTHON_313.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / "tests" / "adapters" / "real"
LIVE = ROOT / "tests" / "e2e" / "test_trainers.py"
CLIENT = ("httpx", "numpy", "pyarrow", "pytest", "pytest-timeout")
VENVS = "TRAINER_VENVS"


@dataclass(frozen=True)
class Trainers:
    """Trainers that share an environment: what is installed, and which tests are theirs."""

    tests: tuple[str, ...]
    packages: tuple[str, ...]
    # Their contracts need few of their dependencies, and not the Python that they ask for.
    alone: tuple[str, ...] = ()
    python: str = sys.executable
    sources: tuple[str, ...] = ()
    any_python: bool = False
    live: bool = True  # whether some of the tests want a service


KNOWN: Mapping[str, Trainers] = {
    "torch": Trainers(
        tests=("trl", "verl", "skyrl", "slime", "nemo_rl", "prime_rl"),
        packages=(
            *("torch==2.13.0", "trl==1.16.0", "ray", "hydra-core", "tensordict", "codetiming"),
            *("torchdata", "peft", "orjson", "uvicorn", "fastapi", "cloudpathlib", "loguru"),
            *("aiohttp", "pybase64", "jaxtyping", "msgspec", "cachetools"),
        ),
        alone=("verl==0.9.1", "skyrl==0.4.0"),
        sources=("SLIME_SOURCE", "NEMO_RL_SOURCE", "PRIME_RL_SOURCE"),
    ),
    "verifiers": Trainers(tests=("verifiers",), packages=("verifiers==0.4.0",), live=False),
    "gym": Trainers(
        tests=("nemo_gym",),
        packages=("nemo-gym==0.7.0",),
        python=os.environ.get("PYTHON_313") or "python3.13",
        any_python=True,  # it asks for a later 3.13 than it needs
    ),
}


def install(name: str, folder: Path) -> Path:
    """Make an environment, unless it is there; return its Python."""
    wanted, place = KNOWN[name], folder / name
    python = place / "bin" / "python"
    if (place / ".installed").is_file():
        return python
    subprocess.run([wanted.python, "-m", "venv", str(place)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    anyhow = ["--ignore-requires-python"]
    extra = anyhow if wanted.any_python else []
    subprocess.run([*pip, *extra, *wanted.packages, *CLIENT], check=True)
    if wanted.alone:
        subprocess.run([*pip, *anyhow, "--no-deps", *wanted.alone], check=True)
    (place / ".installed").touch()
    return python


def environment_of(name: str, **service: str) -> dict[str, str]:
    """Return what the tests run with: our packages, the sources, and a service's address."""
    sources = [os.environ[each] for each in KNOWN[name].sources if os.environ.get(each)]
    inside = [str(Path(each) / "src") for each in sources if (Path(each) / "src").is_dir()]
    path = [str(ROOT), str(ROOT / "clients" / "python"), *inside, *sources]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PRORL_")}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **service,
    }


def command_of(name: str, python: Path) -> list[str]:
    """Return the command line of an environment's tests."""
    files = [str(REAL / f"test_{each}.py") for each in KNOWN[name].tests]
    ini = str(REAL / "trainers.ini")
    return [str(python), "-m", "pytest", "-c", ini, "--rootdir", str(ROOT), "-q", *files]


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the environments are, or are made")
    parser.add_argument("--keep", action="store_true", help="leave a temporary folder there")
    parser.add_argument("--only", choices=KNOWN, help="one environment alone")
    parser.add_argument("--without-service", action="store_true", help="the contract tests alone")
    given = parser.parse_args()
    temporary = given.folder is None
    folder = given.folder or Path(tempfile.mkdtemp(prefix="prorl-trainers-"))
    names = [given.only] if given.only else list(KNOWN)
    try:
        status = 0
        for name in names:
            python = install(name, folder)
            if given.without_service or not KNOWN[name].live:
                command = command_of(name, python)
                status |= subprocess.run(command, env=environment_of(name), check=False).returncode
        if not given.without_service and any(KNOWN[name].live for name in names):
            chosen = ["-k", given.only] if given.only else []
            command = [sys.executable, "-m", "pytest", "-q", "-s", str(LIVE), *chosen]
            settings = {**os.environ, VENVS: str(folder)}
            status |= subprocess.run(command, env=settings, cwd=ROOT, check=False).returncode
        return status
    finally:
        if temporary and not given.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
