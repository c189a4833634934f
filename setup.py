"""The compiled parts; everything else is in pyproject.toml.

A machine without a compiler installs all the same: ``optional`` makes a failed build a warning. Statistics are then
read by torch operations, and nodes are met in Python.
"""

import sys
import sysconfig

from setuptools import Extension, setup

UNIX = ["-O3", "-g0", "-std=gnu11", "-fvisibility=hidden", "-fopenmp-simd"]  # its pragmas vectorise sums; no runtime

HOW = {
    "define_macros": [("Py_LIMITED_API", "0x030B0000")],
    "extra_compile_args": ["/O2", "/std:c11"] if sys.platform == "win32" else UNIX,
    "py_limited_api": True,
    "optional": True,
}

kernel = Extension(
    "retrograd.core.statistics._kernel",
    sources=[
        f"src/retrograd/core/statistics/{name}.c" for name in ("_kernel", "_launcher", "_tensor", "_fold", "_elements")
    ],
    depends=[
        f"src/retrograd/core/statistics/{name}.h"
        for name in ("_launcher", "_tensor", "_fold", "_elements", "_exponents", "_moments")
    ],
    **HOW,
)

native = Extension(
    "retrograd.core.hooks._native",
    sources=[f"src/retrograd/core/hooks/{name}.c" for name in ("_native", "_nodes", "_operations", "_builtins")],
    depends=["src/retrograd/core/hooks/_native.h"],
    **HOW,
)

# A Python without a GIL has no stable ABI and is not supported by the kernel, which counts on the GIL.
HAS_GIL = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[kernel, native] if HAS_GIL else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if HAS_GIL else {},
)
