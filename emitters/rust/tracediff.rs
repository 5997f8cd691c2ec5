//! Writes a tracediff trace (version 1). One module, std only: copy it beside your sources and `mod tracediff;`.
//!
//! ```ignore
//! let mut trace = Trace::create("mine.trace", "my-engine 0.3", Some("llama"), Some("model.gguf"))?;
//! trace.step(0, &tokens, &positions)?;
//! trace.op(0, "blk.0.attn_norm", &[tokens.len(), n_embd], Values::F32(&x))?;
//! trace.close()?;
//! ```

#![allow(dead_code)] // an engine calls what it needs

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Error, ErrorKind, Result, Write};
use std::path::Path;

/// Values in host memory, in C order; half precision as its bits.
#[derive(Clone, Copy)]
pub enum Values<'a> {
    F64(&'a [f64]),
    F32(&'a [f32]),
    F16(&'a [u16]),
    Bf16(&'a [u16]),
}

/// What a record holds of a value.
#[derive(Clone, Copy, PartialEq)]
pub enum Record {
    Data,
    Statistics,
    Both,
}

/// What else the first line may say.
#[derive(Default)]
pub struct More<'a> {
    /// As in `create_as`.
    pub weights: Option<&'a str>,
    /// For how many positions the engine was set up, where that is more than it is fed.
    pub context: Option<u64>,
    /// The coarsest type that values are rounded to inside ops: "f16", "bf16", "q8_0".
    pub rounding: Option<&'a str>,
    /// Whether a step at an earlier position drops what was fed from there on: rejected drafts.
    pub rollback: bool,
}

/// A trace being written. After an error every call fails, and the trace reads as cut off at that place.
pub struct Trace {
    /// Data at first; set it at any time.
    pub record: Record,
    /// Of the next op alone: indices of the step's tokens that it holds, where it does not hold all.
    pub rows: Option<Vec<usize>>,
    /// Of a batch, for the next step alone: whose each of its tokens is.
    pub sequences: Option<Vec<u32>>,
    /// Of a batch, for the next op alone: the sequence that it is of, as if the step had that one's tokens alone. Scores
    /// and probabilities are written so.
    pub sequence: Option<u32>,
    /// Of the next record alone, where its values are transposed or padded: for each axis how many elements further
    /// its next value is.
    pub strides: Option<Vec<usize>>,
    text: BufWriter<File>,
    data: BufWriter<File>,
    lines: u64,
    offset: u64,
    step: Option<u32>,
    failed: bool,
}

impl Trace {
    /// Opens NAME.trace and, beside it, NAME.bin.
    pub fn create(
        path: impl AsRef<Path>,
        engine: &str,
        arch: Option<&str>,
        model: Option<&str>,
    ) -> Result<Trace> {
        Trace::create_as(path, engine, arch, model, None)
    }

    /// The same, with the ggml type of the matmul weights, the coarsest of a mix: "Q4_K".
    pub fn create_as(
        path: impl AsRef<Path>,
        engine: &str,
        arch: Option<&str>,
        model: Option<&str>,
        weights: Option<&str>,
    ) -> Result<Trace> {
        let more = More {
            weights,
            ..More::default()
        };
        Trace::create_with(path, engine, arch, model, &more)
    }

    /// The same, with more in the first line.
    pub fn create_with(
        path: impl AsRef<Path>,
        engine: &str,
        arch: Option<&str>,
        model: Option<&str>,
        more: &More,
    ) -> Result<Trace> {
        let path = path.as_ref();
        if path.extension() != Some("trace".as_ref()) {
            return Err(misuse(format!(
                "{}: name it NAME.trace; its data becomes NAME.bin",
                path.display()
            )));
        }
        let data_path = path.with_extension("bin");
        let data_name = data_path.file_name().and_then(|name| name.to_str());
        let data_name =
            data_name.ok_or_else(|| misuse(format!("{}: not a UTF-8 name", path.display())))?;
        let mut trace = Trace {
            record: Record::Data,
            rows: None,
            sequences: None,
            sequence: None,
            strides: None,
            text: open(path)?,
            data: open(&data_path)?,
            lines: 0,
            offset: 0,
            step: None,
            failed: false,
        };
        let mut line = format!(
            r#"{{"type":"trace","version":1,"engine":{}"#,
            quoted(engine)
        );
        for (key, value) in [
            ("arch", arch),
            ("model", model),
            ("data", Some(data_name)),
            ("weights", more.weights),
            ("rounding", more.rounding),
        ] {
            if let Some(value) = value {
                let _ = write!(line, r#","{key}":{}"#, quoted(value));
            }
        }
        if let Some(context) = more.context {
            let _ = write!(line, r#","context":{context}"#);
        }
        if more.rollback {
            line.push_str(r#","rollback":true"#);
        }
        trace.line(line)?;
        Ok(trace)
    }

    /// A weight as the engine holds it in memory, by its name in the GGUF file: "output_norm.weight".
    pub fn weight(&mut self, name: &str, shape: &[usize], values: Values) -> Result<()> {
        self.values(
            format!(r#"{{"type":"weight","weight":{}"#, quoted(name)),
            name,
            shape,
            values,
        )
    }

    /// Begins a forward pass: 0 is the prefill, then one step for each token decoded.
    pub fn step(&mut self, step: u32, tokens: &[u32], positions: &[u32]) -> Result<()> {
        if self.step.is_some_and(|last| step <= last)
            || tokens.is_empty()
            || tokens.len() != positions.len()
        {
            return self.fail(misuse(format!(
                "step {step}: steps ascend, and each token has a position"
            )));
        }
        self.step = Some(step);
        let mut line = format!(
            r#"{{"type":"step","step":{step},"tokens":{tokens:?},"positions":{positions:?}"#
        );
        if let Some(sequences) = self.sequences.take() {
            let _ = write!(line, r#","sequences":{sequences:?}"#);
        }
        self.line(line)
    }

    /// The output of one op of the step, `shape` outermost first.
    pub fn op(&mut self, step: u32, name: &str, shape: &[usize], values: Values) -> Result<()> {
        if self.step != Some(step) {
            return self.fail(misuse(format!(
                "{name} of step {step}, which is not the step begun last"
            )));
        }
        let mut line = format!(r#"{{"type":"op","step":{step},"op":{}"#, quoted(name));
        if let Some(sequence) = self.sequence.take() {
            let _ = write!(line, r#","sequence":{sequence}"#);
        }
        self.values(line, name, shape, values)
    }

    /// Writes the `end` record, without which a trace counts as cut off.
    pub fn close(mut self) -> Result<()> {
        self.line(format!(r#"{{"type":"end","records":{}"#, self.lines))
    }

    fn values(
        &mut self,
        mut line: String,
        name: &str,
        shape: &[usize],
        values: Values,
    ) -> Result<()> {
        let (rows, strides) = (self.rows.take(), self.strides.take());
        let strides = strides.unwrap_or_else(|| contiguous(shape));
        let extent = match shape.iter().product::<usize>() {
            0 => 0,
            _ => {
                1 + shape
                    .iter()
                    .zip(&strides)
                    .map(|(n, s)| (n - 1) * s)
                    .sum::<usize>()
            }
        };
        if extent != values.len() || strides.len() != shape.len() {
            return self.fail(misuse(format!(
                "{name}: {} values for shape {shape:?}",
                values.len()
            )));
        }
        let _ = write!(line, r#","shape":{shape:?}"#);
        if let Some(rows) = rows {
            let _ = write!(line, r#","rows":{rows:?}"#);
        }
        // Of no values there are no statistics: such a record holds data, of no bytes.
        if self.record != Record::Statistics || values.len() == 0 {
            if strides != contiguous(shape) {
                let _ = write!(line, r#","strides":{strides:?}"#);
            }
            let bytes = values.bytes();
            let _ = write!(
                line,
                r#","dtype":"{}","offset":{}"#,
                values.dtype(),
                self.offset
            );
            self.offset += bytes.len() as u64;
            if let Err(error) = self.data.write_all(&bytes) {
                return self.fail(error);
            }
        }
        if self.record != Record::Data {
            line += &statistics(values, shape, &strides);
        }
        self.line(line)
    }

    /// Ends a line. Data goes out before the line that announces it: a crash leaves no promise without its bytes.
    fn line(&mut self, line: String) -> Result<()> {
        if self.failed {
            return Err(Error::other(
                "the trace could not be written further, see the first error",
            ));
        }
        let written = self
            .data
            .flush()
            .and_then(|()| writeln!(self.text, "{line}}}"))
            .and_then(|()| self.text.flush());
        written.or_else(|error| self.fail(error))?;
        self.lines += 1;
        Ok(())
    }

    fn fail(&mut self, error: Error) -> Result<()> {
        self.failed = true;
        Err(error)
    }
}

impl Values<'_> {
    fn len(&self) -> usize {
        match self {
            Values::F64(x) => x.len(),
            Values::F32(x) => x.len(),
            Values::F16(x) | Values::Bf16(x) => x.len(),
        }
    }

    fn dtype(&self) -> &'static str {
        match self {
            Values::F64(_) => "f64",
            Values::F32(_) => "f32",
            Values::F16(_) => "f16",
            Values::Bf16(_) => "bf16",
        }
    }

    fn bytes(&self) -> Vec<u8> {
        match self {
            Values::F64(x) => x.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Values::F32(x) => x.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Values::F16(x) | Values::Bf16(x) => x.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }

    fn get(&self, i: usize) -> f64 {
        match self {
            Values::F64(x) => x[i],
            Values::F32(x) => x[i].into(),
            Values::F16(x) => from_f16(x[i]),
            Values::Bf16(x) => f32::from_bits(u32::from(x[i]) << 16).into(),
        }
    }
}

/// Over the finite values, with counts of the others. Large f64 values are scaled, or their squares would overflow.
fn statistics(values: Values, shape: &[usize], strides: &[usize]) -> String {
    let place = |mut i: usize| {
        let axes = shape.iter().zip(strides).rev();
        axes.fold(0, |at, (n, s)| (at + i % n * s, i /= n).0)
    };
    let all = || (0..shape.iter().product()).map(|i| values.get(place(i)));
    let finite = || all().filter(|x| x.is_finite());
    let (min, max) = finite().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| {
        (a.min(x), b.max(x))
    });
    let mut text = String::new();
    let n = finite().count() as f64;
    if n > 0.0 {
        let largest = min.abs().max(max.abs());
        let scale = if largest < 1e150 { 1.0 } else { 2f64.powi(600) };
        let mean = finite().map(|x| x / scale).sum::<f64>() / n * scale;
        let rms = (finite().map(|x| (x / scale).powi(2)).sum::<f64>() / n).sqrt() * scale;
        let _ = write!(
            text,
            r#","min":{min:e},"max":{max:e},"mean":{mean:e},"rms":{rms:e}"#
        );
    }
    let nan = all().filter(|x| x.is_nan()).count();
    let inf = all().filter(|x| x.is_infinite()).count();
    for (key, count) in [("nan", nan), ("inf", inf)] {
        if count > 0 {
            let _ = write!(text, r#","{key}":{count}"#);
        }
    }
    text
}

/// Strides of values without gaps, in C order.
fn contiguous(shape: &[usize]) -> Vec<usize> {
    (1..=shape.len())
        .map(|axis| shape[axis..].iter().product())
        .collect()
}

fn from_f16(bits: u16) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-24),
        31 if fraction != 0.0 => f64::NAN,
        31 => f64::INFINITY,
        _ => (fraction + 1024.0) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 {
        -magnitude
    } else {
        magnitude
    }
}

/// A JSON string.
fn quoted(string: &str) -> String {
    let mut quoted = String::from("\"");
    for c in string.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c < ' ' => {
                let _ = write!(quoted, "\\u{:04x}", c as u32);
            }
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

fn open(path: &Path) -> Result<BufWriter<File>> {
    let file = File::create(path)
        .map_err(|e| Error::new(e.kind(), format!("cannot open {}: {e}", path.display())))?;
    Ok(BufWriter::new(file))
}

fn misuse(what: String) -> Error {
    Error::new(ErrorKind::InvalidInput, what)
}
