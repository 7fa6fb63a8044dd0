// The mirror of all engines: blocks with their holders, what events change, and how far a chain is usable.
// Called under the interpreter's lock, by one thread at a time.
#include "engines.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace bien;

namespace {

struct Holder {  // what a place stands for
    uint32_t engine = NONE;  // none: the place is free
    uint64_t bit = 0;  // of the group
    bool fast = false;  // whether it is the engine's first tier
    std::size_t blocks = 0;  // that it holds
    SetId alone = 0;  // the set of just this place; used by us, so that it stays
};

// An engine during a lookup; what each segment needs of it lies in one line of the cache.
struct alignas(64) Wanted {
    uint64_t segment = 0;  // of which the next two are
    uint64_t fast = 0, any = 0;  // groups that hold it in the first tier, in some tier
    uint64_t everywhere = 0;
    Reach near, far;
    uint64_t lookup = 0;
    std::vector<std::size_t> near_gaps, far_gaps;
};

class Table {
  public:
    uint32_t join(const int64_t *windows, const int64_t *every, int64_t groups) {
        uint32_t e = 0;
        while (e < engines_.size() && engines_[e].joined) ++e;
        if (e == engines_.size()) {
            engines_.emplace_back();
            wanted_.emplace_back();
        }
        Engine &engine = engines_[e] = Engine{};
        for (int64_t g = 0; g < groups; ++g) {
            const uint64_t bit = uint64_t{1} << g;
            if (windows[g] == EVERYWHERE)
                engine.everywhere |= bit;
            else
                engine.partial.push_back({bit, windows[g]});
            if (windows[g] == STATE) engine.every.push_back(every[g]);
        }
        engine.witness = engine.everywhere ? engine.everywhere & -engine.everywhere : 1;
        engine.joined = true;
        return e;
    }
    void leave(uint32_t e) {
        clear(engines_[e].places);
        for (const Place p : engines_[e].places) {
            sets_.drop(holder_[p].alone);
            holder_[p] = Holder{};
        }
        engines_[e] = Engine{};
    }
    Place place(uint32_t e, int64_t group, bool fast) {
        Place p = 0;
        while (p < holder_.size() && holder_[p].engine != NONE) ++p;
        if (p == holder_.size()) holder_.emplace_back();
        const SetId alone = sets_.with(0, p);
        sets_.take(alone);
        holder_[p] = Holder{e, uint64_t{1} << group, fast, 0, alone};
        engines_[e].places.push_back(p);
        return p;
    }
    void clear_engine(uint32_t e) { clear(engines_[e].places); }
    void clear_place(Place p) { clear({p}); }

    void stored(Place p, Chain chain) {
        Holder &holder = holder_[p];
        Seeker seeker(blocks_, chain, 32);
        SetId from = 0, to = 0;  // a set and the same with `p`, as of the blocks before
        for (std::size_t i = 0; i < chain.blocks; ++i) {
            const uint32_t id = seeker.find(i);
            if (id == NONE) {
                seeker.at(blocks_.insert(chain[i], holder.alone));
                sets_.take(holder.alone);
            } else {
                const SetId s = blocks_.holders(id);
                if (s == to && to) continue;
                if (s != from) {
                    if (sets_.has(s, p)) continue;
                    to = sets_.with(s, p);
                    from = s;
                }
                sets_.take(to);
                blocks_.set_holders(id, to);
                if (sets_.drop(s)) from = 0;
            }
            ++holder.blocks;
        }
    }
    void removed(Place p, Chain chain) {
        Holder &holder = holder_[p];
        Seeker seeker(blocks_, chain, 32);
        SetId from = 0, to = 0;
        for (std::size_t i = 0; i < chain.blocks; ++i) {
            const uint32_t id = seeker.find(i);
            if (id == NONE) continue;
            const SetId s = blocks_.holders(id);
            if (s != from || !from) {
                if (!sets_.has(s, p)) continue;
                to = sets_.without(s, [p](Place q) { return q == p; });
                from = s;
            }
            if (to) {
                sets_.take(to);
                blocks_.set_holders(id, to);
            } else {
                blocks_.erase(id);
            }
            if (sets_.drop(s)) from = 0;
            --holder.blocks;
        }
    }

    void predict(uint32_t e, Chain chain, double expires) {
        std::vector<Prediction> &coming = engines_[e].coming;
        Prediction p{std::vector<Hash>(chain.blocks), expires};
        std::memcpy(p.blocks.data(), chain.bytes, chain.blocks * sizeof(Hash));
        if (coming.size() == MOST_PREDICTIONS) coming.erase(coming.begin());
        coming.push_back(std::move(p));
    }
    // The one that would last longest: another request may have predicted the same.
    void take_back(uint32_t e, Chain chain) {
        std::vector<Prediction> &coming = engines_[e].coming;
        auto found = coming.end();
        for (auto p = coming.begin(); p != coming.end(); ++p)
            if (p->same(chain) && (found == coming.end() || p->expires >= found->expires)) found = p;
        if (found != coming.end()) coming.erase(found);
    }
    void forget(uint32_t e) { engines_[e].coming.clear(); }
    // Predictions whose last block is there have come true. How many are left.
    std::size_t confirm(uint32_t e) {
        std::vector<Prediction> &coming = engines_[e].coming;
        const auto true_now = [&](const Prediction &p) {
            const Hash last = p.blocks.back();
            const uint32_t id = blocks_.find(last, last.mixed());
            return id != NONE && std::any_of(sets_.begin(blocks_.holders(id)), sets_.end(blocks_.holders(id)), [&](Place q) {
                const Holder &h = holder_[q];
                return h.engine == e && h.fast && h.bit == engines_[e].witness;
            });
        };
        coming.erase(std::remove_if(coming.begin(), coming.end(), true_now), coming.end());
        return coming.size();
    }

    // near[i]: blocks of the chain usable at engines[i], from its first tier or predicted; far[i], unless null:
    // with those of all tiers. An engine below 0 has none.
    void reach(Chain chain, const int32_t *engines, std::size_t count, double now, int64_t *near, int64_t *far) {
        ++lookup_;
        alive_.clear();
        whole_ = true;
        for (std::size_t i = 0; i < count; ++i) {
            if (engines[i] < 0) continue;
            const auto e = static_cast<uint32_t>(engines[i]);
            Wanted &w = wanted_[e];
            if (w.lookup == lookup_) continue;  // asked for twice
            w.lookup = lookup_;
            w.everywhere = engines_[e].everywhere;
            w.near = {0, true};
            w.far = {0, far != nullptr};
            w.near_gaps.assign(engines_[e].partial.size(), 0);
            w.far_gaps.assign(engines_[e].partial.size(), 0);
            whole_ = whole_ && w.everywhere;
            alive_.push_back(e);
        }
        walk(chain);
        for (std::size_t i = 0; i < count; ++i) {
            near[i] = 0;
            if (far) far[i] = 0;
            if (engines[i] < 0) continue;
            const auto e = static_cast<uint32_t>(engines[i]);
            const std::size_t own = engines_[e].predicted(chain, wanted_[e].near.best, now);
            near[i] = static_cast<int64_t>(own);
            if (far) far[i] = static_cast<int64_t>(std::max(own, wanted_[e].far.best));
        }
    }

    void size(int64_t *out) const {
        std::size_t held = 0, all = blocks_.bytes() + sets_.bytes();
        all += holder_.capacity() * sizeof(Holder) + wanted_.capacity() * sizeof(Wanted);
        for (const Holder &h : holder_) held += h.blocks;
        for (const Engine &e : engines_)
            for (const Prediction &p : e.coming) all += p.blocks.capacity() * sizeof(Hash) + sizeof(Prediction);
        out[0] = static_cast<int64_t>(blocks_.count());
        out[1] = static_cast<int64_t>(held);
        out[2] = static_cast<int64_t>(all);
    }

  private:
    // The chain in segments of equal holders, until nobody reaches any further.
    void walk(Chain chain) {
        Seeker seeker(blocks_, chain, 1);
        SetId held = 0;
        for (std::size_t i = 0; i < chain.blocks && !alive_.empty(); ++i) {
            const uint32_t id = seeker.find(i);
            const SetId s = id == NONE ? 0 : blocks_.holders(id);
            if (i && s != held) pass(i, held);
            if (!s && whole_) return;  // nobody reaches past what nobody has
            held = s;
        }
        if (chain.blocks && !alive_.empty()) pass(chain.blocks, held);
    }
    void pass(std::size_t end, SetId s) {
        ++segment_;
        if (s) {
            for (const Place *p = sets_.begin(s); p != sets_.end(s); ++p) {
                const Holder &h = holder_[*p];
                Wanted &w = wanted_[h.engine];
                if (w.segment != segment_) {
                    w.segment = segment_;
                    w.fast = w.any = 0;
                }
                w.any |= h.bit;
                if (h.fast) w.fast |= h.bit;
            }
        }
        for (std::size_t i = 0; i < alive_.size();) {
            Wanted &w = wanted_[alive_[i]];
            const uint64_t fast = w.segment == segment_ ? w.fast : 0, any = w.segment == segment_ ? w.any : 0;
            w.near.alive = w.near.alive && (fast & w.everywhere) == w.everywhere;
            w.far.alive = w.far.alive && (any & w.everywhere) == w.everywhere;
            if (w.near_gaps.empty()) {
                if (w.near.alive) w.near.best = end;
                if (w.far.alive) w.far.best = end;
            } else {
                const std::vector<Partial> &partial = engines_[alive_[i]].partial;
                if (w.near.alive) w.near.pass(partial, fast, end, w.near_gaps.data());
                if (w.far.alive) w.far.pass(partial, any, end, w.far_gaps.data());
            }
            if (w.near.alive || w.far.alive) {
                ++i;
            } else {
                alive_[i] = alive_.back();
                alive_.pop_back();
            }
        }
    }

    // Takes everything from these places: a set is changed once, not at each of its blocks.
    void clear(const std::vector<Place> &places) {
        std::size_t held = 0;
        std::vector<char> leaves(holder_.size());
        for (const Place p : places) {
            held += holder_[p].blocks;
            holder_[p].blocks = 0;
            leaves[p] = 1;
        }
        if (!held) return;
        std::vector<SetId> becomes(sets_.limit(), NONE);
        for (SetId s = 1; s < becomes.size(); ++s) {
            if (!sets_.size(s) || std::none_of(sets_.begin(s), sets_.end(s), [&](Place p) { return leaves[p]; })) continue;
            becomes[s] = sets_.without(s, [&](Place p) { return leaves[p]; });
            if (becomes[s]) sets_.take(becomes[s]);  // until it is in place
        }
        for (uint32_t id = 0; id < blocks_.limit(); ++id) {
            const SetId s = blocks_.holders(id);
            if (!s || becomes[s] == NONE) continue;
            if (becomes[s]) {
                sets_.take(becomes[s]);
                blocks_.set_holders(id, becomes[s]);
            } else {
                blocks_.erase(id);
            }
            sets_.drop(s);
        }
        for (const SetId s : becomes)
            if (s && s != NONE) sets_.drop(s);
    }

    Blocks blocks_;
    Holders sets_;
    std::vector<Holder> holder_;  // by place
    std::vector<Engine> engines_;
    std::vector<Wanted> wanted_;  // by engine
    std::vector<uint32_t> alive_;  // engines that may reach further
    bool whole_ = true;  // whether each of them has a group that needs every block
    uint64_t lookup_ = 0, segment_ = 0;
};

// -1: there is no memory left.
template <class Work> int64_t guarded(Work work) {
    try {
        return static_cast<int64_t>(work());
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

Table &table(void *handle) { return *static_cast<Table *>(handle); }

Chain chain(const uint8_t *bytes, int64_t blocks) { return {bytes, static_cast<std::size_t>(blocks)}; }

}  // namespace

EXPORT void *bien_index_new() { return new (std::nothrow) Table; }
EXPORT void bien_index_free(void *t) { delete static_cast<Table *>(t); }

// windows[g]: -1 a group of every position, 0 a state, else the window in blocks; every[g]: blocks between a
// state's regular snapshots. At most 64 groups. The engine's number.
EXPORT int64_t bien_index_join(void *t, const int64_t *windows, const int64_t *every, int64_t groups) {
    return guarded([&] { return table(t).join(windows, every, groups); });
}
EXPORT int64_t bien_index_leave(void *t, int64_t engine) {
    return guarded([&] { return table(t).leave(static_cast<uint32_t>(engine)), 0; });
}
EXPORT int64_t bien_index_clear(void *t, int64_t engine) {
    return guarded([&] { return table(t).clear_engine(static_cast<uint32_t>(engine)), 0; });
}
// A group and tier of an engine, the first time that its events name them: the number for the calls below.
EXPORT int64_t bien_index_place(void *t, int64_t engine, int64_t group, int64_t first_tier) {
    return guarded([&] { return table(t).place(static_cast<uint32_t>(engine), group, first_tier); });
}
EXPORT int64_t bien_index_clear_place(void *t, int64_t place) {
    return guarded([&] { return table(t).clear_place(static_cast<Place>(place)), 0; });
}
EXPORT int64_t bien_index_stored(void *t, int64_t place, const uint8_t *hashes, int64_t blocks) {
    return guarded([&] { return table(t).stored(static_cast<Place>(place), chain(hashes, blocks)), 0; });
}
EXPORT int64_t bien_index_removed(void *t, int64_t place, const uint8_t *hashes, int64_t blocks) {
    return guarded([&] { return table(t).removed(static_cast<Place>(place), chain(hashes, blocks)), 0; });
}
EXPORT int64_t bien_index_predict(void *t, int64_t engine, const uint8_t *hashes, int64_t blocks, double expires) {
    return guarded([&] { return table(t).predict(static_cast<uint32_t>(engine), chain(hashes, blocks), expires), 0; });
}
EXPORT int64_t bien_index_take_back(void *t, int64_t engine, const uint8_t *hashes, int64_t blocks) {
    return guarded([&] { return table(t).take_back(static_cast<uint32_t>(engine), chain(hashes, blocks)), 0; });
}
EXPORT int64_t bien_index_forget(void *t, int64_t engine) {
    return guarded([&] { return table(t).forget(static_cast<uint32_t>(engine)), 0; });
}
EXPORT int64_t bien_index_confirm(void *t, int64_t engine) {
    return guarded([&] { return table(t).confirm(static_cast<uint32_t>(engine)); });
}
EXPORT int64_t bien_index_reach(void *t, const uint8_t *hashes, int64_t blocks, const int32_t *engines, int64_t count,
                                double now, int64_t *near, int64_t *far) {
    return guarded([&] {
        return table(t).reach(chain(hashes, blocks), engines, static_cast<std::size_t>(count), now, near, far), 0;
    });
}
// out[0]: distinct blocks; out[1]: blocks of all places; out[2]: bytes.
EXPORT void bien_index_size(void *t, int64_t *out) { table(t).size(out); }
