// 2-bit compression: one thread per byte of four codes. The first element has the top two bits; 11 is +t, 10 is -t,
// 00 and 01 are nothing. Buffers have 4 * ceil(n / 16) bytes. Exact float32 without fused multiply-add, so that the
// bits are those of the CPU kernels. Builtin types only, no includes.

static __device__ int value_of(unsigned int byte, int position)
{
    unsigned int code = byte >> (6 - 2 * position);
    unsigned int high = code >> 1 & 1u, low = code & 1u;
    return (int)(high & low) - (int)(high & ~low);
}

extern "C" __global__ void quantise2(
    const float* gradient, float* residual, long long n, float threshold, unsigned char* out)
{
    long long bytes = (n + 15) / 16 * 4, stride = (long long)gridDim.x * blockDim.x;
    for (long long b = (long long)blockIdx.x * blockDim.x + threadIdx.x; b < bytes; b += stride) {
        unsigned int byte = 0;
        for (int k = 0; k < 4; ++k) {
            long long i = 4 * b + k;
            unsigned int code = 0;
            if (i < n) {
                float r = residual[i] + gradient[i];
                if (r >= threshold) {
                    code = 3;
                    r = r - threshold;
                } else if (r <= -threshold) {
                    code = 2;
                    r = r + threshold;
                }
                residual[i] = r;
            }
            byte = byte << 2 | code;
        }
        out[b] = (unsigned char)byte;
    }
}

extern "C" __global__ void decode2(const unsigned char* data, long long n, float threshold, float* out)
{
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long b = (long long)blockIdx.x * blockDim.x + threadIdx.x; 4 * b < n; b += stride)
        for (int k = 0; k < 4 && 4 * b + k < n; ++k) out[4 * b + k] = (float)value_of(data[b], k) * threshold;
}

// data: the device addresses of `workers` buffers. Codes are counted as integers and multiplied once.
extern "C" __global__ void decode2_add_many(
    const unsigned long long* data, int workers, long long n, float threshold, float* out)
{
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long b = (long long)blockIdx.x * blockDim.x + threadIdx.x; 4 * b < n; b += stride) {
        int count[4] = {0, 0, 0, 0};
        for (int w = 0; w < workers; ++w) {
            unsigned int byte = ((const unsigned char*)data[w])[b];
            for (int k = 0; k < 4; ++k) count[k] += value_of(byte, k);
        }
        for (int k = 0; k < 4 && 4 * b + k < n; ++k) {
            float sum = (float)count[k] * threshold;
            out[4 * b + k] = out[4 * b + k] + sum;
        }
    }
}
