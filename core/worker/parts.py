"""Large prompts in parts: sent round robin between other frames, put together on arrival."""

from __future__ import annotations

from collections import deque

import msgspec

from bien.core.errors import UserError
from bien.core.request import GenerateRequest, Prompt, TokenIds
from bien.core.worker.messages import PART_BYTES, PromptPart, Submit
from bien.core.worker.wire import WireError

MAX_PROMPT_BYTES = 256 << 20


def split(rid: int, request: GenerateRequest) -> tuple[Submit, bytes]:
    """The Submit of a request, and the prompt bytes that must follow it in parts (b"": none)."""
    packed = request.prompt.packed
    if len(packed) <= PART_BYTES:
        return Submit(rid, request), b""
    # The emptied prompt still says of which type it is, and how long.
    rest = msgspec.structs.replace(request, prompt=msgspec.structs.replace(request.prompt, packed=b""))
    return Submit(rid, rest, len(packed)), packed


class PartQueue:
    """Unsent prompt bytes per rid. `pop` takes one part of each in turn."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, bytes, int]] = deque()  # rid, packed prompt, bytes sent

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, rid: int, packed: bytes) -> None:
        self._queue.append((rid, packed, 0))

    def drop(self, rid: int) -> None:
        if self._queue:
            self._queue = deque(entry for entry in self._queue if entry[0] != rid)

    def pop(self) -> PromptPart:
        """The next part. IndexError when there is none."""
        rid, packed, sent = self._queue.popleft()
        if sent + PART_BYTES < len(packed):
            self._queue.append((rid, packed, sent + PART_BYTES))
        return PromptPart(rid, packed[sent : sent + PART_BYTES])


class Assembler:
    """Requests whose prompts are still arriving, of one connection."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Submit, bytearray]] = {}

    def __contains__(self, rid: int) -> bool:
        return rid in self._open

    def start(self, submit: Submit) -> None:
        """Expect `submit.prompt_bytes` bytes. WireError when nobody could mean that many."""
        if not 0 < submit.prompt_bytes <= MAX_PROMPT_BYTES:
            raise WireError(f"a prompt of {submit.prompt_bytes} bytes; valid: 1 to {MAX_PROMPT_BYTES}")
        self._open[submit.rid] = (submit, bytearray())

    def drop(self, rid: int) -> None:
        self._open.pop(rid, None)

    def add(self, part: PromptPart) -> GenerateRequest | None:
        """The request when this was its last part. Parts of unknown (aborted) rids are ignored."""
        entry = self._open.get(part.rid)
        if entry is None:
            return None
        submit, data = entry
        data += part.data
        if len(data) > submit.prompt_bytes:
            raise WireError(f"rid {part.rid}: more prompt bytes than the {submit.prompt_bytes} announced")
        if len(data) < submit.prompt_bytes:
            return None
        del self._open[part.rid]
        prompt: Prompt = msgspec.structs.replace(submit.request.prompt, packed=bytes(data))
        return msgspec.structs.replace(submit.request, prompt=prompt)


def check_packing(prompt: Prompt) -> None:
    """UserError unless the bytes are whole ids or runs."""
    width = 4 if isinstance(prompt, TokenIds) else 16
    if len(prompt.packed) % width:
        raise UserError(f"prompt of {len(prompt.packed)} bytes; valid: multiples of {width}", field="prompt")
