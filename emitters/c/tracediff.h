/* tracediff.h - write a tracediff trace (version 1) from C99, C++ or CUDA host code. No dependencies.
 *
 * In exactly one source file:
 *
 *     #define TRACEDIFF_IMPLEMENTATION
 *     #include "tracediff.h"
 *
 * Then, around the forward pass:
 *
 *     tracediff t;
 *     tracediff_open(&t, "mine.trace", "my-engine 0.3", "llama", "model.gguf");
 *     tracediff_step(&t, 0, tokens, positions, n_tokens);
 *     int64_t shape[] = {n_tokens, n_embd};
 *     tracediff_op(&t, 0, "blk.0.attn_norm", TRACEDIFF_F32, shape, 2, x);
 *     if (tracediff_close(&t) != 0) fprintf(stderr, "%s\n", tracediff_error(&t));
 *
 * Every function returns 0, or -1 after an error. The first error stays: all later calls do nothing and return
 * -1, so it is enough to look at what tracediff_close returns. Data must lie in host memory. Not thread-safe.
 */
#ifndef TRACEDIFF_H
#define TRACEDIFF_H

#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { TRACEDIFF_F64, TRACEDIFF_F32, TRACEDIFF_F16, TRACEDIFF_BF16 } tracediff_dtype;

/* What a record holds of a value; both is DATA | STATISTICS. */
enum { TRACEDIFF_DATA = 1, TRACEDIFF_STATISTICS = 2 };

/* Which part of a value a process of several holds: along an axis of the shape, or a term of a sum. */
enum { TRACEDIFF_SUM = -1 };
typedef struct {
    int axis, rank, of;
} tracediff_shard;

typedef struct {
    int record; /* TRACEDIFF_DATA after tracediff_open; set it at any time */
    /* Of the next record alone, which resets them: indices of the step's tokens that an op holds, where it does not
     * hold all (the last of n is {n - 1}); for each axis how many elements further its next value is, where `data`
     * is transposed or padded. */
    const int32_t *rows;
    int n_rows;
    const int64_t *strides;
    const tracediff_shard *shard; /* what this rank holds of it, where that is not the whole */
    /* Of a batch: for the next step alone whose each token is; for the next op alone the sequence that it is of, as if
     * the step had that one's tokens alone (scores and probabilities are written so), else -1. */
    const int32_t *sequences;
    int sequence;
    FILE *text, *data;
    uint64_t lines, offset;
    int64_t step;
    int ranks;
    char error[512];
} tracediff;

/* Opens NAME.trace and, beside it, NAME.bin. `arch` and `model` may be NULL. */
int tracediff_open(tracediff *t, const char *path, const char *engine, const char *arch, const char *model);

/* The same, with the ggml type of the matmul weights, the coarsest of a mix: "Q4_K". It may be NULL. */
int tracediff_open_as(tracediff *t, const char *path, const char *engine, const char *arch, const char *model,
                      const char *weights);

/* What else the first line may say; what is 0 or NULL is not said. */
typedef struct {
    const char *weights;  /* as in tracediff_open_as */
    int rank, ranks;      /* as in tracediff_open_rank */
    int64_t context;      /* for how many positions the engine was set up, where that is more than it is fed */
    const char *rounding; /* the coarsest type that values are rounded to inside ops: "f16", "bf16", "q8_0" */
    int rollback;         /* a step at an earlier position drops what was fed from there on: rejected drafts */
} tracediff_more;

int tracediff_open_with(tracediff *t, const char *path, const char *engine, const char *arch, const char *model,
                        const tracediff_more *more);

/* The same of one process of several, which write a trace each: rank 0 to `ranks` - 1. */
int tracediff_open_rank(tracediff *t, const char *path, const char *engine, const char *arch, const char *model,
                        const char *weights, int rank, int ranks);

/* A weight as the engine holds it in memory, by its name in the GGUF file: "output_norm.weight". */
int tracediff_weight(tracediff *t, const char *name, tracediff_dtype dtype, const int64_t *shape, int ndim,
                     const void *data);

/* Begins a forward pass: 0 is the prefill, then one step for each token decoded. */
int tracediff_step(tracediff *t, int step, const int32_t *tokens, const int32_t *positions, int n);

/* The output of one op of the step: `shape` outermost first, `data` without gaps unless `strides` are set. */
int tracediff_op(tracediff *t, int step, const char *name, tracediff_dtype dtype, const int64_t *shape, int ndim,
                 const void *data);

/* Writes the `end` record, without which a trace counts as cut off, and closes both files. */
int tracediff_close(tracediff *t);

/* The first error, or NULL. */
const char *tracediff_error(const tracediff *t);

#ifdef __cplusplus
}
#endif
#endif /* TRACEDIFF_H */

#ifdef TRACEDIFF_IMPLEMENTATION
#ifndef TRACEDIFF_IMPLEMENTED
#define TRACEDIFF_IMPLEMENTED

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

static const char *const tracediff__names[] = {"f64", "f32", "f16", "bf16"};
static const size_t tracediff__sizes[] = {8, 4, 2, 2};

typedef struct {
    double min, max, mean, rms;
    uint64_t finite, nan, inf;
} tracediff__statistics;

static int tracediff__fail(tracediff *t, const char *format, ...)
{
    va_list arguments;
    if (t->error[0]) return -1;
    va_start(arguments, format);
    vsnprintf(t->error, sizeof t->error, format, arguments);
    va_end(arguments);
    return -1;
}

static int tracediff__failed_io(tracediff *t, const char *what)
{
    return tracediff__fail(t, "cannot write the trace's %s: %s", what, strerror(errno));
}

/* Length of the UTF-8 sequence at s, 0 if it is not valid (RFC 3629, section 4). */
static int tracediff__utf8_length(const unsigned char *s)
{
    int i, length = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf5 ? 4 : 0;
    for (i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if (s[0] == 0xe0 && s[1] < 0xa0) return 0; /* overlong */
    if (s[0] == 0xed && s[1] > 0x9f) return 0; /* surrogates */
    if (s[0] == 0xf0 && s[1] < 0x90) return 0; /* overlong */
    if (s[0] == 0xf4 && s[1] > 0x8f) return 0; /* beyond U+10FFFF */
    return length;
}

/* A key and a JSON string. Bytes that are not UTF-8, as file names may hold, become U+FFFD. */
static void tracediff__field(tracediff *t, const char *key, const char *value)
{
    const unsigned char *s = (const unsigned char *)value;
    fprintf(t->text, ",\"%s\":\"", key);
    while (*s) {
        int length = tracediff__utf8_length(s);
        if (length == 0)
            fputs("\\ufffd", t->text);
        else if (*s < 0x20)
            fprintf(t->text, "\\u%04x", (unsigned)*s);
        else {
            if (*s == '"' || *s == '\\') fputc('\\', t->text);
            fwrite(s, 1, (size_t)length, t->text);
        }
        s += length ? length : 1;
    }
    fputc('"', t->text);
}

/* A number that reads back as the same double. The locale may have made its decimal point something else. */
static void tracediff__number(tracediff *t, const char *key, double value)
{
    char digits[40], *s;
    snprintf(digits, sizeof digits, "%.17g", value);
    fprintf(t->text, ",\"%s\":", key);
    for (s = digits; *s; s++) fputc(strchr("0123456789+-e", *s) ? *s : '.', t->text);
}

static void tracediff__integers(tracediff *t, const char *key, const int32_t *values, int n)
{
    int i;
    fprintf(t->text, ",\"%s\":[", key);
    for (i = 0; i < n; i++) fprintf(t->text, "%s%ld", i ? "," : "", (long)values[i]);
    fputc(']', t->text);
}

static void tracediff__sizes_of_axes(tracediff *t, const char *key, const int64_t *values, int n)
{
    int i;
    fprintf(t->text, ",\"%s\":[", key);
    for (i = 0; i < n; i++) fprintf(t->text, "%s%lld", i ? "," : "", (long long)values[i]);
    fputc(']', t->text);
}

/* Ends a line. Data goes out before the line that announces it: a crash leaves no promise without its bytes. */
static int tracediff__line(tracediff *t)
{
    if (fflush(t->data) != 0) return tracediff__failed_io(t, "data file");
    fputs("}\n", t->text);
    if (fflush(t->text) != 0 || ferror(t->text)) return tracediff__failed_io(t, "text file");
    t->lines++;
    return 0;
}

static double tracediff__from_f32(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static double tracediff__from_f16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) return ldexp(sign ? -(double)fraction : (double)fraction, -24);
    return tracediff__from_f32(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}

/* Where the i-th value lies in data with these strides, in elements. */
static uint64_t tracediff__place(uint64_t i, const int64_t *shape, int ndim, const int64_t *strides)
{
    uint64_t place = 0;
    if (!strides) return i;
    while (ndim--) {
        place += i % (uint64_t)shape[ndim] * (uint64_t)strides[ndim];
        i /= (uint64_t)shape[ndim];
    }
    return place;
}

static double tracediff__value(const void *data, tracediff_dtype dtype, uint64_t i)
{
    switch (dtype) {
    case TRACEDIFF_F64: return ((const double *)data)[i];
    case TRACEDIFF_F32: return ((const float *)data)[i];
    case TRACEDIFF_F16: return tracediff__from_f16(((const uint16_t *)data)[i]);
    default: return tracediff__from_f32((uint32_t)((const uint16_t *)data)[i] << 16);
    }
}

/* isnan and isfinite by bits: engines are compiled with -ffast-math, which makes the macros constants. */
static int tracediff__is_nan(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7fffffffffffffff) > 0x7ff0000000000000;
}

static int tracediff__is_finite(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7ff0000000000000) != 0x7ff0000000000000;
}

/* Over the finite values. Large float64 values are scaled, or their squares would overflow. */
static tracediff__statistics tracediff__measure(const void *data, tracediff_dtype dtype, uint64_t n,
                                                const int64_t *shape, int ndim, const int64_t *strides)
{
    tracediff__statistics s = {0, 0, 0, 0, 0, 0, 0};
    double scale, sum = 0, squares = 0;
    uint64_t i;
    for (i = 0; i < n; i++) {
        double x = tracediff__value(data, dtype, tracediff__place(i, shape, ndim, strides));
        if (tracediff__is_nan(x)) s.nan++;
        else if (!tracediff__is_finite(x)) s.inf++;
        else {
            if (s.finite == 0 || x < s.min) s.min = x;
            if (s.finite == 0 || x > s.max) s.max = x;
            s.finite++;
        }
    }
    if (s.finite == 0) return s;
    scale = fmax(fabs(s.min), fabs(s.max)) < 1e150 ? 1 : ldexp(1, 600);
    for (i = 0; i < n; i++) {
        double x = tracediff__value(data, dtype, tracediff__place(i, shape, ndim, strides));
        if (!tracediff__is_finite(x)) continue;
        x /= scale;
        sum += x;
        squares += x * x;
    }
    s.mean = sum / (double)s.finite * scale;
    s.rms = sqrt(squares / (double)s.finite) * scale;
    return s;
}

static void tracediff__write_statistics(tracediff *t, tracediff__statistics s)
{
    if (s.finite) {
        tracediff__number(t, "min", s.min);
        tracediff__number(t, "max", s.max);
        tracediff__number(t, "mean", s.mean);
        tracediff__number(t, "rms", s.rms);
    }
    if (s.nan) fprintf(t->text, ",\"nan\":%llu", (unsigned long long)s.nan);
    if (s.inf) fprintf(t->text, ",\"inf\":%llu", (unsigned long long)s.inf);
}

static int tracediff__write_data(tracediff *t, tracediff_dtype dtype, uint64_t n, const void *data)
{
    size_t size = tracediff__sizes[dtype];
    if (n && fwrite(data, size, (size_t)n, t->data) != n) return tracediff__failed_io(t, "data file");
    fprintf(t->text, ",\"dtype\":\"%s\",\"offset\":%llu", tracediff__names[dtype], (unsigned long long)t->offset);
    t->offset += n * size;
    return 0;
}

/* The rest of a weight or op record, from its shape on. */
static void tracediff__shard(tracediff *t, const tracediff_shard *shard)
{
    fputs(",\"shard\":{", t->text);
    if (shard->axis == TRACEDIFF_SUM)
        fputs("\"sum\":true", t->text);
    else
        fprintf(t->text, "\"axis\":%d", shard->axis);
    fprintf(t->text, ",\"rank\":%d,\"of\":%d}", shard->rank, shard->of);
}

static int tracediff__values(tracediff *t, tracediff_dtype dtype, const int64_t *shape, int ndim, const void *data)
{
    const int64_t *strides = t->strides;
    const int holds_data = t->record & TRACEDIFF_DATA;
    uint64_t n = 1, extent = 1;
    int i;
    for (i = 0; i < ndim; i++) {
        n *= (uint64_t)shape[i];
        if (strides) extent += (uint64_t)(shape[i] - 1) * (uint64_t)strides[i];
    }
    if (!strides || n == 0) extent = n;
    tracediff__sizes_of_axes(t, "shape", shape, ndim);
    if (t->rows) tracediff__integers(t, "rows", t->rows, t->n_rows);
    if (strides && (holds_data || n == 0)) tracediff__sizes_of_axes(t, "strides", strides, ndim);
    if (t->shard) tracediff__shard(t, t->shard);
    t->rows = NULL;
    t->strides = NULL;
    t->shard = NULL;
    /* Of no values there are no statistics: such a record holds data, of no bytes. */
    if ((holds_data || n == 0) && tracediff__write_data(t, dtype, extent, data) != 0) return -1;
    if (t->record & TRACEDIFF_STATISTICS)
        tracediff__write_statistics(t, tracediff__measure(data, dtype, n, shape, ndim, strides));
    return tracediff__line(t);
}

static int tracediff__check_values(tracediff *t, const char *name, tracediff_dtype dtype, const int64_t *shape,
                                   int ndim)
{
    int i;
    if (t->error[0]) return -1;
    if ((unsigned)dtype > TRACEDIFF_BF16) return tracediff__fail(t, "%s: unknown dtype %d", name, (int)dtype);
    if (!(t->record & (TRACEDIFF_DATA | TRACEDIFF_STATISTICS)))
        return tracediff__fail(t, "%s: record neither data nor statistics", name);
    if (t->shard && !t->ranks)
        return tracediff__fail(t, "%s: a part of it, in a trace that tracediff_open_rank did not open", name);
    if (t->shard && (t->shard->rank < 0 || t->shard->rank >= t->shard->of))
        return tracediff__fail(t, "%s: no part %d of %d", name, t->shard->rank, t->shard->of);
    if (t->shard && (t->shard->axis < TRACEDIFF_SUM || t->shard->axis >= ndim))
        return tracediff__fail(t, "%s: no axis %d of %d", name, t->shard->axis, ndim);
    for (i = 0; i < ndim; i++)
        if (shape[i] < 0 || (t->strides && t->strides[i] < 0))
            return tracediff__fail(t, "%s: negative size %lld", name, (long long)(shape[i] < 0 ? shape : t->strides)[i]);
    return 0;
}

static int tracediff__open_files(tracediff *t, const char *path, char *data_path)
{
    t->text = fopen(path, "wb");
    if (!t->text) return tracediff__fail(t, "cannot open %s: %s", path, strerror(errno));
    t->data = fopen(data_path, "wb");
    if (!t->data) return tracediff__fail(t, "cannot open %s: %s", data_path, strerror(errno));
    return 0;
}

static const char *tracediff__base_name(const char *path)
{
    const char *s, *base = path;
    for (s = path; *s; s++) {
        if (*s == '/') base = s + 1;
#ifdef _WIN32
        if (*s == '\\') base = s + 1;
#endif
    }
    return base;
}

static int tracediff__header(tracediff *t, const char *engine, const char *arch, const char *model, const char *data,
                             const tracediff_more *more)
{
    fputs("{\"type\":\"trace\",\"version\":1", t->text);
    tracediff__field(t, "engine", engine);
    if (arch) tracediff__field(t, "arch", arch);
    if (model) tracediff__field(t, "model", model);
    tracediff__field(t, "data", data);
    if (more->weights) tracediff__field(t, "weights", more->weights);
    if (more->context) fprintf(t->text, ",\"context\":%lld", (long long)more->context);
    if (more->rounding) tracediff__field(t, "rounding", more->rounding);
    if (more->rollback) fputs(",\"rollback\":true", t->text);
    if (more->ranks) fprintf(t->text, ",\"rank\":%d,\"ranks\":%d", more->rank, more->ranks);
    return tracediff__line(t);
}

int tracediff_open(tracediff *t, const char *path, const char *engine, const char *arch, const char *model)
{
    return tracediff_open_as(t, path, engine, arch, model, NULL);
}

int tracediff_open_as(tracediff *t, const char *path, const char *engine, const char *arch, const char *model,
                      const char *weights)
{
    return tracediff_open_rank(t, path, engine, arch, model, weights, 0, 0);
}

int tracediff_open_rank(tracediff *t, const char *path, const char *engine, const char *arch, const char *model,
                        const char *weights, int rank, int ranks)
{
    tracediff_more more;
    memset(&more, 0, sizeof more);
    more.weights = weights;
    more.rank = rank;
    more.ranks = ranks;
    return tracediff_open_with(t, path, engine, arch, model, &more);
}

int tracediff_open_with(tracediff *t, const char *path, const char *engine, const char *arch, const char *model,
                        const tracediff_more *more)
{
    static const char suffix[] = ".trace";
    const uint16_t one = 1;
    size_t length = strlen(path), stem = length - (sizeof suffix - 1);
    char *data_path;
    int result;
    memset(t, 0, sizeof *t);
    t->record = TRACEDIFF_DATA;
    t->sequence = -1;
    t->step = -1;
    t->ranks = more->ranks;
    if (more->ranks && (more->rank < 0 || more->rank >= more->ranks))
        return tracediff__fail(t, "no rank %d of %d", more->rank, more->ranks);
    if (*(const unsigned char *)&one != 1)
        return tracediff__fail(t, "data is little-endian, and this machine is not");
    if (length < sizeof suffix - 1 || strcmp(path + stem, suffix) != 0)
        return tracediff__fail(t, "%s: name it NAME.trace; its data becomes NAME.bin", path);
    data_path = (char *)malloc(length + 1);
    if (!data_path) return tracediff__fail(t, "out of memory");
    memcpy(data_path, path, stem);
    strcpy(data_path + stem, ".bin");
    result = tracediff__open_files(t, path, data_path);
    if (result == 0)
        result = tracediff__header(t, engine, arch, model, tracediff__base_name(data_path), more);
    free(data_path);
    return result;
}

int tracediff_weight(tracediff *t, const char *name, tracediff_dtype dtype, const int64_t *shape, int ndim,
                     const void *data)
{
    if (tracediff__check_values(t, name, dtype, shape, ndim) != 0) return -1;
    fputs("{\"type\":\"weight\"", t->text);
    tracediff__field(t, "weight", name);
    return tracediff__values(t, dtype, shape, ndim, data);
}

int tracediff_step(tracediff *t, int step, const int32_t *tokens, const int32_t *positions, int n)
{
    if (t->error[0]) return -1;
    if (step <= t->step) return tracediff__fail(t, "step %d after step %d", step, (int)t->step);
    if (n < 1) return tracediff__fail(t, "step %d has no tokens", step);
    t->step = step;
    fprintf(t->text, "{\"type\":\"step\",\"step\":%d", step);
    tracediff__integers(t, "tokens", tokens, n);
    tracediff__integers(t, "positions", positions, n);
    if (t->sequences) tracediff__integers(t, "sequences", t->sequences, n);
    t->sequences = NULL;
    return tracediff__line(t);
}

int tracediff_op(tracediff *t, int step, const char *name, tracediff_dtype dtype, const int64_t *shape, int ndim,
                 const void *data)
{
    if (tracediff__check_values(t, name, dtype, shape, ndim) != 0) return -1;
    if (step != t->step)
        return tracediff__fail(t, "%s of step %d, but the step begun last is %d", name, step, (int)t->step);
    fprintf(t->text, "{\"type\":\"op\",\"step\":%d", step);
    if (t->sequence >= 0) fprintf(t->text, ",\"sequence\":%d", t->sequence);
    t->sequence = -1;
    tracediff__field(t, "op", name);
    return tracediff__values(t, dtype, shape, ndim, data);
}

int tracediff_close(tracediff *t)
{
    if (!t->error[0]) {
        fprintf(t->text, "{\"type\":\"end\",\"records\":%llu", (unsigned long long)t->lines);
        tracediff__line(t);
    }
    if (t->data && fclose(t->data) != 0) tracediff__failed_io(t, "data file");
    if (t->text && fclose(t->text) != 0) tracediff__failed_io(t, "text file");
    t->text = t->data = NULL;
    return t->error[0] ? -1 : 0;
}

const char *tracediff_error(const tracediff *t)
{
    return t->error[0] ? t->error : NULL;
}

#ifdef __cplusplus
}
#endif
#endif /* TRACEDIFF_IMPLEMENTED */
#endif /* TRACEDIFF_IMPLEMENTATION */
