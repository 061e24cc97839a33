"""The status page: static files, which fetch `status.json` and nothing from anywhere else."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, HTTPException, Response

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_page(router: APIRouter) -> None:
    """Serve the page at `/` and its parts under `/page`."""
    parts = {
        part.name: (part.read_bytes(), _KINDS[part.name.rpartition(".")[2]])
        for part in files(__name__).iterdir()
        if part.name.rpartition(".")[2] in _KINDS
    }

    def part(name: str) -> Response:
        if name not in parts:
            raise HTTPException(404)
        content, kind = parts[name]
        headers = {
            "Content-Security-Policy": _POLICY,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return Response(content, media_type=kind, headers=headers)

    router.add_api_route("/", lambda: part("index.html"))
    router.add_api_route("/page/{name}", part)
