// Growable array of trivially copyable items on realloc, aligned to a cache line.
// Used by the suffix tree for its big tables: realloc moves large blocks by remapping pages, so growth
// neither copies nor ever holds two copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace draftsmith {

template <typename T>
class RawVector {
    static_assert(std::is_trivially_copyable_v<T>);
    static constexpr std::size_t kAlign = 64;

public:
    RawVector() = default;
    RawVector(const RawVector&) = delete;
    RawVector& operator=(const RawVector&) = delete;
    RawVector(RawVector&& other) noexcept { swap(other); }
    RawVector& operator=(RawVector&& other) noexcept {
        swap(other);
        return *this;
    }
    ~RawVector() { std::free(block_); }

    T& operator[](std::size_t i) { return data_[i]; }
    const T& operator[](std::size_t i) const { return data_[i]; }
    std::size_t size() const { return size_; }
    std::size_t capacity_bytes() const { return block_ ? capacity_ * sizeof(T) + kAlign : 0; }

    // New items are left uninitialised.
    void resize(std::size_t size) {
        if (size > capacity_) grow(size);
        size_ = size;
    }

    void swap(RawVector& other) noexcept {
        std::swap(block_, other.block_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(capacity_, other.capacity_);
    }

private:
    void grow(std::size_t size) {
        std::size_t capacity = capacity_ + capacity_ / 4 + 64;
        if (capacity < size) capacity = size;
        const std::size_t old_shift = reinterpret_cast<char*>(data_) - static_cast<char*>(block_);
        char* block = static_cast<char*>(std::realloc(block_, capacity * sizeof(T) + kAlign));
        if (block == nullptr) throw std::bad_alloc();
        const std::size_t shift = kAlign - reinterpret_cast<std::uintptr_t>(block) % kAlign;
        if (size_ != 0 && shift != old_shift) std::memmove(block + shift, block + old_shift, size_ * sizeof(T));
        block_ = block;
        data_ = reinterpret_cast<T*>(block + shift);
        capacity_ = capacity;
    }

    void* block_ = nullptr;
    T* data_ = nullptr;
    std::size_t size_ = 0;
    std::size_t capacity_ = 0;
};

}  // namespace draftsmith
