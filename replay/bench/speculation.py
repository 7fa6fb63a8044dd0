"""Host drafters on real agents' text: acceptance, and decode speed against none, in CPU time.

python -m bien.replay.bench.speculation [FOLDER] [--running 1,4,16] [--pairs 7] [--length budget]
    [--arms none,prompt-lookup,suffix] [--quantizer int8] [--threads 1] [--most 64]
    [--window 8000] [--own] [--json F]
python -m bien.replay.bench.speculation [FOLDER] --growth

FOLDER holds SWE-agent trajectories (*.traj.xz); without it, files of Python's standard library are continued.
Answers are the recorded ones (the model computes every position, its tokens are replaced); `--own`: the
model's own, greedy. Every pair is one turn of each running session on every arm, the arms in changing order;
only steps after the last first token count. `--growth`: what the suffix drafter's state costs per new token
and per turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from bien.core.build import BuiltWorker
from bien.core.deployment import ModelSpec, PoolSpec, Selection
from bien.core.models.fetch import resolve_model
from bien.core.plugins import PluginManager
from bien.core.providers import Context
from bien.core.request import GenerateRequest, SamplingParams, TokenIds
from bien.core.speculation.draft import Scope
from bien.core.speculation.options import SpeculationSpec
from bien.core.text.model import TextModel
from bien.replay.bench.agent_texts import Session, Turn, sources, trajectories


@dataclass(slots=True)
class Round:
    """One turn of all running sessions on one arm."""

    tokens: int = 0  # after the first of each
    cpu: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.cpu


@dataclass(slots=True)
class Arm:
    name: str
    worker: BuiltWorker
    rounds: list[Round] = field(default_factory=list)
    count: int = 0

    def run(self, turns: Sequence[tuple[str, Turn]], *, forced: bool) -> Round:
        """Submit the turns (session, turn) together and step until all have ended."""
        engine, executor = self.worker.engine, self.worker.executor
        waiting: dict[str, int] = {}
        for session, turn in turns:
            self.count += 1
            answer = TokenIds.of(turn.answer)
            sampling = SamplingParams(len(turn.answer), temperature=0.0, ignore_eos=True, seed=0)
            request = GenerateRequest(
                f"{self.count}", TokenIds.of(turn.prompt), sampling, "tenant", session, forced=answer
            )
            engine.submit(request if forced else msgspec.structs.replace(request, forced=None))
            waiting[request.id] = 0
        done = Round()
        begun: set[str] = set()
        while engine.busy:
            since = time.process_time()
            plan = engine.begin()
            assert plan is not None
            report = engine.finish(executor.sample(executor.forward(plan)).result())
            took = time.process_time() - since
            if len(begun) == len(waiting):
                done.cpu += took
                done.tokens += sum(o.count for o in report.outputs)
            for out in report.outputs:
                if out.count:
                    begun.add(out.id)
                if out.finish:
                    done.rounds += out.rounds
                    done.drafted += out.drafted
                    done.accepted += out.accepted
        return done


def make_arm(name: str, model: str, args: argparse.Namespace) -> Arm:
    from bien.replay.bench.stack import build

    parameters: dict[str, Any] = {"scope": "session"} if name == "suffix" else {}
    pool = PoolSpec(
        kv_tokens=max(map(int, args.running.split(","))) * (args.window + args.most),
        slots=16,
        threads=args.threads,
        quantizer=Selection(args.quantizer),
        kernels=Selection("auto"),
        scheduler=Selection("fcfs", {"token_budget": 1024}),
        speculator=None if name == "none" else Selection(name, parameters),
        speculation=SpeculationSpec(length=args.length),
    )
    return Arm(name, build(ModelSpec(model), pool))


def compare(sessions: list[Session], args: argparse.Namespace) -> list[dict[str, Any]]:
    arms = [make_arm(name, args.model, args) for name in args.arms.split(",")]
    table = []
    for running in map(int, args.running.split(",")):
        for arm in arms:
            arm.rounds.clear()
        for pair in range(args.pairs):
            turns = []
            for i in range(running):
                session = sessions[i % len(sessions)]
                again = f"{running}/{i}/{pair // len(session)}"  # a session read again is another one
                turns.append((again, session[pair % len(session)]))
            for arm in arms[pair % len(arms) :] + arms[: pair % len(arms)]:
                arm.rounds.append(arm.run(turns, forced=not args.own))
                where = f"{running} running, pair {pair + 1}/{args.pairs}, {arm.name}"
                print(f"\r{where:60}", end="", file=sys.stderr)
        print(file=sys.stderr)
        for arm in arms:
            table.append(row(arm, arms[0], running))
            print(line(table[-1]), flush=True)
    return table


def row(arm: Arm, base: Arm, running: int) -> dict[str, Any]:
    ratios = sorted(a.speed / b.speed for a, b in zip(arm.rounds, base.rounds, strict=True))
    rounds = sum(r.rounds for r in arm.rounds)
    return {
        "running": running,
        "arm": arm.name,
        "acceptance_length": round(1 + sum(r.accepted for r in arm.rounds) / rounds, 3) if rounds else 1.0,
        "drafted_per_round": round(sum(r.drafted for r in arm.rounds) / rounds, 2) if rounds else 0.0,
        "tokens_per_cpu_s": round(sum(r.tokens for r in arm.rounds) / sum(r.cpu for r in arm.rounds), 2),
        "speed_x": round(statistics.median(ratios), 3),
        "speed_x_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        "pairs": len(ratios),
    }


def line(found: dict[str, Any]) -> str:
    low, high = found["speed_x_range"]
    return (
        f"{found['running']:3} running  {found['arm']:14} acceptance length "
        f"{found['acceptance_length']:.2f}, "
        f"drafted {found['drafted_per_round']:.1f}, {found['tokens_per_cpu_s']:.1f} tokens/s of CPU, "
        f"{found['speed_x']:.2f}x of {found['pairs']} pairs ({low:.2f} to {high:.2f})"
    )


def growth(sessions: list[Session]) -> dict[str, Any]:
    """CPU of the suffix drafter's state alone: sessions turn by turn, then a long turn again with a tail."""
    found = PluginManager.load().find("speculator", "suffix").provider
    drafter = found.factory(found.config_type(), Context())
    cpu, new = 0.0, 0
    for i, session in enumerate(sessions):
        known = 0
        for turn in session:
            ids = TokenIds.of(turn.prompt).ids()
            since = time.process_time()
            drafter.start("a", ids, Scope("tenant", f"s{i}"))
            for token in turn.answer:
                drafter.extend("a", [token])
            drafter.end("a")
            cpu += time.process_time() - since
            new += len(turn.prompt) + len(turn.answer) - known
            known = len(turn.prompt) + len(turn.answer)
    tokens, size = drafter.size()
    long = max((t.prompt for s in sessions for t in s), key=len)
    long = (long * (8192 // len(long) + 1))[:8192]
    times: dict[int, list[float]] = {8192: [], 64: []}
    for i in range(15):
        for tail in times:
            fresh = [(i * 7919 + j) % 49000 for j in range(64)]
            prompt = TokenIds.of([i % 40000] * (tail > 64) + long + fresh * (tail == 64)).ids()
            since = time.process_time()
            drafter.start("b", prompt, Scope("tenant", f"long{i if tail > 64 else 0}"))
            times[tail].append(time.process_time() - since)
            drafter.end("b")
    return {
        "new_tokens": new,
        "us_per_new_token": round(cpu / new * 1e6, 3),
        "bytes_per_token": round(size / tokens, 1),
        "us_turn_of_8192_all_new": round(statistics.median(times[8192]) * 1e6),
        "us_turn_of_8192_with_64_new": round(statistics.median(times[64]) * 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--running", default="1,4,16")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--arms", default="none,prompt-lookup,suffix")
    parser.add_argument("--length", default="budget")
    parser.add_argument("--quantizer", default="int8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--window", type=int, default=8000)  # tokens of a prompt and its answer
    parser.add_argument("--most", type=int, default=64)  # tokens of an answer
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = TextModel.load(resolve_model(args.model))
    folder: Path | None = args.folder
    window, most = args.window, args.most
    sessions = trajectories(folder, text, window, most) if folder else sources(text, window, most, 16)
    if not sessions:
        parser.error(f"{args.folder}: no session of *.traj.xz files fits into {args.window} tokens")
    if args.growth:
        found: Any = growth(sessions)
        print(json.dumps(found))
    else:
        found = compare(sessions, args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
