// Small floats, scaled blocks and one bit: the kernels of dense_numpy. Elementwise ones take one element (or one byte of
// eight bits) per thread. Sums run in 64 lanes of every bucket, one thread each, and are folded in halves, so that the
// bits are those of the CPU. Builtin types only, no includes.

union FloatBits {
    float f;
    unsigned int u;
};

static __device__ float as_float(unsigned int u)
{
    FloatBits b;
    b.u = u;
    return b.f;
}

static __device__ unsigned int as_bits(float f)
{
    FloatBits b;
    b.f = f;
    return b.u;
}

static __device__ unsigned int round_float(float f, int nbytes, int mantissa, int bias, unsigned int top)
{
    unsigned int bits = as_bits(f), magnitude = bits & 0x7fffffffu, drop = 23 - mantissa, code;
    if (magnitude < (unsigned int)(128 - bias) << 23) {
        unsigned int magic = (unsigned int)(151 - bias - mantissa) << 23;
        code = as_bits(as_float(magnitude) + as_float(magic)) - magic;
    } else {
        unsigned int half = (1u << (drop - 1)) - 1u;
        code = ((magnitude + half + (magnitude >> drop & 1u)) >> drop) - ((unsigned int)(127 - bias) << mantissa);
        code = code < top ? code : top;
    }
    return code | bits >> 31 << (8 * nbytes - 1);
}

static __device__ float widen(unsigned int code, int nbytes, int mantissa, int bias)
{
    unsigned int sign = 1u << (8 * nbytes - 1);
    unsigned int bits = (code & (sign - 1u)) << (23 - mantissa) | (code & sign) << (32 - 8 * nbytes);
    return as_float(bits) * as_float((unsigned int)(254 - bias) << 23);
}

#define EACH(i, n)                                                                                                   \
    long long stride = (long long)gridDim.x * blockDim.x;                                                            \
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += stride)

// maxima: zeros, one for each block; filled with the bits of the largest |x|
extern "C" __global__ void block_maxima(const unsigned int* x, long long n, long long block, unsigned int* maxima)
{
    EACH(t, (n + block - 1) / block * 64)
    {
        long long b = t / 64, stop = (b + 1) * block < n ? (b + 1) * block : n;
        unsigned int most = 0;
        for (long long i = b * block + t % 64; i < stop; i += 64) {
            unsigned int bits = x[i] & 0x7fffffffu;
            most = bits > most ? bits : most;
        }
        if (most) atomicMax(maxima + b, most);
    }
}

// scales: on entry the bits of the largest magnitudes, on return the scales
extern "C" __global__ void block_scales(float* scales, long long blocks, float top)
{
    EACH(b, blocks)
    {
        float scale = scales[b] / top;
        if (scale * top > 3.4028234663852886e38f) scale = as_float(as_bits(scale) - 1u);
        scales[b] = scale < 1.1754943508222875e-38f ? 0.0f : scale;
    }
}

extern "C" __global__ void encode_floats(const float* x, long long n, const float* scales, long long block, int nbytes,
    int mantissa, int bias, int top, unsigned char* codes)
{
    EACH(i, n)
    {
        float scale = scales[i / block];
        unsigned int code = scale > 0.0f ? round_float(x[i] / scale, nbytes, mantissa, bias, (unsigned int)top) : 0u;
        if (nbytes == 1) codes[i] = (unsigned char)code;
        else ((unsigned short*)codes)[i] = (unsigned short)code;
    }
}

extern "C" __global__ void decode_floats_add(const unsigned char* codes, long long n, const float* scales,
    long long block, int nbytes, int mantissa, int bias, float* out)
{
    EACH(i, n)
    {
        unsigned int code = nbytes == 1 ? codes[i] : ((const unsigned short*)codes)[i];
        float value = widen(code, nbytes, mantissa, bias) * scales[i / block];
        out[i] = out[i] + value;
    }
}

extern "C" __global__ void encode_ints(
    const float* x, long long n, const float* scales, long long block, signed char* codes)
{
    EACH(i, n)
    {
        float scale = scales[i / block], magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds, ties to even
        float value = scale > 0.0f ? (x[i] / scale + magic) - magic : 0.0f;
        value = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
        codes[i] = (signed char)(int)value;
    }
}

extern "C" __global__ void decode_ints_add(
    const signed char* codes, long long n, const float* scales, long long block, float* out)
{
    EACH(i, n)
    {
        float value = (float)codes[i] * scales[i / block];
        out[i] = out[i] + value;
    }
}

// residual += x. lanes: for each bucket 64 sums of the elements >= 0, then 64 of the others' magnitudes, times 2^-16;
// counts: zeros, one for each bucket, filled with the number of elements >= 0.
extern "C" __global__ void sign_lanes(
    const float* x, float* residual, long long n, long long bucket, float* lanes, unsigned int* counts)
{
    EACH(t, (n + bucket - 1) / bucket * 64)
    {
        long long b = t / 64, lane = t % 64, stop = (b + 1) * bucket < n ? (b + 1) * bucket : n;
        float up = 0.0f, down = 0.0f;
        unsigned int count = 0;
        for (long long i = b * bucket + lane; i < stop; i += 64) {
            float r = residual[i] + x[i];
            residual[i] = r;
            float small = r * 1.52587890625e-05f;
            if (r >= 0.0f) {
                up = up + small;
                ++count;
            } else {
                down = down - small;
            }
        }
        lanes[128 * b + lane] = up;
        lanes[128 * b + 64 + lane] = down;
        if (count) atomicAdd(counts + b, count);
    }
}

static __device__ float fold(float* lanes)
{
    for (int half = 32; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0];
}

static __device__ float mean_of(float total, long long count)
{
    float mean = total / (float)(count ? count : 1) * 65536.0f;
    return mean < 3.4028234663852886e38f ? mean : 3.4028234663852886e38f;
}

extern "C" __global__ void sign_means(
    float* lanes, const unsigned int* counts, long long n, long long bucket, int means, float* scales)
{
    EACH(b, (n + bucket - 1) / bucket)
    {
        long long size = (b + 1) * bucket < n ? bucket : n - b * bucket, above = counts[b];
        float up = fold(lanes + 128 * b), down = fold(lanes + 128 * b + 64);
        if (means == 2) {
            scales[2 * b] = mean_of(up, above);
            scales[2 * b + 1] = mean_of(down, size - above);
        } else {
            scales[b] = mean_of(up + down, size);
        }
    }
}

extern "C" __global__ void sign_bits(
    float* residual, long long n, long long bucket, int means, const float* scales, unsigned char* bits)
{
    EACH(byte, (n + 7) / 8)
    {
        const float* scale = scales + means * (8 * byte / bucket);
        unsigned int packed = 0;
        for (int k = 0; k < 8; ++k) {
            long long i = 8 * byte + k;
            if (i >= n) continue;
            float r = residual[i];
            packed |= (r >= 0.0f ? 0x80u : 0u) >> k;
            residual[i] = r >= 0.0f ? r - scale[0] : r + scale[means - 1];
        }
        bits[byte] = (unsigned char)packed;
    }
}

extern "C" __global__ void decode_signs_add(
    const unsigned char* bits, long long n, const float* scales, long long bucket, int means, float* out)
{
    EACH(i, n)
    {
        const float* scale = scales + means * (i / bucket);
        out[i] = bits[i / 8] >> (7 - i % 8) & 1 ? out[i] + scale[0] : out[i] - scale[means - 1];
    }
}
