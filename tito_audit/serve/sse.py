"""Streamed answers, as server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from aiohttp import web

from tito_audit.serve.errors import Refused, error_object

LOGGER = logging.getLogger("tito_audit.serve")
_DONE = b"data: [DONE]\n\n"
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


async def send_stream(
    request: web.Request, headers: Mapping[str, str], pieces: AsyncGenerator[dict[str, Any], None]
) -> web.StreamResponse:
    """Sends all pieces; the response.

    Headers are sent with the first piece, so that an earlier refusal has its own status; a later one is the last
    event, without `[DONE]`.
    """
    async with aclosing(pieces):
        first = await anext(pieces)
        response = web.StreamResponse(headers={**_HEADERS, **headers})
        await response.prepare(request)
        await response.write(_event(first))
        try:
            async for piece in pieces:
                await response.write(_event(piece))
        except Refused as error:
            await response.write(_event(error_object(str(error), error.status, error.param, error.code)))
        except ConnectionError:
            raise
        except Exception as error:
            LOGGER.exception("this is a bug in tito-audit, not a fault of the request")
            await response.write(_event(error_object(f"the gateway failed: {type(error).__name__}", 500)))
        else:
            await response.write(_DONE)
        await response.write_eof()
        return response


def _event(piece: Any) -> bytes:
    return b"data: " + orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"
