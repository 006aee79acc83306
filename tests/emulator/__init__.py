"""Runs the CUDA sources of kernels/cuda on the host, so that tests need no card.

``with launch.emulated():`` sends kernel launches here and makes NumPy arrays count as the device's;
in tests the fixture ``device`` does so. Needs g++ and addr2line (binutils) on Linux, x86-64 or
aarch64.

How it works. ``build`` compiles a .cu file, with emulated.cuh in place of the first section of
common.cuh, to a shared library (cached on disk). fibers.cpp runs the threads of a block as fibers,
one block after the other; warp.cpp computes what lanes do together once all of them have arrived;
memory.cpp sees every load and store, because the code that GCC's sanitizers insert calls hooks.cpp.

What it finds, as a RuntimeError with kernel, block, thread and line:
- accesses outside of the arrays that the kernel got, of null, to const arrays, or not aligned;
- indices outside of arrays in shared and local memory, signed overflow, division by zero;
- races in shared and global memory: two threads, one of them writes, and no barrier or warp_sync is
  between them (blocks are not ordered at all, unless the kernel calls __threadfence);
- uses of what cp_async_16 copies before its thread waited for it;
- barriers and collectives that diverge or deadlock, stack overflow, endless loops.
Shared memory starts as NaN. Arguments that do not fit the kernel's signature raise TypeError.

What it does not find: wrong addresses that a kernel reads from a table (a launch that gets an array
of 64-bit integers may touch any address); races once the arrays written have more than 16 million
elements in all; blocks that wait for one another (they look endless); and what hangs on the card's
rounding: a matrix product here sums exactly and rounds once, approximate functions are libm's.
"""
