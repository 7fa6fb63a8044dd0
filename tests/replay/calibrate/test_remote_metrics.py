"""Pages of metrics, as the two engines write them."""

from __future__ import annotations

import pytest

from bien.core.errors import UserError
from bien.replay.calibrate.metrics import Sum, read_state

VLLM = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 14052.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/models/a b"} 3.0
vllm:num_requests_waiting{engine="0",model_name="/models/a b"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.796e+09
vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 256.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 999.0
vllm:generation_tokens_total{engine="0",model_name="m"} 40.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 5.0
vllm:num_preemptions_total{engine="0",model_name="m"} 0.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 4.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 33.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 0.66
"""
SGLANG = """\
# TYPE sglang:cached_tokens_total counter
# TYPE sglang:num_requests_total counter
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 2.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 0.0
sglang:max_total_num_tokens{model_name="m"} 5000.0
sglang:prompt_tokens_total{is_streaming="true",model_name="m"} 10.0
sglang:prompt_tokens_total{is_streaming="false",model_name="m"} 5.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 0.5
sglang:time_to_first_token_seconds_count{model_name="m"} 2.0
"""
BLOCKS = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0\n'
SIZE = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="1200"} 1.0\n'


def test_vllm() -> None:
    state = read_state(VLLM)
    assert state is not None and state.engine == "vllm" and state.live and state.engines == 1
    assert (state.running, state.waiting, state.prompt_tokens, state.output_tokens) == (3, 1, 1500, 40)
    assert (state.requests, state.cached_tokens, state.preemptions) == (7, 256, 0)
    assert state.gaps == Sum(0.66, 33) and state.gaps.mean == pytest.approx(0.02)
    assert state.drafts is None and state.first is None and state.cache is None


def test_room_of_vllm() -> None:
    for line, tokens in ((BLOCKS, 1600), (SIZE, 1200), (BLOCKS.replace("100", "None"), None)):
        state = read_state(VLLM + line)
        assert state is not None and state.cache == tokens


def test_engines_are_told_apart_and_added_up() -> None:
    state = read_state(VLLM + VLLM.replace('engine="0"', 'engine="1"'))
    assert state is not None and state.engines == 2 and state.running == 6 and state.gaps == Sum(1.32, 66)


def test_sglang() -> None:
    state = read_state(SGLANG)
    assert state is not None and state.engine == "sglang" and not state.live
    assert (state.running, state.prompt_tokens, state.cache) == (2, 15, 5000)
    # Declared, and nothing counted so far; or not known at all.
    assert (state.requests, state.cached_tokens, state.output_tokens) == (0, 0, None)
    assert state.first == Sum(0.5, 2)


@pytest.mark.parametrize("page", ["", "<html>not found</html>", "bien_worker_busy_seconds 3.0\n"])
def test_other_pages_say_nothing(page: str) -> None:
    assert read_state(page) is None


@pytest.mark.parametrize("line", ["vllm:num_requests_running{engine= 3", "vllm:prompt_tokens_total many"])
def test_a_page_that_cannot_be_read_is_refused(line: str) -> None:
    with pytest.raises(UserError, match="metrics page cannot be read"):
        read_state(VLLM + line + "\n")


def test_a_mean_of_nothing() -> None:
    assert Sum(0.0, 0).mean is None
    assert Sum(3.0, 5).since(Sum(1.0, 4)) == Sum(2.0, 1)
