// QSGD: norms of buckets, levels by random rounding, decoded values, packed codes. Needs philox.cu. The same bits as the
// CPU kernels: float32 with rounded division, no fused multiply-add, and one order of the sums of the l2 norm.

// One thread per bucket of d elements. l2: 16 sums in double, added up as 8 + 8, 4 + 4, 2 + 2, 1 + 1; else the largest |x|.
extern "C" __global__ void qsgd_norms(const float* x, long long n, long long d, int l2, float* norms)
{
    long long buckets = (n + d - 1) / d, stride = (long long)gridDim.x * blockDim.x;
    for (long long b = (long long)blockIdx.x * blockDim.x + threadIdx.x; b < buckets; b += stride) {
        long long first = b * d, stop = first + d < n ? first + d : n;
        float largest = 0.0f;
        double lanes[16] = {0};
        for (long long i = first; i < stop; ++i) {
            float size = x[i] < 0.0f ? -x[i] : x[i];
            double one = (double)size;
            largest = size > largest ? size : largest;
            lanes[(i - first) % 16] = lanes[(i - first) % 16] + one * one;
        }
        for (int half = 8; half; half /= 2)
            for (int k = 0; k < half; ++k) lanes[k] = lanes[k] + lanes[half + k];
        double root = sqrt(lanes[0]), most = 3.4028234663852886e38;
        norms[b] = l2 ? (float)(root < most ? root : most) : largest;
    }
}

// One thread per 8 elements, those of one block of random numbers; levels of buckets of norm 0 are 0.
extern "C" __global__ void qsgd_levels(
    const float* x, long long n, long long d, int s, const float* norms, unsigned long long key, unsigned int chunk,
    short* levels)
{
    long long stride = (long long)gridDim.x * blockDim.x;
    float top = (float)s;
    for (long long b = (long long)blockIdx.x * blockDim.x + threadIdx.x; 8 * b < n; b += stride) {
        Philox numbers = philox(key, (unsigned int)b, chunk);
        for (int k = 0; k < 8 && 8 * b + k < n; ++k) {
            long long i = 8 * b + k;
            float nu = norms[i / d], value = x[i], a = 0.0f;
            if (nu > 0.0f) a = (value < 0.0f ? -value : value) / nu * top;
            a = a < top ? a : top;
            int low = (int)a;
            float rest = (a - (float)low) * 65536.0f;
            int level = low + ((float)dither_of(numbers, k) < rest ? 1 : 0);
            levels[i] = (short)(value < 0.0f ? -level : level);
        }
    }
}

// levels: all n of them. add: out += nu * (level / s), else out = that.
extern "C" __global__ void qsgd_dequantise(
    const short* levels, const float* norms, long long n, long long d, int s, int add, float* out)
{
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
        float part = (float)levels[i] / (float)s;
        float value = norms[i / d] * part;
        if (!add) out[i] = value;
        else if (norms[i / d] > 0.0f) out[i] = out[i] + value;
    }
}
