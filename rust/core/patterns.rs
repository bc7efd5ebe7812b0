//! Patterns over tensor keys: globs, regular expressions, and the index `{i}` in either.
//!
//! A pattern is a glob over the whole key in which only `*` and `?` are special, or `re:` and a regular expression that
//! matches the whole key. Patterns can come from untrusted files, so every search takes time linear in the key: globs
//! are matched greedily, and the regular expressions are those of the `regex` crate, which does not backtrack.
//!
//! [`Patterns`] finds the first of many patterns that matches a key. Patterns without a wildcard are looked up in a
//! table. Every other glob is indexed by one window of up to `WINDOW_BYTES` bytes of its literal text: the window that
//! the fewest globs contain. Only globs whose window occurs in a key are compared with the key. All regular expressions
//! are searched at once.

use crate::error::{Error, Kind, Printable, Result};
use regex::{Regex, RegexBuilder, RegexSet, RegexSetBuilder};
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Most characters of a pattern.
const MAX_CHARS: usize = 4096;
/// Most bytes of one compiled regular expression. It allows a few hundred characters with classes and counts.
const MAX_REGEX_BYTES: usize = 256 << 10;
/// Most bytes of all regular expressions that are searched together.
const MAX_SET_BYTES: usize = 16 << 20;
/// Deepest nesting of a regular expression.
const MAX_NESTING: u32 = 64;
/// Longest window of literal text by which a glob is indexed.
const WINDOW_BYTES: usize = 8;
/// Most slots of the estimate of how many globs contain a window.
const MAX_COUNT_SLOTS: usize = 1 << 18;
/// Most digits of an index.
const MAX_INDEX_DIGITS: usize = 18;
/// Limit of the total search time of one set of patterns. The patterns of typical layouts take milliseconds.
const MAX_SEARCH_NANOS: u64 = 60_000_000_000;

const INDEX: &str = "{i}";
/// Placeholder of the index in a regular expression: a letter without case that does not occur in tensor keys.
const MARK: char = '\u{16a0}';

/// A regular expression that is searched in linear time.
///
/// ```
/// use reshard_core::patterns::Expression;
///
/// let expression = Expression::new(r"layers\.(\d+)\.w")?;
/// assert!(!expression.matches("model.layers.12.w"));
/// assert_eq!(expression.groups("layers.12.w"), Some(vec![Some("12")]));
/// assert!(Expression::anywhere("[0-9]")?.matches("layers.12.w"));
/// # Ok::<(), reshard_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Expression(Regex);

impl Expression {
    /// Compiles a regular expression that matches the whole text.
    ///
    /// # Errors
    /// [`Kind::Argument`]: it is invalid, uses look-around or back-references, or is too large.
    pub fn new(text: &str) -> Result<Self> {
        Self::compiled(text, &whole(text))
    }

    /// Compiles a regular expression that matches any part of a text.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn anywhere(text: &str) -> Result<Self> {
        Self::compiled(text, text)
    }

    fn compiled(text: &str, wrapped: &str) -> Result<Self> {
        check_syntax(text)?;
        let built = RegexBuilder::new(wrapped)
            .size_limit(MAX_REGEX_BYTES)
            .dfa_size_limit(MAX_REGEX_BYTES)
            .nest_limit(MAX_NESTING)
            .build();
        built.map(Self).map_err(|error| refused(text, &error))
    }

    /// Whether it matches.
    pub fn matches(&self, text: &str) -> bool {
        self.0.is_match(text)
    }

    /// The text of each group; `None` if it does not match.
    pub fn groups<'t>(&self, text: &'t str) -> Option<Vec<Option<&'t str>>> {
        let found = self.0.captures(text)?;
        let groups = found.iter().skip(1);
        Some(groups.map(|group| group.map(|g| g.as_str())).collect())
    }
}

/// Wraps an expression so that it matches the whole text.
fn whole(text: &str) -> String {
    format!(r"\A(?:{text})\z")
}

/// Checks an expression without the group of [`whole`], inside which `a)|(b` would be balanced.
fn check_syntax(text: &str) -> Result<()> {
    let mut parser = regex_syntax::ParserBuilder::new()
        .nest_limit(MAX_NESTING)
        .build();
    parser
        .parse(text)
        .map(|_| ())
        .map_err(|error| invalid(text, &error.to_string()))
}

fn refused(text: &str, error: &regex::Error) -> Error {
    if !matches!(error, regex::Error::CompiledTooBig(_)) {
        return invalid(text, &error.to_string());
    }
    let message = format!("`re:{}` is too large once compiled", Printable(text));
    Error::new(Kind::Argument, message).hint(
        "use smaller counts, and `[0-9]` for `\\d` and `[A-Za-z0-9_]` for `\\w`, which match all scripts",
    )
}

fn invalid(text: &str, error: &str) -> Error {
    let why = error.lines().last().unwrap_or_default();
    let why = why.strip_prefix("error: ").unwrap_or(why);
    let hint = if why.contains("look-around") || why.contains("backreferences") {
        "look-around and back-references are not supported; put a rule for the exceptions before this one"
    } else {
        "the syntax is that of Python without look-around and back-references (the `regex` crate of Rust)"
    };
    let message = format!("`re:{}` does not compile: {why}", Printable(text));
    Error::new(Kind::Argument, message).hint(hint)
}

/// A glob over a whole text, split at its stars.
#[derive(Debug)]
struct Glob {
    first: Part,
    /// The parts between stars and the part after the last star; `None` if there is no star.
    rest: Option<(Vec<Part>, Part)>,
}

/// Text without a star.
#[derive(Debug)]
struct Part {
    text: String,
    /// Whether it contains a `?`.
    has_any: bool,
    n_chars: usize,
}

impl Part {
    fn new(text: &str) -> Self {
        Self {
            text: text.to_owned(),
            has_any: text.contains('?'),
            n_chars: text.chars().count(),
        }
    }

    /// Number of bytes that it matches at the start of `text`.
    fn at_start(&self, text: &str) -> Option<usize> {
        if !self.has_any {
            return text.starts_with(&self.text).then_some(self.text.len());
        }
        let mut found = text.char_indices();
        for expected in self.text.chars() {
            let (_, c) = found.next()?;
            if expected != '?' && expected != c {
                return None;
            }
        }
        Some(found.offset())
    }

    /// Start of its match at the end of `text`.
    fn at_end(&self, text: &str) -> Option<usize> {
        if !self.has_any {
            return text
                .ends_with(&self.text)
                .then(|| text.len() - self.text.len());
        }
        let at = text.char_indices().rev().nth(self.n_chars - 1)?.0;
        self.at_start(&text[at..]).map(|_| at)
    }

    /// End of its first match in `text`.
    fn first_end(&self, text: &str) -> Option<usize> {
        if !self.has_any {
            return text.find(&self.text).map(|at| at + self.text.len());
        }
        let starts = text.char_indices().map(|(at, _)| at);
        starts
            .into_iter()
            .find_map(|at| self.at_start(&text[at..]).map(|n| at + n))
    }
}

impl Glob {
    fn new(text: &str) -> Self {
        let mut parts = text.split('*').map(Part::new);
        let first = parts.next().unwrap_or_else(|| Part::new(""));
        let mut middle: Vec<_> = parts.collect();
        let rest = middle.pop().map(|last| {
            middle.retain(|part| !part.text.is_empty());
            (middle, last)
        });
        Self { first, rest }
    }

    /// Taking the first match of each part is sufficient, so there is no backtracking.
    fn matches(&self, text: &str) -> bool {
        let Some(start) = self.first.at_start(text) else {
            return false;
        };
        let Some((middle, last)) = &self.rest else {
            return start == text.len();
        };
        let mut text = &text[start..];
        let Some(end) = last.at_end(text) else {
            return false;
        };
        text = &text[..end];
        for part in middle {
            let Some(end) = part.first_end(text) else {
                return false;
            };
            text = &text[end..];
        }
        true
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        let rest = self
            .rest
            .iter()
            .flat_map(|(middle, last)| middle.iter().chain([last]));
        std::iter::once(&self.first).chain(rest)
    }

    /// Runs of literal text.
    fn literals(&self) -> impl Iterator<Item = &str> {
        self.parts()
            .flat_map(|part| part.text.split('?'))
            .filter(|run| !run.is_empty())
    }
}

/// Checks one pattern without compiling it. Returns whether it is a regular expression with special characters.
///
/// # Errors
/// [`Kind::Argument`]: it is empty, too long or not a valid regular expression. The compiled size is not checked.
pub fn check(text: &str) -> Result<bool> {
    check_length(text)?;
    let Some(expression) = text.strip_prefix("re:") else {
        return Ok(false);
    };
    check_syntax(expression)?;
    Ok(unescaped(expression).is_none())
}

/// A set of patterns, for the search of the first pattern that matches a key.
///
/// ```
/// use reshard_core::patterns::Patterns;
///
/// let patterns = Patterns::new(&["a.w", "*.b", r"re:layers\.\d+\.w", "*.w"])?;
/// let found: Vec<_> = ["a.w", "layers.3.w", "c.w", "c"].iter().map(|key| patterns.find(key)).collect::<Result<_, _>>()?;
/// assert_eq!(found, [Some(0), Some(2), Some(3), None]);
/// # Ok::<(), reshard_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Patterns {
    n: usize,
    /// For each key the numbers of the patterns that match only this key, ascending.
    exact: HashMap<String, Vec<u32>>,
    globs: Vec<(u32, Glob)>,
    /// For each length of window: the range of each window in `indexed`.
    windows: Vec<HashMap<u64, (u32, u32)>>,
    /// Positions in `globs`: first those of globs without a window, then window by window.
    indexed: Vec<u32>,
    n_without_window: usize,
    expressions: RegexSet,
    expression_numbers: Vec<u32>,
    searched_nanos: AtomicU64,
}

impl Patterns {
    /// Compiles patterns. They are numbered in their order.
    ///
    /// # Errors
    /// [`Kind::Argument`]: a pattern is empty, too long or not a valid regular expression, or all expressions together
    /// are too large.
    pub fn new<T: AsRef<str>>(texts: &[T]) -> Result<Self> {
        let mut exact: HashMap<String, Vec<u32>> = HashMap::new();
        let mut globs = Vec::new();
        let (mut expressions, mut expression_numbers) = (Vec::new(), Vec::new());
        for (n, text) in texts.iter().enumerate() {
            let (n, text) = (n as u32, text.as_ref());
            check_length(text)?;
            if let Some(expression) = text.strip_prefix("re:") {
                if let Some(key) = unescaped(expression) {
                    exact.entry(key).or_default().push(n);
                    continue;
                }
                check_syntax(expression)?;
                expressions.push(whole(expression));
                expression_numbers.push(n);
            } else if text.contains(['*', '?']) {
                globs.push((n, Glob::new(text)));
            } else {
                exact.entry(text.to_owned()).or_default().push(n);
            }
        }
        let max_bytes = if expressions.len() > 1 {
            MAX_SET_BYTES
        } else {
            MAX_REGEX_BYTES
        };
        let set = RegexSetBuilder::new(&expressions)
            .size_limit(max_bytes)
            .dfa_size_limit(MAX_REGEX_BYTES)
            .nest_limit(MAX_NESTING)
            .build();
        let expressions = set.map_err(|error| {
            if let &[number] = &expression_numbers[..] {
                let text = texts[number as usize].as_ref();
                return refused(text.strip_prefix("re:").unwrap_or(text), &error);
            }
            let message = format!(
                "{} regular expressions are too large together once compiled",
                expressions.len()
            );
            Error::new(Kind::Argument, message).hint("use globs where they match the same keys")
        })?;
        let mut this = Self {
            n: texts.len(),
            exact,
            globs,
            windows: vec![HashMap::new(); WINDOW_BYTES + 1],
            indexed: Vec::new(),
            n_without_window: 0,
            expressions,
            expression_numbers,
            searched_nanos: AtomicU64::new(0),
        };
        this.index_globs();
        Ok(this)
    }

    /// Indexes each glob by the window that the fewest globs contain.
    fn index_globs(&mut self) {
        let hasher = RandomState::new();
        // A single glob is compared with every key.
        let n_slots = if self.globs.len() > 1 {
            let n_windows: usize = self.globs.iter().map(|(_, g)| windows_of(g).count()).sum();
            (4 * n_windows).clamp(1, MAX_COUNT_SLOTS)
        } else {
            0
        };
        let slot =
            |window: u64, n_bytes: usize| hasher.hash_one((window, n_bytes)) as usize % n_slots;
        let mut counts = vec![0_u32; n_slots];
        if !counts.is_empty() {
            for (_, glob) in &self.globs {
                for (window, n_bytes) in windows_of(glob) {
                    let count = &mut counts[slot(window, n_bytes)];
                    *count = count.saturating_add(1);
                }
            }
        }
        let mut chosen: Vec<(Option<(usize, u64)>, u32)> = Vec::with_capacity(self.globs.len());
        for (at, (_, glob)) in self.globs.iter().enumerate() {
            let rarest = if counts.is_empty() {
                None
            } else {
                windows_of(glob).min_by_key(|&(window, n_bytes)| counts[slot(window, n_bytes)])
            };
            chosen.push((rarest.map(|(window, n_bytes)| (n_bytes, window)), at as u32));
        }
        chosen.sort_unstable();
        self.n_without_window = chosen.partition_point(|(window, _)| window.is_none());
        self.indexed = chosen.iter().map(|&(_, at)| at).collect();
        let mut start = self.n_without_window;
        for same in chosen[start..].chunk_by(|a, b| a.0 == b.0) {
            if let Some((n_bytes, window)) = same[0].0 {
                let end = start + same.len();
                self.windows[n_bytes].insert(window, (start as u32, end as u32));
                start = end;
            }
        }
    }

    /// Number of patterns.
    pub fn len(&self) -> usize {
        self.n
    }

    /// Whether there is no pattern.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// The number of the first pattern that matches the whole key.
    ///
    /// # Errors
    /// [`Kind::Argument`]: the searches of these patterns have exceeded the time limit in total.
    pub fn find(&self, key: &str) -> Result<Option<usize>> {
        self.timed(|| {
            let mut best = self.exact.get(key).map_or(u32::MAX, |numbers| numbers[0]);
            self.candidates(key, |number, glob| {
                if number < best && glob.matches(key) {
                    best = number;
                }
            });
            if self.expression_numbers.first().is_some_and(|&n| n < best)
                && let Some(at) = self.expressions.matches(key).iter().next()
            {
                best = best.min(self.expression_numbers[at]);
            }
            (best != u32::MAX).then_some(best as usize)
        })
    }

    /// The numbers of all patterns that match the whole key, ascending.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn find_all(&self, key: &str) -> Result<Vec<usize>> {
        self.timed(|| {
            let mut found: Vec<usize> = Vec::new();
            found.extend(
                self.exact
                    .get(key)
                    .into_iter()
                    .flatten()
                    .map(|&n| n as usize),
            );
            self.candidates(key, |number, glob| {
                if glob.matches(key) {
                    found.push(number as usize);
                }
            });
            let expressions = self.expressions.matches(key);
            found.extend(
                expressions
                    .iter()
                    .map(|at| self.expression_numbers[at] as usize),
            );
            found.sort_unstable();
            found
        })
    }

    /// For each pattern whether it matches one of the keys.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub fn used<'k>(&self, keys: impl IntoIterator<Item = &'k str>) -> Result<Vec<bool>> {
        let mut is_used = vec![false; self.n];
        for key in keys {
            self.timed(|| {
                for &number in self.exact.get(key).into_iter().flatten() {
                    is_used[number as usize] = true;
                }
                self.candidates(key, |number, glob| {
                    let is_used = &mut is_used[number as usize];
                    *is_used = *is_used || glob.matches(key);
                });
                for at in &self.expressions.matches(key) {
                    is_used[self.expression_numbers[at] as usize] = true;
                }
            })?;
        }
        Ok(is_used)
    }

    /// Calls `each` with every glob that may match the key, once.
    fn candidates(&self, key: &str, mut each: impl FnMut(u32, &Glob)) {
        let mut all = |indexed: &[u32]| {
            for &at in indexed {
                let (number, glob) = &self.globs[at as usize];
                each(*number, glob);
            }
        };
        all(&self.indexed[..self.n_without_window]);
        let mut seen: Vec<u32> = Vec::new();
        for (n_bytes, windows) in self.windows.iter().enumerate() {
            if windows.is_empty() {
                continue;
            }
            for window in key.as_bytes().windows(n_bytes) {
                if let Some(&(start, end)) = windows.get(&packed(window)) {
                    if seen.contains(&start) {
                        continue;
                    }
                    seen.push(start);
                    all(&self.indexed[start as usize..end as usize]);
                }
            }
        }
    }

    fn timed<T>(&self, search: impl FnOnce() -> T) -> Result<T> {
        if self.globs.len() <= 1 && self.expression_numbers.is_empty() {
            return Ok(search());
        }
        let started = Instant::now();
        let found = search();
        let nanos = started.elapsed().as_nanos() as u64;
        if self.searched_nanos.fetch_add(nanos, Ordering::Relaxed) + nanos > MAX_SEARCH_NANOS {
            let message = format!(
                "searching {} patterns took more than {} s",
                self.n,
                MAX_SEARCH_NANOS / 1_000_000_000
            );
            return Err(Error::new(Kind::Argument, message)
                .hint("write fewer patterns, or longer literal text in each"));
        }
        Ok(found)
    }
}

/// The windows of the literal text of a glob, of the largest possible size.
fn windows_of(glob: &Glob) -> impl Iterator<Item = (u64, usize)> {
    let longest = glob.literals().map(str::len).max().unwrap_or(0);
    let n_bytes = longest.min(WINDOW_BYTES);
    let literals = glob.literals().filter(move |run| run.len() >= n_bytes);
    literals.flat_map(move |run| {
        let windows = run.as_bytes().windows(n_bytes.max(1));
        windows.map(move |window| (packed(window), n_bytes))
    })
}

fn packed(window: &[u8]) -> u64 {
    window
        .iter()
        .fold(0, |packed, &byte| packed << 8 | u64::from(byte))
}

/// The only key that a regular expression without special characters matches.
fn unescaped(expression: &str) -> Option<String> {
    let mut key = String::with_capacity(expression.len());
    let mut chars = expression.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next()? {
                escaped
                    if escaped.is_ascii()
                        && !escaped.is_ascii_alphanumeric()
                        && !matches!(escaped, '<' | '>') =>
                {
                    key.push(escaped);
                }
                _ => return None,
            },
            '.' | '+' | '*' | '?' | '(' | ')' | '|' | '[' | ']' | '{' | '}' | '^' | '$' => {
                return None;
            }
            other => key.push(other),
        }
    }
    Some(key)
}

fn check_length(text: &str) -> Result<()> {
    if text.is_empty() {
        return Err(Error::new(Kind::Argument, "a pattern cannot be empty"));
    }
    if text.len() > MAX_CHARS {
        let n_chars = text.chars().count();
        if n_chars > MAX_CHARS {
            let message =
                format!("a pattern has at most {MAX_CHARS} characters, this one {n_chars}");
            return Err(Error::new(Kind::Argument, message));
        }
    }
    Ok(())
}

/// A pattern that contains `{i}` exactly once, for the digits of an index, such as that of a layer or an expert.
///
/// ```
/// use reshard_core::patterns::IndexPattern;
///
/// let pattern = IndexPattern::new("*.{i}.*")?;
/// assert_eq!(pattern.indices("layers.3.experts.5.w")?, [3, 5]);
/// # Ok::<(), reshard_core::Error>(())
/// ```
#[derive(Debug)]
pub struct IndexPattern(IndexForm);

#[derive(Debug)]
enum IndexForm {
    /// The text left and right of the index.
    Glob(Glob, Glob),
    /// The expression with any digits for the index, and with [`MARK`] for the index.
    Expression(Box<(Expression, Expression)>),
}

impl IndexPattern {
    /// Compiles a pattern with one `{i}`.
    ///
    /// # Errors
    /// [`Kind::Argument`]: it does not contain `{i}` exactly once, or is invalid.
    pub fn new(text: &str) -> Result<Self> {
        check_length(text)?;
        let Some((before, after)) = text
            .split_once(INDEX)
            .filter(|(_, after)| !after.contains(INDEX))
        else {
            let message = format!("`{}` must contain `{INDEX}` exactly once", Printable(text));
            return Err(Error::new(Kind::Argument, message));
        };
        let Some(before_in) = before.strip_prefix("re:") else {
            return Ok(Self(IndexForm::Glob(Glob::new(before), Glob::new(after))));
        };
        let digits = Expression::new(&format!("{before_in}(?:[0-9]+){after}"))?;
        let marked = Expression::new(&format!("{before_in}{MARK}{after}"))?;
        Ok(Self(IndexForm::Expression(Box::new((digits, marked)))))
    }

    /// The possible values of `{i}` for a key, ascending. If there are more than one, the match is ambiguous, and two
    /// are returned.
    ///
    /// # Errors
    /// [`Kind::Argument`]: an index has too many digits.
    pub fn indices(&self, key: &str) -> Result<Vec<u64>> {
        let mut found = BTreeSet::new();
        match &self.0 {
            IndexForm::Glob(before, after) => {
                for (start, end) in digit_runs(key) {
                    let ends: Vec<_> = (start + 1..=end)
                        .filter(|&e| after.matches(&key[e..]))
                        .collect();
                    if ends.is_empty() {
                        continue;
                    }
                    for s in (start..end).filter(|&s| before.matches(&key[..s])) {
                        for &e in ends.iter().filter(|&&e| e > s) {
                            found.insert(index(&key[s..e])?);
                            if found.len() > 1 {
                                return Ok(found.into_iter().collect());
                            }
                        }
                    }
                }
            }
            IndexForm::Expression(both) => {
                let (digits, marked) = &**both;
                if !digits.matches(key) {
                    return Ok(Vec::new());
                }
                if key.contains(MARK) {
                    let message = format!(
                        "`{}` contains the letter `{MARK}`, which is not supported in a key with an index",
                        Printable(key)
                    );
                    return Err(Error::new(Kind::Argument, message));
                }
                for (start, end) in digit_runs(key) {
                    for s in start..end {
                        for e in s + 1..=end.min(s + MAX_INDEX_DIGITS) {
                            if marked.matches(&format!("{}{MARK}{}", &key[..s], &key[e..])) {
                                found.insert(index(&key[s..e])?);
                                if found.len() > 1 {
                                    return Ok(found.into_iter().collect());
                                }
                            }
                        }
                    }
                }
                if found.is_empty() {
                    let message = format!(
                        "the index in `{}` has more than {MAX_INDEX_DIGITS} digits",
                        Printable(key)
                    );
                    return Err(Error::new(Kind::Argument, message));
                }
            }
        }
        Ok(found.into_iter().collect())
    }
}

/// Start and end of each run of digits.
fn digit_runs(key: &str) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (at, byte) in key.bytes().enumerate() {
        if !byte.is_ascii_digit() {
            continue;
        }
        match runs.last_mut() {
            Some((_, end)) if *end == at => *end = at + 1,
            _ => runs.push((at, at + 1)),
        }
    }
    runs
}

fn index(digits: &str) -> Result<u64> {
    if digits.len() <= MAX_INDEX_DIGITS
        && let Ok(index) = digits.parse()
    {
        return Ok(index);
    }
    let message = format!(
        "the index `{}` has more than {MAX_INDEX_DIGITS} digits",
        Printable(digits)
    );
    Err(Error::new(Kind::Argument, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literal_expressions_are_looked_up() {
        for (text, key) in [
            (r"odd\*name", Some("odd*name")),
            (r"a\.b", Some("a.b")),
            ("a.b", None),
            (r"a\d", None),
        ] {
            assert_eq!(unescaped(text).as_deref(), key, "{text}");
        }
    }

    #[test]
    fn a_glob_is_found_for_every_window() {
        let texts: Vec<String> = (0..2000)
            .map(|i| format!("layers.{i}.*.w?ight"))
            .chain(["*?".into(), "a*".into(), "*.b".into()])
            .collect();
        let patterns = Patterns::new(&texts).unwrap();
        for i in [0, 7, 1999] {
            assert_eq!(
                patterns.find(&format!("layers.{i}.mlp.weight")).unwrap(),
                Some(i)
            );
        }
        assert_eq!(patterns.find("ab").unwrap(), Some(2000));
        assert_eq!(patterns.find_all("a.b").unwrap(), [2000, 2001, 2002]);
        assert_eq!(patterns.find("").unwrap(), None);
        let used = patterns.used(["layers.7.x.weight", "c"]).unwrap();
        let used: Vec<_> = (0..used.len()).filter(|&n| used[n]).collect();
        assert_eq!(used, [7, 2000]);
    }
}
