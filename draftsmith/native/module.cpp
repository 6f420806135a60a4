// The Python module draftsmith._native: binds the native parts, holds no logic of its own.
#include <nanobind/nanobind.h>

namespace draftsmith {
void bind_decoder(nanobind::module_& module);
void bind_linear(nanobind::module_& module);
void bind_row_drafter(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);
void bind_suffix_index(nanobind::module_& module);
}  // namespace draftsmith

NB_MODULE(_native, module) {
    module.doc() = "Native parts of Draftsmith";
    draftsmith::bind_decoder(module);
    draftsmith::bind_linear(module);
    draftsmith::bind_row_drafter(module);
    draftsmith::bind_sampling(module);
    draftsmith::bind_suffix_index(module);
}
