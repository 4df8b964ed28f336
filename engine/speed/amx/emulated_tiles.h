/* AMX's tiles in plain memory, for tests on CPUs without them: the same intrinsics, right to the last bit and slow.

   Each thread has eight tiles of 16 rows of 64 bytes. What a CPU refuses (tiles before their configuration, shapes that
   do not match) ends the program here, too. The conversions to bf16 are emulated where the CPU has none. */

#ifndef VITAMP_EMULATED_TILES_H
#define VITAMP_EMULATED_TILES_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { TILE_COUNT = 8, TILE_ROWS = 16, TILE_ROW_BYTES = 64 };

/* As LDTILECFG reads it. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

static _Thread_local struct {
    TileShapes shapes;
    _Alignas(64) char data[TILE_COUNT][TILE_ROWS][TILE_ROW_BYTES];
} TILES;

static inline void require(int holds)
{
    if (!holds) __builtin_trap();
}

static __attribute__((noinline)) void emulated_tile_loadconfig(const void *from)
{
    memset(&TILES, 0, sizeof TILES);
    memcpy(&TILES.shapes, from, sizeof TILES.shapes);
    require(TILES.shapes.palette == 1 && TILES.shapes.start_row == 0);
    for (int i = 0; i < TILE_COUNT; i++)
        require(TILES.shapes.rows[i] <= TILE_ROWS && TILES.shapes.row_bytes[i] <= TILE_ROW_BYTES);
}

static __attribute__((noinline)) void emulated_tile_release(void) { memset(&TILES, 0, sizeof TILES); }

static __attribute__((noinline)) void emulated_tile_zero(int tile)
{
    require(TILES.shapes.rows[tile]);
    memset(TILES.data[tile], 0, sizeof TILES.data[tile]);
}

static __attribute__((noinline)) void emulated_tile_loadd(int tile, const void *from, long stride)
{
    emulated_tile_zero(tile);
    for (int row = 0; row < TILES.shapes.rows[tile]; row++)
        memcpy(TILES.data[tile][row], (const char *)from + row * stride, TILES.shapes.row_bytes[tile]);
}

static __attribute__((noinline)) void emulated_tile_stored(int tile, void *to, long stride)
{
    require(TILES.shapes.rows[tile]);
    for (int row = 0; row < TILES.shapes.rows[tile]; row++)
        memcpy((char *)to + row * stride, TILES.data[tile][row], TILES.shapes.row_bytes[tile]);
}

/* Pairs of bf16: products of the first and of the second numbers are summed apart, in fp32, and added at the end.
   Numbers below the normal ones count as zero, whatever the thread is set to. What lies beyond a shape is zero. */
static __attribute__((noinline)) void emulated_tile_dpbf16ps(int to, int left, int right)
{
    const TileShapes *s = &TILES.shapes;
    require(s->rows[to] && s->rows[left] == s->rows[to] && s->row_bytes[right] == s->row_bytes[to]);
    require(s->row_bytes[left] == s->rows[right] * 4);
    const __m512i second_number = _mm512_set1_epi32((int)0xffff0000);
    const unsigned as_before = _mm_getcsr(), nearest_and_no_denormals = 0x9fc0;
    _mm_setcsr(nearest_and_no_denormals);
    __asm__ volatile("" ::: "memory");
    for (int row = 0; row < s->rows[to]; row++) {
        __m512 firsts = _mm512_setzero_ps(), seconds = _mm512_setzero_ps();
        for (int pair = 0; pair < s->rows[right]; pair++) {
            int32_t both;
            memcpy(&both, TILES.data[left][row] + pair * 4, 4);
            const __m512i a = _mm512_set1_epi32(both), b = _mm512_load_si512(TILES.data[right][pair]);
            firsts = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                                     _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), firsts);
            seconds = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, second_number)),
                                      _mm512_castsi512_ps(_mm512_and_si512(b, second_number)), seconds);
        }
        float *sums = (float *)TILES.data[to][row];
        _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(firsts, seconds)));
    }
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(as_before);
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_tile_loadconfig
#define _tile_release    emulated_tile_release
#define _tile_zero       emulated_tile_zero
#define _tile_loadd      emulated_tile_loadd
#define _tile_stored     emulated_tile_stored
#define _tile_dpbf16ps   emulated_tile_dpbf16ps

#ifndef __AVX512BF16__
/* To the nearest bf16, and to the even one of two; what is below the normal numbers is zero. */
static inline __m256i emulated_cvtneps_pbh(__m512 values)
{
    const __m512i bits = _mm512_castps_si512(values), magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __mmask16 no_number = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    const __mmask16 tiny = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x00800000));
    const __m512i last_kept = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(last_kept, _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    rounded = _mm512_mask_and_epi32(rounded, tiny, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x8000));
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, no_number, quiet));
}

static inline __m512i emulated_cvtne2ps_pbh(__m512 high, __m512 low)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(emulated_cvtneps_pbh(low)), emulated_cvtneps_pbh(high), 1);
}

#undef _mm512_cvtneps_pbh
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtneps_pbh  emulated_cvtneps_pbh
#define _mm512_cvtne2ps_pbh emulated_cvtne2ps_pbh
#endif

#endif
