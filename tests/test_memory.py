"""What a host could give away: the machine's memory, or less of it where a cgroup limits this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from atom_mini.memory import cgroup_free_bytes

GIB = 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_limit_on_the_way_up_counts_in_version_2(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/pod/box\n")
    write(tmp_path / "pod/box", memory__max="max", memory__current=1 * GIB, memory__stat="anon 5\ninactive_file 0")
    write(tmp_path / "pod", memory__max=2 * GIB, memory__current=1 * GIB, memory__stat=f"inactive_file {GIB // 2}")
    assert cgroup_free_bytes(tmp_path, tmp_path / "membership") == 1.5 * GIB  # the page cache would be given back


def test_version_1_has_other_names(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("5:cpu:/\n4:memory:/box\n")
    files = {"memory__limit_in_bytes": 3 * GIB, "memory__usage_in_bytes": 1 * GIB}
    write(tmp_path / "memory/box", **files, memory__stat="total_inactive_file 0")
    assert cgroup_free_bytes(tmp_path, tmp_path / "membership") == 2 * GIB


@pytest.mark.parametrize("membership", ["0::/elsewhere\n", "", None])
def test_a_container_sees_its_own_group_as_the_root(membership: str | None, tmp_path: Path) -> None:
    """In a namespace of its own, the path may not exist; the files at the top are the container's."""
    if membership is not None:
        (tmp_path / "membership").write_text(membership)
    write(tmp_path, memory__max=2 * GIB, memory__current=3 * GIB)
    assert cgroup_free_bytes(tmp_path, tmp_path / "membership") == 0  # over its limit: nothing, not less


def test_without_a_limit_there_is_none(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path, tmp_path / "membership") is None
