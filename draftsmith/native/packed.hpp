// Integer weights packed for the kernels: tiles of 16 outputs, each one stream of chunks of groups of inputs, each
// chunk its scales and minimums and then its codes: memory is read once, from front to back.
// Made once at load from ggml blocks or floats; read by every kernel. Invariant: a weight unpacks to exactly
// the value its ggml block stands for (scale and code multiply without rounding, see `dequantise`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace draftsmith {

constexpr int TILE = 16;        // outputs of a tile
constexpr int GROUP = 32;       // inputs that share an activation scale
constexpr int SUPER_GROUPS = 8; // groups of a K-quant's super-block, and of a chunk with one
constexpr int PLAIN_GROUPS = 2; // groups of any other chunk: their scales fill a cache line

// How the codes of a tile are stored and scaled. PLAIN: one fp16 scale per group. SUPER: one fp16 scale per
// super-block times an 8-bit integer per group (unsigned with a minimum, else signed). FINE: the same with a
// signed integer per 16 inputs.
enum class Scaling : std::uint8_t { PLAIN, SUPER, FINE };

struct Format {
    int bits;          // 4 or 8 per stored code
    Scaling scaling;
    bool has_min;      // a minimum per group is added; otherwise zero_of(bits) is subtracted from every code
};

constexpr int zero_of(int bits) { return bits == 4 ? 8 : 128; }

// The codes and scales of one output before it is laid out; sizes follow from the format.
struct OutputRow {
    std::vector<std::uint8_t> codes;          // [padded inputs]
    std::vector<std::uint16_t> scales, mins;  // fp16, per group or per super-block; minimums with their sign
    std::vector<std::uint8_t> sub_scales, sub_mins;
};

// Memory in huge pages where the system has them.
class Pages {
  public:
    Pages() = default;
    explicit Pages(std::size_t size);
    Pages(Pages&& other) noexcept;
    Pages& operator=(Pages&& other) noexcept;
    ~Pages();
    std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    std::uint8_t* data_ = nullptr;
    std::size_t size_ = 0;
};

class Packed {
  public:
    Packed(int outputs, int inputs, Format format);

    int outputs() const { return outputs_; }
    int inputs() const { return inputs_; }
    int groups() const { return groups_; }
    int tiles() const { return tiles_; }
    const Format& format() const { return format_; }
    std::size_t bytes() const { return tile_bytes_ * static_cast<std::size_t>(tiles_); }
    const std::uint8_t* tile(int index) const { return data_ + static_cast<std::size_t>(index) * tile_bytes_; }

    // Where the parts of a chunk begin; its scales are in front.
    std::size_t mins_at() const { return mins_at_; }
    std::size_t sub_scales_at() const { return sub_scales_at_; }
    std::size_t sub_mins_at() const { return sub_mins_at_; }
    std::size_t codes_at() const { return codes_at_; }

    OutputRow empty_row() const;
    void set(int output, const OutputRow& row);
    OutputRow get(int output) const;
    // Moves the weights into memory shared with others; most matrices are too small for a huge page of their own.
    void move_into(const std::shared_ptr<Pages>& pages, std::size_t offset);
    // The weights of one output [inputs].
    void dequantise(int output, float* values) const;

  private:
    template <class Visit>
    void visit(int output, Visit visit) const;

    int outputs_, inputs_, groups_, tiles_;
    Format format_;
    int chunk_groups_, chunks_;
    std::size_t mins_at_ = 0, sub_scales_at_ = 0, sub_mins_at_ = 0, codes_at_ = 0, chunk_bytes_ = 0, tile_bytes_ = 0;
    std::shared_ptr<Pages> pages_;
    std::uint8_t* data_ = nullptr;
};

// From rows of ggml blocks; null when the type has no exact place here. Throws std::invalid_argument for a shape
// that does not fit the type, or for a scale that is not finite.
std::shared_ptr<Packed> pack_ggml(std::string_view type, const std::uint8_t* rows, std::size_t row_bytes, int outputs,
                                  int inputs);

// From float rows [outputs, inputs]: 8 bits symmetric, or 4 bits with a minimum, a scale per 32 inputs. Throws
// std::invalid_argument for a weight that is not finite.
std::shared_ptr<Packed> pack_floats(const float* rows, int outputs, int inputs, int bits);

// The outputs named, in that order.
std::shared_ptr<Packed> select_outputs(const Packed& source, std::span<const std::int32_t> outputs);

}  // namespace draftsmith
