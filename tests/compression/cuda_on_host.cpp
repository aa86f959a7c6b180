// Every kernel of compression/cuda as a host function of the same arguments; built by the fixture `cuda_on_host`.
#include "host_shim.h"

#include "max_abs.cu"
#include "philox.cu"
#include "dither.cu"
#include "qsgd.cu"
#include "twobit.cu"

extern "C" {

void host_max_abs_bits(const unsigned int* x, long long n, unsigned int* largest) { launch(max_abs_bits, x, n, largest); }

void host_quantise2(const float* gradient, float* residual, long long n, float threshold, unsigned char* out)
{
    launch(quantise2, gradient, residual, n, threshold, out);
}

void host_decode2(const unsigned char* data, long long n, float threshold, float* out)
{
    launch(decode2, data, n, threshold, out);
}

void host_decode2_add_many(
    const unsigned long long* data, int workers, long long n, float threshold, float* out)
{
    launch(decode2_add_many, data, workers, n, threshold, out);
}

void host_dither16(unsigned long long key, unsigned int chunk, long long n, unsigned short* out)
{
    launch(dither16, key, chunk, n, out);
}

void host_qsgd_norms(const float* x, long long n, long long d, int l2, float* norms)
{
    launch(qsgd_norms, x, n, d, l2, norms);
}

void host_qsgd_levels(
    const float* x, long long n, long long d, int s, const float* norms, unsigned long long key, unsigned int chunk,
    short* levels)
{
    launch(qsgd_levels, x, n, d, s, norms, key, chunk, levels);
}

void host_qsgd_dequantise(
    const short* levels, const float* norms, long long n, long long d, int s, int add, float* out)
{
    launch(qsgd_dequantise, levels, norms, n, d, s, add, out);
}
}
