/* Attention over few tokens by AMX's tiles, read from the packed qkv and differentiated into one.

   A head at a time, whose keys and values lie packed in the second cache; 32 queries of it against all keys, so weights
   never leave the cache. No two threads add to the same number: the same input gives the same bits on any number. */

#include <math.h>

#include "packing.h"
#include "attention_workspace.h"

#define MOST_PREFETCHED 8 /* half of it with the scores, half with the gradients of weights */

int prepare(void) { return request_tiles(); }

INLINE void store(void *to, long i, int half, __mmask16 there, __m512 values)
{
    if (half)
        _mm256_mask_storeu_epi16((uint16_t *)to + i, there, to_bf16(values));
    else
        _mm512_mask_storeu_ps((float *)to + i, there, values);
}

/* Rows of fp32, times a factor each, to where they belong. */
INLINE void store_rows(const float *from, long from_stride, const float *factors, void *to, long stride, int half,
                       long rows, long columns)
{
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < columns; j += 16) {
            __m512 row = _mm512_load_ps(from + i * from_stride + j);
            if (factors) row = _mm512_mul_ps(row, _mm512_set1_ps(factors[i]));
            store(to, i * stride + j, half, mask_of_first(columns - j), row);
        }
}

/* All panels of a matrix, one after another. */
INLINE void pack_all(const void *from, long stride, int half, int summed_first, int right, long wide, long summed,
                     int parts, char *to)
{
    const long size = half ? 2 : 4;
    for (long panel = 0; panel < PANELS(wide); panel++) {
        const char *at = (const char *)from + panel * PANEL * (summed_first ? 1 : stride) * size;
        pack(at, stride, half, summed_first, right, MIN(PANEL, wide - panel * PANEL), summed, parts,
             to + panel * STEPS(summed) * STEP_BYTES(parts));
    }
}

/* c [rows, columns] = left right, for one panel of rows; beyond them c is left as it is or spoilt. `prefetched`: what
   is needed next. */
INLINE void multiply_row(const char *left, const char *right, long steps, int parts, long rows, long columns, float *c,
                         long stride, int add, const Prefetch *prefetched, int count)
{
    const long panels = PANELS(columns);
    for (long panel = 0; panel < panels; panel++) {
        Prefetch now[MOST_PREFETCHED];
        for (int i = 0; i < count; i++) now[i] = slice_of(prefetched[i], panel, panels);
        if (add)
            start_from(c + panel * PANEL, stride);
        else
            start_from_zero();
        multiply_panels(left, right + panel * steps * STEP_BYTES(parts), steps, parts, rows, columns - panel * PANEL,
                        now, count);
        store_sums(c + panel * PANEL, stride);
    }
}

/* Scores to weights, not yet divided by their sum, whose inverse is returned. */
INLINE float softmax_row(float *row, long tokens, long padded, float scale, float *logsum)
{
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), factor = _mm512_set1_ps(scale);
    for (long j = 0; j < tokens; j += 16) {
        __mmask16 there = mask_of_first(tokens - j);
        most = _mm512_mask_max_ps(most, there, most, _mm512_load_ps(row + j));
    }
    float largest = _mm512_reduce_max_ps(most) * scale;
    for (long j = 0; j < padded; j += 16) {
        __m512 power = _mm512_fmsub_ps(_mm512_load_ps(row + j), factor, _mm512_set1_ps(largest));
        __m512 weight = _mm512_maskz_mov_ps(mask_of_first(tokens - j), two_to(power));
        _mm512_store_ps(row + j, weight);
        sum = _mm512_add_ps(sum, weight);
    }
    float total = _mm512_reduce_add_ps(sum);
    *logsum = largest + log2f(total);
    return 1.0f / total;
}

INLINE void forward_head(Shape s, const char *q, char *out, float *logsumexp, ForwardWorkspace r, const Prefetch *next,
                         int half, int parts)
{
    const long size = half ? 2 : 4, all = s.heads * s.width, across = PANELS(s.tokens) * PANEL;
    const char *k = q + all * size, *v = k + all * size;
    float factors[PANEL];
    pack_all(k, s.stride, half, 0, 1, s.tokens, s.width, parts, r.keys);
    pack_all(v, s.stride, half, 1, 1, s.width, s.tokens, parts, r.values);
    for (long top = 0; top < s.tokens; top += PANEL) {
        long rows = MIN(PANEL, s.tokens - top);
        pack(q + top * s.stride * size, s.stride, half, 0, 0, rows, s.width, parts, r.query);
        Prefetch now[3];
        for (int i = 0; i < 3; i++) now[i] = slice_of(next[i], top / PANEL, PANELS(s.tokens));
        multiply_row(r.query, r.keys, STEPS(s.width), parts, rows, s.tokens, r.scores, across, 0, now, 3);
        for (long i = 0; i < rows; i++)
            factors[i] = softmax_row(r.scores + i * across, s.tokens, across, s.binary, logsumexp + top + i);
        pack(r.scores, across, 0, 0, 0, rows, s.tokens, parts, r.weights);
        multiply_row(r.weights, r.values, STEPS(s.tokens), parts, rows, s.width, r.result, PANELS(s.width) * PANEL, 0,
                     0, 0);
        store_rows(r.result, PANELS(s.width) * PANEL, factors, out + top * s.out_stride * size, s.out_stride, half,
                   rows, s.width);
    }
}

/* In place: scores to weights, and the gradients of these to the gradients of the scores. */
INLINE void softmax_backward_row(float *scores, float *weight_grads, long tokens, long padded, float logsum,
                                 float delta, Shape s)
{
    for (long j = 0; j < padded; j += 16) {
        __mmask16 there = mask_of_first(tokens - j);
        __m512 power = _mm512_fmsub_ps(_mm512_load_ps(scores + j), _mm512_set1_ps(s.binary), _mm512_set1_ps(logsum));
        __m512 weight = _mm512_maskz_mov_ps(there, two_to(power));
        __m512 weight_grad = _mm512_sub_ps(_mm512_load_ps(weight_grads + j), _mm512_set1_ps(delta));
        _mm512_store_ps(scores + j, weight);
        weight_grad = _mm512_mul_ps(_mm512_mul_ps(weight, weight_grad), _mm512_set1_ps(s.scale));
        _mm512_store_ps(weight_grads + j, _mm512_maskz_mov_ps(there, weight_grad));
    }
}

INLINE float product_of_rows(const void *a, const void *b, long width, int half)
{
    __m512 sum = _mm512_setzero_ps();
    for (long j = 0; j < width; j += 16) {
        __mmask16 there = mask_of_first(width - j);
        sum = _mm512_fmadd_ps(load_row(a, j, half, there), load_row(b, j, half, there), sum);
    }
    return _mm512_reduce_add_ps(sum);
}

/* 32 queries: their gradients, and their share of what keys and values sum up, packed. */
INLINE void backward_queries(Shape s, const char *q, const char *out, const char *grad, char *dq,
                             const float *logsumexp, BackwardWorkspace r, long rows, long step, long steps,
                             const Prefetch *next, int half, int parts)
{
    const long size = half ? 2 : 4, across = PANELS(s.tokens) * PANEL;
    pack(q, s.stride, half, 0, 0, rows, s.width, parts, r.query);
    pack(grad, s.out_stride, half, 0, 0, rows, s.width, parts, r.grad);
    multiply_row(r.query, r.keys, STEPS(s.width), parts, rows, s.tokens, r.scores, across, 0, next,
                 MOST_PREFETCHED / 2);
    multiply_row(r.grad, r.values, STEPS(s.width), parts, rows, s.tokens, r.weight_grads, across, 0,
                 next + MOST_PREFETCHED / 2, MOST_PREFETCHED / 2);
    for (long i = 0; i < rows; i++) {
        long at = i * s.out_stride * size;
        float delta = product_of_rows(out + at, grad + at, s.width, half);
        softmax_backward_row(r.scores + i * across, r.weight_grads + i * across, s.tokens, across, logsumexp[i], delta,
                             s);
    }
    pack(r.weight_grads, across, 0, 0, 0, rows, s.tokens, parts, r.row);
    multiply_row(r.row, r.keys_summed, STEPS(s.tokens), parts, rows, s.width, r.result, PANELS(s.width) * PANEL, 0, 0,
                 0);
    store_rows(r.result, PANELS(s.width) * PANEL, 0, dq, s.stride, half, rows, s.width);
    for (long panel = 0; panel < PANELS(s.tokens); panel++) {
        long at = (panel * steps + step) * STEP_BYTES(parts);
        pack(r.scores + panel * PANEL, across, 0, 1, 0, PANEL, rows, parts, r.weights + at);
        pack(r.weight_grads + panel * PANEL, across, 0, 1, 0, PANEL, rows, parts, r.score_grads + at);
    }
}

INLINE void backward_head(Shape s, const char *q, const char *out, const char *grad, char *dq, const float *logsumexp,
                          BackwardWorkspace r, const Prefetch *next, int half, int parts)
{
    const long size = half ? 2 : 4, all = s.heads * s.width * size, wide = PANELS(s.width) * PANEL;
    const char *k = q + all, *v = k + all;
    pack_all(k, s.stride, half, 0, 1, s.tokens, s.width, parts, r.keys);
    pack_all(v, s.stride, half, 0, 1, s.tokens, s.width, parts, r.values);
    pack_all(k, s.stride, half, 1, 1, s.width, s.tokens, parts, r.keys_summed);
    for (long first = 0; first < s.tokens; first += CHUNK(parts)) {
        long queries = MIN(CHUNK(parts), s.tokens - first), steps = STEPS(queries);
        const char *chunk = q + first * s.stride * size, *grads = grad + first * s.out_stride * size;
        pack_all(chunk, s.stride, half, 1, 1, s.width, queries, parts, r.queries_summed);
        pack_all(grads, s.out_stride, half, 1, 1, s.width, queries, parts, r.grads_summed);
        for (long step = 0; step < steps; step++) {
            long top = first + step * PANEL, at = top * s.out_stride * size;
            Prefetch now[MOST_PREFETCHED];
            for (int i = 0; i < MOST_PREFETCHED; i++) now[i] = slice_of(next[i], top / PANEL, PANELS(s.tokens));
            backward_queries(s, q + top * s.stride * size, out + at, grad + at, dq + top * s.stride * size,
                             logsumexp + top, r, MIN(PANEL, s.tokens - top), step, steps, now, half, parts);
        }
        for (long panel = 0; panel < PANELS(s.tokens); panel++) {
            long at = panel * steps * STEP_BYTES(parts), to = panel * PANEL * wide, keys = s.tokens - panel * PANEL;
            multiply_row(r.score_grads + at, r.queries_summed, steps, parts, keys, s.width, r.key_grads + to, wide,
                         first > 0, 0, 0);
            multiply_row(r.weights + at, r.grads_summed, steps, parts, keys, s.width, r.value_grads + to, wide,
                         first > 0, 0, 0);
        }
    }
    store_rows(r.key_grads, wide, 0, dq + all, s.stride, half, s.tokens, s.width);
    store_rows(r.value_grads, wide, 0, dq + 2 * all, s.stride, half, s.tokens, s.width);
}

/* Bytes from where a tensor begins to a head of a sample: of the packed one, and of one of the three. */
typedef struct {
    long packed, single;
} Place;

INLINE Place place_of(Shape s, long i, int half)
{
    const long sample = i / s.heads, head = i % s.heads, size = half ? 2 : 4;
    Place place = {(sample * s.tokens * s.stride + head * s.width) * size,
                   (sample * s.tokens * s.out_stride + head * s.width) * size};
    return place;
}

/* A head's queries, keys and values, in pieces too short for the CPU's own prefetcher. */
INLINE void prefetch_of_head(Shape s, const char *qkv, int half, Prefetch *next)
{
    const long size = half ? 2 : 4, lines = (s.width * size + 63) / 64;
    for (int i = 0; i < 3; i++) {
        Prefetch one = {qkv + i * s.heads * s.width * size, s.stride * size, s.tokens, lines};
        next[i] = one;
    }
}

INLINE void forward_heads(Shape s, const char *qkv, char *out, float *logsumexp, long begin, long end, char *workspace,
                          int half)
{
    const int parts = half ? HALF_PARTS : FP32_PARTS;
    const ForwardWorkspace r = forward_workspace(&workspace, s.tokens, s.width, parts);
    begin_tiles();
    for (long i = begin; i < end; i++) {
        const Place here = place_of(s, i, half), there = place_of(s, i + 1 < end ? i + 1 : i, half);
        Prefetch next[3];
        prefetch_of_head(s, qkv + there.packed, half, next);
        forward_head(s, qkv + here.packed, out + here.single, logsumexp + i * s.tokens, r, next, half, parts);
    }
    end_tiles();
}

INLINE void backward_heads(Shape s, const char *grad, const char *qkv, const char *out, const float *logsumexp,
                           char *dqkv, long begin, long end, char *workspace, int half)
{
    const int parts = half ? HALF_PARTS : FP32_PARTS;
    const long size = half ? 2 : 4, lines = (s.width * size + 63) / 64;
    const BackwardWorkspace r = backward_workspace(&workspace, s.tokens, s.width, parts);
    begin_tiles();
    for (long i = begin; i < end; i++) {
        const Place here = place_of(s, i, half), there = place_of(s, i + 1 < end ? i + 1 : i, half);
        Prefetch next[MOST_PREFETCHED] = {[6] = {out + there.single, s.out_stride * size, s.tokens, lines},
                                          [7] = {grad + there.single, s.out_stride * size, s.tokens, lines}};
        prefetch_of_head(s, qkv + there.packed, half, next);
        prefetch_of_head(s, dqkv + there.packed, half, next + 3);
        backward_head(s, qkv + here.packed, out + here.single, grad + here.single, dqkv + here.packed,
                      logsumexp + i * s.tokens, r, next, half, parts);
    }
    end_tiles();
}

/* qkv: [batch, tokens, 3, heads, width]; out: [batch, tokens, heads, width]; logsumexp, the binary logarithm of each
   query's sum of weights: [batch, heads, tokens]. `half`: whether numbers are bf16 instead of fp32. */
void forward(const char *qkv, char *out, float *logsumexp, long batch, long tokens, long heads, long width, int half,
             char *workspaces, long bytes_of_each, int threads)
{
    const Shape s = shape_of(tokens, heads, width);
    const long all = batch * heads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < threads; i++) {
        const long begin = all * i / threads, end = all * (i + 1) / threads;
        if (half)
            forward_heads(s, qkv, out, logsumexp, begin, end, workspaces + i * bytes_of_each, 1);
        else
            forward_heads(s, qkv, out, logsumexp, begin, end, workspaces + i * bytes_of_each, 0);
    }
}

/* dqkv and grad lie as qkv and out do. */
void backward(const char *grad, const char *qkv, const char *out, const float *logsumexp, char *dqkv, long batch,
              long tokens, long heads, long width, int half, char *workspaces, long bytes_of_each, int threads)
{
    const Shape s = shape_of(tokens, heads, width);
    const long all = batch * heads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < threads; i++) {
        const long begin = all * i / threads, end = all * (i + 1) / threads;
        if (half)
            backward_heads(s, grad, qkv, out, logsumexp, dqkv, begin, end, workspaces + i * bytes_of_each, 1);
        else
            backward_heads(s, grad, qkv, out, logsumexp, dqkv, begin, end, workspaces + i * bytes_of_each, 0);
    }
}
