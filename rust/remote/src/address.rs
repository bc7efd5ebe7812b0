//! URLs of objects and of buckets.

use reshard_core::error::Printable;
use reshard_core::{Error, Kind, Result};
use std::fmt;

/// The service that holds an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Service {
    /// S3, or another service with its interface.
    S3,
    /// Google Cloud Storage.
    Google,
    /// Azure Blob Storage.
    Azure,
    /// Any server of files.
    Http,
}

/// The name of an object, or of a folder: the part of the names of objects before a `/`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Address {
    /// Where it is.
    pub service: Service,
    /// `s3://bucket`, or for HTTP the complete URL, without a signature.
    pub root: String,
    /// The bucket, the container or the host.
    pub bucket: String,
    /// Its name in the bucket, without `/` at the ends; empty for the bucket itself, and for HTTP.
    pub key: String,
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Printable(&self.shown()))
    }
}

impl Address {
    /// Parses a URL.
    ///
    /// # Errors
    /// [`Kind::Argument`]: another scheme, no bucket, or a name that the service does not have.
    pub fn parse(url: &str) -> Result<Self> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let service = match scheme {
            "s3" => Service::S3,
            "gs" => Service::Google,
            "az" => Service::Azure,
            "http" | "https" => Service::Http,
            _ => {
                let message = format!(
                    "the URL {} has an unknown scheme",
                    Printable(&without_secrets(url))
                );
                return Err(Error::new(Kind::Argument, message)
                    .hint("expected s3://, gs://, az://, https:// or http://"));
            }
        };
        if service == Service::Http {
            let parsed = url::Url::parse(url)
                .ok()
                .filter(|url| url.host_str().is_some());
            let host = parsed.and_then(|url| url.host_str().map(str::to_owned));
            let Some(bucket) = host else {
                let message = format!("{} is not a URL", Printable(&without_secrets(url)));
                return Err(Error::new(Kind::Argument, message));
            };
            let (root, key) = (without_secrets(url), String::new());
            return Ok(Self {
                service,
                root,
                bucket,
                key,
            });
        }
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        let key = key.trim_matches('/');
        let is_plain = |name: &str| !matches!(name, "" | "." | "..");
        if bucket.is_empty() || bucket.contains(['@', '?', '#', ':']) {
            let message = format!(
                "{} does not name a bucket",
                Printable(&without_secrets(url))
            );
            return Err(Error::new(Kind::Argument, message)
                .hint("expected s3://bucket/folder; credentials do not belong into the URL"));
        }
        if !key.is_empty() && !key.split('/').all(is_plain) {
            let message = format!("{} has an empty name, `.` or `..` in it", Printable(url));
            return Err(Error::new(Kind::Argument, message));
        }
        Ok(Self {
            service,
            root: format!("{scheme}://{bucket}"),
            bucket: bucket.to_owned(),
            key: key.to_owned(),
        })
    }

    /// The URL for messages: without a name, a password and a query, which can hold a signature.
    pub fn shown(&self) -> String {
        match (self.service, self.key.is_empty()) {
            (Service::Http, _) | (_, true) => self.root.clone(),
            (_, false) => format!("{}/{}", self.root, self.key),
        }
    }
}

/// A URL without what can be secret in it.
pub fn without_secrets(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = host.rsplit('@').next().unwrap_or_default();
    format!("{scheme}://{host}{path}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_service_a_bucket_and_a_key() {
        for (url, service, root, key) in [
            ("s3://b/a/c.json", Service::S3, "s3://b", "a/c.json"),
            ("gs://b", Service::Google, "gs://b", ""),
            ("az://b/a/", Service::Azure, "az://b", "a"),
            ("https://h/a/b?s=1", Service::Http, "https://h/a/b", ""),
        ] {
            let address = Address::parse(url).unwrap();
            assert_eq!(
                (address.service, &*address.root, &*address.key),
                (service, root, key)
            );
        }
        for url in [
            "s3:///a",
            "s3://b/a//c",
            "s3://b/../c",
            "ftp://b/a",
            "b/a",
            "s3://u:p@b/a",
            "https://",
        ] {
            assert_eq!(
                Address::parse(url).unwrap_err().kind(),
                Kind::Argument,
                "{url}"
            );
        }
    }

    #[test]
    fn no_message_shows_what_is_secret_in_a_url() {
        for url in [
            "https://user:secret@h/a?sig=secret",
            "https://h/a#secret",
            "s3://user:secret@b/a",
            "ftp://user:secret@b/a?secret",
        ] {
            let shown = match Address::parse(url) {
                Ok(address) => format!("{address} {address:?} {}", address.root),
                Err(error) => format!("{error} {error:?}"),
            };
            assert!(!shown.contains("secret"), "{shown}");
        }
    }
}
