// One packed matrix that multiplies rows of floats: a linear layer of a drafter whose other arithmetic is Python's.
// Called from Python through bind_linear.cpp, by one caller at a time. Invariant: what is computed for a row depends on
// that row alone, bit for bit, however many rows and threads there are.
#pragma once

#include <memory>
#include <vector>

#include "activation_rows.hpp"
#include "kernels.hpp"
#include "packed.hpp"
#include "pool.hpp"

namespace draftsmith {

class PackedLinear {
  public:
    PackedLinear(std::shared_ptr<Packed> weights, std::shared_ptr<Pool> pool, const Kernels* kernels);

    // out [rows][outputs] = x [rows][inputs] times the weights.
    void multiply(const float* x, int rows, float* out);

    const Packed& weights() const { return *weights_; }

  private:
    void quantise(const float* x, int row, int rows, Floats& padded);
    void tiles(int first, int end, int rows, float* out, Floats& part);

    std::shared_ptr<Packed> weights_;
    std::shared_ptr<Pool> pool_;
    const Kernels* kernels_;
    Quantised codes_;
    std::vector<Floats> padded_, parts_;  // per thread
};

}  // namespace draftsmith
