/* Every kind of record that tracediff.h writes, once. Also compiles as C++.
 *
 *     cc -std=c99 example.c -lm -o example && ./example out.trace && tracediff inspect out.trace
 */
#include <math.h>
#include <string.h>

#define TRACEDIFF_IMPLEMENTATION
#include "tracediff.h"

enum { VOCAB = 5, EMBD = 4, MAX_TOKENS = 3 };

static float embedding[VOCAB][EMBD], norm_weight[EMBD];

static void make_weights(void)
{
    for (int i = 0; i < EMBD; i++) {
        norm_weight[i] = 1 + i / 4.0f;
        for (int v = 0; v < VOCAB; v++) embedding[v][i] = (float)((v * 7 + i * 3) % 11 - 5) / 8;
    }
}

/* The upper half of a float32: its bfloat16, where the lower half is zero. */
static uint16_t bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static void rms_norm(float *y, const float *x)
{
    double squares = 0;
    for (int i = 0; i < EMBD; i++) squares += (double)x[i] * x[i];
    double rms = sqrt(squares / EMBD + 1e-6);
    for (int i = 0; i < EMBD; i++) y[i] = (float)(x[i] / rms * norm_weight[i]);
}

static double dot(const float *a, const float *b)
{
    double sum = 0;
    for (int i = 0; i < EMBD; i++) sum += (double)a[i] * b[i];
    return sum;
}

static void forward(tracediff *t, int step, const int32_t *tokens, const int32_t *positions, int n)
{
    uint16_t rows[MAX_TOKENS][EMBD];
    float normed[MAX_TOKENS][EMBD];
    double logits[MAX_TOKENS][VOCAB];
    const int64_t hidden_shape[] = {n, EMBD}, logits_shape[] = {n, VOCAB};

    for (int k = 0; k < n; k++) {
        for (int i = 0; i < EMBD; i++) rows[k][i] = bf16(embedding[tokens[k]][i]);
        rms_norm(normed[k], embedding[tokens[k]]);
        for (int v = 0; v < VOCAB; v++) logits[k][v] = dot(normed[k], embedding[v]);
    }
    tracediff_step(t, step, tokens, positions, n);
    tracediff_op(t, step, "token_embd", TRACEDIFF_BF16, hidden_shape, 2, rows);
    tracediff_op(t, step, "output_norm", TRACEDIFF_F32, hidden_shape, 2, normed);
    tracediff_op(t, step, "output", TRACEDIFF_F64, logits_shape, 2, logits);
}

/* What statistics must leave out or survive: NaN, infinities, squares that overflow, none at all. */
static void extremes(tracediff *t, int step)
{
    static const uint16_t f16[] = {0x3c00, 0xc100, 0x7c00, 0x7e00, 0x0001, 0x7bff};
    static const uint16_t bf16[] = {0x3f80, 0xc020, 0x7f80, 0x7fc0, 0x0001, 0x7f7f};
    const float f32[] = {1, -2.5f, NAN, INFINITY, -INFINITY, 0.1f}, nothing_but_nan[] = {NAN, NAN};
    const double f64[] = {1e300, -1e300, NAN, INFINITY, 0.1, 1.7e308};
    const int64_t shape[] = {2, 3}, pair[] = {2}, empty[] = {0, 3};

    t->record = TRACEDIFF_DATA | TRACEDIFF_STATISTICS;
    tracediff_op(t, step, "extremes.f16", TRACEDIFF_F16, shape, 2, f16);
    tracediff_op(t, step, "extremes.bf16", TRACEDIFF_BF16, shape, 2, bf16);
    tracediff_op(t, step, "extremes.f32", TRACEDIFF_F32, shape, 2, f32);
    tracediff_op(t, step, "extremes.f64", TRACEDIFF_F64, shape, 2, f64);
    t->record = TRACEDIFF_STATISTICS;
    tracediff_op(t, step, "extremes.nan", TRACEDIFF_F32, pair, 1, nothing_but_nan);
    tracediff_op(t, step, "extremes.empty", TRACEDIFF_F32, empty, 2, nothing_but_nan);
}

/* Of three tokens the first and the last; and values that lie in columns, two apart. */
static void layouts(tracediff *t, int step)
{
    static const int32_t rows[] = {0, 2};
    static const int64_t shape[] = {2, 3}, of_columns[] = {3, 2}, strides[] = {1, 5};
    const float x[] = {1, -2, 3, NAN, NAN, 0.5f, 0.25f, -0.125f};

    t->record = TRACEDIFF_DATA | TRACEDIFF_STATISTICS;
    t->rows = rows;
    t->n_rows = 2;
    tracediff_op(t, step, "layouts.rows", TRACEDIFF_F32, shape, 2, x);
    t->strides = strides;
    tracediff_op(t, step, "layouts.strides", TRACEDIFF_F32, of_columns, 2, x);
}

/* A batch: a token of each of two sequences, one value of both and one of the second alone. */
static void batch(tracediff *t, int step)
{
    static const int32_t tokens[] = {3, 1}, positions[] = {4, 0}, sequences[] = {0, 1};
    static const int64_t rows[] = {2, 1}, scores[] = {1, 1, 1};
    const float x[] = {1, -2};

    t->record = TRACEDIFF_DATA;
    t->sequences = sequences;
    tracediff_step(t, step, tokens, positions, 2);
    tracediff_op(t, step, "batch.rows", TRACEDIFF_F32, rows, 2, x);
    t->sequence = 1;
    tracediff_op(t, step, "batch.scores", TRACEDIFF_F32, scores, 3, x);
}

int main(int argc, char **argv)
{
    const int32_t prompt[] = {3, 1, 4}, prompt_positions[] = {0, 1, 2}, next[] = {1}, next_position[] = {3};
    const int64_t norm_shape[] = {EMBD};
    tracediff_more more;
    tracediff t;

    if (argc < 2) return fprintf(stderr, "usage: %s OUT.trace [ENGINE]\n", argv[0]), 2;
    make_weights();
    memset(&more, 0, sizeof more);
    more.weights = "F32";
    more.context = 64;
    more.rounding = "bf16";
    more.rollback = 1; /* no step goes back here */
    tracediff_open_with(&t, argv[1], argc > 2 ? argv[2] : "example", "llama", NULL, &more);
    tracediff_weight(&t, "output_norm.weight", TRACEDIFF_F32, norm_shape, 1, norm_weight);
    forward(&t, 0, prompt, prompt_positions, 3);
    layouts(&t, 0);
    t.record = TRACEDIFF_STATISTICS;
    forward(&t, 1, next, next_position, 1);
    extremes(&t, 1);
    batch(&t, 2);
    if (tracediff_close(&t) != 0) {
        fprintf(stderr, "%s\n", tracediff_error(&t));
        return 1;
    }
    return 0;
}
