//! The keys of `storage_data`: the text that Python prints for the pair of the name of a tensor and the number of a
//! shard.

use reshard_core::error::{Error, Printable, Result};
use std::borrow::Cow;
use std::fmt::Write;

/// The storage key of a shard: the text that Python prints for `(name, (offset,))`.
///
/// `MindSpore` Transformers searches for its own text, so every character must be the same: Python prefers single
/// quotes and escapes characters that are not printable in Unicode.
///
/// ```
/// use reshard_formats::metadata::storage_key;
///
/// assert_eq!(storage_key("decoder.w", 2), "('decoder.w', (2,))");
/// assert_eq!(storage_key("it's", 0), r#"("it's", (0,))"#);
/// ```
pub fn storage_key(name: &str, offset: u64) -> String {
    let quote = if name.contains('\'') && !name.contains('"') {
        '"'
    } else {
        '\''
    };
    let mut key = String::with_capacity(name.len() + 16);
    key.push('(');
    key.push(quote);
    for c in name.chars() {
        match c {
            '\\' => key.push_str("\\\\"),
            '\n' => key.push_str("\\n"),
            '\r' => key.push_str("\\r"),
            '\t' => key.push_str("\\t"),
            c if c == quote => key.extend(['\\', c]),
            c if is_printable(c) => key.push(c),
            c => {
                let code = u32::from(c);
                let written = match code {
                    0..=0xff => write!(key, "\\x{code:02x}"),
                    0x100..=0xffff => write!(key, "\\u{code:04x}"),
                    _ => write!(key, "\\U{code:08x}"),
                };
                written.expect("writing to a string does not fail");
            }
        }
    }
    write!(key, "{quote}, ({offset},))").expect("writing to a string does not fail");
    key
}

/// Python's `str.isprintable` of one character. Both languages use the general categories of Unicode; they can differ
/// for a character that is newer than the Unicode version of one of them.
fn is_printable(c: char) -> bool {
    // `escape_debug` escapes the same characters, and additionally a combining character at the start of the text.
    let mut buffer = [b'a'; 5];
    let n_bytes = c.encode_utf8(&mut buffer[1..]).len();
    let text = std::str::from_utf8(&buffer[..=n_bytes]).expect("two characters");
    matches!(c, '"' | '\'' | '\\') || text.escape_debug().nth(1) == Some(c)
}

/// Parses a storage key into name and offset; the inverse of [`storage_key`].
///
/// The key is parsed from the right, since a name can contain any character.
///
/// # Errors
/// `Kind::Damaged` if Python does not print this text for any such pair.
///
/// ```
/// use reshard_formats::metadata::parse_storage_key;
///
/// assert_eq!(parse_storage_key("('a, (1,))', (2,))")?, ("a, (1,))".into(), 2));
/// # Ok::<(), reshard_core::Error>(())
/// ```
pub fn parse_storage_key(key: &str) -> Result<(Cow<'_, str>, u64)> {
    let parsed = || {
        let (name, offset) = key
            .strip_prefix('(')?
            .strip_suffix(",))")?
            .rsplit_once(", (")?;
        let quote = name
            .chars()
            .next()
            .filter(|quote| matches!(quote, '\'' | '"'))?;
        let name = unescape(name.strip_prefix(quote)?.strip_suffix(quote)?, quote)?;
        let is_plain = offset.bytes().all(|digit| digit.is_ascii_digit())
            && (offset == "0" || !offset.starts_with('0'));
        let offset = offset.parse().ok().filter(|_| is_plain)?;
        Some((name, offset))
    };
    parsed().ok_or_else(|| {
        let problem = format!(
            "expected a key like `('name', (0,))`, found `{}`",
            Printable(key)
        );
        Error::damaged(problem)
    })
}

/// Decodes the text between the quotes; `None` if Python does not print it.
fn unescape(text: &str, quote: char) -> Option<Cow<'_, str>> {
    if !text.contains(['\\', quote]) {
        return Some(Cow::Borrowed(text));
    }
    let mut name = String::with_capacity(text.len());
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c == quote {
            return None;
        }
        if c != '\\' {
            name.push(c);
            continue;
        }
        let n_digits = match rest.next()? {
            c @ ('\\' | '\'' | '"') => {
                name.push(c);
                continue;
            }
            'n' => {
                name.push('\n');
                continue;
            }
            'r' => {
                name.push('\r');
                continue;
            }
            't' => {
                name.push('\t');
                continue;
            }
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => return None,
        };
        let code = (0..n_digits).try_fold(0_u32, |code, _| {
            Some(code.checked_mul(16)? + rest.next()?.to_digit(16)?)
        })?;
        name.push(char::from_u32(code)?);
    }
    Some(Cow::Owned(name))
}
