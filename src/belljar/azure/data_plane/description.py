"""The OpenAPI document of the data plane, as it is served at `/openapi.json`.

It describes the routes of both generations of versions, and is what other programs test the server by.
"""

import functools
from typing import Any, Final

from belljar.azure.data_plane.calls import NEW_VERSIONS, OLD_VERSIONS, VERSIONS
from belljar.distribution import own_version
from belljar.sessions.identified import LEAST_CHARS, MAX_CHARS

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_TIME: Final[Schema] = {"type": "string", "format": "date-time"}
_ANYTHING: Final[Schema] = {}
_IDENTIFIER: Final[Schema] = {
    "type": "string",
    "minLength": LEAST_CHARS,
    "maxLength": MAX_CHARS,
    "pattern": r"""^[A-Za-z0-9_|}{\[\]:";'<>?/.,@#$%^&*()\-+=!~`]*$""",
}


def description(prefix: str) -> Schema:
    """Return the document for a server whose routes have this prefix."""
    return {**_document(), "servers": [{"url": prefix}]}


@functools.cache
def _document() -> Schema:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "belljar: the data plane of dynamic sessions",
            "version": own_version(),
            "description": "Runs Python and shell commands in stateful sessions, one for each identifier.",
        },
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-ms-apikey"},
            },
        },
    }


def _paths() -> Schema:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    path = _query("path", _TEXT)
    old_entry, entry = _ref("OldFiles"), _ref("File")
    return {
        "/code/execute": {
            "post": _operation(
                "Run code and wait for it (old versions)", _ref("OldExecution"), _json("OldOrder"), OLD_VERSIONS
            )
        },
        "/files/upload": {
            "post": _operation("Upload a file (old versions)", old_entry, _multipart(), OLD_VERSIONS),
        },
        "/files/content/{name}": {
            "get": _operation("The bytes of a file (old versions)", None, None, OLD_VERSIONS, name)
        },
        "/executions": {
            "post": _operation(
                "Run code or a shell command",
                {"anyOf": [_ref("Execution"), _ref("ShellExecution")]},
                _json("Order"),
                NEW_VERSIONS,
                {"name": "operation-id", "in": "header", "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"}},
            )
        },
        "/executions/{id}": {
            "get": _operation(
                "An execution, ended or not",
                {"anyOf": [_ref("Execution"), _ref("ShellExecution")]},
                None,
                NEW_VERSIONS,
                {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},
            )
        },
        "/files": {
            "get": _operation(
                "The files of a folder; in old versions all files",
                {"anyOf": [_ref("Files"), old_entry]},
                None,
                VERSIONS,
                path,
                _query("recursive", {"type": "boolean"}),
            ),
            "post": _operation(
                "Upload a file, or bring one in by a data: or https: URL",
                entry,
                {**_multipart(), "content": {**_multipart()["content"], **_json("Source")["content"]}},
                NEW_VERSIONS,
                path,
            ),
        },
        "/files/{name}": {
            "get": _operation(
                "One file's entry; with /content after the name, in new versions, its bytes",
                {"anyOf": [entry, old_entry]},
                None,
                VERSIONS,
                name,
                path,
            ),
            "delete": _operation("Delete a file", None, None, VERSIONS, name, path, success="204"),
        },
        "/files/{name}/send": {
            "post": _operation(
                "Put a file to an https: URL that may be written; its host has to be one of the setting egress",
                _ref("Sent"),
                _json("Destination"),
                NEW_VERSIONS,
                name,
                path,
            )
        },
        "/session": {
            "get": _operation("The session of an identifier", _ref("Session"), None, VERSIONS),
            "delete": _operation("End the session of an identifier", None, None, VERSIONS, success="204"),
        },
        "/listSessions": {
            "get": _operation(
                "The caller's sessions", _ref("Sessions"), None, VERSIONS, _query("skip", _COUNT), has_identifier=False
            )
        },
        "/metadata": {
            "get": _operation("What every session has", _ref("Metadata"), None, VERSIONS, has_identifier=False)
        },
    }


def _operation(
    summary: str,
    answer: Schema | None,
    body: Schema | None,
    versions: tuple[str, ...],
    *parameters: Schema,
    has_identifier: bool = True,
    success: str = "200",
) -> Schema:
    version = _query("api-version", {"type": "string", "enum": [*versions]}, is_required=True)
    identifier = [_query("identifier", _IDENTIFIER, is_required=True)] if has_identifier else []
    content: Schema = {"application/json": {"schema": answer}} if answer else {"application/octet-stream": {}}
    error = {"description": "An error", "content": {"application/json": {"schema": _ref("Problem")}}}
    operation: Schema = {
        "summary": summary,
        "parameters": [version, *identifier, *parameters],
        "responses": {
            success: {"description": summary, **({"content": content} if success == "200" else {})},
            "4XX": error,
            "503": error,
        },
    }
    return {**operation, "requestBody": body} if body else operation


def _query(name: str, schema: Schema, *, is_required: bool = False) -> Schema:
    return {"name": name, "in": "query", "required": is_required, "schema": schema}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(name: str) -> Schema:
    return {"required": True, "content": {"application/json": {"schema": _ref(name)}}}


def _multipart() -> Schema:
    file = {"type": "string", "contentMediaType": "application/octet-stream"}
    schema = {"type": "object", "required": ["file"], "properties": {"file": file}}
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


def _object(properties: Schema, *optional: str) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _schemas() -> Schema:
    code: Schema = {
        "codeInputType": {"type": "string", "enum": ["Inline", "InlineBase64", "InlineText"]},
        "executionType": {"type": "string", "enum": ["Synchronous", "Asynchronous"]},
        "code": {**_TEXT, "description": "Python, as text or in base64"},
        "timeoutInSeconds": {"type": "number", "exclusiveMinimum": 0},
    }
    shell = {"shellCommand": _TEXT, "timeoutInSeconds": code["timeoutInSeconds"]}
    streams: Schema = {"stdout": _TEXT, "stderr": _TEXT}
    result = {**streams, "executionResult": _ANYTHING, "executionTimeInMilliseconds": _COUNT}
    named: Schema = {"id": _TEXT, "identifier": _TEXT}
    status = {"type": "string", "enum": ["NotStarted", "Running", "Succeeded", "Failed", "Canceled"]}
    error = _object(
        {"code": _TEXT, "message": _TEXT, "target": _TEXT, "details": {"type": "array"}, "traceId": _TEXT}, "target"
    )
    old_result = {"$id": _TEXT, "status": {"type": "string", "enum": ["Success", "Failure"]}, "result": _ANYTHING}
    old_file = _object({"$id": _TEXT, "filename": _TEXT, "size": _COUNT, "lastModifiedTime": _TIME})
    file = _object(
        {
            "name": _TEXT,
            "type": {"type": "string", "enum": ["file", "directory"]},
            "contentType": {"type": ["string", "null"]},
            "sizeInBytes": _COUNT,
            "lastModifiedAt": _TIME,
            "directory": _TEXT,
        }
    )
    session = _object(
        {"identifier": _TEXT, "createdAt": _TIME, "lastAccessedAt": _TIME, "expireAt": _TIME, "etag": _TEXT}
    )
    link = {"type": ["string", "null"]}
    return {
        "Order": {
            "anyOf": [
                _object({**code, "outputStreamsMaxLength": {"type": "integer", "minimum": 1}}, *_optional(code)),
                _object(shell, "timeoutInSeconds"),
            ]
        },
        "OldOrder": _object({"properties": _object(code, *_optional(code))}),
        "Execution": _object(
            {
                **named,
                "executionType": _TEXT,
                "status": status,
                "error": _ref("Problem"),
                "result": _object(result),
            },
            "error",
        ),
        "ShellExecution": _object(
            {**named, "status": _TEXT, "result": _object({**streams, "executionTimeInMilliseconds": _COUNT})}
        ),
        "OldExecution": _object({"$id": _TEXT, "properties": _object({**old_result, **result})}),
        "File": file,
        "Files": _object({"value": {"type": "array", "items": file}, "nextLink": link}),
        "OldFiles": _object(
            {"$id": _TEXT, "value": {"type": "array", "items": _object({"$id": _TEXT, "properties": old_file})}}
        ),
        "Source": _object({"name": _TEXT, "url": _TEXT}),
        "Destination": _object({"url": _TEXT}),
        "Sent": _object({"name": _TEXT, "sizeInBytes": _COUNT, "status": _COUNT}),
        "Session": session,
        "Sessions": _object({"sessions": {"type": "array", "items": session}, "nextLink": link}),
        "Metadata": _object(
            {
                "runtimes": {"type": "array", "items": _object({"name": _TEXT, "version": _TEXT})},
                "preInstalledPackages": {"type": "array", "items": _object({"name": _TEXT, "version": _TEXT})},
                "createdAt": _TIME,
                "lastUpdatedAt": _TIME,
                "jupyterKernel": _TEXT,
            }
        ),
        "Problem": _object({"error": error}),
    }


def _optional(fields: Schema) -> list[str]:
    return [name for name in [*fields, "outputStreamsMaxLength"] if name != "code"]
