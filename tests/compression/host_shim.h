// Lets a C++ compiler take CUDA text: threads run one after another, so a kernel may use atomics but must not wait
// for other threads of its block. A grid smaller than the data makes every thread walk in strides.
#pragma once

#include <cmath>
using std::sqrt;

#define __global__
#define __device__

struct Position {
    unsigned int x, y, z;
};
static Position gridDim, blockDim, blockIdx, threadIdx;

static inline unsigned int atomicMax(unsigned int* address, unsigned int value)
{
    unsigned int old = *address;
    if (value > old) *address = value;
    return old;
}

template <class Kernel, class... Arguments>
static void launch(Kernel kernel, Arguments... arguments)
{
    gridDim = {3, 1, 1};
    blockDim = {5, 1, 1};
    for (blockIdx = {0, 0, 0}; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (threadIdx = {0, 0, 0}; threadIdx.x < blockDim.x; ++threadIdx.x) kernel(arguments...);
}
