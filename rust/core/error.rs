//! The one error type of the core. A kind says what a caller can do about it; the fields hold the facts.
//!
//! Layers add context ([`Error::path`], [`Error::key`], [`Error::hint`]) and never reword what a lower layer said.

use std::fmt;
use std::path::Path;

/// What went wrong, as far as a caller's reaction differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The operating system failed a read or a write.
    Io,
    /// A file violates its format.
    Damaged,
    /// A file that should exist does not.
    NotFound,
    /// Valid, but not offered.
    Unsupported,
    /// A layout contradicts itself, its mesh or its tensor.
    Layout,
    /// Stored shards leave a hole or overlap.
    Coverage,
    /// No tensor of this name.
    Key,
    /// Shape or dtype of two things that must agree differ.
    Mismatch,
    /// A call that cannot be meant.
    Argument,
    /// The caller asked to stop.
    Cancelled,
}

/// An error with its facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: Kind,
    message: String,
    path: Option<String>,
    key: Option<String>,
    hint: Option<String>,
    errno: Option<i32>,
}

/// Result with the core's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of a kind with a message.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            path: None,
            key: None,
            hint: None,
            errno: None,
        }
    }

    /// A file violates its format.
    pub fn damaged(message: impl Into<String>) -> Self {
        Self::new(Kind::Damaged, message)
    }

    /// The operating system failed `doing`.
    pub fn io(doing: &str, path: &Path, error: &std::io::Error) -> Self {
        let kind = if error.kind() == std::io::ErrorKind::NotFound {
            Kind::NotFound
        } else {
            Kind::Io
        };
        let mut this = Self::new(
            kind,
            format!("{doing} {}: {error}", Printable(&path.to_string_lossy())),
        );
        this.errno = error.raw_os_error();
        this.path(path)
    }

    /// Adds the file concerned, unless a lower layer already named one.
    #[must_use]
    pub fn path(mut self, path: &Path) -> Self {
        self.path
            .get_or_insert_with(|| path.to_string_lossy().into_owned());
        self
    }

    /// Adds the tensor concerned, unless a lower layer already named one.
    #[must_use]
    pub fn key(mut self, key: &str) -> Self {
        self.key.get_or_insert_with(|| key.to_owned());
        self
    }

    /// Adds what to do next.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint.get_or_insert(hint.into());
        self
    }

    /// Puts `context: ` before the message.
    #[must_use]
    pub fn within(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// The kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The message without the hint.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The facts: path, key, hint, the system's error number.
    pub fn facts(&self) -> (Option<&str>, Option<&str>, Option<&str>, Option<i32>) {
        (
            self.path.as_deref(),
            self.key.as_deref(),
            self.hint.as_deref(),
            self.errno,
        )
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        self.hint
            .as_ref()
            .map_or(Ok(()), |hint| write!(f, "\nhint: {hint}"))
    }
}

impl std::error::Error for Error {}

/// Text from a file, safe to show: control characters escaped (a tensor's name must not drive a terminal), long text cut.
pub struct Printable<'a>(pub &'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX_CHARS: usize = 256;
        for (i, c) in self.0.chars().enumerate() {
            if i == MAX_CHARS {
                return f.write_str("...");
            }
            if c.is_control()
                || matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
            {
                write!(f, "{}", c.escape_unicode())?;
            } else {
                write!(f, "{c}")?;
            }
        }
        Ok(())
    }
}
