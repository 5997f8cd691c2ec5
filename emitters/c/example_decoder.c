/* A decoder of Llama, Qwen2 and Qwen3 models that writes its own trace: a prefill and two decode steps, with a KV cache.
 *
 *     cc -std=c99 -O2 example_decoder.c -lm -o example_decoder
 *     ./example_decoder FOLDER out.trace 256 72 101 108 108 111
 *     tracediff check out.trace --model model.gguf
 *
 * FOLDER holds each tensor's raw float32 values in NAME.f32 (blk.0.attn_q.weight.f32; biases and the norms of Q and K
 * where the model has them) and the sizes in model.txt, one "key value" to a line: n_layer n_vocab n_embd n_head
 * n_head_kv head_dim n_ff rope_theta rms_eps, and rope_halves 1 where rope pairs halves (Qwen) and not neighbours (Llama).
 *
 * -DFAULT_ROPE_HALVES, -DFAULT_NO_SCALE, -DFAULT_NO_MASK and -DFAULT_SWAP_GATE_UP_ACT each plant a mistake that
 * people make: compile with one and see which op `tracediff check` names.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TRACEDIFF_IMPLEMENTATION
#include "tracediff.h"

enum { MAX_TOKENS = 64, MAX_LAYERS = 8, DECODE_STEPS = 2 };

typedef struct {
    int n_layer, n_vocab, n_embd, n_head, n_head_kv, head_dim, n_ff, rope_halves;
    double rope_theta, rms_eps;
} sizes;

/* What a model lacks is NULL: biases, and the norms of Q and K. */
typedef struct {
    float *attn_norm, *attn_q, *attn_k, *attn_v, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *attn_output;
    float *ffn_norm, *ffn_gate, *ffn_up, *ffn_down;
} layer;

typedef struct {
    sizes n;
    float *token_embd, *output_norm, *output;
    layer layers[MAX_LAYERS];
} model;

/* Values of one forward pass, T tokens each; x is the layer's input and then its output. k_rope and v hold MAX_TOKENS
 * positions of each layer: the KV cache. */
typedef struct {
    float *x, *attn_norm, *q, *k, *q_norm, *k_norm, *q_rope, *k_rope, *v, *scores, *probs, *kqv, *attn_output;
    float *attn_residual, *ffn_norm, *gate, *up, *act, *down, *output_norm, *logits;
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

static void linear(float *y, const float *x, const float *weight, const float *bias, int T, int n_in, int n_out)
{
    for (int t = 0; t < T; t++)
        for (int o = 0; o < n_out; o++) {
            float sum = 0;
            for (int i = 0; i < n_in; i++) sum += x[t * n_in + i] * weight[(size_t)o * n_in + i];
            if (bias) sum += bias[o];
            y[t * n_out + o] = sum;
        }
}

/* Llama's GGUF files hold Q and K so that each pair of channels to rotate are neighbours; Qwen's are halves. */
static void rope(float *y, const float *x, const int32_t *positions, int T, int heads, sizes n)
{
    const int D = n.head_dim;
    for (int t = 0; t < T; t++)
        for (int h = 0; h < heads; h++, x += D, y += D)
            for (int pair = 0; pair < D / 2; pair++) {
#ifdef FAULT_ROPE_HALVES
                const int halves = !n.rope_halves;
#else
                const int halves = n.rope_halves;
#endif
                const int a = halves ? pair : 2 * pair, b = halves ? pair + D / 2 : 2 * pair + 1;
                const double angle = positions[t] * pow(n.rope_theta, -2.0 * pair / D);
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

/* Ops outside the layers have `layer` -1. */
static void record3(tracediff *trace, int layer, const char *op, const float *x, int a, int b, int c)
{
    const int64_t shape[] = {a, b, c};
    char name[64];
    if (layer < 0) snprintf(name, sizeof name, "%s", op);
    else snprintf(name, sizeof name, "blk.%d.%s", layer, op);
    tracediff_op(trace, (int)trace->step, name, TRACEDIFF_F32, shape, c ? 3 : 2, x);
}

static void record2(tracediff *trace, int layer, const char *op, const float *x, int a, int b)
{
    record3(trace, layer, op, x, a, b, 0);
}

static void attention(const layer *m, state *s, sizes n, int il, const int32_t *positions, int T, int past,
                      tracediff *trace)
{
    const int S = past + T, D = n.head_dim, q_size = n.n_head * D, kv_size = n.n_head_kv * D;
    float *const keys = s->k_rope + il * MAX_TOKENS * kv_size, *const values = s->v + il * MAX_TOKENS * kv_size;
    float *k_rope = keys + past * kv_size, *v = values + past * kv_size, *q = s->q, *k = s->k;

    rms_norm(s->attn_norm, s->x, m->attn_norm, T, n.n_embd, n.rms_eps);
    record2(trace, il, "attn_norm", s->attn_norm, T, n.n_embd);
    linear(s->q, s->attn_norm, m->attn_q, m->q_bias, T, n.n_embd, q_size);
    record3(trace, il, "attn_q", s->q, T, n.n_head, D);
    linear(s->k, s->attn_norm, m->attn_k, m->k_bias, T, n.n_embd, kv_size);
    record3(trace, il, "attn_k", s->k, T, n.n_head_kv, D);
    linear(v, s->attn_norm, m->attn_v, m->v_bias, T, n.n_embd, kv_size);
    record3(trace, il, "attn_v", v, T, n.n_head_kv, D);
    if (m->q_norm) {
        rms_norm(s->q_norm, s->q, m->q_norm, T * n.n_head, D, n.rms_eps);
        record3(trace, il, "attn_q_norm", s->q_norm, T, n.n_head, D);
        rms_norm(s->k_norm, s->k, m->k_norm, T * n.n_head_kv, D, n.rms_eps);
        record3(trace, il, "attn_k_norm", s->k_norm, T, n.n_head_kv, D);
        q = s->q_norm;
        k = s->k_norm;
    }
    rope(s->q_rope, q, positions, T, n.n_head, n);
    record3(trace, il, "attn_q_rope", s->q_rope, T, n.n_head, D);
    rope(k_rope, k, positions, T, n.n_head_kv, n);
    record3(trace, il, "attn_k_rope", k_rope, T, n.n_head_kv, D);
    attention_scores(s->scores, s->q_rope, keys, T, S, n);
    record3(trace, il, "attn_scores", s->scores, n.n_head, T, S);
    attention_probs(s->probs, s->scores, T, S, n);
    record3(trace, il, "attn_probs", s->probs, n.n_head, T, S);
    weighted_values(s->kqv, s->probs, values, T, S, n);
    record2(trace, il, "attn_kqv", s->kqv, T, q_size);
    linear(s->attn_output, s->kqv, m->attn_output, NULL, T, q_size, n.n_embd);
    record2(trace, il, "attn_output", s->attn_output, T, n.n_embd);
    add(s->attn_residual, s->attn_output, s->x, T * n.n_embd);
    record2(trace, il, "attn_residual", s->attn_residual, T, n.n_embd);
}

static void feed_forward(const layer *m, state *s, sizes n, int il, int T, tracediff *trace)
{
    rms_norm(s->ffn_norm, s->attn_residual, m->ffn_norm, T, n.n_embd, n.rms_eps);
    record2(trace, il, "ffn_norm", s->ffn_norm, T, n.n_embd);
    linear(s->gate, s->ffn_norm, m->ffn_gate, NULL, T, n.n_embd, n.n_ff);
    record2(trace, il, "ffn_gate", s->gate, T, n.n_ff);
    linear(s->up, s->ffn_norm, m->ffn_up, NULL, T, n.n_embd, n.n_ff);
    record2(trace, il, "ffn_up", s->up, T, n.n_ff);
    swiglu(s->act, s->gate, s->up, T * n.n_ff);
    record2(trace, il, "ffn_act", s->act, T, n.n_ff);
    linear(s->down, s->act, m->ffn_down, NULL, T, n.n_ff, n.n_embd);
    record2(trace, il, "ffn_down", s->down, T, n.n_embd);
    add(s->x, s->down, s->attn_residual, T * n.n_embd);
    record2(trace, il, "ffn_residual", s->x, T, n.n_embd);
}

/* One step: T tokens after `past` cached ones. Returns the token that the last position makes likeliest. */
static int32_t forward(const model *m, state *s, int step, const int32_t *tokens, int T, int past, tracediff *trace)
{
    const sizes n = m->n;
    int32_t positions[MAX_TOKENS] = {0}, best = 0;
    for (int t = 0; t < T; t++) positions[t] = past + t;
    tracediff_step(trace, step, tokens, positions, T);

    embed(s->x, m->token_embd, tokens, T, n.n_embd);
    record2(trace, -1, "token_embd", s->x, T, n.n_embd);
    for (int il = 0; il < n.n_layer; il++) {
        attention(&m->layers[il], s, n, il, positions, T, past, trace);
        feed_forward(&m->layers[il], s, n, il, T, trace);
    }
    rms_norm(s->output_norm, s->x, m->output_norm, T, n.n_embd, n.rms_eps);
    record2(trace, -1, "output_norm", s->output_norm, T, n.n_embd);
    linear(s->logits, s->output_norm, m->output, NULL, T, n.n_embd, n.n_vocab);
    record2(trace, -1, "output", s->logits, T, n.n_vocab);

    const float *last = s->logits + (T - 1) * n.n_vocab;
    for (int v = 1; v < n.n_vocab; v++)
        if (last[v] > last[best]) best = v;
    return best;
}

/* ---- loading ----------------------------------------------------------------------------------------------- */

/* Ops outside the layers have `layer` -1; NULL where there is no such file. */
static FILE *open_in(const char *folder, int layer, const char *name)
{
    char path[4096], block[32] = "";
    if (layer >= 0) snprintf(block, sizeof block, "blk.%d.", layer);
    if (snprintf(path, sizeof path, "%s/%s%s", folder, block, name) >= (int)sizeof path) die("too long a path to", name);
    return fopen(path, "rb");
}

static sizes read_sizes(const char *folder)
{
    sizes n = {0};
    const char *keys[] = {"n_layer", "n_vocab", "n_embd", "n_head", "n_head_kv", "head_dim", "n_ff", "rope_halves"};
    int *values[] = {&n.n_layer, &n.n_vocab, &n.n_embd, &n.n_head, &n.n_head_kv, &n.head_dim, &n.n_ff, &n.rope_halves};
    char key[32];
    double value;
    FILE *file = open_in(folder, -1, "model.txt");
    if (!file) die("cannot open model.txt in", folder);
    while (fscanf(file, "%31s %lf", key, &value) == 2) {
        for (int i = 0; i < 8; i++)
            if (strcmp(key, keys[i]) == 0) *values[i] = (int)value;
        if (strcmp(key, "rope_theta") == 0) n.rope_theta = value;
        if (strcmp(key, "rms_eps") == 0) n.rms_eps = value;
    }
    fclose(file);
    for (int i = 0; i < 7; i++)
        if (*values[i] < 1) die("model.txt lacks", keys[i]);
    if (n.n_layer > MAX_LAYERS) die("too many layers:", folder);
    return n;
}

static float *allocate(size_t count)
{
    float *values = calloc(count, sizeof *values);
    if (!values) die("out of", "memory");
    return values;
}

/* A tensor that a model may lack: NULL where it does. */
static float *read_optional(const char *folder, int layer, const char *name, size_t count)
{
    char file_name[64];
    snprintf(file_name, sizeof file_name, "%s.f32", name);
    FILE *file = open_in(folder, layer, file_name);
    if (!file) return NULL;
    float *values = allocate(count);
    if (fread(values, sizeof *values, count, file) != count) die("too short:", file_name);
    fclose(file);
    return values;
}

static float *read_tensor(const char *folder, int layer, const char *name, size_t count)
{
    float *values = read_optional(folder, layer, name, count);
    if (!values) die("cannot open the file of", name);
    return values;
}

static layer read_layer(const char *folder, int il, sizes n)
{
    const size_t embd = n.n_embd, ff = n.n_ff, D = n.head_dim, q = n.n_head * D, kv = n.n_head_kv * D;
    layer m;
    m.attn_norm = read_tensor(folder, il, "attn_norm.weight", embd);
    m.attn_q = read_tensor(folder, il, "attn_q.weight", q * embd);
    m.attn_k = read_tensor(folder, il, "attn_k.weight", kv * embd);
    m.attn_v = read_tensor(folder, il, "attn_v.weight", kv * embd);
    m.q_bias = read_optional(folder, il, "attn_q.bias", q);
    m.k_bias = read_optional(folder, il, "attn_k.bias", kv);
    m.v_bias = read_optional(folder, il, "attn_v.bias", kv);
    m.q_norm = read_optional(folder, il, "attn_q_norm.weight", D);
    m.k_norm = read_optional(folder, il, "attn_k_norm.weight", D);
    m.attn_output = read_tensor(folder, il, "attn_output.weight", embd * q);
    m.ffn_norm = read_tensor(folder, il, "ffn_norm.weight", embd);
    m.ffn_gate = read_tensor(folder, il, "ffn_gate.weight", ff * embd);
    m.ffn_up = read_tensor(folder, il, "ffn_up.weight", ff * embd);
    m.ffn_down = read_tensor(folder, il, "ffn_down.weight", embd * ff);
    return m;
}

static model read_model(const char *folder)
{
    const sizes n = read_sizes(folder);
    const size_t embd = n.n_embd;
    model m;
    m.n = n;
    m.token_embd = read_tensor(folder, -1, "token_embd.weight", n.n_vocab * embd);
    for (int il = 0; il < n.n_layer; il++) m.layers[il] = read_layer(folder, il, n);
    m.output_norm = read_tensor(folder, -1, "output_norm.weight", embd);
    m.output = read_optional(folder, -1, "output.weight", n.n_vocab * embd);
    if (!m.output) m.output = m.token_embd;
    return m;
}

static state allocate_state(sizes n)
{
    const size_t T = MAX_TOKENS, embd = T * n.n_embd, ff = T * n.n_ff;
    const size_t q = T * n.n_head * n.head_dim, kv = T * n.n_head_kv * n.head_dim, scores = T * T * n.n_head;
    state s = {
        .x = allocate(embd), .attn_norm = allocate(embd), .q = allocate(q), .k = allocate(kv), .q_norm = allocate(q),
        .k_norm = allocate(kv), .q_rope = allocate(q), .k_rope = allocate(n.n_layer * kv),
        .v = allocate(n.n_layer * kv), .scores = allocate(scores), .probs = allocate(scores), .kqv = allocate(q),
        .attn_output = allocate(embd), .attn_residual = allocate(embd), .ffn_norm = allocate(embd),
        .gate = allocate(ff), .up = allocate(ff), .act = allocate(ff), .down = allocate(embd),
        .output_norm = allocate(embd), .logits = allocate(T * n.n_vocab),
    };
    return s;
}

/* Norm weights as this engine holds them: a file misread on the way in shows here before it shows anywhere. */
static void record_norm(tracediff *trace, int layer, const char *name, const float *weight, int n)
{
    const int64_t shape[] = {n};
    char full[64];
    if (!weight) return;
    if (layer < 0) snprintf(full, sizeof full, "%s.weight", name);
    else snprintf(full, sizeof full, "blk.%d.%s.weight", layer, name);
    tracediff_weight(trace, full, TRACEDIFF_F32, shape, 1, weight);
}

static void record_norm_weights(const model *m, tracediff *trace)
{
    const sizes n = m->n;
    for (int il = 0; il < n.n_layer; il++) {
        record_norm(trace, il, "attn_norm", m->layers[il].attn_norm, n.n_embd);
        record_norm(trace, il, "attn_q_norm", m->layers[il].q_norm, n.head_dim);
        record_norm(trace, il, "attn_k_norm", m->layers[il].k_norm, n.head_dim);
        record_norm(trace, il, "ffn_norm", m->layers[il].ffn_norm, n.n_embd);
    }
    record_norm(trace, -1, "output_norm", m->output_norm, n.n_embd);
}

static int read_tokens(char **arguments, int n, int n_vocab, int32_t *tokens)
{
    if (n < 1 || n > MAX_TOKENS - DECODE_STEPS) die("too many or too few", "tokens");
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

    tracediff_open(&trace, argv[2], "example_decoder", NULL, argv[1]);
    record_norm_weights(&m, &trace);
    int32_t next = forward(&m, &s, 0, tokens, n, 0, &trace);
    for (int step = 1; step <= DECODE_STEPS; step++) next = forward(&m, &s, step, &next, 1, n + step - 1, &trace);
    if (tracediff_close(&trace) != 0) die("trace:", tracediff_error(&trace));
    return 0;
}
