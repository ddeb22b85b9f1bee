"""Check that a source distribution has exactly the files that its folder has, but for what setuptools adds.

python tools/check_sdist.py dist/megablend-0.1.0.tar.gz
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

ADDED = ("PKG-INFO", "setup.cfg")
NOT_NEEDED = (".gitignore",)


def find_differences(archive: Path, folder: Path) -> list[str]:
    """A line for each file that is missing from the archive or should not be in it."""
    with tarfile.open(archive) as opened:
        packed = {
            name.partition("/")[2]
            for name in (each.name for each in opened.getmembers() if each.isfile())
        }
    packed = {name for name in packed if name not in ADDED and ".egg-info/" not in name}
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    wanted = {
        name
        for name in present
        if not name.startswith("dist/") and ".egg-info/" not in name and name not in NOT_NEEDED
    }
    return [f"missing: {name}" for name in sorted(wanted - packed)] + [
        f"junk: {name}" for name in sorted(packed - wanted)
    ]


if __name__ == "__main__":
    archive = Path(sys.argv[1])
    differences = find_differences(archive, archive.parent.parent)
    print(
        "\n".join(differences)
        or f"{archive.name}: complete, and nothing else ({archive.stat().st_size:,} bytes)"
    )
    sys.exit(bool(differences))
