// 16-bit random numbers of the elements of a chunk, one thread per block of 8. Needs philox.cu.

extern "C" __global__ void dither16(
    unsigned long long key, unsigned int chunk, long long n, unsigned short* out)
{
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long b = (long long)blockIdx.x * blockDim.x + threadIdx.x; 8 * b < n; b += stride) {
        Philox numbers = philox(key, (unsigned int)b, chunk);
        for (int k = 0; k < 8 && 8 * b + k < n; ++k) out[8 * b + k] = (unsigned short)dither_of(numbers, k);
    }
}
