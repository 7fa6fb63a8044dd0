// Sets of holders, each kept once: a block names its holders by a number, and a further holder of a run costs
// the run one set.
#pragma once
#include "memory.hpp"
#include <algorithm>
#include <vector>

namespace bien {

using Place = uint32_t;  // an (engine, group, tier) that may hold blocks
using SetId = uint32_t;  // 0: nobody

class Holders {
  public:
    Holders() : sets_(1) {}
    Holders(const Holders &) = delete;
    Holders &operator=(const Holders &) = delete;
    ~Holders() {
        for (Set &set : sets_) std::free(set.places);
    }
    const Place *begin(SetId s) const { return sets_[s].places; }
    const Place *end(SetId s) const { return sets_[s].places + sets_[s].size; }
    uint32_t size(SetId s) const { return sets_[s].size; }
    SetId limit() const { return static_cast<SetId>(sets_.size()); }
    std::size_t bytes() const { return bytes_ + sets_.capacity() * sizeof(Set) + slots_.bytes(); }

    bool has(SetId s, Place p) const { return std::binary_search(begin(s), end(s), p); }

    // `s` and `p`, which is not in it. Nobody uses the set yet if it is new.
    SetId with(SetId s, Place p) {
        scratch_.assign(begin(s), end(s));
        scratch_.insert(std::lower_bound(scratch_.begin(), scratch_.end(), p), p);
        return intern(sets_[s].key + mixed(p));
    }
    // `s` but for those that `leaves` names; 0 if none is left.
    template <class Leaves> SetId without(SetId s, Leaves leaves) {
        uint64_t key = sets_[s].key;
        scratch_.clear();
        for (const Place *p = begin(s); p != end(s); ++p) {
            if (leaves(*p))
                key -= mixed(*p);
            else
                scratch_.push_back(*p);
        }
        return scratch_.empty() ? 0 : intern(key);
    }
    void take(SetId s) { ++sets_[s].users; }
    // Whether it was the last user: then the number may soon name another set.
    bool drop(SetId s) {
        Set &set = sets_[s];
        if (--set.users) return false;
        slots_.erase(static_cast<uint32_t>(set.key), s);
        bytes_ -= set.size * sizeof(Place);
        std::free(set.places);
        set = Set{};
        unused_.push_back(s);
        return true;
    }

  private:
    struct Set {
        Place *places = nullptr;  // in order
        uint32_t size = 0, users = 0;
        uint64_t key = 0;  // the sum of its places' hashes
    };
    static uint64_t mixed(Place p) {
        uint64_t x = (p + 1) * 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
        return x ^ x >> 32;
    }
    SetId intern(uint64_t key) {
        const auto low = static_cast<uint32_t>(key);
        const SetId known = slots_.find(low, [&](SetId s) {
            return sets_[s].key == key && std::equal(begin(s), end(s), scratch_.begin(), scratch_.end());
        });
        if (known != NONE) return known;
        if (unused_.empty()) {
            unused_.reserve(sets_.size() + 1);  // so that giving back never allocates
            unused_.push_back(limit());
            sets_.emplace_back();
        }
        const SetId s = unused_.back();
        Set &set = sets_[s];
        set.places = static_cast<Place *>(std::malloc(scratch_.size() * sizeof(Place)));
        if (!set.places) throw std::bad_alloc();
        std::copy(scratch_.begin(), scratch_.end(), set.places);
        set.size = static_cast<uint32_t>(scratch_.size());
        set.key = key;
        slots_.insert(low, s);
        unused_.pop_back();
        bytes_ += set.size * sizeof(Place);
        return s;
    }
    std::vector<Set> sets_;
    std::vector<SetId> unused_;
    std::vector<Place> scratch_;
    Slots slots_;
    std::size_t bytes_ = 0;
};

}  // namespace bien
