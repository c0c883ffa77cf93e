// Makes the library importable as inference_svc.kernels._native, so that tools which expect a module find one. Kev
// itself loads it with ctypes (library.py) and calls the C ABI. Without Python's headers the library is built all the
// same.
#if __has_include(<Python.h>)

#include <Python.h>

PyMODINIT_FUNC PyInit__native(void) {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT,
      "_native",
      "Kev's kernels; call them through inference_svc.kernels.library.",
      -1,
      nullptr,
      nullptr,
      nullptr,
      nullptr,
      nullptr,
  };
  return PyModule_Create(&definition);
}

#endif
