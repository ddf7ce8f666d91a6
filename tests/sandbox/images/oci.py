"""A real registry on this machine, and images made by hand to be pushed into it."""

import gzip
import hashlib
import io
import json
import socket
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 30.0


def free_port() -> int:
    """Return a port of the loopback that nobody listens on now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_registry(folder: Path, port: int) -> Iterator[str]:
    """Run docker-registry over a folder; yields its host and port."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.yml"
    config.write_text(
        "version: 0.1\nlog: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}, delete: {{enabled: true}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    process = subprocess.Popen(
        ["docker-registry", "serve", str(config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _await_answer(f"http://127.0.0.1:{port}/v2/", process)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _await_answer(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            assert process.poll() is None, "the registry ended"
            assert time.monotonic() < deadline, "the registry does not answer"
            time.sleep(0.02)


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Return one member of a layer, its name as it is."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o755
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def folder_members(folder: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    """Return what is in a folder as members of a layer."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            target = str(path.readlink())
            found.append(member(name, type=tarfile.SYMTYPE, linkname=target))
        elif path.is_dir():
            found.append(member(name, type=tarfile.DIRTYPE))
        else:
            found.append(member(name, path.read_bytes()))
    return found


def push_image(
    registry: str, name: str, layers: list[list[tuple[tarfile.TarInfo, bytes]]], folder: Path
) -> str:
    """Push an image of these layers with skopeo; returns its reference without a scheme."""
    layout = folder / hashlib.sha256(name.encode()).hexdigest()[:12]
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def put(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    tars = [_tar(layer) for layer in layers]
    vendor = "application/vnd.oci.image"
    described = [put(gzip.compress(tar, 1, mtime=0), f"{vendor}.layer.v1.tar+gzip") for tar in tars]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/bin", "GREETING=hello"], "Cmd": ["/bin/sh"]},
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars],
        },
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{vendor}.manifest.v1+json",
        "config": put(json.dumps(config).encode(), f"{vendor}.config.v1+json"),
        "layers": described,
    }
    entry = put(json.dumps(manifest).encode(), f"{vendor}.manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": "image"}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    reference = f"{registry}/{name}"
    subprocess.run(
        [
            "skopeo",
            "copy",
            "--dest-tls-verify=false",
            f"oci:{layout}:image",
            f"docker://{reference}",
        ],
        check=True,
        capture_output=True,
    )
    return reference


def _tar(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
