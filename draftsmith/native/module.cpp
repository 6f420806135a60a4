// The Python module draftsmith._native: binds the native parts, holds no logic of its own.
#include <nanobind/nanobind.h>

NB_MODULE(_native, module) {
    module.doc() = "Native parts of Draftsmith";
}
