"""/docs: Swagger UI over the OpenAPI page."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

DOCS = "/docs"
FILES = f"{DOCS}/files"
PACKAGE = "fastapi_offline"  # holds Swagger UI's files


def add_docs(app: FastAPI) -> None:
    """Serve the page, and its files where the package that holds them is installed; without it the
    browser takes them from a content delivery network, and a page without network stays empty."""
    places: dict[str, Any] = {}
    if (spec := find_spec(PACKAGE)) is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "static"
        app.mount(FILES, StaticFiles(directory=folder))
        places = {
            "swagger_js_url": f"{FILES}/swagger-ui-bundle.js",
            "swagger_css_url": f"{FILES}/swagger-ui.css",
            "swagger_favicon_url": f"{FILES}/favicon.png",
        }

    async def page(_: Request) -> Response:
        return get_swagger_ui_html(openapi_url="/openapi.json", title=app.title, **places)

    app.add_route(DOCS, page, include_in_schema=False)
