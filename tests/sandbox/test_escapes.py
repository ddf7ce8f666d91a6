"""What a hostile program does to get out, and how far it comes: every try is a real one.

Sandboxes here are started by root, which drops to the account; test_as_ordinary_user runs this
module once more, started by an ordinary user.
"""

import uuid

import pytest

from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.protocol import SandboxHandle
from tests.sandbox.tries import python, tried

pytestmark = pytest.mark.sandbox

REFUSED = {"EPERM", "EACCES", "EROFS", "EINVAL"}
MOUNTS = ("ext4", "xfs", "debugfs", "tracefs", "securityfs", "bpf", "efivarfs", "configfs")


def test_settings_of_the_kernel_cannot_be_written(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    ended = tried(
        apptainer_runtime,
        hostile,
        """
for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe",
             "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches",
             "/proc/sys/vm/overcommit_memory", "/proc/sys/fs/protected_symlinks",
             "/sys/kernel/uevent_helper", "/sys/kernel/mm/transparent_hugepage/enabled",
             "/sys/power/state", "/proc/1/../sys/kernel/core_pattern"):
    if os.path.exists(path):
        tries[path] = write(path)
""",
    )

    assert set(ended) >= {"/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches"}
    assert set(ended.values()) <= REFUSED


def test_sys_holds_nothing_that_can_be_written(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    result = apptainer_runtime.exec(
        hostile,
        ["sh", "-c", "find /sys -type f -writable | grep -v ^/sys/devices/virtual/net/; true"],
        timeout_seconds=60,
    )

    assert result.stdout == b""


def test_control_groups_of_the_host_are_out_of_reach(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    script = (
        "find / -xdev -name release_agent -o -name cgroup.procs 2>/dev/null | head -3;"
        "ls -A /sys/fs/cgroup 2>/dev/null;"
        "umount /sys/fs/cgroup 2>/dev/null && ls -A /sys/fs/cgroup;"
        "umount -l /sys/fs/cgroup 2>/dev/null && ls -A /sys/fs/cgroup;"
        "mkdir -p /mnt/c; mount --bind /sys/fs/cgroup /mnt/c 2>/dev/null; ls -A /mnt/c;"
        "mount --rbind /sys /mnt/c 2>/dev/null; ls -A /mnt/c/fs/cgroup 2>/dev/null;"
        "for how in '-C' '-UrCm'; do unshare $how true 2>/dev/null && echo made $how; done;"
        "mount -t cgroup2 c /mnt/c 2>/dev/null && echo mounted 2;"
        "mount -t cgroup -o memory c /mnt/c 2>/dev/null && echo mounted 1; true"
    )

    result = apptainer_runtime.exec(
        hostile, ["unshare", "-m", "sh", "-c", script], timeout_seconds=60
    )

    assert (result.exit_code, result.stdout, result.stderr) == (0, b"", b"")


def test_calls_that_need_the_hosts_root_are_refused(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    ended = tried(
        apptainer_runtime,
        hostile,
        """
import platform, stat, time
assert platform.machine() == "x86_64"
tries["block device"] = lambda: os.mknod("/mnt/disk", stat.S_IFBLK | 0o666, os.makedev(8, 0))
tries["memory device"] = lambda: os.mknod("/mnt/mem", stat.S_IFCHR | 0o666, os.makedev(1, 1))
tries["kernel log device"] = lambda: os.mknod("/mnt/kmsg", stat.S_IFCHR | 0o666, os.makedev(1, 11))
tries["load module"] = call(175, b"", 0, b"")
tries["load module file"] = call(313, 0, b"", 0)
tries["remove module"] = call(176, b"dummy", 0)
tries["load kernel"] = call(246, 0, 0, None, 0)
tries["swap on"] = call(167, b"/etc/passwd", 0)
tries["set clock"] = lambda: time.clock_settime(time.CLOCK_REALTIME, time.time())
tries["io ports"] = call(172, 3)
tries["open by handle"] = call(304, -100, ctypes.create_string_buffer(
    (8).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(8)), 0)
tries["kernel log"] = call(103, 3, ctypes.create_string_buffer(64), 64)
tries["another user"] = lambda: os.setuid(65534)
tries["another owner"] = lambda: os.chown("/etc/passwd", 65534, 65534)
for kind in ("ext4", "xfs", "debugfs", "tracefs", "securityfs", "bpf", "efivarfs", "configfs"):
    tries[kind] = mount(kind.encode(), b"/dev/vda")
""",
    )

    filesystems = {name: ended.pop(name) for name in list(ended) if name in MOUNTS}
    assert set(filesystems) == set(MOUNTS)
    # bpf can be mounted by root of any user namespace; it is empty there.
    assert {name for name, how in filesystems.items() if how == "done"} <= {"bpf"}
    assert len(ended) == 14
    assert {name: how for name, how in ended.items() if how not in REFUSED | {"ENOSYS"}} == {}


def test_new_mounts_show_the_sandboxs_own_things_only(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    script = (
        "mkdir -p /mnt/n; mount -t proc proc /mnt/n || exit 1;"
        "for p in /mnt/n/[0-9]*; do cat $p/comm; done 2>/dev/null | sort -u; umount /mnt/n;"
        "mount -t sysfs sys /mnt/n || exit 2; ls /mnt/n/class/net; ls -A /mnt/n/fs/cgroup;"
        "umount /mnt/n;"
        "mount -t devpts -o newinstance pts /mnt/n || exit 3; ls /mnt/n; umount /mnt/n;"
        "mount -t mqueue q /mnt/n || exit 4; ls -A /mnt/n"
    )

    result = apptainer_runtime.exec(
        hostile, ["unshare", "-m", "sh", "-c", script], timeout_seconds=60
    )

    assert result.exit_code == 0, result.stderr
    *names, interface, terminal = result.stdout.decode().split()
    assert set(names) - {"cat", "sort"} in ({"appinit", "sh"}, {"sinit", "sh"})
    assert (interface, terminal) == ("lo", "ptmx")


def test_a_namespace_inside_gives_nothing_more(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    script = (
        "cat /proc/self/uid_map; grep NoNewPrivs /proc/self/status;"
        "(echo x > /proc/sys/kernel/core_pattern) 2>/dev/null && echo wrote;"
        "mount -o remount,rw /sys 2>/dev/null && (echo > /sys/kernel/uevent_helper) && echo wrote;"
        "umount /proc 2>/dev/null; umount /dev/null 2>/dev/null;"
        "mknod /n b 8 0 2>/dev/null && echo made;"
        "kill -0 1; ls /root/.. | grep -c app"
    )

    result = apptainer_runtime.exec(
        hostile, ["unshare", "-U", "-r", "-m", "sh", "-c", script], timeout_seconds=60
    )

    words = result.stdout.split()
    assert words == [*b"0 0 1".split(), b"NoNewPrivs:", b"1", b"1"]
    assert result.stderr == b""


def test_namespaces_inside_are_few(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    program = """
import ctypes, errno, os
def make():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        failed = ctypes.CDLL(None, use_errno=True).unshare(0x10000000)
        os.write(write, b"1" if failed else b"0")
        os.read(wait, 1)
        os._exit(0)
    failed = os.read(read, 1) == b"1"
    return pid, failed
wait, go = os.pipe()
try:
    open("/proc/sys/user/max_user_namespaces", "w").write("100000")
except OSError:
    pass
made = [make() for _ in range(80)]
os.close(go)
os.write(1, b"%d" % sum(not failed for _, failed in made))
for pid, _ in made:
    os.kill(pid, 9); os.waitpid(pid, 0)
"""

    made = int(python(apptainer_runtime, hostile, program))

    assert 30 < made < 64  # the sandbox has taken one itself


def test_there_is_no_way_out_of_the_root_folder(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    mark = uuid.uuid4().hex
    apptainer_runtime.write_file(hostile, "/mark", mark.encode())
    ways = {
        "namespace": ["nsenter", "-t", "1", "-m", "cat", "/mark"],
        "root of 1": ["cat", "/proc/1/root/mark"],
        "folder of 1": ["sh", "-c", "cat /proc/1/cwd/../../../../../mark"],
        "chroot": [
            "perl",
            "-e",
            'chdir("/"); mkdir("/c"); chroot("/c"); chdir(".."x$_) for 1..20; chdir("../../../..");'
            'chroot("."); open(F, "<", "/mark"); print <F>',
        ],
        "pivot": [
            *("unshare", "-m", "sh", "-c"),
            "mkdir -p /p; mount --bind /p /p; mkdir -p /p/old; cp /mark /p/;"
            " cd /p && pivot_root . old; umount -l old; read x < /mark; echo $x",
        ],
    }

    for way, argv in ways.items():
        result = apptainer_runtime.exec(hostile, argv, timeout_seconds=60)
        assert result.stdout.decode().strip() == mark, (way, result.stderr)
