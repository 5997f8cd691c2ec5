//! Every kind of record that tracediff.rs writes, once.
//!
//!     rustc --edition 2021 example.rs && ./example out.trace && tracediff inspect out.trace

mod tracediff;

use tracediff::{More, Record, Trace, Values};

const VOCAB: usize = 5;
const EMBD: usize = 4;

struct Model {
    embedding: Vec<[f32; EMBD]>,
    norm_weight: [f32; EMBD],
}

impl Model {
    fn new() -> Model {
        let row = |v| std::array::from_fn(|i| ((v * 7 + i * 3) % 11) as f32 / 8.0 - 5.0 / 8.0);
        Model {
            embedding: (0..VOCAB).map(row).collect(),
            norm_weight: std::array::from_fn(|i| 1.0 + i as f32 / 4.0),
        }
    }

    fn rms_norm(&self, x: &[f32; EMBD]) -> [f32; EMBD] {
        let squares: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        let rms = (squares / EMBD as f64 + 1e-6).sqrt();
        std::array::from_fn(|i| (f64::from(x[i]) / rms * f64::from(self.norm_weight[i])) as f32)
    }

    fn forward(
        &self,
        trace: &mut Trace,
        step: u32,
        tokens: &[u32],
        positions: &[u32],
    ) -> std::io::Result<()> {
        let (n, mut rows, mut normed, mut logits) = (tokens.len(), vec![], vec![], vec![]);
        for &token in tokens {
            let x = &self.embedding[token as usize];
            let y = self.rms_norm(x);
            // The upper half of a float32: its bfloat16, where the lower half is zero.
            rows.extend(x.map(|v| (v.to_bits() >> 16) as u16));
            normed.extend(y);
            logits.extend(self.embedding.iter().map(|row| dot(&y, row)));
        }
        trace.step(step, tokens, positions)?;
        trace.op(step, "token_embd", &[n, EMBD], Values::Bf16(&rows))?;
        trace.op(step, "output_norm", &[n, EMBD], Values::F32(&normed))?;
        trace.op(step, "output", &[n, VOCAB], Values::F64(&logits))
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(&a, &b)| f64::from(a) * f64::from(b))
        .sum()
}

/// What statistics must leave out or survive: NaN, infinities, squares that overflow, none at all.
fn extremes(trace: &mut Trace, step: u32) -> std::io::Result<()> {
    let f16 = [0x3c00, 0xc100, 0x7c00, 0x7e00, 0x0001, 0x7bff];
    let bf16 = [0x3f80, 0xc020, 0x7f80, 0x7fc0, 0x0001, 0x7f7f];
    let f32 = [1.0, -2.5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.1];
    let f64 = [1e300, -1e300, f64::NAN, f64::INFINITY, 0.1, 1.7e308];
    trace.record = Record::Both;
    trace.op(step, "extremes.f16", &[2, 3], Values::F16(&f16))?;
    trace.op(step, "extremes.bf16", &[2, 3], Values::Bf16(&bf16))?;
    trace.op(step, "extremes.f32", &[2, 3], Values::F32(&f32))?;
    trace.op(step, "extremes.f64", &[2, 3], Values::F64(&f64))?;
    trace.record = Record::Statistics;
    trace.op(step, "extremes.nan", &[2], Values::F32(&[f32::NAN; 2]))?;
    trace.op(step, "extremes.empty", &[0, 3], Values::F32(&[]))
}

/// Of three tokens the first and the last; and values that lie in columns, two apart.
fn layouts(trace: &mut Trace, step: u32) -> std::io::Result<()> {
    let x = [1.0, -2.0, 3.0, f32::NAN, f32::NAN, 0.5, 0.25, -0.125];
    trace.record = Record::Both;
    trace.rows = Some(vec![0, 2]);
    trace.op(step, "layouts.rows", &[2, 3], Values::F32(&x[..6]))?;
    trace.strides = Some(vec![1, 5]);
    trace.op(step, "layouts.strides", &[3, 2], Values::F32(&x))
}

/// A batch: a token of each of two sequences, one value of both and one of the second alone.
fn batch(trace: &mut Trace, step: u32) -> std::io::Result<()> {
    trace.record = Record::Data;
    trace.sequences = Some(vec![0, 1]);
    trace.step(step, &[3, 1], &[4, 0])?;
    trace.op(step, "batch.rows", &[2, 1], Values::F32(&[1.0, -2.0]))?;
    trace.sequence = Some(1);
    trace.op(step, "batch.scores", &[1, 1, 1], Values::F32(&[1.0]))
}

fn run(path: &str, engine: &str) -> std::io::Result<()> {
    let model = Model::new();
    let more = More {
        weights: Some("F32"),
        context: Some(64),
        rounding: Some("bf16"),
        rollback: true, // no step goes back here
    };
    let mut trace = Trace::create_with(path, engine, Some("llama"), None, &more)?;
    trace.weight(
        "output_norm.weight",
        &[EMBD],
        Values::F32(&model.norm_weight),
    )?;
    model.forward(&mut trace, 0, &[3, 1, 4], &[0, 1, 2])?;
    layouts(&mut trace, 0)?;
    trace.record = Record::Statistics;
    model.forward(&mut trace, 1, &[1], &[3])?;
    extremes(&mut trace, 1)?;
    batch(&mut trace, 2)?;
    trace.close()
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let Some(path) = arguments.get(1) else {
        eprintln!("usage: {} OUT.trace [ENGINE]", arguments[0]);
        std::process::exit(2)
    };
    if let Err(error) = run(path, arguments.get(2).map_or("example", |engine| engine)) {
        eprintln!("{error}");
        std::process::exit(1)
    }
}
