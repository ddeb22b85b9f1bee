from sum_coverage import format_table, list_low, sum_folders


def test_lines_are_summed_by_folder() -> None:
    def file(covered: int, lines: int) -> dict[str, dict[str, int]]:
        return {"summary": {"covered_lines": covered, "num_statements": lines}}

    files = {
        "megablend/errors.py": file(9, 10),
        "megablend/plan/a.py": file(1, 2),
        "megablend/plan/deeper/b.py": file(2, 2),
        "megablend/order/__init__.py": file(0, 0),
    }
    sums = sum_folders(files)
    assert sums == {".": (9, 10), "plan": (3, 4), "order": (0, 0)}
    assert format_table(sums).splitlines() == [
        ".              90.0%  of     10 lines",
        "order         100.0%  of      0 lines",
        "plan           75.0%  of      4 lines",
        "all            85.7%  of     14 lines",
    ]
    assert list_low(files) == ["  50.0%  of      2 lines  megablend/plan/a.py"]
