"""The page's files, which hold no data: they are read once and are the same for everybody."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "web"
_INDEX: Final = "index.html"
_MEDIA_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_POLICY: Final = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # The page's scripts make text, never markup.
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of each file: nothing runs, loads or is sent anywhere but what comes from, and goes to, this server."""


@dataclass(frozen=True, kw_only=True)
class StaticFile:
    """One file."""

    content: bytes
    media_type: str


def read_files(folder: Path) -> dict[str, StaticFile]:
    """Path in a URL -> file, for all files of a folder that a page is made of; index.html is `/`."""
    found = {}
    for file in sorted(folder.iterdir()):
        if file.suffix in _MEDIA_TYPES:
            path = "/" if file.name == _INDEX else f"/web/{file.name}"
            found[path] = StaticFile(content=file.read_bytes(), media_type=_MEDIA_TYPES[file.suffix])
    return found
