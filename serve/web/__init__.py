"""The page at `/`: plain files without a build step, read from the package.

Must not know: engines.
"""

from __future__ import annotations

from importlib import resources

HTML, CSS, JS, SVG = (
    "text/html; charset=utf-8",
    "text/css; charset=utf-8",
    "text/javascript; charset=utf-8",
    "image/svg+xml",
)
PAGES = {
    "/": ("index.html", HTML),
    "/web/docs.css": ("docs.css", CSS),
    "/web/style.css": ("style.css", CSS),
    "/web/app.js": ("app.js", JS),
    "/web/api.js": ("api.js", JS),
    "/web/chat.js": ("chat.js", JS),
    "/web/clipboard.js": ("clipboard.js", JS),
    "/web/modes.js": ("modes.js", JS),
    "/web/texts.js": ("texts.js", JS),
    "/web/message.js": ("message.js", JS),
    "/web/tokens.js": ("tokens.js", JS),
    "/web/settings.js": ("settings.js", JS),
    "/web/status.js": ("status.js", JS),
    "/web/icon.svg": ("icon.svg", SVG),
}
"""URL path -> (file, media type)."""


def read_page(path: str) -> tuple[bytes, str]:
    """Return the content and media type of a path in `PAGES`."""
    name, kind = PAGES[path]
    return read_file(name), kind


def read_file(name: str) -> bytes:
    """Return the content of a file of this folder."""
    return resources.files("girih.serve.web").joinpath(name).read_bytes()
