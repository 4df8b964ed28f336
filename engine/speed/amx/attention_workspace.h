/* Attention's sizes, and the workspace of a thread. */

#ifndef VITAMP_ATTENTION_WORKSPACE_H
#define VITAMP_ATTENTION_WORKSPACE_H

#include <math.h>

#include "tiles.h"

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

INLINE char *take(char **workspace, long bytes)
{
    char *taken = *workspace;
    *workspace += (bytes + LINE - 1) / LINE * LINE;
    return taken;
}

typedef struct {
    char *keys, *values, *query, *weights;
    float *scores, *result;
} ForwardWorkspace;

static ForwardWorkspace forward_workspace(char **workspace, long tokens, long width, int parts)
{
    long by_tokens = STEPS(tokens) * STEP_BYTES(parts), by_width = STEPS(width) * STEP_BYTES(parts);
    ForwardWorkspace r;
    r.keys = take(workspace, PANELS(tokens) * by_width);
    r.values = take(workspace, PANELS(width) * by_tokens);
    r.query = take(workspace, by_width);
    r.weights = take(workspace, by_tokens);
    r.scores = (float *)take(workspace, PANEL * PANELS(tokens) * PANEL * sizeof(float));
    r.result = (float *)take(workspace, PANEL * PANELS(width) * PANEL * sizeof(float));
    return r;
}

typedef struct {
    char *keys, *values, *keys_summed, *queries_summed, *grads_summed, *query, *grad, *row, *weights, *score_grads;
    float *scores, *weight_grads, *result, *key_grads, *value_grads;
} BackwardWorkspace;

static BackwardWorkspace backward_workspace(char **workspace, long tokens, long width, int parts)
{
    long chunk = MIN(CHUNK(parts), tokens), step = STEP_BYTES(parts);
    long by_tokens = STEPS(tokens) * step, by_width = STEPS(width) * step, by_chunk = STEPS(chunk) * step;
    long row = PANELS(tokens) * PANEL * sizeof(float),
         sums = PANELS(tokens) * PANEL * PANELS(width) * PANEL * sizeof(float);
    BackwardWorkspace r;
    r.keys = take(workspace, PANELS(tokens) * by_width);
    r.values = take(workspace, PANELS(tokens) * by_width);
    r.keys_summed = take(workspace, PANELS(width) * by_tokens);
    r.queries_summed = take(workspace, PANELS(width) * by_chunk);
    r.grads_summed = take(workspace, PANELS(width) * by_chunk);
    r.query = take(workspace, by_width);
    r.grad = take(workspace, by_width);
    r.row = take(workspace, by_tokens);
    r.weights = take(workspace, PANELS(tokens) * by_chunk);
    r.score_grads = take(workspace, PANELS(tokens) * by_chunk);
    r.scores = (float *)take(workspace, PANEL * row);
    r.weight_grads = (float *)take(workspace, PANEL * row);
    r.result = (float *)take(workspace, PANEL * PANELS(width) * PANEL * sizeof(float));
    r.key_grads = (float *)take(workspace, sums);
    r.value_grads = (float *)take(workspace, sums);
    return r;
}

/* Bytes for a thread. */
long workspace_bytes(long tokens, long width, int half, int backward)
{
    char *end = 0;
    int parts = half ? HALF_PARTS : FP32_PARTS;
    if (backward)
        backward_workspace(&end, tokens, width, parts);
    else
        forward_workspace(&end, tokens, width, parts);
    return ((uintptr_t)end + 4095) / 4096 * 4096;
}

#endif
