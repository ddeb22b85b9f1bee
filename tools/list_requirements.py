"""Print the requirements of a wheel, one per line, without its extras: python tools/list_requirements.py X.whl --without torch"""

from __future__ import annotations

import argparse
import email
import re
import zipfile


def list_requirements(wheel: str, without: list[str]) -> list[str]:
    """The requirements of a wheel, but for those of its extras and of some packages."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    found = [
        str(each) for each in metadata.get_all("Requires-Dist") or [] if "extra ==" not in str(each)
    ]
    return [each for each in found if re.split(r"[^A-Za-z0-9_.-]", each)[0] not in without]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel")
    parser.add_argument("--without", action="append", default=[])
    given = parser.parse_args()
    print("\n".join(list_requirements(given.wheel, given.without)))
