//! The tokens of a header: strings, plain integers, shapes and punctuation.

use super::MAX_RANK;
use crate::error::{Error, Kind, Printable, Result};
use std::borrow::Cow;
use std::ops::Range;

/// Numbers in a header are below this limit, so that every implementation can represent them.
pub const NUMBER_END: u64 = 1 << 63;
/// Longest escape of one byte of text: `\u0061`.
const ESCAPE_BYTES: usize = 6;

/// A range of the header's text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Text {
    pub(super) at: u32,
    pub(super) n_bytes: u32,
}

impl Text {
    pub(super) fn range(self) -> Range<usize> {
        self.at as usize..self.at as usize + self.n_bytes as usize
    }
}

/// A shape on the stack.
pub(super) struct Shape {
    extents: [u64; MAX_RANK],
    rank: usize,
}

impl std::ops::Deref for Shape {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        &self.extents[..self.rank]
    }
}

/// Reads the tokens of UTF-8 text one after the other, without copies.
pub(super) struct Scanner<'t> {
    pub(super) text: &'t [u8],
    pub(super) at: usize,
}

impl<'t> Scanner<'t> {
    /// The next byte that is not white space; `None` at the end.
    fn peek(&mut self) -> Option<u8> {
        while let Some(&byte) = self.text.get(self.at) {
            if !matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
                return Some(byte);
            }
            self.at += 1;
        }
        None
    }

    /// Position of the next token.
    pub(super) fn position(&mut self) -> usize {
        self.peek();
        self.at
    }

    /// Consumes a byte that must be the next token.
    pub(super) fn open(&mut self, byte: u8) -> Result<()> {
        if self.peek() != Some(byte) {
            return Err(self.expected(&format!("`{}`", byte as char)));
        }
        self.at += 1;
        Ok(())
    }

    /// Whether another member follows. Consumes the comma before it, or the closing byte.
    pub(super) fn more(&mut self, close: u8, is_first: &mut bool) -> Result<bool> {
        let is_first = std::mem::replace(is_first, false);
        match self.peek() {
            Some(byte) if byte == close => {
                self.at += 1;
                Ok(false)
            }
            _ if is_first => Ok(true),
            Some(b',') => {
                self.at += 1;
                Ok(true)
            }
            _ => Err(self.expected(&format!("`,` or `{}`", close as char))),
        }
    }

    /// A string, still escaped.
    pub(super) fn string(&mut self) -> Result<Text> {
        if self.peek() != Some(b'"') {
            return Err(self.expected("a string"));
        }
        let at = self.at + 1;
        let mut end = at;
        loop {
            match self.text.get(end) {
                Some(b'"') => break,
                Some(b'\\') => end += 2,
                Some(0..0x20) => {
                    self.at = end;
                    return Err(self.expected("a string without control characters"));
                }
                Some(_) => end += 1,
                None => {
                    return Err(Error::damaged(format!(
                        "the string at byte {} of the header has no end",
                        self.at
                    )));
                }
            }
        }
        self.at = end + 1;
        Ok(Text {
            at: at as u32,
            n_bytes: (end - at) as u32,
        })
    }

    /// A plain integer below 2^63.
    pub(super) fn number(&mut self) -> Result<u64> {
        self.peek();
        let rest = &self.text[self.at..];
        let n_digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let is_plain = !matches!(rest, [b'0', b'0'..=b'9', ..])
            && !matches!(rest.get(n_digits), Some(b'.' | b'e' | b'E'));
        let number = std::str::from_utf8(&rest[..n_digits])
            .ok()
            .and_then(|digits| digits.parse().ok());
        match number {
            Some(number) if is_plain && number < NUMBER_END => {
                self.at += n_digits;
                Ok(number)
            }
            _ => Err(self.expected("a plain integer from 0 to 2^63 - 1")),
        }
    }

    pub(super) fn shape(&mut self) -> Result<Shape> {
        let mut shape = Shape {
            extents: [0; MAX_RANK],
            rank: 0,
        };
        let mut is_first = true;
        self.open(b'[')?;
        while self.more(b']', &mut is_first)? {
            let Some(extent) = shape.extents.get_mut(shape.rank) else {
                return Err(Error::damaged(format!(
                    "the shape has more than {MAX_RANK} dims"
                )));
            };
            *extent = self.number()?;
            shape.rank += 1;
        }
        Ok(shape)
    }

    /// Checks that only spaces follow the object of the header.
    pub(super) fn end(&self) -> Result<()> {
        let rest = &self.text[self.at..];
        let Some(n_spaces) = rest.iter().position(|&byte| byte != b' ') else {
            return Ok(());
        };
        Err(Scanner {
            text: self.text,
            at: self.at + n_spaces,
        }
        .expected("only spaces after the header's object"))
    }

    /// Decodes a string. A string longer than `max_bytes` is rejected before it is copied; `what` names it in the
    /// message.
    pub(super) fn decoded(&self, text: Text, max_bytes: usize, what: &str) -> Result<Cow<'t, str>> {
        let escaped = &self.text[text.range()];
        let too_long = || {
            let shown = Printable(str_of(escaped));
            let message = format!("{what} has more than {max_bytes} bytes: {shown}");
            Error::new(Kind::Unsupported, message)
        };
        if escaped.len() > max_bytes * ESCAPE_BYTES {
            return Err(too_long());
        }
        let decoded = if self.is_escaped(text) {
            let mut bytes = escaped.to_vec();
            let n_bytes = unescape(&mut bytes)?;
            Cow::Owned(str_of(&bytes[..n_bytes]).to_owned())
        } else {
            Cow::Borrowed(str_of(escaped))
        };
        if decoded.len() > max_bytes {
            return Err(too_long());
        }
        Ok(decoded)
    }

    pub(super) fn is_escaped(&self, text: Text) -> bool {
        self.text[text.range()].contains(&b'\\')
    }

    fn expected(&self, expected: &str) -> Error {
        let rest = String::from_utf8_lossy(
            &self.text[self.at.min(self.text.len())..self.text.len().min(self.at + 24)],
        );
        let found = rest
            .chars()
            .next()
            .map_or("its end".to_owned(), |_| format!("`{}`", Printable(&rest)));
        Error::damaged(format!(
            "expected {expected} at byte {} of the header, found {found}",
            self.at
        ))
    }
}

fn str_of(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("the text is UTF-8, and strings end at ASCII quotes")
}

/// Decodes the escapes of a JSON string in place. Returns the number of decoded bytes.
pub(super) fn unescape(text: &mut [u8]) -> Result<usize> {
    let (mut from, mut to) = (0, 0);
    while from < text.len() {
        if text[from] != b'\\' {
            text[to] = text[from];
            (from, to) = (from + 1, to + 1);
            continue;
        }
        let rest = &text[from..];
        let hex4 = |at: usize| -> Option<u32> {
            let digits = rest.get(at..at + 4)?;
            digits.iter().try_fold(0, |code, &digit| {
                Some(code * 16 + char::from(digit).to_digit(16)?)
            })
        };
        let decoded = match rest.get(1) {
            Some(&byte @ (b'"' | b'\\' | b'/')) => Some((char::from(byte), 2)),
            Some(b'b') => Some(('\u{8}', 2)),
            Some(b'f') => Some(('\u{c}', 2)),
            Some(b'n') => Some(('\n', 2)),
            Some(b'r') => Some(('\r', 2)),
            Some(b't') => Some(('\t', 2)),
            Some(b'u') => match (hex4(2), rest.get(6..8), hex4(8)) {
                // A surrogate pair.
                (Some(high @ 0xd800..0xdc00), Some(b"\\u"), Some(low @ 0xdc00..0xe000)) => {
                    char::from_u32(0x1_0000 + ((high - 0xd800) << 10) + (low - 0xdc00))
                        .map(|c| (c, 12))
                }
                (Some(code), ..) => char::from_u32(code).map(|c| (c, 6)),
                _ => None,
            },
            _ => None,
        };
        let Some((character, n_bytes)) = decoded else {
            let shown = String::from_utf8_lossy(&rest[..rest.len().min(12)]).into_owned();
            return Err(Error::damaged(format!(
                "a string has the invalid escape `{}`",
                Printable(&shown)
            )));
        };
        from += n_bytes;
        to += character.encode_utf8(&mut text[to..]).len();
    }
    Ok(to)
}
