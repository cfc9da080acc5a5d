"""The OpenAPI description, from the structs that bodies are decoded into."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tq_fs.proxy._errors import ErrorAnswer
from tq_fs.proxy._headers import INSTANCE, SESSION, TURN
from tq_fs.proxy._routes import ROUTES, Route

_TEMPLATE = "#/components/schemas/{name}"


def describe(app: FastAPI) -> None:
    """Let ``/openapi.json`` tell of all bodies and headers; made when it is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # how the framework wants it replaced


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = [kind for route in ROUTES for kind in (route.takes, route.gives) if kind]
    _, components = msgspec.json.schema_components([*kinds, ErrorAnswer], ref_template=_TEMPLATE)
    document["components"] = {"schemas": components}
    for route in ROUTES:
        _describe(document["paths"][route.path][route.method.lower()], route)
    return document


def _describe(operation: dict[str, Any], route: Route) -> None:
    operation["responses"] = {
        "200": {"description": "done", **_content(route.gives)},
        "default": {"description": "an error", **_content(ErrorAnswer)},
    }
    if route.takes is not None:
        operation["requestBody"] = {"required": True, **_content(route.takes)}
    if route.path == "/v1/chat/completions":
        operation["parameters"] = [
            {"name": n, "in": "header", "required": n == SESSION, "schema": {"type": "string"}}
            for n in (SESSION, INSTANCE, TURN)
        ]


def _content(kind: Any) -> dict[str, Any]:
    if kind is None:
        return {}
    schema = {"$ref": _TEMPLATE.format(name=kind.__name__)}
    return {"content": {"application/json": {"schema": schema}}}
