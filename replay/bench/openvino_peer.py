"""OpenVINO GenAI behind pipes, run by `bien.replay.bench.peers` with the Python of another environment.

Standard input: one JSON line [prompts as token ids, tokens to generate] per run; standard output: one line
[seconds to the first token, seconds to the last, tokens made]. Imports nothing of bien.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

KV_GIB = 3
BATCH_TOKENS, SEQUENCES = 512, 64


def main() -> None:
    import numpy

    # Installed in the other environment only.
    openvino, genai = import_module("openvino"), import_module("openvino_genai")
    folder, threads = sys.argv[1], int(sys.argv[2])
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = KV_GIB
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = BATCH_TOKENS, SEQUENCES
    scheduler.dynamic_split_fuse = True
    pipe = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def run(prompts: list[list[int]], count: int) -> list[float]:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos, config.do_sample = True, False
        begin = time.perf_counter()
        handles: list[Any] = [
            pipe.add_request(i, openvino.Tensor(numpy.array([p], dtype=numpy.int64)), config)
            for i, p in enumerate(prompts)
        ]
        first, last, made = 0.0, 0.0, 0
        while pipe.has_non_finished_requests():
            pipe.step()
            now = time.perf_counter() - begin
            for handle in handles:
                if handle.can_read():
                    made += sum(len(out.generated_ids) for out in handle.read().values())
                    first, last = first or now, now
        return [first, last, made]

    print("[]", flush=True)
    for line in sys.stdin:
        prompts, count = json.loads(line)
        print(json.dumps(run(prompts, count)), flush=True)


if __name__ == "__main__":
    main()
