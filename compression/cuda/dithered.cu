// Rounding at random: the kernels of dithered_numpy. One thread per block of 8 elements, which share one draw of Philox.
// Needs philox.cu. Builtin types only, no includes.

#define EACH(i, n)                                                                                                   \
    long long stride = (long long)gridDim.x * blockDim.x;                                                            \
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += stride)

extern "C" __global__ void encode_natural(const unsigned int* x, long long n, unsigned long long key,
    unsigned int chunk, unsigned char* exponents, unsigned char* signs)
{
    EACH(b, (n + 7) / 8)
    {
        Philox numbers = philox(key, (unsigned int)b, chunk);
        unsigned int packed = 0;
        for (int k = 0; k < 8 && 8 * b + k < n; ++k) {
            unsigned int bits = x[8 * b + k], exponent = bits >> 23 & 255u;
            bool up = dither_of(numbers, k) << 7 < (bits & 0x7fffffu);
            exponents[8 * b + k] = (unsigned char)(exponent + (up && exponent > 0 && exponent < 254));
            packed |= (bits >> 31 << 7) >> k;
        }
        signs[b] = (unsigned char)packed;
    }
}

extern "C" __global__ void decode_natural_add(
    const unsigned char* exponents, const unsigned char* signs, long long n, float scale, float* out)
{
    EACH(i, n)
    {
        union {
            float f;
            unsigned int u;
        } value;
        value.u = (unsigned int)exponents[i] << 23 | (unsigned int)(signs[i / 8] >> (7 - i % 8) & 1) << 31;
        float scaled = value.f * scale;
        out[i] = out[i] + scaled;
    }
}

// lanes: for each bucket 64 sums of squares. maxima: zeros, one for each bucket; filled with the bits of the largest |x|
extern "C" __global__ void ternary_lanes(
    const float* x, long long n, long long bucket, double* lanes, unsigned int* maxima)
{
    EACH(t, (n + bucket - 1) / bucket * 64)
    {
        long long b = t / 64, stop = (b + 1) * bucket < n ? (b + 1) * bucket : n;
        double sum = 0.0;
        unsigned int most = 0;
        for (long long i = b * bucket + t % 64; i < stop; i += 64) {
            double wide = (double)x[i], square = wide * wide;
            unsigned int bits = ((const unsigned int*)x)[i] & 0x7fffffffu;
            sum = sum + square;
            most = bits > most ? bits : most;
        }
        lanes[t] = sum;
        if (most) atomicMax(maxima + b, most);
    }
}

// scales: on entry the largest magnitudes, on return the scales
extern "C" __global__ void ternary_limits(double* lanes, long long n, long long bucket, double clip, float* scales)
{
    EACH(b, (n + bucket - 1) / bucket)
    {
        long long size = (b + 1) * bucket < n ? bucket : n - b * bucket;
        double* own = lanes + 64 * b;
        for (int half = 32; half; half /= 2)
            for (int i = 0; i < half; ++i) own[i] = own[i] + own[i + half];
        double limit = sqrt(own[0] / (double)size) * clip;
        if (clip > 0.0 && limit < (double)scales[b]) scales[b] = (float)limit;
    }
}

// out has 4 * ceil(n / 16) bytes of four codes; a thread writes the two bytes of its block of 8
extern "C" __global__ void encode_ternary(const float* x, long long n, const float* scales, long long bucket,
    unsigned long long key, unsigned int chunk, unsigned char* out)
{
    EACH(b, (n + 15) / 16 * 2)
    {
        Philox numbers = philox(key, (unsigned int)b, chunk);
        unsigned int codes = 0;
        for (int k = 0; k < 8; ++k) {
            long long i = 8 * b + k;
            unsigned int code = 0;
            if (i < n && scales[i / bucket] > 0.0f) {
                float v = x[i], share = (v < 0.0f ? -v : v) / scales[i / bucket] * 65536.0f;
                if ((float)dither_of(numbers, k) < share) code = v >= 0.0f ? 3u : 2u;
            }
            codes = codes << 2 | code;
        }
        out[2 * b] = (unsigned char)(codes >> 8);
        out[2 * b + 1] = (unsigned char)codes;
    }
}

extern "C" __global__ void decode_ternary_add(
    const unsigned char* data, long long n, const float* scales, long long bucket, float* out)
{
    EACH(i, n)
    {
        unsigned int code = data[i / 4] >> (6 - 2 * (i % 4)), high = code >> 1 & 1u, low = code & 1u;
        float value = (float)((int)(high & low) - (int)(high & ~low)) * scales[i / bucket];
        out[i] = out[i] + value;
    }
}

extern "C" __global__ void round_ints(const float* x, long long n, const float* scales, long long block,
    unsigned long long key, unsigned int chunk, signed char* codes)
{
    EACH(b, (n + 7) / 8)
    {
        Philox numbers = philox(key, (unsigned int)b, chunk);
        for (int k = 0; k < 8 && 8 * b + k < n; ++k) {
            long long i = 8 * b + k;
            float scale = scales[i / block], v = x[i], size = scale > 0.0f ? (v < 0.0f ? -v : v) / scale : 0.0f;
            int below = (int)size;
            int code = below + ((float)dither_of(numbers, k) < (size - (float)below) * 65536.0f);
            code = code < 127 ? code : 127;
            codes[i] = (signed char)(v < 0.0f ? -code : code);
        }
    }
}
