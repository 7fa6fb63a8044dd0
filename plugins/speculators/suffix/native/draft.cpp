// Drafts: what followed the longest repetitions of a text's end, weighted by how long these are.

#include <algorithm>
#include <cstdint>
#include <new>
#include <queue>
#include <vector>

#include "corpus.hpp"

#define API extern "C" __attribute__((visibility("default")))

namespace suffix {

namespace {

constexpr int64_t LONGEST = 64;  // tokens of a match that are looked at
constexpr int MOST = 24;         // occurrences that are weighed
constexpr int WALK = 64;         // entries of a chain that are looked at
constexpr int MATCHES = 8, SHARES = 4;  // cells of the table of chances

struct Occurrence {
    const Corpus* corpus;
    int64_t next;   // position of what followed
    int64_t match;  // tokens before it that are the text's last ones
};

int match_cell(int64_t match) {
    static const int64_t least[MATCHES] = {1, 3, 4, 6, 9, 14, 24, 48};
    int cell = 0;
    while (cell + 1 < MATCHES && match >= least[cell + 1]) cell++;
    return cell;
}

int share_cell(double share) { return share > 0.99 ? 3 : share > 0.66 ? 2 : share > 0.4 ? 1 : 0; }

int64_t match_length(const Corpus& corpus, int64_t next, const uint32_t* tail, int64_t size) {
    int64_t most = std::min(size, next - corpus.begin()), same = 0;
    while (same < most && corpus.at(next - 1 - same) == tail[size - 1 - same]) same++;
    return same;
}

// The newest occurrences of the longest n-gram that has any. Own text first.
void find(const Corpus* const* corpora, int count, const uint32_t* tail, int64_t size,
          std::vector<Occurrence>& found) {
    for (int level = LEVELS - 1; level >= 0 && found.empty(); level--) {
        int64_t n = LENGTHS[level];
        if (size < n) continue;
        uint64_t hash = hash_of(tail + size - n, n);
        for (int c = 0; c < count; c++) {
            const Corpus& corpus = *corpora[c];
            int64_t p = corpus.newest(level, hash);
            for (int step = 0; p >= 0 && step < WALK && int(found.size()) < MOST; step++) {
                int64_t match = match_length(corpus, p, tail, size);
                if (match >= n) found.push_back({&corpus, p, match});
                p = corpus.before(level, p);
            }
        }
    }
}

struct Node {
    double chance;  // that all up to it are taken
    int64_t parent;
    uint32_t token;
    float own;  // chance once its parent is taken
    int32_t cell;
    std::vector<int32_t> members;  // occurrences that agree so far
    int64_t depth;
    int64_t number;
};

// Equal chances: the shallower one first, then the one found first.
struct Better {
    bool operator()(const Node& a, const Node& b) const {
        if (a.chance != b.chance) return a.chance < b.chance;
        return a.depth != b.depth ? a.depth > b.depth : a.number > b.number;
    }
};

struct Child {
    uint32_t token;
    double weight;
    std::vector<int32_t> members;
    int64_t match;
};

// The text whose end is looked up: its beginning, up to `seam`, lies in the shared corpus, the rest in `own`
// from `first` on.
struct Text {
    const Corpus* own;
    const Corpus* shared;
    int64_t seam, first;
};

// The token `depth` behind an occurrence; BREAK: none. A copy goes on from the text's beginning into its rest, and
// from its end into the draft itself: what repeats a short period goes on repeating it.
template <typename Drafted>
uint32_t follow(const Occurrence& o, int64_t depth, const Text& text, Drafted drafted) {
    int64_t p = o.next + depth;
    const Corpus* corpus = o.corpus;
    if (corpus == text.shared && o.next <= text.seam && p >= text.seam) {
        p = text.first + (p - text.seam);
        corpus = text.own;
    }
    if (p < corpus->end) return corpus->holds(p) ? corpus->at(p) : BREAK;
    return corpus == text.own && p - corpus->end < depth ? drafted(p - corpus->end) : BREAK;
}

// What followed `members` at this depth, heaviest first; of equals the newest.
template <typename Drafted>
void children(const std::vector<Occurrence>& found, const std::vector<int32_t>& members, int64_t depth,
              const Text& text, Drafted drafted, std::vector<Child>& out, double& total) {
    out.clear();
    total = 0;
    for (int32_t m : members) {
        const Occurrence& o = found[m];
        double weight = double(o.match) * double(o.match);
        total += weight;
        uint32_t token = follow(o, depth, text, drafted);
        if (token == BREAK) continue;
        auto same = std::find_if(out.begin(), out.end(), [&](const Child& c) { return c.token == token; });
        if (same == out.end()) {
            out.push_back({token, 0, {}, 0});
            same = out.end() - 1;
        }
        same->weight += weight;
        same->members.push_back(m);
        same->match = std::max(same->match, o.match);
    }
    std::stable_sort(out.begin(), out.end(), [](const Child& a, const Child& b) { return a.weight > b.weight; });
}

int64_t propose(const Corpus* const* corpora, int count, const Text& text, const uint32_t* tail, int64_t size, int64_t limit,
                bool tree, double least, const float* chances, uint32_t* tokens, int32_t* parents, float* own,
                int32_t* cells) {
    std::vector<Occurrence> found;
    find(corpora, count, tail, size, found);
    if (found.empty()) return 0;
    std::vector<int32_t> all(found.size());
    for (size_t i = 0; i < all.size(); i++) all[i] = int32_t(i);
    std::priority_queue<Node, std::vector<Node>, Better> open;
    std::vector<Child> next;
    int64_t numbered = 0;
    auto expand = [&](const std::vector<int32_t>& members, int64_t depth, int64_t parent, double chance) {
        double total = 0;
        auto drafted = [&](int64_t at) {  // the token of the path at this depth
            int64_t node = parent;
            for (int64_t d = depth - 1; d > at; d--) node = parents[node];
            return tokens[node];
        };
        children(found, members, depth, text, drafted, next, total);
        size_t most = tree ? std::min<size_t>(next.size(), 3) : std::min<size_t>(next.size(), 1);
        for (size_t i = 0; i < most; i++) {
            int32_t cell = match_cell(next[i].match + depth) * SHARES + share_cell(next[i].weight / total);
            double after = chance * chances[cell];
            if (after < least) continue;
            open.push({after, parent, next[i].token, chances[cell], cell, std::move(next[i].members), depth,
                       numbered++});
        }
    };
    expand(all, 0, -1, 1.0);
    int64_t made = 0;
    while (!open.empty() && made < limit) {
        Node node = open.top();
        open.pop();
        tokens[made] = node.token;
        parents[made] = int32_t(node.parent);
        own[made] = node.own;
        cells[made] = node.cell;
        expand(node.members, node.depth + 1, made, node.chance);
        made++;
    }
    return made;
}

}  // namespace
}  // namespace suffix

using suffix::Corpus;

API void* bien_suffix_new(int64_t limit) { return new (std::nothrow) Corpus(limit); }
API void bien_suffix_free(void* corpus) { delete static_cast<Corpus*>(corpus); }

API int64_t bien_suffix_append(void* corpus, const uint32_t* tokens, int64_t count, int64_t fresh,
                               int64_t repeated) {
    try {
        return static_cast<Corpus*>(corpus)->append(tokens, count, fresh != 0, repeated);
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

API int64_t bien_suffix_equal(void* corpus, int64_t position, const uint32_t* tokens, int64_t start, int64_t count) {
    return static_cast<Corpus*>(corpus)->equal(position, tokens + start, count);
}

// The last tokens of the last text, at most `most`, in order; how many there were.
API int64_t bien_suffix_tail(void* corpus, uint32_t* out, int64_t most) {
    const Corpus& c = *static_cast<Corpus*>(corpus);
    int64_t count = std::min(most, c.end - std::max(c.text, c.begin()));
    for (int64_t i = 0; i < count; i++) out[i] = c.at(c.end - count + i);
    return count;
}

// Appends `count` tokens to `own`, then drafts what follows its end. `shared` may be null; in it the text stands
// up to `seam`, from where on it is in `own` from `first` on.
API int64_t bien_suffix_propose(void* own, void* shared, int64_t seam, int64_t first, const uint32_t* added,
                                int64_t count, int64_t limit, int64_t tree, double least, const float* chances, uint32_t* tokens,
                                int32_t* parents, float* confidence, int32_t* cells) {
    try {
        Corpus& mine = *static_cast<Corpus*>(own);
        if (count) mine.append(added, count, false, 0);
        uint32_t tail[suffix::LONGEST];
        int64_t size = bien_suffix_tail(own, tail, suffix::LONGEST);
        const Corpus* corpora[2] = {&mine, static_cast<Corpus*>(shared)};
        suffix::Text text{&mine, corpora[1], seam, first};
        return suffix::propose(corpora, shared ? 2 : 1, text, tail, size, limit, tree != 0, least, chances, tokens,
                               parents, confidence, cells);
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

// Tokens held, bytes.
API void bien_suffix_size(void* corpus, int64_t* out) {
    const Corpus& c = *static_cast<Corpus*>(corpus);
    out[0] = c.end - c.begin();
    out[1] = c.bytes();
}
