"""Kernels for CPUs as LLVM code that is built by hand, with llvmlite, and called by XLA.

XLA decides for each shape in which order a sum is taken, so the bits of a token depend on the
others in its batch; and it repacks weights and copies caches that a verification of few tokens
reads once. Pallas has no compiler for CPUs, and a C extension would need one at installation. So
the operations' `code.py` emit LLVM instructions through `emit.py`, for the shapes of a call,
`threads.py` divides their work among XLA's threads, and `runtime.py` compiles and calls them.
"""
