"""Records what vLLM's and SGLang's own publishers put on the wire for a small made-up history.

    python publisher.py KV_EVENTS.PY NAME "vllm 0.25.1" [--whole-maps] > NAME.json

KV_EVENTS.PY is that project's module (`vllm/distributed/kv_events.py`,
`sglang/srt/disaggregation/kv_events.py`), out of a wheel; it is run as it is, with stand-ins for what it
imports of its project, so that neither has to be installed. Needs msgspec, pyzmq and pydantic. What is
written is data that we made: token ids and hashes below, framed by their code. `--whole-maps`: with the
batch a map too, as vLLM has it between releases (commit 0181ea3 drops `array_like` of `EventBatch`, which is
all that the option changes).
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import zmq

BLOCK = 4
SALT = "salt-of-alice"


class _Any:
    """Whatever a project's own module would give."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and not isinstance(args[0], str) else _Any()

    def __getattr__(self, name: str) -> Any:
        return _Any()


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ("vllm", "sglang"):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)
        kinds = {"ExternalBlockHash": bytes | int, "KVEventsConfig": _Any}

        def give(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return kinds.get(name, _Any())

        module.__getattr__ = give  # type: ignore[method-assign]
        return module

    def exec_module(self, module: Any) -> None:
        pass


def load(path: str, whole_maps: bool) -> Any:
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]
    source = Path(path).read_text()
    if whole_maps:
        source = source.replace("array_like=True,", "", 1)
    module = sys.modules["kv_events"] = types.ModuleType("kv_events")
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def history(m: Any, ints: bool) -> list[tuple[list[Any], str]]:
    """Batches, and what happens in each."""

    def name(n: int) -> Any:
        return 7_000_000_000 + n if ints else bytes([n]) * 32

    def stored(hashes: list[int], parent: int | None, first: int, **more: Any) -> Any:
        fields = {
            "block_hashes": [name(n) for n in hashes],
            "parent_block_hash": None if parent is None else name(parent),
            "token_ids": list(range(first, first + BLOCK * len(hashes))),
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            **more,
        }
        known = m.BlockStored.__struct_fields__
        return m.BlockStored(**{key: value for key, value in fields.items() if key in known})

    def removed(hashes: list[int], medium: str = "GPU") -> Any:
        fields = {"block_hashes": [name(n) for n in hashes], "medium": medium}
        known = m.BlockRemoved.__struct_fields__
        return m.BlockRemoved(**{key: value for key, value in fields.items() if key in known})

    def salted(hashes: list[int], first: int) -> Any:
        known = m.BlockStored.__struct_fields__
        if "cache_salt" in known:
            return stored(hashes, None, first, cache_salt=SALT)
        if "extra_keys" in known:
            return stored(hashes, None, first, extra_keys=[(SALT,), *[None] * (len(hashes) - 1)])
        return None

    steps = [
        ([stored([1, 2, 3], None, 100)], "three blocks of tokens 100 to 111"),
        (
            [stored([4], 3, 112), stored([5, 6], 2, 500)],
            "a fourth; behind the second a branch: 500 to 507",
        ),
        ([salted([7, 8], 100)], "tokens 100 to 107 with a salt"),
        ([stored([9], None, 900, lora_id=3, lora_name="an adapter")], "tokens 900 to 903 with an adapter"),
        ([removed([4]), removed([6])], "the fourth and the branch's second are gone"),
        (
            [stored([10], None, 300), m.AllBlocksCleared(), stored([11], None, 100)],
            "all cleared, 100 to 103",
        ),
    ]
    return [(events, what) for events, what in steps if events[0] is not None]


def record(module: Any, name: str, source: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        events, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        context = zmq.Context()
        sub = context.socket(zmq.SUB)
        sub.subscribe(b"")
        publisher = module.ZmqEventPublisher(0, endpoint=events, replay_endpoint=replay, topic="kv@here")
        sub.connect(events)
        sub.poll(300)  # until the subscription has reached it
        frames = []
        for batch, _ in history(module, ints="sglang" in source):
            publisher.publish(module.KVEventBatch(ts=1700000000.5, events=batch))
            frames.append(sub.recv_multipart())
        asked = context.socket(zmq.DEALER)
        asked.connect(replay)
        asked.send_multipart([b"", (2).to_bytes(8, "big")])
        replayed = []
        while not replayed or replayed[-1][-1] != b"":
            replayed.append(asked.recv_multipart())
        publisher.shutdown()
        context.destroy(linger=0)
    return {
        "name": name,
        "made_by": source,
        "what": [what for _, what in history(module, ints=False)],
        "frames": [[part.hex() for part in frame] for frame in frames],
        "replayed_from_2": [[part.hex() for part in frame] for frame in replayed],
    }


if __name__ == "__main__":
    json.dump(record(load(sys.argv[1], "--whole-maps" in sys.argv), *sys.argv[2:4]), sys.stdout, indent=1)
    print()
