// The largest bit pattern of |x| as an unsigned integer: it grows with |x|, and infinity and NaN are the largest.
// Builtin types only, no includes: NVRTC without a toolkit, and a C++ compiler with a small shim, take this text.

extern "C" __global__ void max_abs_bits(const unsigned int* x, long long n, unsigned int* largest)
{
    // one atomic for each thread that saw anything: threads walk the array in strides of the whole grid
    long long stride = (long long)gridDim.x * blockDim.x;
    unsigned int most = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        unsigned int bits = x[i] & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    if (most) atomicMax(largest, most);
}
