"""Shared segments: private to the user, with short names, with their space reserved."""

from __future__ import annotations

import errno
import gc
import os
import stat
from unittest import mock

import pytest

from gemmlink.errors import Unavailable, Unsupported
from gemmlink.transport import segments


def _no_shm() -> mock._patch[str]:
    return mock.patch.object(segments, "SHM", "/nonexistent")


def test_a_segment_is_zero_and_reserved_and_for_its_owner_only() -> None:
    segment = segments.create(100_000)
    try:
        status = os.fstat(segment.fd)
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == 100_000
        assert status.st_blocks * 512 >= 100_000, "its space is not reserved"
        assert segment.map()[:] == bytes(100_000)
    finally:
        segment.close()


def test_names_are_short_and_plain_even_for_the_largest_process_id() -> None:
    """Some systems allow 31 characters, the leading slash among them."""
    names = set()
    with mock.patch.object(os, "getpid", return_value=4194304):
        for _ in range(50):
            segment = segments.create(64)
            names.add(os.path.basename(segment.path or ""))
            segment.close()
    assert len(names) == 50, "a name was used twice"
    for name in names:
        assert len(f"/{name}") <= 31
        assert name.replace("-", "").isalnum()


def test_closing_removes_the_name_and_keeps_the_mapping() -> None:
    segment = segments.create(64)
    path, mapped = segment.path, segment.map()
    assert path is not None
    assert os.path.exists(path)
    segment.close()
    segment.close()
    assert not os.path.exists(path)
    mapped[0] = 7
    assert mapped[0] == 7


def test_a_peer_maps_the_same_memory() -> None:
    segment = segments.create(64)
    mine, theirs = segment.map(), segments.attach(segment.record(), 1)
    segment.close()
    mine[3] = 9
    assert theirs[3] == 9


def test_without_dev_shm_a_segment_is_anonymous_and_can_be_mapped() -> None:
    with _no_shm():
        segment = segments.create(64)
    assert segment.path is None
    mine, theirs = segment.map(), segments.attach(segment.record(), 1)
    segment.close()
    mine[3] = 9
    assert theirs[3] == 9


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_no_space_anywhere_says_how_much_is_needed_and_free(number: int) -> None:
    gc.collect()  # what other tests left open must not be closed in between
    descriptors = len(os.listdir("/proc/self/fd"))
    full = mock.patch.object(os, "posix_fallocate", side_effect=OSError(number, "full"))
    with full, pytest.raises(Unavailable) as caught:
        segments.create(12345)
    text = str(caught.value)
    assert text.startswith("a window needs 12345 bytes of shared memory; got ")
    assert "bytes free in /dev/shm" in text
    assert "--shm-size=8g" in text
    assert not [n for n in os.listdir("/dev/shm") if n.startswith(f"gemmlink-{os.getpid()}-")]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors, "a file was left open"


def test_another_error_is_not_mistaken_for_a_full_disk() -> None:
    broken = mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.EIO, "broken"))
    with broken, pytest.raises(OSError, match="broken"):
        segments.create(64)
    assert not [n for n in os.listdir("/dev/shm") if n.startswith(f"gemmlink-{os.getpid()}-")]


def test_anonymous_memory_is_not_taken_beyond_what_is_free() -> None:
    """The kernel would kill somebody for it."""
    little = mock.patch.object(segments, "memory_free", return_value=1000)
    with _no_shm(), little, pytest.raises(Unavailable, match="1000 bytes of free memory"):
        segments.create(1001)


def test_a_file_that_is_not_the_one_described_is_refused() -> None:
    """Two containers can have the same name, or the same process id, for different files."""
    segment = segments.create(64)
    record = segment.record()
    record["inode"] = [record["inode"][0], record["inode"][1] + 1]
    with pytest.raises(Unsupported, match=rf"rank 3 \(pid {os.getpid()}\)"):
        segments.attach(record, 3)
    segment.close()


def test_free_bytes_are_numbers() -> None:
    assert segments.shm_free() > 0
    assert segments.memory_free() > 0
    with _no_shm():
        assert segments.shm_free() == 0
