from __future__ import annotations

from pathlib import Path

from megablend.megatron.cache_builder.free_memory import free_memory


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {
        "proc/meminfo": "MemTotal: 900 kB\nMemAvailable:   500 kB\nSwapFree: 7 kB\n",
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(path: str, limit: str, used: int, inactive: int, version: int = 2) -> dict[str, str]:
    names = (
        ("memory.max", "memory.current")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    stat = f"anon 1\ninactive_file {inactive}\ntotal_inactive_file {inactive}\n"
    values = {names[0]: f"{limit}\n", names[1]: f"{used}\n", "memory.stat": stat}
    return {f"sys/fs/cgroup/{path}{name}": value for name, value in values.items()}


def test_without_control_groups_the_node_counts(tmp_path: Path) -> None:
    assert free_memory(write(tmp_path, {})) == 512_000


def test_what_a_group_uses_is_not_free(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", **group("", "100000", 60_000, 10_000)}
    assert free_memory(write(tmp_path, files)) == 50_000


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    own = {"proc/self/cgroup": "0::/slurm/job_7/step_0\n"}
    files = (
        own
        | group("slurm/job_7/step_0/", "max", 1000, 0)
        | group("slurm/job_7/", "300000", 100_000, 0)
    )
    assert free_memory(write(tmp_path, files)) == 200_000
    assert free_memory(write(tmp_path, group("slurm/", "90000", 100_000, 0))) == 0
    assert free_memory(write(tmp_path, group("slurm/", "max", 100_000, 0))) == 200_000


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    lines = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"
    files = {"proc/self/cgroup": lines, **group("memory/", "400000", 100_000, 50_000, version=1)}
    assert free_memory(write(tmp_path, files)) == 350_000


def test_this_process_has_some() -> None:
    assert 0 < free_memory() < 1 << 60
