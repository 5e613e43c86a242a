"""Makes the page of the daemon's HTTP API from the application's own description (OpenAPI)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from offmated.api.app import Services, make_app
from offmated.api.limits import MOST_BODY_BYTES, REQUEST_S
from planner.units import format_bytes

_HEAD = """\
# API of the daemon

Everything that the commands and the page do goes through this HTTP API. `GET /openapi.json` returns its description for
programs.

## How to connect

On the same machine, use the daemon's unix socket `run/offmated.sock` in the state folder. Only you can open it, and it
needs no token:

```sh
curl --unix-socket ~/.local/state/offmate/run/offmated.sock http://offmate/queue
```

Over TCP the daemon listens only if [`listen`](config.md#listen) is set, or after `offmate page`. Each request then
needs the token from the file `api-token` in the state folder:

```sh
curl -H "Authorization: Bearer $(cat ~/.local/state/offmate/api-token)" http://127.0.0.1:8477/queue
```

Without the token only `GET /healthz` and the files of the page are answered; everything else gets 401 with the error
[`no-token`](errors.md#no-token). The connection is plain HTTP, so use a tunnel or a private network between machines.
Over TCP, `POST /ticket?path=/jobs/3/plan.html` returns `{{"url"}}`: a link with which a browser can open this one page
within a minute, without the token.

## Answers

Answers are JSON, except where a route says otherwise. Every error has the same fields: `what` (a sentence), `numbers`
(a list of lines), `hint`, `code` and `exit_code`. The codes are in [Errors](errors.md).

With the status 503 nothing of the request was done. If that answer has the header `Retry-After`, send the request again
after so many seconds.

| status | meaning |
| --- | --- |
| 200, 201, 202 | Done; a job was made; accepted. |
| 400 | It is in doubt where the request ends, because it gives its length twice. |
| 401 | The token is missing or wrong. |
| 404 | There is no such job or route. |
| 405 | The route does not take this method. |
| 408 | The request did not arrive in time. |
| 413 | The request is too large. |
| 422 | The request is refused: the job, a value or the state of the job does not allow it. |
| 500 | A bug in offmate. |
| 503 | The daemon cannot do it just now, and has done nothing of it. |
| 507 | A disk is full. |

A request may have up to {most}, and must arrive within {seconds:g} seconds. To submit a job safely, send an
`Idempotency-Key` of your own choice. If the answer is lost, send the same request with the same key: the answer is the
job that was made.

## Routes
"""
_KINDS = {"application/json": "JSON", "text/plain": "text", "text/html": "HTML"}
_HUGE = 2**31 - 1
"""Bounds from here on are of the numbers that can be stored, and not said."""


def page() -> str:
    """The Markdown of reference/api.md."""
    document = make_app(cast(Services, None)).openapi()
    schemas = document["components"]["schemas"]
    parts = [_HEAD.format(most=format_bytes(MOST_BODY_BYTES), seconds=REQUEST_S)]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            parts += _route(method, path, route, schemas)
    return "\n".join(parts) + "\n"


def _route(method: str, path: str, route: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    anchor = "-".join((method, *re.findall(r"\w+", path)))
    yield f"### {method.upper()} {path} {{ #{anchor} }}\n"
    yield f"{_safe(route['description'])}\n"
    parameters = route.get("parameters", ())
    if parameters:
        yield "| parameter | in | type | default |\n| --- | --- | --- | --- |"
        for each in parameters:
            default = "required" if each["required"] else _value(each["schema"])
            name = each["name"].title() if each["in"] == "header" else each["name"]
            yield f"| `{name}` | {each['in']} | {_type(each['schema'], schemas)} | {default} |"
        yield ""
    if "requestBody" in route:
        yield from _body(route["requestBody"]["content"]["application/json"]["schema"], schemas)
    (status, answer), *_ = route["responses"].items()
    kind = next(iter(answer["content"]))
    yield f"Answer: {status}, {_KINDS[kind]}.\n"


def _body(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    named = next(each["$ref"] for each in (schema, *schema.get("anyOf", ())) if "$ref" in each)
    body = schemas[named.rpartition("/")[2]]
    yield f"Body{' (may be left out)' if '$ref' not in schema else ''}: {_safe(body['description'])}\n"
    yield "| field | type | default | meaning |\n| --- | --- | --- | --- |"
    for name, field in body["properties"].items():
        default = "required" if name in body.get("required", ()) else _value(field)
        yield f"| `{name}` | {_type(field, schemas)} | {default} | {_safe(field.get('description', ''))} |"
    yield ""


def _value(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    return "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _type(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """A type in words, with the bounds of its values."""
    if "$ref" in schema:
        return _type(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in schema:
        return " or ".join(_type(each, schemas) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'], schemas)}"
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    said = [f"{words} {schema[bound]:g}" for bound, words in bounds.items() if schema.get(bound, math.inf) < _HUGE]
    return ", ".join((schema.get("type", "any"), *said))


def _safe(text: str) -> str:
    """A docstring in Markdown: objects of JSON ({"jobs"}) as code."""
    whole = " ".join(text.split())
    return re.sub(r'\{"[^}]*\}', lambda found: f"`{found[0]}`", whole).replace("<", "&lt;")
