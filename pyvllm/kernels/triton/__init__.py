"""Kernels in Triton, for GPUs. They run on CPUs too, in Triton's interpreter, for tests."""
