"""`HttpServer`: one remote engine's HTTP side: what it is, whether it lives, and its answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from bien.core.errors import BienError, OverloadError, ResourceError, UserError
from bien.gateway.remote.answer import error_text, events
from bien.gateway.remote.dialect import Dialect, Readings
from bien.gateway.remote.endpoint import Endpoint
from bien.gateway.remote.load import parse_metrics

CONNECT_SECONDS = 5.0
REFUSALS = (400, 404, 413, 422)
log = logging.getLogger("bien.remote")


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


class Unreachable(Exception):
    """A connection could not be made, or broke."""


class Silent(Exception):
    """An answer has not gone on for too long."""


class HttpServer:
    """Made inside a running loop."""

    def __init__(self, endpoint: Endpoint, dialect: Dialect) -> None:
        import aiohttp  # here: routers that only simulate have no use for it

        self._aiohttp = aiohttp
        self.endpoint = endpoint
        self.dialect = dialect
        self.readings = Readings()
        self._said = ""  # what was wrong with its metrics
        headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers | dialect.headers(endpoint.rank),
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_SECONDS, sock_read=endpoint.silence_seconds
            ),
        )

    async def card(self) -> tuple[str, int]:
        """The model's name there, and its context. ResourceError: not reachable. UserError: no such model."""
        url = self.endpoint.url
        try:
            cards = msgspec.json.decode(await self._get("/v1/models"), type=_Cards).data
        except Unreachable as error:
            raise ResourceError(f"no engine at {url}: {error}") from None
        except msgspec.DecodeError as error:
            raise ResourceError(f"{url}/v1/models is no list of models: {error}") from None
        names = [card.id for card in cards]
        wanted = self.endpoint.served or (names[0] if len(names) == 1 else None)
        card = next((card for card in cards if card.id == wanted), None)
        if card is None:
            said = f"has no model {wanted!r}" if wanted else "has several models, and the pool names none"
            raise UserError(f"{url} {said}; valid: {', '.join(map(repr, names)) or '(none)'}", field="model")
        context = self.endpoint.max_context or card.max_model_len
        if not context:
            raise UserError(
                f"{url} does not say how long its context is; set max_context of the pool's engine",
                field="max_context",
            )
        return card.id, context

    async def healthy(self) -> str:
        """ "" when it is, else why not."""
        try:
            await self._get(self.dialect.health)
        except Unreachable as error:
            return str(error)
        return ""

    async def look(self) -> Readings:
        """What it says of its load; what it said last where it says nothing."""
        if self.dialect.metrics is not None:
            try:
                page = (await self._get(self.dialect.metrics)).decode()
                samples, labels = parse_metrics(page, self.endpoint.rank)
                self.readings = self.dialect.readings(samples, labels)
            except (Unreachable, UnicodeDecodeError):
                pass
            except Exception as error:  # of a dialect, at a page that nobody foresaw
                if (why := _why(error)) != self._said:
                    self._said = why
                    log.warning("the metrics of %s cannot be read", self.endpoint.url, exc_info=error)
        return self.readings

    @asynccontextmanager
    async def ask(self, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[bytes]]:
        """The events of the answer; leaving early closes the connection, which ends the generation there.
        Unreachable or Silent, also while reading; UserError, OverloadError, BienError: it refuses."""
        broken = (self._aiohttp.ClientError, OSError, TimeoutError)
        try:
            # 100,000 token ids: msgspec writes them in a tenth of the time.
            data, headers = msgspec.json.encode(body), {"Content-Type": "application/json"}
            response = await self._session.post(self._url(self.dialect.path), data=data, headers=headers)
        except broken as error:
            raise self._broken(error) from None
        try:
            if response.status != 200:
                raise _refusal(response.status, await response.text())
            yield events(response.content.iter_any())
        except broken as error:
            raise self._broken(error) from None
        finally:
            response.close()

    async def close(self) -> None:
        await self._session.close()

    def _broken(self, error: BaseException) -> Exception:
        if isinstance(error, self._aiohttp.SocketTimeoutError):
            return Silent(f"it said nothing for {self.endpoint.silence_seconds:g} s")
        return Unreachable(_why(error))

    def _url(self, path: str) -> str:
        return self.endpoint.url + path

    async def _get(self, path: str) -> bytes:
        try:
            async with (
                asyncio.timeout(self.endpoint.look_seconds),
                self._session.get(self._url(path)) as response,
            ):
                if response.status != 200:
                    raise Unreachable(f"GET {path} answers {response.status}")
                return await response.read()
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"GET {path}: {_why(error)}") from None


def _refusal(status: int, text: str) -> BienError:
    try:
        text = error_text(msgspec.json.decode(text))
    except msgspec.DecodeError:
        text = text[:2000]
    if status in REFUSALS:
        return UserError(f"the engine refuses this request: {text}")
    if status in (429, 503):
        return OverloadError(f"the engine is overloaded: {text}")
    return BienError(f"the engine answers {status}: {text}")


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__
