/* Attention's sizes, and the room that a thread works in. */

#ifndef VITAMP_ATTENTION_ROOM_H
#define VITAMP_ATTENTION_ROOM_H

#include <math.h>

#include "amx.h"

/* Queries that keys and values sum their gradients over at once. In three parts they would leave the second cache. */
#define CHUNK(parts) ((parts) == HALF_PARTS ? 256 : 64)
#define LINE         64

typedef struct {
    long tokens, heads, width, stride, out_stride; /* strides in numbers */
    float scale, binary;                           /* of scores; the latter with log2(e) */
} Shape;

static Shape shape_of(long tokens, long heads, long width)
{
    float scale = 1.0f / sqrtf(width);
    Shape shape = {tokens, heads, width, 3 * heads * width, heads * width, scale, scale * 1.44269504f};
    return shape;
}

INLINE char *take(char **room, long bytes)
{
    char *taken = *room;
    *room += (bytes + LINE - 1) / LINE * LINE;
    return taken;
}

typedef struct {
    char *keys, *values, *query, *weights;
    float *scores, *found;
} ForwardRoom;

static ForwardRoom forward_room(char **room, long tokens, long width, int parts)
{
    long by_tokens = STEPS(tokens) * STEP_BYTES(parts), by_width = STEPS(width) * STEP_BYTES(parts);
    ForwardRoom r;
    r.keys = take(room, PANELS(tokens) * by_width);
    r.values = take(room, PANELS(width) * by_tokens);
    r.query = take(room, by_width);
    r.weights = take(room, by_tokens);
    r.scores = (float *)take(room, PANEL * PANELS(tokens) * PANEL * sizeof(float));
    r.found = (float *)take(room, PANEL * PANELS(width) * PANEL * sizeof(float));
    return r;
}

typedef struct {
    char *keys, *values, *keys_summed, *queries_summed, *grads_summed, *query, *grad, *row, *weights, *slopes;
    float *scores, *pulls, *found, *key_grads, *value_grads;
} BackwardRoom;

static BackwardRoom backward_room(char **room, long tokens, long width, int parts)
{
    long chunk = LEAST(CHUNK(parts), tokens), step = STEP_BYTES(parts);
    long by_tokens = STEPS(tokens) * step, by_width = STEPS(width) * step, by_chunk = STEPS(chunk) * step;
    long row = PANELS(tokens) * PANEL * sizeof(float),
         sums = PANELS(tokens) * PANEL * PANELS(width) * PANEL * sizeof(float);
    BackwardRoom r;
    r.keys = take(room, PANELS(tokens) * by_width);
    r.values = take(room, PANELS(tokens) * by_width);
    r.keys_summed = take(room, PANELS(width) * by_tokens);
    r.queries_summed = take(room, PANELS(width) * by_chunk);
    r.grads_summed = take(room, PANELS(width) * by_chunk);
    r.query = take(room, by_width);
    r.grad = take(room, by_width);
    r.row = take(room, by_tokens);
    r.weights = take(room, PANELS(tokens) * by_chunk);
    r.slopes = take(room, PANELS(tokens) * by_chunk);
    r.scores = (float *)take(room, PANEL * row);
    r.pulls = (float *)take(room, PANEL * row);
    r.found = (float *)take(room, PANEL * PANELS(width) * PANEL * sizeof(float));
    r.key_grads = (float *)take(room, sums);
    r.value_grads = (float *)take(room, sums);
    return r;
}

/* Bytes for a thread. */
long room(long tokens, long width, int half, int backward)
{
    char *end = 0;
    int parts = half ? HALF_PARTS : FP32_PARTS;
    if (backward)
        backward_room(&end, tokens, width, parts);
    else
        forward_room(&end, tokens, width, parts);
    return ((uintptr_t)end + 4095) / 4096 * 4096;
}

#endif
