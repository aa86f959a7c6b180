// One element of every stratum: the kernels of sparse_numpy. One thread per block of 4 strata, which share one draw of
// Philox. Needs philox.cu. Builtin types only, no includes.

#define EACH(i, n)                                                                                                   \
    long long stride = (long long)gridDim.x * blockDim.x;                                                            \
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += stride)

// The element that stratum j of k over n elements gives for a random word.
static __device__ long long taken(long long j, long long n, long long k, unsigned int word)
{
    long long shorter = n / k, longer = n % k, length = shorter + (j < longer);
    return j * shorter + (j < longer ? j : longer) + (long long)((unsigned long long)word * length >> 32);
}

extern "C" __global__ void gather_strata(const float* x, long long n, long long k, unsigned long long key,
    unsigned int chunk, int multiply, float* values)
{
    EACH(b, (k + 3) / 4)
    {
        Philox numbers = philox(key, (unsigned int)b, chunk);
        for (long long j = 4 * b; j < 4 * b + 4 && j < k; ++j) {
            float value = x[taken(j, n, k, numbers.word[j % 4])];
            values[j] = multiply ? value * (float)(n / k + (j < n % k)) : value;
        }
    }
}

extern "C" __global__ void scatter_strata_add(
    const float* values, long long n, long long k, unsigned long long key, unsigned int chunk, float* out)
{
    EACH(b, (k + 3) / 4)
    {
        Philox numbers = philox(key, (unsigned int)b, chunk);
        for (long long j = 4 * b; j < 4 * b + 4 && j < k; ++j) {
            long long i = taken(j, n, k, numbers.word[j % 4]);
            out[i] = out[i] + values[j];
        }
    }
}
