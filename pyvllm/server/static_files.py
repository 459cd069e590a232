"""The page's files, which hold no data: they are read once and are the same for everybody."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "web"
_INDEX: Final = "index.html"


@dataclass(frozen=True, kw_only=True)
class StaticFile:
    """One file."""

    content: bytes
    media_type: str


def read_files(folder: Path) -> dict[str, StaticFile]:
    """Path in a URL -> file, for all files of a folder; index.html is `/`. Empty if there is no such folder."""
    found = {}
    for file in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if file.is_file():
            kind, _ = mimetypes.guess_type(file.name)
            path = "/" if file.relative_to(folder) == Path(_INDEX) else f"/web/{file.relative_to(folder).as_posix()}"
            found[path] = StaticFile(content=file.read_bytes(), media_type=kind or "application/octet-stream")
    return found
