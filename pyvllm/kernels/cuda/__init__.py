"""Hand-written CUDA C++ for Hopper, compiled at first use.

The sources travel as text in the wheel and need no CUDA header and no nvcc: NVRTC, on which torch depends already,
makes a cubin of each variant, and a cache on disk keeps it.
"""
