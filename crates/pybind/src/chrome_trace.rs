//! Reads the memory events of a Chrome trace as torch's profiler writes it, while the rest streams by.
//!
//! Such a trace is one JSON document of up to many gigabytes, nearly all of it kernels and operators. It is parsed from a
//! reader, event by event; an event of no interest leaves nothing behind.

use std::fmt;
use std::io::{self, BufReader, Read};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Memory events of one trace, at most: each takes some 50 bytes here, and four times as many in Python.
const MAX_EVENTS: usize = 10_000_000;

/// Bytes of one text, at most: the parser holds a name as a whole before it is known to be of no interest.
const MAX_STRING_BYTES: usize = 16 << 20;

/// The name of an allocation's or a free's event.
const MEMORY: &str = "[memory]";
/// The name of a failed allocation's event.
const OUT_OF_MEMORY: &str = "[OutOfMemory]";

/// One event of a GPU's memory: microseconds, device, address, bytes (a free's are negative, and None means that as many
/// were refused as the next number says), bytes reserved after it.
type Event = (u64, u64, u64, Option<i64>, u64, u64);

/// Reads the memory events of GPUs. `read` returns the next bytes of the document, and none at its end.
///
/// Raises `ValueError` for what is no JSON, and what `read` raises.
#[pyfunction]
pub(crate) fn read_chrome_trace(read: Bound<'_, PyAny>) -> PyResult<Vec<Event>> {
    let mut source = Source { read, pending: Vec::new(), at: 0, text: Text::default(), error: None };
    let mut events = Vec::new();
    let mut json = serde_json::Deserializer::from_reader(BufReader::with_capacity(1 << 16, &mut source));
    let result = Document { events: &mut events }.deserialize(&mut json).and_then(|()| json.end());
    drop(json);
    if let Some(error) = source.error {
        return Err(error);
    }
    result.map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(events)
}

/// Python's bytes, as a reader.
struct Source<'py> {
    read: Bound<'py, PyAny>,
    pending: Vec<u8>,
    at: usize,
    text: Text,
    error: Option<PyErr>,
}

/// Follows how long the text is that the document is in the middle of.
#[derive(Default)]
struct Text {
    is_open: bool,
    is_escaped: bool,
    length: usize,
}

impl Text {
    /// Looks at the next bytes. Returns false once a text is too long.
    fn follow(&mut self, bytes: &[u8]) -> bool {
        for byte in bytes {
            if self.is_escaped {
                self.is_escaped = false;
            } else if *byte == b'"' {
                self.is_open = !self.is_open;
                self.length = 0;
            } else if self.is_open {
                self.is_escaped = *byte == b'\\';
            }
            self.length += usize::from(self.is_open);
            if self.length > MAX_STRING_BYTES {
                return false;
            }
        }
        true
    }
}

impl Read for Source<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.pending.len() {
            let chunk = self.read.call0().and_then(|chunk| Ok(chunk.cast_into::<PyBytes>()?.as_bytes().to_vec()));
            match chunk {
                Ok(chunk) if self.text.follow(&chunk) => (self.pending, self.at) = (chunk, 0),
                Ok(_) => return Err(io::Error::other(format!("a text of more than {MAX_STRING_BYTES} bytes"))),
                Err(error) => {
                    self.error = Some(error);
                    return Err(io::Error::other("the source failed"));
                }
            }
        }
        let count = buffer.len().min(self.pending.len() - self.at);
        buffer[..count].copy_from_slice(&self.pending[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

/// The whole document: a list of events, or an object with one under `traceEvents`.
struct Document<'a> {
    events: &'a mut Vec<Event>,
}

impl<'de> DeserializeSeed<'de> for Document<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Document<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a Chrome trace")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut is_trace = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "traceEvents" {
                is_trace = true;
                map.next_value_seed(EventList { events: self.events })?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if is_trace { Ok(()) } else { Err(A::Error::custom("no traceEvents in it")) }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<(), A::Error> {
        EventList { events: self.events }.visit_seq(seq)
    }
}

struct EventList<'a> {
    events: &'a mut Vec<Event>,
}

impl<'de> DeserializeSeed<'de> for EventList<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for EventList<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(event) = seq.next_element::<TraceEvent>()? {
            if let Some(event) = event.of_gpu_memory().map_err(A::Error::custom)? {
                if self.events.len() == MAX_EVENTS {
                    return Err(A::Error::custom(format_args!("more than {MAX_EVENTS} memory events")));
                }
                self.events.push(event);
            }
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct TraceEvent {
    #[serde(default)]
    name: Scalar,
    #[serde(default)]
    ts: Scalar,
    #[serde(default)]
    args: Args,
}

/// What a memory event says besides; nothing for events whose `args` are something else.
#[derive(Default)]
struct Args {
    bytes: Scalar,
    address: Scalar,
    device: Scalar,
    device_type: Scalar,
    reserved: Scalar,
}

impl<'de> Deserialize<'de> for Args {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ArgsVisitor;
        impl<'de> Visitor<'de> for ArgsVisitor {
            type Value = Args;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an event's arguments")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Args, A::Error> {
                let mut args = Args::default();
                while let Some(key) = map.next_key::<String>()? {
                    let place = match key.as_str() {
                        "Bytes" => &mut args.bytes,
                        "Addr" => &mut args.address,
                        "Device Id" => &mut args.device,
                        "Device Type" => &mut args.device_type,
                        "Total Reserved" => &mut args.reserved,
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                            continue;
                        }
                    };
                    *place = map.next_value()?;
                }
                Ok(args)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Args, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Args::default())
            }

            fn visit_str<E: Error>(self, _: &str) -> Result<Args, E> {
                Ok(Args::default())
            }

            fn visit_unit<E: Error>(self) -> Result<Args, E> {
                Ok(Args::default())
            }
        }
        deserializer.deserialize_any(ArgsVisitor)
    }
}

impl TraceEvent {
    /// The event if it is one of a GPU's memory, or what is wrong with it.
    fn of_gpu_memory(self) -> Result<Option<Event>, String> {
        let Scalar::Text(name) = &self.name else { return Ok(None) };
        let is_failure = match name.as_str() {
            MEMORY => false,
            OUT_OF_MEMORY => true,
            _ => return Ok(None),
        };
        // Device type 0 is the CPU, whose memory is no GPU allocator's; older traces name no type, and -1 for its id.
        if matches!(self.args.device_type, Scalar::Number(0)) || matches!(self.args.device, Scalar::Number(..0)) {
            return Ok(None);
        }
        let number = |scalar: &Scalar, what: &str| match scalar {
            Scalar::Number(number) => Ok(*number),
            _ => Err(format!("a {name} event without a whole number as {what}")),
        };
        let unsigned = |scalar: &Scalar, what: &str| {
            u64::try_from(number(scalar, what)?).map_err(|_| format!("a {name} event whose {what} is out of range"))
        };
        let bytes = i64::try_from(number(&self.args.bytes, "Bytes")?)
            .map_err(|_| format!("a {name} event whose Bytes are out of range"))?;
        let device =
            if matches!(self.args.device, Scalar::None) { 0 } else { unsigned(&self.args.device, "Device Id")? };
        let address = if is_failure { 0 } else { unsigned(&self.args.address, "Addr")? };
        let reserved = match &self.args.reserved {
            Scalar::Number(number) => u64::try_from(*number).unwrap_or(0),
            _ => 0,
        };
        let time_us = match self.ts {
            Scalar::Number(number) => u64::try_from(number).ok(),
            Scalar::Fraction(number) if (0.0..1e18).contains(&number) => Some(number as u64),
            _ => None,
        };
        let time_us = time_us.ok_or_else(|| format!("a {name} event without a time"))?;
        let change = (!is_failure).then_some(bytes);
        Ok(Some((time_us, device, address, change, bytes.unsigned_abs(), reserved)))
    }
}

/// A value of which only numbers and text count.
#[derive(Debug, Default)]
enum Scalar {
    #[default]
    None,
    Number(i128),
    Fraction(f64),
    Text(String),
    Other,
}

/// The longest text that is kept: the names that matter are short.
const MAX_TEXT_BYTES: usize = 32;

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ScalarVisitor;
        impl<'de> Visitor<'de> for ScalarVisitor {
            type Value = Scalar;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a value")
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Scalar, E> {
                Ok(Scalar::Number(number.into()))
            }

            fn visit_u64<E: Error>(self, number: u64) -> Result<Scalar, E> {
                Ok(Scalar::Number(number.into()))
            }

            fn visit_f64<E: Error>(self, number: f64) -> Result<Scalar, E> {
                Ok(Scalar::Fraction(number))
            }

            fn visit_bool<E: Error>(self, _: bool) -> Result<Scalar, E> {
                Ok(Scalar::Other)
            }

            fn visit_unit<E: Error>(self) -> Result<Scalar, E> {
                Ok(Scalar::None)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Scalar, E> {
                Ok(if text.len() > MAX_TEXT_BYTES { Scalar::Other } else { Scalar::Text(text.to_owned()) })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Scalar, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Scalar::Other)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Scalar, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Scalar::Other)
            }
        }
        deserializer.deserialize_any(ScalarVisitor)
    }
}
