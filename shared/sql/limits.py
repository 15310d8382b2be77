"""In a worker: what the kernel enforces on the process itself, whatever SQLite's C code does."""

import contextlib
import os
import resource
import signal

_GRACE_FILE_BYTES = 4 << 30
# Interpreter, SQLite, page caches of open databases: not charged to a call.
_OWN_BYTES = 128 << 20
_current_memory: int | None = None
_files_writable: bool | None = None
_statm: int | None = None


def confine() -> None:
    """No core dumps, few descriptors, no children, and no byte written to any file."""
    for name, soft in (("RLIMIT_CORE", 0), ("RLIMIT_NOFILE", 128), ("RLIMIT_NPROC", 0)):
        which = getattr(resource, name, None)
        if which is not None:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(which, (soft, soft))
    global _statm
    with contextlib.suppress(OSError):
        _statm = os.open("/proc/self/statm", os.O_RDONLY)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error, not a death
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # Dispositions and masks are inherited from whoever started this process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    allow_file_writes(False)


def allow_file_writes(allowed: bool) -> None:
    """Writing to files is off except while a private copy is made or a live WAL index is in use."""
    global _files_writable
    if allowed is _files_writable:
        return
    _files_writable = allowed
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    soft = 0
    if allowed:
        soft = _GRACE_FILE_BYTES if hard == resource.RLIM_INFINITY else min(hard, _GRACE_FILE_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def allow_memory(extra: int) -> None:
    """Bound the address space to the worker's own share plus `extra` bytes; allocations beyond it fail."""
    global _current_memory
    if extra == _current_memory:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = _OWN_BYTES + extra
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    _current_memory = extra


def has_outgrown(held: int) -> bool:
    """True when this process keeps more than its own share and `held` bytes of databases (Linux; elsewhere False).

    What an allocator took for a large query it may keep, and the next call would be charged with it.
    """
    if _statm is None:
        return False
    pages = int(os.pread(_statm, 64, 0).split()[0])
    return pages * resource.getpagesize() > _OWN_BYTES + held


def die_after(seconds: float) -> None:
    """Have the kernel end this process (SIGALRM) after `seconds`, or call it off with 0.

    The last resort of a deadline: it fires inside single function calls that never return to the
    progress handler, and when the parent is gone.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)
