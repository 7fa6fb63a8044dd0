// A corpus: tokens in a ring, and for n-grams of several lengths where each occurred last.
//
// Hash chains, as compressors find repetitions (Ziv and Lempel 1977; zlib's deflate): an entry at position p
// says that the n tokens before p were seen there, so what followed them begins at p. Each entry points to the
// one before it with the same hash. Longer n-grams have chains of their own: a long repetition is found at
// once, however often its last tokens occur elsewhere.
#pragma once

#include <cstdint>
#include <vector>

namespace suffix {

constexpr int LEVELS = 4;
constexpr int64_t LENGTHS[LEVELS] = {2, 4, 8, 20};
constexpr uint32_t BREAK = 0xFFFFFFFFu;  // between texts; no token has this id
constexpr uint32_t REPEATED = 0x80000000u;  // flag of a token that is only there to be gone on from
constexpr int64_t SMALLEST = 256;        // tokens that a ring begins with

struct Corpus {
    explicit Corpus(int64_t limit);

    // Tokens of the same text as those appended last; `fresh`: of another one. The first `repeated` stand
    // elsewhere too: nothing is found there, but by n-grams that reach beyond them. Returns the first's position.
    int64_t append(const uint32_t* tokens, int64_t count, bool fresh, int64_t repeated);

    // How many of the tokens stand at `position` and behind it, repeated ones left out; -1: no longer held.
    int64_t equal(int64_t position, const uint32_t* tokens, int64_t count) const;

    bool holds(int64_t position) const { return position >= begin() && position < end; }
    uint32_t at(int64_t position) const {
        uint32_t token = ring[position & mask];
        return token == BREAK ? token : token & ~REPEATED;
    }
    int64_t begin() const { return end > capacity ? end - capacity : 0; }

    // The newest position whose n tokens before it have this hash (level's n); -1: none.
    int64_t newest(int level, uint64_t hash) const;
    // The one before it; -1: none.
    int64_t before(int level, int64_t position) const;

    int64_t bytes() const;

    int64_t limit;     // tokens
    int64_t capacity;  // a power of two
    int64_t mask;
    int64_t end = 0;   // tokens ever appended
    int64_t text = 0;  // where the last text begins
    std::vector<uint32_t> ring;
    std::vector<uint32_t> heads[LEVELS];  // by hash: position + 1, modulo 2^32; 0 = none
    std::vector<uint32_t> links[LEVELS];  // by position: the same of the entry before
    uint64_t rolling[LEVELS];             // hashes of the last n tokens of the last text

private:
    void put(uint32_t token);
    void enter(int64_t position);
    void grow();
    int64_t unpacked(uint32_t packed) const;
};

// Of n tokens, as `rolling` has it.
uint64_t hash_of(const uint32_t* tokens, int64_t n);

}  // namespace suffix
