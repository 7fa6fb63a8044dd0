"""A live target: an OpenAI-style server over HTTP, prompts as token ids, answers as an event stream.

bien's own gateway gets ids as base64 and the recorded continuation forced, except where the workers behind it
are others' servers; these get `prompt` as a list of ids, `max_tokens` and `ignore_eos`, which vLLM and SGLang
take, behind our gateway as without it.
"""

from __future__ import annotations

import base64
import errno
import os

import aiohttp
import msgspec

from bien.core.clock import Clock
from bien.core.errors import ResourceError, UserError
from bien.replay.record import TurnRecord
from bien.replay.target import TargetInfo, TurnRequest
from bien.replay.targets.sse import TokenCounter
from bien.traces.materialize import Materializer

READ_BUFFER = 1 << 20  # a small one stalls long streams
LOOK_SECONDS = 10.0  # for a small answer: models, metrics
FOREIGN_VOCABULARY = 32000  # when a server does not say: smaller than those of current models
WORKER_HEADER = "x-bien-worker"
FORCED = "trace_decode_token_ids"
PREDICTED_HEADER = "x-bien-predicted-cached-tokens"


class _Model(msgspec.Struct):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None
    vocab_size: int | None = None
    refuses: tuple[str, ...] = ()  # bien's: fields that a request may not have, because of who serves it


class _Models(msgspec.Struct):
    data: list[_Model]


class HttpTarget:
    """Made by `connect`, inside the loop that uses it."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: _Model,
        clock: Clock,
        materializer: Materializer,
        info: TargetInfo,
    ) -> None:
        self.info = info
        self.ours = model.owned_by == "bien"
        self._refuses = model.refuses
        self._session = session
        self._url = url + "/v1/completions"
        self._clock = clock
        self._materializer = materializer
        head: dict[str, object] = {
            "model": model.id,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
            "stream_options": {"include_usage": True}
            if self.ours
            else {"include_usage": True, "continuous_usage_stats": True},
        }
        if self.ours:
            head["return_token_ids"] = True
        for field in model.refuses:
            head.pop(field, None)
        self._head = msgspec.json.encode(head)[:-1]

    @classmethod
    async def connect(
        cls,
        url: str,
        clock: Clock,
        *,
        seed: int = 0,
        vocab_size: int | None = None,
        accelerators: int = 1,
        api_key: str | None = None,
        silence: float | None = None,
    ) -> HttpTarget:
        """Ask the server at `url` (with or without /v1) for its model. `silence`: seconds without a word of
        an answer, after which it has failed; None: any.

        Raises:
            ResourceError: nothing answers there, or not in time.
            UserError: what answers is no OpenAI-style server, or serves no model.
        """
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--url is {url!r}; valid: http://host:port", field="url")
        key = api_key or os.environ.get("OPENAI_API_KEY")
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=silence),
            read_bufsize=READ_BUFFER,
            auto_decompress=False,
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )
        try:
            model = await _first_model(session, url)
        except BaseException:
            await session.close()
            raise
        forces = model.owned_by == "bien" and FORCED not in model.refuses
        info = TargetInfo(model.id, model.max_model_len, accelerators, forces)
        vocabulary = vocab_size or model.vocab_size or FOREIGN_VOCABULARY
        return cls(session, url, model, clock, Materializer(vocabulary, seed), info)

    async def generate(self, request: TurnRequest, record: TurnRecord) -> None:
        body = self._body(request)
        headers = {"Content-Type": "application/json", "x-request-id": _plain(request.id)}
        record.sent = self._clock.time()
        try:
            async with self._session.post(self._url, data=body, headers=headers) as response:
                if response.status != 200:
                    record.error = f"HTTP {response.status}: {_reason(await response.read())}"
                    record.overloaded = response.status in (429, 503, 529)
                    return
                record.worker = response.headers.get(WORKER_HEADER, "")
                record.predicted = int(response.headers.get(PREDICTED_HEADER, -1))
                await self._read(response.content, record)
        except aiohttp.SocketTimeoutError:
            record.error = f"the server said nothing for {self._session.timeout.sock_read:g} s"
        except (aiohttp.ClientError, OSError) as error:
            record.error = f"{type(error).__name__}: {error}"

    async def close(self) -> None:
        await self._session.close()

    async def metrics(self) -> str:
        """The server's /metrics page; empty if it has none, or does not give it in time."""
        try:
            url, limit = self._url.removesuffix("/v1/completions"), aiohttp.ClientTimeout(total=LOOK_SECONDS)
            async with self._session.get(f"{url}/metrics", timeout=limit) as response:
                return await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, OSError, UnicodeDecodeError):
            return ""

    async def _read(self, content: aiohttp.StreamReader, record: TurnRecord) -> None:
        counter = TokenCounter()
        clock = self._clock
        while data := await content.readany():
            now = clock.time()
            if count := counter.feed(data):
                record.chunk(now, count)
        if (missing := counter.finish()) > 0:
            record.chunk(record.last if record.got else clock.time(), missing)
        elif missing < 0:
            record.got += missing  # chunks without running counts were not one token each
        record.cached = counter.usage.cached
        found = counter.speculation
        record.drafted, record.accepted, record.rounds = found.drafted, found.accepted, found.rounds
        record.drafts = found.counts
        if counter.error:
            record.error = counter.error
        elif not counter.done:
            record.error = "the stream ended before [DONE]"

    def _body(self, request: TurnRequest) -> bytes:
        prompt = self._materializer.tokens(request.prompt, request.scope)
        if not self.ours:
            ids = msgspec.json.encode(prompt.ids().tolist())
            return b'%b,"max_tokens":%d,"prompt":%b}' % (self._head, len(request.output), ids)
        body = b'%b,"max_tokens":%d,"session_id":%b,"prompt_token_ids_b64":"%b"' % (
            self._head,
            len(request.output),
            msgspec.json.encode(request.session[:256]),
            base64.b64encode(prompt.packed),
        )
        if not self.info.forces_tokens:
            return body + b"}"
        forced = self._materializer.tokens(request.output, request.scope)
        return b'%b,"trace_decode_token_ids_b64":"%b"}' % (body, base64.b64encode(forced.packed))


async def _first_model(session: aiohttp.ClientSession, url: str) -> _Model:
    try:
        limit = aiohttp.ClientTimeout(total=LOOK_SECONDS)
        async with session.get(url + "/v1/models", timeout=limit) as response:
            body = await response.read()
            if response.status != 200:
                raise UserError(f"{url}/v1/models answers {response.status}: {_reason(body)}", field="url")
        models = msgspec.json.decode(body, type=_Models).data
    except aiohttp.InvalidURL:
        raise UserError(f"--url is {url!r}; valid: http://host:port, port 1 to 65535", field="url") from None
    except TimeoutError:
        raise ResourceError(
            f"the server at {url} takes connections and does not answer GET /v1/models within "
            f"{LOOK_SECONDS:g} s; is it hung, or still loading?"
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        number = getattr(error, "errno", None)
        why = "nothing listens there" if number == errno.ECONNREFUSED else str(error) or type(error).__name__
        raise ResourceError(f"no server at {url}: {why}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{url}/v1/models is no OpenAI-style list of models: {error}", field="url") from None
    if not models:
        raise UserError(f"{url} serves no model", field="url")
    return models[0]


def _reason(body: bytes) -> str:
    try:
        error = msgspec.json.decode(body).get("error", {})
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (msgspec.DecodeError, AttributeError):
        return body[:200].decode(errors="replace") or "no reason given"


def _plain(text: str) -> str:
    return "".join(c if "!" <= c <= "~" else "_" for c in text)[:128]
