// ggml's block formats, taken apart into codes, scales and minimums; each maps onto one of ours exactly.
// Layouts: the block structures that GGUF files are defined by (Q4_0 .. Q8_0, K-quants, IQ4).
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "half.hpp"
#include "packed.hpp"

namespace draftsmith {
namespace {

using Byte = std::uint8_t;

std::uint16_t word(const Byte* at) { return static_cast<std::uint16_t>(at[0] | (at[1] << 8)); }

// An IQ4 code stands for one of these; stored with 128 added.
constexpr int IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// The low halves of 16 bytes, then the high halves.
void split_nibbles(const Byte* packed, Byte* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = packed[i] & 15;
        codes[i + 16] = packed[i] >> 4;
    }
}

void add_fifth_bits(const Byte* bits, Byte* codes) {
    std::uint32_t word32;
    std::memcpy(&word32, bits, 4);
    for (int i = 0; i < 32; ++i) codes[i] = static_cast<Byte>(codes[i] | (((word32 >> i) & 1u) << 4));
}

// From codes whose zero is `zero` to codes whose zero is that of all 8-bit codes.
void move_zero(int zero, std::size_t count, Byte* codes) {
    for (std::size_t i = 0; i < count; ++i) codes[i] = static_cast<Byte>(codes[i] + zero_of(8) - zero);
}

void iq4_codes(const Byte* packed, Byte* codes) {
    split_nibbles(packed, codes);
    for (int i = 0; i < 32; ++i) codes[i] = static_cast<Byte>(IQ4_VALUES[codes[i]] + 128);
}

void take_q4_0(const Byte* block, std::size_t at, OutputRow& row) {
    row.scales[at] = word(block);
    split_nibbles(block + 2, &row.codes[at * 32]);
}
void take_q4_1(const Byte* block, std::size_t at, OutputRow& row) {
    row.scales[at] = word(block);
    row.mins[at] = word(block + 2);
    split_nibbles(block + 4, &row.codes[at * 32]);
}
void take_q5_0(const Byte* block, std::size_t at, OutputRow& row) {
    row.scales[at] = word(block);
    split_nibbles(block + 6, &row.codes[at * 32]);
    add_fifth_bits(block + 2, &row.codes[at * 32]);
    move_zero(16, 32, &row.codes[at * 32]);
}
void take_q5_1(const Byte* block, std::size_t at, OutputRow& row) {
    row.scales[at] = word(block);
    row.mins[at] = word(block + 2);
    split_nibbles(block + 8, &row.codes[at * 32]);
    add_fifth_bits(block + 4, &row.codes[at * 32]);
}
void take_q8_0(const Byte* block, std::size_t at, OutputRow& row) {
    row.scales[at] = word(block);
    for (std::size_t i = 0; i < 32; ++i) row.codes[at * 32 + i] = static_cast<Byte>(block[2 + i] ^ 0x80);
}
void take_iq4_nl(const Byte* block, std::size_t at, OutputRow& row) {
    row.scales[at] = word(block);
    iq4_codes(block + 2, &row.codes[at * 32]);
}

// The 6-bit scales and minimums of eight groups, packed into 12 bytes.
void take_six_bits(const Byte* packed, std::size_t at, OutputRow& row) {
    for (std::size_t j = 0; j < 8; ++j) {
        Byte scale, min;
        if (j < 4) {
            scale = packed[j] & 63;
            min = packed[j + 4] & 63;
        } else {
            scale = static_cast<Byte>((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4));
            min = static_cast<Byte>((packed[j + 4] >> 4) | ((packed[j] >> 6) << 4));
        }
        row.sub_scales[at * 8 + j] = scale;
        row.sub_mins[at * 8 + j] = min;
    }
}

void take_k_head(const Byte* block, std::size_t at, OutputRow& row) {
    row.scales[at] = word(block);
    row.mins[at] = word(block + 2) ^ 0x8000u;  // the format subtracts its minimums
    take_six_bits(block + 4, at, row);
}

void take_q4_k(const Byte* block, std::size_t at, OutputRow& row) {
    take_k_head(block, at, row);
    for (std::size_t pair = 0; pair < 4; ++pair) {
        for (std::size_t i = 0; i < 32; ++i) {
            const Byte both = block[16 + pair * 32 + i];
            row.codes[at * 256 + pair * 64 + i] = both & 15;
            row.codes[at * 256 + pair * 64 + 32 + i] = both >> 4;
        }
    }
}
void take_q5_k(const Byte* block, std::size_t at, OutputRow& row) {
    take_k_head(block, at, row);
    for (std::size_t pair = 0; pair < 4; ++pair) {
        for (std::size_t i = 0; i < 32; ++i) {
            const Byte both = block[48 + pair * 32 + i], high = block[16 + i];
            const unsigned first = (high >> (2 * pair)) & 1u, second = (high >> (2 * pair + 1)) & 1u;
            row.codes[at * 256 + pair * 64 + i] = static_cast<Byte>((both & 15) | (first << 4));
            row.codes[at * 256 + pair * 64 + 32 + i] = static_cast<Byte>((both >> 4) | (second << 4));
        }
    }
}
void take_q6_k(const Byte* block, std::size_t at, OutputRow& row) {
    row.scales[at] = word(block + 208);
    for (std::size_t i = 0; i < 16; ++i) row.sub_scales[at * 16 + i] = block[192 + i];
    for (std::size_t half = 0; half < 2; ++half) {
        const Byte* low = block + 64 * half;
        const Byte* high = block + 128 + 32 * half;
        Byte* codes = &row.codes[at * 256 + 128 * half];
        for (std::size_t i = 0; i < 32; ++i) {
            codes[i] = static_cast<Byte>((low[i] & 15) | ((high[i] & 3) << 4));
            codes[i + 32] = static_cast<Byte>((low[i + 32] & 15) | (((high[i] >> 2) & 3) << 4));
            codes[i + 64] = static_cast<Byte>((low[i] >> 4) | (((high[i] >> 4) & 3) << 4));
            codes[i + 96] = static_cast<Byte>((low[i + 32] >> 4) | (((high[i] >> 6) & 3) << 4));
        }
    }
    move_zero(32, 256, &row.codes[at * 256]);
}
void take_iq4_xs(const Byte* block, std::size_t at, OutputRow& row) {
    row.scales[at] = word(block);
    const unsigned high = word(block + 2);
    for (std::size_t group = 0; group < 8; ++group) {
        const unsigned low = (block[4 + group / 2] >> (4 * (group % 2))) & 15u;
        const int scale = static_cast<int>(low | (((high >> (2 * group)) & 3u) << 4)) - 32;
        row.sub_scales[at * 8 + group] = static_cast<Byte>(static_cast<std::int8_t>(scale));
        iq4_codes(block + 8 + 16 * group, &row.codes[at * 256 + group * 32]);
    }
}

struct GgmlType {
    std::string_view name;
    int block_inputs;
    std::size_t block_bytes;
    Format format;
    void (*take)(const Byte*, std::size_t, OutputRow&);
};

constexpr GgmlType TYPES[] = {
    {"Q4_0", 32, 18, {4, Scaling::PLAIN, false}, take_q4_0},
    {"Q4_1", 32, 20, {4, Scaling::PLAIN, true}, take_q4_1},
    {"Q5_0", 32, 22, {8, Scaling::PLAIN, false}, take_q5_0},
    {"Q5_1", 32, 24, {8, Scaling::PLAIN, true}, take_q5_1},
    {"Q8_0", 32, 34, {8, Scaling::PLAIN, false}, take_q8_0},
    {"IQ4_NL", 32, 18, {8, Scaling::PLAIN, false}, take_iq4_nl},
    {"Q4_K", 256, 144, {4, Scaling::SUPER, true}, take_q4_k},
    {"Q5_K", 256, 176, {8, Scaling::SUPER, true}, take_q5_k},
    {"Q6_K", 256, 210, {8, Scaling::FINE, false}, take_q6_k},
    {"IQ4_XS", 256, 136, {8, Scaling::SUPER, false}, take_iq4_xs},
};

bool is_finite(std::uint16_t half) { return (half & 0x7c00u) != 0x7c00u; }

}  // namespace

std::shared_ptr<Packed> pack_ggml(std::string_view type, const std::uint8_t* rows, std::size_t row_bytes, int outputs,
                                  int inputs) {
    for (const GgmlType& known : TYPES) {
        if (known.name != type) continue;
        const int blocks = inputs / known.block_inputs;
        if (inputs % known.block_inputs != 0 || row_bytes != static_cast<std::size_t>(blocks) * known.block_bytes) {
            throw std::invalid_argument("rows of " + std::to_string(row_bytes) + " bytes do not hold " +
                                        std::to_string(inputs) + " weights of type " + std::string(type));
        }
        auto packed = std::make_shared<Packed>(outputs, inputs, known.format);
        OutputRow row = packed->empty_row();
        for (int output = 0; output < outputs; ++output) {
            const Byte* stored = rows + static_cast<std::size_t>(output) * row_bytes;
            for (int block = 0; block < blocks; ++block) {
                known.take(stored + static_cast<std::size_t>(block) * known.block_bytes,
                           static_cast<std::size_t>(block), row);
            }
            for (const auto* halves : {&row.scales, &row.mins}) {
                for (const std::uint16_t half : *halves) {
                    if (!is_finite(half)) throw std::invalid_argument("a scale is not finite");
                }
            }
            packed->set(output, row);
        }
        return packed;
    }
    return nullptr;
}

}  // namespace draftsmith
