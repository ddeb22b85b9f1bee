"""Names of token files: TOKENIZER/TEXT/NUMBER-DIGEST.parquet, relative to the folder of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_PATH = re.compile(r".*/[0-9a-f]{16}/(.+)/([0-9]{5,})-[0-9a-f]{24}\.parquet")


class TokenName(NamedTuple):
    """The components of the name of a token file."""

    tokenizer: str
    """The digest of the tokenizer."""
    text: str
    """The name of the text file, including folders. Text files of several sources may have the same
    name."""
    number: int
    """The number of the part."""
    digest: str
    """The digest of everything that the tokens depend on, including the lines. It is the same for
    equal parts of different text files."""

    @classmethod
    def parse(cls, name: str) -> TokenName:
        """Parse the name of a token file."""
        tokenizer, _, rest = name.partition("/")
        text, _, file = rest.rpartition("/")
        number, _, digest = file.removesuffix(".parquet").partition("-")
        return cls(tokenizer, text, int(number), digest)

    def __str__(self) -> str:
        return f"{self.tokenizer}/{self.text}/{self.number:05d}-{self.digest}.parquet"


class TokenPath(NamedTuple):
    """The path of a token file, and two things that the path contains: the name of the text file,
    and the number of the part."""

    path: str
    text: str
    """See `TokenName`."""
    number: int
    """See `TokenName`."""

    @property
    def folder(self) -> str:
        """The folder of this token file. It contains the token files of all text files with this
        name."""
        return self.path.rpartition("/")[0]


def read_tokenizer_digest(name: str) -> str:
    """Return the digest of the tokenizer in the name of a file below the folder of tokens."""
    return name.partition("/")[0]


def parse_path(path: str) -> TokenPath | None:
    """Parse the path of a token file in any folder of tokens. Returns: None if it is the path of
    another file."""
    match = _PATH.fullmatch(path)
    return None if match is None else TokenPath(path, match[1], int(match[2]))


def group_by_folder(paths: Iterable[str]) -> dict[str, list[TokenPath]]:
    """Return the token files in a list of paths, grouped by folder. The token files of each folder
    are in the order of their parts."""
    groups = dict[str, list[TokenPath]]()
    for path in paths:
        token_path = parse_path(path)
        if token_path is not None:
            groups.setdefault(token_path.folder, []).append(token_path)
    return {
        folder: sorted(token_paths, key=lambda listed: listed.number)
        for folder, token_paths in groups.items()
    }
