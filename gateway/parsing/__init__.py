"""From the pieces of an answer to semantic events: reasoning, text, tool calls. No I/O.

The dialects are plugins of the kind `parser`; what they are written with is exported by `bien.gateway.api`.
"""
