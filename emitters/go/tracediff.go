// Package tracediff writes a tracediff trace (version 1). One file, standard library only: copy it.
//
//	trace, err := tracediff.Create("mine.trace", "my-engine 0.3", "llama", "model.gguf")
//	trace.Step(0, tokens, positions)
//	trace.Op(0, "blk.0.attn_norm", []int{len(tokens), nEmbd}, x)
//	err = trace.Close()
//
// Every method returns the first error; after it the others do nothing. So it is enough to look at Close's.
package tracediff

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
)

// F16 is half precision as its bits.
type F16 []uint16

// BF16 is bfloat16 as its bits.
type BF16 []uint16

// Record is what a record holds of a value.
type Record int

const (
	Data Record = 1 << iota
	Statistics
)

// Trace is a trace being written. After an error it reads as cut off at that place.
type Trace struct {
	Record  Record // Data at first; Statistics or Data | Statistics at any time
	Rows    []int  // of the next op alone: indices of the step's tokens that it holds, if not all
	Strides []int  // of the next record alone, if transposed or padded: elements to each axis's next value
	// Of a batch: for the next step alone whose each token is, for the next op alone the sequence that it is of, as if
	// the step had that one's tokens alone. Scores and probabilities are written so.
	Sequences  []int32
	Sequence   *int
	text, data *os.File
	buffer     *bufio.Writer // of data
	lines      int
	offset     int64
	step       int
	err        error
}

type header struct {
	Type    string `json:"type"`
	Version int    `json:"version"`
	Engine  string `json:"engine"`
	Arch    string `json:"arch,omitempty"`
	Model   string `json:"model,omitempty"`
	Data    string `json:"data"`
	Weights string `json:"weights,omitempty"`

	Context  int    `json:"context,omitempty"`
	Rounding string `json:"rounding,omitempty"`
	Rollback bool   `json:"rollback,omitempty"`
}

type values struct {
	Type     string   `json:"type"`
	Weight   string   `json:"weight,omitempty"`
	Step     *int     `json:"step,omitempty"`
	Op       string   `json:"op,omitempty"`
	Sequence *int     `json:"sequence,omitempty"`
	Shape    []int    `json:"shape"`
	Rows     []int    `json:"rows,omitempty"`
	Strides  []int    `json:"strides,omitempty"`
	DType    string   `json:"dtype,omitempty"`
	Offset   *int64   `json:"offset,omitempty"`
	Min      *float64 `json:"min,omitempty"`
	Max      *float64 `json:"max,omitempty"`
	Mean     *float64 `json:"mean,omitempty"`
	RMS      *float64 `json:"rms,omitempty"`
	NaN      int      `json:"nan,omitempty"`
	Inf      int      `json:"inf,omitempty"`
}

type step struct {
	Type      string  `json:"type"`
	Step      int     `json:"step"`
	Tokens    []int32 `json:"tokens"`
	Positions []int32 `json:"positions"`
	Sequences []int32 `json:"sequences,omitempty"`
}

type end struct {
	Type    string `json:"type"`
	Records int    `json:"records"`
}

// Create opens NAME.trace and, beside it, NAME.bin. The arch and model may be "".
func Create(path, engine, arch, model string) (*Trace, error) {
	return CreateAs(path, engine, arch, model, "")
}

// CreateAs is Create with the ggml type of the matmul weights, the coarsest of a mix: "Q4_K".
func CreateAs(path, engine, arch, model, weights string) (*Trace, error) {
	return CreateWith(path, engine, arch, model, More{Weights: weights})
}

// More is what else the first line may say; what is zero is not said.
type More struct {
	Weights  string // as in CreateAs
	Context  int    // for how many positions the engine was set up, where that is more than it is fed
	Rounding string // the coarsest type that values are rounded to inside ops: "f16", "bf16", "q8_0"
	Rollback bool   // a step at an earlier position drops what was fed from there on: rejected drafts
}

// CreateWith is Create with more in the first line.
func CreateWith(path, engine, arch, model string, more More) (*Trace, error) {
	stem := strings.TrimSuffix(path, ".trace")
	if stem == path {
		return nil, fmt.Errorf("%s: name it NAME.trace; its data becomes NAME.bin", path)
	}
	t := &Trace{Record: Data, step: -1}
	if t.text, t.err = os.Create(path); t.err != nil {
		return nil, t.err
	}
	if t.data, t.err = os.Create(stem + ".bin"); t.err != nil {
		t.text.Close()
		return nil, t.err
	}
	t.buffer = bufio.NewWriterSize(t.data, 1<<16)
	data := filepath.Base(stem + ".bin")
	first := header{"trace", 1, engine, arch, model, data, more.Weights, more.Context, more.Rounding, more.Rollback}
	if t.line(first) != nil {
		return nil, t.Close()
	}
	return t, nil
}

// Weight records a weight as the engine holds it, by its name in the GGUF file: "output_norm.weight".
func (t *Trace) Weight(name string, shape []int, data any) error {
	return t.values(values{Type: "weight", Weight: name, Shape: shape}, name, data)
}

// Step begins a forward pass: 0 is the prefill, then one step for each token decoded.
func (t *Trace) Step(number int, tokens, positions []int32) error {
	if number <= t.step || len(tokens) == 0 || len(tokens) != len(positions) {
		return t.fail(fmt.Errorf("step %d: steps ascend, and each token has a position", number))
	}
	t.step = number
	sequences := t.Sequences
	t.Sequences = nil
	return t.line(step{"step", number, tokens, positions, sequences})
}

// Op records the output of one op of the step, shape outermost first; data is []float64, []float32, F16 or BF16.
func (t *Trace) Op(number int, name string, shape []int, data any) error {
	if number != t.step {
		return t.fail(fmt.Errorf("%s of step %d, but the step begun last is %d", name, number, t.step))
	}
	sequence := t.Sequence
	t.Sequence = nil
	return t.values(values{Type: "op", Step: &number, Op: name, Sequence: sequence, Shape: shape}, name, data)
}

// Close writes the end record, without which a trace counts as cut off, and closes both files.
func (t *Trace) Close() error {
	t.line(end{"end", t.lines})
	t.fail(t.data.Close())
	t.fail(t.text.Close())
	return t.err
}

func (t *Trace) values(record values, name string, data any) error {
	dtype, n, bits, at := inspect(data)
	record.Shape = append([]int{}, record.Shape...) // a nil slice would become null
	record.Rows, record.Strides = t.Rows, t.Strides
	t.Rows, t.Strides = nil, nil
	if dtype == "" {
		return t.fail(fmt.Errorf("%s: cannot record a %T", name, data))
	}
	place, extent := layout(record.Shape, record.Strides)
	if n != extent {
		return t.fail(fmt.Errorf("%s: %d values for shape %v", name, n, record.Shape))
	}
	if t.err != nil {
		return t.err
	}
	// Of no values there are no statistics: such a record holds data, of no bytes.
	if t.Record&Data != 0 || n == 0 {
		offset := t.offset
		record.DType, record.Offset = dtype, &offset
		t.offset += int64(binary.Size(bits))
		t.fail(binary.Write(t.buffer, binary.LittleEndian, bits))
	}
	if record.Offset == nil {
		record.Strides = nil
	}
	if t.Record&Statistics != 0 {
		measure(&record, product(record.Shape), func(i int) float64 { return at(place(i)) })
	}
	return t.line(record)
}

// line writes a record. Data goes out before the line that announces it: a crash leaves no promise without its bytes.
func (t *Trace) line(record any) error {
	if t.err != nil {
		return t.err
	}
	t.fail(t.buffer.Flush())
	line, err := json.Marshal(record)
	if t.fail(err) != nil {
		return t.err
	}
	_, err = t.text.Write(append(line, '\n'))
	t.lines++
	return t.fail(err)
}

// fail keeps the first error.
func (t *Trace) fail(err error) error {
	if t.err == nil {
		t.err = err
	}
	return t.err
}

// inspect returns the dtype of data, its length, what to write of it, and its values as float64.
func inspect(data any) (dtype string, n int, bits any, at func(int) float64) {
	switch x := data.(type) {
	case []float64:
		return "f64", len(x), x, func(i int) float64 { return x[i] }
	case []float32:
		return "f32", len(x), x, func(i int) float64 { return float64(x[i]) }
	case F16:
		return "f16", len(x), []uint16(x), func(i int) float64 { return fromF16(x[i]) }
	case BF16:
		return "bf16", len(x), []uint16(x), func(i int) float64 {
			return float64(math.Float32frombits(uint32(x[i]) << 16))
		}
	}
	return "", 0, nil, nil
}

// measure fills in the statistics over the finite values. Large float64 values are scaled, or their squares would
// overflow.
func measure(record *values, n int, at func(int) float64) {
	min, max, finite := math.Inf(1), math.Inf(-1), 0
	for i := 0; i < n; i++ {
		switch x := at(i); {
		case math.IsNaN(x):
			record.NaN++
		case math.IsInf(x, 0):
			record.Inf++
		default:
			min, max, finite = math.Min(min, x), math.Max(max, x), finite+1
		}
	}
	if finite == 0 {
		return
	}
	scale, sum, squares := 1.0, 0.0, 0.0
	if math.Max(math.Abs(min), math.Abs(max)) >= 1e150 {
		scale = math.Ldexp(1, 600)
	}
	for i := 0; i < n; i++ {
		if x := at(i) / scale; !math.IsNaN(x) && !math.IsInf(x, 0) {
			sum += x
			squares += x * x
		}
	}
	mean, rms := sum/float64(finite)*scale, math.Sqrt(squares/float64(finite))*scale
	record.Min, record.Max, record.Mean, record.RMS = &min, &max, &mean, &rms
}

func fromF16(bits uint16) float64 {
	exponent, fraction := int(bits>>10&31), float64(bits&1023)
	magnitude := math.Ldexp(fraction+1024, exponent-25)
	switch {
	case exponent == 0:
		magnitude = math.Ldexp(fraction, -24)
	case exponent == 31 && fraction != 0:
		magnitude = math.NaN()
	case exponent == 31:
		magnitude = math.Inf(1)
	}
	return math.Copysign(magnitude, 0.5-float64(bits>>15))
}

// layout returns where the i-th value of a shape lies, and how many elements they take up, gaps included; -1 if the
// strides are not one for each axis.
func layout(shape, strides []int) (place func(int) int, extent int) {
	if strides == nil || product(shape) == 0 {
		return func(i int) int { return i }, product(shape)
	}
	if len(strides) != len(shape) {
		return nil, -1
	}
	extent = 1
	for axis, n := range shape {
		extent += (n - 1) * strides[axis]
	}
	return func(i int) (at int) {
		for axis := len(shape) - 1; axis >= 0; axis-- {
			at += i % shape[axis] * strides[axis]
			i /= shape[axis]
		}
		return at
	}, extent
}

func product(shape []int) int {
	n := 1
	for _, size := range shape {
		n *= size
	}
	return n
}
