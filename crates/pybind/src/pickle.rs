//! Looks through a pickle without building anything, so that a hostile one is refused before Python loads it.
//!
//! Python's own unpickler can be told to refuse every global, but not to bound its memory: an index into its memo, or the
//! length of a string, makes it allocate whatever the file claims. [`Scanner`] walks the opcodes of a stream as its bytes
//! arrive. It knows only those that a memory snapshot is made of (dictionaries, lists, tuples, text, numbers, constants),
//! checks every length and index, and finds the end. What passes can be loaded in memory proportional to its length.
//!
//! It also follows which objects a dictionary gets as keys, for those are hashed and compared as they are loaded: a deep
//! tuple overflows the C stack, one that holds itself twice at every level never ends, and numbers can be chosen to
//! collide. A snapshot's keys are short texts.
//!
//! It never looks at what the objects mean; that is the reader's part (`python/rallocator/_replay`).
//!
//! Opcodes: <https://github.com/python/cpython/blob/v3.14.0/Lib/pickletools.py>.

use std::fmt;

/// Bytes of one text, at most. Real ones are file names, and the user's metadata as JSON.
const MAX_TEXT_BYTES: u64 = 16 << 20;
/// Bytes of one number, at most. Addresses and sizes need nine; a number of any length is valid in a pickle.
const MAX_INTEGER_BYTES: u64 = 16;
/// Characters of one number or index that is written as text (protocol 0), at most.
const MAX_NUMBER_CHARACTERS: usize = 32;
/// Bytes of a text that may be a key, at most. Real ones have twenty; two long ones that are equal, each looked up where
/// the other stands, would be compared from end to end every time.
const MAX_KEY_BYTES: u64 = 1024;
/// Objects of one pickle, at most: each takes about 60 bytes once loaded, so that this is about 4 GB. A history of ten
/// million events has 50 million.
const MAX_OBJECTS: u64 = 64_000_000;

/// Why a pickle was refused.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// An opcode that no snapshot holds: a global, a call, a persistent id, raw bytes.
    Opcode { opcode: u8, position: u64 },
    /// A length or index beyond what the file can mean.
    Length { position: u64 },
    /// An object is used that is not there: not on the stack since the last mark, or not in the memo.
    Missing { position: u64 },
    /// A dictionary's key is not a text of at most [`MAX_KEY_BYTES`].
    Key { position: u64 },
    /// More objects than [`MAX_OBJECTS`].
    Objects,
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Opcode { opcode, position } => write!(
                formatter,
                "pickle opcode {opcode:#04x} at byte {position} is not one that a memory snapshot holds"
            ),
            Refusal::Length { position } => write!(formatter, "impossible length at byte {position}"),
            Refusal::Missing { position } => write!(formatter, "byte {position} uses an object that is not there"),
            Refusal::Key { position } => write!(
                formatter,
                "a dictionary's key at byte {position} is not a text of at most {MAX_KEY_BYTES} bytes, as in a memory snapshot"
            ),
            Refusal::Objects => write!(formatter, "more than {MAX_OBJECTS} objects"),
        }
    }
}

/// What follows an opcode.
enum Argument {
    None,
    /// This many bytes that the scanner need not understand.
    Fixed(usize),
    /// A text whose length is a little-endian integer of this many bytes.
    Text(usize),
    /// An integer whose length is one byte.
    Integer,
    /// A number up to the end of the line.
    NumberLine,
    /// A text up to the end of the line.
    TextLine,
}

/// What lies on the stack or in the memo, as far as it matters.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// What MARK left, below the items of a container.
    Mark,
    /// A text that may be a key.
    Key,
    /// Any other object.
    Other,
    /// In the memo only: nothing was written there.
    Nothing,
}

/// What follows `opcode` and whether it makes an object; `None` if no snapshot holds it.
fn shape(opcode: u8) -> Option<(Argument, bool)> {
    Some(match opcode {
        // POP, POP_MARK, APPEND, APPENDS, SETITEM, SETITEMS, MEMOIZE.
        b'0' | b'1' | b'a' | b'e' | b's' | b'u' | 0x94 => (Argument::None, false),
        // MARK and DUP, which grow the stack; constants, lists, dictionaries and tuples.
        b'(' | b'2' | b'N' | 0x88 | 0x89 | b']' | b'l' | b'}' | b'd' | b')' | b't' | 0x85..=0x87 => {
            (Argument::None, true)
        }
        // PROTO, BINGET and BINPUT, LONG_BINGET and LONG_BINPUT; FRAME, whose length only groups reads.
        0x80 | b'h' | b'q' => (Argument::Fixed(1), false),
        b'j' | b'r' => (Argument::Fixed(4), false),
        0x95 => (Argument::Fixed(8), false),
        // BININT1, BININT2, BININT, BINFLOAT, LONG1.
        b'K' => (Argument::Fixed(1), true),
        b'M' => (Argument::Fixed(2), true),
        b'J' => (Argument::Fixed(4), true),
        b'G' => (Argument::Fixed(8), true),
        0x8a => (Argument::Integer, true),
        // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8.
        0x8c => (Argument::Text(1), true),
        b'X' => (Argument::Text(4), true),
        0x8d => (Argument::Text(8), true),
        // Protocol 0: INT, LONG, FLOAT, UNICODE, GET, PUT.
        b'I' | b'L' | b'F' => (Argument::NumberLine, true),
        b'V' => (Argument::TextLine, true),
        b'g' | b'p' => (Argument::NumberLine, false),
        _ => return None,
    })
}

/// The opcode that ends a pickle.
const STOP: u8 = b'.';

/// Walks one pickle, given in chunks of any size.
#[derive(Default)]
pub(crate) struct Scanner {
    /// The beginning of an opcode whose argument has not arrived in full.
    rest: Vec<u8>,
    /// Bytes of a text that have yet to arrive; nothing else is looked at before.
    skip: u64,
    /// Bytes consumed, `rest` not among them.
    position: u64,
    /// Objects made, and writes to the memo: a pickle written by Python never skips a place in it.
    objects: u64,
    /// What Python's unpickler will have on its stack here.
    stack: Vec<Kind>,
    /// What it will have in its memo, by place.
    memo: Vec<Kind>,
    /// How many of those places MEMOIZE takes to be written.
    memoised: usize,
    /// Where the pickle ends, once STOP was seen.
    end: Option<u64>,
}

impl Scanner {
    /// Looks at the next bytes. Returns the pickle's length once its end was seen; what follows it is not looked at.
    pub(crate) fn feed(&mut self, chunk: &[u8]) -> Result<Option<u64>, Refusal> {
        if self.end.is_some() {
            return Ok(self.end);
        }
        let mut joined;
        let bytes = if self.rest.is_empty() {
            chunk
        } else {
            joined = std::mem::take(&mut self.rest);
            joined.extend_from_slice(chunk);
            joined.as_slice()
        };
        let mut at = 0;
        while at < bytes.len() {
            if self.skip > 0 {
                let skipped = self.skip.min((bytes.len() - at) as u64);
                self.skip -= skipped;
                self.position += skipped;
                at += skipped as usize;
            } else if bytes[at] == STOP {
                self.end = Some(self.position + 1);
                return Ok(self.end);
            } else if let Some(length) = self.opcode(&bytes[at..])? {
                self.position += length as u64;
                at += length;
            } else {
                self.rest = bytes[at..].to_vec();
                break;
            }
        }
        Ok(None)
    }

    /// The length of the opcode at the front with its argument, without a text that follows; `None` if it is not all there.
    fn opcode(&mut self, bytes: &[u8]) -> Result<Option<usize>, Refusal> {
        let opcode = bytes[0];
        let argument_bytes = &bytes[1..];
        let too_long = Refusal::Length { position: self.position };
        let (argument, makes_object) = shape(opcode).ok_or(Refusal::Opcode { opcode, position: self.position })?;
        let argument_length = match argument {
            Argument::None => Some(0),
            Argument::Fixed(length) => (argument_bytes.len() >= length).then_some(length),
            Argument::Text(width) => match little_endian(argument_bytes, width) {
                Some(length) if length > MAX_TEXT_BYTES => return Err(too_long),
                Some(length) => {
                    self.skip = length;
                    Some(width)
                }
                None => None,
            },
            Argument::Integer => match little_endian(argument_bytes, 1) {
                Some(length) if length > MAX_INTEGER_BYTES => return Err(too_long),
                Some(length) => {
                    self.skip = length;
                    Some(1)
                }
                None => None,
            },
            Argument::NumberLine => line(argument_bytes, MAX_NUMBER_CHARACTERS).ok_or(too_long)?,
            Argument::TextLine => line(argument_bytes, MAX_TEXT_BYTES as usize).ok_or(too_long)?,
        };
        let Some(argument_length) = argument_length else { return Ok(None) };
        if makes_object {
            self.objects += 1;
            if self.objects > MAX_OBJECTS {
                return Err(Refusal::Objects);
            }
        }
        self.apply(opcode, &argument_bytes[..argument_length])?;
        Ok(Some(argument_length + 1))
    }

    /// Does to the kinds on the stack and in the memo what `opcode` does to the objects.
    fn apply(&mut self, opcode: u8, argument: &[u8]) -> Result<(), Refusal> {
        match opcode {
            b'(' => self.stack.push(Kind::Mark),
            // A mark may be popped like an object.
            b'0' => self.stack.pop().map(drop).ok_or(self.missing())?,
            b'1' => self.pop_to_mark().map(drop)?,
            b'2' => self.stack.push(self.top(1)?[0]),
            // An APPEND needs its list below what it takes, and a SETITEM its dictionary.
            b'a' => self.pop(2, 1)?,
            b'e' => {
                self.pop_to_mark()?;
                self.top(1)?;
            }
            b's' => {
                self.check_keys(&self.top(3)?[1..2])?;
                self.pop(3, 2)?;
            }
            b'u' => {
                let items = self.pop_to_mark()?;
                self.check_keys(&items)?;
                self.top(1)?;
            }
            b'd' => {
                let items = self.pop_to_mark()?;
                self.check_keys(&items)?;
                self.stack.push(Kind::Other);
            }
            b'l' | b't' => {
                self.pop_to_mark()?;
                self.stack.push(Kind::Other);
            }
            0x85..=0x87 => {
                let length = usize::from(opcode - 0x84);
                self.pop(length, length)?;
                self.stack.push(Kind::Other);
            }
            0x8c | b'X' | 0x8d => self.stack.push(text(little_endian(argument, argument.len()))),
            b'V' => self.stack.push(text(Some(argument.len() as u64 - 1))),
            b'h' | b'j' | b'g' => {
                let index = number(opcode, argument).and_then(|index| usize::try_from(index).ok());
                match index.and_then(|index| self.memo.get(index)) {
                    None | Some(Kind::Nothing) => return Err(self.missing()),
                    Some(kind) => self.stack.push(*kind),
                }
            }
            b'q' | b'r' | b'p' => match number(opcode, argument) {
                Some(index) if self.may_memoise(index) => self.memoise(index as usize)?,
                _ => return Err(Refusal::Length { position: self.position }),
            },
            0x94 => self.memoise(self.memoised)?,
            // PROTO and FRAME.
            0x80 | 0x95 => {}
            _ => self.stack.push(Kind::Other),
        }
        Ok(())
    }

    fn missing(&self) -> Refusal {
        Refusal::Missing { position: self.position }
    }

    /// The `count` objects on top of the stack; none of them below the last mark.
    fn top(&self, count: usize) -> Result<&[Kind], Refusal> {
        let top = self.stack.len().checked_sub(count).map(|begin| &self.stack[begin..]);
        top.filter(|top| !top.contains(&Kind::Mark)).ok_or(self.missing())
    }

    /// Takes `count` of the `needed` objects that must be on top of the stack.
    fn pop(&mut self, needed: usize, count: usize) -> Result<(), Refusal> {
        self.top(needed)?;
        self.stack.truncate(self.stack.len() - count);
        Ok(())
    }

    /// Takes all down to the last mark, and the mark; returns what was above it.
    fn pop_to_mark(&mut self) -> Result<Vec<Kind>, Refusal> {
        let mark = self.stack.iter().rposition(|kind| *kind == Kind::Mark).ok_or(self.missing())?;
        let items = self.stack.split_off(mark + 1);
        self.stack.pop();
        Ok(items)
    }

    /// Checks every other one of what a dictionary gets: key, value, key, value.
    fn check_keys(&self, items: &[Kind]) -> Result<(), Refusal> {
        let fits = items.iter().step_by(2).all(|kind| *kind == Kind::Key);
        if fits { Ok(()) } else { Err(Refusal::Key { position: self.position }) }
    }

    /// Writes what is on top of the stack into a place of the memo.
    fn memoise(&mut self, index: usize) -> Result<(), Refusal> {
        let kind = self.top(1)?[0];
        if self.memo.len() <= index {
            self.memo.resize(index + 1, Kind::Nothing);
        }
        self.memoised += usize::from(self.memo[index] == Kind::Nothing);
        self.memo[index] = kind;
        Ok(())
    }

    /// Whether a writer that numbers its objects from 0 (C++'s, Python's) or from 1 (old Python's) could have got to
    /// `index`. The first 256 places are free: they cost nothing.
    fn may_memoise(&self, index: u64) -> bool {
        index < 256 || index <= self.objects
    }
}

/// What a text of so many bytes is.
fn text(length: Option<u64>) -> Kind {
    if length.is_some_and(|length| length <= MAX_KEY_BYTES) { Kind::Key } else { Kind::Other }
}

/// The place in the memo that an opcode names: GET and PUT of protocol 0 as a line of text, the others in binary.
fn number(opcode: u8, argument: &[u8]) -> Option<u64> {
    match opcode {
        b'g' | b'p' => std::str::from_utf8(argument.strip_suffix(b"\n")?).ok()?.parse().ok(),
        _ => little_endian(argument, argument.len()),
    }
}

/// The first `width` bytes as an integer; `None` if there are fewer.
fn little_endian(bytes: &[u8], width: usize) -> Option<u64> {
    let mut value = [0; 8];
    value[..width].copy_from_slice(bytes.get(..width)?);
    Some(u64::from_le_bytes(value))
}

/// The length of the line at the front with its newline: `None` if it is too long, `Some(None)` if it has not ended yet.
#[expect(clippy::option_option, reason = "too long and not yet ended are two answers, and both differ from a length")]
fn line(bytes: &[u8], max_characters: usize) -> Option<Option<usize>> {
    let seen = &bytes[..bytes.len().min(max_characters + 1)];
    match seen.iter().position(|byte| *byte == b'\n') {
        Some(end) => Some(Some(end + 1)),
        None if seen.len() > max_characters => None,
        None => Some(None),
    }
}
