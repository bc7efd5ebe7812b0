//! Options of a bucket that hold for the process. What is not set is found as the SDK of the cloud finds it.

use crate::address::Address;
use crate::cache::Cache;
use reshard_core::{Error, Kind, Result};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How a bucket is reached.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Options {
    /// The URL of the service, such as that of a server with the interface of S3.
    pub endpoint: Option<String>,
    /// The region of the bucket.
    pub region: Option<String>,
    /// Requests have no signature, as for public buckets.
    pub anonymous: bool,
    /// Requests may be sent without TLS.
    pub allow_http: bool,
    /// How long a request that fails for a passing reason is tried again.
    pub retry_for: Option<Duration>,
    /// Where what is read is kept.
    pub cache: Option<Cache>,
}

/// Where what is read is kept of buckets whose options say nothing else.
static CACHE: Mutex<Option<Cache>> = Mutex::new(None);

/// Sets where this process keeps what it reads of buckets; `None`: nowhere.
pub fn set_cache(cache: Option<Cache>) {
    *CACHE.lock().unwrap_or_else(PoisonError::into_inner) = cache;
}

/// Where what is read of an address is kept.
pub(crate) fn cache_of(address: &Address) -> Option<Cache> {
    let of_process = CACHE.lock().unwrap_or_else(PoisonError::into_inner).clone();
    options_of(address).cache.or(of_process)
}

static OF_BUCKETS: Mutex<Option<HashMap<String, Options>>> = Mutex::new(None);

/// Sets the options of a bucket, such as `s3://bucket`, for this process.
///
/// # Errors
/// [`Kind::Argument`]: the bucket has other options already.
pub fn set_options(address: &Address, options: &Options) -> Result<()> {
    let mut all = OF_BUCKETS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = all
        .get_or_insert_default()
        .entry(address.root.clone())
        .or_insert_with(|| options.clone());
    if *known == *options {
        return Ok(());
    }
    let message = format!(
        "{} already has the options {known:?}, and {options:?} were given",
        address.shown()
    );
    Err(Error::new(Kind::Argument, message)
        .hint("a bucket has the same options everywhere in a process"))
}

/// The URLs of objects behind HTTP with their signatures, by the URL that is shown.
static SIGNED: Mutex<Option<HashMap<String, String>>> = Mutex::new(None);

/// Parts of queries that prove a permission, and do not name an object.
const OF_SIGNATURES: &str = "signature expires policy key-pair-id hash-algorithm awsaccesskeyid googleaccessid token \
    access_token sig se sp sv sr st ss srt spr sip sdd skoid sktid skt ske sks skv saoid suoid scid";

/// Keeps a URL of HTTP with its signature, which messages do not show; the newest one of an object counts.
///
/// # Errors
/// [`Kind::Argument`]: an earlier URL, which messages show alike, names another object.
pub fn set_url(address: &Address, url: &str) -> Result<()> {
    let mut all = SIGNED.lock().unwrap_or_else(PoisonError::into_inner);
    let all = all.get_or_insert_default();
    if let Some(known) = all.get(&address.root) {
        if url == address.root {
            return Ok(()); // as messages show it
        }
        if object_of(known) != object_of(url) {
            let message = format!(
                "the query of a URL {address} names another object than that of an earlier one, and messages show neither"
            );
            return Err(Error::new(Kind::Argument, message)
                .hint("read one of them in another process, or download it"));
        }
    }
    all.insert(address.root.clone(), url.to_owned());
    Ok(())
}

/// The query of a URL without a signature.
fn object_of(url: &str) -> Vec<(String, String)> {
    let is_of_signature = |name: &str| {
        let name = name.to_ascii_lowercase();
        name.starts_with("x-amz-")
            || name.starts_with("x-goog-")
            || OF_SIGNATURES.split_whitespace().any(|one| one == name)
    };
    let url = url::Url::parse(url).ok();
    let pairs = url.iter().flat_map(url::Url::query_pairs);
    let pairs = pairs.filter(|(name, _)| !is_of_signature(name));
    pairs
        .map(|(name, value)| (name.into_owned(), value.into_owned()))
        .collect()
}

/// The URL of an object behind HTTP with its signature, if it has one.
pub(crate) fn url_of(address: &Address) -> Option<String> {
    let all = SIGNED.lock().unwrap_or_else(PoisonError::into_inner);
    all.as_ref()?.get(&address.root).cloned()
}

/// The options of the bucket of an address.
pub(crate) fn options_of(address: &Address) -> Options {
    let all = OF_BUCKETS.lock().unwrap_or_else(PoisonError::into_inner);
    all.as_ref()
        .and_then(|all| all.get(&address.root))
        .cloned()
        .unwrap_or_default()
}
