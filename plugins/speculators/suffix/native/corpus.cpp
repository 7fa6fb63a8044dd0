#include "corpus.hpp"

#include <algorithm>
#include <cstring>

namespace suffix {

namespace {

constexpr uint64_t BASE = 0x9E3779B97F4A7C15ull;  // odd

struct Powers {
    uint64_t of[LEVELS];  // BASE^n: what the oldest token of an n-gram has been multiplied by
    Powers() {
        for (int level = 0; level < LEVELS; level++) {
            of[level] = 1;
            for (int64_t i = 0; i < LENGTHS[level]; i++) of[level] *= BASE;
        }
    }
};
const Powers POWERS;

size_t place(uint64_t hash, int64_t mask) {
    hash ^= hash >> 31;
    hash *= 0xBF58476D1CE4E5B9ull;
    hash ^= hash >> 29;
    return size_t(hash & uint64_t(mask));
}

}  // namespace

uint64_t hash_of(const uint32_t* tokens, int64_t n) {
    uint64_t hash = 0;
    for (int64_t i = 0; i < n; i++) hash = (hash + tokens[i] + 1) * BASE;
    return hash;
}

Corpus::Corpus(int64_t limit) : limit(limit), capacity(SMALLEST), mask(SMALLEST - 1) {
    ring.assign(capacity, BREAK);
    for (int level = 0; level < LEVELS; level++) {
        heads[level].assign(capacity, 0);
        links[level].assign(capacity, 0);
        rolling[level] = 0;
    }
}

int64_t Corpus::append(const uint32_t* tokens, int64_t count, bool fresh, int64_t repeated) {
    if (fresh && end > text) {
        put(BREAK);
        text = end;
        for (int level = 0; level < LEVELS; level++) rolling[level] = 0;
    }
    int64_t first = end;
    for (int64_t i = 0; i < count; i++) put(i < repeated ? tokens[i] | REPEATED : tokens[i]);
    return first;
}

int64_t Corpus::equal(int64_t position, const uint32_t* tokens, int64_t count) const {
    if (position < begin() || position > end) return -1;
    int64_t most = std::min(count, end - position), same = 0;
    while (same < most) {
        int64_t from = (position + same) & mask;
        int64_t part = std::min(most - same, capacity - from);
        const uint32_t* there = ring.data() + from;
        const uint32_t* here = tokens + same;
        if (std::memcmp(there, here, size_t(part) * 4) == 0) {
            same += part;
            continue;
        }
        for (int64_t i = 0; i < part; i++)
            if (there[i] != here[i]) return same + i;
    }
    return same;
}

void Corpus::put(uint32_t token) {
    if (end >= capacity && capacity < limit) grow();
    int64_t position = end++;
    ring[position & mask] = token;
    for (int level = 0; level < LEVELS; level++) links[level][position & mask] = 0;
    if (token == BREAK) return;
    if (token & REPEATED) token &= ~REPEATED;
    else enter(position);
    for (int level = 0; level < LEVELS; level++) {
        int64_t n = LENGTHS[level];
        uint64_t hash = (rolling[level] + token + 1) * BASE;
        // The ring still holds what leaves the n-gram: it is longer than any of them.
        if (position - text >= n) hash -= (uint64_t(at(position - n)) + 1) * POWERS.of[level] * BASE;
        rolling[level] = hash;
    }
}

void Corpus::enter(int64_t position) {
    for (int level = 0; level < LEVELS; level++) {
        if (position - text < LENGTHS[level]) return;
        uint32_t& head = heads[level][place(rolling[level], mask)];
        links[level][position & mask] = head;
        head = uint32_t(position + 1);
    }
}

void Corpus::grow() {
    int64_t old_capacity = capacity, old_mask = mask, kept = text;
    capacity *= 2;
    mask = capacity - 1;
    std::vector<uint32_t> held = std::move(ring);
    ring.assign(capacity, BREAK);
    for (int level = 0; level < LEVELS; level++) {
        heads[level].assign(capacity, 0);
        links[level].assign(capacity, 0);
        rolling[level] = 0;
    }
    // Nothing was overwritten yet: a ring grows until it has its limit.
    int64_t count = end;
    end = text = 0;
    for (int64_t i = 0; i < count && i < old_capacity; i++) {
        uint32_t token = held[i & old_mask];
        put(token);
        if (token == BREAK) {
            text = end;
            for (int level = 0; level < LEVELS; level++) rolling[level] = 0;
        }
    }
    text = kept;
}

int64_t Corpus::unpacked(uint32_t packed) const {
    if (packed == 0) return -1;
    uint32_t behind = uint32_t(end) - (packed - 1);  // end - position, as long as that is below 2^32
    int64_t position = end - int64_t(behind);
    return holds(position) ? position : -1;
}

int64_t Corpus::newest(int level, uint64_t hash) const { return unpacked(heads[level][place(hash, mask)]); }

int64_t Corpus::before(int level, int64_t position) const {
    int64_t found = unpacked(links[level][position & mask]);
    return found < position ? found : -1;
}

int64_t Corpus::bytes() const { return int64_t(sizeof(*this)) + capacity * 4 * (1 + 2 * LEVELS); }

}  // namespace suffix
