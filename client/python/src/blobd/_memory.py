"""Blobs in this process's memory.

A blob is mapped once, read-only and shared: its pages are those of the page cache, one copy for all
processes and models that use it. The `mmap` module would keep a copy of each descriptor open, which
is too much for a model with thousands of tensors, and cannot place a mapping at a chosen address. So
this module calls the C library through `ctypes`.

This is memory-safe for two reasons. The length comes from the kernel (`fstat`) and not from the
daemon, so no byte is beyond the end of the file, where access would kill the process. Memory is
unmapped only when the last `memoryview`, array or tensor made of it is gone. The daemon is trusted
not to shrink a file that it has handed out.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import stat
import threading
import weakref
from typing import Optional

from .errors import MapError, ModelError, SessionClosedError, ShortError

PAGE_BYTES = mmap.PAGESIZE
"""The size of a page."""

# The size that one entry of the second page-table level covers, on x86-64 and, with pages of 4 KiB,
# on AArch64.
_HUGE_PAGE_BYTES = 2 << 20
# The `mmap` module lacks these. All architectures that Python has wheels for use these values.
_MAP_FIXED = 0x10
_PROT_NONE = 0
_MADV_HUGEPAGE = 14
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_ssize_t,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _PyBuffer(ctypes.Structure):
    """The C structure `Py_buffer`."""

    _fields_ = [
        ("address", ctypes.c_size_t),
        ("object", ctypes.c_void_p),
        ("length", ctypes.c_ssize_t),
        ("item_bytes", ctypes.c_ssize_t),
        ("is_read_only", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


class Blob:
    """A descriptor from the daemon, mapped when first needed."""

    def __init__(self, number: int, fd: int) -> None:
        self._number = number
        self._fd: Optional[int] = fd
        self._view: Optional[memoryview] = None
        self._lock = threading.Lock()

    @property
    def fd(self) -> Optional[int]:
        """The descriptor; `None` once it is closed."""
        return self._fd

    def slice(self, offset: int, size: int) -> memoryview:
        """`size` bytes from `offset` on, read-only."""
        view = self._mapped()
        self._check(len(view), offset + size)
        return view[offset : offset + size]

    def map_into(self, reservation: Reservation, start: int, offset: int, size: int) -> None:
        """Maps `size` bytes from `offset` on into a reservation; offsets are multiples of a page."""
        with self._lock:
            if self._fd is None:
                raise ModelError(
                    f"descriptor {self._number}: closed to keep within `ulimit -n`; raise it and open the model again"
                )
            self._check(self._file_length(self._fd), offset + size)
            reservation.map(start, self._fd, offset, size)

    def map_and_close(self) -> None:
        """Maps the blob now and closes its descriptor."""
        try:
            self._mapped()
        finally:
            self.close()

    def close(self) -> None:
        """Closes the descriptor; the mapping stays."""
        # Not while another thread maps it: the number could already be another file's.
        with self._lock:
            fd, self._fd = self._fd, None
            if fd is not None:
                os.close(fd)

    def _mapped(self) -> memoryview:
        with self._lock:
            if self._view is None:
                self._view = self._map()
            return self._view

    def _map(self) -> memoryview:
        if self._fd is None:
            raise SessionClosedError(f"descriptor {self._number}: closed with its model; open the model again")
        length = self._file_length(self._fd)
        if length == 0:
            return memoryview(b"")
        try:
            return _own(_place(self._fd, length), length)
        except OSError as error:
            raise MapError(f"descriptor {self._number}: cannot be mapped: {error}{_map_hint()}") from error

    def _file_length(self, fd: int) -> int:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise MapError(f"descriptor {self._number}: not a regular file; is that a blobd daemon?")
        return status.st_size

    def _check(self, length: int, expected: int) -> None:
        if expected > length:
            raise ShortError(
                f"descriptor {self._number}: length of its file: expected {expected} bytes, found {length}; run `blobd verify`"
            )


class Reservation:
    """A reserved range of addresses, to be filled page by page.

    Pages that the caller does not fill cannot be accessed. Call `release` if it is not finished.
    """

    def __init__(self, size: int) -> None:
        self.size = _whole_pages(size)
        try:
            self.address = _mmap(None, self.size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        except OSError as error:
            raise MapError(f"{size} bytes of address space: {error}; see `ulimit -v`") from error

    def map(self, start: int, fd: int, offset: int, size: int) -> None:
        """Maps `size` bytes of a file at `start`, both multiples of a page.

        The caller must have checked with `fstat` that the file has these bytes.
        """
        self._check(start, size)
        try:
            _mmap(self.address + start, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        except OSError as error:
            raise MapError(f"{size} bytes cannot be mapped: {error}{_map_hint()}") from error

    def copy(self, start: int, data: memoryview) -> None:
        """Puts a copy of `data` at `start`, a multiple of a page."""
        self._check(start, len(data))
        address, size = self.address + start, _whole_pages(len(data))
        _protect(address, size, mmap.PROT_READ | mmap.PROT_WRITE)
        array = (ctypes.c_ubyte * len(data)).from_address(address)
        memoryview(array).cast("B")[:] = data
        _protect(address, size, mmap.PROT_READ)

    def finish(self, length: int) -> memoryview:
        """The first `length` bytes, read-only. The view owns the range from then on."""
        return _own(self.address, self.size, length)

    def release(self) -> None:
        """Unmaps an unfinished range."""
        _libc.munmap(self.address, self.size)

    def _check(self, start: int, size: int) -> None:
        # A mistake here would overwrite other memory of the process.
        if start % PAGE_BYTES or start < 0 or size <= 0 or start + _whole_pages(size) > self.size:
            raise ValueError(f"{size} bytes at {start} are not pages of {self.size} reserved bytes")


def max_open_files() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 62


def will_need(view: memoryview) -> None:
    """Asks the kernel to read mapped memory from the disk in the background."""
    if len(view) == 0:
        return
    address = address_of(view)
    start = address // PAGE_BYTES * PAGE_BYTES
    # Harmless if it fails: the pages are read on access.
    _libc.madvise(start, address + len(view) - start, mmap.MADV_WILLNEED)


def address_of(view: memoryview) -> int:
    """Where a view starts in memory."""
    buffer = _PyBuffer()
    # `ctypes` has no other way for read-only buffers.
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.address)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def _own(address: int, mapped: int, length: Optional[int] = None) -> memoryview:
    """A read-only view of mapped memory, which is unmapped when its last view is gone."""
    length = mapped if length is None else length
    array = (ctypes.c_ubyte * length).from_address(address)
    # Not at exit: other threads may still read it.
    weakref.finalize(array, _libc.munmap, address, mapped).atexit = False
    return memoryview(array).cast("B").toreadonly()


def _place(fd: int, size: int) -> int:
    """Maps a file, a large one at a 2 MiB boundary so that one page-table entry can cover that much."""
    address = _mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if size < _HUGE_PAGE_BYTES:
        return address
    if address % _HUGE_PAGE_BYTES:
        _libc.munmap(address, size)
        address = _place_into_reservation(fd, size)
    # Harmless if it fails: the kernel may lack huge pages.
    _libc.madvise(address, size, _MADV_HUGEPAGE)
    return address


def _place_into_reservation(fd: int, size: int) -> int:
    """Reserves 2 MiB more than needed, maps at the boundary inside, and unmaps the rest."""
    reserved = _whole_pages(size) + _HUGE_PAGE_BYTES
    base = _mmap(None, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    address = -(-base // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    try:
        _mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    except OSError:
        _libc.munmap(base, reserved)
        raise
    end = address + _whole_pages(size)
    if address > base:
        _libc.munmap(base, address - base)
    if base + reserved > end:
        _libc.munmap(end, base + reserved - end)
    return address


def _mmap(address: Optional[int], size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped: Optional[int] = _libc.mmap(address, size, protection, flags, fd, offset)
    if mapped is None or mapped == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return mapped


def _protect(address: int, size: int, protection: int) -> None:
    if _libc.mprotect(address, size, protection) != 0:
        number = ctypes.get_errno()
        raise MapError(f"{size} bytes of memory: {os.strerror(number)}; free some memory")


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _map_hint() -> str:
    return "; the process may have too many maps: see /proc/sys/vm/max_map_count"
