// Arrays that grow in place, and open addressing from hashes to numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace bien {

constexpr uint32_t NONE = 0xffffffff;  // no number

// realloc moves the pages of large arrays, not their bytes; what was never written takes no memory.
template <class T> class Array {
  public:
    Array() = default;
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;
    ~Array() { std::free(data_); }
    T &operator[](std::size_t i) { return data_[i]; }
    const T &operator[](std::size_t i) const { return data_[i]; }

    // Room for `n`. What is new is anything.
    void reserve(std::size_t n) {
        if (n <= room_) return;
        const std::size_t room = n + n / 2 + 64;
        void *grown = std::realloc(static_cast<void *>(data_), room * sizeof(T));
        if (!grown) throw std::bad_alloc();
        data_ = static_cast<T *>(grown);
        room_ = room;
        advise();
    }
    void release() {
        std::free(data_);
        data_ = nullptr;
        room_ = 0;
    }

  private:
    // Random looks into many megabytes cost a walk of the page table each, unless the pages are large.
    void advise() {
#if defined(MADV_HUGEPAGE)
        constexpr std::uintptr_t page = 1 << 21;
        const auto from = (reinterpret_cast<std::uintptr_t>(data_) + page - 1) & ~(page - 1);
        const auto to = (reinterpret_cast<std::uintptr_t>(data_) + room_ * sizeof(T)) & ~(page - 1);
        if (to > from + page) madvise(reinterpret_cast<void *>(from), to - from, MADV_HUGEPAGE);
#endif
    }
    T *data_ = nullptr;
    std::size_t room_ = 0;
};

// Numbers by the low half of a hash; who asks compares the whole. Linear probing, erasing shifts back, so there
// are no tombstones; at most two thirds are taken.
class Slots {
  public:
    Slots() = default;
    Slots(const Slots &) = delete;
    Slots &operator=(const Slots &) = delete;
    ~Slots() { std::free(slots_); }
    std::size_t bytes() const { return slots_ ? (std::size_t{mask_} + 1) * sizeof(uint64_t) : 0; }

    template <class Same> uint32_t find(uint32_t low, Same same) const {
        if (!slots_) return NONE;
        for (uint32_t i = low & mask_; slots_[i]; i = (i + 1) & mask_)
            if (static_cast<uint32_t>(slots_[i]) == low && same(number(i))) return number(i);
        return NONE;
    }
    void prefetch(uint32_t low) const {
        if (slots_) __builtin_prefetch(&slots_[low & mask_]);
    }
    // A number that `find` may well give.
    uint32_t guess(uint32_t low) const {
        return find(low, [](uint32_t) { return true; });
    }
    void insert(uint32_t low, uint32_t number) {
        if (!slots_ || (count_ + 1) * std::size_t{3} > (std::size_t{mask_} + 1) * 2) grow();
        put((static_cast<uint64_t>(number) + 1) << 32 | low);
        ++count_;
    }
    void erase(uint32_t low, uint32_t which) {
        uint32_t i = low & mask_;
        while (number(i) != which) i = (i + 1) & mask_;
        for (uint32_t j = (i + 1) & mask_; slots_[j]; j = (j + 1) & mask_) {
            const uint32_t home = static_cast<uint32_t>(slots_[j]) & mask_;
            if (((j - home) & mask_) < ((j - i) & mask_)) continue;
            slots_[i] = slots_[j];
            i = j;
        }
        slots_[i] = 0;
        --count_;
    }
    void release() {
        std::free(slots_);
        slots_ = nullptr;
        mask_ = count_ = 0;
    }

  private:
    uint32_t number(uint32_t i) const { return static_cast<uint32_t>(slots_[i] >> 32) - 1; }
    void put(uint64_t slot) {
        uint32_t i = static_cast<uint32_t>(slot) & mask_;
        while (slots_[i]) i = (i + 1) & mask_;
        slots_[i] = slot;
    }
    void grow() {
        const std::size_t before = slots_ ? std::size_t{mask_} + 1 : 0, after = before ? 2 * before : 16;
        auto *fresh = static_cast<uint64_t *>(std::calloc(after, sizeof(uint64_t)));
        if (!fresh) throw std::bad_alloc();
        uint64_t *old = slots_;
        slots_ = fresh;
        mask_ = static_cast<uint32_t>(after - 1);
        for (std::size_t i = 0; i < before; ++i)
            if (old[i]) put(old[i]);
        std::free(old);
    }
    uint64_t *slots_ = nullptr;  // number + 1, low half of the hash; 0 = free
    uint32_t mask_ = 0, count_ = 0;
};

}  // namespace bien
