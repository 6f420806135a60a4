// Hash map from uint32 to uint32 with open addressing; the children and count groups of wide tree nodes.
// Invariant: the key kNone is never stored; at most three quarters of the slots are taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace draftsmith {

inline constexpr std::uint32_t kNone = 0xFFFFFFFFu;

class SmallMap {
public:
    std::uint32_t find(std::uint32_t key) const {
        if (mask_ == 0) return kNone;
        for (std::uint32_t i = home(key);; i = (i + 1) & mask_) {
            if (slots_[i].key == key) return slots_[i].value;
            if (slots_[i].key == kNone) return kNone;
        }
    }

    void put(std::uint32_t key, std::uint32_t value) {
        if ((size_ + 1) * 4 > capacity() * 3) rehash(capacity() == 0 ? 8 : capacity() * 2);
        std::uint32_t i = home(key);
        while (slots_[i].key != key && slots_[i].key != kNone) i = (i + 1) & mask_;
        if (slots_[i].key == kNone) ++size_;
        slots_[i] = {key, value};
    }

    void erase(std::uint32_t key) {
        if (mask_ == 0) return;
        std::uint32_t hole = home(key);
        while (slots_[hole].key != key) {
            if (slots_[hole].key == kNone) return;
            hole = (hole + 1) & mask_;
        }
        // Close the gap: move back every later item of the run whose home does not lie behind the hole.
        for (std::uint32_t i = (hole + 1) & mask_; slots_[i].key != kNone; i = (i + 1) & mask_) {
            if (((i - home(slots_[i].key)) & mask_) >= ((i - hole) & mask_)) {
                slots_[hole] = slots_[i];
                hole = i;
            }
        }
        slots_[hole].key = kNone;
        --size_;
    }

    std::uint32_t size() const { return size_; }
    std::size_t bytes() const { return capacity() * sizeof(Slot); }

private:
    struct Slot {
        std::uint32_t key;
        std::uint32_t value;
    };

    std::uint32_t capacity() const { return mask_ == 0 ? 0 : mask_ + 1; }
    std::uint32_t home(std::uint32_t key) const { return ((key * 0x9E3779B1u) >> 8) & mask_; }

    void rehash(std::uint32_t capacity_new) {
        const std::uint32_t old_capacity = capacity();
        std::unique_ptr<Slot[]> old = std::move(slots_);
        slots_.reset(new Slot[capacity_new]);
        mask_ = capacity_new - 1;
        size_ = 0;
        for (std::uint32_t i = 0; i < capacity_new; ++i) slots_[i].key = kNone;
        for (std::uint32_t i = 0; i < old_capacity; ++i) {
            if (old[i].key != kNone) put(old[i].key, old[i].value);
        }
    }

    std::unique_ptr<Slot[]> slots_;
    std::uint32_t mask_ = 0;
    std::uint32_t size_ = 0;
};

}  // namespace draftsmith
