/* A llama decoder of one layer that writes its own trace: a prefill and one decode step, with a KV cache.
 *
 *     cc -std=c99 -O2 example_decoder.c -lm -o example_decoder
 *     ./example_decoder FOLDER out.trace 256 72 101 108 108 111
 *     tracediff check out.trace --model model.gguf
 *
 * FOLDER holds each tensor's raw float32 values in NAME.f32 (blk.0.attn_q.weight.f32) and the sizes in
 * model.txt, one "key value" to a line: n_vocab n_embd n_head n_head_kv head_dim n_ff rope_theta rms_eps.
 *
 * -DFAULT_ROPE_HALVES, -DFAULT_NO_SCALE, -DFAULT_NO_MASK and -DFAULT_SWAP_GATE_UP_ACT each plant a mistake that
 * people make: compile with one and see which op `tracediff check` names.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TRACEDIFF_IMPLEMENTATION
#include "tracediff.h"

enum { MAX_TOKENS = 64 };

typedef struct {
    int n_vocab, n_embd, n_head, n_head_kv, head_dim, n_ff;
    double rope_theta, rms_eps;
} sizes;

typedef struct {
    sizes n;
    float *token_embd, *attn_norm, *attn_q, *attn_k, *attn_v, *attn_output;
    float *ffn_norm, *ffn_gate, *ffn_up, *ffn_down, *output_norm, *output;
} model;

/* Values of one forward pass, T tokens each; k, k_rope and v hold all S positions so far: the KV cache. */
typedef struct {
    float *token_embd, *attn_norm, *q, *q_rope, *k, *k_rope, *v, *scores, *probs, *kqv, *attn_output, *attn_residual;
    float *ffn_norm, *gate, *up, *act, *down, *ffn_residual, *output_norm, *logits;
} state;

static void die(const char *what, const char *name)
{
    fprintf(stderr, "example_decoder: %s %s\n", what, name);
    exit(1);
}

/* ---- the mathematics --------------------------------------------------------------------------------------- */

static void embed(float *y, const float *table, const int32_t *tokens, int T, int n)
{
    for (int t = 0; t < T; t++) memcpy(y + t * n, table + (size_t)tokens[t] * n, n * sizeof *y);
}

static void rms_norm(float *y, const float *x, const float *weight, int T, int n, double eps)
{
    for (int t = 0; t < T; t++, x += n, y += n) {
        float squares = 0;
        for (int i = 0; i < n; i++) squares += x[i] * x[i];
        const float scale = 1 / sqrtf(squares / n + (float)eps);
        for (int i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
    }
}

static void linear(float *y, const float *x, const float *weight, int T, int n_in, int n_out)
{
    for (int t = 0; t < T; t++)
        for (int o = 0; o < n_out; o++) {
            float sum = 0;
            for (int i = 0; i < n_in; i++) sum += x[t * n_in + i] * weight[(size_t)o * n_in + i];
            y[t * n_out + o] = sum;
        }
}

/* Llama's GGUF files hold Q and K so that each pair of channels to rotate are neighbours. */
static void rope(float *y, const float *x, const int32_t *positions, int T, int heads, int D, double theta)
{
    for (int t = 0; t < T; t++)
        for (int h = 0; h < heads; h++, x += D, y += D)
            for (int pair = 0; pair < D / 2; pair++) {
#ifdef FAULT_ROPE_HALVES
                const int a = pair, b = pair + D / 2;
#else
                const int a = 2 * pair, b = 2 * pair + 1;
#endif
                const double angle = positions[t] * pow(theta, -2.0 * pair / D);
                const float c = (float)cos(angle), s = (float)sin(angle);
                y[a] = x[a] * c - x[b] * s;
                y[b] = x[a] * s + x[b] * c;
            }
}

/* [T, H, D] x [S, G, D] -> [H, T, S]: query head h reads key head h / (H / G). */
static void attention_scores(float *y, const float *q, const float *k, int T, int S, sizes n)
{
    const int D = n.head_dim, group = n.n_head / n.n_head_kv;
    for (int h = 0; h < n.n_head; h++)
        for (int t = 0; t < T; t++)
            for (int s = 0; s < S; s++) {
                float sum = 0;
                for (int d = 0; d < D; d++)
                    sum += q[(t * n.n_head + h) * D + d] * k[(s * n.n_head_kv + h / group) * D + d];
                *y++ = sum;
            }
}

static void softmax(float *y, const float *x, int n)
{
    float max = x[0], sum = 0;
    for (int i = 1; i < n; i++) max = fmaxf(max, x[i]);
    for (int i = 0; i < n; i++) sum += y[i] = expf(x[i] - max);
    for (int i = 0; i < n; i++) y[i] /= sum;
}

/* Query t is at position S - T + t and sees the keys up to there. */
static void attention_probs(float *y, const float *scores, int T, int S, sizes n)
{
#ifdef FAULT_NO_SCALE
    const float scale = 1;
#else
    const float scale = 1 / sqrtf((float)n.head_dim);
#endif
    for (int h = 0; h < n.n_head; h++)
        for (int t = 0; t < T; t++, scores += S, y += S) {
#ifdef FAULT_NO_MASK
            const int visible = S;
#else
            const int visible = S - T + t + 1;
#endif
            for (int s = 0; s < S; s++) y[s] = s < visible ? scores[s] * scale : -INFINITY;
            softmax(y, y, S);
        }
}

/* [H, T, S] x [S, G, D] -> [T, H * D] */
static void weighted_values(float *y, const float *probs, const float *v, int T, int S, sizes n)
{
    const int D = n.head_dim, group = n.n_head / n.n_head_kv;
    for (int t = 0; t < T; t++)
        for (int h = 0; h < n.n_head; h++)
            for (int d = 0; d < D; d++) {
                float sum = 0;
                for (int s = 0; s < S; s++)
                    sum += probs[(h * T + t) * S + s] * v[(s * n.n_head_kv + h / group) * D + d];
                *y++ = sum;
            }
}

static void add(float *y, const float *a, const float *b, int n)
{
    for (int i = 0; i < n; i++) y[i] = a[i] + b[i];
}

static float silu(float x)
{
    return x / (1 + expf(-x));
}

static void swiglu(float *y, const float *gate, const float *up, int n)
{
#ifdef FAULT_SWAP_GATE_UP_ACT
    for (int i = 0; i < n; i++) y[i] = silu(up[i]) * gate[i];
#else
    for (int i = 0; i < n; i++) y[i] = silu(gate[i]) * up[i];
#endif
}

/* ---- the forward pass, each value recorded where it is made -------------------------------------------------- */

static void record2(tracediff *trace, const char *op, const float *x, int a, int b)
{
    const int64_t shape[] = {a, b};
    tracediff_op(trace, (int)trace->step, op, TRACEDIFF_F32, shape, 2, x);
}

static void record3(tracediff *trace, const char *op, const float *x, int a, int b, int c)
{
    const int64_t shape[] = {a, b, c};
    tracediff_op(trace, (int)trace->step, op, TRACEDIFF_F32, shape, 3, x);
}

static void attention(const model *m, state *s, const int32_t *positions, int T, int past, tracediff *trace)
{
    const sizes n = m->n;
    const int S = past + T, D = n.head_dim, q_size = n.n_head * D, kv_size = n.n_head_kv * D;
    float *k = s->k + past * kv_size, *k_rope = s->k_rope + past * kv_size, *v = s->v + past * kv_size;

    rms_norm(s->attn_norm, s->token_embd, m->attn_norm, T, n.n_embd, n.rms_eps);
    record2(trace, "blk.0.attn_norm", s->attn_norm, T, n.n_embd);
    linear(s->q, s->attn_norm, m->attn_q, T, n.n_embd, q_size);
    record3(trace, "blk.0.attn_q", s->q, T, n.n_head, D);
    linear(k, s->attn_norm, m->attn_k, T, n.n_embd, kv_size);
    record3(trace, "blk.0.attn_k", k, T, n.n_head_kv, D);
    linear(v, s->attn_norm, m->attn_v, T, n.n_embd, kv_size);
    record3(trace, "blk.0.attn_v", v, T, n.n_head_kv, D);
    rope(s->q_rope, s->q, positions, T, n.n_head, D, n.rope_theta);
    record3(trace, "blk.0.attn_q_rope", s->q_rope, T, n.n_head, D);
    rope(k_rope, k, positions, T, n.n_head_kv, D, n.rope_theta);
    record3(trace, "blk.0.attn_k_rope", k_rope, T, n.n_head_kv, D);
    attention_scores(s->scores, s->q_rope, s->k_rope, T, S, n);
    record3(trace, "blk.0.attn_scores", s->scores, n.n_head, T, S);
    attention_probs(s->probs, s->scores, T, S, n);
    record3(trace, "blk.0.attn_probs", s->probs, n.n_head, T, S);
    weighted_values(s->kqv, s->probs, s->v, T, S, n);
    record2(trace, "blk.0.attn_kqv", s->kqv, T, q_size);
    linear(s->attn_output, s->kqv, m->attn_output, T, q_size, n.n_embd);
    record2(trace, "blk.0.attn_output", s->attn_output, T, n.n_embd);
    add(s->attn_residual, s->attn_output, s->token_embd, T * n.n_embd);
    record2(trace, "blk.0.attn_residual", s->attn_residual, T, n.n_embd);
}

static void feed_forward(const model *m, state *s, int T, tracediff *trace)
{
    const sizes n = m->n;
    rms_norm(s->ffn_norm, s->attn_residual, m->ffn_norm, T, n.n_embd, n.rms_eps);
    record2(trace, "blk.0.ffn_norm", s->ffn_norm, T, n.n_embd);
    linear(s->gate, s->ffn_norm, m->ffn_gate, T, n.n_embd, n.n_ff);
    record2(trace, "blk.0.ffn_gate", s->gate, T, n.n_ff);
    linear(s->up, s->ffn_norm, m->ffn_up, T, n.n_embd, n.n_ff);
    record2(trace, "blk.0.ffn_up", s->up, T, n.n_ff);
    swiglu(s->act, s->gate, s->up, T * n.n_ff);
    record2(trace, "blk.0.ffn_act", s->act, T, n.n_ff);
    linear(s->down, s->act, m->ffn_down, T, n.n_ff, n.n_embd);
    record2(trace, "blk.0.ffn_down", s->down, T, n.n_embd);
    add(s->ffn_residual, s->down, s->attn_residual, T * n.n_embd);
    record2(trace, "blk.0.ffn_residual", s->ffn_residual, T, n.n_embd);
}

/* One step: T tokens after `past` cached ones. Returns the token that the last position makes likeliest. */
static int32_t forward(const model *m, state *s, int step, const int32_t *tokens, int T, int past, tracediff *trace)
{
    const sizes n = m->n;
    int32_t positions[MAX_TOKENS] = {0}, best = 0;
    for (int t = 0; t < T; t++) positions[t] = past + t;
    tracediff_step(trace, step, tokens, positions, T);

    embed(s->token_embd, m->token_embd, tokens, T, n.n_embd);
    record2(trace, "token_embd", s->token_embd, T, n.n_embd);
    attention(m, s, positions, T, past, trace);
    feed_forward(m, s, T, trace);
    rms_norm(s->output_norm, s->ffn_residual, m->output_norm, T, n.n_embd, n.rms_eps);
    record2(trace, "output_norm", s->output_norm, T, n.n_embd);
    linear(s->logits, s->output_norm, m->output, T, n.n_embd, n.n_vocab);
    record2(trace, "output", s->logits, T, n.n_vocab);

    const float *last = s->logits + (T - 1) * n.n_vocab;
    for (int v = 1; v < n.n_vocab; v++)
        if (last[v] > last[best]) best = v;
    return best;
}

/* ---- loading ----------------------------------------------------------------------------------------------- */

static FILE *open_in(const char *folder, const char *name)
{
    char path[4096];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) die("too long a path to", name);
    FILE *file = fopen(path, "rb");
    if (!file) die("cannot open", path);
    return file;
}

static sizes read_sizes(const char *folder)
{
    sizes n = {0};
    const char *keys[] = {"n_vocab", "n_embd", "n_head", "n_head_kv", "head_dim", "n_ff"};
    int *values[] = {&n.n_vocab, &n.n_embd, &n.n_head, &n.n_head_kv, &n.head_dim, &n.n_ff};
    char key[32];
    double value;
    FILE *file = open_in(folder, "model.txt");
    while (fscanf(file, "%31s %lf", key, &value) == 2) {
        for (int i = 0; i < 6; i++)
            if (strcmp(key, keys[i]) == 0) *values[i] = (int)value;
        if (strcmp(key, "rope_theta") == 0) n.rope_theta = value;
        if (strcmp(key, "rms_eps") == 0) n.rms_eps = value;
    }
    fclose(file);
    for (int i = 0; i < 6; i++)
        if (*values[i] < 1) die("model.txt lacks", keys[i]);
    return n;
}

static float *allocate(size_t count)
{
    float *values = malloc(count * sizeof *values);
    if (!values) die("out of", "memory");
    return values;
}

static float *read_tensor(const char *folder, const char *name, size_t count)
{
    char file_name[64];
    snprintf(file_name, sizeof file_name, "%s.weight.f32", name);
    FILE *file = open_in(folder, file_name);
    float *values = allocate(count);
    if (fread(values, sizeof *values, count, file) != count) die("too short:", file_name);
    fclose(file);
    return values;
}

static model read_model(const char *folder)
{
    const sizes n = read_sizes(folder);
    const size_t embd = n.n_embd, ff = n.n_ff, q = n.n_head * n.head_dim, kv = n.n_head_kv * n.head_dim;
    model m;
    m.n = n;
    m.token_embd = read_tensor(folder, "token_embd", n.n_vocab * embd);
    m.attn_norm = read_tensor(folder, "blk.0.attn_norm", embd);
    m.attn_q = read_tensor(folder, "blk.0.attn_q", q * embd);
    m.attn_k = read_tensor(folder, "blk.0.attn_k", kv * embd);
    m.attn_v = read_tensor(folder, "blk.0.attn_v", kv * embd);
    m.attn_output = read_tensor(folder, "blk.0.attn_output", embd * q);
    m.ffn_norm = read_tensor(folder, "blk.0.ffn_norm", embd);
    m.ffn_gate = read_tensor(folder, "blk.0.ffn_gate", ff * embd);
    m.ffn_up = read_tensor(folder, "blk.0.ffn_up", ff * embd);
    m.ffn_down = read_tensor(folder, "blk.0.ffn_down", embd * ff);
    m.output_norm = read_tensor(folder, "output_norm", embd);
    m.output = read_tensor(folder, "output", n.n_vocab * embd);
    return m;
}

static state allocate_state(sizes n)
{
    const size_t T = MAX_TOKENS, embd = T * n.n_embd, ff = T * n.n_ff;
    const size_t q = T * n.n_head * n.head_dim, kv = T * n.n_head_kv * n.head_dim, scores = T * T * n.n_head;
    state s = {
        .token_embd = allocate(embd), .attn_norm = allocate(embd), .q = allocate(q), .q_rope = allocate(q),
        .k = allocate(kv), .k_rope = allocate(kv), .v = allocate(kv), .scores = allocate(scores),
        .probs = allocate(scores), .kqv = allocate(q), .attn_output = allocate(embd),
        .attn_residual = allocate(embd), .ffn_norm = allocate(embd), .gate = allocate(ff), .up = allocate(ff),
        .act = allocate(ff), .down = allocate(embd), .ffn_residual = allocate(embd),
        .output_norm = allocate(embd), .logits = allocate(T * n.n_vocab),
    };
    return s;
}

/* Norm weights as this engine holds them: a file misread on the way in shows here before it shows anywhere. */
static void record_norm_weights(const model *m, tracediff *trace)
{
    const int64_t shape[] = {m->n.n_embd};
    tracediff_weight(trace, "blk.0.attn_norm.weight", TRACEDIFF_F32, shape, 1, m->attn_norm);
    tracediff_weight(trace, "blk.0.ffn_norm.weight", TRACEDIFF_F32, shape, 1, m->ffn_norm);
    tracediff_weight(trace, "output_norm.weight", TRACEDIFF_F32, shape, 1, m->output_norm);
}

static int read_tokens(char **arguments, int n, int n_vocab, int32_t *tokens)
{
    if (n < 1 || n >= MAX_TOKENS) die("too many or too few", "tokens");
    for (int i = 0; i < n; i++) {
        tokens[i] = (int32_t)strtol(arguments[i], NULL, 10);
        if (tokens[i] < 0 || tokens[i] >= n_vocab) die("no such token:", arguments[i]);
    }
    return n;
}

int main(int argc, char **argv)
{
    int32_t tokens[MAX_TOKENS];
    tracediff trace;

    if (argc < 4) die("usage: example_decoder", "FOLDER OUT.trace TOKEN...");
    const model m = read_model(argv[1]);
    state s = allocate_state(m.n);
    const int n = read_tokens(argv + 3, argc - 3, m.n.n_vocab, tokens);

    tracediff_open(&trace, argv[2], "example_decoder", "llama", argv[1]);
    record_norm_weights(&m, &trace);
    const int32_t next = forward(&m, &s, 0, tokens, n, 0, &trace);
    forward(&m, &s, 1, &next, 1, n, &trace);
    if (tracediff_close(&trace) != 0) die("trace:", tracediff_error(&trace));
    return 0;
}
