"""Shared segments: private to the user, with short names, with their space reserved."""

from __future__ import annotations

import errno
import gc
import os
import stat
import subprocess
import sys
from unittest import mock

import pytest
import torch

from gemmlink.errors import Unavailable, Unsupported
from gemmlink.transport import segments
from gemmlink.transport.mapping import joined, mapped


def _no_shm() -> mock._patch[str]:
    return mock.patch.object(segments, "SHM", "/nonexistent")


def _mapped(segment: segments.Segment) -> torch.Tensor:
    """The segment as a peer maps it."""
    fd = segments.open_peer(segment.record(), 1)
    try:
        return mapped(fd, segment.nbytes)
    finally:
        os.close(fd)


@pytest.mark.parametrize("named", [False, True])
def test_a_segment_is_zero_and_reserved_and_for_its_owner_only(named: bool) -> None:
    segment = segments.create(100_000, named)
    try:
        status = os.fstat(segment.fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == 100_000
        assert status.st_blocks * 512 >= 100_000, "its space is not reserved"
        assert os.path.dirname(os.readlink(f"/proc/self/fd/{segment.fd}")) == segments.SHM
        assert not mapped(segment.fd, segment.nbytes).any()
    finally:
        segment.close()


def test_names_are_short_and_plain_even_for_the_largest_process_id() -> None:
    """Some systems allow 31 characters, the leading slash among them."""
    names = set()
    with mock.patch.object(os, "getpid", return_value=4194304):
        for _ in range(50):
            segment = segments.create(64, named=True)
            names.add(os.path.basename(segment.path or ""))
            segment.close()
    assert len(names) == 50, "a name was used twice"
    for name in names:
        assert len(f"/{name}") <= 31
        assert name.replace("-", "").isalnum()


def test_closing_removes_the_name_and_keeps_the_mapping() -> None:
    segment = segments.create(64, named=True)
    path, memory = segment.path, _mapped(segment)
    assert path is not None
    assert os.path.exists(path)
    segment.close()
    segment.close()
    assert not os.path.exists(path)
    memory[0] = 7
    assert memory[0] == 7


def test_a_segment_without_a_name_never_has_one() -> None:
    before = set(os.listdir("/dev/shm"))
    segment = segments.create(64, named=False)
    assert segment.path is None
    assert not [n for n in set(os.listdir("/dev/shm")) - before if f"-{os.getpid()}-" in n]
    segment.close()


@pytest.mark.parametrize("named", [False, True])
def test_a_peer_maps_the_same_memory(named: bool) -> None:
    segment = segments.create(64, named)
    mine, theirs = mapped(segment.fd, 64), _mapped(segment)
    segment.close()
    mine[3] = 9
    assert theirs[3] == 9


@pytest.mark.parametrize("named", [False, True])
def test_without_dev_shm_a_segment_is_memory_of_the_kernels(named: bool) -> None:
    with _no_shm():
        segment = segments.create(64, named)
    assert segment.path is None
    mine, theirs = mapped(segment.fd, 64), _mapped(segment)
    segment.close()
    mine[3] = 9
    assert theirs[3] == 9


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _mappings() -> int:
    with open("/proc/self/maps") as lines:
        return sum("/dev/shm" in line for line in lines)


def test_a_mapping_holds_no_file_and_ends_with_its_last_view() -> None:
    gc.collect()  # what other tests left must not end in between
    files, mappings = _open_files(), _mappings()
    segment = segments.create(1 << 16, named=False)
    other = segments.create(1 << 16, named=False)
    memory = mapped(segment.fd, 1 << 16)
    both = joined(segment.fd, other.fd, 4096, 1 << 16)
    segment.close()
    other.close()
    assert _open_files() == files
    assert _mappings() == mappings + 3
    view = memory[5:9].view(2, 2)
    del memory, both
    assert _mappings() == mappings + 1
    view.fill_(1)
    del view
    assert _mappings() == mappings


def test_two_files_in_one_range() -> None:
    front, back = (segments.create(8192, named=False) for _ in range(2))
    both = joined(front.fd, back.fd, 4096, 8192)
    both[:4096], both[4096:] = 1, 2
    one, two = mapped(front.fd, 8192), mapped(back.fd, 8192)
    assert [int(one[4095]), int(one[4096]), int(two[4095]), int(two[4096])] == [1, 0, 0, 2]
    front.close()
    back.close()


def test_a_view_may_be_used_while_the_interpreter_ends() -> None:
    """Finalizers run in the reverse order of their registration; ours must not be one of them."""
    script = """
import atexit
from gemmlink.transport import mapping, segments
kept = []
atexit.register(lambda: kept[0].fill_(1))
kept.append(mapping.mapped(segments.create(1 << 20, named=False).fd, 1 << 20))
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_no_space_anywhere_says_how_much_is_needed_and_free(number: int) -> None:
    gc.collect()  # what other tests left open must not be closed in between
    descriptors = _open_files()
    full = mock.patch.object(os, "posix_fallocate", side_effect=OSError(number, "full"))
    with full, pytest.raises(Unavailable) as caught:
        segments.create(12345, named=True)
    text = str(caught.value)
    assert text.startswith("a window needs 12345 bytes of shared memory; got ")
    assert "bytes free in /dev/shm" in text
    assert "--shm-size=8g" in text
    assert not [n for n in os.listdir("/dev/shm") if n.startswith(f"gemmlink-{os.getpid()}-")]
    gc.collect()
    assert _open_files() == descriptors, "a file was left open"


def test_another_error_is_not_mistaken_for_a_full_disk() -> None:
    broken = mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.EIO, "broken"))
    with broken, pytest.raises(OSError, match="broken"):
        segments.create(64, named=True)
    assert not [n for n in os.listdir("/dev/shm") if n.startswith(f"gemmlink-{os.getpid()}-")]


def test_anonymous_memory_is_not_taken_beyond_what_is_free() -> None:
    """The kernel would kill somebody for it."""
    little = mock.patch.object(segments, "memory_free", return_value=1000)
    with _no_shm(), little, pytest.raises(Unavailable, match="1000 bytes of free memory"):
        segments.create(1001, named=True)


def test_a_file_that_is_not_the_one_described_is_refused() -> None:
    """Two containers can have the same name, or the same process id, for different files."""
    segment = segments.create(64, named=True)
    record = segment.record()
    record["inode"] = [record["inode"][0], record["inode"][1] + 1]
    with pytest.raises(Unsupported, match=rf"rank 3 \(pid {os.getpid()}\)"):
        segments.open_peer(record, 3)
    segment.close()


def test_free_bytes_are_numbers() -> None:
    assert segments.shm_free() > 0
    assert segments.memory_free() > 0
    with _no_shm():
        assert segments.shm_free() == 0
