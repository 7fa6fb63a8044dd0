// What is known of one engine beside its blocks: its KV groups, the prompts on their way there.
#pragma once
#include "blocks.hpp"

namespace bien {

constexpr int64_t EVERYWHERE = -1, STATE = 0;  // else a window: the blocks before a position that it needs
constexpr std::size_t MOST_PREDICTIONS = 1024;  // per engine; the oldest go first

struct Prediction {
    std::vector<Hash> blocks;
    double expires;

    // Blocks shared with a chain. Equal hashes at one block mean equal blocks before it.
    std::size_t common(Chain chain) const {
        std::size_t low = 0, high = std::min(blocks.size(), chain.blocks);
        while (low < high) {
            const std::size_t middle = (low + high + 1) / 2;
            if (blocks[middle - 1] == chain[middle - 1])
                low = middle;
            else
                high = middle - 1;
        }
        return low;
    }
    bool same(Chain chain) const {
        return blocks.size() == chain.blocks && !std::memcmp(blocks.data(), chain.bytes, chain.blocks * sizeof(Hash));
    }
};

struct Partial {
    uint64_t bit;
    int64_t window;
};

struct Engine {
    bool joined = false;
    uint64_t everywhere = 0;  // bits of the groups that need every block
    std::vector<Partial> partial;
    std::vector<int64_t> every;  // of state groups: blocks between regular snapshots, 0 = at a prompt's end only
    std::vector<Place> places;
    std::vector<Prediction> coming;
    uint64_t witness = 0;  // bit of the group whose blocks confirm predictions

    // Blocks of the chain that are usable once the prompts on their way have run; at least `position`.
    std::size_t predicted(Chain chain, std::size_t position, double now) {
        if (coming.empty() || position == chain.blocks) return position;
        coming.erase(std::remove_if(coming.begin(), coming.end(), [&](const Prediction &p) { return p.expires <= now; }),
                     coming.end());
        const std::size_t first = position;  // what shares no more blocks than these cannot help
        for (const Prediction &p : coming)
            if (p.blocks.size() > first && p.blocks[first] == chain[first]) position = std::max(position, after(p, chain));
        return position;
    }

  private:
    // A state is kept at the prompt's last block boundary and at its regular snapshots, nowhere else.
    std::size_t after(const Prediction &p, Chain chain) const {
        const std::size_t whole = p.blocks.size();
        if (whole <= chain.blocks && chain[whole - 1] == p.blocks.back()) return whole;
        std::size_t shared = p.common(chain);
        for (bool settled = false; !settled;) {
            settled = true;
            for (const int64_t each : every) {
                if (!each) return 0;
                if (const std::size_t over = shared % static_cast<std::size_t>(each)) {
                    shared -= over;
                    settled = false;
                }
            }
        }
        return shared;
    }
};

// How far a chain is usable, found on one pass over it; by the first tier (near) or all of them (far).
struct Reach {
    std::size_t best = 0;  // the longest position so far at which every group holds
    bool alive = false;  // whether it may grow

    // The next blocks, up to `end`: `present` are the groups that have all of them, the others have none.
    // gaps: per partial group, where its last absent block ends.
    void pass(const std::vector<Partial> &partial, uint64_t present, std::size_t end, std::size_t *gaps) {
        bool holds = true;
        for (std::size_t g = 0; g < partial.size(); ++g) {
            const Partial &group = partial[g];
            if (!(present & group.bit)) {
                gaps[g] = end;
                holds = false;
            } else if (gaps[g] && end < gaps[g] + static_cast<std::size_t>(group.window)) {
                holds = false;
            }
        }
        if (holds) best = end;
    }
};

}  // namespace bien
