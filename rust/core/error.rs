//! The error type of the core. The kind classifies the error for the caller; the fields hold the details.
//!
//! Layers add context ([`Error::path`], [`Error::key`], [`Error::hint`]) and keep the message of the lower layer.

use std::any::Any;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The class of an error. Callers handle different kinds differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The operating system reported an error.
    Io,
    /// A file violates its format.
    Damaged,
    /// A required file does not exist.
    NotFound,
    /// Valid, but not supported.
    Unsupported,
    /// A layout is inconsistent with itself, its mesh or its tensor.
    Layout,
    /// Stored shards do not cover a tensor, or overlap.
    Coverage,
    /// There is no tensor with this name.
    Key,
    /// A shape or dtype differs from the expected one.
    Mismatch,
    /// An argument is invalid.
    Argument,
    /// The caller cancelled the operation.
    Cancelled,
}

/// An error with its details.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: Kind,
    message: String,
    path: Option<String>,
    key: Option<String>,
    hint: Option<String>,
    errno: Option<i32>,
    cause: Option<Arc<Cause>>,
}

/// An error of the caller that passes through the core.
struct Cause(Box<dyn Any + Send + Sync>);

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cause")
    }
}

impl PartialEq for Cause {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::addr_eq(&raw const *self.0, &raw const *other.0)
    }
}

impl Eq for Cause {}

/// A result with the error of the core.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Creates an error with a message.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            path: None,
            key: None,
            hint: None,
            errno: None,
            cause: None,
        }
    }

    /// Creates an error for one that a function of the caller returned; the caller gets it back from [`Self::cause`].
    pub fn caused_by(message: impl Into<String>, cause: impl Any + Send + Sync) -> Self {
        let mut this = Self::new(Kind::Io, message);
        this.cause = Some(Arc::new(Cause(Box::new(cause))));
        this
    }

    /// The error that a function of the caller returned.
    pub fn cause<T: Any>(&self) -> Option<&T> {
        self.cause.as_ref()?.0.downcast_ref()
    }

    /// Creates an error for a file that violates its format.
    pub fn damaged(message: impl Into<String>) -> Self {
        Self::new(Kind::Damaged, message)
    }

    /// Creates an error for an operation that the operating system rejected; `doing` describes the operation.
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

    /// Adds the path of the file, unless a lower layer already added one.
    #[must_use]
    pub fn path(mut self, path: &Path) -> Self {
        self.path
            .get_or_insert_with(|| path.to_string_lossy().into_owned());
        self
    }

    /// Adds the key of the tensor, unless a lower layer already added one.
    #[must_use]
    pub fn key(mut self, key: &str) -> Self {
        self.key.get_or_insert_with(|| key.to_owned());
        self
    }

    /// Adds a hint for the user, unless there is one.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint.get_or_insert(hint.into());
        self
    }

    /// Sets the error number of the system that describes the failure best.
    #[must_use]
    pub fn errno(mut self, errno: i32) -> Self {
        self.errno = Some(errno);
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

    /// The details: path, key, hint, error number of the system.
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

/// Text from a file for display: control characters, and characters that a terminal does not show or that change the
/// direction of others, are escaped, and long text is truncated.
///
/// ```
/// use reshard_core::error::Printable;
/// assert_eq!(Printable("a\u{1b}b\u{2028}c\u{feff}").to_string(), r"a\u{1b}b\u{2028}c\u{feff}");
/// assert_eq!(Printable("e\u{301} \u{5b57}").to_string(), "e\u{301} \u{5b57}");
/// ```
pub struct Printable<'a>(pub &'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX_CHARS: usize = 256;
        for (i, c) in self.0.chars().enumerate() {
            if i == MAX_CHARS {
                return f.write_str("...");
            }
            if c.is_control() || is_invisible(c) {
                write!(f, "{}", c.escape_unicode())?;
            } else {
                write!(f, "{c}")?;
            }
        }
        Ok(())
    }
}

/// Separators other than the space, and format characters of Unicode.
fn is_invisible(c: char) -> bool {
    (c.is_whitespace() && c != ' ')
        || matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}
