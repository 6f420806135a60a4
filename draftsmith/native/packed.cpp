#include "packed.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "half.hpp"

namespace draftsmith {
namespace {

constexpr std::size_t HUGE_PAGE = std::size_t{2} << 20;
constexpr std::size_t LINE = 64;

std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

Pages::Pages(std::size_t size) : size_(size) {
    const std::size_t mapped = round_up(size, size < HUGE_PAGE ? 4096 : HUGE_PAGE);
    void* memory = mapped == 0 ? nullptr : mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (size >= HUGE_PAGE) madvise(memory, mapped, MADV_HUGEPAGE);
#endif
    data_ = static_cast<std::uint8_t*>(memory);
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

Pages::~Pages() {
    if (data_ != nullptr) munmap(data_, round_up(size_, size_ < HUGE_PAGE ? 4096 : HUGE_PAGE));
}

Packed::Packed(int outputs, int inputs, Format format)
    : outputs_(outputs),
      inputs_(inputs),
      groups_((inputs + GROUP - 1) / GROUP),
      tiles_((outputs + TILE - 1) / TILE),
      format_(format),
      chunk_groups_(format.scaling == Scaling::PLAIN ? PLAIN_GROUPS : SUPER_GROUPS),
      chunks_((groups_ + chunk_groups_ - 1) / chunk_groups_) {
    if (outputs < 1 || inputs < 1) throw std::invalid_argument("a weight matrix without rows or columns");
    const std::size_t scales = (format.scaling == Scaling::PLAIN ? PLAIN_GROUPS : 1) * TILE * 2;
    const std::size_t subs = format.scaling == Scaling::PLAIN  ? 0
                             : format.scaling == Scaling::FINE ? 2 * SUPER_GROUPS * TILE
                                                               : SUPER_GROUPS * TILE;
    mins_at_ = scales;
    sub_scales_at_ = mins_at_ + (format.has_min ? scales : 0);
    sub_mins_at_ = sub_scales_at_ + subs;
    codes_at_ = round_up(sub_mins_at_ + (format.has_min ? subs : 0), LINE);
    chunk_bytes_ = codes_at_ + static_cast<std::size_t>(chunk_groups_ * GROUP * TILE * format.bits / 8);
    tile_bytes_ = chunk_bytes_ * static_cast<std::size_t>(chunks_);
    pages_ = std::make_shared<Pages>(bytes());
    data_ = pages_->data();
}

void Packed::move_into(const std::shared_ptr<Pages>& pages, std::size_t offset) {
    std::memcpy(pages->data() + offset, data_, bytes());
    data_ = pages->data() + offset;
    pages_ = pages;
}

OutputRow Packed::empty_row() const {
    const bool is_plain = format_.scaling == Scaling::PLAIN;
    const auto num_scales = static_cast<std::size_t>(is_plain ? groups_ : chunks_);
    const auto num_subs = static_cast<std::size_t>(is_plain ? 0 : groups_ * (format_.scaling == Scaling::FINE ? 2 : 1));
    OutputRow row;
    row.codes.assign(static_cast<std::size_t>(groups_) * GROUP, 0);
    row.scales.assign(num_scales, 0);
    row.mins.assign(format_.has_min ? num_scales : 0, 0);
    row.sub_scales.assign(num_subs, 0);
    row.sub_mins.assign(format_.has_min ? num_subs : 0, 0);
    return row;
}

// Calls back with the place of every byte or 16-bit word of an output. A code of 4 bits shares its byte with the
// one 4 inputs further on.
template <class Visit>
void Packed::visit(int output, Visit visit) const {
    const auto lane = static_cast<std::size_t>(output % TILE);
    std::uint8_t* tile = data_ + static_cast<std::size_t>(output / TILE) * tile_bytes_;
    const bool is_plain = format_.scaling == Scaling::PLAIN;
    const auto per_chunk = static_cast<std::size_t>(is_plain ? PLAIN_GROUPS : 1);
    const auto subs = static_cast<std::size_t>(format_.scaling == Scaling::FINE ? 2 * SUPER_GROUPS : SUPER_GROUPS);
    const OutputRow shape = empty_row();
    const auto chunk = [&](std::size_t index) { return tile + index * chunk_bytes_; };
    for (std::size_t i = 0; i < shape.scales.size(); ++i) {
        std::uint8_t* scale = chunk(i / per_chunk) + (i % per_chunk * TILE + lane) * 2;
        visit.scale(i, scale);
        if (format_.has_min) visit.min(i, scale + mins_at_);
    }
    for (std::size_t i = 0; i < shape.sub_scales.size(); ++i) {
        std::uint8_t* sub = chunk(i / subs) + i % subs * TILE + lane;
        visit.sub_scale(i, sub[sub_scales_at_]);
        if (format_.has_min) visit.sub_min(i, sub[sub_mins_at_]);
    }
    const auto inputs = static_cast<std::size_t>(chunk_groups_) * GROUP;
    for (std::size_t start = 0; start < shape.codes.size(); start += inputs) {
        std::uint8_t* codes = chunk(start / inputs) + codes_at_ + lane * 4;
        const std::size_t count = std::min(inputs, shape.codes.size() - start);
        if (format_.bits == 4) {
            for (std::size_t i = 0; i < count; ++i) visit.half_code(start + i, codes[i / 8 * 64 + i % 4], i % 8 >= 4);
        } else {
            for (std::size_t i = 0; i < count; ++i) visit.code(start + i, codes[i / 4 * 64 + i % 4]);
        }
    }
}

void Packed::set(int output, const OutputRow& row) {
    struct Write {
        const OutputRow& row;
        void code(std::size_t input, std::uint8_t& byte) const { byte = row.codes[input]; }
        void half_code(std::size_t input, std::uint8_t& byte, bool is_high) const {
            const std::uint8_t code = row.codes[input];
            byte = static_cast<std::uint8_t>(is_high ? (byte & 15) | (code << 4) : (byte & 0xf0) | code);
        }
        void scale(std::size_t i, std::uint8_t* at) const { std::memcpy(at, &row.scales[i], 2); }
        void min(std::size_t i, std::uint8_t* at) const { std::memcpy(at, &row.mins[i], 2); }
        void sub_scale(std::size_t i, std::uint8_t& at) const { at = row.sub_scales[i]; }
        void sub_min(std::size_t i, std::uint8_t& at) const { at = row.sub_mins[i]; }
    };
    visit(output, Write{row});
}

OutputRow Packed::get(int output) const {
    struct Read {
        OutputRow& row;
        void code(std::size_t input, std::uint8_t byte) const { row.codes[input] = byte; }
        void half_code(std::size_t input, std::uint8_t byte, bool is_high) const {
            row.codes[input] = static_cast<std::uint8_t>(is_high ? byte >> 4 : byte & 15);
        }
        void scale(std::size_t i, const std::uint8_t* at) const { std::memcpy(&row.scales[i], at, 2); }
        void min(std::size_t i, const std::uint8_t* at) const { std::memcpy(&row.mins[i], at, 2); }
        void sub_scale(std::size_t i, std::uint8_t at) const { row.sub_scales[i] = at; }
        void sub_min(std::size_t i, std::uint8_t at) const { row.sub_mins[i] = at; }
    };
    OutputRow row = empty_row();
    visit(output, Read{row});
    return row;
}

// Without memory of its own: the decoder's threads call it, where nobody could hear that there is none.
void Packed::dequantise(int output, float* values) const {
    const auto lane = static_cast<std::size_t>(output % TILE);
    const std::uint8_t* tile = data_ + static_cast<std::size_t>(output / TILE) * tile_bytes_;
    const bool is_plain = format_.scaling == Scaling::PLAIN;
    const int finest = format_.scaling == Scaling::FINE ? GROUP / 2 : GROUP, chunk_inputs = chunk_groups_ * GROUP;
    for (int start = 0; start < inputs_; start += finest) {
        const std::uint8_t* chunk = tile + static_cast<std::size_t>(start / chunk_inputs) * chunk_bytes_;
        const int first = start % chunk_inputs;
        const std::size_t scale_at = (static_cast<std::size_t>(is_plain ? first / GROUP : 0) * TILE + lane) * 2;
        const std::size_t sub_at = static_cast<std::size_t>(first / finest) * TILE + lane;
        const auto half_at = [&](std::size_t at) {
            std::uint16_t half;
            std::memcpy(&half, chunk + at, 2);
            return half_to_float(half);
        };
        float scale = half_at(scale_at);
        float min = format_.has_min ? half_at(mins_at_ + scale_at) : 0.0f;
        if (!is_plain) {
            const std::uint8_t sub = chunk[sub_scales_at_ + sub_at];
            scale *= format_.has_min ? static_cast<float>(sub) : static_cast<float>(static_cast<std::int8_t>(sub));
            if (format_.has_min) min *= static_cast<float>(chunk[sub_mins_at_ + sub_at]);
        }
        const std::uint8_t* codes = chunk + codes_at_ + lane * 4;
        const int count = std::min(finest, inputs_ - start), zero = format_.has_min ? 0 : zero_of(format_.bits);
        for (int i = 0; i < count; ++i) {
            const int at = first + i;
            int code = format_.bits == 4 ? codes[at / 8 * 64 + at % 4] : codes[at / 4 * 64 + at % 4];
            if (format_.bits == 4) code = at % 8 >= 4 ? code >> 4 : code & 15;
            values[start + i] = scale * static_cast<float>(code - zero) + min;
        }
    }
}

std::shared_ptr<Packed> pack_floats(const float* rows, int outputs, int inputs, int bits) {
    if (bits != 4 && bits != 8) throw std::invalid_argument("weights are packed to 4 or 8 bits");
    const Format format = bits == 8 ? Format{8, Scaling::PLAIN, false} : Format{4, Scaling::PLAIN, true};
    auto packed = std::make_shared<Packed>(outputs, inputs, format);
    OutputRow row = packed->empty_row();
    for (int output = 0; output < outputs; ++output) {
        const float* values = rows + static_cast<std::size_t>(output) * static_cast<std::size_t>(inputs);
        for (int group = 0; group < packed->groups(); ++group) {
            const int start = group * GROUP, end = start + GROUP < inputs ? start + GROUP : inputs;
            float least = 0.0f, most = 0.0f;
            for (int i = start; i < end; ++i) {
                if (!std::isfinite(values[i])) throw std::invalid_argument("a weight is not finite");
                least = std::fmin(least, values[i]);
                most = std::fmax(most, values[i]);
            }
            const auto at = static_cast<std::size_t>(group);
            const float span = bits == 8 ? std::fmax(-least, most) / 127.0f : (most - least) / 15.0f;
            row.scales[at] = float_to_half(span);
            if (bits == 4) row.mins[at] = float_to_half(least);
            const float scale = half_to_float(row.scales[at]);
            const float base = bits == 8 ? 0.0f : half_to_float(row.mins[at]);
            if (!std::isfinite(scale) || !std::isfinite(base)) {
                throw std::invalid_argument("a weight is too large for a half precision scale");
            }
            for (int i = start; i < end; ++i) {
                const float steps = scale > 0.0f ? std::nearbyintf((values[i] - base) / scale) : 0.0f;
                const float code = bits == 8 ? std::fmin(std::fmax(steps, -127.0f), 127.0f) + 128.0f
                                             : std::fmin(std::fmax(steps, 0.0f), 15.0f);
                row.codes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(code);
            }
            for (int i = end; i < start + GROUP; ++i) {
                row.codes[static_cast<std::size_t>(i)] = bits == 8 ? 128 : 0;
            }
        }
        packed->set(output, row);
    }
    return packed;
}

std::shared_ptr<Packed> select_outputs(const Packed& source, std::span<const std::int32_t> outputs) {
    auto chosen = std::make_shared<Packed>(static_cast<int>(outputs.size()), source.inputs(), source.format());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        if (outputs[i] < 0 || outputs[i] >= source.outputs()) throw std::invalid_argument("no such output");
        chosen->set(static_cast<int>(i), source.get(outputs[i]));
    }
    return chosen;
}

}  // namespace draftsmith
