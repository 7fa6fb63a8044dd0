"""Real texts as sessions of turns, for benchmarks of drafters: SWE-agent trajectories, source code."""

from __future__ import annotations

import json
import lzma
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from bien.core.text.model import TextModel


@dataclass(slots=True)
class Turn:
    prompt: list[int]
    answer: list[int]  # as it was recorded


Session = list[Turn]


def trajectories(folder: Path, text: TextModel, window: int, most: int) -> list[Session]:
    """Sessions of the folder's `*.traj.xz` (SWE-agent): each assistant message is an answer to all before it.
    Turns that do not fit into `window` tokens are left out, answers cut to `most`."""
    sessions = []
    for path in sorted(folder.glob("*.traj.xz")):
        history = json.loads(lzma.decompress(path.read_bytes()))["history"]
        messages: list[dict[str, str]] = []
        session: Session = []
        for entry in history:
            said = entry["content"] if isinstance(entry["content"], str) else json.dumps(entry["content"])
            role = entry["role"] if entry["role"] in ("system", "assistant") else "user"
            if role == "assistant" and messages:
                prompt = list(text.encode_chat(messages).ids())
                answer = list(text.encode_text(said).ids())[:most]
                if len(prompt) + len(answer) > window:
                    break
                if len(answer) >= 16:
                    session.append(Turn(prompt, answer))
            messages.append({"role": role, "content": said})
        if session:
            sessions.append(session)
    return sessions


def sources(text: TextModel, window: int, most: int, count: int, turns: int = 8) -> list[Session]:
    """Files of Python's standard library, read on and on: each turn continues what came before it."""
    sessions = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids = list(text.encode_text(path.read_text("utf-8", "replace")).ids())
        first = 1000
        if len(ids) < first + turns * 2 * most:
            continue
        ends = [first + i * 2 * most for i in range(turns)]
        sessions.append([Turn(ids[:e], ids[e : e + most]) for e in ends if e + most <= window])
        if len(sessions) == count:
            break
    return sessions
