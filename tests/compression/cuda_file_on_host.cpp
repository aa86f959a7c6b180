// One file of compression/cuda, CUDA_TEXT, for the CPU: its kernels are functions of their own name, and the caller
// says which thread of which block runs. Built by the fixture `cuda_files_on_host`.
#include "host_shim.h"

static inline unsigned int atomicAdd(unsigned int* address, unsigned int value)
{
    unsigned int old = *address;
    *address = old + value;
    return old;
}

#include <math.h>
#include CUDA_TEXT

extern "C" void place_thread(unsigned int blocks, unsigned int threads, unsigned int block, unsigned int thread)
{
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    blockIdx = {block, 0, 0};
    threadIdx = {thread, 0, 0};
}
