"""`tiermem doctor`: what this machine and these directories will do for training, and what to mend."""

from __future__ import annotations

import enum
import json
import mmap
import os
import platform
import resource
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tiermem import _native
from tiermem.bench_io import measure_quickly
from tiermem.device import CudaDevice
from tiermem.io import UringEngine, select
from tiermem.io.engine import DIRECT_ALIGNMENT, File
from tiermem.io.mounts import file_system
from tiermem.kernels.cores import available_cores
from tiermem.kernels.native import isa_names
from tiermem.memory import format_bytes, free_host_bytes
from tiermem.slab import SlabPool
from tiermem.store import OwnedDirectories, check_directory, find_owned, free_bytes, is_locked

__all__ = ["Finding", "Verdict", "examine", "run"]

_MEASURE_SECONDS = 2.0
_SLOW_BYTES_PER_SECOND = 1e9  # an update moves about 24 bytes per parameter: 24 s per step for a billion of them
_LITTLE_SPACE_BYTES = 10 << 30
_LITTLE_MEMORY_BYTES = 2 << 30
_PIN_BYTES = 64 << 20

_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.sshfs", "virtiofs"})
_NARROW = frozenset({"x86-64"})


class Verdict(enum.StrEnum):
    """OK: as it should be. SLOW: training works, but something costs time or room. BROKEN: it will not work."""

    OK = "OK"
    SLOW = "slow"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and, unless it is OK, the remedy."""

    subject: str
    verdict: Verdict
    what: str
    remedy: str = ""


def run(console: Console, directories: Sequence[Path] = (), *, as_json: bool = False) -> bool:
    """Examine the machine and the directories, print what was found; whether nothing is broken."""
    findings = list(examine(directories))
    if as_json:
        console.print_json(json.dumps([asdict(finding) for finding in findings]))
    else:
        _print(console, findings)
    return all(finding.verdict is not Verdict.BROKEN for finding in findings)


def examine(directories: Sequence[Path] = ()) -> Iterator[Finding]:
    """Every finding, as it is made. Each directory takes about two seconds, in which its disk is measured."""
    looks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("native kernels", _native_library),
        ("cores", _cores),
        ("host memory", _host_memory),
        ("memory lock limit", _memory_lock),
        ("accelerator", _accelerator),
    ]
    for directory in directories:
        looks.append((str(directory), lambda directory=directory: _directory(directory.absolute())))  # type: ignore[misc]
    for subject, look in looks:
        try:
            yield from look()
        except Exception as error:  # whatever one look meets, the others go on
            yield Finding(subject, Verdict.BROKEN, f"could not be examined: {error}", "mend this first")


def _native_library() -> Iterator[Finding]:
    try:
        _native.library()
    except _native.NativeLibraryError as error:
        yield Finding(
            "native kernels",
            Verdict.SLOW,
            f"{error}. The numba kernels serve, with the same results; compiling them takes some seconds of the first "
            "step, and there is no io_uring",
            "install a C++17 compiler (apt-get install g++) and install tiermem again",
        )
        return
    yield Finding("native kernels", Verdict.OK, f"built: {_native.PATH.name}")
    names = isa_names()
    if names[-1] in _NARROW:
        remedy = "use a machine with AVX2, or let the virtual machine see the processor's features (cpu=host)"
        yield Finding("instruction set", Verdict.SLOW, f"{names[-1]}: this processor shows no AVX2", remedy)
    else:
        yield Finding("instruction set", Verdict.OK, f"{names[-1]} on {platform.machine()}")


def _cores() -> Iterator[Finding]:
    present = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    available = available_cores()
    limits = []
    remedies = []
    if allowed < present:
        limits.append(f"processor affinity allows {allowed}")
        remedies.append("widen it (taskset, the scheduler's --cpus-per-task)")
    if available < allowed:
        limits.append(f"a control group grants the time of {available}")
        remedies.append("raise its quota (docker run --cpus)")
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and threads.isdigit() and int(threads) < available:
        limits.append(f"OMP_NUM_THREADS={threads} holds torch's own CPU work to {threads}")
        remedies.append("unset OMP_NUM_THREADS")
    what = f"{available} of {present} available"
    if limits:
        yield Finding("cores", Verdict.SLOW, f"{what}: {'; '.join(limits)}", "; ".join(remedies))
    else:
        yield Finding("cores", Verdict.OK, what)


def _host_memory() -> Iterator[Finding]:
    total = psutil.virtual_memory().total
    free = free_host_bytes()
    limit = _memory_limit_bytes()
    what = f"{format_bytes(free)} free of {format_bytes(min(total, limit or total))}"
    if limit is not None and limit < total:
        what += f" (a control group's limit; the machine has {format_bytes(total)})"
    if free < _LITTLE_MEMORY_BYTES:
        remedy = "end other processes or raise the limit; weights and states can rest on disk, blocks in use cannot"
        yield Finding("host memory", Verdict.SLOW, what, remedy)
    else:
        yield Finding("host memory", Verdict.OK, what)


def _memory_limit_bytes() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def _memory_lock() -> Iterator[Finding]:
    """Tried with a buffer, because the limit does not hold for everybody."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    try:
        engine = UringEngine(depth=1)
    except OSError:
        yield Finding("memory lock limit", Verdict.OK, f"{limit}; nothing here needs it without io_uring")
        return
    try:
        SlabPool(_PIN_BYTES, 1, engine.pin).close()
        refused = bool(engine.fallbacks)
    finally:
        engine.close()
    if refused:
        yield Finding(
            "memory lock limit",
            Verdict.SLOW,
            f"{limit}: io_uring cannot keep {format_bytes(_PIN_BYTES)} of buffers registered and pins them every time",
            "ulimit -l unlimited (docker run --ulimit memlock=-1, LimitMEMLOCK=infinity in a unit)",
        )
    else:
        yield Finding("memory lock limit", Verdict.OK, f"{limit}; {format_bytes(_PIN_BYTES)} of buffers registered")


def _accelerator() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        if Path("/dev/nvidiactl").exists() and torch.version.cuda is None:
            remedy = "install the CUDA build of torch"
            yield Finding(
                "accelerator", Verdict.SLOW, "there is an NVIDIA GPU, but torch is built without CUDA", remedy
            )
        elif Path("/dev/nvidiactl").exists():
            remedy = "compare nvidia-smi with torch.version.cuda: the driver may be too old"
            yield Finding("accelerator", Verdict.BROKEN, "there is an NVIDIA GPU, but torch cannot use it", remedy)
        else:
            yield Finding("accelerator", Verdict.OK, "none: the CPU computes")
        return
    device = CudaDevice(torch.device("cuda"))
    free, total = torch.cuda.mem_get_info(device.torch_device)
    name = torch.cuda.get_device_name(device.torch_device)
    yield Finding("accelerator", Verdict.OK, f"{name}, {format_bytes(free)} free of {format_bytes(total)}")
    try:
        SlabPool(_PIN_BYTES, 1, device.pin).close()
    except RuntimeError as error:
        remedy = "ulimit -l unlimited; without page-locked memory, copies do not overlap with computing"
        yield Finding("page-locking", Verdict.BROKEN, str(error), remedy)
    else:
        yield Finding("page-locking", Verdict.OK, f"{format_bytes(_PIN_BYTES)} registered with the device")


def _directory(directory: Path) -> Iterator[Finding]:
    where = str(directory)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is said below
            check_directory(directory)
    except OSError as error:
        what, _, remedy = str(error.strerror).partition("; ")
        yield Finding(where, Verdict.BROKEN, what, remedy)
        return
    yield _file_system(directory)
    yield from _owners(directory)
    present = free_bytes(directory)
    if present < 1 << 28:
        yield Finding(f"{where}: space", Verdict.BROKEN, f"{format_bytes(present)} free", "free some")
        return
    little = present < _LITTLE_SPACE_BYTES
    yield Finding(
        f"{where}: space",
        Verdict.SLOW if little else Verdict.OK,
        f"{format_bytes(present)} free",
        "free some: a parameter trained from disk takes 14 bytes" if little else "",
    )
    yield _direct(directory)
    engine = select(directory)
    name, reasons = engine.name, [reason for reason in engine.fallbacks if "passed over" in reason]
    engine.close()
    yield Finding(
        f"{where}: engine",
        Verdict.SLOW if name == "aiofiles" else Verdict.OK,
        f"auto takes {name}" + "".join(f"; {reason}" for reason in reasons),
        "mend what the reasons name" if name == "aiofiles" else "",
    )
    read, write = measure_quickly(directory, name, _MEASURE_SECONDS)
    slow = min(read, write) < _SLOW_BYTES_PER_SECOND
    yield Finding(
        f"{where}: speed",
        Verdict.SLOW if slow else Verdict.OK,
        f"{read / 1e9:.2f} GB/s read, {write / 1e9:.2f} GB/s written",
        "use a local NVMe disk; `tiermem bench io` finds the best setting" if slow else "",
    )


def _file_system(directory: Path) -> Finding:
    found = file_system(directory)
    subject = f"{directory}: file system"
    what = f"{found.type} on {found.device or 'an unknown device'}"
    if found.type in ("tmpfs", "ramfs"):
        return Finding(subject, Verdict.SLOW, f"{found.type}, which lies in memory: it saves none", "use a disk")
    if found.type in _REMOTE:
        return Finding(subject, Verdict.SLOW, f"{what}, over a network", "use a local NVMe disk")
    if found.type in ("overlay", "fuse-overlayfs"):
        remedy = "mount a directory of the host into the container (docker run -v)"
        return Finding(subject, Verdict.SLOW, f"{found.type}, the layered file system of a container", remedy)
    return Finding(subject, Verdict.OK, what)


def _owners(directory: Path) -> Iterator[Finding]:
    subject = f"{directory}: owners"
    alive: list[str] = []
    dead: list[Path] = []
    for path in find_owned(directory):
        if is_locked(path):
            alive.append(path.name.split("-")[1])
        else:
            dead.append(path)
    if dead:
        nbytes = sum(file.stat().st_blocks * 512 for path in dead for file in path.glob("*"))
        what = f"{len(dead)} leftovers of dead processes hold {format_bytes(nbytes)}"
        yield Finding(subject, Verdict.SLOW, what, "the next run there removes them")
    if alive:
        yield Finding(subject, Verdict.OK, f"in use by process {', '.join(alive)}; its files and yours do not mix")
    if not dead and not alive:
        yield Finding(subject, Verdict.OK, "no other process, no leftovers")


def _direct(directory: Path) -> Finding:
    """Tried with a real transfer: some file systems take the flag and refuse the transfer."""
    subject = f"{directory}: direct I/O"
    remedy = "use ext4 or XFS on a local disk; until then the page cache copies every byte and takes memory"
    owned = OwnedDirectories()
    try:
        file = File(owned.create(directory) / "direct.extents", create=True)
        try:
            if file.direct_fd is None:
                return Finding(subject, Verdict.SLOW, f"{file.refusal}", remedy)
            with mmap.mmap(-1, DIRECT_ALIGNMENT) as page:
                os.pwritev(file.direct_fd, [page], 0)
                os.preadv(file.direct_fd, [page], 0)
        except OSError as error:
            return Finding(subject, Verdict.SLOW, f"opened, but a transfer of a page failed: {error.strerror}", remedy)
        finally:
            file.close()
    finally:
        owned.remove()
    return Finding(subject, Verdict.OK, "works")


def _print(console: Console, findings: Sequence[Finding]) -> None:
    styles = {Verdict.OK: "green", Verdict.SLOW: "yellow", Verdict.BROKEN: "bold red"}
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(overflow="fold")
    for finding in findings:
        remedy = f"\n[italic]{escape(finding.remedy)}[/]" if finding.remedy else ""
        style = styles[finding.verdict]
        table.add_row(f"[{style}]{finding.verdict.value}[/]", escape(finding.subject), escape(finding.what) + remedy)
    console.print(table, highlight=False)
