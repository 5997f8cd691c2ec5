// Every kind of record that the package writes, once.
//
//	cd emitters/go && go run ./example out.trace && tracediff inspect out.trace
package main

import (
	"fmt"
	"math"
	"os"

	"tracediff"
)

const vocab, embd = 5, 4

var (
	embedding  [vocab][embd]float32
	normWeight [embd]float32
)

func init() {
	for i := range normWeight {
		normWeight[i] = 1 + float32(i)/4
		for v := range embedding {
			embedding[v][i] = float32((v*7+i*3)%11-5) / 8
		}
	}
}

// bf16 is the upper half of a float32: its bfloat16, where the lower half is zero.
func bf16(x float32) uint16 {
	return uint16(math.Float32bits(x) >> 16)
}

func rmsNorm(x [embd]float32) (y [embd]float32) {
	squares := 0.0
	for _, v := range x {
		squares += float64(v) * float64(v)
	}
	rms := math.Sqrt(squares/embd + 1e-6)
	for i, v := range x {
		y[i] = float32(float64(v) / rms * float64(normWeight[i]))
	}
	return y
}

func dot(a, b [embd]float32) (sum float64) {
	for i := range a {
		sum += float64(a[i]) * float64(b[i])
	}
	return sum
}

func forward(t *tracediff.Trace, step int, tokens, positions []int32) {
	var rows tracediff.BF16
	var normed []float32
	var logits []float64
	for _, token := range tokens {
		y := rmsNorm(embedding[token])
		for i, x := range embedding[token] {
			rows, normed = append(rows, bf16(x)), append(normed, y[i])
		}
		for _, row := range embedding {
			logits = append(logits, dot(y, row))
		}
	}
	n := len(tokens)
	t.Step(step, tokens, positions)
	t.Op(step, "token_embd", []int{n, embd}, rows)
	t.Op(step, "output_norm", []int{n, embd}, normed)
	t.Op(step, "output", []int{n, vocab}, logits)
}

// extremes are what statistics must leave out or survive: NaN, infinities, squares that overflow, none at all.
func extremes(t *tracediff.Trace, step int) {
	nan, inf := math.NaN(), math.Inf(1)
	nan32, inf32 := float32(nan), float32(inf)
	shape := []int{2, 3}
	t.Record = tracediff.Data | tracediff.Statistics
	t.Op(step, "extremes.f16", shape, tracediff.F16{0x3c00, 0xc100, 0x7c00, 0x7e00, 0x0001, 0x7bff})
	t.Op(step, "extremes.bf16", shape, tracediff.BF16{0x3f80, 0xc020, 0x7f80, 0x7fc0, 0x0001, 0x7f7f})
	t.Op(step, "extremes.f32", shape, []float32{1, -2.5, nan32, inf32, -inf32, 0.1})
	t.Op(step, "extremes.f64", shape, []float64{1e300, -1e300, nan, inf, 0.1, 1.7e308})
	t.Record = tracediff.Statistics
	t.Op(step, "extremes.nan", []int{2}, []float32{nan32, nan32})
	t.Op(step, "extremes.empty", []int{0, 3}, []float32{})
}

// layouts are of three tokens the first and the last, and values that lie in columns, two apart.
func layouts(t *tracediff.Trace, step int) {
	nan32 := float32(math.NaN())
	x := []float32{1, -2, 3, nan32, nan32, 0.5, 0.25, -0.125}
	t.Record = tracediff.Data | tracediff.Statistics
	t.Rows = []int{0, 2}
	t.Op(step, "layouts.rows", []int{2, 3}, x[:6])
	t.Strides = []int{1, 5}
	t.Op(step, "layouts.strides", []int{3, 2}, x)
}

// batch is a token of each of two sequences, one value of both and one of the second alone.
func batch(t *tracediff.Trace, step int) {
	second := 1
	t.Record = tracediff.Data
	t.Sequences = []int32{0, 1}
	t.Step(step, []int32{3, 1}, []int32{4, 0})
	t.Op(step, "batch.rows", []int{2, 1}, []float32{1, -2})
	t.Sequence = &second
	t.Op(step, "batch.scores", []int{1, 1, 1}, []float32{1})
}

func run(path, engine string) error {
	// No step goes back here, so that Rollback drops nothing.
	more := tracediff.More{Weights: "F32", Context: 64, Rounding: "bf16", Rollback: true}
	t, err := tracediff.CreateWith(path, engine, "llama", "", more)
	if err != nil {
		return err
	}
	t.Weight("output_norm.weight", []int{embd}, normWeight[:])
	forward(t, 0, []int32{3, 1, 4}, []int32{0, 1, 2})
	layouts(t, 0)
	t.Record = tracediff.Statistics
	forward(t, 1, []int32{1}, []int32{3})
	extremes(t, 1)
	batch(t, 2)
	return t.Close()
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: example OUT.trace [ENGINE]")
		os.Exit(2)
	}
	engine := "example"
	if len(os.Args) > 2 {
		engine = os.Args[2]
	}
	if err := run(os.Args[1], engine); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
