"""Recordings read from Nsight Systems' SQLite exports."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from nsys_exports import (
    ADDRESS,
    RUN,
    Tables,
    database,
    gpu_fault,
    memcpy,
    nvtx,
)

from umem.core.errors import UmemError
from umem.telemetry import RecordKind, read_nsys, read_recording, report_of, step_reports


def without(*tables: str) -> Tables:
    return {name: rows for name, rows in RUN.items() if name not in tables}


def test_records_of_every_table(tmp_path: Path) -> None:
    recording = read_recording(database(tmp_path / "run.sqlite", RUN))
    assert (recording.source, recording.workload) == ("nsys", "run")
    assert (recording.hardware, recording.policy) == ("NVIDIA H200", "unknown")
    records = recording.records
    # From the start of the first step, which is before the first fault.
    assert records.start_ns.tolist() == [40, 45, 50, 150, 250, 350, 450, 560, 650, 1000, 1050]
    kinds = "GPU_FAULT GPU_FAULT TO_DEVICE TO_DEVICE TO_HOST BETWEEN_DEVICES MEMCPY MEMCPY MEMSET "
    kinds += "CPU_FAULT TO_DEVICE"
    assert [RecordKind(kind).name for kind in records.kind] == kinds.split()
    assert records.cause.tolist() == [0, 0, 2, 1, 4, 5, 0, 0, 0, 0, 3]
    assert records.copy_kind.tolist() == [0, 0, 0, 0, 0, 0, 1, 8, 0, 0, 0]
    assert records.address.tolist()[2] == ADDRESS + 100
    assert records.access.tolist()[:2] == [1, 2]
    assert recording.duration_ns == 1950
    assert [(it.name, it.start_ns, it.end_ns) for it in recording.phases] == [("forward", 10, 450)]


def test_steps_and_figures(tmp_path: Path) -> None:
    recording = read_nsys(database(tmp_path / "run.sqlite", RUN))
    first, second = step_reports(recording)
    assert first.step_s == pytest.approx(950e-9)
    assert first.moved_bytes("to_device", "fault") == 2 << 20
    assert first.moved_bytes("to_device", "hint") == 1 << 20
    assert first.moved_bytes("to_host", "eviction") == 1 << 16
    assert first.moved_bytes("between_devices", "counter") == 4096
    assert (first.fault_batches, first.gpu_faults, first.cpu_faults) == (2, 4, 0)
    # As um_sum and cuda_gpu_mem_time_sum would add them up: 260 ns of 420 ns.
    assert first.um_time_share == pytest.approx(260 / 420)
    assert first.um_ops_share == pytest.approx(4 / 7)
    assert (second.moved_bytes("to_device", "speculation"), second.cpu_faults) == (4096, 1)
    assert first.unattributed_bytes == first.moved_bytes()
    assert any("does not know umem's tensors" in note for note in first.notes)


def test_without_marks_and_faults_the_notes_say_so(tmp_path: Path) -> None:
    tables = without(
        "NVTX_EVENTS", "CUDA_UM_GPU_PAGE_FAULT_EVENTS", "CUDA_UM_CPU_PAGE_FAULT_EVENTS", "StringIds"
    )
    report = report_of(read_nsys(database(tmp_path / "run.sqlite", tables)))
    assert report.step_count == 0
    notes = " ".join(report.notes)
    assert "no step was marked" in notes
    assert "--cuda-um-gpu-page-faults=true" in notes
    assert "--cuda-um-cpu-page-faults=true" in notes


def test_steps_of_several_processes_are_not_mixed(tmp_path: Path) -> None:
    marks = [nvtx(50, 1000, "umem step 0"), nvtx(500, 1500, "umem step 0")]
    path = database(tmp_path / "run.sqlite", {**RUN, "NVTX_EVENTS": marks})
    report = report_of(read_nsys(path))
    assert report.step_count == 0
    assert any("several processes overlap" in note for note in report.notes)


def test_exports_of_older_versions_without_optional_columns(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with closing(sqlite3.connect(path)) as made, made:
        made.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, bytes INT, copyKind INT)"
        )
        made.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1, 2, 3, 11)")
    assert report_of(read_nsys(path)).moved_bytes("to_device", "unknown") == 3


def test_values_outside_of_enumerations_are_unknown(tmp_path: Path) -> None:
    rows: Tables = {
        "CUPTI_ACTIVITY_KIND_MEMCPY": [memcpy(0, 1, 8, 11, cause=99), memcpy(2, 3, 8, 4711)],
        "CUDA_UM_GPU_PAGE_FAULT_EVENTS": [gpu_fault(5, 1, access=-3)],
    }
    records = read_nsys(database(tmp_path / "run.sqlite", rows)).records
    assert records.cause.tolist() == [0, 0, 0]
    assert records.copy_kind.tolist() == [0, 0, 0]
    assert records.access.tolist() == [0, 0, 0]


@pytest.mark.parametrize("column", ["start", "end"])
def test_times_that_no_profile_holds(column: str, tmp_path: Path) -> None:
    path = database(tmp_path / "run.sqlite", RUN)
    with closing(sqlite3.connect(path)) as made, made:
        made.execute(f"UPDATE CUPTI_ACTIVITY_KIND_MEMSET SET end = {2**62}, {column} = {2**62}")
    with pytest.raises(UmemError, match=rf"run\.sqlite: {column}_ns\[\d+\]: .*nsys export"):
        read_recording(path)


def test_what_sqlite_quotes_has_no_control_characters(tmp_path: Path) -> None:
    path = database(tmp_path / "run.sqlite", RUN)
    path.write_bytes(
        path.read_bytes().replace(b"CREATE TABLE NVTX_EVENTS", b"CREATE TABLE \x14VTX_EVENTS")
    )
    with pytest.raises(UmemError) as caught:
        read_recording(path)
    assert "\\x14" in str(caught.value)
    assert str(caught.value).isprintable()


def test_reading_does_not_change_the_file(tmp_path: Path) -> None:
    path = database(tmp_path / "a # of % names?.sqlite", RUN)
    path.chmod(0o444)
    before = path.read_bytes()
    assert read_nsys(path).step_count == 2
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_view_in_place_of_a_table_is_not_followed(tmp_path: Path) -> None:
    """Its query could run for ever."""
    path = tmp_path / "run.sqlite"
    with closing(sqlite3.connect(path)) as made, made:
        made.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_MEMCPY AS WITH RECURSIVE n(i) AS "
            "(SELECT 1 UNION ALL SELECT i + 1 FROM n) "
            "SELECT i AS start, i AS end, 1 AS bytes, 11 AS copyKind FROM n"
        )
    with pytest.raises(UmemError, match="holds nothing of CUDA"):
        read_nsys(path)


def test_more_records_than_are_read(tmp_path: Path) -> None:
    path = database(tmp_path / "run.sqlite", RUN)
    with pytest.raises(UmemError, match=r"KIND_MEMSET: more than 7 records .* --filter-time"):
        read_nsys(path, limit=7)


def test_a_damaged_file(tmp_path: Path) -> None:
    path = database(tmp_path / "run.sqlite", RUN)
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(UmemError, match=r"run\.sqlite: cannot be read .*nsys export"):
        read_recording(path)


def test_what_sqlite_quotes_need_not_be_text(tmp_path: Path) -> None:
    """An error that quotes bytes of no UTF-8 is a UnicodeDecodeError of Python's."""
    path = database(tmp_path / "run.sqlite", RUN)
    content = path.read_bytes()
    begin = content.index(b"CREATE TABLE")
    path.write_bytes(content[:begin] + b"CREATE \xb3ABLE" + content[begin + 12 :])
    with pytest.raises(UmemError, match=r"run\.sqlite: cannot be read .*nsys export"):
        read_recording(path)
