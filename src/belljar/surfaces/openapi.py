"""The OpenAPI 3.1 document of `/api/v1`, made from the table of operations and their models."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from belljar.distribution import own_version
from belljar.outputs.export_formats import EXPORT_FORMATS

if TYPE_CHECKING:
    from belljar.surfaces.api_operations import Operation

_PART = re.compile(r"\{(\w+)(?::\w+)?\}")
# What parts of paths may be, where they are no ids and no names.
_FORMS: dict[str, dict[str, Any]] = {"form": {"enum": [*EXPORT_FORMATS]}}
_REFUSALS = {
    "400": "An argument is wrong",
    "401": "No credentials, or none that are accepted",
    "403": "A page of another origin made the request, or only an operator may answer the question",
    "404": "There is no such thing, or it belongs to somebody else",
    "409": "Not possible now: busy, already answered, or the kernel has died",
    "413": "Too large",
    "429": "Too many requests or streams",
}


def description(operations: Sequence["Operation"], prefix: str, problem: type[BaseModel]) -> dict[str, Any]:
    """Return the document."""
    models = {model for one in operations for model in (one.answer, one.body) if model is not None} | {problem}
    ordered = sorted(models, key=lambda model: model.__name__)
    # Answers as they are written, bodies as they are read.
    bodies = {one.body for one in operations}
    wanted = [(model, "validation" if model in bodies else "serialization") for model in ordered]
    references, definitions = models_json_schema(
        wanted,  # pyright: ignore[reportArgumentType]
        ref_template="#/components/schemas/{model}",
    )
    named: dict[type[Any], Any] = {model: schema for (model, _), schema in references.items()}
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        path = prefix + _PART.sub(r"{\1}", one.path)
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, named, named[problem])
    return {
        "openapi": "3.1.0",
        "info": {"title": "belljar", "version": own_version(), "summary": "Sessions, cells and their output"},
        "security": [{"bearer": []}, {"cookie": []}],
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "cookie": {"type": "apiKey", "in": "cookie", "name": "belljar-PORT"},
            },
        },
    }


def _operation(one: "Operation", named: dict[type[Any], Any], problem: Any) -> dict[str, Any]:
    inner = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", **_FORMS.get(name, {})}}
        for name in _PART.findall(one.path)
    ]
    query = [
        {"name": name, "in": "query", "description": known.meaning, "schema": known.schema}
        for name, known in one.query.items()
    ]
    content: dict[str, Any] = {}
    if one.answer is not None:
        content = {"content": {one.media: {"schema": named[one.answer]}}}
    elif one.status != 204:
        content = {"content": {media: {} for media in one.media.split(", ")}}
    refusals = {
        status: {"description": description, "content": {"application/json": {"schema": problem}}}
        for status, description in _REFUSALS.items()
    }
    described: dict[str, Any] = {
        "summary": one.summary,
        "operationId": re.sub(r"\W+", "_", f"{one.method.lower()}{one.path}").strip("_"),
        "parameters": [*inner, *query],
        "responses": {str(one.status): {"description": one.summary, **content}, **refusals},
    }
    if one.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": named[one.body]}}}
    elif one.method == "PUT":
        described["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    return described
