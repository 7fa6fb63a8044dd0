"""`Prompts`: from what a client asked for to the `GenerateRequest` that a worker gets."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from bien.core.deployment import VOLATILE_LINES
from bien.core.errors import ContextLengthError, UserError
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.text.marks import NO_MARKS
from bien.core.text.model import TextModel
from bien.core.text.output import OutputText
from bien.core.worker.threads import in_thread
from bien.gateway.checks import MAX_SCORED_TOKENS
from bien.gateway.notes import Notes
from bien.gateway.parsing.dialects import Dialect
from bien.gateway.parsing.reply import Reply
from bien.gateway.parsing.tools import Tools
from bien.gateway.protocols.ask import Ask, Chat
from bien.gateway.rewrites import Rewrites
from bien.gateway.volatile import VolatileLines

_TAIL = 16  # prompt tokens that the output's detokeniser looks back at


class Prompts:
    """Tokenises off the event loop and holds the model's limits against the request."""

    def __init__(
        self,
        text: TextModel,
        *,
        max_context: int,
        vocab_size: int | None = None,
        dialect: Dialect | None = None,
        volatile_lines: Iterable[str] = VOLATILE_LINES,
    ) -> None:
        """`dialect`: reads answers to conversations; None: they are text. `volatile_lines`: patterns of what
        is taken out of system prompts."""
        self._volatile = VolatileLines(volatile_lines)
        self._rewrites = Rewrites()
        self.text = text
        self._dialect = dialect
        self.max_context = max_context
        self.vocab_size = vocab_size or text.tokenizer.vocab_size

    async def request(
        self, ask: Ask, id: str, *, tenant: str = "", session: str = "", traceparent: str = ""
    ) -> GenerateRequest:
        """UserError for ids outside the vocabulary or an empty prompt, ContextLengthError if prompt and
        output do not fit. Take an admission slot first: this may cost a second of tokenising."""
        prompt = await self.encode(ask, tenant=tenant, answered=True)
        if ask.forced is not None:
            self._check_ids("trace_decode_token_ids", ask.forced)
        for token in ask.stop_token_ids:
            if token >= self.vocab_size:
                raise UserError(
                    f"stop_token_ids holds {token}; valid: 0..{self.vocab_size - 1}", field="stop_token_ids"
                )
        for token, _ in ask.logit_bias[-1:]:  # they are in order
            if token >= self.vocab_size:
                raise UserError(
                    f"logit_bias holds {token}; valid: 0..{self.vocab_size - 1}", field="logit_bias"
                )
        sampling = SamplingParams(
            max_tokens=self._max_tokens(ask, len(prompt)),
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            seed=ask.seed,
            stop_token_ids=ask.stop_token_ids,
            ignore_eos=ask.ignore_eos,
            min_tokens=ask.min_tokens,
            min_p=ask.min_p,
            presence_penalty=ask.presence_penalty,
            frequency_penalty=ask.frequency_penalty,
            repetition_penalty=ask.repetition_penalty,
            logit_bias=ask.logit_bias,
            logprobs=-1 if ask.logprobs is None else ask.logprobs,
            prompt_logprobs=self._scored(ask, len(prompt)),
            speculate=ask.speculate,
            max_drafts=ask.max_drafts,
        )
        return GenerateRequest(
            id=id,
            prompt=prompt,
            sampling=sampling,
            tenant=tenant,
            session=session,
            forced=ask.forced,
            priority=ask.priority,
            salt=ask.salt,
            traceparent=traceparent,
            prediction=await self._predicted(ask),
        )

    def output(self, ask: Ask, prompt: TokenIds) -> OutputText:
        """The text of the answer to `prompt`."""
        marks = self._dialect.marks if self._dialect and isinstance(ask.prompt, Chat) else NO_MARKS
        return self.text.output(_tail(prompt), ask.stops, ask.min_tokens, marks)

    def reply(self, ask: Ask, prompt: TokenIds) -> Reply | None:
        """Reads what `output` gives; None: it is text, and nothing else."""
        chat = ask.prompt
        if self._dialect is None or not isinstance(chat, Chat):
            return None
        tools = Tools(chat.tools or () if chat.calling.choice != "none" else ())
        return self._dialect.reply(_tail(prompt), tools, parallel=chat.calling.parallel)

    async def echo(self, ask: Ask, prompt: TokenIds) -> str:
        """The prompt as its client wrote it, or the text of its ids."""
        if isinstance(ask.prompt, str):
            return ask.prompt
        return await in_thread(self.text.tokenizer.decode, prompt.ids())

    async def encode(
        self, ask: Ask, field: str = "prompt", *, tenant: str = "", answered: bool = False
    ) -> TokenIds:
        """The prompt's ids, whatever it is; `field` is what the client calls it. UserError for ids
        outside the vocabulary, or what the template refuses. Take an admission slot first.

        A conversation's new turn costs its tail only, if `tenant` and salt are those of the turn before.
        `answered`: it gets an answer, so that the next turn can be held against both."""
        if isinstance(ask.prompt, TokenIds):
            self._check_ids(field, ask.prompt)
            return ask.prompt
        if isinstance(ask.prompt, str):
            return await in_thread(self.text.encode_text, ask.prompt)
        try:
            owner = f"{tenant}\0{ask.salt}"
            return await in_thread(self._encode_conversation, ask.prompt, ask.notes, owner, answered)
        except RecursionError as error:
            raise UserError(
                "tools, arguments of calls or chat_template_kwargs nest too deep; valid: at most 100 levels",
                field="messages",
            ) from error

    async def _predicted(self, ask: Ask) -> TokenIds | None:
        if not ask.prediction or not ask.speculate:
            return None
        ids = await in_thread(self.text.tokenizer.encode, ask.prediction)
        return ids.slice(0, self.max_context)

    def answered(self, ask: Ask, answer: bytes) -> None:
        """The conversation has its answer: the ids that are text of it, uint32-LE."""
        if ask.notes.turn is not None:
            self._rewrites.end(ask.notes.turn, answer)

    def _encode_conversation(self, chat: Chat, notes: Notes, owner: str, answered: bool) -> TokenIds:
        messages = chat.messages
        if chat.leads:
            messages, notes.removed = self._volatile.without(messages)
        known = self.text.template.variables if self.text.template else frozenset()
        variables = {**chat.thinking.variables(known), **chat.template_kwargs}
        prompt = self._encode_chat(chat, messages, variables, owner)
        if answered:
            told = [chat.tools, variables]
            notes.turn, notes.rewrite = self._rewrites.begin(owner, told, messages, prompt)
        return prompt

    def _encode_chat(
        self, chat: Chat, messages: list[dict[str, Any]], variables: dict[str, Any], owner: str
    ) -> TokenIds:
        template = self.text.template
        known = template.variables if template else ()
        tools = chat.tools
        if self._dialect is not None and "tools" not in known:
            messages, tools = self._dialect.spell(messages, tools)
        if tools and (self._dialect is None or not self._dialect.calls or "tools" not in known):
            raise UserError(
                "tools is not served by this model: its chat template knows none, or gateway.parser reads "
                "none; valid: [], null",
                field="tools",
            )
        if chat.tools:
            messages = chat.calling.told(messages)
        try:
            return self.text.encode_chat(messages, variables, tools, owner)
        except UserError:
            if not chat.bends or not any(m["role"] == "system" for m in messages[1:]):
                raise
        # Many templates take a system message at the beginning only.
        return self.text.encode_chat([*messages[:1], *map(_reminder, messages[1:])], variables, tools, owner)

    def _scored(self, ask: Ask, prompt_tokens: int) -> int:
        top = ask.scored
        if top is None:
            return -1
        if prompt_tokens * ask.n > MAX_SCORED_TOKENS:
            field = "echo" if ask.prompt_logprobs is None else "prompt_logprobs"
            what = f"{field} with logprobs" if field == "echo" else field
            times = f" for {ask.n} choices" if ask.n > 1 else ""
            raise UserError(
                f"{what} of a prompt of {prompt_tokens} tokens{times}; "
                f"valid: prompts of at most {MAX_SCORED_TOKENS // ask.n} tokens",
                field=field,
            )
        return top

    def _check_ids(self, name: str, ids: TokenIds) -> None:
        values = np.frombuffer(ids.packed, dtype="<u4")
        if len(values) and values.max() >= self.vocab_size:
            at = int(np.argmax(values >= self.vocab_size))
            raise UserError(
                f"{name}[{at}] is {values[at]}; valid: token ids 0..{self.vocab_size - 1}", field=name
            )

    def _max_tokens(self, ask: Ask, prompt_tokens: int) -> int:
        field = "messages" if isinstance(ask.prompt, Chat) else "prompt"
        if not prompt_tokens:
            raise UserError("the prompt is empty; valid: at least one token", field=field)
        room = self.max_context - prompt_tokens
        if room < 1:
            raise ContextLengthError(
                f"this model's maximum context length is {self.max_context} tokens and the prompt has "
                f"{prompt_tokens}; valid: at most {self.max_context - 1}",
                field=field,
                tokens=prompt_tokens,
                most=self.max_context - 1,
            )
        if ask.max_tokens is None:
            return room
        if not ask.max_tokens:  # a worker always draws a token; nobody is given it
            return 1
        if ask.max_tokens > room and ask.shorten:
            return room
        if ask.max_tokens > room:
            raise ContextLengthError(
                f"this model's maximum context length is {self.max_context} tokens; the prompt has "
                f"{prompt_tokens} and max_tokens={ask.max_tokens} asks for more than fits; "
                f"valid: at most {room}",
                field="max_tokens",
            )
        return ask.max_tokens


def _tail(prompt: TokenIds) -> array[int]:
    return prompt.slice(max(0, len(prompt) - _TAIL), len(prompt)).ids()


def _reminder(message: dict[str, Any]) -> dict[str, Any]:
    """A system message as its client's user would say it."""
    if message["role"] != "system":
        return message
    return {"role": "user", "content": f"<system-reminder>\n{message['content']}\n</system-reminder>"}
