// Every kernel of compression/cuda as a host function of the same arguments; built by the fixture `cuda_on_host`.
#include "host_shim.h"

#include "max_abs.cu"
#include "philox.cu"
#include "dither.cu"
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
}
