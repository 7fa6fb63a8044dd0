// Every distinct block once: its hash and its holders, at a number. Blocks stored in one go have numbers in a
// row, so a chain is followed by comparing memory, and looked up in the table only where it forks.
#pragma once
#include "holders.hpp"
#include <cstring>

namespace bien {

struct Hash {
    uint64_t low, high;
    bool operator==(const Hash &other) const { return low == other.low && high == other.high; }
    uint64_t mixed() const {  // simulated names are numbers in a row
        uint64_t x = (low ^ 0x2d358dccaa6c78a5u) * 0x9e3779b97f4a7c15u ^ (high + 0x8bb84b93962eacc9u) * 0xd6e8feb86659fd93u;
        x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
        x = (x ^ x >> 32) * 0x9e3779b97f4a7c15u;
        return x ^ x >> 29;
    }
};

// The hashes of a chain as they came: packed and not aligned.
struct Chain {
    const uint8_t *bytes;
    std::size_t blocks;
    Hash operator[](std::size_t i) const {
        Hash h;
        std::memcpy(&h, bytes + i * sizeof(Hash), sizeof(Hash));
        return h;
    }
};

class Blocks {
  public:
    std::size_t count() const { return count_; }
    std::size_t limit() const { return top_; }
    SetId holders(uint32_t id) const { return holders_[id]; }
    void set_holders(uint32_t id, SetId s) { holders_[id] = s; }
    std::size_t bytes() const {
        std::size_t all = top_ * (sizeof(Hash) + sizeof(SetId)) + top_ / 8;
        for (const Slots &shard : shards_) all += shard.bytes();
        return all;
    }
    uint32_t find(Hash h, uint64_t mixed) const {
        return shard(mixed).find(static_cast<uint32_t>(mixed), [&](uint32_t id) { return hashes_[id] == h; });
    }
    // Whether it is the block after `id`, in number too.
    bool follows(uint32_t id, Hash h) const { return id + 1 < top_ && holders_[id + 1] && hashes_[id + 1] == h; }

    uint32_t insert(Hash h, SetId s) {
        const uint64_t mixed = h.mixed();
        const uint32_t id = unused();
        shard(mixed).insert(static_cast<uint32_t>(mixed), id);
        used_[id / 64] |= uint64_t{1} << id % 64;
        hashes_[id] = h;
        holders_[id] = s;
        ++count_;
        return id;
    }
    void erase(uint32_t id) {
        const uint64_t mixed = hashes_[id].mixed();
        shard(mixed).erase(static_cast<uint32_t>(mixed), id);
        used_[id / 64] &= ~(uint64_t{1} << id % 64);
        holders_[id] = 0;
        if (!--count_) release();
    }
    void prefetch(uint64_t mixed) const { shard(mixed).prefetch(static_cast<uint32_t>(mixed)); }
    void prefetch_block(uint64_t mixed) const {
        const uint32_t id = shard(mixed).guess(static_cast<uint32_t>(mixed));
        if (id == NONE) return;
        __builtin_prefetch(&hashes_[id]);
        __builtin_prefetch(&holders_[id]);
    }

  private:
    static constexpr int SHARDS = 64;  // tables that grow one at a time: none of the pauses is long
    Slots &shard(uint64_t mixed) { return shards_[mixed >> 58]; }
    const Slots &shard(uint64_t mixed) const { return shards_[mixed >> 58]; }

    // A free number. Freed ones are used again in order, once they are an eighth of all: then free stretches
    // are long, and to search for them is cheap.
    uint32_t unused() {
        if (!sweeping_ && top_ - count_ > 64 + top_ / 8) {
            sweeping_ = true;
            cursor_ = 0;
        }
        if (sweeping_) {
            for (; cursor_ < top_; cursor_ = (cursor_ | 63) + 1) {
                const uint64_t unused = ~used_[cursor_ / 64] >> cursor_ % 64;
                if (!unused) continue;
                const std::size_t id = cursor_ + __builtin_ctzll(unused);
                if (id >= top_) break;
                cursor_ = id + 1;
                return static_cast<uint32_t>(id);
            }
            sweeping_ = false;
        }
        if (top_ + 1 >= NONE) throw std::bad_alloc();
        hashes_.reserve(top_ + 1);
        holders_.reserve(top_ + 1);
        used_.reserve(top_ / 64 + 1);
        if (top_ % 64 == 0) used_[top_ / 64] = 0;
        holders_[top_] = 0;
        return static_cast<uint32_t>(top_++);
    }
    void release() {
        for (Slots &shard : shards_) shard.release();
        hashes_.release();
        holders_.release();
        used_.release();
        top_ = cursor_ = 0;
        sweeping_ = false;
    }
    Slots shards_[SHARDS];
    Array<Hash> hashes_;
    Array<SetId> holders_;  // 0: the number is free
    Array<uint64_t> used_;  // a bit per number
    std::size_t top_ = 0, count_ = 0, cursor_ = 0;
    bool sweeping_ = false;
};

// Looks the blocks of a chain up in order. Where several in a row are not neighbours in memory, the next ones
// are fetched ahead: their memory is awaited all at once.
class Seeker {
  public:
    Seeker(const Blocks &blocks, Chain chain, std::size_t ahead) : blocks_(blocks), chain_(chain), ahead_(ahead) {}

    // The number of block `i`, which is one after the last asked for; NONE if nobody holds it.
    uint32_t find(std::size_t i) {
        const Hash h = chain_[i];
        if (id_ != NONE && blocks_.follows(id_, h)) return ++id_;
        if (i >= until_) fetch(i);
        ++asked_;
        return id_ = blocks_.find(h, mixed_[i - from_]);
    }
    // After an insertion of the block last asked for.
    void at(uint32_t id) { id_ = id; }
    // After an erasure: what follows in memory may be another's, or gone.
    void lose() { id_ = NONE; }

  private:
    static constexpr std::size_t MOST = 32;
    void fetch(std::size_t i) {
        if (until_) ahead_ = asked_ * 2 > until_ - from_ ? std::min(2 * ahead_, MOST) : std::max(ahead_ / 2, std::size_t{1});
        from_ = i;
        until_ = std::min(i + ahead_, chain_.blocks);
        asked_ = 0;
        for (std::size_t j = i; j < until_; ++j) {
            mixed_[j - i] = chain_[j].mixed();
            blocks_.prefetch(mixed_[j - i]);
        }
        for (std::size_t j = i; j < until_; ++j) blocks_.prefetch_block(mixed_[j - i]);
    }
    const Blocks &blocks_;
    const Chain chain_;
    std::size_t ahead_, from_ = 0, until_ = 0, asked_ = 0;
    uint32_t id_ = NONE;
    uint64_t mixed_[MOST];
};

}  // namespace bien
