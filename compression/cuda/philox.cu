// Philox4x32-10 (Salmon et al., SC 2011): the random numbers of all codecs, the same bits as the CPU kernels.
// Stands in front of the texts that need it (`cuda_text.NEEDS`). Builtin types only, no includes.

struct Philox {
    unsigned int word[4];
};

// The block of 4 words of the counter (block, chunk, 0, 0) under a 64-bit key.
static __device__ Philox philox(unsigned long long key, unsigned int block, unsigned int chunk)
{
    unsigned int c0 = block, c1 = chunk, c2 = 0, c3 = 0, k0 = (unsigned int)key, k1 = (unsigned int)(key >> 32);
    for (int round = 0; round < 10; ++round) {
        unsigned long long p0 = (unsigned long long)c0 * 0xD2511F53u, p1 = (unsigned long long)c2 * 0xCD9E8D57u;
        c0 = (unsigned int)(p1 >> 32) ^ c1 ^ k0;
        c1 = (unsigned int)p1;
        c2 = (unsigned int)(p0 >> 32) ^ c3 ^ k1;
        c3 = (unsigned int)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Philox result = {{c0, c1, c2, c3}};
    return result;
}

// The 16-bit number of element 8 * block + k: the low, then the high half of each word.
static __device__ unsigned int dither_of(const Philox& numbers, int k)
{
    return numbers.word[k / 2] >> (16 * (k % 2)) & 0xffffu;
}
