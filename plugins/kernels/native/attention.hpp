// What paged attention is told of a step.
#pragma once
#include "common.hpp"

// What all layers of a step share; mirrored by native/attention.py.
struct Step {
    const int32_t *table;   // [sequences, blocks]
    const int32_t *starts;  // [sequences] first position computed
    const int32_t *counts;  // [sequences]
    const int64_t *offsets; // [sequences + 1] first flat token
    const int32_t *rows;    // [tasks] sequence of a piece
    const int32_t *firsts;  // [tasks] first key position of a piece
    const int64_t *places;  // [tasks] where its partial results begin, in queries
    int64_t tasks, blocks, block_tokens, queries;  // queries: partial results of all pieces
    int64_t kv_heads, share, d, window;
    const int32_t *longs;   // [longs] sequences that compute many tokens
    int64_t long_rows;
    float scale;
};
